"""`credibly export run/ model.onnx`: a run of `credibly fit` as one graph, from the cells of a row to predictions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from credibly.conformal.predictive import CalibratedPredictive
from credibly.core.levels import LEVELS, check_levels
from credibly.errors import InputError
from credibly.export.columns import ColumnsGraph, check_columns, level_positions
from credibly.export.files import Case, Exported, check_path, check_size, to_onnx, write_checked
from credibly.export.graph import DrawsGraph, trace
from credibly.export.guarantee import GuaranteeGraph, draw_stride, thinned
from credibly.export.networks import joined, stacked_network
from credibly.export.posteriors import metadata, predict_settings
from credibly.export.quantiles import Fit, has_quantiles
from credibly.export.summary import summarise
from credibly.likelihoods import Likelihood
from credibly.posterior.laplace import LaplacePosterior
from credibly.predictive.base import Predictive
from credibly.tables.cells.parsing import numbers, texts, whole_column
from credibly.tables.columns.encoders import Categorical
from credibly.tables.model import TableModel
from credibly.tables.prediction_columns import ENTROPIES, interval_names, prediction_columns
from credibly.tables.run import TableRun

Array = npt.NDArray[Any]

ROWS = 6
TRACED = 3
IMPUTED = "imputed"


def export_run(
    run: TableRun, path: str | os.PathLike[str], *, levels: Sequence[float] = LEVELS, overwrite: bool = False
) -> Exported:
    """Write a run of `credibly fit` as an ONNX file whose inputs are the columns of the table.

    Numbers are float64 tensors (rows,) with NaN for missing cells, categories string tensors (rows,) with "" for
    missing cells. The outputs have the names of the columns of `credibly predict`, and `imputed`: how many cells of a
    row were missing or unknown and were replaced. `credibly predict` averages over completions of such rows, which a
    graph cannot do; its predictions for them are overconfident.

    Args:
        run: the run.
        path: the file, ending in .onnx.
        levels: of the intervals.
        overwrite: whether to replace an existing file.
    """
    file = check_path(path, overwrite, (".onnx",))
    levels = check_levels("levels", levels)
    model, preparation = run.model, run.model.preparation
    check_columns(preparation)
    if preparation.task == "survival":
        found = "predicts censored times, whose survival probabilities have no ONNX operations"
        raise InputError("run", found, "Serve the run with credibly itself")
    settings, how = predict_settings(model.posterior, None, 0)
    cells = example_cells(run)
    likelihood = _predictive(model, cells, settings).likelihood
    intervals = has_quantiles(likelihood)
    notes = [how, *_notes(model, intervals)]
    promise = _promise(model, likelihood, levels) if intervals else None
    graph = TableGraph(model, likelihood, settings, levels if intervals else (), promise)
    check_size(graph.bytes, graph.network.draws)
    names, outputs = preparation.names, tuple(graph.names)
    clash = [name for name in names if name in outputs]
    if clash:
        found = f"the column {clash[0]!r} has the name of an output of the graph"
        raise InputError("run", found, "Rename it in the table and fit again")
    example = tuple(value[:TRACED].clone() for value in graph.encoded(cells))
    program = trace(graph, example, (({0: torch.export.Dim.DYNAMIC},) * len(example),))
    facts = metadata(model.posterior, graph.network, notes)
    proto = to_onnx(program, names, outputs, facts)
    _read_text(proto, {c.name: level_positions(c, preparation.conventions.na) for c in _categories(model)})
    if preparation.classes is not None:
        _write_labels(proto, preparation.classes)
    cases = [_case(graph, {name: value[rows] for name, value in cells.items()}) for rows in (slice(1), slice(None))]
    difference = write_checked(file, proto, cases)
    return Exported(file, file.stat().st_size, names, outputs, graph.network.draws, difference, tuple(notes))


class TableGraph(nn.Module):
    """Columns of a table -> columns of predictions."""

    def __init__(
        self,
        model: TableModel,
        likelihood: Likelihood,
        settings: Mapping[str, Any],
        levels: Sequence[float],
        promise: GuaranteeGraph | None,
    ) -> None:
        super().__init__()
        self.model, self.settings, self.likelihood, self.levels = model, settings, likelihood, tuple(levels)
        self.preparation = model.preparation
        self.columns = ColumnsGraph(model.preparation)
        width = model.preparation.scaling.outputs(model.preparation.inputs)
        example = [torch.randn(TRACED, width)]
        self.network = stacked_network(model.posterior.predict(example[0], **settings).source, model.posterior.model)
        networks = [self.network]
        for fold in model.folds if promise is not None else ():
            whole = stacked_network(fold.predict(example[0]).source, fold.model)
            networks.append(whole.every(draw_stride(whole.draws)))
        self.counts = [network.draws for network in networks]
        # One network for all fits, so that the graph holds it once.
        self.draws = DrawsGraph(joined(networks), example)
        self.bytes, self.promise = sum(network.bytes for network in networks), promise
        if len(set(self.counts[1:])) > 1:
            found = "has folds with different numbers of draws, and the intervals of a graph need the same"
            raise InputError("run", found, "Fit again without a time limit, or with --no-conformal")
        self.names: list[str] = self._names()

    def forward(self, *cells: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors of `names`."""
        x, imputed = self.columns(cells)
        outputs = self.draws([x]).split(self.counts)
        own = {name: value.split(self.counts) for name, value in self.draws.extra().items()}
        fits: list[Fit] = [(part, {name: values[k] for name, values in own.items()}) for k, part in enumerate(outputs)]
        bounds = [probability for level in self.levels for probability in ((1 - level) / 2, (1 + level) / 2)]
        first, second, aleatoric, epistemic, *ends = summarise(self.likelihood, *fits[0], bounds)
        if self.preparation.classes is not None:
            return (first.argmax(-1), *first.unbind(-1), second, aleatoric, epistemic, imputed)
        targets = len(self.preparation.targets) or 1
        # len() of a traced tensor would build the number of rows into the graph.
        parts = [part.reshape(part.shape[0], targets) for part in (first, second, aleatoric, epistemic, *ends)]
        promised = None
        if self.promise is not None:
            promised = self.promise(fits[1:] or [thinned(fits[0])])
        found: list[Tensor] = []
        for k in range(targets):
            mean, *rest = (part[:, k] for part in parts)
            found += [mean.double(), *(torch.sqrt(value).float() for value in rest[:3])]
            for number in range(len(self.levels)):
                bayes = [value.double() for value in rest[3 + 2 * number : 5 + 2 * number]]
                if promised is not None:
                    found += [side[number, :, k] for side in promised]
                found += bayes
        return (*found, imputed)

    def _names(self) -> list[str]:
        classes = self.preparation.classes
        if classes is not None:
            return ["prediction", *(f"p_{c}" for c in classes), *(f"entropy_{part}" for part in ENTROPIES), IMPUTED]
        names = ["mean", "std", "std_aleatoric", "std_epistemic"]
        for level in self.levels:
            ends = interval_names(level)
            names += [*ends, *(f"bayes_{name}" for name in ends)] if self.promise is not None else ends
        targets = self.preparation.targets
        return [*(names if len(targets) < 2 else [f"{n}_{t}" for t in targets for n in names]), IMPUTED]

    def encoded(self, cells: Mapping[str, Array]) -> list[Tensor]:
        """Return cells by column as the tensors of `forward`: categories by position."""
        found = []
        for column in self.preparation.used:
            values = cells[column.name]
            if isinstance(column, Categorical):
                known, other = level_positions(column, self.preparation.conventions.na)
                values = np.array([known.get(text, other) for text in values.tolist()], dtype=np.int64)
            found.append(torch.from_numpy(np.ascontiguousarray(values)))
        return found


