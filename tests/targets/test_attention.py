"""Attention: against torch in float64 and against numpy in the kernel's order, masks, tails, and the assembly."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import tvm

from khtst_compile.errors import LoweringError
from khtst_compile.targets.isa import AVX2, AVX512VNNI, X86_ISAS
from khtst_compile.targets.kernels import attention
from khtst_compile.targets.kernels.attention import Attention, Mask, Operand

EMULATED = AVX512VNNI.emulate()
LENGTHS = ((0, 4, 4), (1, 1, 1), (2, 13, 17), (1, 33, 8), (1, 8, 300), (1, 300, 33))
"""(batch, queries, keys): 300 queries are two tasks, 17 and 300 keys leave a tail of a panel, 13 rows use every tile."""


def fused(heads: int, groups: int, dim: int, **options: Any) -> Attention:
    """Q, K and V side by side in one tensor, as a fused projection writes them."""
    row = (heads + 2 * groups) * dim
    q, k, v = Operand(row), Operand(row, heads * dim), Operand(row, (heads + groups) * dim)
    return Attention(AVX2, heads, dim, dim**-0.5, q, k, v, kv_heads=groups, **options)


def apart(heads: int, groups: int, dim: int, **options: Any) -> Attention:
    """Three tensors."""
    q, k = Operand(heads * dim), Operand(groups * dim)
    return Attention(AVX2, heads, dim, dim**-0.5, q, k, k, kv_heads=groups, **options)


def build(spec: Attention) -> Any:
    """The compiled module of `spec`."""
    module = tvm.IRModule({spec.name: attention.prim_func(spec)})
    return tvm.tirx.build(module, target=tvm.target.Target(spec.isa.tvm_target()))


def inputs(spec: Attention, batch: int, queries: int, keys: int, seed: int = 0) -> list[np.ndarray]:
    """q, k, v and the mask, if any; the mask hides 3 keys in 10, and all keys of its first row if it has several."""
    rng = np.random.default_rng(seed)
    shapes = [(batch, queries, spec.q.row), (batch, keys, spec.k.row), (batch, keys, spec.v.row)]
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    if spec.mask is None:
        return arrays
    m = spec.mask
    shape = (batch if m.batch else 1, spec.heads if m.head else 1, queries if m.query else 1, keys)
    seen = rng.random(shape) > 0.3
    if np.prod(shape[:3]) > 1:
        seen.reshape(-1, keys)[0] = False
    if m.dtype == "float32":
        return [*arrays, np.where(seen, rng.standard_normal(shape), -np.inf).astype(np.float32)]
    return [*arrays, seen]


def run(lib: Any, spec: Attention, arrays: list[np.ndarray]) -> np.ndarray:
    """The kernel's output; it starts as NaN, so that an element left unwritten shows."""
    out = tvm.runtime.tensor(np.full((*arrays[0].shape[:2], spec.heads * spec.head_dim), np.nan, np.float32))
    lib[spec.name](*(tvm.runtime.tensor(a) for a in arrays), out)
    return out.numpy()


def heads_of(spec: Attention, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """q, k, v as (batch, heads, length, head_dim)."""
    found = []
    for array, operand, heads in zip(arrays[:3], (spec.q, spec.k, spec.v), (spec.heads, spec.groups, spec.groups), strict=True):
        used = array[..., operand.offset : operand.offset + heads * spec.head_dim]
        found.append(used.reshape(*array.shape[:2], heads, spec.head_dim).transpose(0, 2, 1, 3))
    return found


def expected(spec: Attention, arrays: list[np.ndarray]) -> np.ndarray:
    """torch's scaled_dot_product_attention in float64."""
    q, k, v = (torch.from_numpy(np.ascontiguousarray(a)).double() for a in heads_of(spec, arrays))
    mask = None
    if len(arrays) == 4:
        mask = torch.from_numpy(arrays[3])
        mask = mask if mask.dtype == torch.bool else mask.double()
    causal = spec.causal
    if causal and mask is not None:
        earlier = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        mask = mask & earlier if mask.dtype == torch.bool else mask.masked_fill(~earlier, -torch.inf)
        causal = False
    result = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=spec.scale, enable_gqa=spec.groups != spec.heads
    )
    return result.transpose(1, 2).flatten(2).numpy()


