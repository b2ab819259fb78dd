"""Measurements against the project's bars. Ratios within one run on one machine, medians of at least five."""
