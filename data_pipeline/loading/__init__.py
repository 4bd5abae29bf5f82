"""Read a dataset as batches.

A sample passes these modules in this order:

    order        seed, step, rank           -> (B,) indices of samples
    storage      `SampleStore.read`         -> `StoredSamples`: bytes in a memory-mapped shard, fetched if it is remote
    decode       `decode`                   -> `DecodedSamples`: pictures or sounds, masks and labels; bad samples
    collate      `BatchMaker.collate`       -> `Batch`: sounds cropped to one length, still clean
    collate      `BatchMaker.apply_overlay` -> `Batch`: with the online overlay, on the training device
    placement    `place_data`               -> the whole dataset as one `DecodedSamples` in memory, if it fits
    stream       `Stream`                   -> one finished `Batch` a step

A dataset in memory skips storage and decode at each step: its rows are taken by index, then collated as above. Probes
(`trainer.probes.features`) call the same functions without an order.
"""
