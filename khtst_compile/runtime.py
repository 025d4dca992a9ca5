"""Artifact + arrays -> arrays. Needs numpy and TVM's runtime; never torch."""

from __future__ import annotations

import threading
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

    threads: worker threads for kernels (default: the cores this process may use). Version, hashes and CPU features are checked before any
    native code is mapped. Raises ArtifactError for a damaged or foreign folder, EnvironmentProblem where this machine cannot run it.
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


class Artifact:
    """A loaded program. `inputs` and `outputs` list name, dtype and shape; `run` computes; calls from several threads are serialized."""

    def __init__(self, folder: artifact.Folder, threads: int | None):
        import tvm
        import tvm_ffi
        from tvm import relax

        self.folder = folder
        self.manifest = folder.manifest
        self.inputs = tuple(TensorSpec.from_json(e) for e in folder.manifest["inputs"])
        self.outputs = tuple(TensorSpec.from_json(e) for e in folder.manifest["outputs"])
        self.threads = threads if threads is not None else cpu.usable_cores()
        if self.threads < 1:
            raise UsageError(f"threads is {threads}; needed: at least 1")
        self._lock = threading.Lock()
        self._tvm = tvm
        self._arrays = artifact.map_weights(folder.file(WEIGHTS), folder.manifest["weights"])
        self._weights = tvm_ffi.convert([_tensor(tvm, a) for a in self._arrays])
        configure_threads(self.threads)
        try:
            module = tvm.runtime.load_module(str(folder.file(LIBRARY)))
            self._vm = relax.VirtualMachine(module, tvm.cpu())
        except (OSError, RuntimeError) as error:
            raise ArtifactError(f"{folder.path}: {LIBRARY} cannot be loaded ({error}); make the artifact again") from error
        self._main, self._taps = self._vm["main"], self._vm["taps"]

    @property
    def path(self) -> Path:
        return self.folder.path

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """inputs: name -> array of the dtype and shape in `self.inputs` -> outputs by name. Raises UsageError naming the input at fault."""
        results = self._call(self._main, inputs)
        return {s.name: r.numpy() for s, r in zip(self.outputs, results, strict=True)}

    def run_with_taps(self, inputs: dict[str, Array]) -> tuple[dict[str, Array], list[Array]]:
        """As `run`, and after it what every kernel wrote, in the order of manifest["taps"]; codes as int8 of logical width."""
        results = self._call(self._taps, inputs)
        count = len(self.outputs)
        outputs = {s.name: r.numpy() for s, r in zip(self.outputs, results[:count], strict=True)}
        offset = int(self.manifest["target"]["codes_offset"])
        taps = [_logical(t, r.numpy(), offset) for t, r in zip(self.manifest["taps"], results[count:], strict=True)]
        return outputs, taps

    def _call(self, function: Any, inputs: dict[str, Array]) -> list[Any]:
        arrays = check_inputs(inputs, self.inputs, self.manifest["axes"], self.manifest.get("ranges", {}))
        with self._lock:
            results = function(*(_tensor(self._tvm, a) for a in arrays), self._weights)
        return [results] if not hasattr(results, "__len__") or hasattr(results, "numpy") else list(results)


def configure_threads(threads: int) -> None:
    """Size TVM's worker pool."""
    import tvm

    tvm.get_global_func("runtime.config_threadpool")(1, threads)


def _tensor(tvm: Any, array: Array) -> Any:
    """A TVM tensor on the array's own memory (copied only where it is not contiguous, aligned and writable)."""
    if (
        not (array.flags.c_contiguous and array.flags.writeable and array.ctypes.data % artifact.ALIGN == 0)
        or array.dtype == np.bool_
    ):
        return tvm.runtime.tensor(np.ascontiguousarray(array))
    return tvm.runtime.from_dlpack(array)


def _logical(tap: dict[str, Any], value: Array, offset: int) -> Array:
    if tap["kind"] != "codes":
        return value
    return (value[..., : tap["features"]].astype(np.int16) - offset).astype(np.int8)
