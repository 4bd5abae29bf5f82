"""Build datasets of shards, and read them as batches; independent of training.

A *source* yields clean pictures with a base label, an *overlay* draws a second, labelled object on each, and `build`
writes the result as WebDataset shards beside a manifest. The *stream* reads those shards as batches: the order of an
epoch is one seeded permutation of all samples, cut into global batches, of which each rank takes its part.

Guarantees: no batch depends on the number of ranks or workers, no sample is seen twice in an epoch, and every random
draw is derived from (seed, purpose, index).

    source -> overlay -> shard -> stream -> batch
"""
