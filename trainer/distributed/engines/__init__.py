"""Turn a loss into one step of a module over all ranks: DistributedDataParallel or DeepSpeed."""
