"""Read a dataset as batches: order, decoding, placement, stream."""
