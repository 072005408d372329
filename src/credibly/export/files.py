"""Files of exported graphs: written under a temporary name, compared with `predict`, then renamed into place."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from credibly.errors import InputError
from credibly.export.graph import Program, quiet

Array = npt.NDArray[Any]

SUFFIXES = (".onnx", ".pt2")
# Largest difference between the file and `predict`, in units of `Case.scales`.
TOLERANCE = 1e-5
# ONNX stores its tensors in one protocol buffer, which may not reach 2 GiB.
LARGEST = 2**31 - 2**26
# Prefix of all names inside a graph, so that none coincides with an output.
PREFIX = "credibly."


@dataclass(frozen=True)
class Exported:
    """The exported file.

    Attributes:
        path: the file.
        bytes: its size.
        inputs: names of the inputs.
        outputs: names of the outputs.
        draws: number of draws in the file.
        difference: the largest difference from `predict` by output on the rows that were compared: relative to the
            value plus the predictive standard deviation, to the variance for its parts, absolute for labels.
        notes: what the file holds and what it leaves out, as sentences.
    """

    path: Path
    bytes: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    draws: int
    difference: dict[str, float]
    notes: tuple[str, ...]


def check_path(path: str | os.PathLike[str], overwrite: bool, suffixes: Sequence[str] = SUFFIXES) -> Path:
    """Return the path. Raise on an unknown suffix, a missing folder or an existing file."""
    file = Path(path)
    if file.suffix not in suffixes:
        raise InputError("path", f"must end in {' or '.join(suffixes)}, got {os.fspath(path)!r}")
    if not file.parent.is_dir():
        raise InputError("path", f"no such folder: {os.fspath(file.parent)!r}")
    if file.is_dir():
        raise InputError("path", f"{os.fspath(path)!r} is a folder")
    if file.exists() and not overwrite:
        raise InputError("path", f"{os.fspath(path)!r} exists", "Pass overwrite=True (--force) to replace it")
    if file.suffix == ".onnx":
        check_libraries()
    return file


def check_libraries() -> None:
    """Raise unless the optional libraries behind ONNX files can be imported."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        found = f"needs a library that is not installed ({error.name})"
        raise InputError("path", f"an .onnx file {found}", 'Run pip install "credibly[export]"') from error


def check_size(size: int, draws: int) -> None:
    """Raise if the tensors of all draws do not fit into one ONNX file."""
    if size > LARGEST:
        found = f"{draws:,} draws take {size / 2**30:.1f} GiB, one ONNX file holds 2"
        raise InputError("path", found, "Keep fewer draws (draws=..., or posterior.compress(n, x)), or write .pt2")


def _prefix_names(graph: Any) -> None:
    """Prefix every name of a graph and of its subgraphs, which frees the names of its outputs."""
    for entry in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        entry.name = PREFIX + entry.name
    for node in graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                names[place] = PREFIX + name if name else name
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
                _prefix_names(inner)


def _forget_origin(*graphs: Any) -> None:
    """Remove the converter's record of where each operation comes from: lines of code and local paths."""
    for graph in graphs:
        graph.doc_string = ""
        del graph.metadata_props[:]
        for entry in graph.value_info:
            del entry.metadata_props[:]
        for entry in () if not hasattr(graph, "initializer") else (*graph.input, *graph.output, *graph.initializer):
            del entry.metadata_props[:]
        for node in graph.node:
            node.doc_string = ""
            del node.metadata_props[:]
            for attribute in node.attribute:
                _forget_origin(*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs)


def _used_names(graph: Any) -> set[str]:
    """Return the names that the nodes of a graph and of its subgraphs read, and those of its outputs."""
    found = {entry.name for entry in graph.output}
    for node in graph.node:
        found.update(node.input)
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
                found |= _used_names(inner)
    return found


