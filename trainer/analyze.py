"""`python -m trainer.analyze NAME RUN_DIR...`: write figures and numbers that explain runs into RUN_DIR/analysis/."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.core.arguments import program, whole
from data_pipeline.core.errors import UserError, nearest, run_command
from data_pipeline.core.imports import add_code_argument, import_code
from data_pipeline.core.overrides import SET_HELP
from data_pipeline.core.schema import Schema
from trainer.run_dir import open_run, runs_of, say_what_is_left_out, write_atomically

if TYPE_CHECKING:
    from trainer.analyses.analysis import Analysis

TITLE = 34  # pixels above each picture of several runs, for the name of the run
# The modules of trainer/analyses by name, and the question that each answers.
ANALYSES: Mapping[str, str] = {
    "views": "What does the view policy do to pictures, and where?",
    "feature_dropout": "How often do the views of a run destroy what its encoder, or that of another, can read?",
    "alignment": "Are views of a sample close, and classes far apart?",
    "concentration": "Which transforms bring the pictures of a class together?",
    "monitors": "How many dimensions do the features fill? (RankMe, LiDAR, alpha-ReQ: without labels.)",
    "collision": "How fast do transforms, used again and again, make pictures alike?",
    "filters": "How sparsely do features fire, and do they see more than colour?",
    "tsne": "Do the features form clusters, and of which label? (t-SNE.)",
    "mistakes": "In which samples are the linear probes most confidently wrong?",
    "play": "What do views look like, and what do the probes read in them? (A page with sliders.)",
}


def load_analysis(name: str) -> Analysis:
    """Import the analysis of that name. Raises `UserError` with the nearest name if there is none."""
    if name not in ANALYSES:
        raise UserError(f'there is no analysis "{name}"{nearest(name, ANALYSES)}')
    analysis: Analysis = importlib.import_module(f"trainer.analyses.{name}").ANALYSIS
    return analysis


def describe_settings(settings: Schema) -> str:
    """Return a line for each setting: its name, its value and its meaning."""
    rows = [
        (name, json.dumps(value), str(type(settings).model_fields[name].description))
        for name, value in settings.model_dump(mode="json").items()
    ]
    name_width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"{name:{name_width}}  {value:{value_width}}  {meaning}" for name, value, meaning in rows)


def draw_together(paths: Sequence[Path]) -> bytes:
    """Return one PNG of the pictures of several runs in rows of equal cells, each below the name of its run."""
    from PIL import Image, ImageDraw, ImageFont

    from trainer.observability.figures import to_png

    pictures = [Image.open(path) for path in paths]
    num_columns = math.ceil(math.sqrt(len(pictures)))
    width, height = max(picture.width for picture in pictures), max(picture.height for picture in pictures) + TITLE
    canvas = Image.new("RGB", (num_columns * width, math.ceil(len(pictures) / num_columns) * height), "white")
    for number, (path, picture) in enumerate(zip(paths, pictures, strict=True)):
        left, top = number % num_columns * width, number // num_columns * height
        canvas.paste(picture.convert("RGB"), (left, top + TITLE))
        title = path.parent.parent.resolve().name
        ImageDraw.Draw(canvas).text((left + 8, top + 8), title, fill="black", font=ImageFont.load_default(TITLE - 16))
    return to_png(canvas)


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, ANALYSES))
    listing = "\n".join(f"  {name:{width}}  {question}" for name, question in ANALYSES.items())
    parser = argparse.ArgumentParser(
        prog=program("trainer.analyze"),
        description=__doc__,
        epilog=f"analyses:\n{listing}\n\ndocs/analyses.md explains their numbers.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("name", metavar="NAME", help="The analysis to run, one of the list below.")
    add("run_dirs", type=Path, nargs="*", metavar="RUN_DIR", help="A run directory, or the directory of a study.")
    add("--list-settings", action="store_true", help="Print every setting of the analysis, and stop.")
    add("--step", type=whole, help="The checkpoint to analyse; 0 is the untrained encoder (default: the newest).")
    add("--seed", type=whole, help="The seed of all random draws (default: the seed of the run).")
    add("--device", help="The device: cpu, cuda, cuda:1, ... (default: cuda if there is a GPU).")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help=SET_HELP)
    add("--out", type=Path, metavar="FILE", help="The page of play (default: RUN_DIR/analysis/play.html).")
    add("--together", type=Path, metavar="FILE", help="Also write one PNG with the pictures of all runs.")
    add_code_argument(parser)
    return parser


def main() -> None:
    parser = _parser()
    arguments = parser.parse_args()
    if not arguments.run_dirs and not arguments.list_settings:
        parser.error("the following arguments are required: RUN_DIR")
    analysis = load_analysis(arguments.name)
    settings = analysis.settings().override(arguments.set, where=f"settings of {arguments.name}")
    if arguments.list_settings:
        print(describe_settings(settings))
        return
    if arguments.together is not None and arguments.name == "play":
        raise UserError("play writes one page of all runs, so leave out --together; --out FILE names the page")
    if arguments.out is not None and arguments.name != "play":
        raise UserError(
            f"--out names the page of play; {arguments.name} writes into the run directories, so leave it out"
        )
    from data_pipeline.core.devices import named_device
    from trainer.analyses.analysis import LoadedRun

    device = named_device(arguments.device)
    say_what_is_left_out(arguments.run_dirs)
    runs = [open_run(path) for path in runs_of(arguments.run_dirs)]  # check all before the first is analysed
    import_code(arguments.code)
    groups = [runs] if analysis.compares_runs else [[run_dir] for run_dir in runs]
    num_failed, pictures = 0, list[Path]()
    for taken in groups:
        try:
            loaded = [LoadedRun(run_dir, arguments.step, device, arguments.seed) for run_dir in taken]
            paths = analysis.analyze(loaded, config=settings, out=arguments.out)
            print(*paths, sep="\n", flush=True)
            pictures.append(paths[0])
        except UserError as error:
            if len(groups) == 1:
                raise
            num_failed += 1
            print(f"error: {error}", file=sys.stderr)
    if arguments.together is not None and pictures:
        write_atomically(arguments.together, draw_together(pictures))
        print(arguments.together)
    if num_failed:
        print(f"error: {num_failed} of {len(runs)} runs were not analysed", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(main)
