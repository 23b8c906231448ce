import io
import sys

import pytest

from eqxlike.train import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")


def run(stream, **options):
    with progress(100, label="net", stream=stream, **options) as on_log:
        for step in range(1, 101):
            on_log(step, 1 / step)
    return stream.getvalue()


def test_lines_are_few_and_the_last_is_the_end():
    lines = run(io.StringIO(), num_lines=4).splitlines()
    assert lines == [
        "net: step 25/100, loss 0.04",
        "net: step 50/100, loss 0.02",
        "net: step 75/100, loss 0.01333",
        "net: step 100/100, loss 0.01",
    ]


def test_calls_that_are_rarer_than_lines_all_show():
    stream = io.StringIO()
    with progress(100, stream=stream) as on_log:
        on_log(33, 1.0)
        on_log(66, 1.0)
    assert len(stream.getvalue().splitlines()) == 2


def test_terminal_gets_a_bar():
    text = run(Terminal())
    assert "100/100" in text
    assert "loss 0.01" in text
    assert "step" not in text


def test_terminal_without_rich_gets_lines(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert "net: step 100/100, loss 0.01" in run(Terminal())


def test_bar_is_taken_down_by_an_exception():
    with pytest.raises(OSError, match="disk"), progress(10, stream=Terminal()):
        raise OSError("disk")


def test_rich_is_imported_for_a_bar_alone(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    run(io.StringIO())
    assert "rich" not in sys.modules
