"""The comparison report: run directories in, one self-contained HTML file out.

    run directories -> runs -> findings, study_sheet -> tables, study_tables, curves -> page -> report.html

`runs` reads what runs left behind, and `config_identity` says which of them repeat one configuration. `findings` turns
accuracies into comparisons and sentences. `published` holds the papers' tables, and `study_sheet` lays runs into them.
`tables`, `study_tables` and `curves` prepare what is shown. `page` shows it by `templates/`, `as_markdown` as text, and
`publish` sends it to W&B.

Guarantees: every number was measured, the numbers carry every sentence, a table holds accuracies on one dataset only,
the page needs no network, and equal run directories give an equal file.
"""
