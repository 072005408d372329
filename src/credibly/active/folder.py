"""The folder of an active-learning loop: the labels so far and the open queries, so that the loop can resume.

loop/
  manifest.json            fingerprints of the problem and the pool, settings, the history of rounds, checksums
  state-00003.safetensors  labelled rows of the pool, their labels, and rows waiting for a label

The state is replaced atomically after every round (see `run_folder`). It holds no weights: they are refitted from the
labels.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from credibly.active.labels import fingerprint
from credibly.core.inputs import Inputs, tensors_of
from credibly.errors import StoreError
from credibly.inference.sampling.identity import identity
from credibly.methods import Method
from credibly.posterior.model import Model
from credibly.posterior.saving import header
from credibly.problem import Problem
from credibly.storage.manifest import load_tensors, sha256
from credibly.storage.run_folder import MANIFEST, RunFolder, checksum

FORMAT, VERSION = "credibly-active", 1


class LoopFolder:
    """A folder that one loop writes to. Saving raises if another process has written to it since."""

    def __init__(self, path: str | os.PathLike[str], manifest: dict[str, Any]) -> None:
        self.path = Path(path).absolute()
        self.name = os.fspath(path)
        self.manifest = manifest
        self.last_checksum = checksum(manifest)

    @classmethod
    def create(cls, path: str | os.PathLike[str], description: dict[str, Any], tensors: dict[str, Tensor]) -> Self:
        """Create a new folder."""
        check_absent(path)
        manifest = {**description, "format": FORMAT, "format_version": VERSION, "round": 0, "history": []}
        with RunFolder.create(path, manifest, {_state(0): tensors}) as made:
            return cls(path, made.manifest)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> tuple[Self, dict[str, Tensor]]:
        """Open a folder and load its last state. Raises if a file is damaged."""
        folder, name = Path(path), os.fspath(path)
        manifest = _read(folder)
        files = manifest["files"]
        try:
            (state, entry), *others = files.items()
            intact = not others and Path(state).name == state
            intact = intact and sha256(folder / state) == entry["sha256"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"out: {name!r} is incomplete ({error})") from error
        if not intact:
            raise StoreError(f"out: {state} in {name!r} was altered (checksum mismatch)")
        return cls(path, manifest), load_tensors(folder / state)

    def save(self, tensors: dict[str, Tensor], history: list[dict[str, Any]]) -> None:
        """Replace the state and the history."""
        with RunFolder(self.path, dict(self.manifest)) as run:
            if _read(self.path).get("checksum") != self.last_checksum:
                raise StoreError(
                    f"out: another process has written to {self.name!r}. Load its state with ActiveLearner.resume"
                )
            number = int(run.manifest["round"]) + 1
            run.manifest["files"] = {}
            run.write(_state(number), tensors)
            run.commit(round=number, history=history)
            self.manifest = run.manifest
        self.last_checksum = checksum(self.manifest)


def check_absent(path: str | os.PathLike[str]) -> None:
    """Raise if the folder exists."""
    if Path(path).exists():
        name = os.fspath(path)
        raise StoreError(
            f"out: {name!r} already exists. Resume it with ActiveLearner.resume({name!r}, problem, pool), or choose "
            "another folder"
        )


def describe_loop(
    problem: Problem, method: Method, seed: int, settings: dict[str, Any], pool: Inputs, targets: Inputs | None
) -> dict[str, Any]:
    """Return the entries of the manifest that identify a loop."""
    layout = problem.layout
    starts = getattr(method, "init", None) == "network"  # otherwise the network's own weights do not matter
    return {
        **header(Model.of(problem), "active", method.record(problem, seed, {})),
        **identity(problem),
        "settings": settings,
        "pool": fingerprint(tensors_of(pool)),
        "targets": None if targets is None else fingerprint(tensors_of(targets)),
        "fixed": fingerprint(list(layout.fixed().items())),
        "start": fingerprint([("start", layout.read(layout.module))]) if starts else None,
    }


def check_same_loop(now: dict[str, Any], then: dict[str, Any], name: str) -> None:
    """Raise unless both describe the same loop; the message names the difference."""
    parts = {
        "pool": "the rows of the pool",
        "targets": "the targets",
        "settings": "the settings",
        "fixed": "the parameters that are not random",
        "start": "the initial weights of the network",
    }
    for part, title in parts.items():
        if now[part] != then[part]:
            raise StoreError(f"out: {title} differ from those that {name!r} was started with. Pass the original ones")
    settings = then["record"]["settings"]
    if now["record"]["settings"] != settings:
        raise StoreError(f"out: {name!r} was started with another method or other settings: {settings}")


def _state(number: int) -> str:
    return f"state-{number:05d}.safetensors"


def _read(folder: Path) -> dict[str, Any]:
    name = os.fspath(folder)
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except OSError:
        raise StoreError(f"out: {name!r} is not the folder of an active-learning loop (no {MANIFEST})") from None
    except ValueError as error:
        raise StoreError(f"out: the manifest of {name!r} is truncated or altered ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or manifest.get("format_version") != VERSION:
        raise StoreError(f"out: {name!r} is not the folder of an active-learning loop in this version's format")
    if manifest.get("checksum") != checksum(manifest):
        raise StoreError(f"out: the manifest of {name!r} was altered (checksum mismatch)")
    return manifest
