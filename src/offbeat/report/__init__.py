"""A run directory in; one HTML file, or groups in a terminal, out.

reading      history.py (the journal), groups.py (the experience log), record.py (both, for one run)
figuring     improvement.py (predicted against realised), pools.py (seeds taken together)
telling      words.py (sentences), panels.py (plots and tables of a run), comparison.py (of several)
showing      plot.py (SVG), page.py with page.html and page.css, browse.py (terminal), visible.py (strangers' text)
"""
