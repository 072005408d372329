"""What the description of a run says about its columns."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from credibly.tables.files.reading import read_table
from credibly.tables.preparation import Preparation
from credibly.web.serve.openapi import _row


def test_the_range_of_a_date_is_given_once(tmp_path: Path) -> None:
    days = [f"2020-01-{day:02}" if day % 9 else "" for day in range(1, 31)]
    text = "sold,area,price\n" + "".join(f"{day},{i % 7},{i}\n" for i, day in enumerate(days))
    (tmp_path / "t.csv").write_text(text)
    table = read_table(tmp_path / "t.csv")
    model = SimpleNamespace(preparation=Preparation.fit(table, "price"))
    properties = _row(SimpleNamespace(model=model, sample=table))["properties"]
    about = properties["sold"]["description"]
    assert about == "A date. Training rows: 2020-01-01 to 2020-01-30. 3 missing."
    assert properties["area"]["description"].startswith("Training rows: 0 to 6.")
