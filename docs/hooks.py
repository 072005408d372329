"""Site pages whose source lies outside docs/ or is a notebook, the links to and from them, formulas, the playground.

Links in the repository are relative to the file they are in, so they work for readers of the files. On the site they
are rewritten to the corresponding page. The playground's page is a copy of the package's static files, with the
WebAssembly engine instead of the local server.
"""

import html
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
    "SECURITY.md": "security.md",
}
SOURCES = {page: source for source, page in OUTSIDE.items()}

PLAYGROUND = ROOT / "src" / "credibly" / "web" / "playground" / "static"
# What differs in the playground's page if it has no server behind it.
STATIC_PAGE = {
    '<html lang="en">': '<html lang="en" data-engine="wasm/worker.js">',
    # Its random numbers are others than Python's.
    "<h2>The same numbers in Python</h2>": "<h2>The same fit in Python</h2>",
    "</main>": """</main>
<footer class="legend" style="padding: 0 1.25rem 1rem">This page runs in your browser: the C++ core of credibly,
  compiled to WebAssembly, and no server. MLE, MAP, deep ensembles, MC-Dropout and HMC are here. For Bayes by Backprop,
  Laplace, SGHMC and the scene inside VI, run <code>credibly playground</code> on your machine.
  <a href="../howto/playground.html">What the scenes show</a>, <a href="../index.html">credibly</a>.</footer>""",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=notebook_page(path)))
    for name, content in playground_files().items():
        files.append(File.generated(config, f"playground/{name}", content=content))
    return files


def playground_files() -> dict[str, bytes]:
    """Return the files of the playground's static page by their path: the package's, with the WebAssembly engine."""
    paths = sorted(path for path in PLAYGROUND.rglob("*") if path.is_file())
    found = {path.relative_to(PLAYGROUND).as_posix(): path.read_bytes() for path in paths}
    page = found["index.html"].decode()
    for there, here in STATIC_PAGE.items():
        if page.count(there) != 1:
            raise ValueError(f"the playground's page must have {there!r} once, got {page.count(there)}")
        page = page.replace(there, here)
    return {**found, "index.html": page.encode()}


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

    return re.sub(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)]*|)\)", rewrite, _formulas(markdown))


def _formulas(markdown: str) -> str:
    """Return the page with blocks of TeX as elements that docs/katex/render.js typesets."""
    return re.sub(
        r"^```math\n(.*?)\n```$",
        lambda block: f'<div class="formula">{html.escape(block[1])}</div>',
        markdown,
        flags=re.MULTILINE | re.DOTALL,
    )
