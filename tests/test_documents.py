"""Run the Python code of every page, and check its commands, links and pictures, and the site built from them."""

import os
import re
import runpy
import shlex
import subprocess
import sys
import types
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import yaml

import credibly as cr

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = ("python", "sh", "text", "math", "toml", "json", "")
# Pages of features with tests of their own, whose code takes several seconds.
SLOW = (
    "docs/howto/language-models.md",
    "docs/howto/export.md",
    "docs/howto/compare-models.md",
    "docs/howto/scikit-learn.md",
    "docs/howto/pretrained.md",
    "docs/howto/continual.md",
    "docs/methods/dropout.md",
    "docs/methods/mclmc.md",
    "docs/methods/mile.md",
)
VERBS = (
    "fit",
    "predict",
    "compare",
    "evaluate",
    "report",
    "resume",
    "verify",
    "methods",
    "demo",
    "export",
    "card",
    "serve",
    "playground",
)


def blocks(path, language):
    return [body for kind, body in FENCE.findall(path.read_text()) if kind == language]


def name_of(path):
    return str(path.relative_to(ROOT))


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def with_code():
    """Return the pages with Python code, the slow ones marked as nightly."""
    return [
        pytest.param(path, marks=pytest.mark.nightly if name_of(path) in SLOW else ())
        for path in PAGES
        if blocks(path, "python")
    ]


@pytest.mark.parametrize("path", with_code(), ids=[name_of(p.values[0]) for p in with_code()])
def test_python_blocks_run(path, tmp_path, monkeypatch, one_thread):
    import matplotlib.pyplot as plt

    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "page"}
    try:
        for number, block in enumerate(blocks(path, "python")):
            exec(compile(block, f"{path.name}, block {number}", "exec"), namespace)
    finally:
        plt.close("all")


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_block_has_a_known_language(path):
    # A fence such as "```python no-run" would neither run here nor be highlighted on the site.
    text = path.read_text()
    assert {kind for kind, _ in FENCE.findall(text)} <= set(LANGUAGES)
    # All of them are closed.
    assert 2 * len(FENCE.findall(text)) == len(re.findall(r"^```", text, re.MULTILINE))


def commands():
    """Yield every credibly command on a page, as (page, words)."""
    for path in PAGES:
        for block in blocks(path, "sh"):
            for line in block.splitlines():
                words = shlex.split(line, comments=True)
                if "credibly" in words and (words[0] == "credibly" or "torchrun" in words):
                    yield path, words[words.index("credibly") + 1 :]


@pytest.mark.parametrize("path, words", list(commands()), ids=lambda v: " ".join(v) if isinstance(v, list) else v.name)
def test_commands_exist_with_their_options(path, words):
    import typer.main

    from credibly.cli import app

    known = typer.main.get_command(app).commands
    verb, rest = words[0], words[1:]
    assert verb in VERBS
    assert verb in known
    parameters = known[verb].params
    options = {flag: p for p in parameters if p.param_type_name == "option" for flag in (*p.opts, *p.secondary_opts)}
    arguments = [p for p in parameters if p.param_type_name == "argument"]
    given, used = [], set()
    while rest:
        word = rest.pop(0)
        if word.startswith("-"):
            flag, has_value, _ = word.partition("=")
            assert flag in options, f"credibly {verb} has no {flag}, used in {path.name}"
            used.add(options[flag].name)
            if not has_value and not options[flag].is_flag:
                assert rest, f"{flag} needs a value"
                rest.pop(0)
        else:
            given.append(word)
    most = float("inf") if any(p.nargs == -1 for p in arguments) else len(arguments)
    assert sum(p.required for p in arguments) <= len(given) <= most
    assert {p.name for p in options.values() if p.required} <= used


def test_the_readme_opens_with_a_picture_and_the_two_commands():
    text = (ROOT / "README.md").read_text()
    shown = re.findall(r"```sh\n(.*?)\n```", text, re.DOTALL)
    assert len(shown) == 2
    assert shown[0].endswith("credibly demo --quick")
    assert "pytest" in shown[1]
    assert text.index("](docs/pictures/") < text.index(shown[0])
    # Before the first section.
    assert text.index(shown[1]) < text.index("## ")


def test_every_method_is_in_the_readme():
    text = (ROOT / "README.md").read_text()
    for name, method in cr.METHODS.items():
        assert f"| `{name}` | `{method.__name__}` |" in text


@pytest.mark.parametrize("name", list(cr.METHODS))
def test_every_method_has_a_page(name):
    text = (DOCS / "methods" / f"{name}.md").read_text()
    title = text.splitlines()[0]
    assert title.startswith("# ")
    assert title.endswith(f"`{name}`")
    for part in ("**The idea.**", "**When to use it.**", "**Pitfalls.**", "**Cost.**", "```python"):
        assert part in text
    assert "```math" in text or "```text" in text
    assert any(
        f"cr.{cr.METHODS[name].__name__}(" in block for block in blocks(DOCS / "methods" / f"{name}.md", "python")
    )
    assert f"(methods/{name}.md)" in (DOCS / "which-method.md").read_text()
    # Drawn by `python docs/pictures.py method-NAME`.
    for page in (text, (DOCS / "gallery.md").read_text()):
        assert f"pictures/method-{name}.svg)" in page


