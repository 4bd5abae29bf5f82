"""Read pictures from a folder or a zip of any layout that `find_layout` knows."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from pydantic import Field

from data_pipeline.core.errors import UserError
from data_pipeline.core.options import SOURCE_OPTION
from data_pipeline.core.sample import Record
from data_pipeline.core.schema import ImageSize, Schema
from data_pipeline.sources import SourceInputs, first_record
from data_pipeline.sources.layout import Layout
from data_pipeline.sources.picture_file import read_pixels
from data_pipeline.sources.splits import SplitFiles, SplitOptions, open_split


class PictureFiles(SplitFiles):
    """The pictures of one split, and their labels.

    Args:
        found: the records of the split.
        description: the kind of source, for the manifest.
        image_size: the size to which each picture is brought, as torchvision's `Resize` and `CenterCrop` do; if it is
            None, all must have the size of the first.

    Reading a record raises `UserError` with the name of the file if it does not decode or has another size.
    """

    def __init__(self, found: Layout, description: str, *, image_size: int | None) -> None:
        super().__init__(found, description)
        self.image_size = image_size
        self._first, self._shape = "", tuple[int, ...]()
        first = first_record(self, range(len(found.names)))
        self._first, self._shape = first.file, first.content.shape

    def name(self, number: int) -> str:
        """Return the path of the file of a record below the root of the source."""
        return self._names[number]

    def __getitem__(self, number: int) -> Record:
        name = self.name(number)
        pixels = self.files.decoded(name, partial(read_pixels, image_size=self.image_size))
        if self._shape and pixels.shape != self._shape:
            seen, first = (f"{width}x{height} pixels" for height, width, _ in (pixels.shape, self._shape))
            raise UserError(
                f"{self.files.root / name} is {seen} but {self.files.root / self._first} is {first}; bring all "
                f"pictures to one size with {SOURCE_OPTION} image_size=N"
            )
        return Record(pixels, name)


class FolderOptions(SplitOptions):
    """The options of the source folder. They stand in the description of the source.

    image_size: width and height in pixels to which each picture is brought; by default, all must have one size.
    """

    image_size: ImageSize | None = Field(None, exclude=True)


class Folder:
    """The source folder: pictures in class folders, with the labels of a table, or without labels."""

    options_schema: ClassVar[type[Schema]] = FolderOptions

    @classmethod
    def open(cls, given: SourceInputs) -> PictureFiles:
        options = given.read(FolderOptions)
        _, found = open_split(given, "picture", options)
        size = "" if options.image_size is None else f", middle {options.image_size}x{options.image_size}"
        return PictureFiles(found, f"{found.kind}{size}{found.drawn}", image_size=options.image_size)
