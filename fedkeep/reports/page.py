"""The report page: data, script and style in one HTML file that makes no network request."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from fedkeep.analysis.run_set import RunSet, read_runs
from fedkeep.reports.data import page_data
from fedkeep.runs.files import write_atomic

STATIC = Path(__file__).parent / "static"
SCRIPTS = ("base.js", "charts.js", "sections.js", "personal.js", "table.js", "main.js")


def write(runs: RunSet | Iterable[str | Path], output: Path, title: str = "fedkeep report") -> dict[str, Any]:
    """Write the page of these runs, given as paths or as read by `read_runs`, and return its data."""
    data = page_data(runs if isinstance(runs, RunSet) else read_runs(runs))
    write_atomic(output, render(data, title).encode())
    return data


@dataclass(frozen=True)
class Report:
    """A report page that was written: its file, the headline, and the verdict on every problem."""

    path: Path
    headline: str
    problems: list[dict[str, Any]]  # title, headline and details of each
    left_out: list[dict[str, str]]  # runs that could not be used, with the reason

    def __repr__(self) -> str:
        left_out = f" ({len(self.left_out)} runs left out)" if self.left_out else ""
        return f"<Report {self.path}: {self.headline}{left_out}>"


def report(paths: str | Path | Iterable[str | Path], output: str | Path = "report.html") -> Report:
    """Write the report page of run folders, or of folders that contain some, as `fedkeep report` does."""
    data = write([paths] if isinstance(paths, str | Path) else paths, Path(output))
    problems = [{"title": problem["title"], **problem["verdict"]} for problem in data["problems"]]
    return Report(Path(output), data["verdict"]["headline"], problems, data["left_out"])


def render(data: dict[str, Any], title: str = "fedkeep report", live: bool = False) -> str:
    """Return the page as HTML. Its content security policy allows only this script and this style."""
    script = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in SCRIPTS)
    style = (STATIC / "page.css").read_text(encoding="utf-8")
    source = "'self'" if live else "'none'"
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        f"connect-src {source}; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "title": escape(title),
        "policy": escape(policy),
        "style": style,
        "headline": escape(data["verdict"]["headline"]),
        "details": "".join(f"<li>{escape(line)}</li>" for line in data["verdict"]["details"]),
        "problems": "".join(_problem_item(problem) for problem in data["problems"] if len(data["problems"]) > 1),
        "data": embed({**data, "live": live}),
        "script": script,
    }
    return fill((STATIC / "page.html").read_text(encoding="utf-8"), parts)


def _problem_item(problem: dict[str, Any]) -> str:
    """Return a problem's entry in the list on top of the page, which can be read without JavaScript."""
    return f"<li><b>{escape(problem['title'])}</b> {escape(problem['verdict']['headline'])}</li>"


def embed(value: Any) -> str:
    """Return JSON that is safe inside a script element, whatever text it contains.

    >>> embed({"name": "</script>"})
    '{"name":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def fill(template: str, parts: dict[str, str]) -> str:
    """Replace every {{name}} by its part, in one pass: inserted text is not searched again.

    >>> fill("a {{x}} c", {"x": "{{x}}"})
    'a {{x}} c'
    """
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
