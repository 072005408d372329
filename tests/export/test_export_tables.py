"""Runs of tables as graphs, from cells to predictions, beside `credibly predict`; cards and data frames from runs."""

import json
import os
import re
import shutil

import numpy as np
import onnx
import pandas as pd
import pytest

import credibly as cr
from credibly.cli import app
from credibly.export.card import model_card
from credibly.export.files import onnx_session
from credibly.export.pyfunc import RunModel
from credibly.export.tables import export_run
from credibly.storage.sealed import write_facts
from credibly.tables.run import TableRun
from own_tables import call, diabetes, read, wine, write

pytestmark = pytest.mark.usefixtures("no_drawing_in_module")

FIT = ("--tune", "none", "--method", "ensemble", "--set", "steps=20", "--set", "members=3", "--hidden", "4", "--quiet")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run of a regression with five folds and one of three classes, and the first exported by the command."""
    folder = tmp_path_factory.mktemp("export_tables")
    write(diabetes(rows=90), folder / "diabetes.csv")
    write(wine(), folder / "wine.csv")
    for name, target, more in (("diabetes", "progress", ()), ("wine", "kind", ("--holdout", "0.3"))):
        words = (*FIT, "--set", "noise_from=training", *more)
        done = call("fit", folder / f"{name}.csv", "--target", target, "--out", folder / name, *words)
        assert done.exit_code == 0, done.output
    return folder


def cells(frame, run):
    """The columns of a frame as a session takes them."""
    found = {}
    for column in run.model.preparation.used:
        values = frame[column.name]
        text = column.kind == "categorical"
        found[column.name] = values.fillna("").to_numpy(object) if text else values.to_numpy(np.float64)
    return found


def test_regression_with_categories_gaps_and_the_guarantee(place):
    done = call("export", place / "diabetes", place / "model.onnx", "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["largest_difference"] < 1e-5
    assert "carry the run's coverage guarantee" in facts["notes"][-1]
    onnx.checker.check_model(onnx.load(place / "model.onnx"))
    run = TableRun.load(place / "diabetes")
    assert run.model.calibration.folds == 5
    session = onnx_session(place / "model.onnx")
    frame = pd.read_csv(place / "diabetes.csv", keep_default_na=True)
    frame.loc[0, "clinic"] = "West"
    complete = frame[frame.notna().all(axis=1)].iloc[1:12]
    predicted = place / "predictions.csv"
    complete.to_csv(place / "rows.csv", index=False)
    assert call("predict", place / "diabetes", place / "rows.csv", "--out", predicted, "--quiet").exit_code == 0
    expected = read(predicted)
    for rows in (1, 7):
        found = dict(zip(facts["outputs"], session.run(None, cells(complete[:rows], run))))
        assert not found["imputed"].any()
        for name in set(facts["outputs"]) - {"imputed"}:
            np.testing.assert_allclose(found[name], expected[name][:rows], rtol=1e-5, err_msg=name)
    # Rows with gaps: as with imputed cells, and marked.
    found = dict(zip(facts["outputs"], session.run(None, cells(frame, run))))
    text_known = frame["clinic"].isin(["Nord, links", "Süd", "Ost"]) | frame["clinic"].isna()
    np.testing.assert_array_equal(found["imputed"], frame["bmi"].isna().to_numpy(int) + ~text_known)
    filled = frame.assign(clinic=frame["clinic"].where(frame["clinic"] != "West"))
    import pyarrow as pa

    inputs = run.model.preparation.transform(pa.Table.from_pandas(filled))[0]
    gaps = np.flatnonzero(frame["bmi"].isna())
    np.testing.assert_allclose(found["mean"][gaps], run.model.predict(inputs).mean.numpy()[gaps], rtol=1e-5)


def test_classes_are_text_with_probabilities(place, tmp_path):
    run = TableRun.load(place / "wine")
    record = export_run(run, tmp_path / "model.onnx")
    frame = pd.read_csv(place / "wine.csv")
    found = dict(zip(record.outputs, onnx_session(record.path).run(None, cells(frame, run))))
    expected = RunModel(place / "wine").predict(frame)
    assert list(found["prediction"]) == list(expected["prediction"])
    names = [name for name in record.outputs if name not in ("prediction", "imputed")]
    assert [name for name in names if name.startswith("p_")] == ["p_Barbera d'Asti", "p_Barolo", "p_Grignolino"]
    for name in names:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-6, err_msg=name)
    assert "Prediction sets are not exported" in record.notes[-1]


@pytest.mark.parametrize(
    "words, message",
    [
        (("model.pt2",), "must end in .onnx"),
        (("old.onnx",), "--force"),
        (("new.onnx", "--level", "1.5"), "must be probabilities between 0 and 1"),
    ],
)
def test_bad_requests_end_with_words(place, tmp_path, words, message):
    (tmp_path / "old.onnx").write_bytes(b"old")
    done = call("export", place / "wine", tmp_path / words[0], *words[1:])
    assert done.exit_code == 2
    assert message in done.stderr.replace("\n", " ")
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"old"]


@pytest.mark.parametrize("transform", ["log", "log1p"])
def test_logarithmic_targets_also_where_the_mean_is_clipped(tmp_path, transform):
    rng = np.random.default_rng(0)
    x = rng.normal(size=80)
    frame = pd.DataFrame({"x": x, "price": np.exp(5 + x + 0.2 * rng.normal(size=80))})
    frame.to_csv(tmp_path / "t.csv", index=False)
    words = ("--target", "price", "--transform", transform, "--holdout", "0.25", *FIT)
    assert call("fit", tmp_path / "t.csv", "--out", tmp_path / "run", *words).exit_code == 0
    done = call("export", tmp_path / "run", tmp_path / "model.onnx", "--json")
    assert done.exit_code == 0, done.output
    names, far = json.loads(done.stdout)["outputs"], np.array([-30.0, 0.0, 2.0, 4.0, 8.0, 20.0])
    found = dict(zip(names, onnx_session(tmp_path / "model.onnx").run(None, {"x": far})))
    expected = RunModel(tmp_path / "run").predict(pd.DataFrame({"x": far}))
    for name in set(names) - {"imputed"}:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, err_msg=name)


def test_dates_are_refused(tmp_path):
    days = pd.date_range("2024-01-01", periods=60).astype(str)
    values = np.random.default_rng(0).normal(size=60)
    pd.DataFrame({"day": days, "size": values, "y": values + np.arange(60)}).to_csv(tmp_path / "t.csv", index=False)
    fit = (*FIT[:2], "--method", "map", "--set", "steps=5", "--hidden", "4", "--quiet", "--holdout", "0.2")
    assert call("fit", tmp_path / "t.csv", "--target", "y", "--out", tmp_path / "run", *fit).exit_code == 0
    with pytest.raises(cr.InputError, match="has columns of dates \\('day'\\), and ONNX has no calendar"):
        export_run(TableRun.load(tmp_path / "run"), tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()


def test_the_card_has_what_the_run_stores(place):
    done = call("card", place / "diabetes", "--out", place / "MODEL_CARD.md")
    assert done.exit_code == 0, done.output
    text, facts = (place / "MODEL_CARD.md").read_text(), TableRun.load(place / "diabetes").facts
    results = json.loads((place / "diabetes" / "results.json").read_text())
    assert f"| RMSE | {facts['figures']['rmse']:.4g} | {results['baseline']['rmse']:.4g} |" in text
    assert "90 rows, each predicted by a fit that has not seen it" in text
    assert results["verdict"][0] in text
    assert "`clinic` had 3 categories" in text
    assert f"measured {facts['guarantee']['measured']:.1%}" in text
    assert facts["config"]["table_sha256"] in text
    assert "/" not in text.split("- Table: ")[1].split(",")[0]
    again = call("card", place / "diabetes", "--out", place / "MODEL_CARD.md")
    assert again.exit_code == 2
    assert "--force" in again.stderr
    assert "`credibly card` computes it" in model_card(place / "diabetes")


def test_a_card_names_metrics_and_settings_in_words(place):
    """Keys of a file, such as set_size, and None for a default are not for readers."""
    text = model_card(place / "wine")
    assert "| coverage of 90% prediction sets |" in text
    assert "| mean size of 90% prediction sets |" in text
    assert "- Prior: Normal with standard deviation 2, divided by" in text
    assert "None" not in text
    assert "Noise" not in text
    metrics = text.split("## Metrics")[1].split("## Verdict")[0]
    assert not re.search(r"^\| \w+_\w+ \|", metrics, re.MULTILINE)
    assert "- Noise: " in model_card(place / "diabetes")


def test_the_card_shows_nothing_that_no_checksum_covers(place, tmp_path):
    """A forged results.json, or a pipe in its place, changes nothing; fields that table.json lacks are named."""
    run = tmp_path / "run"
    shutil.copytree(place / "diabetes", run)
    assert call("card", run, "--out", tmp_path / "card.md").exit_code == 0
    known = (tmp_path / "card.md").read_text()
    for forged in ('{"verdict": ["Perfect."], "baseline": {"rmse": 1e9}}', '{"baseline": [1]}', "[" * 100_000, None):
        (run / "results.json").unlink()
        if forged is None:
            os.mkfifo(run / "results.json")
        else:
            (run / "results.json").write_text(forged)
        assert call("card", run, "--out", tmp_path / "card.md", "--force").exit_code == 0
        assert (tmp_path / "card.md").read_text() == known
    facts = json.loads((run / "table.json").read_text())
    for change in ({"guarantee": [1]}, {"preparation": {**facts["preparation"], "columns": [1]}}, {"config": {}}):
        write_facts(run, facts | change)
        with pytest.raises(cr.StoreError, match="is invalid"):
            model_card(run)
        done = call("card", run, "--out", tmp_path / "card.md", "--force")
        assert done.exit_code == 1, done.output
        assert "Traceback" not in done.output


def test_a_frame_is_predicted_like_a_file(place):
    frame = pd.read_csv(place / "diabetes.csv").set_index(np.arange(100, 190))
    assert call("predict", place / "diabetes", place / "diabetes.csv", "--out", place / "p.csv", "--level", "0.8",
                "--quiet").exit_code == 0  # fmt: skip
    expected, model = read(place / "p.csv"), RunModel(place / "diabetes")
    found = model.predict(frame, {"levels": [0.8]})
    assert list(found.index) == list(frame.index)
    for name in ("mean", "std", "lower_80", "upper_80", "ood"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-7, err_msg=name)
    for bad, message in ((frame[["age"]].rename(columns={"age": "x"}), "none of the columns"), ([1], "DataFrame")):
        with pytest.raises(cr.InputError, match=message):
            model.predict(bad)
    with pytest.raises(cr.InputError, match="params"):
        model.predict(frame, {"level": 0.9})


def test_a_frame_is_read_by_the_conventions_of_the_training_table(tmp_path):
    """Codes of missing values, decimal commas and dates with the day first."""
    rng = np.random.default_rng(0)
    size, days = rng.normal(size=60), pd.date_range("2024-01-13", periods=60).strftime("%d/%m/%Y")
    frame = pd.DataFrame({"code": np.where(size > 1, -999.0, size), "size": size, "day": days, "y": size + 1})
    frame["size"] = [f"{value:.2f}".replace(".", ",") for value in size]
    frame.to_csv(tmp_path / "t.csv", index=False)
    fit = (*FIT[:2], "--method", "map", "--set", "steps=5", "--hidden", "4", "--quiet", "--holdout", "0.2")
    words = ("--target", "y", "--out", tmp_path / "run", "--na=-999", *fit)
    assert call("fit", tmp_path / "t.csv", *words).exit_code == 0
    assert call("predict", tmp_path / "run", tmp_path / "t.csv", "--out", tmp_path / "p.csv", "--quiet").exit_code == 0
    expected, model = read(tmp_path / "p.csv"), RunModel(tmp_path / "run")
    assert set(model.run.model.preparation.conventions.decimals) == {"size"}
    for given in (frame, frame.astype({"size": "string", "day": "category"})):
        found = model.predict(given)
        for name in ("mean", "std"):
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, err_msg=name)
    with pytest.raises(cr.InputError, match="column of several types"):
        model.predict(frame.assign(size=[1.0, "1,5"] * 30))
    with pytest.raises(cr.InputError, match="more than one column named 'size'"):
        model.predict(frame[["size", "size", "day"]])


def test_the_commands_are_listed():
    assert {"export", "card"} <= {command.name for command in app.registered_commands}
