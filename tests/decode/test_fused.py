"""A decoder with its cache as kernels: what a layer is made of, and that its cache is what the unfused program returns."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch

import khtst_compile as kc
from khtst_compile.api import load_program
from khtst_compile.artifact import read
from khtst_compile.generate import Cache
from khtst_compile.lower.fuse import fuse
from khtst_compile.program import call_nodes

aten, khtst = torch.ops.aten, torch.ops.khtst


def test_keys_and_values_for_the_cache_split_no_projection(made: Any) -> None:
    """One GEMM for q, k and v though k and v are outputs too; of what is not a kernel, a layer keeps the two copies that are returned."""
    program = load_program(read(made.quantized))
    fused, counts = fuse(program)
    assert counts["projections"] == 2 and counts["cache rows"] == 4
    for attention in call_nodes(fused.graph, khtst.attention_cached.default):
        value = attention.args[2]
        assert value.target is khtst.w8a8_gemm.default and value.meta["val"].shape[-1] == sum(widths(attention))
    copies = list(call_nodes(fused.graph, aten.transpose.int))
    assert [list(n.args[1:]) for n in copies] == [[0, 1]] * 4
    assert not list(call_nodes(fused.graph, aten.permute.default, aten.view.default, aten.reshape.default))


def widths(attention: Any) -> tuple[int, int, int]:
    """Columns of q, k and v."""
    heads, kv_heads, head_dim = attention.args[6:9]
    return heads * head_dim, kv_heads * head_dim, kv_heads * head_dim


def test_the_cache_is_that_of_the_program(made: Any) -> None:
    program = load_program(read(made.quantized))
    fused, _ = fuse(program)
    rng = np.random.default_rng(0)
    given = {"input_ids": torch.from_numpy(rng.integers(0, 250, (3, 5))), "logits_at": torch.tensor([4])}
    for spec in program.inputs[2:]:
        given[spec.name] = torch.from_numpy(rng.standard_normal((4, 3, spec.shape[2]), np.float32))
    got, want = fused.run(given), program.run(given)
    for name in ("new_key_0", "new_value_0"):  # of the first layer, where no code has been rounded differently yet
        torch.testing.assert_close(got[name], want[name], rtol=0, atol=1e-5)  # a few ulp of values up to 10


def test_a_step_checks_no_cache_and_copies_new_rows_alone(made: Any) -> None:
    art = kc.load(made.w8a8, threads=1)
    cache, names = Cache(art, 1, 3), []
    token, last = np.zeros((1, 1), np.int64), np.zeros(1, np.int64)
    cache.advance(token, last)
    art._engine._vm.set_instrument(lambda function, name, before, *rest: names.append(name) if before else None)
    cache.advance(token, last)
    counted = Counter(names)
    # The two inputs are checked where buffers are sized and where they are used.
    assert counted["copy_rows_float32"] == 4 and counted["vm.builtin.check_tensor_info"] == 4
    assert "vm.builtin.alloc_storage" not in counted
