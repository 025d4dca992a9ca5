"""Artifact + arrays -> arrays. Needs numpy and TVM's runtime; never torch."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from khtst_compile import artifact, cpu
from khtst_compile.errors import ArtifactError, EnvironmentProblem, ResourceError, UsageError
from khtst_compile.signature import TensorSpec, check_inputs

Array = npt.NDArray[Any]
LIBRARY, WEIGHTS = "model.so", "weights.bin"
STAGED_BYTES = 65536  # inputs up to this size are copied


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
    """A compiled library with its weights: named functions on arrays. Calls are serialized: the VM keeps state while it runs.

    Small inputs are copied into aligned arrays, for that is less work than a new tensor; large ones are read in place where they are
    aligned. Results are copied out of the buffers `main` works in, so that no caller shares them. Arrays and buffers stay for the next
    call; buffers are replaced when a call needs more, or less than half of what is held.
    """

    def __init__(self, library: Path, weights: list[Array], threads: int):
        import tvm
        import tvm_ffi
        from tvm import relax

        self._tvm, self._ffi, self._lock, self._threads = tvm, tvm_ffi, threading.Lock(), threads
        self._arrays = weights  # kernels read these in place
        try:
            # "naive": buffers are held here, and TVM's pool would keep one of every size there ever was.
            self._vm = relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu(), memory_cfg="naive")
        except (OSError, RuntimeError) as error:
            raise ArtifactError(f"{library}: cannot be loaded ({error}); make the artifact again") from error
        try:
            self._sizes, self._reserve = self._vm["sizes"], self._vm["reserve"]
        except AttributeError as error:
            raise ArtifactError(
                f"{library}: has no function 'sizes', so an earlier khtst-compile made it; lower the quantized artifact again"
            ) from error
        tensors = [_tensor(tvm, a) for a in weights]
        for name in ("main", "taps"):
            self._vm.save_function(name, f"bound {name}", *tensors)
        self._main, self._taps = self._vm["bound main"], self._vm["bound taps"]
        self._shapes: list[tuple[int, ...]] = []
        self._staged: list[Array | None] = []  # where kernels read small inputs; None for one that is read where it is
        self._inputs: list[Any] = []  # tensors on the same memory
        self._held: tuple[int, ...] = ()  # bytes of each buffer
        self._buffers: Any = None

    def call(self, function: str, arrays: list[Array]) -> list[Array]:
        """Run `function` ("main" or "taps") and return what it returns."""
        with self._lock, _workers(self._threads):
            shapes = [a.shape for a in arrays]
            if shapes != self._shapes:
                self._resize(shapes, arrays)
            inputs = [self._input(*each) for each in zip(arrays, self._staged, self._inputs, strict=True)]
            results = self._main(self._buffers, *inputs) if function == "main" else self._taps(*inputs)
            return [np.array(np.from_dlpack(r)) for r in results]

    def _input(self, given: Array, staged: Array | None, tensor: Any) -> Any:
        if staged is None:
            return _tensor(self._tvm, given)
        np.copyto(staged, given, casting="equiv")
        return tensor

    def _resize(self, shapes: list[tuple[int, ...]], arrays: list[Array]) -> None:
        """Make room for inputs of these shapes and for what `main` computes from them."""
        self._shapes = []
        pairs = [(None, None) if a.nbytes > STAGED_BYTES else _staging(self._tvm, a) for a in arrays]
        self._staged, self._inputs = [p[0] for p in pairs], [p[1] for p in pairs]
        shaped = [_tensor(self._tvm, a) if t is None else t for a, t in zip(arrays, self._inputs, strict=True)]
        needed = tuple(self._sizes(*shaped))
        fits = len(needed) == len(self._held) and all(n <= h for n, h in zip(needed, self._held, strict=True))
        if not fits or 2 * sum(needed) < sum(self._held):
            self._held, self._buffers = (), None  # what was held goes before anything is added
            try:
                self._buffers = self._ffi.convert([self._reserve(self._ffi.Shape([n])) for n in needed])
            except (MemoryError, RuntimeError) as error:
                raise ResourceError(
                    f"inputs of shapes {shapes}: intermediate values need {sum(needed) / 2**20:.0f} MiB, more than there is; "
                    "run a smaller batch"
                ) from error
            self._held = needed
        self._shapes = shapes


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

    def _check(self, inputs: dict[str, Array]) -> list[Array]:
        return check_inputs(inputs, self.inputs, self.manifest["axes"], self.manifest.get("ranges", {}))


_pool = threading.local()  # TVM keeps one worker pool per calling thread
_pool_lock = threading.Lock()
_NOTHING = contextlib.nullcontext()


def _workers(threads: int) -> contextlib.AbstractContextManager[None]:
    """Run a block with that many kernel threads, each on a core of its own; the caller's affinity is as before afterwards."""
    if threads == 1 and getattr(_pool, "shape", (0,))[0] == 1:
        return _NOTHING  # nothing to place: a short run is not to pay for system calls
    return _placed(threads)


@contextlib.contextmanager
def _placed(threads: int) -> Iterator[None]:
    """Left to itself TVM ties the caller to the first core for good, and lets a worker land there too: two threads then gain nothing."""
    cores = os.sched_getaffinity(0)
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
    native = array.dtype.isnative and array.dtype != np.bool_
    if not (native and array.flags.c_contiguous and array.flags.writeable and array.ctypes.data % artifact.ALIGN == 0):
        return tvm.runtime.tensor(np.ascontiguousarray(array, array.dtype.newbyteorder("=")))
    return tvm.runtime.from_dlpack(array)


def _staging(tvm: Any, array: Array) -> tuple[Array, Any]:
    """An aligned array of the same shape and dtype, in this machine's byte order, and a TVM tensor on its memory."""
    dtype = array.dtype.newbyteorder("=")
    if not array.size:
        return np.empty(array.shape, dtype), tvm.runtime.empty(array.shape, dtype.name)
    memory = np.empty(array.size * dtype.itemsize + artifact.ALIGN, np.uint8)
    begin = -memory.ctypes.data % artifact.ALIGN
    staged = memory[begin : begin + array.size * dtype.itemsize].view(dtype).reshape(array.shape)
    return staged, tvm.runtime.from_dlpack(staged)


def logical(kind: str, features: int | None, value: Array, offset: int) -> Array:
    """A tap as its operator means it: stored codes lose their padding and offset and become int8; the rest is as it is."""
    if kind != "codes":
        return value
    return (value[..., :features].astype(np.int16) - offset).astype(np.int8)