CASES = {
    "plain": apart(4, 4, 32),
    "fused-padding": fused(4, 4, 32, mask=Mask()),
    "grouped": apart(4, 2, 20, mask=Mask(batch=False)),
    "narrow": apart(2, 1, 7, mask=Mask("bool", True, True, False)),
    "causal": apart(2, 2, 16, causal=True),
    "causal-padding": apart(2, 1, 24, causal=True, mask=Mask()),
    "float-all": apart(2, 2, 8, mask=Mask("float32", True, True, True)),
    "float-causal": apart(3, 1, 33, causal=True, mask=Mask("float32", False, False, True)),
    "bool-query": apart(2, 2, 1, mask=Mask("bool", False, False, True)),
}


ACROSS = ("plain", "grouped", "causal-padding", "float-all")
"""The cases also run with the tiles of AVX512."""


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str) -> None:
    """Absolute error 3e-6 on standard normal data, the same bits from the AVX512 tiles run on AVX2.

    Scores of |s| <= 8 err by about sqrt(d) * 2**-24 * |s| (under 1e-6), which moves a probability by that much relative; the
    exponential adds 1e-6 at most; values are of size 4.
    """
    spec = CASES[name]
    other = replace(spec, isa=EMULATED)
    lib = build(spec)
    other_lib = build(other) if name in ACROSS else None
    assert spec.tiles != other.tiles
    for batch, queries, keys in LENGTHS:
        arrays = inputs(spec, batch, queries, queries if spec.k == spec.v and spec.q.row == spec.k.row else keys)
        got = run(lib, spec, arrays)
        np.testing.assert_allclose(got, expected(spec, arrays), rtol=0, atol=3e-6)
        if other_lib is not None:
            np.testing.assert_array_equal(got, run(other_lib, other, arrays))


@pytest.mark.parametrize("dim", [1, 20, 96, 256])
def test_any_size(dim: int) -> None:
    """Head sizes with and without a tail, lengths within a panel, of a few blocks and of many: keys, queries, causal or not."""
    for causal in (False, True):
        spec = apart(2, 1, dim, causal=causal)
        lib = build(spec)
        for queries, keys in ((1, 1), (7, 7), (33, 33), (1, 2048), (260, 2048 if dim == 20 else 600)):
            arrays = inputs(spec, 1, queries, keys)
            np.testing.assert_allclose(run(lib, spec, arrays), expected(spec, arrays), rtol=0, atol=3e-6)


def test_scratch_does_not_grow_with_the_length() -> None:
    """Every buffer a kernel takes has a size known when it is built; all of them fit an L2 cache of 512 KiB."""
    for dim in (1, 32, 64, 128, 256):
        spec = apart(4, 2, dim, causal=True, mask=Mask("float32", True, True, True))
        sizes = re.findall(r"T\.alloc_buffer\(\((.*?),?\)", attention.prim_func(spec).script())
        assert len(sizes) > 8 and all(size.isdigit() for size in sizes), sizes
        assert 4 * sum(int(size) for size in sizes) < 512 * 1024


def test_blocks_that_no_row_sees_are_not_read() -> None:
    """Keys above the diagonal, whole blocks of them: NaN there does not reach any row."""
    spec = apart(1, 1, 64, causal=True)
    q, k, v = inputs(spec, 1, 40, 3 * spec.key_block)
    beyond = spec.key_block
    k[:, beyond:], v[:, beyond:] = np.nan, np.nan
    got = run(build(spec), spec, [q, k, v])
    np.testing.assert_array_equal(got, run(build(spec), spec, [q, k[:, :beyond].copy(), v[:, :beyond].copy()]))


def test_one_tensor_given_three_times() -> None:
    spec = CASES["fused-padding"]
    x = inputs(spec, 2, 37, 37)
    arrays = [x[0], x[0], x[0], x[3]]
    lib = build(spec)
    got = run(lib, spec, arrays)
    np.testing.assert_allclose(got, expected(spec, arrays), rtol=0, atol=3e-6)
    shared = tvm.runtime.tensor(x[0])
    out = tvm.runtime.tensor(np.zeros_like(got))
    lib[spec.name](shared, shared, shared, tvm.runtime.tensor(x[3]), out)
    np.testing.assert_array_equal(out.numpy(), got)


