"""The page: self-contained, complete, deterministic."""

from __future__ import annotations

import re

import pytest

import credibly as cr
from credibly import report
from credibly.report import Column, Page, Section, Table, picture
from credibly.report.pictures import svg_of
from html_page import check_self_contained


def dots(ax) -> None:
    ax.plot([0, 1], [0, 1], label="up")
    ax.imshow([[0, 1], [1, 0]])
    ax.legend()


def example(title: str = "A page") -> Page:
    columns = (Column("Name"), Column("Error", "low", 2, "in points"), Column("Share", 0.9))
    table = Table(columns, (("a", 1.234, 0.5), ("b", 1.229, 0.95)), "Numbers")
    pictures = tuple(picture(name, dots, alt=f"dots {name}", title=name, caption="Two.") for name in ("one", "two"))
    return Page(title, "The lead.", (Section("First", ("Look here.",), table, pictures, ("Found this.",)),), "The end.")


class TestPage:
    def test_is_self_contained(self):
        page = check_self_contained(report.render(example()))
        assert page.tags.count("svg") == 2
        assert any(address.startswith("data:") for address in page.loads)
        assert [i for i in page.ids if i.startswith("one-")]
        assert [i for i in page.ids if i.startswith("two-")]

    def test_contains_everything(self):
        text = report.render(example())
        for piece in (
            "A page",
            "The lead.",
            "Look here.",
            "Numbers",
            "in points",
            "dots one",
            "Two.",
            "Found this.",
            "The end.",
        ):
            assert piece in text

    def test_user_text_is_escaped(self):
        evil = '<script>alert("x")</script>'
        columns = (Column(evil, note=evil), Column("n"))
        section = Section(
            evil, (evil,), Table(columns, ((evil, 1),), evil), (picture("p", dots, alt=evil, caption=evil),), (evil,)
        )
        text = report.render(Page(evil, evil, (section,), evil))
        page = check_self_contained(text)
        assert "script" not in page.tags
        assert text.count("&lt;script&gt;") >= 10

    def test_text_in_a_picture_is_escaped(self):
        drawn = picture("p", lambda ax: ax.set_title("<b>&</b>"), alt="")
        assert "&lt;b&gt;&amp;&lt;/b&gt;" in drawn.svg

    def test_is_deterministic(self):
        assert report.render(example()) == report.render(example())

    def test_pictures_take_the_text_colour_of_the_page(self):
        svg = picture("p", dots, alt="").svg
        assert "currentColor" in svg
        assert cr.plot.INK not in svg
        assert "<style" not in svg
        assert "<metadata" not in svg
        assert not re.search(r"<svg[^>]*\b(width|height)=", svg)

    @pytest.mark.parametrize("length, columns", [(3, 3), (12, 2), (60, 1)])
    def test_a_legend_has_as_many_columns_as_fit(self, length, columns):
        from matplotlib.figure import Figure

        with cr.plot.style():
            figure = Figure(figsize=(4, 3), layout="constrained")
            axes = figure.subplots()
            lines = [axes.plot([0, 1])[0] for _ in range(4)]
            report.pictures._legend_below(figure, lines, ["m" * length] * 4)
        assert [legend._ncols for legend in figure.legends] == [columns]

    def test_names_are_checked(self):
        with pytest.raises(cr.InputError, match="name must be a letter followed by letters, digits, - or _, got 'a b'"):
            picture("a b", dots, alt="")
        twice = Section("s", pictures=(picture("p", dots, alt=""),) * 2)
        with pytest.raises(cr.InputError, match="pictures must have unique names, got two named 'p'"):
            report.render(Page("t", "l", (twice,)))


class TestTable:
    def test_the_best_is_highlighted_by_its_printed_value(self):
        rows = (("a", 1.234, 0.5), ("b", 1.229, 0.95), ("c", 1.5, 0.2))
        # 1.234 and 1.229 print the same.
        marks = [[cell[2] for cell in row] for row in Table(example().sections[0].table.columns, rows).cells()]
        assert marks == [[False, True, False], [False, True, True], [False, False, False]]

    def test_highlighting(self):
        def best(rule, *values, digits=1):
            rows = tuple((v,) for v in values)
            return [cell[0][2] for cell in Table((Column("x", rule, digits),), rows).cells()]

        assert best("high", 1.0, 3.0, 2.0) == [False, True, False]
        assert best("low", 1.0, 3.0, float("nan")) == [True, False, False]
        assert best(0.9, 0.7, 1.0, 0.8) == [False, True, True]
        assert best(None, 1.0, 2.0) == [False, False]
        assert best("high", 1.01, 1.02) == [False, False]  # both print as 1.0
        assert best("high", 1.0) == [False]

    def test_text_in_a_numeric_column_is_aligned_like_numbers(self):
        table = Table((Column("a"), Column("b", "low", 1)), (("x", 1.0), ("y", "reference"), ("z", 2.0)))
        assert [row[1] for row in table.cells()] == [
            ("1.0", True, True),
            ("reference", True, False),
            ("2.0", True, False),
        ]
        assert not table.cells()[0][0][1]

    def test_numbers(self):
        assert [report.page.show(v, 2) for v in (1.005, -0.001, 7, "x", float("inf"))] == [
            "1.00",
            "0.00",
            "7",
            "x",
            "inf",
        ]

    def test_rows_must_have_one_cell_per_column(self):
        with pytest.raises(cr.InputError, match="rows must have one cell per column, got 2 cells for 1 columns"):
            Table((Column("x"),), ((1, 2),))


class TestWrite:
    def test_writes_and_replaces(self, tmp_path):
        path = tmp_path / "index.html"
        assert report.write(example("old"), path) == path
        report.write(example("new"), str(path))
        assert "<title>new</title>" in path.read_text()
        assert [p.name for p in tmp_path.iterdir()] == ["index.html"]

    def test_a_failure_leaves_the_old_page(self, tmp_path, monkeypatch):
        path = tmp_path / "index.html"
        report.write(example("old"), path)

        def fail(*_):
            raise OSError("disk full")

        monkeypatch.setattr("os.replace", fail)
        with pytest.raises(OSError, match="disk full"):
            report.write(example("new"), path)
        assert "<title>old</title>" in path.read_text()
        assert [p.name for p in tmp_path.iterdir()] == ["index.html"]


def test_text_without_a_glyph_in_the_fonts_of_matplotlib_is_left_to_the_browser():
    from matplotlib.figure import Figure

    figure = Figure()
    figure.subplots().set_title("日付")
    assert "日付" in svg_of(figure, "picture")
