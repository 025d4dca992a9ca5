"""Model sources -> Program: a Hugging Face folder, `package.module:factory`, a `.pt2` file, or a module in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from khtst_compile.capture.factory import capture_factory, capture_module
from khtst_compile.capture.huggingface import capture_folder
from khtst_compile.capture.pt2 import capture_file
from khtst_compile.capture.shapes import Range, parse_shapes
from khtst_compile.errors import UsageError
from khtst_compile.program import Program

__all__ = ["capture", "capture_module", "parse_shapes"]


def capture(source: str | Path, *, task: str | None = None, shapes: Mapping[str, Range] | None = None, seed: int = 0) -> Program:
    """Turn a model source into a Program, picked by its form.

    shapes: axis ("batch", "seq" or "input.axis") -> (min, max), both inclusive; min == max fixes it. seed: for example inputs and
    what a factory draws. Raises UsageError for a source that is none of the three, CaptureError for a model that cannot be captured.
    """
    path = Path(source)
    if path.is_dir():
        return capture_folder(path, task=task, shapes=shapes, seed=seed)
    if path.suffix == ".pt2":
        return capture_file(path, task=task, shapes=shapes)
    if ":" in str(source) and not path.exists():
        return capture_factory(str(source), task=task, shapes=shapes, seed=seed)
    what = "a file of another kind" if path.exists() else "no such file or folder"
    raise UsageError(
        f"model source {str(source)!r}: {what}; needed: a Hugging Face folder, package.module:factory, or a .pt2 file"
    )
