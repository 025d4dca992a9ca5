"""Artifact + arrays -> arrays. Needs numpy and TVM's runtime; never torch."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from khtst_compile import artifact, cpu, parts, workers
from khtst_compile.checks import check_count
from khtst_compile.errors import ArtifactError, EnvironmentProblem, ResourceError, UsageError
from khtst_compile.layout import ALIGN
from khtst_compile.signature import TensorSpec, check_inputs

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from khtst_compile.generate import Generation, Options, Prompt

Array = npt.NDArray[Any]
WEIGHTS = "weights.bin"
STAGED_BYTES = 65536  # inputs up to this size are copied


def load(path: str | Path, *, threads: int | None = None, variant: str | None = None, verify_hashes: bool = True) -> Artifact:
    """Load an artifact made by `lower`.

    threads: worker threads for kernels (default, and at most: the cores this process may use). variant: the target to run, of those it
    was built for (default: the fastest this CPU has the features for). Version, hashes and CPU features are checked before any native
    code is mapped. Raises ArtifactError for a damaged or foreign folder, UsageError for a variant it lacks, EnvironmentProblem where
    this machine cannot run it.
    """
    if threads is not None:
        check_count(threads, "threads")
    folder = artifact.read(path, kind="library", hashes=verify_hashes)
    chosen = choose(folder, variant)
    _check_tvm(folder)
    return Artifact(folder, threads, chosen)


def choose(folder: artifact.Folder, name: str | None = None) -> dict[str, Any]:
    """The manifest's entry of the variant to run: the one of that name, or the first that this CPU has all features for."""
    variants = folder.manifest["target"]["variants"]
    wanted = [v for v in variants if name is None or v["name"] == name]
    if not wanted:
        raise UsageError(f"{folder.path}: has no variant {name!r}; it holds {', '.join(v['name'] for v in variants)}")
    for variant in wanted:
        if not cpu.missing(variant["cpu_flags"]):
            return dict(variant)
    least = wanted[-1]
    raise EnvironmentProblem(
        f"{folder.path}: built for {' and '.join(v['name'] for v in wanted)}; {least['name']} needs the CPU features "
        f"{', '.join(least['cpu_flags'])}; this machine lacks {', '.join(cpu.missing(least['cpu_flags']))}; "
        "lower again with a target from `khtst-compile targets` that can run here"
    )


