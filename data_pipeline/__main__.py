"""`python -m data_pipeline COMMAND`: look at, build, check and show datasets."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

from data_pipeline.building.datasets import (
    BOTH,
    DIGITS,
    NUM_SAMPLES_PER_SHARD,
    OVERLAY_MODES,
    PICTURE_OVERLAYS,
    SPLITS,
    TAR_PICTURE_SIZE,
    describe_datasets,
)
from data_pipeline.core.arguments import positive, program, whole
from data_pipeline.core.errors import UserError, run_command
from data_pipeline.core.imports import add_code_argument, import_code
from data_pipeline.core.options import OVERLAY_OPTION, SOURCE_OPTION, add_option_argument
from data_pipeline.core.system import num_cores
from data_pipeline.storage.locations import PICTURE_FIELDS

_LOCATION_HELP: Final = "A built dataset: a directory, http(s)://HOST/DIR or s3://BUCKET/DIR. Or indexed tars."


class Parser(argparse.ArgumentParser):
    """A parser that reports a wrong argument in one sentence, like every other mistake of the user."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`")


def _add_overlay_options(parser: argparse.ArgumentParser) -> None:
    add_option_argument(
        parser, OVERLAY_OPTION, "An option of the overlay, such as bits=10, digits=sklearn or layout=tiled."
    )


def _build(parser: argparse.ArgumentParser) -> None:
    """Build a dataset: shards and a manifest."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "%(prog)s DATASET --out DIR [options]"
    parser.epilog = describe_datasets()
    add = parser.add_argument
    add("dataset", metavar="DATASET", help="The dataset to build, one of the list below.")
    add("--out", metavar="DIR", type=Path, required=True, help="The directory to write the dataset to.")
    add("--source", metavar="S", help="Where the data comes from, one of the list below.")
    add("--root", metavar="PATH", type=Path, help="The directory that holds the files of the source.")
    add(
        "--split",
        choices=(*SPLITS, BOTH),
        default="train",
        help=f"The split to build (default: train); {BOTH} builds DIR/train and DIR/test.",
    )
    add("--seed", metavar="N", type=whole, default=0, help="The seed of order and overlays (default: 0).")
    add("--limit", metavar="N", type=positive, help="Use at most N records, balanced over the classes.")
    add(
        "--overlay",
        choices=OVERLAY_MODES,
        help="Draw overlays into the shards (default) or again at each reading.",
    )
    _add_overlay_options(parser)
    add_option_argument(
        parser,
        SOURCE_OPTION,
        "An option of the source, such as image_size=64, or labels=labels.csv and test_share=0.2 for a folder.",
    )
    add(
        "--repeats",
        metavar="R",
        type=positive,
        default=1,
        help="Store each record R times, with other overlays.",
    )
    add(
        "--skip-bad",
        metavar="N",
        type=whole,
        default=0,
        help="Leave out up to N records that cannot be read (default: 0). DIR.bad.txt beside --out lists them.",
    )
    add(
        "--keep",
        action="store_true",
        help="For the dataset folder: keep the files as they are, of any size, and bring them to image_size (default: "
        f"{TAR_PICTURE_SIZE}) when they are read.",
    )
    add(
        "--samples-per-shard",
        metavar="N",
        type=positive,
        default=NUM_SAMPLES_PER_SHARD,
        help="The number of samples in a shard (default: %(default)s).",
    )
    _add_workers(parser)


def _index(parser: argparse.ArgumentParser) -> None:
    """Index WebDataset tars, so that they can be trained from as they are."""
    add = parser.add_argument
    add(
        "location",
        metavar="LOCATION",
        help="A directory of tars, a tar, or a pattern such as 'train-{000000..001281}.tar'.",
    )
    add("--out", metavar="DIR", type=Path, help="The directory of the index (default: beside the tars).")
    add(
        "--image",
        metavar="EXTENSIONS",
        help="The extensions of the pictures; of each sample the first that it has is read (default: those of "
        f"--classes-of, or '{';'.join(PICTURE_FIELDS)}').",
    )
    add(
        "--label",
        metavar="FIELD|NAME=FIELD",
        action="append",
        help="The extension of the label, such as cls or txt; json:path.to.label for an entry of a JSON file; path:0 "
        "for the first folder of a file, path:-1 for its last; or tar for the name of its tar (default: that of "
        "--classes-of, or cls, label or class, if there is one). Give it several times, with names, "
        "for several labels: --label base=cls --label colour=json:attr.colour.",
    )
    add(
        "--size",
        metavar="N",
        type=positive,
        help="Resize pictures to NxN pixels when they are read (default: the size of --classes-of, or "
        f"{TAR_PICTURE_SIZE}).",
    )
    add(
        "--classes-of",
        metavar="LOCATION",
        type=Path,
        help="Number the classes as the index of these tars does, and take its --image, --label and --size unless they "
        "are given. For a test set, give the location of its train set.",
    )
    add(
        "--overlay",
        metavar="|".join(PICTURE_OVERLAYS),
        help="Draw this on the pictures each time they are read (default: nothing).",
    )
    _add_overlay_options(parser)
    add("--split", choices=SPLITS, default="train", help="The split of the digits (default: train).")
    _add_workers(parser)


def _look(parser: argparse.ArgumentParser) -> None:
    """Say what pictures or sounds you have, what is wrong with them, and how to build them."""
    add = parser.add_argument
    add("paths", metavar="PATH", nargs="+", help="A folder, a zip, tars, a table of labels; several are compared.")
    _add_workers(parser)


def _verify(parser: argparse.ArgumentParser) -> None:
    """Read a whole dataset and name what is wrong."""
    parser.add_argument("location", metavar="DIR", help=_LOCATION_HELP)


def _preview(parser: argparse.ArgumentParser) -> None:
    """Draw the first samples as one picture."""
    parser.add_argument("location", metavar="DIR", help=_LOCATION_HELP)
    parser.add_argument("--out", metavar="PNG", type=Path, required=True, help="The picture to write.")
    parser.add_argument(
        "--samples", metavar="N", type=positive, default=60, help="The number of samples (default: %(default)s)."
    )


def _trace(parser: argparse.ArgumentParser) -> None:
    """Print the samples that training would see, batch by batch."""
    add = parser.add_argument
    several = " Several are the sources of a mixture, in the order of their names."
    add("locations", metavar="DIR", nargs="+", help=_LOCATION_HELP + several)
    add(
        "--weights", type=float, nargs="+", metavar="W", help="The weights of a mixture, one for each DIR (default: 1)."
    )
    add("--ranks", type=positive, default=1, metavar="N", help="The number of training processes (default: 1).")
    add("--workers", type=whole, default=0, metavar="M", help="The number of data workers of a rank (default: 0).")
    add("--batch-size", type=positive, required=True, metavar="B", help="The samples of a step on all ranks.")
    add("--epoch", type=whole, default=0, metavar="E", help="The epoch to show, counted from 0 (default: 0).")
    add("--seed", type=whole, default=0, metavar="S", help="The seed of the training run (default: 0).")
    add("--from-step", type=whole, default=0, metavar="K", help="Begin at step K of the epoch, as a resumed run would.")
    add(
        "--shuffle-shards",
        type=positive,
        metavar="N",
        help="Shuffle within windows of N shards (default: across the whole dataset).",
    )


def _suppression(parser: argparse.ArgumentParser) -> None:
    """Build every dataset of the suppression benchmark."""
    parser.add_argument("--settings", metavar="A,B", help="Build only these settings, such as randbit,dominoes.")
    _add_files(parser, digits=DIGITS[1])


def _papers(parser: argparse.ArgumentParser) -> None:
    """Build every dataset of the papers' tables."""
    _add_files(parser, digits=DIGITS[0])


