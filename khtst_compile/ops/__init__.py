"""The khtst:: operators. Importing this package registers them with torch; loading a saved program needs that first."""

from khtst_compile.ops import cached, codebook, embed, fused, kv_cache, moe, rotary
from khtst_compile.ops.quantize_rows import quantize_rows
from khtst_compile.ops.rotate import rotate
from khtst_compile.ops.w8a8_linear import w8a8_linear

__all__ = ["cached", "codebook", "embed", "fused", "kv_cache", "moe", "quantize_rows", "rotary", "rotate", "w8a8_linear"]
