"""Find the WAV files in a folder of recordings by their names, and warn of what is left out."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from data_pipeline.core.errors import UserError
from data_pipeline.sources import visible

logger = logging.getLogger(__name__)


def recordings_in(folder: Path, names: str, *, form: str, others: list[Path]) -> list[re.Match[str]]:
    """Return how the name of each WAV file matches `names`, in capitals or not. Add other visible entries to `others`.

    Raises `UserError` if there is no WAV file, or if one has another name than `form`, the pattern in words.
    """
    found = []
    for path in visible(folder):
        if path.suffix.lower() != ".wav":
            others.append(path)
        elif match := re.fullmatch(names, path.name, re.IGNORECASE):
            found.append(match)
        else:
            raise UserError(f"{path} is not named {form}, as the published files are; rename or remove it")
    if not found:
        raise UserError(f"{folder} holds no WAV files; copy the published recordings there")
    return found


def warn_of_ignored(root: Path, others: Sequence[Path]) -> None:
    """Log a warning of the entries that were left out, if there are any."""
    if others:
        logger.warning("%s: ignored %d entries that are no .wav, such as %s", root, len(others), others[0])
