"""Folders of pictures, opened as a build opens them."""

from __future__ import annotations

from pathlib import Path

from data_pipeline.sources import SourceInputs
from data_pipeline.sources.folder import Folder, PictureFiles


def open_folder(root: Path, *, split: str, seed: int = 0, **options: str | float | Path | None) -> PictureFiles:
    """Open one split of the source folder with its options."""
    given = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    return Folder.open(
        SourceInputs(
            base="folder",
            root=root,
            split=split,
            seed=seed,
            limit=None,
            options={name: value for name, value in given.items() if value is not None},
        )
    )
