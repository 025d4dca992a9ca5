"""A torch module, or `package.module:factory`, which returns one together with example inputs -> Program."""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from khtst_compile.capture.export import UPCAST, fit_examples, to_program, users_code
from khtst_compile.capture.refusals import model_line
from khtst_compile.capture.shapes import BATCH, Axis, Range, plan_axes
from khtst_compile.capture.wrapper import Named
from khtst_compile.errors import CaptureError, UsageError
from khtst_compile.program import Program

Examples = tuple[torch.Tensor, ...] | dict[str, torch.Tensor]


def capture_factory(source: str, *, task: str | None, shapes: Mapping[str, Range] | None, seed: int) -> Program:
    """Import `package.module`, call `factory()` with torch's generator seeded by `seed`, and capture what it returns."""
    found = load_factory(source)
    torch.manual_seed(seed)
    try:
        with users_code():
            made = found()
    except (Exception, SystemExit) as error:  # whatever the user's factory raises
        raise CaptureError(f"{source}: the factory failed at {model_line(error)}: {type(error).__name__}: {error}") from error
    if not (isinstance(made, (tuple, list)) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise UsageError(
            f"{source}: returned {type(made).__name__}; needed: (torch.nn.Module, example inputs as a tuple or dict of tensors)"
        )
    return capture_module(made[0], made[1], shapes=shapes, source=source, task=task)


def load_factory(source: str) -> Any:
    """The callable that `package.module:name` names; the current folder is searched first. Raises UsageError where there is none."""
    module_name, _, name = source.partition(":")
    if not module_name or not name:
        raise UsageError(f"{source!r}: needed package.module:factory")
    with current_folder_first():
        try:
            with users_code():
                module = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:  # importing runs arbitrary code
            line = model_line(error)
            at = f" at {line}" if line else ""
            raise UsageError(f"{source}: importing {module_name!r} failed{at}: {type(error).__name__}: {error}") from error
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        names = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise UsageError(f"{source}: {module_name!r} has no callable {name!r}; it has {', '.join(names) or 'none'}")
    return found


def capture_module(
    module: nn.Module,
    example_inputs: Examples,
    *,
    shapes: Mapping[str, Range] | None = None,
    source: str | None = None,
    task: str | None = None,
) -> Program:
    """Capture a module in memory. The module itself is left as it is: other dtypes, devices and training mode are undone on a copy.

    example_inputs: a tuple in the order of forward, or name -> tensor. Axis 0 is "batch" where all inputs share its size; `shapes`
    names further axes ("x.1") and bounds. Raises UsageError for unusable examples, CaptureError where the model cannot be captured.
    """
    named = name_inputs(module, example_inputs)
    examples = {n: t.to("cpu", torch.float32 if t.dtype in UPCAST else t.dtype) for n, t in named.items()}
    tensors = [*module.parameters(), *module.buffers()]
    if (
        module.training
        or any(m.training for m in module.modules())
        or any(t.dtype in UPCAST or t.device.type != "cpu" for t in tensors)
    ):
        module = copy.deepcopy(module).to("cpu").float().eval()
    known = []
    ranks = {n: t.dim() for n, t in examples.items()}
    if all(ranks.values()) and len({t.shape[0] for t in examples.values()}) == 1:
        known.append(Axis("batch", tuple((n, 0) for n in examples), *BATCH))
    if shapes and "seq" in shapes:
        places = tuple((n, 1) for n, rank in ranks.items() if rank >= 2)
        if places and len({examples[n].shape[1] for n, _ in places}) == 1:
            known.append(Axis("seq", places, *shapes["seq"]))
    axes = plan_axes(known, ranks, shapes)
    positional = not accepts_names(module, list(examples))
    call = (lambda m, x: m(*x.values())) if positional else None
    meta = {"source": source or type(module).__name__, "task": task or "module", "tokenizer": None, "max_length": None}
    return to_program(Named(module, list(examples), call), fit_examples(examples, axes), axes, meta)


def name_inputs(module: nn.Module, examples: Any) -> dict[str, torch.Tensor]:
    """Example inputs by the names of forward's parameters. Raises UsageError for anything but tensors, or more than forward takes."""
    if isinstance(examples, torch.Tensor):
        examples = (examples,)
    if isinstance(examples, (tuple, list)):
        names = [p.name for p in parameters(module) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if any(p.kind is p.VAR_POSITIONAL for p in parameters(module)):
            names += [f"input_{i}" for i in range(len(names), len(examples))]
        if len(examples) > len(names):
            raise UsageError(f"example inputs: {len(examples)} given, but {type(module).__name__}.forward takes {names}")
        examples = dict(zip(names, examples, strict=False))
    if not isinstance(examples, dict) or not examples:
        raise UsageError(
            f"example inputs: found {type(examples).__name__}; needed: a tuple, or a dict by name, of at least one tensor"
        )
    for name, value in examples.items():
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                f"example input {name!r} is a {type(value).__name__}; needed: a tensor (bind other arguments in the module)"
            )
    return dict(examples)


def accepts_names(module: nn.Module, names: list[str]) -> bool:
    """Whether forward can be called with these keywords."""
    found = parameters(module)
    keywords = {p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return set(names) <= keywords or (
        any(p.kind is p.VAR_KEYWORD for p in found) and not any(p.kind is p.VAR_POSITIONAL for p in found)
    )


def parameters(module: nn.Module) -> list[inspect.Parameter]:
    return list(inspect.signature(module.forward).parameters.values())


@contextmanager
def current_folder_first() -> Iterator[None]:
    """The working directory at the head of the import path, as `python -m` has it."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
