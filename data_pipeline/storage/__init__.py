"""Read and write datasets on disk: manifests, shards, indexes."""

from typing import TYPE_CHECKING

from data_pipeline.core.imports import imported_when_used

if TYPE_CHECKING:
    from data_pipeline.storage.manifest import Manifest, load_manifest
    from data_pipeline.storage.store import SampleStore
else:
    __getattr__ = imported_when_used(__name__, {"manifest": "Manifest load_manifest", "store": "SampleStore"})

__all__ = ["Manifest", "SampleStore", "load_manifest"]
