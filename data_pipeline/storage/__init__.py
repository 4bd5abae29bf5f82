"""Read and write datasets on disk: manifests, shards, indexes."""

__all__: list[str] = []
