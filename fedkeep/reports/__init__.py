"""The report: one page, in one file, that shows what runs forgot, when, and where.

data.py      what the page shows, as plain numbers: pure functions of groups of runs
verdict.py   what came out, in words
anatomy.py   one round taken apart: the global model before, every client, the global model after
page.py      the numbers, the script and the style, in one HTML file
watch.py     the same page, refreshed while runs go on, served on loopback
commands.py  fedkeep report, fedkeep watch
static/      the page's own HTML, CSS and JavaScript
"""

from fedkeep.reports.data import page_data
from fedkeep.reports.page import render, write
from fedkeep.reports.verdict import Verdict, verdict

__all__ = ["Verdict", "page_data", "render", "verdict", "write"]
