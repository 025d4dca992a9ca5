"""Calibration files -> batches of model inputs: text, JSON, arrays, or random ones on request."""

from __future__ import annotations

import json
import logging
import random as stdlib_random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from khtst_compile.arrays import native, read_array, read_arrays
from khtst_compile.errors import CalibrationError, UsageError
from khtst_compile.tokens import room_for_text, unencodable

if TYPE_CHECKING:
    from khtst_compile.program import Program, TensorSpec

log = logging.getLogger(__name__)
Batch = dict[str, torch.Tensor]
DEFAULT_LENGTH = 32


@dataclass(frozen=True)
class Samples:
    """Batches made anew on every iteration. count: number of samples; source: text for reports; random: made up, not data."""

    count: int
    source: str
    random: bool
    _batches: Callable[[], Iterator[Batch]]

    def __iter__(self) -> Iterator[Batch]:
        return self._batches()


def load_samples(
    path: str | Path | None,
    program: Program,
    *,
    limit: int | None = 256,
    batch: int = 16,
    max_length: int = 128,
    seed: int = 0,
    random: bool = False,
) -> Samples:
    """Read calibration samples for `program`.

    path: .txt (a text a line), .jsonl (texts, {"text": ...} or {input: array}), .json (list of texts, or an object with such a list
    under "calib" or alone), .npz (input -> array, first axis = samples), .npy (the only input), or a folder-less None with random=True.
    limit: at most so many, drawn by `seed` where there are more; max_length: tokens a text is cut at.
    A language model with a cache reads texts as one stream of tokens, and `limit` counts windows of it (see windows.py).
    Raises CalibrationError naming file, line and input.
    """
    if "cache" in program.meta:
        from khtst_compile.windows import window_samples  # late: it builds on this module

        return window_samples(path, program, limit=limit, max_length=max_length, seed=seed, random=random)
    if random:
        if path is not None:
            raise CalibrationError(f"calibration: both {path} and random samples were asked for; needed: one of them")
        return _random_samples(program, limit or 256, batch, max_length, seed)
    file = existing_file(path)
    if file.suffix in (".npz", ".npy"):
        return _array_samples(file, _open_arrays(file, program), program, limit, batch, seed)
    found = draw(read_items(file), limit, seed)
    if not found:
        raise CalibrationError(f"{file}: empty; needed: at least one sample")
    if isinstance(found[0], str):
        return _text_samples(file, found, program, batch, max_length)
    return _array_samples(file, _stack(file, found, program), program, None, batch, seed)


def existing_file(path: str | Path | None) -> Path:
    """`path`. Raises CalibrationError where there is no such file."""
    if path is None:
        raise CalibrationError("calibration: no file was given; name one, or ask for random samples")
    file = Path(path)
    if not file.is_file():
        raise CalibrationError(f"{file}: there is no such file")
    return file


def read_items(file: Path) -> Iterator[Any]:
    """The texts (or, from .jsonl, objects) of a file, one by one. Raises CalibrationError naming file and line."""
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".json": _read_json}
    if file.suffix not in readers:
        raise CalibrationError(f"{file}: unknown kind {file.suffix!r}; needed: .txt, .jsonl, .json, .npz or .npy")
    return readers[file.suffix](file)


def draw(items: Iterator[Any], limit: int | None, seed: int) -> list[Any]:
    """A uniform sample of `limit` items, in their order (Vitter's algorithm R), holding no more than that."""
    if limit is None:
        return list(items)
    generator = stdlib_random.Random(seed)
    kept: list[tuple[int, Any]] = []
    for number, item in enumerate(items):
        if number < limit:
            kept.append((number, item))
        elif (place := generator.randrange(number + 1)) < limit:
            kept[place] = (number, item)
    return [item for _, item in sorted(kept, key=lambda pair: pair[0])]


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    try:
        with file.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield number, line.strip()
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{file}: not UTF-8 text ({error})") from error


def _read_txt(file: Path) -> Iterator[str]:
    return (line for _, line in _lines(file))


def _read_jsonl(file: Path) -> Iterator[Any]:
    kinds: set[type] = set()
    for number, line in _lines(file):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CalibrationError(f"{file}, line {number}: not JSON ({error})") from error
        if isinstance(value, dict) and isinstance(value.get("text"), str):
            value = value["text"]
        if not isinstance(value, (str, dict)):
            raise CalibrationError(
                f'{file}, line {number}: found {type(value).__name__}; needed: a text, {{"text": ...}} or {{input: array}}'
            )
        kinds.add(type(value))
        if len(kinds) > 1:
            raise CalibrationError(f"{file}, line {number}: texts and arrays are mixed; needed: one kind")
        yield value


