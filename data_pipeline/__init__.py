"""Build datasets of shards, and read them as batches; independent of training.

A *source* yields clean pictures with a base label. An *overlay* draws a second, labelled object on each. `build` writes
the result as WebDataset shards and a manifest. The *stream* reads the shards as batches: one seeded permutation of all
samples is the order of an epoch. It is cut into global batches, and each rank takes its part of every batch.

Guarantees: no batch depends on the number of ranks or workers, no sample is seen twice in an epoch, and every random
draw is derived from (seed, purpose, index).

    source -> overlay -> shard -> stream -> batch
"""

__all__: list[str] = []