def example_cells(run: TableRun) -> dict[str, Array]:
    """Return some training rows by column as an ONNX file takes them; the last has an unknown or missing cell each."""
    table = run.sample().slice(0, ROWS - 1)
    found: dict[str, Array] = {}
    for column in run.model.preparation.used:
        cells = whole_column(table, column.name)
        if isinstance(column, Categorical):
            values = [text or "" for text in texts(cells).to_pylist()]
            values = [*values, *[values[0]] * (ROWS - 1 - len(values)), "a text that is not a level of the column"]
            found[column.name] = np.array(values, dtype=object)
        else:
            plain = numbers(cells)[0].to_numpy(zero_copy_only=False).astype(np.float64)
            found[column.name] = np.concatenate([plain, np.repeat(plain[:1], ROWS - 1 - len(plain)), [np.nan]])
    return found


def _predictive(
    model: TableModel, cells: Mapping[str, Array], settings: Mapping[str, Any], fold: Any = None
) -> Predictive:
    """Return the predictive of a fit in the units of the target, with missing cells imputed."""
    import pyarrow as pa

    columns = {name: pa.array(values, from_pandas=values.dtype != object) for name, values in cells.items()}
    inputs = model.preparation.scaling(model.preparation.transform(pa.table(columns))[0])
    x = torch.from_numpy(np.ascontiguousarray(inputs, np.float32))
    found = model.posterior.predict(x, **settings) if fold is None else fold.predict(x)
    return model.preparation.in_units(found)


