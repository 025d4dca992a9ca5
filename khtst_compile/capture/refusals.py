"""What torch.export raises -> one CaptureError that names the construct, its line in the model and what to do."""

from __future__ import annotations

import re
import traceback

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from khtst_compile.errors import CaptureError, KhtstError

_SKIP = ("/torch/", "/khtst_compile/", "<frozen", "<string>", "/contextlib.py")


def refusal(error: BaseException) -> KhtstError:
    """The error to raise instead of `error`."""
    if isinstance(error, KhtstError):
        return error
    where = model_line(error)
    at = f" at {where}" if where else ""
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)):
        operator = getattr(error, "func", None) or error
        advice = "rewrite it with operators whose result shape follows from input shapes (torch.where, masks, gather)"
        return CaptureError(f"operator {operator} cannot be captured{at}: its result depends on the data; {advice}")
    if isinstance(error, GuardOnDataDependentSymNode) or "data-dependent" in str(error):
        found = re.search(r"data-dependent expression (.+?)(?: \(unhinted|\n|$)", str(error))
        what = f" ({found[1]})" if found else ""
        return CaptureError(
            f"control flow that depends on data{what}{at}; compute both sides and choose with torch.where, or fix the value in the model"
        )
    if "Constraints violated" in str(error) or "must be specialized" in str(error):
        return CaptureError(f"{_constraint(str(error))}{at}")
    text = str(error).strip().splitlines() or [""]
    return CaptureError(
        f"the model could not be captured{at}: {type(error).__name__}: {text[0]}; it must run on the example inputs"
    )


def model_line(error: BaseException) -> str:
    """The innermost line of code outside torch that `error` went through ("modeling.py:12: if x.sum() > 0:"), or ""."""
    lines: list[str] = []
    seen: BaseException | None = error
    while seen is not None:
        for frame in traceback.extract_tb(seen.__traceback__):
            if not any(part in frame.filename for part in _SKIP):
                lines.append(f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}: {(frame.line or '').strip()}")
        seen = seen.__cause__ or seen.__context__
        if lines:
            break
    return lines[-1] if lines else ""


def _constraint(text: str) -> str:
    """The sentence of a constraint violation that carries the reason."""
    reasons = [line.strip(" -") for line in text.splitlines() if line.strip().startswith("-")]
    fixes = re.search(r"Suggested fixes:\s*(.+)", text, re.DOTALL)
    advice = "; torch suggests " + " ".join(fixes[1].split())[:200] if fixes else ""
    return (reasons[0] if reasons else text.strip().splitlines()[0]) + advice


__all__ = ["model_line", "refusal"]
