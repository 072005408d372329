"""The command line on a messy table: fit with warnings, predict from other formats, evaluate, reproduce."""

from __future__ import annotations

import bz2
import csv
import datetime
import json
import lzma
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest

from credibly.cli.fit import describe_table
from credibly.cli.options import _names
from credibly.errors import InputError
from credibly.report.evaluated_rows import origin
from credibly.report.recommendations import compare_command, refit_command
from credibly.tables import TableRun, prepare
from credibly.tables.config import Config, read_config
from credibly.tables.files.reading import read_table
from credibly.tables.summarise import summarise_targets
from own_tables import MAP, call, refused, write

pytestmark = pytest.mark.usefixtures("no_drawing_in_module")

ROWS = 120


def house(count: int, seed: int) -> list[dict[str, Any]]:
    """Return rows whose price depends on the area, the rate and the date, as a spreadsheet shows them."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        day, area = int(rng.integers(0, 900)), rng.normal(1500, 300)
        sold = datetime.date(2020, 1, 1) + datetime.timedelta(days=day)
        price = 100 * area + 50 * day + rng.normal(0, 2000)
        rows.append(
            {
                "sold": f"{sold:%d/%m/%Y}",
                "area": f"{area:,.1f}" if i % 20 else "-",
                "rate": f"{rng.random() * 100:.1f}%",
                "age": -999 if i % 10 == 3 else int(rng.integers(1, 90)),
                "customer": f"c{rng.integers(0, 12)}",
                "price": f"${price:,.0f}",
                "fee": f"{price / 50:.4f}",
            }
        )
    return rows


def put(path: Path, rows: list[dict[str, Any]]) -> Path:
    with open(path, "w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return a folder with house.csv, which ends in a total, and a run of it, and what the fit printed."""
    place = tmp_path_factory.mktemp("messy")
    total = dict.fromkeys(house(1, 0)[0], "") | {"sold": "Total", "price": "$99,000,000"}
    table = put(place / "house.csv", [*house(ROWS, 0), total])
    done = call("fit", table, "--target", "price", "--out", place / "run", "--na", "-999", *MAP, "--set", "steps=300")
    assert done.exit_code == 0, done.output
    return place, re.sub(r"\s+", " ", done.output)


def test_the_fit_describes_what_it_read_and_warns(fitted: tuple[Path, str]) -> None:
    place, said = fitted
    assert f"Row {ROWS + 1} left out: 'Total' in sold looks like a total." in said
    assert re.search(r"sold: date, 202\d-\d\d-\d\d to 202\d-\d\d-\d\d", said)
    assert "area: numeric, read as numbers: " in said
    assert re.search(r"rate: numeric, read as numbers: [\d.]+% is ", said)
    assert re.search(r"age: numeric, \d+ missing", said)
    assert "Warning: fee has a correlation of 1.000000 with the target price; pass --drop fee" in said
    assert "pass --group customer if new ones" in said
    assert "pass --time sold if later rows" in said
    run = TableRun.load(place / "run")
    assert len(run.facts["warnings"]) == 3
    assert run.config.na == run.model.preparation.conventions.na == ("-999",)
    assert run.figures["rmse"] < 10_000


@pytest.mark.parametrize("suffix", [".csv", ".csv.xz", ".jsonl", ".feather"])
def test_predictions_are_the_same_from_every_format(fitted: tuple[Path, str], tmp_path: Path, suffix: str) -> None:
    rows = house(30, 1)
    plain = put(tmp_path / "new.csv", rows)
    table = tmp_path / f"new{suffix}"
    if suffix == ".csv.xz":
        table.write_bytes(lzma.compress(plain.read_bytes()))
    elif suffix == ".jsonl":
        table.write_text("\n".join(map(json.dumps, rows)))
    elif suffix == ".feather":
        pa.feather.write_feather(pa.Table.from_pylist(rows), table)
    out = tmp_path / "out.jsonl"
    done = call("predict", fitted[0] / "run", table, "--out", out)
    assert done.exit_code == 0, done.output
    found = read_table(out)
    model = TableRun.load(fitted[0] / "run").model
    expected = model.predict_table(read_table(plain, conventions=model.preparation.conventions))
    np.testing.assert_allclose(found["mean"].to_numpy(), expected.mean.double().numpy(), rtol=1e-6)
    assert found["notes"].null_count == 30  # missing cells were known in training, and -999 is one