def _check_tvm(folder: artifact.Folder) -> None:
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

        self._tvm, self._ffi, self._lock, self._threads = tvm, tvm_ffi, workers.Lock(), threads
        self._library = library
        self._arrays = weights  # kernels read these in place
        try:
            # "naive": buffers are held here, and TVM's pool would keep one of every size there ever was.
            self._vm = relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu(), memory_cfg="naive")
        except (OSError, RuntimeError) as error:
            raise ArtifactError(f"{library}: cannot be loaded ({error}); make the artifact again") from error
        self._sizes, self._reserve = self._vm["sizes"], self._vm["reserve"]
        self._tensors = [_tensor(tvm, a) for a in weights]
        self._main, self._taps = self._bound("main"), self._bound("taps")
        self._shapes: list[tuple[int, ...]] = []
        self._staged: list[Array | None] = []  # where kernels read small inputs; None for one that is read where it is
        self._inputs: list[Any] = []  # tensors on the same memory
        self._room, self._step_room = _Room(self.store), _Room(self.store)
        self._step: Any = None
        self._step_sizes: Any = None
        self._step_shapes: list[tuple[int, ...]] = []
        self._step_inputs: list[tuple[Array, Any]] = []

    def _bound(self, name: str) -> Any:
        """A function of the library with its weights in place."""
        try:
            self._vm.save_function(name, f"bound {name}", *self._tensors)
        except (AttributeError, RuntimeError, ValueError) as error:
            raise ArtifactError(f"{self._library}: has no function {name!r}; lower again with this version") from error
        return self._vm[f"bound {name}"]

    def store(self, sizes: Sequence[int], what: str) -> Any:
        """A storage of each of these sizes in bytes. Raises ResourceError where there is not that much memory; what: it is for."""
        try:
            return self._ffi.convert([self._reserve(self._ffi.Shape([n])) for n in sizes])
        except (MemoryError, RuntimeError) as error:
            raise ResourceError(
                f"{what}: {sum(sizes) / 2**20:.0f} MiB needed, more than there is; run a smaller batch"
            ) from error

    def call(self, function: str, arrays: list[Array]) -> list[Array]:
        """Run `function` ("main" or "taps") on its inputs and return what it returns."""
        with self._lock:
            shapes = [a.shape for a in arrays]
            tensors = self._inputs if shapes == self._shapes else self._resize(shapes, arrays)
            inputs = [self._input(*each) for each in zip(arrays, self._staged, tensors, strict=True)]
            if function == "main":
                results = workers.run(self._threads, lambda: self._main(self._room.buffers, *inputs))
            else:
                results = workers.run(self._threads, lambda: self._taps(*inputs))
            return [np.array(np.from_dlpack(r)) for r in results]

    def _input(self, given: Array, staged: Array | None, tensor: Any) -> Any:
        if staged is None:
            return _tensor(self._tvm, given) if tensor is None else tensor
        np.copyto(staged, given, casting="equiv")
        return tensor

    def _resize(self, shapes: list[tuple[int, ...]], arrays: list[Array]) -> list[Any]:
        """Make room for inputs of these shapes and for what `main` computes from them; returns tensors of the inputs."""
        self._shapes = []
        pairs = [(None, None) if a.nbytes > STAGED_BYTES else _staging(self._tvm, a) for a in arrays]
        self._staged, self._inputs = [p[0] for p in pairs], [p[1] for p in pairs]
        shaped = [_tensor(self._tvm, a) if t is None else t for a, t in zip(arrays, self._inputs, strict=True)]
        self._room.fit(tuple(self._sizes(*shaped)), shapes)
        self._shapes = shapes
        return shaped

    def step(self, storages: Any, filled: int, arrays: list[Array]) -> list[Array]:
        """Run `step` (lower/step.py): arrays are the inputs that `storages`, made by `store`, does not hold; so are the results.

        Raises ArtifactError for a library without it.
        """
        with self._lock:
            if self._step is None:
                self._step, self._step_sizes = self._bound("step"), self._vm["sizes_step"]
            shapes = [a.shape for a in arrays]
            if shapes != self._step_shapes:
                self._step_shapes, self._step_inputs = shapes, [_staging(self._tvm, a) for a in arrays]
            for given, (staged, _) in zip(arrays, self._step_inputs, strict=True):
                np.copyto(staged, given, casting="equiv")
            inputs = [storages, *(tensor for _, tensor in self._step_inputs), self._ffi.Shape([filled])]
            self._step_room.fit(tuple(self._step_sizes(*inputs)), shapes)
            results = workers.run(self._threads, lambda: self._step(self._step_room.buffers, *inputs))
            return [np.array(np.from_dlpack(r)) for r in results]

    def trace(self, arrays: list[Array], runs: int) -> list[Step]:
        """The kernels `main` calls in the order of execution, each with the median of its times over `runs` runs.

        Raises EnvironmentProblem where the program's calls cannot be seen.
        """
        from tvm import relax

        now = time.thread_time if self._threads == 1 else time.perf_counter
        constants = {w.__chandle__() for w in self._tensors}
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
        machine = relax.VirtualMachine(self._tvm.runtime.load_module(str(self._library)), self._tvm.cpu(), memory_cfg="naive")
        machine.set_instrument(watch)
        called = machine["main"]
        with self._lock:
            self._resize([a.shape for a in arrays], arrays)
            inputs = [_tensor(self._tvm, a) for a in arrays]
            for _ in range(runs + 1):
                seen.append([])
                workers.run(self._threads, lambda: called(self._room.buffers, *inputs, *self._tensors))
        if not seen[0]:
            raise EnvironmentProblem(f"{self._library}: its calls cannot be watched; lower again with this version")
        columns = zip(*seen[1:], strict=True)  # the first run only warms up
        return [replace(calls[0], seconds=statistics.median(c.seconds for c in calls)) for calls in columns]


