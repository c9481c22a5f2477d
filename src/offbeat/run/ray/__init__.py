"""A run on Ray. Ray is imported in this package only."""
