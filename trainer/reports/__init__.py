"""The report compares runs: from run directories it makes one table, and of the table a page.

    run directories -> runs -> table -> comparison -> page, studies, suppression -> templates/ -> report.html, NAME.md

`runs` reads run directories, and `config_identity` finds those that repeat one configuration. `table` makes the tidy
table, one row for each accuracy. `paired` tells differences from chance, and `comparison` summarises the rows. `page`
is the HTML page with its `charts`, `studies` sets the tables of `published/` beside ours, `suppression` is the
benchmark of suppression, and `publish` sends a page to W&B.

Guarantees: every number was measured. Only accuracies on one dataset and by one protocol are compared. The page needs
no network. Equal run directories give an equal file.
"""

__all__: list[str] = []