def _case(graph: TableGraph, cells: Mapping[str, Array]) -> Case:
    model, preparation = graph.model, graph.preparation
    predictive = _predictive(model, cells, graph.settings)
    promised = None
    if graph.promise is not None:
        assert model.calibration is not None
        folds = [_predictive(model, cells, {}, fold) for fold in model.folds]
        crossed = folds if model.calibration.folds else ()
        base = folds[0] if folds and not crossed else predictive
        promised = CalibratedPredictive(base, model.calibration, folds=crossed)
    known = prediction_columns(predictive, preparation, graph.levels or LEVELS, promised)
    expected = {name: np.asarray(known[name]) for name in graph.names if name != IMPUTED}
    imputed = [(np.isnan(v) if v.dtype != object else np.zeros(len(v))) for v in cells.values()]
    if not any(isinstance(column, Categorical) for column in preparation.used):
        expected[IMPUTED] = np.sum(imputed, 0).astype(np.int64)
    scales: dict[str, Array] = {}
    for target in preparation.targets if len(preparation.targets) > 1 else ("",):
        end = f"_{target}" if target else ""
        for name in expected:
            if preparation.classes is None and name.endswith(end) and name != IMPUTED:
                spread = expected[f"std{end}"].astype(np.float64)
                scales[name] = np.maximum(np.where(np.isfinite(spread), spread, 1) + np.abs(expected[name]), 1e-300)
    return Case(cells, expected, scales)


def _promise(model: TableModel, likelihood: Likelihood, levels: Sequence[float]) -> GuaranteeGraph | None:
    """Return the intervals with a guarantee, if the run has one that a graph can hold."""
    if model.calibration is None or _why_no_promise(model):
        return None
    return GuaranteeGraph(model.calibration, likelihood, levels, len(model.preparation.targets) or 1)


def _why_no_promise(model: TableModel) -> str:
    if model.calibration is None or model.calibration.settings.score != "pit":
        return ""
    if isinstance(model.posterior, LaplacePosterior):
        return "The intervals carry no guarantee: the draws of the linearised network differ from those calibrated."
    return ""


def _notes(model: TableModel, intervals: bool) -> list[str]:
    preparation = model.preparation
    found = ["Missing and unknown cells are imputed, not averaged over: see the output `imputed`."]
    if preparation.classes is not None:
        if model.calibration is not None:
            found.append("Prediction sets are not exported: they are randomised by a hash of the row.")
    elif not intervals:
        found.append(f"Intervals of {preparation.task} targets are not exported.")
    elif model.calibration is None:
        found.append("The intervals are those of the posterior, without a coverage guarantee.")
    else:
        found.append(_why_no_promise(model) or "The intervals lower and upper carry the run's coverage guarantee.")
    if len(preparation.targets) > 1:
        found.append("Joint intervals of all targets are not exported.")
    return found


def _categories(model: TableModel) -> list[Categorical]:
    return [column for column in model.preparation.used if isinstance(column, Categorical)]


def _read_text(model: Any, columns: Mapping[str, tuple[dict[str, int], int]]) -> None:
    """Make a graph accept the text of categorical columns, which LabelEncoder nodes turn into indices."""
    from onnx import TensorProto, helper

    if not columns:
        return
    for node in [node for node in model.graph.node if node.op_type == "Identity" and node.input[0] in columns]:
        known, other = columns[node.input[0]]
        encoder = helper.make_node(
            "LabelEncoder",
            list(node.input),
            list(node.output),
            domain="ai.onnx.ml",
            keys_strings=list(known),
            values_int64s=list(known.values()),
            default_int64=other,
        )
        node.CopyFrom(encoder)
    for entry in model.graph.input:
        if entry.name in columns:
            entry.type.tensor_type.elem_type = TensorProto.STRING
    _use_ml(model)


def _write_labels(model: Any, classes: Sequence[str]) -> None:
    """Make a graph return the label of the most probable class instead of its index."""
    from onnx import TensorProto, helper

    for node in model.graph.node:
        if node.op_type == "Identity" and list(node.output) == ["prediction"]:
            labels: dict[str, Any] = {
                "keys_int64s": list(range(len(classes))),
                "values_strings": list(classes),
                "default_string": "",
            }
            node.CopyFrom(
                helper.make_node("LabelEncoder", list(node.input), list(node.output), domain="ai.onnx.ml", **labels)
            )
    for entry in model.graph.output:
        if entry.name == "prediction":
            entry.type.tensor_type.elem_type = TensorProto.STRING
    _use_ml(model)


def _use_ml(model: Any) -> None:
    """Declare the operations for classical machine learning, of which LabelEncoder is one."""
    from onnx import helper

    if not any(entry.domain == "ai.onnx.ml" for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
