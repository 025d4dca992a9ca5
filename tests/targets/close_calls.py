"""What tests of codebook lookups share: codebooks and rows that are easy, awkward, and made to be close calls."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

import khtst_compile.ops  # noqa: F401  (registers khtst:: operators)
from khtst_compile.targets.kernels.vec import Floats

Result = tuple[Floats, np.ndarray]


@dataclass(frozen=True)
class Case:
    """Arguments of `codebook_lookup`."""

    z: Floats
    codes: Floats
    bias: Floats | None = None
    table: Floats | None = None
    running: bool = True

    @property
    def values(self) -> Floats:
        """The table, the codes where there is none."""
        return self.codes if self.table is None else self.table

    def wanted(self) -> Result:
        """values, ids: what torch says."""
        bias = None if self.bias is None else torch.from_numpy(self.bias)
        arguments = (torch.from_numpy(self.codes), bias, torch.from_numpy(self.values), self.running, False)
        values, ids = torch.ops.khtst.codebook_lookup(torch.from_numpy(self.z), *arguments)
        return values.numpy(), ids.numpy()


def normal(rng: np.random.Generator, *shape: int) -> Floats:
    """Standard normal float32."""
    return rng.standard_normal(shape, dtype=np.float32)


def with_awkward_rows(z: Floats, code: Floats) -> Floats:
    """z with rows that are NaN, infinite, too large, zero, tiny, huge, and a code itself, as far as it has rows."""
    z = z.copy()
    first = [
        lambda row: row.fill(0.0),
        lambda row: row.__setitem__(0, np.nan),
        lambda row: row.__setitem__(-1, -np.inf),
        lambda row: row.__setitem__(0, 1e19),
        lambda row: np.copyto(row, code),
        lambda row: np.multiply(row, np.float32(1e-30), out=row),
        lambda row: np.multiply(row, np.float32(1e-41), out=row),
        lambda row: np.multiply(row, np.float32(1e17), out=row),
        lambda row: np.multiply(row, np.float32(-1e-12), out=row),
    ]
    for row, change in zip(z, first, strict=False):
        change(row)
    return z


def near_ties(rng: np.random.Generator, codes: Floats, rows: int) -> Floats:
    """Rows half way between two codes, moved by a few units in the last place: (rows, d). codes: (K, d)."""
    a, b = (codes[rng.integers(0, len(codes), rows)].astype(np.float64) for _ in range(2))
    # Orthogonal to a - b, so that both scores are the same in real numbers (where the codes have one length).
    middle = (a + b) / 2 + 0.3 * rng.standard_normal((rows, 1)) * (a + b)
    z = middle.astype(np.float32)
    steps = rng.integers(-2, 3, z.shape)
    for n in range(1, 3):
        z = np.where(steps >= n, np.nextafter(z, np.float32(np.inf)), z)
        z = np.where(steps <= -n, np.nextafter(z, np.float32(-np.inf)), z)
    return z


def cases() -> dict[str, Case]:
    """By name; small, as each is compiled for every instruction set."""
    rng = np.random.default_rng(0)
    made: dict[str, Case] = {}
    plain = normal(rng, 3, 50, 40)
    made["three levels"] = Case(with_awkward_rows(normal(rng, 70, 40), plain[0, 7]), plain)
    made["z less the total"] = Case(normal(rng, 33, 40), plain, running=False)
    made["bias"] = Case(normal(rng, 41, 17), normal(rng, 2, 130, 17), normal(rng, 2, 130))
    filled = np.where(np.arange(70) < 66, normal(rng, 2, 70), np.float32(-np.inf))
    made["filled up"] = Case(with_awkward_rows(normal(rng, 20, 8), normal(rng, 8)), normal(rng, 2, 70, 8), filled)
    doubled = normal(rng, 1, 64, 32)
    doubled[0, 32:] = doubled[0, :32]
    made["duplicates"] = Case(with_awkward_rows(normal(rng, 40, 32), doubled[0, 40]), doubled)
    made["one code"] = Case(with_awkward_rows(normal(rng, 9, 5), normal(rng, 5)), normal(rng, 2, 1, 5))
    made["one feature"] = Case(with_awkward_rows(normal(rng, 40, 1), normal(rng, 1)), normal(rng, 2, 20, 1), normal(rng, 2, 20))
    made["other values"] = Case(normal(rng, 19, 24), normal(rng, 1, 40, 24), table=normal(rng, 1, 40, 7))
    made["scales apart"] = Case(
        normal(rng, 35, 48), normal(rng, 1, 90, 48) * np.exp(4 * normal(rng, 1, 90, 1)), 9 * normal(rng, 1, 90)
    )
    far = normal(rng, 1, 80, 64) * np.float32(0.01) + normal(rng, 64)
    made["far from zero"] = Case(normal(rng, 35, 64) + 3, far, -0.5 * np.square(far).sum(-1, dtype=np.float32))
    # Rows with one large feature: parts of such a row are nothing like its largest code.
    spiky = normal(rng, 64, 96)
    spiky[np.arange(64), rng.integers(0, 96, 64)] *= 50
    made["spikes"] = Case(spiky, normal(rng, 1, 100, 96))
    # Features of one size, as the codes have them: sums of products are as large as they get.
    flat = np.sign(normal(rng, 1, 60, 256))
    made["signs"] = Case(np.repeat(flat[0], 2, 0) * np.float32(0.37), flat)
    square = np.linalg.qr(rng.standard_normal((64, 64)))[0].astype(np.float32)[None]
    made["near ties"] = Case(near_ties(rng, square[0], 300), square)
    signs = np.sign(normal(rng, 1, 48, 64))
    made["near ties of signs"] = Case(near_ties(rng, signs[0], 300), signs)
    made["no rows"] = Case(normal(rng, 0, 40), plain)
    return made
