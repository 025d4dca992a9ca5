"""Progress lines, with a clock that the test holds."""

from __future__ import annotations

import io

import pytest

from khtst_compile import progress as module
from khtst_compile.progress import duration, progress


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module.time, "monotonic", made)
    return made


def test_plain_stream_gets_few_lines_and_a_total(clock: Clock) -> None:
    stream = io.StringIO()
    with progress(100, "work", stream) as p:
        for _ in range(100):
            clock.now += 0.2
            p.advance()
    lines = stream.getvalue().splitlines()
    assert lines == [
        "work:  25% 25/100, 15.0 s left",
        "work:  50% 50/100, 10.0 s left",
        "work:  75% 75/100, 5.0 s left",
        "work: 100% 100/100, 0.0 s left",
        "work: 100 in 20.0 s",
    ]


def test_terminal_redraws_one_line(clock: Clock) -> None:
    stream = Terminal()
    with progress(4, "work", stream) as p:
        clock.now += 1
        p.advance(1, "a long note about a layer")
        clock.now += 1
        p.advance(1, "x")
        p.advance(2)
    text = stream.getvalue()
    assert text.count("\n") == 1 and text.endswith("\n")
    drawn = [part for part in text.split("\r") if part]
    assert drawn[1].startswith("work: [######..................]  25% 1/4, 3.0 s left a long note about a layer")
    # The shorter line wipes the longer one.
    assert len(drawn[2]) >= len(drawn[1].rstrip()) and drawn[2].rstrip().endswith("2/4, 2.0 s left x")


def test_quiet_writes_nothing(clock: Clock) -> None:
    stream = Terminal()
    with progress(2, "work", stream, quiet=True) as p:
        clock.now += 10
        p.advance(2)
    assert stream.getvalue() == ""


def test_interrupted_work_says_how_far(clock: Clock) -> None:
    stream = io.StringIO()
    with pytest.raises(ValueError), progress(9, "work", stream) as p:
        p.advance(4)
        clock.now += 3
        raise ValueError
    assert stream.getvalue() == "work: stopped at 4 of 9 after 3.0 s\n"


def test_standard_output_is_left_alone(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress(1, "work") as p:
        p.advance()
    said = capsys.readouterr()
    assert said.out == "" and "work: 1 in" in said.err


def test_no_steps_at_all(clock: Clock) -> None:
    stream = Terminal()
    with progress(0, "work", stream):
        clock.now += 1
    assert stream.getvalue().rstrip().endswith("work: 0 in 1.0 s")


@pytest.mark.parametrize(("seconds", "text"), [(3.44, "3.4 s"), (75, "1 min 15 s"), (7320, "2 h 02 min"), (119.7, "2 min 00 s")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
