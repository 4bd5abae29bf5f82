"""Errors, config schemas, random keys, progress, the sample and the system: what every other room needs."""

from typing import TYPE_CHECKING

from data_pipeline.core.imports import imported_when_used

if TYPE_CHECKING:
    from data_pipeline.core.batch import Batch
    from data_pipeline.core.counter_rng import DrawKeys, keys_of_rows
    from data_pipeline.core.errors import UserError
    from data_pipeline.core.sample import NO_LABEL
else:
    __getattr__ = imported_when_used(
        __name__,
        {"batch": "Batch", "counter_rng": "DrawKeys keys_of_rows", "errors": "UserError", "sample": "NO_LABEL"},
    )

__all__ = ["NO_LABEL", "Batch", "DrawKeys", "UserError", "keys_of_rows"]
