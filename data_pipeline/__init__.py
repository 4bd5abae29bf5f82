"""Bytes to shards to batches; knows nothing of training.

A *source* yields clean pictures with a base label, an *overlay* draws a second, labelled object on each, and `build`
writes the result as WebDataset shards beside a manifest. The *stream* reads those shards back as batches: the order of
an epoch is one seeded permutation of all samples, cut into global batches, of which each rank takes its slice. What may
never happen: a batch that depends on the number of ranks or workers, a sample seen twice in an epoch, or a random draw
that is not derived from (seed, purpose, index).

    source -> overlay -> shard -> stream -> batch
"""