class _Room:
    """Buffers for intermediate values: as large as a call needs, kept for the next, given back when that needs less than half.

    held: bytes of each.
    """

    def __init__(self, store: Callable[[Sequence[int], str], Any]):
        self._store = store
        self.held: tuple[int, ...] = ()
        self.buffers: Any = None

    def fit(self, needed: tuple[int, ...], shapes: list[tuple[int, ...]]) -> None:
        """Have buffers of at least these sizes in bytes, for inputs of these shapes."""
        fits = len(needed) == len(self.held) and all(n <= h for n, h in zip(needed, self.held, strict=True))
        if not fits or 2 * sum(needed) < sum(self.held):
            self.held, self.buffers = (), None  # what was held goes before anything is added
            self.buffers, self.held = self._store(needed, f"inputs of shapes {shapes}, their intermediate values"), needed


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
    """A loaded program. `inputs` and `outputs` list name, dtype and shape; `run` computes. Calls from several threads are serialized.

    `variant` is the name of the target that runs, `isa` that of its instruction set.
    """

    def __init__(self, folder: artifact.Folder, threads: int | None, variant: dict[str, Any]):
        self.folder = folder
        self.variant, self.isa = str(variant["name"]), str(variant["isa"])
        self._codes_offset = int(variant["codes_offset"])
        self.manifest = folder.manifest
        self.inputs = tuple(TensorSpec.from_json(e) for e in folder.manifest["inputs"])
        self.outputs = tuple(TensorSpec.from_json(e) for e in folder.manifest["outputs"])
        cores = cpu.usable_cores()
        self.threads = min(threads or cores, cores)  # more than one a core would only wait for each other
        stored = artifact.map_weights(folder.file(WEIGHTS), folder.manifest["weights"])
        weights = artifact.arrange(stored, variant)
        self._engine = Engine(folder.file(variant["library"]), weights, self.threads)
        self._independent: str | None = folder.manifest["independent"]
        self._fewest = int(folder.manifest["axes"].get(self._independent, [1])[0] or 1)
        self._row_macs = sum(int(call["macs"]) for call in folder.manifest["program"])

    @property
    def path(self) -> Path:
        """The folder it was loaded from."""
        return self.folder.path

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """inputs: name -> array of the dtype and shape in `self.inputs` -> outputs by name. Raises UsageError naming the input at fault."""
        arrays = self._check(inputs)
        slices = self._cut(arrays)
        if len(slices) == 1:
            results = self._engine.call("main", arrays)
        else:
            taken = (parts.taken(arrays, self.inputs, self._independent, part) for part in slices)
            results = parts.joined([self._engine.call("main", part) for part in taken])
        return {s.name: r for s, r in zip(self.outputs, results, strict=True)}

    def run_with_taps(self, inputs: dict[str, Array]) -> tuple[dict[str, Array], list[Array]]:
        """As `run`, and after it what every kernel wrote, in the order of manifest["taps"]; codes as int8 of logical width."""
        results = self._engine.call("taps", self._check(inputs))
        count = len(self.outputs)
        outputs = {s.name: r for s, r in zip(self.outputs, results[:count], strict=True)}
        taps = zip(self.manifest["taps"], results[count:], strict=True)
        return outputs, [logical(t["kind"], t["features"], r, self._codes_offset) for t, r in taps]

    def call(self, arrays: list[Array]) -> list[Array]:
        """As `run`, on arrays in the order of `inputs` and returning those of `outputs`, for callers that know them to fit: unchecked."""
        return self._engine.call("main", arrays)

    def store_cache(self, batch: int, capacity: int) -> Any:
        """Memory for the keys and values of `capacity` positions of `batch` texts, as `step` takes it."""
        kept = [s for s in self.inputs if s.name.startswith("past_")]
        rows = [math.prod(int(n) for n in s.shape[2:]) * np.dtype(s.dtype).itemsize for s in kept]
        return self._engine.store([batch * capacity * row for row in rows], f"a cache of {capacity} positions of {batch} texts")

    def step(self, cache: Any, filled: int, arrays: list[Array]) -> list[Array]:
        """As `call`, on a cache of which so many positions are filled; those of the new tokens are written behind them. arrays: the
        inputs that are no cache, whose outputs come back. Unchecked."""
        return self._engine.step(cache, filled, arrays)

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """Go on with a text, one token at a time, as an iterator of `generate.Step` (its `text` is what the text grew by).

        prompt: a text, token ids, or (batch, tokens) ids of texts of one length. max_new_tokens (128), temperature (0: always the most
        likely token), top_k (0: all), top_p (1), seed (0): see sampling.Sampling; stop: texts at which to end, which are not shown;
        ignore_end (False): go on past the model's own end token. Ends earlier where the model has no more positions. Raises UsageError
        for an artifact that is no language model, carries no tokenizer for a text, or a prompt longer than the model's positions.
        """
        from khtst_compile.generate import generate

        return generate(self, prompt, **options)

    def trace(self, inputs: dict[str, Array], runs: int = 1) -> tuple[list[Step], int]:
        """The program as it is executed on these inputs: its kernels in order, each with its median time over `runs` runs, and how many
        parts of the batch go through it, one after the other; the kernels are those of the first."""
        arrays = self._check(inputs)
        slices = self._cut(arrays)
        return self._engine.trace(parts.taken(arrays, self.inputs, self._independent, slices[0]), runs), len(slices)

    def _cut(self, arrays: list[Array]) -> list[slice]:
        return parts.cut(arrays, self.inputs, self._independent, self._fewest, self._row_macs, self.threads)

    def _check(self, inputs: dict[str, Array]) -> list[Array]:
        return check_inputs(inputs, self.inputs, self.manifest["axes"], self.manifest.get("ranges", {}))


