"""The report as one HTML page: no script, no network, nothing beside it. Equal input gives equal bytes."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

from trainer.probes.features import LABEL_SPACES
from trainer.reports.curves import charts
from trainer.reports.findings import limits, samples_of, verdict
from trainer.reports.grid import NOT_MEASURED, columns, prose, to_html
from trainer.reports.protocols import label_titles, readings
from trainer.reports.runs import NO_NUMBER, Arm, Run
from trainer.reports.study_sheet import Sheet
from trainer.reports.study_tables import study_html
from trainer.reports.tables import chip, differences, provenance, results, speed_grid

HOW_COMPARED = (
    "Test accuracy of linear probes on frozen encoders. Accuracies that differ by less than two standard errors, of "
    "the draw of test pictures or of seeds, whichever is larger, count as not told apart."
)

MOST_NAMES = 4  # under the title; the tables have them all

STYLE = """
:root { color-scheme: light dark; --ink: #1d2329; --soft: #5c6873; --line: #dfe3e8; --page: #ffffff; --card: #f6f7f9;
  --accent: #3b82d6; --shade: rgba(0, 0, 0, 0.22); }
@media (prefers-color-scheme: dark) { :root { --ink: #dfe4e9; --soft: #98a4b0; --line: #333b44; --page: #15191d;
  --card: #1d2329; --accent: #6aa5ea; --shade: rgba(0, 0, 0, 0.85); } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, sans-serif;
  -webkit-text-size-adjust: 100%; }
main { max-width: 1000px; margin: 0 auto; padding: 40px 24px 80px; }
h1 { font-size: 28px; line-height: 1.25; margin: 0 0 4px; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 48px 0 12px; }
h3 { font-size: 15px; margin: 28px 0 6px; overflow-wrap: anywhere; }
p, li { max-width: 76ch; overflow-wrap: anywhere; }
ul { padding-left: 20px; margin: 8px 0; }
.subtitle, .caption, .none, .soft { color: var(--soft); }
.subtitle { margin: 0 0 24px; }
.caption { font-size: 13.5px; margin: 6px 0 12px; max-width: 100ch; }
.none { font-style: italic; font-size: 0.9em; }
.verdict { background: var(--card); border-left: 3px solid var(--accent); border-radius: 6px; padding: 14px 20px; }
.verdict p { margin: 6px 0; }
/* Two covers scroll with the table, and hide two shadows that do not: a shadow shows where the table goes on. */
.scroll { overflow-x: auto; margin-bottom: 12px; background:
  linear-gradient(to right, var(--page) 12px, transparent) left / 40px 100% no-repeat local,
  linear-gradient(to left, var(--page) 12px, transparent) right / 40px 100% no-repeat local,
  linear-gradient(to right, var(--shade), transparent) left / 12px 100% no-repeat scroll,
  linear-gradient(to left, var(--shade), transparent) right / 12px 100% no-repeat scroll; }
table { border-collapse: collapse; font-size: 14.5px; font-variant-numeric: tabular-nums; }
.wide { width: 100%; }
th, td { padding: 7px 14px 7px 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: 500; font-size: 13px; vertical-align: bottom; }
thead tr:not(:last-child) th { border-bottom: none; padding-bottom: 0; }
th.group { text-align: center; padding-left: 28px; }
tbody th { font-weight: 500; white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; }
tr.untrained th, tr.untrained td, tr.floor th, tr.floor td { color: var(--soft); }
tr.arm > * { border-bottom: none; padding-bottom: 2px; }
tr.arm + tr.untrained > * { padding-top: 2px; }
td small { display: block; color: var(--soft); font-size: 12px; }
code, pre { font: 0.88em/1.5 ui-monospace, monospace; }
td.text { min-width: 100px; max-width: 360px; overflow-wrap: anywhere; }
td.settings { white-space: nowrap; }
pre { background: var(--card); border-radius: 6px; padding: 12px 16px; overflow-x: auto; }
.chip { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 7px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 22px; font-size: 14px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(380px, 100%), 1fr)); gap: 20px 28px;
  margin-top: 14px; }
