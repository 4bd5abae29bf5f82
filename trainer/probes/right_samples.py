"""Keep in a result which test samples a probe gets right, one bit each.

Two encoders can then be compared sample by sample. Their accuracies on the same test samples share the luck of the
draw: a sample that is hard for one is often hard for the other. Differences of single samples leave that out, and so
tell smaller differences from chance.
"""

from __future__ import annotations

import base64
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline.core.sample import NO_LABEL

MOST_SAMPLES: Final = 100_000  # whose bits are kept, so that a result stays a small file


def pack_right(class_N: Tensor, label_N: Tensor) -> str | None:
    """Return the bits as base64: 1 for each labelled test sample whose class is right, in the order of the dataset.

    `class_N` and `label_N` are (N,) int64; a sample with `NO_LABEL` has no bit. Returns None for more than
    `MOST_SAMPLES` bits.
    """
    classes_N, labels_N = class_N.cpu().numpy(), label_N.cpu().numpy()
    right_L = (classes_N == labels_N)[labels_N != NO_LABEL]
    if len(right_L) > MOST_SAMPLES:
        return None
    return base64.b64encode(np.packbits(right_L).tobytes()).decode()


def unpack_right(text: str, *, num_test: int) -> NDArray[np.bool_] | None:
    """Return which of the `num_test` labelled test samples are right, (num_test,) bool; None if the text is damaged.

    Examples:
        >>> unpack_right("oA==", num_test=3).tolist()  # bits 1010 0000
        [True, False, True]
    """
    try:
        packed = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.uint8)
    except ValueError:
        return None
    return np.unpackbits(packed)[:num_test].astype(bool) if len(packed) == -(-num_test // 8) else None