def _read_json(file: Path) -> Iterator[str]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CalibrationError(f"{file}: not JSON ({error})") from error
    if isinstance(data, dict):
        lists = {k: v for k, v in data.items() if isinstance(v, list) and all(isinstance(t, str) for t in v)}
        if "calib" not in lists and len(lists) != 1:
            raise CalibrationError(f'{file}: lists of texts under {sorted(lists)}; needed: one under "calib", or exactly one')
        data = lists.get("calib", next(iter(lists.values()), None))
    if not isinstance(data, list) or not all(isinstance(t, str) for t in data):
        raise CalibrationError(f"{file}: found {type(data).__name__}; needed: a list of texts")
    return iter(t for t in data if t.strip())


def _text_samples(file: Path, texts: list[str], program: Program, batch: int, max_length: int) -> Samples:
    """Tokens are kept as small arrays; padded batches, sorted by length to waste little, are made while iterating."""
    encode, pad = _tokenizer(file, program)
    wide = _fixed(program, 1)
    limits = [max_length, program.meta.get("max_length") or max_length, program.axes.get("seq", (1, max_length))[1]]
    rows = encode(texts, wide if wide is not None else min(limits))
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
    floor = wide if wide is not None else program.axes.get("seq", (1, 1))[0]
    names = [s.name for s in program.inputs]

    def make() -> Iterator[Batch]:
        for chosen in _groups(order, batch, program, file):
            longest = max(floor, *(len(rows[i][0]) for i in chosen))
            shape = (len(chosen), longest)
            made = {
                "input_ids": torch.full(shape, pad, dtype=torch.int64),
                "attention_mask": torch.zeros(shape, dtype=torch.int64),
                "token_type_ids": torch.zeros(shape, dtype=torch.int64),
            }
            for at, i in enumerate(chosen):
                ids, types = rows[i]
                made["input_ids"][at, : len(ids)] = torch.from_numpy(ids)
                made["token_type_ids"][at, : len(ids)] = torch.from_numpy(types)
                made["attention_mask"][at, : len(ids)] = 1
            yield {n: made[n] for n in names}

    return Samples(_usable(len(order), batch, program, file), str(file), False, make)


def _tokenizer(file: Path, program: Program) -> tuple[Callable[[list[str], int], list[tuple[np.ndarray, np.ndarray]]], int]:
    """(texts, longest) -> token ids and type ids, each (length,) int64; and the padding id."""
    names = {s.name for s in program.inputs}
    if not names <= {"input_ids", "attention_mask", "token_type_ids"}:
        raise CalibrationError(f"{file}: holds texts, but the model reads {sorted(names)}; needed: arrays (.npz, .npy or .jsonl)")
    folder = program.meta.get("tokenizer")
    if not folder or not (Path(folder) / "tokenizer.json").is_file():
        raise CalibrationError(
            f"{file}: holds texts, but the model came without tokenizer.json; give token ids as .npz, or add the file"
        )
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    padding = tokenizer.padding or {}
    ids = [tokenizer.token_to_id(t) for t in ("[PAD]", "<pad>", "<|endoftext|>", "</s>")]
    pad = padding.get("pad_id", next((i for i in ids if i is not None), 0))
    tokenizer.no_padding()

    def encode(texts: list[str], longest: int) -> list[tuple[np.ndarray, np.ndarray]]:
        least = room_for_text(tokenizer)
        if longest < least:
            raise CalibrationError(
                f"{file}: texts are cut at {longest} tokens, of which the tokenizer adds {least - 1} to every text; needed: a maximum "
                f"length of at least {least}"
            )
        for number, text in enumerate(texts, 1):
            if (bad := unencodable(text)) is not None:
                raise CalibrationError(f"{file}: text {number} holds {bad}, half a surrogate pair; repair the text")
        tokenizer.enable_truncation(max_length=longest)
        found = tokenizer.encode_batch(texts)
        for number, e in enumerate(found, 1):
            if not e.ids:
                raise CalibrationError(f"{file}: text {number} has no tokens")
            _check_ids(file, "input_ids", np.asarray([e.ids], np.int64), [number - 1], _table_rows(program)["input_ids"])
        return [(np.asarray(e.ids, np.int64), np.asarray(e.type_ids, np.int64)) for e in found]

    return encode, int(pad)


