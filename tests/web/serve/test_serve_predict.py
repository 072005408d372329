"""Answers of the server are what `credibly predict` writes, whatever the format and the company of a request."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import json
import threading

import numpy as np
import pytest
import torch
from served import CSV, JSON, first_lines, parsed, records, refused, serving

from credibly.decide import selective
from credibly.storage.sealed import write_facts
from credibly.tables import Config, TableRun, fit_table, prepare
from credibly.tables.model import epistemic_of, quantile_levels
from credibly.web.serve.batching import Batcher
from credibly.web.serve.rows import Rows
from own_tables import call, write

ROWS = 12


def predicted(run, table, out, *options):
    """Return the bytes that the command writes."""
    found = call("predict", run, table, "--out", out, "--force", "--quiet", *options)
    assert found.exit_code == 0, found.output
    return out.read_bytes()


def table_of(run, tmp_path, rows=ROWS):
    """Return a file of the first rows of the training table, with an empty cell in the second."""
    path = tmp_path / "new.csv"
    lines = first_lines(run.with_suffix(".csv"), rows).splitlines(keepends=True)
    lines[2] = b"," + lines[2].split(b",", 1)[1]
    path.write_bytes(b"".join(lines))
    return path


class TestAgainstTheCommand:
    @pytest.mark.parametrize("level", ["0.9", "0.8,0.95"])
    def test_csv_of_numbers(self, client, numbers, tmp_path, level):
        table = table_of(numbers, tmp_path)
        found = client.post(f"/predict?level={level}", content=table.read_bytes(), headers=CSV | {"Accept": "text/csv"})
        assert found.content == predicted(numbers, table, tmp_path / "out.csv", "--level", level)
        assert found.headers["content-type"] == "text/csv; charset=utf-8"

    @pytest.mark.parametrize("name", ["kind", "visits"])
    def test_csv_of_other_targets(self, all_runs, place, tmp_path, name):
        table = table_of(place / name, tmp_path)
        found = all_runs.post(f"/runs/{name}/predict", content=table.read_bytes(), headers=CSV | {"Accept": "text/csv"})
        assert found.content == predicted(place / name, table, tmp_path / "out.csv")

    def test_json_lines_of_json_rows(self, all_runs, classes, tmp_path):
        table = table_of(classes, tmp_path)
        found = all_runs.post(
            "/runs/kind/predict", json=records(table, ROWS), headers={"Accept": "application/x-ndjson"}
        )
        assert found.content == predicted(classes, table, tmp_path / "out.jsonl")
        both = all_runs.post("/runs/kind/predict", json={"rows": records(table, ROWS)}).json()
        assert both["predictions"] == [json.loads(line) for line in found.text.splitlines()]
        assert both["run"] == "kind"

    def test_messy_rows_as_the_command_reads_them(self, client, numbers, tmp_path):
        table = tmp_path / "messy.csv"
        table.write_text("age,bmi,clinic,more\n0.01,much,Süd,1\n1e400,0.02,Nirgends,2\n,,,3\n")
        lenient = client.post("/predict?strict=false", content=table.read_bytes(), headers=CSV | {"Accept": "text/csv"})
        assert lenient.content == predicted(numbers, table, tmp_path / "out.csv")
        notes = [row["notes"] for row in parsed(lenient)]
        assert "bmi = 'much' is not a number" in notes[0]
        assert "age = inf is not finite" in notes[1]
        refused(client.post("/predict", content=table.read_bytes(), headers=CSV), 422, "'bp', 's5'", "strict=false")

    def test_options_of_the_command(self, all_runs, classes, tmp_path):
        table = table_of(classes, tmp_path, 40)
        asked = "?allow_empty=true&level=0.6&draws=2"
        found = all_runs.post(
            f"/runs/kind/predict{asked}", content=table.read_bytes(), headers=CSV | {"Accept": "text/csv"}
        )
        options = ("--allow-empty", "--level", "0.6", "--draws", "2")
        assert found.content == predicted(classes, table, tmp_path / "out.csv", *options)
        assert any(row["set_60"] == "" for row in parsed(found))

    def test_without_the_guarantee(self, client, numbers):
        rows = records(numbers.with_suffix(".csv"))
        whole, bare = (
            client.post(f"/predict?guarantee={g}", json=rows).json()["predictions"] for g in ("true", "false")
        )
        for one, other in zip(whole, bare):
            assert other["lower_90"] == one["bayes_lower_90"]
            assert other["upper_90"] == one["bayes_upper_90"]
            assert "bayes_lower_90" not in other

    def test_more_rows_than_a_block(self, client, numbers, monkeypatch):
        rows = records(numbers.with_suffix(".csv"), 30)
        whole = client.post("/predict", json=rows).json()["predictions"]
        slot = client.app.state.server.slots["progress"]
        monkeypatch.setattr(slot, "current", dataclasses.replace(slot.current, block_rows=7))
        parts = client.post("/predict", json=rows).json()["predictions"]
        assert len(parts) == 30
        assert [one["notes"] for one in parts] == [one["notes"] for one in whole]
        assert_close(parts, whole)


def assert_close(found, expected):
    """Assert that predictions agree up to the rounding of other shapes."""
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            if isinstance(value, float):
                assert value == pytest.approx(other[name], rel=1e-4, abs=1e-5), name
            else:
                assert value == other[name]


class TestBatching:
    def test_requests_together_get_their_own_answers(self, client, numbers):
        rows = records(numbers.with_suffix(".csv"), 48)
        alone = client.post("/predict", json=rows).json()["predictions"]
        server = client.app.state.server
        before = _batches(server)
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            sizes = [1, 2, 3] * 8
            starts = np.cumsum([0, *sizes[:-1]]).tolist()
            parts = [rows[a : a + n] for a, n in zip(starts, sizes)]
            found = list(pool.map(lambda part: client.post("/predict", json=part).json()["predictions"], parts))
        assert_close([one for part in found for one in part], alone)
        count, total = (b - a for a, b in zip(before, _batches(server)))
        assert total == 48
        assert count < 24
        assert server.slots["progress"].batcher.rows == 0

    def test_different_parameters_are_not_mixed(self, client, numbers):
        rows = records(numbers.with_suffix(".csv"), 1)
        levels = ["0.5", "0.6", "0.7", "0.8"] * 4
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda level: client.post(f"/predict?level={level}", json=rows).json(), levels))
        for level, one in zip(levels, found):
            assert f"lower_{float(level) * 100:g}" in one["predictions"][0]

    def test_one_that_fails_does_not_fail_the_others(self):
        """The queue by itself: a job that raises, in a batch with two others."""
        started = threading.Event()

        def predict(rows):
            started.wait(30)
            if 7 in rows.inputs:
                raise ZeroDivisionError
            return {"twice": 2 * rows.inputs[:, 0]}

        async def run():
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                sizes = []
                batcher = Batcher(pool, batch_rows=10, max_queue=10, observe=sizes.append)
                jobs = [batcher.predict(Rows(np.array([[v]]), []), "key", predict) for v in (1, 2, 7, 3)]
                tasks = [asyncio.create_task(job) for job in jobs]
                await asyncio.sleep(0.05)
                started.set()
                return await asyncio.gather(*tasks, return_exceptions=True), sizes

        found, sizes = asyncio.run(run())
        assert isinstance(found.pop(2), ZeroDivisionError)
        assert [one["twice"].tolist() for one in found] == [[2], [4], [6]]
        assert sum(sizes) == 3


def _batches(server):
    found = server.metrics.histograms.get(("credibly_batch_rows", ()))
    return (sum(found.counts), found.sum) if found else (0, 0)


class TestAbstention:
    def test_classes_by_the_rule_of_decide(self, all_runs, classes):
        run = TableRun.load(classes)
        table, _ = run.rows()
        inputs, y = run.model.inputs(table)[0], run.model.preparation.target_values(table)
        expected = selective(run.predict_rows(inputs), torch.from_numpy(y), risk=0.2, confidence=0.9)
        assert 0 < expected.accepted < expected.rows
        rows = records(classes.with_suffix(".csv"), 178)
        found = all_runs.post("/runs/kind/predict?risk=0.2&confidence=0.9", json=rows).json()
        assert found["abstention"]["accepted_fraction"] == pytest.approx(expected.coverage, abs=0.01)
        assert found["abstention"]["held_out_rows"] == expected.rows
        for one in found["predictions"]:
            highest = max(value for name, value in one.items() if name.startswith("p_"))
            assert one["abstain"] == (1 - highest >= expected.threshold) or abs(1 - highest - expected.threshold) < 1e-6
        assert {one["abstain"] for one in found["predictions"]} == {True, False}

    def test_a_promise_that_cannot_be_made_abstains_from_all(self, all_runs, classes):
        rows = records(classes.with_suffix(".csv"), 5)
        found = all_runs.post("/runs/kind/predict?risk=0.001", json=rows, headers={"Accept": "text/csv"})
        assert [row["abstain"] for row in parsed(found)] == ["true"] * 5

    def test_numbers_within_a_tolerance(self, client, numbers):
        run = TableRun.load(numbers)
        table, _ = run.rows()
        predictive = run.predict_rows(run.model.inputs(table)[0])
        errors = np.abs(predictive.mean.double().numpy() - run.model.preparation.target_values(table))
        tolerance = float(np.quantile(errors, 0.9))
        rows = records(numbers.with_suffix(".csv"), 40)
        found = client.post(f"/predict?risk=0.3&tolerance={tolerance}", json=rows).json()
        # 12 of 120 rows are wrong: accepting all of them passes the test of a risk of 0.3.
        assert found["abstention"]["accepted_fraction"] == 1
        assert found["abstention"]["wrong_among_accepted"] == int((errors > tolerance).sum())
        assert not any(one["abstain"] for one in found["predictions"])
        refused(client.post("/predict?risk=0.3", json=rows), 422, "risk", "tolerance")

    def test_far_rows_of_a_logarithmic_target(self, tmp_path):
        """The mean and std of a far row stop at the limits of the transform, the uncertainty does not."""
        rng = np.random.default_rng(0)
        x = rng.normal(size=160).round(3)
        price = np.exp(5 + x + 0.2 * rng.normal(size=160)).round(3)
        table = write({"x": x, "price": price}, tmp_path / "prices.csv")
        settings = {"members": 3, "steps": 200, "lr": 0.05}
        # Linear, so that every member grows.
        chosen = {"tune": "none", "hidden": (), "method": "ensemble", "settings": settings}
        config = Config(str(table), "price", transform="log", holdout=0.25, **chosen)
        run = fit_table(prepare(config), tmp_path / "price", progress=False)
        far = [-60.0, -10.0, 0.0, 10.0, 60.0, 1e5]
        with serving(run.path) as client:
            asked = "/predict?risk=0.4&tolerance=150"
            found = client.post(asked, json=[{"x": value} for value in far]).json()["predictions"]
            assert not found[2]["abstain"]
            assert found[2]["ood"] < 0.95
            assert [one["ood"] for one in found if one is not found[2]] == [1.0] * 5
            assert all(one["abstain"] for one in found[3:])
            assert found[5]["std"] < found[2]["std"]
            assert "the mean is limited" in found[5]["notes"]
            assert "the mean is limited" not in found[2]["notes"]
        # Runs of earlier versions have levels in the units of the target; their far rows have no lower score either.
        facts = json.loads((run.path / "table.json").read_text())
        assert facts.pop("ood_fitted") is True
        predictive = run.model.predict(run.model.inputs(run.sample())[0])
        facts["ood_levels"] = quantile_levels(epistemic_of(predictive)).tolist()
        write_facts(run.path, facts)
        old = TableRun.load(run.path).model
        again = old.ood(old.predict(np.array([[10.0], [1e5]], np.float32)))
        np.testing.assert_array_equal(again, 1)

    def test_runs_without_held_out_rows_have_none(self, all_runs, counts):
        answer = all_runs.post("/runs/visits/predict?risk=0.1", json=records(counts.with_suffix(".csv")))
        refused(answer, 422, "risk", "held-out")


class TestPicture:
    def test_density_is_that_of_the_library(self, client, numbers):
        run = TableRun.load(numbers)
        rows = records(numbers.with_suffix(".csv"), 1)
        found = client.post("/picture", json=rows).json()
        curve = found["curves"][0]
        x, y = np.array(curve["x"]), np.array(curve["y"])
        assert curve["kind"] == "density"
        assert np.trapezoid(y, x) == pytest.approx(1, abs=0.01)
        one = run.model.predict(run.model.inputs(run.sample())[0][:1])
        densities = [float(one.log_prob(torch.tensor([v])).exp()) for v in x[::40]]
        assert y[::40] == pytest.approx(densities, rel=1e-4)
        assert found["predictions"] == client.post("/predict", json=rows).json()["predictions"]

    def test_counts_sum_to_one(self, all_runs, counts):
        found = all_runs.post("/runs/visits/picture", json=records(counts.with_suffix(".csv"), 1)).json()["curves"][0]
        assert found["kind"] == "probability"
        assert sum(found["y"]) == pytest.approx(1, abs=0.01)
        assert all(x == int(x) for x in found["x"])

    def test_unusual_inputs_are_named(self, all_runs, numbers, counts):
        row = records(numbers.with_suffix(".csv"), 1)[0]
        row |= {"age": 9.0, "clinic": "Nirgends", "bmi": None}
        found = {one["name"]: one for one in all_runs.post("/runs/progress/picture", json=[row]).json()["inputs"]}
        assert {name for name, one in found.items() if one["unusual"]} == {"age", "clinic", "bmi"}
        assert found["age"]["why"] == "above all training rows"
        assert found["age"]["position"] == 1
        assert found["clinic"]["why"] == "not among the training rows"
        assert found["bmi"] == {
            "name": "bmi", "kind": "numeric", "unusual": True, "why": "missing", "value": None, "position": None,
        }  # fmt: skip
        late = {"day": "2031-05-01", "size": 0.0}
        found = all_runs.post("/runs/visits/picture", json=[late]).json()["inputs"]
        assert [(one["value"], one["unusual"]) for one in found] == [("2031-05-01", True), (0.0, False)]

    def test_one_row_only(self, client, numbers):
        refused(client.post("/picture", json=records(numbers.with_suffix(".csv"), 2), headers=JSON), 422, "one row")
