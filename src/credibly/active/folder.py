"""The folder of an active-learning loop: what was labelled so far and what was asked, so that the loop can go on.

loop/
  manifest.json            the problem and the pool by their fingerprints, settings, the history of rounds, checksums
  state-00003.safetensors  rows of the pool that have labels, the labels, and rows that wait for theirs

It is replaced whole after every round (see `run_folder`), and holds no weights: those are fitted again from the labels.
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
    """A folder that this loop writes to; one that somebody else has written to since is refused."""

    def __init__(self, path: str | os.PathLike[str], manifest: dict[str, Any]) -> None:
        self.path = Path(path).absolute()
        self.name = os.fspath(path)
        self.manifest = manifest
        self.seal = checksum(manifest)

    @classmethod
    def begin(cls, path: str | os.PathLike[str], facts: dict[str, Any], tensors: dict[str, Tensor]) -> Self:
        """A new folder."""
        check_new(path)
        manifest = {**facts, "format": FORMAT, "format_version": VERSION, "round": 0, "history": []}
        with RunFolder.create(path, manifest, {_state(0): tensors}) as made:
            return cls(path, made.manifest)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> tuple[Self, dict[str, Tensor]]:
        """A folder with its last state, after all of it has been found whole."""
        folder, name = Path(path), os.fspath(path)
        manifest = _read(folder)
        files = manifest["files"]
        try:
            (state, facts), *others = files.items()
            whole = not others and Path(state).name == state
            whole = whole and sha256(folder / state) == facts["sha256"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"out: {name!r} is not whole ({error})") from error
        if not whole:
            raise StoreError(f"out: {state} in {name!r} was altered (its checksum does not fit)")
        return cls(path, manifest), load_tensors(folder / state)

    def save(self, tensors: dict[str, Tensor], history: list[dict[str, Any]]) -> None:
        """Replaces the state and the history."""
        with RunFolder(self.path, dict(self.manifest)) as run:
            if _read(self.path).get("checksum") != self.seal:
                raise StoreError(
                    f"out: another process has gone on with {self.name!r}. Take up its state by ActiveLearner.resume"
                )
            number = int(run.manifest["round"]) + 1
            run.manifest["files"] = {}
            run.write(_state(number), tensors)
            run.commit(round=number, history=history)
            self.manifest = run.manifest
        self.seal = checksum(self.manifest)


def check_new(path: str | os.PathLike[str]) -> None:
    """Refuses a folder that is there."""
    if Path(path).exists():
        name = os.fspath(path)
        raise StoreError(
            f"out: {name!r} exists already. Go on with it by ActiveLearner.resume({name!r}, problem, pool), or choose "
            "another folder"
        )


def facts_of(
    problem: Problem, method: Method, seed: int, settings: dict[str, Any], pool: Inputs, targets: Inputs | None
) -> dict[str, Any]:
    """What a folder notes of a loop, to know it again."""
    layout = problem.layout
    starts = getattr(method, "init", None) == "network"  # otherwise the weights it comes with do not matter
    return {
        **header(Model.of(problem), "active", method.record(problem, seed, {})),
        **identity(problem),
        "settings": settings,
        "pool": fingerprint(tensors_of(pool)),
        "targets": None if targets is None else fingerprint(tensors_of(targets)),
        "fixed": fingerprint(list(layout.fixed().items())),
        "start": fingerprint([("start", layout.read(layout.module))]) if starts else None,
    }


def check_facts(now: dict[str, Any], then: dict[str, Any], name: str) -> None:
    """Refuses to go on with what is not the loop that was begun, and says what differs."""
    parts = {
        "pool": "the rows of the pool", "targets": "the targets", "settings": "the settings",
        "fixed": "parameters that are not random", "start": "the weights that the network starts from",
    }  # fmt: skip
    for part, said in parts.items():
        if now[part] != then[part]:
            raise StoreError(f"out: {name!r} was begun with other values: {said} differ. Pass those it was begun with")
    settings = then["record"]["settings"]
    if now["record"]["settings"] != settings:
        raise StoreError(f"out: {name!r} was begun with another method or other settings of it: {settings}")


def _state(number: int) -> str:
    return f"state-{number:05d}.safetensors"


def _read(folder: Path) -> dict[str, Any]:
    name = os.fspath(folder)
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except OSError:
        raise StoreError(f"out: {name!r} is not the folder of an active-learning loop (no {MANIFEST})") from None
    except ValueError as error:
        raise StoreError(f"out: the manifest of {name!r} is cut short or altered ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or manifest.get("format_version") != VERSION:
        raise StoreError(f"out: {name!r} is not the folder of an active-learning loop of this version")
    if manifest.get("checksum") != checksum(manifest):
        raise StoreError(f"out: the manifest of {name!r} was altered (its checksum does not fit)")
    return manifest
