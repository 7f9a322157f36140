"""Lookup of a table by a name that no file has: the file that contains the figure asked for, or similar names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping

from fedkeep._util.text import did_you_mean, format_value, join_names, list_some
from fedkeep.errors import ConfigError

_KIND = r"\b(?P<kind>fig|tab)(?:ures?|les?|s)?\.?"  # figure, figures, fig., table, ...
_NUMBER = r"\d+[a-z]?\b(?:\s*\([^)]*\))?"  # 6, 19b, 6 (right)
_TO = r"(?:\s+to\s+|\s*-\s*)"
_BETWEEN = rf"(?:\s*,\s*(?:and\s+)?|\s+and\s+|{_TO})"
_LIST = re.compile(rf"{_KIND}\s+(?P<numbers>{_NUMBER}(?:{_BETWEEN}{_NUMBER})*)")
_RANGE = re.compile(rf"(\d+)([a-z]?)\b(?:\s*\([^)]*\))?(?:{_TO}(\d+)[a-z]?\b)?")
_ASKED = re.compile(rf"{_KIND}[-_ ]*(?P<number>\d+)[-_ ]*\(?(?P<letter>[a-z]?)\)?")
_KINDS = {"fig": "figure", "tab": "table"}
_HOW = "fedkeep reproduce PAPER lists the tables of a paper"

Part = tuple[str, int, str]  # such as ("figure", 19, "b")


def unknown_table(name: str, citations: Mapping[str, str]) -> ConfigError:
    """Return the error about a name that no table has; `citations` are the tables' `paper` fields, by name."""
    asked = name.lower()
    paper, slash, rest = asked.partition("/")
    papers = list(dict.fromkeys(one.partition("/")[0] for one in citations))
    if asked.endswith(".toml"):
        return _error(name, f"there is no file {name}")
    if not slash:
        return _unknown_without_paper(name, list(citations), papers)
    if paper not in papers:
        message = f"unknown paper {format_value(paper)} in {format_value(name)}: {did_you_mean(paper, papers)}"
        return _error(name, message, papers)
    own = [one for one in citations if one.startswith(f"{paper}/")]
    if not (match := _ASKED.fullmatch(rest)):
        return _error(name, f"unknown table {format_value(name)}: {did_you_mean(asked, own)}", own)
    kind, number, letter = _KINDS[match["kind"]], int(match["number"]), match["letter"]
    if (exact := f"{paper}/{kind}-{number}{letter}") in own:
        return _error(name, f"unknown table {format_value(name)}: did you mean {exact}?", own)
    text = f"{kind} {number}{letter} of {paper}"
    if files := [one for one in own if _contains(citations[one], (kind, number, letter))]:
        return _error(name, f"{text} is part of {join_names(files)}", files)
    return _error(name, f"there is no {text} (valid: {list_some(own, most=30)})", own)


def cited_parts(citation: str) -> Iterator[Part]:
    """Yield the figures and tables that a citation names.

    >>> list(cited_parts("Lee et al., NeurIPS 2022, figures 4, 6 (right) and 19b; spreads from table 7"))
    [('figure', 4, ''), ('figure', 6, ''), ('figure', 19, 'b'), ('table', 7, '')]
    >>> list(cited_parts("Figures 10 to 12"))
    [('figure', 10, ''), ('figure', 11, ''), ('figure', 12, '')]
    """
    for match in _LIST.finditer(citation.lower()):
        kind = _KINDS[match["kind"]]
        for first, letter, last in _RANGE.findall(match["numbers"]):
            if last:
                yield from ((kind, number, "") for number in range(int(first), int(last) + 1))
            else:
                yield kind, int(first), letter


def _contains(citation: str, asked: Part) -> bool:
    """Return whether a citation names a figure; without a letter, it means all of its panels."""
    return any(
        part[:2] == asked[:2] and (part[2] == asked[2] or not part[2] or not asked[2]) for part in cited_parts(citation)
    )


def _unknown_without_paper(name: str, names: list[str], papers: list[str]) -> ConfigError:
    if same := [one for one in names if one.partition("/")[2] == name.lower()]:
        return _error(name, f"{format_value(name)} needs its paper: {list_some(same)}", same)
    close = difflib.get_close_matches(name.lower(), [*papers, *names], n=1)
    listing = f"papers: {', '.join(papers)}; {_HOW}"
    suggestion = f"did you mean {close[0]}? ({listing})" if close else listing
    return _error(name, f"unknown table or paper {format_value(name)}: {suggestion}", [*papers, *names])


def _error(name: str, message: str, valid: list[str] | None = None) -> ConfigError:
    return ConfigError(message, key="table", value=name, valid=valid)
