"""Progress: a rich bar on a terminal, one line elsewhere if asked for, silence otherwise, no cost between updates."""

import io
import subprocess
import sys
import threading

import pytest
from rich.console import Console
from rich.progress import Progress as OtherProgress

import credibly.core.progress as module
from credibly.core.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    """A terminal of 120 columns that can move its cursor, wherever the tests run."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("LINES", "25")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "JUPYTER_COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test advances."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def test_bar_on_a_terminal(clock):
    out = Terminal()
    with Progress("HMC [8 chains]", 50, stream=out) as line:
        clock.now += 10
        line.update(20, **{"R-hat": 1.0123456, "step": "warm-up"})
        clock.now += 15
        line.update(50, final=True, **{"R-hat": 1.001})
    text = out.getvalue()
    assert "\x1b[?25l" in text  # the cursor is hidden ...
    assert text.index("\x1b[?25h") > text.index("50/50")  # ... and shown again
    assert "HMC [8 chains]" in text  # brackets are not markup
    assert "━" in text
    assert "R-hat 1.012  step warm-up" in text
    assert "10s, 15s left" in text  # 30 of 50 steps are left, and 20 took 10 seconds
    assert "25.0s" in text


def test_steps_done_before_are_excluded_from_the_time_left(clock):
    out = Terminal()
    with Progress("HMC", 100, stream=out, first=60) as line:
        clock.now += 1
        line.update(60)
        clock.now += 9
        line.update(80, final=True)
    text = out.getvalue()
    assert "10s, 10s left" in text
    assert text.count("left") == text.count("10s, 10s left")  # no estimate at the first step


def test_line_outside_a_terminal(clock):
    out = io.StringIO()
    with Progress("MAP", 10, True, out) as line:
        clock.now += 4
        line.update(5, loss=0.25)
        line.update(10, final=True, loss=0.125)
    first = f"MAP {'━' * 12}{' ' * 12}  5/10 loss 0.25 4s, 4s left"
    last = f"MAP {'━' * 24} 10/10 loss 0.125 4.0s"
    assert out.getvalue() == f"\r{first}\r{last.ljust(len(first))}\n"


def test_a_line_is_not_longer_than_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "dumb")
    out, file = Terminal(), io.StringIO()
    for stream in (out, file):
        with Progress("a title that is longer than the terminal is wide", 10, True, stream) as line:
            line.update(5, loss=0.25)
        assert stream.getvalue().startswith("\ra title")
        assert stream.getvalue().count("\n") == 1
    assert 0 < len(out.getvalue().strip()) <= 40
    assert "loss 0.25" in file.getvalue()  # a file has no width


@pytest.mark.parametrize("columns, kept", [(120, 4), (72, 3), (60, 2), (35, 0)])
def test_metrics_are_dropped_on_a_narrow_terminal(monkeypatch, columns, kept):
    monkeypatch.setenv("COLUMNS", str(columns))
    out = Terminal()
    metrics = {"loss": 0.5, "R-hat": 1.01, "accepted": 0.8, "divergent": 0.25}
    with Progress("HMC", 1000, stream=out) as line:
        line.update(1000, final=True, **metrics)
    text = out.getvalue()
    assert "HMC" in text
    assert "1000/1000" in text
    assert sum(name in text for name in metrics) == kept


def test_dumb_terminal_gets_the_line(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    with Progress("MAP", 10, stream=out) as line:
        line.update(10, final=True)
    assert "\x1b" not in out.getvalue()
    assert "10/10" in out.getvalue()


def test_silent_without_a_terminal_unless_asked():
    quiet, asked, refused = io.StringIO(), io.StringIO(), Terminal()
    for stream, show in ((quiet, None), (asked, True), (refused, False)):
        with Progress("MAP", 10, show, stream) as line:
            assert line.due() is (stream is asked)
            line.update(10, final=True)
    assert quiet.getvalue() == ""
    assert asked.getvalue().startswith("\rMAP ━━━━")
    assert refused.getvalue() == ""


def test_updates_wait_until_they_are_due(clock):
    out = io.StringIO()
    with Progress("MAP", 100, True, out) as line:
        line.update(1)
        assert not line.due()
        line.update(2)
        clock.now += 0.3
        assert line.due()
        line.update(3)
        line.update(4)
        line.update(5, final=True)
    assert [n for n in range(1, 6) if f" {n}/100" in out.getvalue()] == [1, 3, 5]


def test_silent_beside_another_display_on_the_terminal(monkeypatch):
    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    with OtherProgress(console=Console(file=out), auto_refresh=False) as other:
        other.add_task("the other", total=3)
        with Progress("MAP", 10, True) as line:
            line.update(5)
            line.update(10, final=True)
    assert sys.stderr is out  # the other display has restored the stream
    assert "the other" in out.getvalue()
    assert "MAP" not in out.getvalue()


def test_works_when_another_console_has_a_display_elsewhere():
    theirs, mine = Terminal(), Terminal()
    with OtherProgress(console=Console(file=theirs), auto_refresh=False) as other:
        task = other.add_task("the other", total=3)
        with Progress("MAP", 10, stream=mine) as line:
            line.update(5)
            other.advance(task)
            line.update(10, final=True)
        other.update(task, completed=3)
    assert "10/10" in mine.getvalue()
    assert "MAP" not in theirs.getvalue()
    assert "the other" in theirs.getvalue()


def test_streams_and_cursor_are_restored_after_an_error(monkeypatch):
    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    before, threads = sys.stdout, threading.active_count()

    def interrupted():
        with Progress("MAP", 10) as line:
            line.update(5)
            assert threading.active_count() == threads
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert sys.stderr is out
    assert sys.stdout is before
    assert out.getvalue().rstrip().endswith("\x1b[?25h")


def test_nothing_shown_means_nothing_imported():
    code = """
import io, sys
from credibly.core.progress import Progress
for stream, show in ((io.StringIO(), None), (io.StringIO(), False)):
    with Progress("MAP", 10, show, stream) as line:
        line.update(5)
        line.update(10, final=True)
print(any(m.split(".")[0] == "rich" for m in sys.modules))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


class Handle:
    def __init__(self, shown):
        self.shown = shown

    def update(self, bundle, raw):
        assert raw
        self.shown.append(bundle)


@pytest.fixture
def notebook(monkeypatch):
    """A kernel of a notebook, and what it displays."""
    import types

    shown = []

    def display(bundle, raw, display_id):
        assert raw
        assert display_id
        shown.append(bundle)
        return Handle(shown)

    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    return shown


def test_line_in_a_notebook(clock, notebook, capsys):
    with Progress("MAP <1>", 50) as line:
        clock.now += 10
        line.update(20, loss=0.5)
        clock.now += 15
        line.update(50, final=True, loss=0.25)
    # One element, updated in place.
    assert [bundle["text/plain"] for bundle in notebook] == [
        "MAP <1>  20/50  loss 0.5  10s, 15s left",
        "MAP <1>  50/50  loss 0.25  25.0s",
    ]
    assert "MAP &lt;1&gt;" in notebook[0]["text/html"]
    assert 'value="20" max="50"' in notebook[0]["text/html"]
    assert capsys.readouterr() == ("", "")


def test_nothing_in_a_notebook_if_so_asked(clock, notebook):
    with Progress("MAP", 50, show=False) as line:
        clock.now += 10
        line.update(20, loss=0.5)
    assert notebook == []


def test_ipython_on_a_terminal_is_no_notebook(monkeypatch):
    import types

    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace()))
    assert not Progress("MAP", 5).notebook
    assert Progress("MAP", 5, stream=Terminal()).show