def test_documents_link_to_files_that_exist():
    for path in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        text = FENCE.sub("", path.read_text())
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


# -- the site ----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site with warnings as errors."""
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


class _Sources(HTMLParser):
    """The scripts, styles, fonts and pictures that a page loads."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        known = dict(attrs)
        if tag in ("script", "img", "iframe", "source"):
            self.found.append(known.get("src"))
        if tag == "link" and known.get("rel") != "canonical":
            self.found.append(known.get("href"))


def test_the_site_needs_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        sources = _Sources()
        sources.feed(page.read_text())
        for source in filter(None, sources.found):
            assert not re.match(r"(https?:)?//", source), f"{page.name} loads {source}"
            if page.name != "404.html" and not source.startswith("data:"):
                assert (page.parent / source.partition("?")[0].partition("#")[0]).exists(), f"{page.name}: {source}"


def test_the_reference_has_every_public_name(site):
    text = "".join(page.read_text() for page in (site / "api").rglob("*.html"))
    anchors = set(re.findall(r'id="(credibly\.[\w.]+)"', text))
    ends = {anchor.rpartition(".")[2] for anchor in anchors}
    # A dict, an internal class, what Ctrl-C raises, a string.
    undocumented = {"METHODS", "Layout", "Interrupted", "__version__"}
    for name in set(cr.__all__) - undocumented:
        value = getattr(cr, name)
        is_module = isinstance(value, types.ModuleType)
        assert name in ends or (is_module and any(a.startswith(value.__name__) for a in anchors)), name
    assert ":::" not in re.sub(r"<[^>]+>", "", text)


def test_every_page_is_reached_from_the_menu():
    class Loader(yaml.SafeLoader):
        pass

    listed = re.findall(r"[\w/-]+\.md", yaml.dump(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]))
    assert len(listed) == len(set(listed))
    assert {str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md")} <= set(listed)


# -- the pictures ------------------------------------------------------------------------------------------------------
def shown_pictures():
    """Return the drawings shown on pages, without those of the results, which studies write beside their pages."""
    pages = [path for path in DOCS.rglob("*.md") if path.relative_to(DOCS).parts[0] != "results"]
    pattern = re.compile(r"!\[[^\]]+\]\(([^)]+\.svg)\)")
    shown = {(path, target) for path in pages for target in pattern.findall(path.read_text())}
    return {os.path.relpath((path.parent / target).resolve(), DOCS) for path, target in shown}


def test_screenshots_are_there_and_light():
    pattern = re.compile(r"!\[[^\]]+\]\(([^)]+\.png)\)")
    shown = {page.parent / target for page in DOCS.rglob("*.md") for target in pattern.findall(page.read_text())}
    assert shown == set((DOCS / "howto").glob("*.png"))
    assert all(path.stat().st_size < 150_000 for path in shown)


def test_pictures_of_results_are_there_and_light():
    for folder in {path.parent for path in (DOCS / "results").rglob("README.md")}:
        text = (folder / "README.md").read_text()
        shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
        assert {path.name for path in folder.glob("*.svg")} == set(shown)
        assert all((folder / name).stat().st_size < 200_000 for name in shown)
        # The site builds its own from README.md.
        assert not (folder / "index.html").exists()


def test_pictures_are_light_and_have_no_date():
    files = {f"pictures/{p.name}": p for p in (DOCS / "pictures").iterdir()}
    assert shown_pictures() == set(files)
    for path in files.values():
        text = path.read_text()
        assert len(text) < 150_000
        assert "<dc:date>" not in text
        # No white background.
        assert 'style="fill: #ffffff"/>' not in text.partition('id="axes_1"')[0]


@pytest.fixture(scope="module")
def script():
    """The names that the script of the pictures defines."""
    return runpy.run_path(str(DOCS / "pictures.py"), run_name="pictures")


def test_every_picture_shown_is_drawn_by_the_script(script):
    assert {f"pictures/{name}.svg" for name in script["PICTURES"] | script["GALLERY"]} == shown_pictures()


# The others take longer and use the same functions.
@pytest.mark.parametrize(
    "name", ["method-mle", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("star", "kinds"))]
)
def test_pictures_can_be_drawn(script, name, tmp_path, one_thread):
    assert script["draw"](name, tmp_path, quick=True).read_text().startswith("<?xml")


def test_the_image_compiles_the_library_from_every_file_that_a_wheel_needs():
    """Without setup.py, or without a compiler, the image would silently lack the C++ library."""
    build, image = (ROOT / "Dockerfile").read_text().split("\nFROM ")[-2:]
    copied = {name for line in re.findall(r"^COPY (.*)", build, re.MULTILINE) for name in line.split()[:-1]}
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "src"} <= copied
    assert "g++" in build
    assert "CREDIBLY_VARIANTS=all pip wheel" in build
    assert "COPY --from=build" in image