def _open_arrays(file: Path, program: Program) -> dict[str, np.ndarray]:
    """Input name -> array on disk or in memory, never a pickle."""
    try:
        if file.suffix == ".npy":
            if len(program.inputs) != 1:
                raise CalibrationError(
                    f"{file}: one array, but the model reads {[s.name for s in program.inputs]}; needed: an .npz with those names"
                )
            return {program.inputs[0].name: read_array(file)}
        return read_arrays(file)
    except UsageError as error:
        raise CalibrationError(str(error)) from error


def _stack(file: Path, items: Sequence[dict[str, Any]], program: Program) -> dict[str, np.ndarray]:
    """One object a sample -> arrays with samples first. All samples of an input must have one shape."""
    stacked: dict[str, np.ndarray] = {}
    for spec in program.inputs:
        rows: list[np.ndarray] = []
        for number, item in enumerate(items, 1):
            if spec.name not in item:
                raise CalibrationError(f"{file}, sample {number}: input {spec.name!r} is missing; found {sorted(item)}")
            try:
                row = np.asarray(item[spec.name])
            except ValueError as error:
                raise CalibrationError(f"{file}, sample {number}: input {spec.name!r} is ragged ({error})") from error
            if rows and row.shape != rows[0].shape:
                raise CalibrationError(
                    f"{file}, sample {number}: input {spec.name!r} has shape {row.shape}, the first {rows[0].shape}; pad to one"
                )
            rows.append(row)
        stacked[spec.name] = np.stack(rows)
    for extra in sorted(set(items[0]) - set(stacked)):
        stacked[extra] = np.asarray([0])
    return stacked


def _array_samples(
    file: Path, arrays: dict[str, np.ndarray], program: Program, limit: int | None, batch: int, seed: int
) -> Samples:
    names = [s.name for s in program.inputs]
    if unknown := sorted(set(arrays) - set(names)):
        raise CalibrationError(f"{file}: unknown input {unknown[0]!r}; the model reads {names}")
    if missing := sorted(set(names) - set(arrays)):
        raise CalibrationError(f"{file}: input {missing[0]!r} is missing; found {sorted(arrays)}")
    for spec in program.inputs:
        _check_array(file, spec, arrays[spec.name], program)
    counts = {n: len(arrays[n]) for n in names}
    if len(set(counts.values())) != 1:
        raise CalibrationError(f"{file}: inputs differ in their number of samples: {counts}")
    count = counts[names[0]]
    if count == 0:
        raise CalibrationError(f"{file}: empty; needed: at least one sample")
    order = draw(iter(range(count)), limit, seed)
    rows = _table_rows(program)

    def make() -> Iterator[Batch]:
        for chosen in _groups(order, batch, program, file):
            made: Batch = {}
            for spec in program.inputs:
                values = native(np.ascontiguousarray(arrays[spec.name][chosen]))
                _check_ids(file, spec.name, values, chosen, rows[spec.name])
                part = torch.from_numpy(values).to(getattr(torch, spec.dtype))
                if part.is_floating_point() and not bool(torch.isfinite(part).all()):
                    bad = next(i for i, row in zip(chosen, part, strict=True) if not bool(torch.isfinite(row).all()))
                    raise CalibrationError(
                        f"{file}: input {spec.name!r}, sample {bad} holds NaN or infinity; remove or repair it"
                    )
                made[spec.name] = part
            yield made

    return Samples(_usable(len(order), batch, program, file), str(file), False, make)


def _table_rows(program: Program) -> dict[str, int | None]:
    """Input -> rows of the smallest embedding table it indexes, or None."""
    return {s.name: _smallest_table(program, g) for s, g in zip(program.inputs, program.user_inputs(), strict=True)}


def _check_ids(file: Path, name: str, values: np.ndarray, chosen: Sequence[int], rows: int | None) -> None:
    """values: (samples, ...) integers. Raise CalibrationError where one lies outside the table of that many rows."""
    if rows is None or not values.size or (int(values.min()) >= 0 and int(values.max()) < rows):
        return
    sample, found = next((i, v) for i, v in zip(chosen, values, strict=True) if int(v.min()) < 0 or int(v.max()) >= rows)
    raise CalibrationError(
        f"{file}: input {name!r}, sample {sample} holds ids {int(found.min())}..{int(found.max())}; the model's table has {rows} rows, "
        f"needed: 0..{rows - 1}; use the model's own tokenizer"
    )


