"""The comparison report: run directories in, one self-contained HTML file out.

`runs` reads what runs left behind, `science` says which of them are repetitions, `findings` turns it into comparisons
and sentences, `published` has the papers' tables and `study_sheet` lays runs into them, `curves`, `tables` and
`study_tables` show it, `page` and `as_markdown` put it together, `publish` hands it on. What may never happen: a number
that was not measured, a sentence that the numbers do not carry, accuracies on different data in one table, a file that
needs the network, or another file from the same run directories.

    run directories -> runs -> findings, study_sheet -> curves, tables -> page -> report.html
"""
