"""`credibly predict --level` and `--keep`: which columns the file has, and what is in them."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal

import numpy as np
import openpyxl
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from credibly.tables import TableRun
from credibly.tables.files.reading import read_table, verbatim_batches
from credibly.tables.prediction_columns import prediction_names
from own_tables import REGRESSION, call, diabetes, names, read, refused, wine, write

pytestmark = pytest.mark.usefixtures("no_drawing_in_module")

# Settings that finish quickly; the intervals of these tests are the Bayesian ones.
PLAIN = ("--hidden", "6", "--holdout", "0.2", "--tune", "none", "--no-conformal", "--quiet")
ENSEMBLE = ("--method", "ensemble", "--set", "epochs=20", "--set", "members=3", *PLAIN)
MAP = ("--method", "map", "--set", "steps=30", *PLAIN)


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """Return a folder with house.csv and an ensemble of it."""
    place = tmp_path_factory.mktemp("house")
    write(diabetes(), place / "house.csv")
    found = call("fit", place / "house.csv", "--target", "progress", "--out", place / "run", *ENSEMBLE)
    assert found.exit_code == 0, found.output
    return place


def predicted(place, table, out, *words):
    found = call("predict", place / "run", table, "--out", out, "--quiet", *words)
    assert found.exit_code == 0, (found.output, found.exception)
    return out


class TestLevels:
    def test_columns_per_level_in_the_given_order(self, house, tmp_path):
        out = predicted(house, house / "house.csv", tmp_path / "p.parquet", "--level", "0.975, 0.5,0.8")
        reported = read(out)
        ends = [f"{end}_{level}" for level in ("97.5", "50", "80") for end in ("lower", "upper")]
        assert list(reported) == [*REGRESSION[:4], *ends, "ood", "notes"]
        predictive = TableRun.load(house / "run").model.predict_table(read_table(house / "house.csv"))
        for level in (0.975, 0.5, 0.8):
            lower, upper = predictive.interval(level)
            np.testing.assert_array_equal(reported[f"lower_{100 * level:g}"], lower.double().numpy())
            np.testing.assert_array_equal(reported[f"upper_{100 * level:g}"], upper.double().numpy())

    def test_the_parts_of_the_standard_deviation(self, house, tmp_path):
        reported = read(predicted(house, house / "house.csv", tmp_path / "p.parquet"))
        predictive = TableRun.load(house / "run").model.predict_table(read_table(house / "house.csv"))
        np.testing.assert_allclose(reported["std_aleatoric"], predictive.aleatoric.sqrt().numpy(), rtol=1e-6)
        np.testing.assert_allclose(reported["std_epistemic"], predictive.epistemic.sqrt().numpy(), rtol=1e-6)

    def test_classes_without_a_guarantee_have_no_levels(self, tmp_path):
        table = write(wine(), tmp_path / "wine.parquet")
        assert call("fit", table, "--target", "kind", "--out", tmp_path / "run", *MAP).exit_code == 0
        found = call("predict", tmp_path / "run", table, "--out", tmp_path / "p.csv", "--level", "0.8")
        refused(found, "--level", "predicts classes, without prediction sets")
        assert names(tmp_path) == ["run", "wine.parquet"]

    def test_other_intervals_are_written_beside_the_bayesian_ones(self, house):
        model = TableRun.load(house / "run").model
        predictive = model.predict_table(read_table(house / "house.csv"))

        class Wider:
            def interval(self, level):
                lower, upper = predictive.interval(level)
                return lower - 1, upper + 1

        plain, both = (model.columns(predictive, (0.8, 0.9), promised) for promised in (None, Wider()))
        assert sorted([*both, "notes"]) == sorted(prediction_names(model.preparation, (0.8, 0.9)))
        assert set(plain) == {name for name in both if not name.startswith("bayes_")}
        for level in (80, 90):
            np.testing.assert_array_equal(both[f"bayes_lower_{level}"], plain[f"lower_{level}"])
            np.testing.assert_array_equal(both[f"bayes_upper_{level}"], plain[f"upper_{level}"])
            np.testing.assert_allclose(both[f"lower_{level}"], plain[f"lower_{level}"] - 1)
            np.testing.assert_allclose(both[f"upper_{level}"], plain[f"upper_{level}"] + 1)


@pytest.fixture
def new(tmp_path):
    """Return a CSV file with columns whose cells must not be touched."""
    columns = diabetes(40)
    columns = {name: [("" if v is None else str(v)) for v in values] for name, values in columns.items()}
    columns = {"id": [f"{i:03d}" for i in range(40)], **columns}
    columns["remark"] = ["NA", "1.50", 'say "hi"', "a,b", "", " x ", "none", "line\nbreak", "1e3", "Zürich"] * 4
    table = pa.table(columns)
    pa.csv.write_csv(table, tmp_path / "new.csv")
    return tmp_path / "new.csv", columns


def cells(path):
    options = pa.csv.ConvertOptions(column_types={"id": pa.string(), "remark": pa.string()}, strings_can_be_null=False)
    return pa.csv.read_csv(path, convert_options=options, parse_options=pa.csv.ParseOptions(newlines_in_values=True))


class TestKeep:
    def test_cells_of_a_csv_file_are_unchanged(self, house, tmp_path, new):
        table, columns = new
        out = predicted(house, table, tmp_path / "p.csv", "--keep", "remark, id")
        kept = cells(out)
        assert kept.column_names == ["remark", "id", *REGRESSION]
        assert kept["remark"].to_pylist() == columns["remark"]
        assert kept["id"].to_pylist() == columns["id"]
        without = pa.csv.read_csv(predicted(house, table, tmp_path / "q.csv"))
        assert kept.select(REGRESSION[:-1]).equals(without.select(REGRESSION[:-1]))

    def test_all(self, house, tmp_path, new):
        table, columns = new
        kept = pq.read_table(predicted(house, table, tmp_path / "p.parquet", "--keep", "all"))
        assert kept.column_names == [*columns, *REGRESSION]
        assert {str(kept.schema.field(name).type) for name in columns} == {"string"}
        assert kept["progress"].to_pylist() == columns["progress"]

    @pytest.mark.parametrize("suffix", ["parquet", "csv"])
    def test_types_of_a_parquet_file(self, house, tmp_path, suffix):
        extra = {
            "id": pa.array(range(2**60, 2**60 + 30)),
            "day": pa.array([datetime.date(2024, 1, 1 + i) for i in range(30)]),
            "price": pa.array([Decimal(f"{i}.50") for i in range(30)]),
            "town": pa.array(["Bern", None, "Genf"] * 10).dictionary_encode(),
            "paid": pa.array([True, False, None] * 10),
        }
        made = pa.table({**{k: pa.array(v) for k, v in diabetes(30).items()}, **extra})
        pq.write_table(made, tmp_path / "new.parquet")
        out = predicted(house, tmp_path / "new.parquet", tmp_path / f"p.{suffix}", "--keep", ",".join(extra))
        if suffix == "parquet":
            kept = pq.read_table(out)
            for name in extra:
                assert kept[name].to_pylist() == made[name].to_pylist(), name
                assert kept[name].type == made[name].type, name
        else:
            first, second = out.read_text().splitlines()[1:3]
            assert first.startswith(f'{2**60},2024-01-01,0.50,"Bern",true,')
            assert second.startswith(f"{2**60 + 1},2024-01-02,1.50,,false,")

    @pytest.mark.parametrize("suffix", ["jsonl", "xlsx"])
    def test_types_of_json_lines_and_workbooks(self, house, tmp_path, suffix):
        extra = {
            "id": [*range(2**53 - 9, 2**53), None],
            "ok": [True, False, None, True, False] * 2,
            "share": [0.1, 2.0, None, 1e300, -3.5] * 2,
            "mixed": [1, 2.5] * 5,
            "code": ["007", "x", None, "1.50", "true"] * 2,
            "words": [1, "a", True, None, "b"] * 2,
            "huge": [10**30] * 10,
        }
        columns = diabetes(10) | extra
        rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
        table = tmp_path / f"new.{suffix}"
        if suffix == "jsonl":
            table.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        else:
            extra |= {"day": [datetime.datetime(2024, 1, 1 + i, 9) for i in range(10)]}
            extra.pop("huge")
            book = openpyxl.Workbook()
            for row in ([*columns, "day"], *zip(*columns.values(), extra["day"])):
                book.active.append([cell if not isinstance(cell, int) or cell < 1e20 else None for cell in row])
            book.save(table)
        text = {
            "words": [None if v is None else str(v).lower() for v in columns["words"]],
            "huge": ["1" + "0" * 30] * 10,
        }
        expected = extra | {name: cells for name, cells in text.items() if name in extra}
        kept = ",".join(extra)
        found = pq.read_table(predicted(house, table, tmp_path / "p.parquet", "--keep", kept))
        assert {name: found[name].to_pylist() for name in extra} == expected
        lines = predicted(house, table, tmp_path / "p.jsonl", "--keep", kept).read_text().splitlines()
        for k, line in enumerate(map(json.loads, lines)):
            for name, cells in expected.items():
                cell = str(cells[k]) if name == "day" else cells[k]
                assert line[name] == cell
                assert isinstance(line[name], bool) == isinstance(cell, bool)
        sheet = openpyxl.load_workbook(predicted(house, table, tmp_path / "p.xlsx", "--keep", kept)).active
        assert [sheet.cell(k + 2, 1).value for k in range(10)] == extra["id"]
        assert [sheet.cell(k + 2, 2).value for k in range(10)] == extra["ok"]
        # A copy in a file of text is as before.
        first = predicted(house, table, tmp_path / "p.csv", "--keep", "id,ok,share,code").read_text().splitlines()[1]
        assert first.replace('"', "").startswith(f"{2**53 - 9},true,0.1,007,")

    def test_dates_of_a_parquet_file_are_text_in_json(self, house, tmp_path):
        days = pa.array([datetime.date(2024, 1, 1 + i) for i in range(10)])
        made = pa.table({**{k: pa.array(v) for k, v in diabetes(10).items()}, "day": days})
        pq.write_table(made, tmp_path / "new.parquet")
        out = predicted(house, tmp_path / "new.parquet", tmp_path / "p.jsonl", "--keep", "day")
        assert json.loads(out.read_text().splitlines()[1])["day"] == "2024-01-02"

    def test_many_blocks_and_processes_keep_the_order(self, house, tmp_path, new, monkeypatch):
        from credibly.tables import model

        table, columns = new
        monkeypatch.setattr(model, "LEAST", 7)
        monkeypatch.setattr(model, "BLOCK", 7)
        assert cells(predicted(house, table, tmp_path / "p.csv", "--keep", "id"))["id"].to_pylist() == columns["id"]
        shares = [list(verbatim_batches(table, ["id"], 7, (rank, 2))) for rank in (0, 1)]
        found = [cell for i in range(6) for cell in shares[i % 2][i // 2].column("id").to_pylist()]
        assert found == columns["id"]

    def test_a_name_with_a_comma_is_quoted(self, house, tmp_path):
        write(diabetes(20) | {"a,b": ["x"] * 20}, tmp_path / "new.csv")
        kept = read(predicted(house, tmp_path / "new.csv", tmp_path / "p.csv", "--keep", '"a,b"'))
        assert next(iter(kept)) == "a,b"

    @pytest.mark.parametrize(
        "keep, said",
        [
            ("agee", ("--keep: no column 'agee'", "Did you mean 'age'?")),
            ("age,age", ("--keep must name every column once, got 'age' twice",)),
            ("age,std", ("--keep: 'std' is also the name of a column of predictions", "Rename it")),
            ("all", ("--keep: 'std', 'lower_90' are also names of columns of predictions",)),
        ],
    )
    def test_refusals(self, house, tmp_path, keep, said):
        write(diabetes(20) | {"std": [1] * 20, "lower_90": [1] * 20}, tmp_path / "new.csv")
        found = call("predict", house / "run", tmp_path / "new.csv", "--out", tmp_path / "p.csv", "--keep", keep)
        refused(found, *said)
        assert names(tmp_path) == ["new.csv"]

    def test_a_name_is_free_if_no_such_level_is_asked_for(self, house, tmp_path):
        write(diabetes(20) | {"lower_90": [1] * 20}, tmp_path / "new.csv")
        words = ("--keep", "lower_90", "--level", "0.8")
        kept = read(predicted(house, tmp_path / "new.csv", tmp_path / "p.parquet", *words))
        assert next(iter(kept)) == "lower_90"
        assert "upper_90" not in kept