def _check_array(file: Path, spec: TensorSpec, array: np.ndarray, program: Program) -> None:
    """Raise CalibrationError where dtype or shape cannot be the input's."""
    wanted = np.dtype(spec.dtype)
    floats = np.issubdtype(wanted, np.floating) and np.issubdtype(array.dtype, np.floating)
    integers = np.issubdtype(wanted, np.integer) and (np.issubdtype(array.dtype, np.integer) or array.dtype == np.bool_)
    if not (array.dtype == wanted or floats or integers):
        raise CalibrationError(f"{file}: input {spec.name!r} is {array.dtype}; needed: {spec.dtype}")
    fits = array.ndim == len(spec.shape)
    for size, axis in list(zip(array.shape, spec.shape, strict=False))[1:]:
        low, high = (axis, axis) if isinstance(axis, int) else program.axes.get(axis, (0, 2**31))
        fits = fits and low <= size <= high
    if not fits:
        shape = ", ".join(str(s) for s in ("samples", *spec.shape[1:]))
        raise CalibrationError(f"{file}: input {spec.name!r} has shape {array.shape}; needed: ({shape}), with {program.axes}")


def _random_samples(program: Program, count: int, batch: int, max_length: int, seed: int) -> Samples:
    """Standard normal floats, token ids drawn from the whole vocabulary, masks of ones."""
    log.warning("calibrating on random inputs: ranges will not be those of real data, and accuracy will suffer")
    upper = {s.name: _vocabulary(program, g) for s, g in zip(program.inputs, program.user_inputs(), strict=True)}

    def size(axis: int | str) -> int:
        if isinstance(axis, int):
            return axis
        low, high = program.axes.get(axis, (1, DEFAULT_LENGTH))
        return max(low, min(high, max_length, DEFAULT_LENGTH))

    def make() -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        for chosen in _groups(list(range(count)), batch, program, Path("random")):
            made: Batch = {}
            for spec in program.inputs:
                shape = (len(chosen), *(size(a) for a in spec.shape[1:]))
                dtype = getattr(torch, spec.dtype)
                if dtype.is_floating_point:
                    made[spec.name] = torch.randn(shape, generator=generator).to(dtype)
                elif spec.name == "attention_mask" or dtype is torch.bool:
                    made[spec.name] = torch.ones(shape, dtype=dtype)
                else:
                    made[spec.name] = torch.randint(0, upper[spec.name], shape, generator=generator).to(dtype)
            yield made

    return Samples(_usable(count, batch, program, Path("random")), f"random (seed {seed}), not real data", True, make)


def _vocabulary(program: Program, graph_input: str) -> int:
    """How many values an integer input may take: the rows of the embedding table it indexes, else 2 (a mask or a type)."""
    return _smallest_table(program, graph_input) or 2


def _smallest_table(program: Program, graph_input: str) -> int | None:
    node = next(n for n in program.graph.nodes if n.name == graph_input)
    tables = [u.args[0] for u in node.users if u.op == "call_function" and u.target is torch.ops.aten.embedding.default]
    return min((int(t.meta["val"].shape[0]) for t in tables), default=None)


def _fixed(program: Program, axis: int) -> int | None:
    """The size of an axis of the first input, where it is fixed."""
    shape = program.inputs[0].shape
    size = shape[axis] if axis < len(shape) else None
    return size if isinstance(size, int) else None


def _batch_size(batch: int, program: Program) -> int:
    fixed = _fixed(program, 0)
    if fixed is not None:
        return fixed
    low, high = program.axes.get(str(program.inputs[0].shape[0]), (1, batch)) if program.inputs[0].shape else (1, batch)
    return max(low, min(batch, high))


def _usable(count: int, batch: int, program: Program, file: Path) -> int:
    """How many of `count` samples make whole batches. Raises CalibrationError where not one batch does."""
    size, low = _batch_size(batch, program), _fixed(program, 0) or program.axes.get("batch", (1, 1))[0]
    rest = count % size
    usable = count if rest == 0 or rest >= low else count - rest
    if usable == 0:
        raise CalibrationError(f"{file}: {count} samples; the model takes no batch under {low}, so at least {low} are needed")
    if usable < count:
        log.warning("%s: the last %d samples do not fill a batch of %d and are left out", file, rest, low)
    return usable


def _groups(order: list[int], batch: int, program: Program, file: Path) -> Iterator[list[int]]:
    size, usable = _batch_size(batch, program), _usable(len(order), batch, program, file)
    for start in range(0, usable, size):
        yield order[start : min(start + size, usable)]
