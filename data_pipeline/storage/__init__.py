"""Read and write datasets on disk: manifests, shards, indexes."""