def test_bits_are_those_of_the_written_order() -> None:
    spec = apart(2, 1, 20, causal=True, mask=Mask("float32", False, False, True))
    arrays = inputs(spec, 1, 9, 21)
    np.testing.assert_array_equal(run(build(spec), spec, arrays), attention.reference(spec, *arrays))
    spec = fused(2, 2, 16, mask=Mask())
    arrays = inputs(spec, 1, 21, 21)
    np.testing.assert_array_equal(run(build(spec), spec, arrays), attention.reference(spec, *arrays))
    spec = apart(2, 1, 256, mask=Mask("float32", False, True, False))  # blocks of 64 keys
    arrays = inputs(spec, 1, 3, 150)
    np.testing.assert_array_equal(run(build(spec), spec, arrays), attention.reference(spec, *arrays))


def test_a_row_does_not_depend_on_the_others() -> None:
    """Neither on how many rows there are, nor on padding keys, nor on threads: a sentence alone gives the batch's bits."""
    spec = fused(4, 4, 32, mask=Mask())
    lib = build(spec)
    x, _, _, mask = inputs(spec, 3, 40, 40)
    mask[:] = np.arange(40) < np.array([40, 23, 5]).reshape(3, 1, 1, 1)
    whole = run(lib, spec, [x, x, x, mask])
    for b, n in enumerate((40, 23, 5)):
        one = np.ascontiguousarray(x[b : b + 1, :n])
        alone = run(lib, spec, [one, one, one, np.ones((1, 1, 1, n), bool)])
        np.testing.assert_array_equal(whole[b : b + 1, :n], alone)
    serial = replace(spec, parallel=False)
    np.testing.assert_array_equal(run(build(serial), serial, [x, x, x, mask]), whole)


def test_rows_without_keys() -> None:
    """All keys hidden: zeros for False and -inf, the mean of the values for finfo.min, as torch; no keys at all: zeros."""
    spec = apart(1, 1, 16, mask=Mask("float32", True, False, True))
    lib = build(spec)
    q, k, v, mask = inputs(spec, 1, 3, 18)
    mask[:] = 0
    mask[0, 0, 0] = -np.inf
    mask[0, 0, 1] = np.finfo(np.float32).min
    got = run(lib, spec, [q, k, v, mask])
    assert (got[0, 0] == 0).all()
    np.testing.assert_allclose(got[0, 1], v[0].mean(0), atol=1e-6)
    nothing = run(lib, spec, [q, k[:, :0], v[:, :0], mask[..., :0]])
    assert (nothing == 0).all()


def test_nan_is_kept() -> None:
    spec = apart(1, 1, 16)
    q, k, v = inputs(spec, 1, 8, 18)
    q[0, 3, 5] = np.nan
    got = run(build(spec), spec, [q, k, v])
    assert np.isnan(got[0, 3]).all() and not np.isnan(np.delete(got, 3, axis=1)).any()


@pytest.mark.parametrize(
    "make",
    [
        lambda: apart(0, 1, 16),
        lambda: apart(4, 3, 16),
        lambda: replace(apart(2, 2, 16), q=Operand(31)),
        lambda: replace(apart(2, 2, 16), v=Operand(48, 17)),
        lambda: Mask("int32"),
    ],
)
def test_refusals(make: Any) -> None:
    with pytest.raises(LoweringError):
        make()


@pytest.mark.parametrize("isa", X86_ISAS, ids=lambda i: i.name)
def test_assembly(isa: Any) -> None:
    """The two inner products run from registers: as many multiply-adds as a tile has, and no accumulator in memory."""
    spec = replace(fused(12, 12, 32, mask=Mask()), isa=isa)
    text = str(build(spec).inspect_source("asm"))
    lines = [line for line in text.splitlines() if re.match(r"^(\.LBB|\t[a-z])", line)]
    at: dict[str, int] = {}
    full = 0
    for i, line in enumerate(lines):
        if label := re.match(r"^(\.LBB\w+):", line):
            at[label[1]] = i
        jump = re.match(r"^\tj\w+\t(\.LBB\w+)", line)
        if not jump or jump[1] not in at:
            continue
        body = lines[at[jump[1]] + 1 : i + 1]
        products = sum("vfmadd231ps" in b for b in body)
        if any(b.startswith(".LBB") for b in body) or products != spec.tiles[0] * (512 // isa.vector_bits):
            continue
        full += 1
        assert not any("call" in b for b in body)
        assert not any(re.search(r"\(%rsp\).*%[xyz]mm|%[xyz]mm.*\(%rsp\)", b) for b in body), body
        assert any(("%zmm" if isa.vector_bits == 512 else "%ymm") in b for b in body)
    assert full >= 2
