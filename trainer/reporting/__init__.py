"""The comparison report: run directories in, one self-contained HTML file out.

`runs` reads what runs left behind, `findings` turns it into comparisons and sentences, `curves` and `tables` show it,
`page` puts it together, `publish` hands it on. What may never happen: a number that was not measured, a sentence that
the numbers do not carry, a file that needs the network, or another file from the same run directories.

    run directories -> runs -> findings, curves, tables -> page -> report.html
"""
