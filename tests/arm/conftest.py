"""What all tests here need: qemu, a cross compiler, TVM's ARM runtime."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.arm import emulator
from tests.requirements import need


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runner, built."""
    need("arm", emulator.lacking())
    return emulator.build_runner(tmp_path_factory.mktemp("runner"))
