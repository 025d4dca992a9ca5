"""The five steps a user takes: quantize, lower, export, verify, inspect. The command line calls these and prints."""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from khtst_compile import __version__, artifact, cpu, tokens
from khtst_compile.arrays import write_arrays
from khtst_compile.checks import as_path, check_count, check_type, require_space
from khtst_compile.errors import ArtifactError, CalibrationError, CaptureError, UsageError
from khtst_compile.parity import ParityReport
from khtst_compile.progress import NullProgress, Progress
from khtst_compile.quiet import quiet
from khtst_compile.signature import check_inputs

Array = npt.NDArray[Any]
Report = Callable[[str], None]
ProgressFactory = Callable[[int, str], AbstractContextManager[Progress]]
GOLDEN, ONNX_MODEL = artifact.GOLDEN, artifact.ONNX_MODEL
PROGRAM, TOKENIZER = "program.pt2", tokens.FOLDER
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt", "config.json")
KNOWN_DTYPES = ("float32", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
SLACK_BYTES = 4_000_000  # of a file of tensors, besides the tensors
CACHES = ("float32", "int8")


@dataclass(frozen=True)
class Result:
    """folder: the artifact (or file) written; manifest: its JSON; report: what was compared, if anything was; seconds: wall time."""

    folder: Path
    manifest: dict[str, Any]
    report: ParityReport | None
    seconds: float


def quantize(
    source: Any,
    output: str | Path,
    *,
    calib: Any = None,
    recipe: str | None = None,
    keep_fp32: str | Sequence[str] = (),
    kv_cache: str = "float32",
    retract: bool = False,
    prune_dead: bool = False,
    strict: bool = False,
    task: str | None = None,
    shapes: dict[str, tuple[int, int]] | None = None,
    random: bool = False,
    limit: int = 256,
    max_length: int = 128,
    seed: int = 0,
    dump: Path | None = None,
    progress: ProgressFactory | None = None,
    report: Report | None = None,
) -> Result:
    """Capture `source`, calibrate it, run the recipe and write a "quantized" artifact.

    source: a Hugging Face folder, "package.module:factory", a .pt2 file, or a Program. calib: a file (see samples.load_samples) or
    Samples; random: made-up samples instead, with a warning. recipe: text or a name (default: recipe.DEFAULT_RECIPE). keep_fp32: globs
    of sites that stay float32. kv_cache: what a language model keeps its keys and values as, "float32" or "int8", which adds the pass
    `kv_cache`. retract, prune_dead, strict: of the pass `freeze_codebook`. shapes: axis -> (min, max). limit, max_length: samples at most,
    tokens of each at most. dump: folder for the graph after each pass. Raises KhtstError subclasses; nothing is left at `output` then.
    """
    from khtst_compile import recipe as recipes
    from khtst_compile.calibrate import calibrate
    from khtst_compile.capture import capture
    from khtst_compile.contract import run_passes
    from khtst_compile.golden import SAMPLES, golden_values, id_ranges
    from khtst_compile.program import Program
    from khtst_compile.samples import Samples, load_samples

    started, say = time.perf_counter(), report or _silent
    if not isinstance(source, Program):
        source = str(as_path(source, "model source"))
    if calib is not None and not isinstance(calib, Samples):
        calib = as_path(calib, "calib")
    keep_fp32 = [keep_fp32] if isinstance(keep_fp32, str) else keep_fp32
    _check_options(recipe, keep_fp32, task, shapes, limit, max_length, seed)
    if kv_cache not in CACHES:
        raise UsageError(f"kv_cache is {kv_cache!r}; known: {', '.join(CACHES)}")
    output = as_path(output, "output")
    if dump is not None:
        with artifact.writable(as_path(dump, "dump")):
            Path(dump).mkdir(parents=True, exist_ok=True)
    text = recipe if recipe is not None else recipes.DEFAULT_RECIPE
    passes = [recipes.keep(p, keep_fp32) for p in recipes.parse(text)]
    passes += recipes.parse("kv_cache") if kv_cache == "int8" else []
    passes = recipes.with_options(passes, "freeze_codebook", retract=retract, prune_dead=prune_dead, strict=strict)
    edited = bool(keep_fp32 or kv_cache != "float32" or retract or prune_dead or strict)
    with artifact.staging(output) as folder:
        program = source if isinstance(source, Program) else capture(source, task=task, shapes=shapes, seed=seed)
        say(f"captured {program.meta['source']}: {program.meta['parameters']:,} parameters, task {program.meta['task']}")
        if kv_cache == "int8":
            passes[-1].requires(program)  # now, and not after a calibration
        samples = calib if isinstance(calib, Samples) else None
        if samples is None and (passes or calib is not None or random):
            samples = load_samples(calib, program, limit=limit, max_length=max_length, seed=seed, random=random)
        if samples is None:
            samples = load_samples(None, program, limit=SAMPLES, max_length=max_length, seed=seed, random=True)
        _check_first(samples, program)
        if passes:
            moments = any(getattr(p, "rounding", None) == "gptq" for p in passes)
            with _bar(progress, samples.count, "calibrate") as bar:
                program = program.with_stats(calibrate(program, samples, moments=moments, seed=seed, progress=bar))
            say(f"calibrated on {samples.count} samples ({samples.source})")
        _check_globs(program, [*keep_fp32, *(getattr(p, "keep_fp32", None) or "" for p in passes)])
        quantized = run_passes(program, passes, dump=dump, report=say)
        golden, figures = golden_values(program, quantized, samples)
        manifest = {
            "kind": "quantized",
            "made_by": _made_by(),
            "source": str(program.meta["source"]),
            "recipe": recipes.render(passes) if edited else recipes.RECIPES.get(text.strip(), text),
            "passes": [*quantized.history],
            "inputs": [s.to_json() for s in quantized.inputs],
            "outputs": [s.to_json() for s in quantized.outputs],
            "axes": {k: list(v) for k, v in quantized.axes.items()},
            "ranges": id_ranges(quantized),
            "golden": {"samples": samples.source, "accuracy": figures},
            "meta": {**quantized.meta, "tokenizer": None, "calibration": samples.source, "seed": seed, "shapes": shapes},
        }
        _copy_tokenizer(program.meta.get("tokenizer"), folder)
        require_space(folder, SLACK_BYTES + sum(t.nbytes for t in quantized.tensors().values()), "the quantized program")
        save_program(quantized, folder / PROGRAM)
        write_arrays(folder / GOLDEN, golden)
        artifact.write_manifest(folder, manifest)
    seconds = time.perf_counter() - started
    return Result(Path(output).absolute(), artifact.read(output).manifest, None, seconds)


def lower(
    quantized: str | Path,
    output: str | Path,
    *,
    target: str = "x86",
    threads: int | None = None,
    tune: float = 0.0,
    tuned: str | Path | None = None,
    emit_runner: bool = False,
    triple: str | None = None,
    report: Report | None = None,
    progress: ProgressFactory | None = None,
) -> Result:
    """Compile a "quantized" artifact for a target and write a "library" artifact, having compared every kernel with torch.

    target: a name of `khtst-compile targets`; "x86" and "arm" are all their variants in one artifact. threads: how many are built at the
    same time, a process each (default, and at most: the cores this process may use). Where the target cannot run on this machine, golden
    values come from a variant that can: all give the same bits. Raises EnvironmentProblem where a cross compiler is needed and missing.
    tune: seconds to measure, on this machine, which tiles its matrix products are fastest with; results do not depend on it.
    tuned: a "library" artifact whose measurements are taken up; without it those of the artifact that is replaced at `output`.
    emit_runner: also write a folder "runner" that runs it on a device without Python; see runner.emit for what that needs.
    triple: the system it will run on, where that is not Linux with glibc, such as "aarch64-linux-musl"; see targets.link.
    """
    from khtst_compile.lower.variants import HELPERS, Helpers
    from khtst_compile.runner.emit import prepare
    from khtst_compile.targets import table
    from khtst_compile.targets.link import linker

    if not isinstance(tune, (int, float)) or not 0 <= tune < float("inf"):
        raise UsageError(f"lower: tune is {tune!r} seconds; needed: 0 or more")
    started, say, output = time.perf_counter(), report or _silent, as_path(output, "output")
    source = artifact.read(quantized, kind="quantized")
    _keep_apart(source.path, output)
    records = _measured(tuned, output)
    # First what runs here: the process that compares results builds it.
    order = sorted(table.variants(target, triple), key=lambda t: t.unavailable() is not None)
    triples = [str(t.tvm_target()["mtriple"]) for t in order]
    for wanted in triples:
        linker(wanted)  # refuses before minutes of work
    runner = prepare(triples) if emit_runner else None
    with artifact.staging(output) as folder, _bar(progress, 4, "lower") as bar:
        if tune:  # before anything else computes
            from khtst_compile.lower.relax import kernel_graph
            from khtst_compile.lower.tune import tune as measure

            records = measure(kernel_graph(load_program(source)).program, order[0], tune, records, say)
        workers = cpu.processes(threads, source.file(PROGRAM).stat().st_size)
        with Helpers(source.path, order, folder, workers, records) as helpers:
            from khtst_compile.lower.compile import compile_program  # torch and tvm, while helpers start

            program = load_program(source)
            manifest, checked = compile_program(program, source, folder, target, helpers, say, bar)
        shutil.rmtree(folder / HELPERS, ignore_errors=True)
        _copy_tokenizer(source.path / TOKENIZER, folder)
        if runner is not None:
            manifest["runner"] = runner.write(folder, manifest["target"]["variants"])
            say(f"wrote a runner for {manifest['runner']['platform']}: {manifest['runner']['bytes'] / 1e6:.1f} MB")
        artifact.write_manifest(folder, {**manifest, "made_by": _made_by()})
    return Result(Path(output).absolute(), artifact.read(output).manifest, checked, time.perf_counter() - started)


def kernels(output: str | Path, *, linears: Sequence[str], target: str = "armv7-neon") -> Path:
    """Compile int8 layers as a C library with a header, for a processor that TVM has no runtime for; returns the folder.

    linears: output by input features of each layer, "1536x384". Raises UsageError for sizes and targets there are no libraries for,
    EnvironmentProblem where there is no cross compiler.
    """
    from khtst_compile.targets import library

    wanted = library.sizes(linears)
    library.tools(library.instructions(target))  # refuses before anything is written
    output = as_path(output, "output")
    with artifact.staging(output) as folder:
        library.write(target, wanted, folder)
    return output.absolute()


def export(
    quantized: str | Path,
    output: str | Path,
    *,
    format: str = "onnx",
    opset: int = 20,
    rotation: str = "matmul",
    report: Report | None = None,
) -> Result:
    """Write a "quantized" artifact as ONNX: a bare file where `output` ends in .onnx, else an artifact folder that `verify` takes."""
    from khtst_compile.lower.onnx import export_onnx

    if format != "onnx":
        raise UsageError(f"export: format is {format!r}; needed: onnx")
    check_type(opset, "opset", int, "a whole number")
    started, say, output = time.perf_counter(), report or _silent, as_path(output, "output")
    source = artifact.read(quantized, kind="quantized")
    _keep_apart(source.path, output)
    program = load_program(source)
    if output.suffix == ".onnx":
        with artifact.writable(output):
            artifact.place(output).parent.mkdir(parents=True, exist_ok=True)
        export_onnx(program, output, opset=opset, rotation=rotation, report=say)
        return Result(output.absolute(), source.manifest, None, time.perf_counter() - started)
    with artifact.staging(output) as folder:
        export_onnx(program, folder / ONNX_MODEL, opset=opset, rotation=rotation, report=say)
        kept = ("source", "recipe", "passes", "inputs", "outputs", "axes", "ranges", "golden", "meta")
        manifest = {"kind": "onnx", "opset": opset, "made_by": _made_by(), **{k: source.manifest[k] for k in kept}}
        (folder / GOLDEN).write_bytes(source.file(GOLDEN).read_bytes())
        _copy_tokenizer(source.path / TOKENIZER, folder)
        artifact.write_manifest(folder, manifest)
    return Result(output.absolute(), artifact.read(output).manifest, None, time.perf_counter() - started)


def split(
    quantized: str | Path, *, encoder: str | Path, decoder: str | Path, report: Report | None = None
) -> tuple[Result, Result]:
    """Cut a "quantized" artifact at its codebooks: two "quantized" artifacts, that of the encoder and that of the decoder.

    encoder: the inputs -> ids of each codebook, int32 (..., levels), `lost` (codebooks,) int32, how many rows have no code, and the outputs
    that depend on no codebook; decoder: the ids -> all other outputs, to the bit what the whole artifact computes. Raises UsageError where
    there is no codebook, UnsupportedError where the decoder would need more than ids; nothing is left at either place then.
    """
    from khtst_compile.splitting import halves

    started, say = time.perf_counter(), report or _silent
    places = [as_path(encoder, "encoder"), as_path(decoder, "decoder")]
    source = artifact.read(quantized, kind="quantized")
    for first, second in ((source.path, places[0]), (source.path, places[1]), (places[0], places[1]), (places[1], places[0])):
        _keep_apart(first, second)
    with artifact.staging(places[0]) as first, artifact.staging(places[1]) as second:
        made = halves(load_program(source), source.manifest, source.arrays(GOLDEN))
        for folder, half in zip((first, second), made, strict=True):
            program = half.program
            part = program.meta["split"]
            say(f"{part['part']}: {', '.join(s.name for s in program.inputs)} -> {', '.join(s.name for s in program.outputs)}")
            manifest = {
                **{k: source.manifest[k] for k in ("kind", "source", "recipe", "passes")},
                "made_by": _made_by(),
                "inputs": [s.to_json() for s in program.inputs],
                "outputs": [s.to_json() for s in program.outputs],
                "axes": {k: list(v) for k, v in program.axes.items()},
                "ranges": half.ranges,
                "golden": {**source.manifest["golden"], "accuracy": half.accuracy},
                "meta": program.meta,
            }
            require_space(folder, SLACK_BYTES + sum(t.nbytes for t in program.tensors().values()), f"the {part['part']}")
            save_program(program, folder / PROGRAM)
            write_arrays(folder / GOLDEN, half.golden)
            if part["part"] == "encoder":
                _copy_tokenizer(source.path / TOKENIZER, folder)
            artifact.write_manifest(folder, manifest)
    seconds = time.perf_counter() - started
    written = [artifact.read(place) for place in places]
    return (
        Result(written[0].path, written[0].manifest, None, seconds),
        Result(written[1].path, written[1].manifest, None, seconds),
    )


def verify(
    path: str | Path,
    *,
    reference: str | Path | None = None,
    threads: int | None = None,
    variant: str | None = None,
    task: str | None = None,
    report: Report | None = None,
) -> ParityReport:
    """Compare an artifact with what it should compute.

    Without `reference`: against the golden values inside the artifact. With a "quantized" artifact: kernel by kernel in torch. With a model
    source: its outputs against the original fp32 model's. variant: of a "library", the one to run (default: the best for this CPU). The
    report is returned also where it is over budget.
    """
    from khtst_compile.lower.verify import verify_artifact

    if reference is not None:
        reference = str(as_path(reference, "reference"))
    if threads is not None:
        check_count(threads, "threads")
    return verify_artifact(artifact.read(path), reference, threads, variant, task, report or _silent)


def inspect(path: str | Path) -> dict[str, Any]:
    """A JSON-able summary of an artifact: what made it, inputs and outputs, per-layer choices, files and sizes."""
    folder = artifact.read(path)
    manifest = dict(folder.manifest)
    return {"path": str(folder.path), **manifest, "bytes": sum(e["bytes"] for e in manifest["files"].values())}


def save_program(program: Any, path: Path) -> None:
    """Write a Program's graph and tensors as a .pt2 file without sample inputs or pickles; of each stack trace only the model's line."""
    import torch

    from khtst_compile.program import shorten_traces

    shorten_traces(program)
    program.ep.example_inputs = None
    with quiet():
        torch.export.save(program.ep, path)


def load_program(folder: artifact.Folder) -> Any:
    """The Program of a "quantized" artifact."""
    import torch

    from khtst_compile.capture.pt2 import refuse_pickles
    from khtst_compile.program import Program, TensorSpec

    path = folder.file(PROGRAM)
    refuse_pickles(path)
    with quiet():
        ep = torch.export.load(path)
    m = folder.manifest
    return Program(
        ep,
        tuple(TensorSpec.from_json(e) for e in m["inputs"]),
        tuple(TensorSpec.from_json(e) for e in m["outputs"]),
        axes={k: (int(v[0]), int(v[1])) for k, v in m["axes"].items()},
        history=tuple(m["passes"]),
        meta=m["meta"],
    )


def _check_options(recipe: Any, keep_fp32: Any, task: Any, shapes: Any, limit: Any, max_length: Any, seed: Any) -> None:
    """Raise UsageError for options of `quantize` of the wrong type."""
    for value, what in ((recipe, "recipe"), (task, "task")):
        check_type(value, what, (str, type(None)), "text")
    check_type(keep_fp32, "keep_fp32", (list, tuple), "text, or a list of texts")
    for glob in keep_fp32:
        check_type(glob, "keep_fp32", str, "text, or a list of texts")
    check_type(shapes, "shapes", (dict, type(None)), "a dict from axis to (min, max)")
    for axis, sizes in (shapes or {}).items():
        check_type(sizes, f"shapes[{axis!r}]", (list, tuple), "(min, max)")
        if len(sizes) != 2:
            raise UsageError(f"shapes[{axis!r}] is {sizes}; needed: (min, max)")
        for size in sizes:
            check_count(size, f"shapes[{axis!r}]")
    check_count(limit, "limit")
    check_count(max_length, "max_length")
    check_type(seed, "seed", int, "a whole number")


def _keep_apart(source: Path, output: Path) -> None:
    """Raise UsageError where the output is the artifact it is made from, or lies inside it."""
    if output.resolve().is_relative_to(source.resolve()):
        raise UsageError(f"{output} is, or lies inside, the artifact it would be made from ({source}); choose another output")


def _measured(tuned: str | Path | None, output: Path) -> list[Any]:
    """The tuning records to take up: those of `tuned`, else of the artifact at the destination, if there is one that can be read."""
    from khtst_compile.lower.tune import records_of

    if tuned is not None:
        folder = artifact.read(tuned, kind="library")
        return records_of(folder.manifest, folder.path)
    try:
        return records_of(artifact.read(output, kind="library", hashes=False).manifest, output)
    except ArtifactError:
        return []


def _check_globs(program: Any, globs: Sequence[str]) -> None:
    """Raise UsageError for a glob (or several, joined by ;) of sites to keep that matches none."""
    from khtst_compile.linears import find_linears, is_kept
    from khtst_compile.program import site_of

    sites = [site_of(linear.node) for linear in find_linears(program.graph, program.tensors())]
    for glob in dict.fromkeys(g.strip() for g in ";".join(globs).split(";") if g.strip()):
        if not any(is_kept(site, glob) for site in sites):
            some = ", ".join(sites[:4]) + (f", ... ({len(sites)} in all)" if len(sites) > 4 else "")
            raise UsageError(f"keep-fp32 {glob!r} matches no linear layer; there are {some or 'none'}")


def _check_first(samples: Any, program: Any) -> None:
    """Raise CalibrationError where the samples do not fit the program's inputs, UnsupportedError for outputs no array can hold."""
    batch = {k: v.numpy() for k, v in next(iter(samples)).items()}
    try:
        check_inputs(batch, program.inputs, program.axes, {})
    except UsageError as error:
        raise CalibrationError(f"calibration: {samples.source} does not fit the model: {error}") from error
    odd = next((s for s in program.outputs if s.dtype not in KNOWN_DTYPES), None)
    if odd is not None:
        raise CaptureError(f"output {odd.name!r} is {odd.dtype}; needed: one of {', '.join(KNOWN_DTYPES)}; convert it in forward")


def _copy_tokenizer(source: str | Path | None, folder: Path) -> None:
    if source is None or not Path(source).is_dir():
        return
    for name in TOKENIZER_FILES:
        file = Path(source) / name
        if file.is_file():
            (folder / TOKENIZER).mkdir(exist_ok=True)
            (folder / TOKENIZER / name).write_bytes(file.read_bytes())


def _made_by() -> dict[str, str]:
    from importlib.metadata import version

    packages = {"torch": "torch", "tvm": "apache-tvm", "tvm_ffi": "apache-tvm-ffi", "onnx": "onnx"}
    return {"khtst_compile": __version__, "python": platform.python_version(), **{k: version(v) for k, v in packages.items()}}


def _bar(factory: ProgressFactory | None, total: int, label: str) -> AbstractContextManager[Progress]:
    return factory(total, label) if factory is not None else nullcontext(NullProgress())


def _silent(line: str) -> None:
    return
