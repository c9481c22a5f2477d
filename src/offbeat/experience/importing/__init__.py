"""Rows of other tools, in and out: `records` reads them, `layout` says which column is what, `shapes` makes groups."""
