"""Artifact + arrays -> arrays. Needs numpy and TVM's runtime; never torch."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from khtst_compile import artifact, cpu
from khtst_compile.errors import ArtifactError, EnvironmentProblem, UsageError
from khtst_compile.signature import TensorSpec, check_inputs

Array = npt.NDArray[Any]
LIBRARY, WEIGHTS = "model.so", "weights.bin"


def load(path: str | Path, *, threads: int | None = None, verify_hashes: bool = True) -> Artifact:
    """Load an artifact made by `lower`.

    threads: worker threads for kernels (default, and at most: the cores this process may use). Version, hashes and CPU features are
    checked before any native code is mapped. Raises ArtifactError for a damaged or foreign folder, EnvironmentProblem where this
    machine cannot run it.
    """
    folder = artifact.read(path, kind="library", hashes=verify_hashes)
    _check_machine(folder)
    return Artifact(folder, threads)


def _check_machine(folder: artifact.Folder) -> None:
    target = folder.manifest["target"]
    lacking = cpu.missing(target["cpu_flags"])
    if lacking:
        raise EnvironmentProblem(
            f"{folder.path}: built for {target['name']}, which needs the CPU features {', '.join(target['cpu_flags'])}; "
            f"this machine lacks {', '.join(lacking)}; lower again with a target from `khtst-compile targets` that can run here"
        )
    import tvm

    built, here = folder.manifest["made_by"].get("tvm"), tvm.__version__
    if built != here:
        raise EnvironmentProblem(
            f"{folder.path}: built with tvm {built}, this environment has {here}; install apache-tvm=={built} or lower again"
        )


class Engine:
    """A compiled library with its weights: named functions on arrays. Calls are serialized: the VM keeps state while it runs."""

    def __init__(self, library: Path, weights: list[Array], threads: int):
        import tvm
        import tvm_ffi
        from tvm import relax

        self._tvm, self._lock, self._threads = tvm, threading.Lock(), threads
        self._library = library
        self._arrays = weights  # kernels read these in place
        self._weights = tvm_ffi.convert([_tensor(tvm, a) for a in weights])
        try:
            self._vm = relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
        except (OSError, RuntimeError) as error:
            raise ArtifactError(f"{library}: cannot be loaded ({error}); make the artifact again") from error
        self._functions = {name: self._vm[name] for name in ("main", "taps")}

    def call(self, function: str, arrays: list[Array]) -> list[Array]:
        """Run `function` ("main" or "taps") and return what it returns."""
        with self._lock, workers(self._threads):
            results = self._functions[function](*(_tensor(self._tvm, a) for a in arrays), self._weights)
            return [r.numpy() for r in results]

    def trace(self, function: str, arrays: list[Array], runs: int) -> list[Step]:
        """The calls of kernels in the order of execution, each with the median of its times over `runs` runs.

        Raises EnvironmentProblem where the program's calls cannot be seen.
        """
        from tvm import relax

        now = time.thread_time if self._threads == 1 else time.perf_counter
        constants = {w.__chandle__() for w in self._weights}
        seen: list[list[Step]] = []
        started = 0.0

        def watch(func: Any, name: str, before: bool, result: Any, *args: Any) -> None:
            nonlocal started
            if before:
                started = now()
                return
            spent = now() - started
            if not name.startswith("vm.builtin."):
                given = [a for a in args if hasattr(a, "shape") and hasattr(a, "dtype")]
                seen[-1].append(Step(name, tuple(_operand(a, a.__chandle__() in constants) for a in given), spent))

        # A machine of its own: one that was watched once stays slow.
        machine = relax.VirtualMachine(self._tvm.runtime.load_module(str(self._library)), self._tvm.cpu())
        machine.set_instrument(watch)
        called = machine[function]
        with self._lock, workers(self._threads):
            tensors = [_tensor(self._tvm, a) for a in arrays]
            for _ in range(runs + 1):
                seen.append([])
                called(*tensors, self._weights)
        if not seen[0]:
            raise EnvironmentProblem(f"{self._library}: its calls cannot be watched; lower again with this version")
        columns = zip(*seen[1:], strict=True)  # the first run only warms up
        return [replace(calls[0], seconds=statistics.median(c.seconds for c in calls)) for calls in columns]


@dataclass(frozen=True)
class Operand:
    """A tensor a kernel was called with. bytes: of all of it; weight: whether it is one of the program's constants."""

    shape: tuple[int, ...]
    bytes: int
    weight: bool


@dataclass(frozen=True)
class Step:
    """One call of a kernel: its tensors, results last, and its time (CPU time of the caller with one thread, else wall time)."""

    kernel: str
    operands: tuple[Operand, ...]
    seconds: float


