"""`python -m trainer.report RUN_DIR...`: one self-contained HTML file that compares runs.

`--study suppression_small` writes the page of the suppression benchmark, as Markdown with figures.

The directory of a study stands for the runs in it, but not for studies in it. With `--out FILE` the run directories may
be read-only. `--probes DIR` adds the results that `python -m trainer.probe RUN_DIR... --out DIR` has written.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from data_pipeline.core.arguments import program
from data_pipeline.core.errors import UserError, run_command
from data_pipeline.core.imports import add_code_argument, import_code
from trainer.run_dir import RunDir, runs_of, say_what_is_left_out, write_atomically


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("trainer.report"),
        description="Write one self-contained HTML file that compares runs.",
    )
    add = parser.add_argument
    add("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="A run directory, or the directory of a study.")
    add("--out", type=Path, help="The file to write (default: RUN_DIR/report.html, or ./report.html for several runs).")
    add(
        "--study",
        metavar="NAME",
        help="Compare the runs with a published table, such as table1, or write the page of suppression_small.",
    )
    add("--probes", type=Path, metavar="DIR", help="Also read the results that `trainer.probe --out DIR` has written.")
    add_code_argument(parser)
    add("--markdown", action="store_true", help="Also write the report as Markdown, beside the page.")
    add("--no-index", action="store_true", help="Read every file, and do not use the index of earlier reports.")
    add("--wandb", action="store_true", help="Also make the report at Weights & Biases, which needs a login.")
    return parser


def _write_suppression(arguments: argparse.Namespace, paths: Sequence[Path]) -> None:
    """Write the page of the suppression benchmark, which has a form of its own."""
    from trainer.reports.suppression.as_markdown import write_markdown
    from trainer.reports.suppression.measured import read_benchmark
    from trainer.reports.suppression.page import make_page

    if arguments.wandb:
        raise UserError("--wandb makes no page of the suppression benchmark; leave out --wandb or --study")
    out = arguments.out or Path("suppression.md")
    study = arguments.study if ":" in arguments.study else f"studies:{arguments.study}"
    benchmark = read_benchmark(paths, probes_at=arguments.probes)
    write_markdown(make_page(benchmark, study=study, paths=arguments.run_dirs), out)
    print(out)


def main() -> None:
    arguments = _parser().parse_args()
    from trainer.reports.as_markdown import as_markdown
    from trainer.reports.overview import MOST_IN_FULL
    from trainer.reports.page import page
    from trainer.reports.published import study
    from trainer.reports.run_index import RunIndex, default_directory
    from trainer.reports.runs import arms_of, read_runs
    from trainer.reports.study_sheet import fill

    say_what_is_left_out(arguments.run_dirs)
    paths = runs_of(arguments.run_dirs)
    import_code(arguments.code)
    if (arguments.study or "").removeprefix("studies:").startswith("suppression"):
        _write_suppression(arguments, paths)
        return
    chosen = None if arguments.study is None else study(arguments.study)
    index = RunIndex(None if arguments.no_index else default_directory())
    runs = read_runs(
        paths,
        probes_at=arguments.probes,
        make_views=len(paths) <= MOST_IN_FULL,
        index=index,
    )
    index.remove_old()
    sheet = None if chosen is None else fill(chosen, runs)
    arms = arms_of(runs)
    out = arguments.out or (RunDir(runs[0].path).report if len(runs) == 1 else Path("report.html"))
    write_atomically(out, page(arms, sheet))
    print(out)
    if arguments.markdown:
        markdown = out.with_suffix(".md")
        write_atomically(markdown, as_markdown(arms, sheet))
        print(markdown)
    if arguments.wandb:
        from trainer.reports.publish import publish

        print(publish(out, arms, sheet))


if __name__ == "__main__":
    run_command(main)