def test_evaluation_reads_by_the_conventions_of_the_run(fitted: tuple[Path, str], tmp_path: Path) -> None:
    rows = [row for row in house(200, 2) if int(row["sold"][:2]) <= 12][:30]
    # Of these dates alone, day and month cannot be told apart.
    done = call("evaluate", fitted[0] / "run", put(tmp_path / "new.csv", rows), "--json")
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)["figures"]
    assert figures["rmse"] < 10_000
    # The same errors as those of the predictions, which read the dates, and -999, as the fit did.
    assert call("predict", fitted[0] / "run", tmp_path / "new.csv", "--out", tmp_path / "p.csv").exit_code == 0
    wrong = read_table(tmp_path / "p.csv")["mean"].to_numpy() - read_table(tmp_path / "new.csv")["price"].to_numpy()
    assert figures["rmse"] == pytest.approx(np.sqrt(np.mean(wrong**2)), rel=1e-5)
    run = TableRun.load(fitted[0] / "run")
    x, _ = run.model.preparation.transform(
        read_table(tmp_path / "new.csv", conventions=run.model.preparation.conventions)
    )
    at = run.model.preparation.features.index("sold elapsed")
    column = run.model.preparation.used[0]
    days = [(datetime.datetime.strptime(r["sold"], "%d/%m/%Y") - datetime.datetime(1970, 1, 1)).days for r in rows]
    np.testing.assert_allclose(
        x[:, at], ((np.array(days) - column.first / 864e8) - column.mean) / column.scale, rtol=1e-4
    )


def test_the_configuration_reproduces_the_run(fitted: tuple[Path, str], tmp_path: Path) -> None:
    config = fitted[0] / "run" / "config.toml"
    assert re.search(r'na = \[\s*"-999",?\s*\]', config.read_text())
    done = call("fit", "--config", config, "--out", tmp_path / "again")
    assert done.exit_code == 0, done.output
    first, second = TableRun.load(fitted[0] / "run"), TableRun.load(tmp_path / "again")
    assert first.figures == second.figures
    assert first.model.preparation.used == second.model.preparation.used
    assert first.model.preparation.conventions == second.model.preparation.conventions


def test_recommended_commands_hold_out_the_same_rows(fitted: tuple[Path, str], tmp_path: Path) -> None:
    words = ("--na", "-999", "--group", "customer", "--drop", "fee,age", "--task", "regression", "--weight", "rate")
    table = put(tmp_path / "my house.csv", [{**row, "rate": 1 + i % 3} for i, row in enumerate(house(ROWS, 0))])
    done = call("compare", table, "--target", "price", *words, "--methods", "map", "--set", "map.steps=30",
                "--seed", "3", "--no-baseline", "--out", tmp_path / "c")  # fmt: skip
    assert done.exit_code == 0, done.output
    run = TableRun.load(tmp_path / "c" / "map")
    # Prices tell the rows of the stored file apart.
    customer = {float(row["price"][1:].replace(",", "")): row["customer"] for row in house(ROWS, 0)}
    unseen = {customer[price] for price in run.rows()[0]["price"].to_pylist()}
    assert 0 < len(unseen) < 12
    assert len(run.rows()[0]) == sum(one in unseen for one in customer.values())
    (facts,) = summarise_targets(run)
    for command in (compare_command(facts), refit_command(facts)):
        said = shlex.split(command)
        assert said[2:5] == ["my house.csv", "--target", "price"]
        for option, value in zip(words[::2], words[1::2]):
            assert said[said.index(option) + 1] == value
    assert "together with all rows of the same customer" in origin(facts)
    plain = summarise_targets(TableRun.load(fitted[0] / "run"))[0]
    assert plain.options == ("--na", "-999")


def test_a_date_is_no_target(tmp_path: Path) -> None:
    table = put(tmp_path / "house.csv", house(30, 0))
    refused(call("fit", table, "--target", "sold", "--out", tmp_path / "run", *MAP), "--target", "holds dates")


def test_completion_knows_the_columns_of_every_stream(tmp_path: Path) -> None:
    plain = put(tmp_path / "t.csv", house(2, 0)).read_bytes()
    columns = list(house(1, 0)[0])
    for name, pack in ("t.csv.bz2", bz2.compress), ("t.csv.xz", lzma.compress):
        (tmp_path / name).write_bytes(pack(plain))
        assert _names(tmp_path / name) == columns
    (tmp_path / "t.jsonl").write_text(json.dumps(house(1, 0)[0]))
    assert _names(tmp_path / "t.jsonl") == columns
    pa.feather.write_feather(pa.Table.from_pylist(house(2, 0)), tmp_path / "t.feather")
    assert _names(tmp_path / "t.feather") == columns
    for name in ("t.csv.xz", "t.jsonl", "t.feather"):
        (tmp_path / name).write_bytes(b"\xff")
        assert _names(tmp_path / name) == []


def test_codes_of_missing_values_in_a_file_of_settings_may_be_numbers(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('na = [-999, "gone"]\n')
    assert read_config(tmp_path / "config.toml") == {"na": ("-999", "gone")}
    (tmp_path / "config.toml").write_text("na = -999\n")
    with pytest.raises(InputError, match="na in config.toml must be of type list, got -999"):
        read_config(tmp_path / "config.toml")


def test_one_column_is_one_input(tmp_path):
    file = write({"x": np.arange(60.0) ** 1.5, "y": np.arange(60.0) % 7 / 3}, tmp_path / "t.csv")
    described = describe_table(prepare(Config(str(file), "y", tune="none")))
    assert "1 network input from 1 column." in described.splitlines()