def _add_files(parser: argparse.ArgumentParser, *, digits: str) -> None:
    add = parser.add_argument
    add("--root", metavar="PATH", type=Path, required=True, help="The directory of CIFAR-10, MNIST/raw and the sounds.")
    add("--out", metavar="DIR", type=Path, required=True, help="The directory to write the datasets to.")
    add("--small", action="store_true", help="Build the datasets for a CPU: fewer and smaller samples.")
    add("--limit", metavar="N", type=positive, help="Use at most N records of each split, for a trial.")
    add(
        "--cifar",
        choices=("torchvision", "folder"),
        default="torchvision",
        help="How CIFAR is stored: as torchvision downloads it (default), or in folders train/CLASS and test/CLASS.",
    )
    add(
        "--digits",
        metavar="|".join(DIGITS[:-1]),
        default=digits,
        help="The digits of MNIST in each split (default: %(default)s).",
    )
    add(
        "--speech-root",
        dest="speech",
        metavar="PATH",
        type=Path,
        help="The directory of spoken digits (default: --root).",
    )
    add(
        "--noise-root",
        dest="noise",
        metavar="PATH",
        type=Path,
        help="The directory of the background sounds (default: --root).",
    )
    add("--workers", metavar="N", type=positive, default=1, help="The number of processes (default: %(default)s).")


def _add_workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        metavar="N",
        type=positive,
        default=num_cores(),
        help="The number of processes (default: one per CPU).",
    )


# Each function adds the arguments of a command, and its docstring is the summary in the help. The module has a `run`.
COMMANDS: Final[Mapping[str, tuple[Callable[[argparse.ArgumentParser], None], str]]] = {
    "look": (_look, "tools.look"),
    "index": (_index, "building.index_tars"),
    "build": (_build, "building.build"),
    "papers": (_papers, "building.papers"),
    "suppression": (_suppression, "building.suppression"),
    "verify": (_verify, "tools.verify"),
    "preview": (_preview, "tools.preview"),
    "trace": (_trace, "tools.batch_trace"),
}


def main(words: Sequence[str] | None = None) -> None:
    """Run the command in `words`, by default `sys.argv[1:]`. Raises `UserError`."""
    parser = Parser(prog=program("data_pipeline"), description="Look at, build, check and show datasets.")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for name, (add_arguments, module) in COMMANDS.items():
        own = commands.add_parser(name, help=add_arguments.__doc__, description=add_arguments.__doc__)
        own.set_defaults(module=f"data_pipeline.{module}")
        add_arguments(own)
        add_code_argument(own)
    arguments = parser.parse_args(words)
    import_code(arguments.code)
    importlib.import_module(arguments.module).run(arguments)


if __name__ == "__main__":
    run_command(main)
