"""One base error, one class per kind of failure, and the exit code each maps to.

Every message says where, what was found, what was needed and what to do. The command line prints the message alone and exits
with `exit_code`; code 1 ("over budget") is a result rather than a failure and is carried by `OverBudget`.
"""

from __future__ import annotations


class KhtstError(Exception):
    """Base of all errors that are the user's to act on."""

    exit_code = 2


class UsageError(KhtstError):
    """A wrong option, path, shape or file content."""

    exit_code = 2


class CalibrationError(UsageError):
    """Calibration data that cannot be used: empty, not finite, wrong dtype or shape."""


class ArtifactError(UsageError):
    """An artifact that is truncated, altered, of another version or not an artifact."""


class OverBudget(KhtstError):
    """Parity was measured and is outside its budget."""

    exit_code = 1


class UnsupportedError(KhtstError):
    """A model or operator that cannot be captured, quantized or lowered."""

    exit_code = 3


class CaptureError(UnsupportedError):
    """The model source could not be turned into a graph."""


class PassError(UnsupportedError):
    """A pass cannot apply to this program, or broke what it promises."""


class LoweringError(UnsupportedError):
    """An operator has no lowering for the target."""


class EnvironmentProblem(KhtstError):
    """The machine or an installed package lacks something: CPU features, a compiler, a version."""

    exit_code = 4


class ResourceError(KhtstError):
    """Out of memory, disk space or time."""

    exit_code = 5
