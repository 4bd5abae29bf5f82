"""Read pictures and sounds from the Hub's Parquet files, and from what `datasets` saves to disk.

A table has a column of files, bytes or a struct of `bytes` and `path`, and columns of labels. Each row is a file
`SPLIT/NUMBER.ENDING`. SPLIT is how the name of a Parquet file begins, or the folder of an arrow file.

An arrow file is mapped into memory, and any row is read alone. A Parquet file is read in groups of rows, often of 100
MB, so it is first copied to an arrow file in a temporary folder, in small batches.
"""

from __future__ import annotations

import json
import logging
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from data_pipeline.core.errors import UserError
from data_pipeline.core.imports import check_installed
from data_pipeline.core.label_words import as_word
from data_pipeline.core.schema import is_label_name
from data_pipeline.sources.files import Files, ending_of

logger = logging.getLogger(__name__)

_PLACES: Final = ("*.parquet", "data/*.parquet", "train*/*.parquet", "test*/*.parquet", "val*/*.parquet", "*.arrow")
_NAMES_SPLITS: Final = "dataset_dict.json"  # in the folder of a dataset on disk with several splits
_NUM_AT_ONCE: Final = 100  # rows that are copied at once
_NUM_BUFFERED: Final = 2**20  # bytes; without a buffer, whole groups of rows are in memory


class NoContentError(UserError):
    """Tables without a column of files."""


def tables_in(root: Path) -> dict[str, list[Path]]:
    """Return the tables of each split: of a Parquet file, of a folder or of a dataset on disk; {} if there are none."""
    places = (*_PLACES, "*/*.arrow") if (root / _NAMES_SPLITS).is_file() else _PLACES
    found: dict[str, list[Path]] = {}
    for path in sorted(path for place in places for path in root.glob(place)) if root.is_dir() else [root]:
        if path.suffix in (".parquet", ".arrow"):
            first = path.stem.partition("-")[0]
            found.setdefault(path.parent.name if first == "data" or first.isdigit() else first, []).append(path)
    return dict(sorted(found.items()))


class ArrowFiles(Files):
    """The files of tables, with other columns as labels. Copies of Parquet files last as long as the first object.

    Raises `UserError` if pyarrow is missing, or if a table is damaged or has no column of files.
    """

    def __init__(self, root: Path, copies: Path | None = None) -> None:
        super().__init__(root)
        check_installed("pyarrow", extra="parquet", user=str(root))
        self._arrow, self._parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
        self._compute = import_module("pyarrow.compute")
        self._copies, splits = copies, tables_in(root)
        features, kinds = dict[str, Any](), dict[str, str]()
        schemas = {split: self._schema(paths[0]) for split, paths in splits.items()}
        for schema in schemas.values():
            described = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
            features |= described.get("info", {}).get("features", {})
            kinds |= {field.name: str(field.type) for field in schema}
        contents = [name for name, kind in kinds.items() if re.match("(large_)?binary|struct<bytes", kind)]
        if not contents:
            raise NoContentError(f"{root} has no column of files, only {', '.join(kinds)}; name tables that have one")
        self._column, self._has_names = contents[0], "path" in kinds[contents[0]]
        is_sound = features.get(self._column, {}).get("_type", self._column).lower() == "audio"
        self._ending = ".wav" if is_sound else ".png"  # as `datasets` encodes them; others are known by their content
        nested = re.compile("binary|large_(?!string)|list|struct|map|fixed")
        self._labels = [name for name, kind in kinds.items() if is_label_name(name) and not nested.match(kind)]
        named = {name: features.get(name, {}).get("names") for name in self._labels}
        self.classes = {name: tuple(as_word(each) or each for each in names) for name, names in named.items() if names}
        if left_out := kinds.keys() - {self._column, *self._labels}:
            logger.info("%s: left out the columns %s", root, ", ".join(sorted(left_out)))
        self._tables: dict[str, Any] = {}
        for split, schema in schemas.items():
            if self._column in schema.names:
                names = [name for name in schema.names if name in {self._column, *self._labels}]
                self._tables[split] = self._mapped(split, splits[split], names)
            else:
                logger.warning("%s: left out %s, which has no column %s", root, splits[split], self._column)

    def __reduce__(self) -> tuple[Callable[..., Files], tuple[Path | None, ...]]:
        return type(self), (self.root, self._copies)

    def find(self, others: dict[str, str]) -> Iterator[str]:
        for split, table in self._tables.items():
            column = table.column(self._column)
            paths = self._compute.struct_field(column, "path").to_pylist() if self._has_names else [None] * len(column)
            yield from (f"{split}/{row:08d}{ending_of(path or '') or self._ending}" for row, path in enumerate(paths))

    def read(self, name: str) -> bytes:
        split, _, number = name.partition("/")
        row = self._tables[split].column(self._column)[int(number.partition(".")[0])].as_py()
        content = row["bytes"] if isinstance(row, dict) else row
        if content is None:
            raise ValueError(f"its row has no bytes, only {row}; save the dataset with the bytes of its files")
        return bytes(content)

    @cached_property
    def columns(self) -> dict[str, list[str]]:
        tables = self._tables.values()
        return {name: [word for table in tables for word in self._words(table, name)] for name in self._labels}

    def _words(self, table: Any, name: str) -> Iterable[str]:
        if name not in table.column_names:
            return [""] * table.num_rows
        column = table.column(name)
        if (classes := self.classes.get(name)) is not None:
            return ("" if number is None or number < 0 else classes[number] for number in column.to_pylist())
        return map(as_word, column.cast(self._arrow.string()).to_pylist())

    def _schema(self, path: Path) -> Any:
        return self._opened(path).schema_arrow if path.suffix == ".parquet" else self._opened(path).schema

    def _opened(self, path: Path, **how: Any) -> Any:
        """Return a table that is mapped into memory, or an opened Parquet file."""
        try:
            if path.suffix == ".parquet":
                return self._parquet.ParquetFile(path, **how)
            return self._arrow.ipc.open_stream(self._arrow.memory_map(str(path))).read_all()
        except (OSError, self._arrow.ArrowInvalid) as error:
            raise UserError(f"{path} cannot be read ({error}); copy or download it again") from None

    def _mapped(self, split: str, paths: list[Path], names: list[str]) -> Any:
        """Return some columns of the tables of a split, mapped into memory."""
        if paths[0].suffix == ".parquet":
            paths = [self._copy_of(split, paths, names)]
        return self._arrow.concat_tables([self._opened(path).select(names) for path in paths])

    def _copy_of(self, split: str, paths: list[Path], names: list[str]) -> Path:
        if self._copies is None:
            self._holds_copies = tempfile.TemporaryDirectory(prefix="parquet-", ignore_cleanup_errors=True)
            self._copies = Path(self._holds_copies.name)
        copy = self._copies / f"{split}.arrow"
        if not copy.exists():
            with self._arrow.OSFile(str(copy), "wb") as file:
                writer = None
                for path in paths:
                    table = self._opened(path, buffer_size=_NUM_BUFFERED, pre_buffer=False)
                    for batch in table.iter_batches(_NUM_AT_ONCE, columns=names, use_threads=False):
                        writer = writer or self._arrow.ipc.new_stream(file, batch.schema)
                        writer.write_batch(batch)
                if writer is not None:
                    writer.close()
        return copy
