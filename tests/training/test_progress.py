"""The progress of a run: plain lines where there is no terminal, a bar where there is one."""

import io
import time

import pytest

from minigrad.training.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands until it is set."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_plain_lines(clock):
    stream = io.StringIO()
    progress = Progress(100, 400, stream=stream)
    clock[0] += 50.0
    progress.update(200, {"loss": 0.123456, "|g|": 2.0, "test_mse": 0.5}, line=True)
    clock[0] += 5.0
    progress.update(210, {"loss": 0.1})                      # too soon for another
    clock[0] += 5.0
    progress.update(220, {"loss": 0.05, "|g|": 1.0})
    progress.close()
    first, second = stream.getvalue().splitlines()
    # 100 steps in 50 s since it went on from step 100: 2 a second, 200 more take 100 s.
    assert first == "step 200/400 (50%)  loss 0.1235  |g| 2  test_mse 0.5  2.0 steps/s  ETA 01:40"
    assert second == "step 220/400 (55%)  loss 0.05  |g| 1  test_mse 0.5  2.0 steps/s  ETA 01:30"


def test_a_bar_on_a_terminal():
    stream = Terminal()
    progress = Progress(0, 4, stream=stream)
    progress.bar.mininterval = 0
    for step in range(1, 5):
        progress.update(step, {"loss": 0.25, "|g|": 3.0})
    progress.line("a line that stays")
    progress.close()
    shown = stream.getvalue()
    assert "4/4" in shown
    assert "loss 0.25  |g| 3" in shown
    assert "a line that stays\n" in shown


def test_quiet_says_nothing():
    for stream in (io.StringIO(), Terminal()):
        progress = Progress(0, 10, quiet=True, stream=stream)
        progress.update(5, {"loss": 1.0}, line=True)
        progress.line("hello")
        progress.close()
        assert stream.getvalue() == ""
