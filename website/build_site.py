"""Build the documentation site into site/: python website/build_site.py.

Every page of docs/, the README as the front page, and the API reference are written into build/site-source; Sphinx
makes HTML of them. A warning, such as a link that leads nowhere, is an error.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import api_reference
from site_map import DOCS, MOVED, ROOT, sections, source_of, with_site_links

SOURCE, SITE = ROOT / "build" / "site-source", ROOT / "site"


def pages() -> dict[str, str]:
    """Return the Markdown of every page by its path in the site."""
    files = [path.relative_to(DOCS).as_posix() for path in sorted(DOCS.rglob("*.md"))]
    texts = {
        page: with_site_links(page, source_of(page).read_text(encoding="utf-8"))
        for page in dict.fromkeys([*files, *MOVED])
    }
    reference = api_reference.pages()
    navigation = ""
    for name, parts in sections((DOCS / "index.md").read_text(encoding="utf-8")).items():
        listed = parts.pop("", [])
        for part, inside in parts.items():  # folded in the navigation
            texts[f"all-{part.lower()}.md"] = f"# {part}\n\n{_toctree('', inside)}"
            listed.append(f"all-{part.lower()}.md")
        navigation += _toctree(name, listed)
    texts["api.md"] = f"# API reference\n\n{_toctree('', reference)}"
    navigation += _toctree("Reference", ["api.md", "pages.md", "changelog.md"])
    navigation += _toctree("Examples", [page for page in MOVED if page.startswith("examples/")])
    texts["index.md"] += "\n" + navigation
    return {**texts, **reference}


def _toctree(caption: str, inside: Iterable[str]) -> str:
    """Return an entry of the navigation; without a caption, a list on the page itself."""
    options = f":hidden:\n:caption: {caption}\n" if caption else ":maxdepth: 1\n"
    return f"```{{toctree}}\n{options}\n" + "\n".join(page.removesuffix(".md") for page in inside) + "\n```\n\n"


def write_sources(folder: Path) -> None:
    """Write all pages and pictures into an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    for page, text in pages().items():
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        (folder / page).write_text(text, encoding="utf-8")
    for picture in DOCS.rglob("*"):
        if picture.suffix in (".png", ".svg"):
            shutil.copy(picture, folder / picture.relative_to(DOCS))


def main() -> int:
    """Build the site and return Sphinx's exit code."""
    from sphinx.cmd.build import main as sphinx

    write_sources(SOURCE)
    shutil.rmtree(SITE, ignore_errors=True)
    options = ["-q", "-W", "--keep-going", "-E", "-d", str(SOURCE.with_name("site-cache"))]
    code = sphinx([*options, "-c", str(Path(__file__).parent), str(SOURCE), str(SITE)])
    if code == 0:
        print(f"{SITE / 'index.html'} is the front page of the documentation")
    return code


if __name__ == "__main__":
    sys.exit(main())
