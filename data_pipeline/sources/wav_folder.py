"""Find the WAV files in a folder of recordings, and warn of what is left out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)


def wav_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the WAV files in a folder and the other entries, without hidden ones."""
    entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    are_wav = [path.suffix.lower() == ".wav" for path in entries]
    wavs = [path for path, is_wav in zip(entries, are_wav, strict=True) if is_wav]
    return wavs, [path for path, is_wav in zip(entries, are_wav, strict=True) if not is_wav]


def warn_of_ignored(root: Path, others: Sequence[Path]) -> None:
    """Log a warning of the entries that were left out, if there are any."""
    if others:
        logger.warning(
            "%s: ignored %d entries without the ending .wav, such as %s; convert other recordings to WAV to use them",
            root,
            len(others),
            others[0],
        )
