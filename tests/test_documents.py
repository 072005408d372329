"""What the documents show is run: the README's Python, and the commands it gives."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [p for p in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if "```python" in p.read_text()]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_python_blocks_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
    assert blocks
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(path), "exec"), namespace)


def test_the_readme_opens_with_the_two_commands():
    text = (ROOT / "README.md").read_text()
    commands = re.findall(r"```sh\n(.*?)\n```", text, re.DOTALL)
    assert len(commands) == 2
    assert commands[0].endswith("credibly demo")
    assert "pytest" in commands[1]
    assert text.index(commands[1]) < text.index("## ")  # before anything else


def test_every_method_is_in_the_readme():
    import credibly as cr

    text = (ROOT / "README.md").read_text()
    for name, method in cr.METHODS.items():
        assert f"| `{name}` | `{method.__name__}` |" in text


def test_documents_link_to_files_that_exist():
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"
