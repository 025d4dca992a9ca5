"""Threads: as many as asked for, on the caller's cores, whoever calls and forks; and the same bits whatever their number."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import khtst_compile as kc
from khtst_compile import cpu, workers

Draw = Callable[..., dict[str, np.ndarray]]
SEVERAL = min(2, cpu.usable_cores())


def kernel_threads() -> int:
    import tvm

    return int(tvm.get_global_func("runtime.NumThreads")())


@pytest.fixture(scope="module")
def one(library: Path) -> Any:
    return kc.load(library, threads=1)


@pytest.fixture(scope="module")
def two(library: Path) -> Any:
    return kc.load(library, threads=2)


@pytest.fixture
def affinity() -> Iterator[frozenset[int]]:
    before = cpu.cores()
    yield before
    cpu.bind(before)


def test_the_number_asked_for_is_the_number_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_NUM_THREADS", "1")  # what TVM would take
    assert [workers.run(n, kernel_threads) for n in (SEVERAL, 1, SEVERAL)] == [SEVERAL, 1, SEVERAL]


def test_no_more_threads_than_cores_of_the_caller(affinity: frozenset[int]) -> None:
    cpu.bind(frozenset([max(affinity)]))
    assert workers.run(2, kernel_threads) == 1
    assert cpu.cores() == {max(affinity)}


def test_threads_do_not_change_a_bit(one: Any, two: Any, draw: Draw) -> None:
    for batch, length in ((1, 1), (7, 33), (30, 64)):
        inputs = draw(batch, length, seed=5)
        (want, want_taps), (got, got_taps) = one.run_with_taps(inputs), two.run_with_taps(inputs)
        np.testing.assert_array_equal(want["output"], got["output"])
        for a, b in zip(want_taps, got_taps, strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_callers_affinity_stays(one: Any, two: Any, draw: Draw, affinity: frozenset[int]) -> None:
    for cores in (affinity, frozenset([min(affinity)]), affinity):
        cpu.bind(cores)
        for loaded in (two, one):
            loaded.run(draw(2, 8))
            assert cpu.cores() == cores


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_reaches_the_caller_and_leaves_its_affinity(threads: int, affinity: frozenset[int]) -> None:
    def fail() -> None:
        raise KeyError("from a kernel")

    for _ in range(2):
        with pytest.raises(KeyError, match="from a kernel"):
            workers.run(threads, fail)
        assert cpu.cores() == affinity
    assert workers.run(threads, lambda: 3) == 3


def test_a_new_thread_keeps_its_affinity(one: Any, draw: Draw, affinity: frozenset[int]) -> None:
    """TVM ties a thread to a core when it first computes there."""
    seen: list[frozenset[int]] = []

    def work() -> None:
        one.run(draw(2, 8))
        seen.append(cpu.cores())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [affinity]


def test_calls_from_several_threads_on_several_artifacts(one: Any, two: Any, library: Path, draw: Draw) -> None:
    other = kc.load(library, threads=2)
    sizes = [(1, 3), (20, 64), (2, 40), (9, 33), (30, 64), (1, 64)]
    inputs = [draw(b, n, seed=i) for i, (b, n) in enumerate(sizes)]
    want = [one.run(x)["output"] for x in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        for turn in range(12):
            loaded = (one, two, other)[(i + turn) % 3]
            if not np.array_equal(loaded.run(inputs[i])["output"], want[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(sizes))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


CHILD = """
import os, sys, threading, numpy as np
import khtst_compile as kc
art = kc.load(sys.argv[1], threads=int(sys.argv[2]))
ids = np.arange(1200).reshape(20, 60) % 50
inputs = {"ids": ids, "mask": ids >= 0}
want = art.run(inputs)["output"]
stop = threading.Event()
def busy():
    while not stop.is_set():
        art.run(inputs)
other = threading.Thread(target=busy)
other.start()
states = []
for _ in range(5):
    pid = os.fork()
    if pid == 0:
        sys.exit(0 if all(np.array_equal(art.run(inputs)["output"], want) for _ in range(3)) else 9)
    states.append(os.waitpid(pid, 0)[1])
stop.set()
other.join()
assert np.array_equal(art.run(inputs)["output"], want)
print(states)
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_a_forked_child_computes_and_ends(library: Path, threads: int) -> None:
    """While another thread of the parent computes; the child has none of the parent's threads."""
    command = [sys.executable, "-c", CHILD, str(library), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ})
    assert done.stdout.strip() == "[0, 0, 0, 0, 0]", done.stderr
