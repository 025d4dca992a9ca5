"""A transformer's kernels as executed: attention's work, tables of which few rows are read, weights told from values."""

from __future__ import annotations

from pathlib import Path

from khtst_compile.listing import list_kernels


def test_attention_tables_and_order(library: Path) -> None:
    batch, length, heads, head_dim, width = 3, 11, 2, 20, 40
    found = list_kernels(library, sizes={"batch": batch, "seq": length})
    attention = [r for r in found.rows if r.operator == "attention"]
    assert len(attention) == 2
    assert all(r.macs == 2 * heads * head_dim * batch * length * length and r.linear == 0 for r in attention)
    # The table of embeddings has more rows than are read: as many bytes count as are written, and the ids.
    take = next(r for r in found.rows if (50, width) in r.shapes)
    written = 4 * batch * length * width
    assert take.weight_bytes == min(4 * 50 * width, written) and take.bytes == written + take.weight_bytes + 8 * batch * length
    gemms = [r for r in found.rows if r.operator == "w8a8_gemm"]
    assert gemms[0].macs == batch * length * width * 3 * width and gemms[0].site.count("+") == 2
    sites = [r.site for r in found.rows if r.site]
    assert sites.index("blocks.0.out") < sites.index("blocks.1.out")
