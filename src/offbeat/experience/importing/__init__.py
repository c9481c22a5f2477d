"""Importing rows from other tools, and exporting groups as rows.

records.py   reads rows of files, and cells of rows
layout.py    detects which column has which role
shapes.py    collects the rows of each group and converts them
importer.py  validates groups and writes them to a log
rows_out.py  writes groups as rows, and reads such rows back
"""
