"""Show a run to people: one HTML file, groups in a terminal, or a live view.

read      history.py (journal), groups.py (experience log), record.py (one run directory, predicted improvement)
describe  words.py (sentences, units, safe text), panels.py (plots and tables of one run), comparison.py (several runs)
show      plot.py (SVG), page.py, page.html, page.css (HTML), browse.py (`offbeat view`), live.py (`offbeat train`)
"""
