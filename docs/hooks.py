"""Site pages whose source lies outside docs/, and the links to and from them.

Links in the repository are relative to the file they are in, so they work for readers of the files. On the site they
are rewritten to the corresponding page.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]

# Source file, relative to the repository, and the page made from it.
OUTSIDE = {
    "benchmarks/README.md": "benchmarks.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
}
SOURCES = {page: source for source, page in OUTSIDE.items()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrite links between files of the repository as links between pages."""
    folder = posixpath.dirname(page.file.src_uri)
    here = posixpath.dirname(SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}"))

    def rewrite(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(here, link[1]))
        target = OUTSIDE.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        return f"]({posixpath.relpath(target, folder or '.')}{link[2]})" if target else link[0]

    return re.sub(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)]*|)\)", rewrite, markdown)
