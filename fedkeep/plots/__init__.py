"""Plots for print, with matplotlib (extra `plots`)."""
