"""Pages of the site that live elsewhere in the repository, and the links to them.

A page in docs/ links to `../benchmarks/README.md` as it lies in the repository, where that link works for a reader of the
files; on the site it leads to the page made of that file here.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = {
    "benchmarks/README.md": "benchmarks.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages."""
    for source, page in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turns links to those files into links to their pages."""
    folder = posixpath.dirname(page.file.src_uri)

    def replace(link: re.Match[str]) -> str:
        place = posixpath.normpath(posixpath.join("docs", folder, link[1]))
        target = ELSEWHERE.get(place)
        return f"]({posixpath.relpath(target, folder or '.')}{link[2]})" if target else link[0]

    return re.sub(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)]*|)\)", replace, markdown)
