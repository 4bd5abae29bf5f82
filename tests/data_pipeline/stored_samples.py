"""One stored sample, decoded, and all problems of a dataset, as tests read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import Sample
from data_pipeline.loading.decode import decode
from data_pipeline.storage.store import SampleStore
from data_pipeline.tools.verify import verify


def decode_sample(store: SampleStore, index: int) -> Sample:
    """Read and decode one sample; a negative index counts from the end.

    Raises `IndexError` if there is no such sample, and `UserError` if it cannot be read.
    """
    decoded = decode(store, np.array([range(len(store))[index]], dtype=np.int64))
    for bad in decoded.bad.values():
        raise UserError(
            f"{store.location}: sample {bad.key} in {bad.shard} cannot be read ({bad.reason}); find all problems with "
            "`python -m data_pipeline verify`, then copy it again or build the dataset again"
        )
    content: NDArray[Any]
    if decoded.pictures_BCHW is None:
        content = decoded.sound(0).numpy()
    else:
        content = decoded.pictures_BCHW[0].permute(1, 2, 0).contiguous().numpy()
    return Sample(
        index=int(decoded.index_B[0]),
        content=content,
        mask=None if decoded.masks_BHW is None else decoded.masks_BHW[0].numpy(),
        labels={name: int(label_B[0]) for name, label_B in decoded.labels.items()},
    )


def find_problems(location: str | Path) -> list[str]:
    """Return every problem of a dataset, as `verify` reports them."""
    problems = list[str]()
    verify(location, problems.append)
    return problems
