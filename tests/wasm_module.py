"""The WebAssembly module in node, for tests."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import credibly

STATIC = Path(credibly.__file__).parent / "web" / "playground" / "static" / "wasm"
MODULE = STATIC / "credibly.wasm"
CALLS = Path(__file__).parent / "backends" / "wasm_calls.mjs"
NODE = shutil.which("node")


def node_lacking() -> str:
    """Return why the module cannot be run here, empty if it can."""
    if NODE is None:
        return "node is not installed"
    version = subprocess.run([NODE, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    return "" if int(version.lstrip("v").split(".")[0]) >= 18 else f"node must be 18 or newer, got {version}"


LACKING = node_lacking()
needs_node = pytest.mark.skipif(bool(LACKING), reason=LACKING or "node runs the module")


def scripts_in(folder: Path) -> Path:
    """Return a copy of the scripts that every version of node takes for ES modules."""
    copy = folder / "scripts"
    if not copy.exists():
        copy.mkdir(parents=True)
        for script in STATIC.glob("*.js"):
            shutil.copy(script, copy)
        (copy / "package.json").write_text('{"type": "module"}')
    return copy


def call(calls: list[tuple[str, dict[str, Any]]], folder: Path, module: Path = MODULE) -> list[Any]:
    """Run calls of wasm_calls.mjs and return their results."""
    assert NODE is not None
    command = [NODE, str(CALLS), str(scripts_in(folder)), str(module)]
    done = subprocess.run(command, input=json.dumps(calls), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
