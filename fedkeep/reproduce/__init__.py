"""Reproduction of papers' tables: `fedkeep reproduce`. Each table is a file in `tables/`."""
