"""The threads kernels run on.

TVM keeps one pool of workers for each calling thread, sizes it from the environment at first use, ties its caller to cores, and joins
workers that a forked child no longer has. So a thread of ours is the caller of every run with more than one worker: the pool has the
size asked for, no thread of the user's is moved to other cores, many callers share one pool, and a child process starts its own.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TypeVar

from khtst_compile import cpu

T = TypeVar("T")
_ONE_PER_CORE, _SHARED = -2, -3  # TVM's affinity modes

_local = threading.local()  # alone: this thread's own pool has no workers
_pools: dict[int, _Pool] = {}
_guard = threading.Lock()
_in_use: weakref.WeakSet[Lock] = weakref.WeakSet()


class Lock:
    """A lock held while native code runs. A fork waits for all of them: a child must not inherit a run half done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _in_use.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def run(threads: int, function: Callable[[], T]) -> T:
    """function() with that many kernel threads, at most one for each core the caller may use; raises what it raises."""
    if threads > 1:
        cores = cpu.cores()
        threads = min(threads, len(cores))
    if threads > 1:
        return _pool(threads).run(function, cores)
    if not getattr(_local, "alone", False):
        _stay_alone()
    return function()


def _stay_alone() -> None:
    """Let kernels run in the calling thread alone: TVM then neither starts workers nor looks for them."""
    with _kept_affinity():
        _configure(_ONE_PER_CORE, 1, [0])
    _local.alone = True


@contextlib.contextmanager
def _kept_affinity() -> Iterator[None]:
    cores = cpu.cores()
    try:
        yield
    finally:
        cpu.bind(cores)


def _configure(mode: int, threads: int, cores: list[int]) -> None:
    import tvm

    tvm.get_global_func("runtime.config_threadpool")(mode, threads, [str(c) for c in cores])


def _pool(threads: int) -> _Pool:
    with _guard:
        if threads not in _pools:
            _pools[threads] = _Pool(threads)
        return _pools[threads]


class _Pool:
    """A thread that runs one job after another, with its workers. threads: how many in all."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._cores: frozenset[int] = frozenset()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=f"khtst-kernels-{threads}", daemon=True).start()

    def run(self, function: Callable[[], T], cores: frozenset[int]) -> T:
        results: list[T] = []
        errors: list[BaseException] = []
        done = threading.Lock()
        done.acquire()

        def job() -> None:
            try:
                self._place(cores)
                results.append(function())
            except BaseException as error:  # to the caller, whose error it is
                errors.append(error)
            finally:
                done.release()

        self._jobs.put(job)
        done.acquire()
        if errors:
            raise errors.pop()
        return results.pop()

    def _serve(self) -> None:
        while True:
            self._jobs.get()()

    def _place(self, cores: frozenset[int]) -> None:
        """Threads on a core each where there are as many as cores; else free among the cores, where other processes run too."""
        if cores == self._cores:
            return
        order = sorted(cores)
        _configure(_ONE_PER_CORE, self._threads, order[: self._threads])  # at first this also says how many workers to start
        if self._threads < len(order):
            _configure(_SHARED, self._threads, order)
            cpu.bind(cores)
        else:
            cpu.bind(frozenset(order[:1]))
        self._cores = cores


def _before_fork() -> None:
    _held[:] = list(_in_use)
    for lock in _held:
        lock.__enter__()
    _guard.acquire()  # last, as in a run


def _after_fork() -> None:
    _guard.release()
    for lock in _held:
        lock.__exit__()
    _held.clear()


def _after_fork_in_child() -> None:
    _pools.clear()  # their threads stayed in the parent
    _after_fork()


_held: list[Lock] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
