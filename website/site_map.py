"""Which file becomes which page of the site, and what links between files become."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# pages whose files lie elsewhere or have another name: the README is the front page
MOVED = {
    "index.md": ROOT / "README.md",
    "pages.md": DOCS / "index.md",
    "changelog.md": ROOT / "CHANGELOG.md",
    "examples/flower.md": ROOT / "examples" / "flower" / "README.md",
    "examples/flower-images.md": ROOT / "examples" / "flower-images" / "README.md",
}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")


def source_of(page: str) -> Path:
    """Return the file that a page of the site is made from."""
    return MOVED.get(page, DOCS / page)


def page_of(file: Path) -> str | None:
    """Return the page or picture of the site that a file becomes; None if it is not part of the site."""
    moved = {path: page for page, path in MOVED.items()}
    if file in moved:
        return moved[file]
    return file.relative_to(DOCS).as_posix() if file.is_relative_to(DOCS) else None


def with_site_links(page: str, text: str) -> str:
    """Return a page's Markdown with links that work in the site. What is not part of it is named, without a link."""
    source = source_of(page)

    def replace(match: re.Match[str]) -> str:
        mark, label, path, anchor = match[1], match[2], match[3], match[4] or ""
        if "://" in path or not path:
            return match[0]
        file = (source.parent / path).resolve()
        target = page_of(file)
        if target is None:
            name = file.relative_to(ROOT).as_posix()
            return label if name in label else f"{label} (`{name}`)"
        return f"{mark}[{label}]({posixpath.relpath(target, posixpath.dirname(page) or '.')}{anchor})"

    parts = re.split(r"(^```.*?^```)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else _LINK.sub(replace, part) for part in parts)


def sections(index: str) -> dict[str, dict[str, list[str]]]:
    """Return the sections of docs/index.md: by heading and subheading ("" if there is none), the pages in order."""
    found: dict[str, dict[str, list[str]]] = {}
    heading = subheading = ""
    for line in index.splitlines():
        if line.startswith("## "):
            heading, subheading = line.removeprefix("## "), ""
        elif line.startswith("### "):
            subheading = line.removeprefix("### ")
        for path in re.findall(r"^\| \[[^\]]*\]\(([^)]+\.md)\) \|", line):
            found.setdefault(heading, {}).setdefault(subheading, []).append(path)
    return found