def _tensor(tvm: Any, array: Array) -> Any:
    """A TVM tensor on the array's own memory (copied only where it is not contiguous, aligned and writable)."""
    if array.size == 0:
        return tvm.runtime.empty(array.shape, array.dtype.name)  # an empty array's strides may be anything, and TVM reads them
    native = array.dtype.isnative and array.dtype != np.bool_
    if not (native and array.flags.c_contiguous and array.flags.writeable and array.ctypes.data % ALIGN == 0):
        return tvm.runtime.tensor(np.ascontiguousarray(array, array.dtype.newbyteorder("=")))
    return tvm.runtime.from_dlpack(array)


def _staging(tvm: Any, array: Array) -> tuple[Array, Any]:
    """An aligned array of the same shape and dtype, in this machine's byte order, and a TVM tensor on its memory."""
    dtype = array.dtype.newbyteorder("=")
    if not array.size:
        return np.empty(array.shape, dtype), tvm.runtime.empty(array.shape, dtype.name)
    memory = np.empty(array.size * dtype.itemsize + ALIGN, np.uint8)
    begin = -memory.ctypes.data % ALIGN
    staged = memory[begin : begin + array.size * dtype.itemsize].view(dtype).reshape(array.shape)
    return staged, tvm.runtime.from_dlpack(staged)


def logical(kind: str, features: int | None, value: Array, offset: int) -> Array:
    """A tap as its operator means it: stored codes lose their padding and offset and become int8; the rest is as it is."""
    if kind != "codes":
        return value
    return (value[..., :features].astype(np.int16) - offset).astype(np.int8)
