"""The report: a page in one HTML file that shows which classes runs forgot, when, and in which phase of a round.

data.py      the data of the page, computed from groups of runs
about.py     what the page is about: data, clients, rounds, model, names
columns.py   the columns of the table
verdict.py   the result in a headline and sentences
page.py      the HTML file: data, script and style in one
watch.py     the same page, served on the local machine and refreshed while runs are in progress
static/      the page's HTML, CSS and JavaScript
"""