def _operand(tensor: Any, weight: bool) -> Operand:
    shape = tuple(int(n) for n in tensor.shape)
    return Operand(shape, math.prod(shape) * np.dtype(str(tensor.dtype)).itemsize, weight)


class Artifact:
    """A loaded program. `inputs` and `outputs` list name, dtype and shape; `run` computes. Calls from several threads are serialized."""

    def __init__(self, folder: artifact.Folder, threads: int | None):
        self.folder = folder
        self.manifest = folder.manifest
        self.inputs = tuple(TensorSpec.from_json(e) for e in folder.manifest["inputs"])
        self.outputs = tuple(TensorSpec.from_json(e) for e in folder.manifest["outputs"])
        if threads is not None and threads < 1:
            raise UsageError(f"threads is {threads}; needed: at least 1")
        cores = cpu.usable_cores()
        self.threads = (
            min(threads, cores) if threads is not None else cores
        )  # more than one a core would only wait for each other
        weights = artifact.map_weights(folder.file(WEIGHTS), folder.manifest["weights"])
        self._engine = Engine(folder.file(LIBRARY), weights, self.threads)

    @property
    def path(self) -> Path:
        """The folder it was loaded from."""
        return self.folder.path

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """inputs: name -> array of the dtype and shape in `self.inputs` -> outputs by name. Raises UsageError naming the input at fault."""
        results = self._engine.call("main", self._check(inputs))
        return {s.name: r for s, r in zip(self.outputs, results, strict=True)}

    def run_with_taps(self, inputs: dict[str, Array]) -> tuple[dict[str, Array], list[Array]]:
        """As `run`, and after it what every kernel wrote, in the order of manifest["taps"]; codes as int8 of logical width."""
        results = self._engine.call("taps", self._check(inputs))
        count = len(self.outputs)
        outputs = {s.name: r for s, r in zip(self.outputs, results[:count], strict=True)}
        offset = int(self.manifest["target"]["codes_offset"])
        taps = zip(self.manifest["taps"], results[count:], strict=True)
        return outputs, [logical(t["kind"], t["features"], r, offset) for t, r in taps]

    def trace(self, inputs: dict[str, Array], runs: int = 1) -> list[Step]:
        """The program as it is executed on these inputs: its kernels in order, each with its median time over `runs` runs."""
        return self._engine.trace("main", self._check(inputs), runs)

    def _check(self, inputs: dict[str, Array]) -> list[Array]:
        return check_inputs(inputs, self.inputs, self.manifest["axes"], self.manifest.get("ranges", {}))


_pool = threading.local()  # TVM keeps one worker pool per calling thread
_pool_lock = threading.Lock()


@contextlib.contextmanager
def workers(threads: int) -> Iterator[None]:
    """Run the block with that many kernel threads, each on a core of its own; the caller's affinity is as before afterwards.

    Left to itself TVM ties the caller to the first core for good, and lets a worker land there too: a second thread then gains nothing.
    """
    cores = os.sched_getaffinity(0)
    if threads == 1 and getattr(_pool, "shape", None) == (1, cores):
        yield  # nothing to place: a short run is not to pay for system calls
        return
    try:
        if getattr(_pool, "shape", None) != (threads, cores):
            _make_pool(threads, cores)
        if threads > 1 and len(cores) > 1:
            os.sched_setaffinity(0, {min(cores)})
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _make_pool(threads: int, cores: set[int]) -> None:
    import tvm

    order = sorted(cores)

    with _pool_lock:
        before = _tasks()
        tvm.get_global_func("runtime.config_threadpool")(1, threads)
        for number, task in enumerate(sorted(_tasks() - before), start=1):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(task, {order[number % len(order)]})
    _pool.shape = (threads, cores)


def _tasks() -> set[int]:
    """Ids of this process's threads."""
    return {int(t.name) for t in Path("/proc/self/task").iterdir()}


def _tensor(tvm: Any, array: Array) -> Any:
    """A TVM tensor on the array's own memory (copied only where it is not contiguous, aligned and writable)."""
    if (
        not (array.flags.c_contiguous and array.flags.writeable and array.ctypes.data % artifact.ALIGN == 0)
        or array.dtype == np.bool_
    ):
        return tvm.runtime.tensor(np.ascontiguousarray(array))
    return tvm.runtime.from_dlpack(array)


def logical(kind: str, features: int | None, value: Array, offset: int) -> Array:
    """A tap as its operator means it: stored codes lose their padding and offset and become int8; the rest is as it is."""
    if kind != "codes":
        return value
    return (value[..., :features].astype(np.int16) - offset).astype(np.int8)
