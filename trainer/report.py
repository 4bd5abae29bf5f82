"""`python -m trainer.report RUN_DIR...`: one self-contained HTML file that compares runs.

`--study NAME` writes the table of a study as Markdown: `table1` beside the paper's numbers, `suppression_small` with
figures. `--csv FILE` writes the tidy table of which every page is made.

The directory of a study stands for the runs in it, but not for studies in it. With `--out FILE` the run directories may
be read-only.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

from data_pipeline.core.arguments import program
from data_pipeline.core.errors import UserError, run_command
from data_pipeline.core.imports import add_code_argument, import_code
from trainer.run_dir import RunDir, runs_of, say_what_is_left_out, write_atomically

_TABLES = (".csv", ".csv.gz")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("trainer.report"),
        description="Write one self-contained HTML file that compares runs.",
    )
    add = parser.add_argument
    add(
        "run_dirs",
        type=Path,
        nargs="+",
        metavar="RUN_DIR",
        help="A run directory, the directory of a study, that of an encoder that `trainer.probe --encoder` has scored, "
        "or for --study a table that --csv has written.",
    )
    add("--out", type=Path, help="The file to write (default: RUN_DIR/report.html, ./report.html or NAME.md).")
    add("--csv", type=Path, metavar="FILE", help="Also write every accuracy as a row of a table (.csv or .csv.gz).")
    add("--study", metavar="NAME", help="Write the table of a study, such as table1 or suppression_small, as Markdown.")
    add_code_argument(parser)
    add("--wandb", action="store_true", help="Also make the report at Weights & Biases, which needs a login.")
    return parser


def main() -> None:
    arguments = _parser().parse_args()
    from trainer.reports.page import page
    from trainer.reports.runs import read_runs, read_scored
    from trainer.reports.studies import write_study
    from trainer.reports.table import measure, read_csv, without_copies, write_csv

    if arguments.wandb and arguments.study is not None:
        raise UserError("--wandb makes no page of a study; leave out --wandb or --study")
    tables = [path for path in arguments.run_dirs if path.name.endswith(_TABLES)]
    typed = [path for path in arguments.run_dirs if path not in tables]
    say_what_is_left_out(typed)
    paths = runs_of(typed)
    import_code(arguments.code)
    scored = read_scored(paths)
    of_others = {directory for place in scored for directory in (place, place.parent)}
    runs, problems = without_copies(read_runs([path for path in paths if path not in of_others]))
    if tables and (arguments.study is None or runs):
        raise UserError(f"{tables[0]} is a table, which only --study reads, without runs beside it")
    rows = measure(runs, scored)
    rows += [row for table in tables for row in read_csv(table)]
    if arguments.csv is not None:
        text = write_csv(rows)
        is_packed = arguments.csv.suffix == ".gz"
        write_atomically(arguments.csv, gzip.compress(text.encode(), mtime=0) if is_packed else text)
        print(arguments.csv)
    if arguments.study is not None:
        out = arguments.out or Path(f"{arguments.study.removeprefix('studies:')}.md")
        write_study(arguments.study, arguments.run_dirs, runs, rows, out, problems)
        print(out)
        return
    out = arguments.out or (RunDir(runs[0].path).report if len(runs) == 1 else Path("report.html"))
    write_atomically(out, page(runs, rows, problems, scored))
    print(out)
    if arguments.wandb:
        if not runs:
            raise UserError("--wandb makes the report of runs; name one beside the scored encoders")
        from trainer.reports.publish import publish

        print(publish(out, runs, rows))


if __name__ == "__main__":
    run_command(main)
