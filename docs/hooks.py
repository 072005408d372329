"""Site pages whose source lies outside docs/ or is a notebook, and the links to and from them.

Links in the repository are relative to the file they are in, so they work for readers of the files. On the site they
are rewritten to the corresponding page.
"""

import json
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
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=notebook_page(path)))
    return files


def notebook_page(path: Path) -> str:
    """Return a notebook with its outputs as Markdown. Pictures are part of the page."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        parts += [_shown(output) for output in cell["outputs"]]
    return "\n\n".join([*parts, f"[The notebook itself]({path.name})"]) + "\n"


def _shown(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f'<img alt="Output of the cell above" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
    html = "".join(data.get("text/html", ""))
    if html and "<progress" not in html:
        # A blank line would end the block of HTML.
        return "\n".join(line for line in html.splitlines() if line.strip())
    text = "".join(data.get("text/plain", output.get("text", "")))
    return f"```text\n{text.rstrip()}\n```"


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrite links between files of the repository as links between pages."""
    folder = posixpath.dirname(page.file.src_uri)
    here = posixpath.dirname(SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}"))

    def rewrite(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(here, link[1]))
        target = OUTSIDE.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        own = page.file.src_uri.removesuffix(".md") + ".ipynb"
        if target and target.endswith(".ipynb") and target != own:
            # A notebook has a page; its own page links to the file.
            target = target.removesuffix(".ipynb") + ".md"
        return f"]({posixpath.relpath(target, folder or '.')}{link[2]})" if target else link[0]

    return re.sub(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)]*|)\)", rewrite, markdown)