figure { margin: 0; min-width: 0; }
figcaption { font-size: 14px; margin-bottom: 4px; }
svg { width: 100%; height: auto; display: block; }
img { max-width: 100%; height: auto; display: block; border-radius: 6px; border: 1px solid var(--line); }
summary { cursor: pointer; color: var(--soft); font-size: 14px; margin: 10px 0; }
.columns2 { --columns: 2; }
.columns4 { --columns: 4; }
@media screen and (max-width: 600px) {
  main { padding: 20px 14px 48px; }
  h1 { font-size: 22px; }
  h2 { margin-top: 36px; }
  .verdict { padding: 10px 14px; }
  /* The title of a row stands above its numbers. */
  .results, .results thead, .results tbody { display: block; }
  .results tr { display: grid; grid-template-columns: repeat(var(--columns), minmax(0, 1fr)); }
  .results .corner { display: none; }
  .results th.group { grid-column: span 2; padding-left: 0; text-align: right; }
  .results thead th { padding-bottom: 2px; }
  .results tbody tr { border-bottom: 1px solid var(--line); }
  .results tbody tr.arm { border-bottom: none; }
  .results tbody th { grid-column: 1 / -1; padding-bottom: 0; border: none; white-space: normal; }
  .results tbody td { padding-top: 2px; border: none; }
  .results th.number, .results th.group, .results td { padding-right: 6px; }
  .results td small { white-space: normal; }
  /* A row becomes a list with a line for each column. */
  .cards, .cards tbody, .cards tr, .cards tbody th { display: block; }
  .cards thead { display: none; }
  .cards tr { border-bottom: 1px solid var(--line); padding: 8px 0; }
  .cards tbody th { border: none; padding: 0 0 4px; white-space: normal; overflow-wrap: anywhere; }
  .cards tbody th:empty { display: none; }
  .cards td, .cards td.text, .cards td.number, .cards td.settings { display: grid; gap: 10px; max-width: none;
    grid-template-columns: minmax(0, 2fr) minmax(0, 3fr); padding: 2px 0; border: none; text-align: left;
    white-space: normal; overflow-wrap: anywhere; }
  .cards td::before { content: attr(data-head); color: var(--soft); font-size: 13px; }
  .cards td:empty { display: none; }
  .cards td > * { min-width: 0; }
}
@media print {
  :root { color-scheme: light; --ink: #000000; --soft: #444444; --line: #bbbbbb; --page: #ffffff; --card: #f4f4f4; }
  body { font-size: 10.5pt; }
  main { max-width: none; padding: 0; }
  h2, h3, .legend { break-after: avoid; }
  tr, figure, img, .verdict { break-inside: avoid; }
  .charts { grid-template-columns: 1fr 1fr; }
  .scroll { overflow: visible; }
  .scroll { background: none; }
  table { font-size: 8.5pt; width: 100%; }
  thead th { font-size: 8pt; }
  td small { font-size: 7.5pt; }
  th, td { padding: 3px 8px 3px 0; }
  td.number, th.number, tbody th, td.settings { white-space: normal; }
  td.text { min-width: 0; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; }
  details:not([open]) { display: none; }
  .chip { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
@page { margin: 16mm; }
"""


def page(arms: Sequence[Arm], sheet: Sheet | None = None) -> str:
    """The whole page. `arms` are in the order in which they shall appear; `sheet` is the study that they are of."""
    runs = [run for arm in arms for run in arm.runs]
    title = title_of(arms, sheet)
    sections = [
        f"<h1>{escape(title)}</h1>\n<p class='subtitle'>{_subtitle(arms)}</p>",
        "" if sheet is None else "<h2>Against the paper</h2>\n" + study_html(sheet) + "\n<h2>What was found</h2>",
        '<div class="verdict">'
        + "".join(f"<p>{prose(text)}</p>" for text in verdict(arms))
        + f'<p class="caption">{HOW_COMPARED}</p></div>',
        f"<p>{how_to_read(arms)}</p>",
        "<h2>Results</h2>\n" + results(arms),
        "<h2>What this is too small to show</h2>\n" + _list(limits(arms)),
        "<h2>Curves</h2>\n" + _curves(arms),
        "<h2>Views</h2>\n" + "\n".join(_views_of_arm(arm) for arm in arms),
        _analyses(runs),
        "<h2>Speed and memory</h2>\n" + to_html(speed_grid(arms), numbers=True),
        "<h2>Differences between the configs</h2>\n" + differences(arms),
        "<h2>Where the numbers come from</h2>\n" + provenance(runs),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(f"<section>\n{section}\n</section>" for section in sections if section)
        + "\n</main>\n</body>\n</html>\n"
    )


def title_of(arms: Sequence[Arm], sheet: Sheet | None) -> str:
    if sheet is not None:
        return sheet.study.title + (" (CPU scale)" if sheet.study.is_small else "")
    runs = [run for arm in arms for run in arm.runs]
    return f"Comparison of {len(runs)} runs" if len(runs) > 1 else f"Run {runs[0].name}"


CARRIES = {
    "pictures": ("picture", "a photo", "where one was drawn, an object"),
    "sounds": ("sound", "speech", "where it was mixed in, a background"),
    "samples": ("sample", "what was there", "where it was changed, what was added"),
}


def how_to_read(arms: Sequence[Arm]) -> str:
    """Return, as HTML, what the two labels are."""
    sample, base, overlay = CARRIES[samples_of([run for arm in arms for run in arm.runs])]
    titles = {space: escape(title) for space, title in label_titles(arms).items()}
    return (
        f"Each {sample} carries {base} (<b>{titles['base']}</b>, in files <code>label_base</code>) and, {overlay} "
        f"(<b>{titles['overlay']}</b>, <code>label_overlay</code>). "
        "An encoder that has kept both lets a linear classifier read both from its frozen features; where one feature "
        "has suppressed the other, one of the two accuracies falls towards that of the untrained encoder."
    )


def _subtitle(arms: Sequence[Arm]) -> str:
    every = [arm for reading in readings(arms) for arm in reading.arms]
    probes = [one for arm in every for space in LABEL_SPACES for one in [*arm.trained(space), *arm.untrained(space)]]
    names, titles = list(dict.fromkeys(arm.name for arm in arms)), label_titles(arms)
    num_runs = sum(len(arm.runs) for arm in arms)
    is_short = len(names) <= MOST_NAMES
    parts = [", ".join(names) if is_short else f"{len(names)} configurations, {num_runs} runs"]
    for space in LABEL_SPACES:
        sizes = sorted({len(probe.class_names) for probe in probes if probe.label == space})
        if sizes:
            parts.append(f"{titles[space]} of {' or '.join(map(str, sizes))} classes")
    sizes_of_data = sorted({(probe.num_train, probe.num_test) for probe in probes})
    samples = samples_of([run for arm in arms for run in arm.runs])
    parts += [f"{num_train:,} train and {num_test:,} test {samples}" for num_train, num_test in sizes_of_data]
    return escape(" · ".join(parts))


def _curves(arms: Sequence[Arm]) -> str:
    drawn = charts(arms)
    if not drawn:
        return f"<p>{NOT_MEASURED}: no metrics.jsonl and no probes.</p>"
    legend = "".join(f"<span>{chip(number)}{escape(arm.name)}</span>" for number, arm in enumerate(arms))
    figures = "".join(f"<figure><figcaption>{prose(c.title)}</figcaption>{c.svg}</figure>" for c in drawn)
    untrained = any(arm.untrained(s) for reading in readings(arms) for arm in reading.arms for s in LABEL_SPACES)
    dashed = '<span class="soft">dashed: untrained encoder</span>' if untrained else ""
    band = '<span class="soft">band: ± deviation over seeds</span>' if any(len(arm.runs) > 1 for arm in arms) else ""
    # A dict holds each sentence once, in order.
    notes = dict.fromkeys(
        note
        for arm in arms
        for run in arm.runs
        if (note := run.config.objective.note(global_batch_size=run.config.global_batch_size)) is not None
    )
    caption = "".join(f'<p class="caption">The loss: {escape(note)}.</p>' for note in notes)
    return f'<div class="legend">{legend}{dashed}{band}</div>{caption}<div class="charts">{figures}</div>'


def _views_of_arm(arm: Arm) -> str:
    """The grid of the first run; those of the other seeds are folded."""
    first, *others = arm.runs
    folded = "".join(_views(run) for run in others)
    return _views(first) + (f"<details><summary>Other seeds</summary>{folded}</details>" if others else "")


def _views(run: Run) -> str:
    title = f"<h3>{escape(run.name)}</h3>"
    if run.views.png is None or run.views.result is None:
        return f"{title}<p>{NOT_MEASURED}: {escape(run.views.problem)}.</p>"
    result = run.views.result
    where = ""
    if result.selectivity_box is not None and result.selectivity_object is not None:
        where = (
            f" Relative to that it is {result.selectivity_object:.2f} on the drawn pixels and "
            f"{result.selectivity_box:.2f} in the box around them; 1 would be no preference."
        )
    crops = result.views == "expert_image"
    moved = " Views that crop and flip also move pixels, which counts as change." if crops else ""
    samples = samples_of([run])
    number = NO_NUMBER if result.change is None else f"{result.change:.4f}"
    change = (
        f"Mean change of a pixel: {number} of the range from black to white"
        if samples == "pictures"
        else f"Mean change of a point of the normalised spectrogram: {number}"
    )
    return (
        f'{title}<p class="caption">Views <code>{escape(result.views)}</code> at step {result.checkpoint_step}. '
        f"{change}, over {result.num_pictures:,} test {samples}."
        f"{where}{moved} Differences are shown × {result.difference_gain} around middle grey.</p>"
        f"{_image(run.views.png, f'Views of {run.name}')}"
    )


def _analyses(runs: Sequence[Run]) -> str:
    """The pictures of all other analyses. One that several runs share is shown once."""
    shown: dict[tuple[str, bytes], list[Run]] = {}
    for run in runs:
        for picture in run.pictures:
            shown.setdefault((picture.name, picture.png), []).append(run)
    if not shown:
        return ""
    parts = ["<h2>Analyses</h2>"]
    for (name, png), of in shown.items():
        numbers = next(picture.numbers for picture in of[0].pictures if picture.name == name)
        names = ", ".join(run.name for run in of)
        title = f"{name.replace('_', ' ')}: {names}"
        parts.append(f"<h3>{escape(title)}</h3>{_image(png, title)}")
        if numbers:
            grid = columns(["number", "value"], list(numbers.items()))
            parts.append(f"<details><summary>Numbers</summary>{to_html(grid)}</details>")
    return "\n".join(parts)


def _image(png: bytes, alt: str) -> str:
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def _list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{prose(item)}</li>' for item in items)}</ul>"
