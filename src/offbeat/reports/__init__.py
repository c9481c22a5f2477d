"""Show a run to people: one HTML file, groups in a terminal, or a live view.

read      history.py (journal), groups.py (experience log), record.py (one run directory)
compute   improvement.py (what training changed), curves.py (one run), comparison.py (several runs, pooled by seed)
show      plot.py (SVG), page.py with body.html, page.html, page.css and page.js (HTML), serve.py (`report --live`)
          browse.py (`offbeat view`), live.py (`offbeat train`), run.py (Python)
"""