def _drop_unused(graph: Any) -> None:
    """Remove constants that the converter left over, each of which onnxruntime warns about when it loads the file."""
    used = _used_names(graph)
    kept = [entry for entry in graph.initializer if entry.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def _name_ends(model: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Name the inputs and outputs of a model."""
    from onnx import helper

    graph = model.graph
    _prefix_names(graph)
    before, after = [], []
    for entry, name in zip(graph.input, inputs):
        before.append(helper.make_node("Identity", [name], [entry.name]))
        entry.name = name
    for entry, name in zip(graph.output, outputs):
        after.append(helper.make_node("Identity", [entry.name], [name]))
        entry.name = name
    nodes = [*before, *graph.node, *after]
    del graph.node[:]
    graph.node.extend(nodes)


def to_onnx(program: Program, inputs: Sequence[str], outputs: Sequence[str], facts: Mapping[str, str]) -> Any:
    """Return a traced graph as an ONNX model, with the given names and metadata."""
    try:
        with quiet():
            converted = torch.onnx.export(program, dynamo=True, verbose=False)
        assert converted is not None
        model = converted.model_proto
    except Exception as error:
        lines = [line for line in str(error).splitlines() if "No ONNX function" in line or "Error when" in line]
        reason = (lines or [type(error).__name__])[0][:300]
        raise InputError(
            "posterior",
            f"ONNX has no operation for a part of its network or likelihood ({reason})",
            "Write a .pt2 file for torch, or replace that part",
        ) from error
    _forget_origin(model.graph, *model.functions)
    _drop_unused(model.graph)
    _name_ends(model, inputs, outputs)
    del model.metadata_props[:]
    for key, value in facts.items():
        model.metadata_props.add(key=key, value=value)
    model.producer_name = "credibly"
    return model


@dataclass(frozen=True)
class Case:
    """Rows on which a file is compared with `predict`.

    Attributes:
        given: inputs by name.
        expected: outputs by name.
        scales: the size of one unit of difference by name of an output, broadcastable against it; 1 for others.
    """

    given: Mapping[str, Array]
    expected: Mapping[str, Array]
    scales: Mapping[str, Array]


def write_checked(path: Path, content: Any, cases: Sequence[Case], advice: str = "") -> dict[str, float]:
    """Write a graph, run it, and move it into place if it agrees with `predict`.

    Args:
        path: the file.
        content: a traced program for .pt2, a model for .onnx.
        cases: inputs with the outputs that the graph must return.
        advice: what to do if it does not, where more than rounding may be the reason.

    Returns:
        The largest difference by output.
    """
    part = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        if path.suffix == ".onnx":
            part.write_bytes(content.SerializeToString())
            session = onnx_session(part)
            names = [output.name for output in session.get_outputs()]
            answers = [dict(zip(names, session.run(names, dict(case.given)))) for case in cases]
        else:
            with quiet():
                torch.export.save(content, part)
                loaded = torch.export.load(part)
            answers = [_run_program(loaded, case.given, list(case.expected)) for case in cases]
        found = _differences(cases, answers)
        worst = max(found, key=lambda name: found[name])
        if not found[worst] <= TOLERANCE:
            raise InputError(
                "posterior",
                f"the exported graph differs from predict by {found[worst]:.1e} in {worst!r}, more than {TOLERANCE:g}",
                f"Nothing was written. {advice or 'Fit in float64 (dtype=torch.float64), or serve it with credibly'}",
            )
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return found


def onnx_session(path: Path) -> Any:
    """Return a session of onnxruntime on the CPU. Raise if it lacks an operation of the graph, or cannot read it."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        advice = "Use a newer onnxruntime, or serve the posterior with credibly itself"
        raise InputError("posterior", f"onnxruntime cannot run the exported graph ({reason})", advice) from error


def _run_program(program: Program, given: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
    with torch.no_grad(), quiet():
        found = program.module(check_guards=False)(*(torch.from_numpy(value) for value in given.values()))
    return {name: value.numpy() for name, value in zip(names, found)}


def _differences(cases: Sequence[Case], answers: Sequence[Mapping[str, Array]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for case, answer in zip(cases, answers):
        for name, value in case.expected.items():
            mine = answer[name]
            if mine.shape != value.shape:
                error = float("inf")
            elif value.dtype.kind != "f":
                error = float((mine != value).mean())
            else:
                same = (mine == value) | (np.isnan(mine) & np.isnan(value))
                apart = np.abs(mine.astype(np.float64) - value) / case.scales.get(name, np.ones(()))
                # NaN on one side alone is a difference, which a maximum would hide from the comparison below.
                apart = np.where(np.isnan(apart), np.inf, apart)
                error = float(np.where(same, 0.0, apart).max(initial=0.0))
            found[name] = max(found.get(name, 0.0), error)
    return found
