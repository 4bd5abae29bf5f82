"""The report compares runs: from run directories it makes one self-contained HTML file.

    run directories -> runs -> findings, study_sheet -> tables, study_tables, curves -> page -> report.html

`runs` reads run directories, and `config_identity` finds the runs that repeat one configuration. `findings` turns
accuracies into comparisons and sentences. `published` holds the papers' tables, and `study_sheet` puts runs into their
cells. `tables`, `study_tables` and `curves` prepare the tables and charts, `sweeps` the figures over the settings of a
sweep, and `overview` the tables of hundreds of runs, whose metrics `run_index` keeps. `page` puts them into the HTML of
`templates/`, `as_markdown` writes them as text, and `publish` sends them to W&B.

`suppression` is the page of the suppression benchmark, and `paired` its statistics.

Guarantees: every number was measured. Every sentence follows from the numbers. A table holds accuracies on one dataset
only. The page needs no network. Equal run directories give an equal file.
"""

__all__: list[str] = []
