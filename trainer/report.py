"""`python -m trainer.report RUN_DIR...`: one self-contained HTML file that compares runs.

A directory of run directories, such as that of a study, stands for all of them. With `--out FILE` the run directories
may be read-only, and `--probes DIR` adds what `python -m trainer.probe RUN_DIR... --out DIR` has written.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from data_pipeline.core.errors import run_command
from trainer.reports.as_markdown import as_markdown
from trainer.reports.page import page
from trainer.reports.publish import publish
from trainer.reports.published import study
from trainer.reports.runs import arms_of, read_runs
from trainer.reports.study_sheet import fill
from trainer.run_dir import ALLOW_PIPE_HELP, RunDir, runs_of, write_atomically


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trainer.report", description=__doc__)
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument(
        "--out", type=Path, help="file to write (default: RUN_DIR/report.html; of several: ./report.html)"
    )
    parser.add_argument("--study", metavar="NAME", help="set the runs beside the paper's table, such as table1")
    parser.add_argument("--probes", type=Path, metavar="DIR", help="also read the results of `trainer.probe --out DIR`")
    parser.add_argument("--allow-pipe", action="store_true", help=ALLOW_PIPE_HELP)
    parser.add_argument("--markdown", action="store_true", help="also write it as Markdown beside the page")
    parser.add_argument("--wandb", action="store_true", help="also make it at Weights & Biases; needs a login")
    arguments = parser.parse_args()
    chosen = None if arguments.study is None else study(arguments.study)
    runs = read_runs(runs_of(arguments.run_dirs), probes_at=arguments.probes, allow_pipe=arguments.allow_pipe)
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
        print(publish(out, arms, sheet))


if __name__ == "__main__":
    run_command(main)
