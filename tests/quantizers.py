"""Small models around codebooks of every kind: `tests.quantizers:vq_model` on the command line."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from vector_quantize_pytorch import FSQ, LFQ, GroupedResidualVQ, ResidualVQ, VectorQuantize

from khtst_compile.zoo.gsq import ResidualQuantizer, StiefelQuantizer

FEATURES, TOKENS = 12, 10


class Coded(nn.Module):
    """(batch, 10, 12) -> a projection, a quantizer, a projection: values (batch, 10, 5) and ids."""

    def __init__(self, quantizer: nn.Module, d: int = 16) -> None:
        super().__init__()
        self.encoder, self.quantizer, self.decoder = nn.Linear(FEATURES, d), quantizer, nn.Linear(d, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.quantizer(self.encoder(x))
        return self.decoder(found[0]), found[1]


class Classic(nn.Module):
    """The textbook's: squares written out, one-hot rows by scatter, a straight-through form."""

    def __init__(self, d: int = 16, codes: int = 32) -> None:
        super().__init__()
        self.table = nn.Embedding(codes, d)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = x.reshape(-1, x.shape[-1])
        table = self.table.weight
        distances = (flat**2).sum(1, keepdim=True) + (table**2).sum(1) - 2 * torch.matmul(flat, table.t())
        ids = distances.argmin(1).unsqueeze(1)
        rows = torch.zeros(ids.shape[0], table.shape[0]).scatter_(1, ids, 1)
        value = (rows @ table).view(x.shape)
        return x + (value - x).detach(), ids.view(x.shape[:-1])


class Distances(nn.Module):
    """cdist, argmin and a lookup scaled by a constant."""

    def __init__(self, d: int = 16, codes: int = 32) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(codes, d))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.cdist(x, self.codes[None].expand(x.shape[0], -1, -1)).argmin(-1)
        return F.embedding(ids, self.codes) * 2.5, ids


class Softmax(nn.Module):
    """Scores through a softmax with a temperature, the largest by max, one-hot rows times the codes."""

    def __init__(self, d: int = 16, codes: int = 32) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(codes, d))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, ids = F.softmax(x @ self.codes.T / 0.5, -1).max(-1)
        return F.one_hot(ids, len(self.codes)).float() @ self.codes, ids


class Differences(nn.Module):
    """The squares of differences summed, topk of their negatives."""

    def __init__(self, d: int = 16, codes: int = 32) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(codes, d))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = ((x.unsqueeze(-2) - self.codes) ** 2).sum(-1).neg().topk(1, -1).indices.squeeze(-1)
        return self.codes[ids], ids


class Orthogonal(nn.Module):
    """A codebook under torch's orthogonal parametrization."""

    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.codes = nn.utils.parametrizations.orthogonal(nn.Linear(d, d, bias=False))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = self.codes(x).argmax(-1)
        return F.embedding(ids, self.codes.weight), ids


class Residual(nn.Module):
    """Two levels of different sizes; `values`: their values are a result, too."""

    def __init__(self, d: int = 16, values: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.values = nn.Parameter(torch.randn(20, d)), nn.Parameter(torch.randn(12, d)), values

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left, total, ids, values = x, torch.zeros_like(x), [], []
        for codes in (self.first, self.second):
            ids.append(((left.unsqueeze(-2) - codes) ** 2).sum(-1).argmin(-1))
            values.append(codes[ids[-1]])
            left, total = left - values[-1], total + values[-1]
        extra = (torch.stack(values, -2),) if self.values else ()
        return total, torch.stack(ids, -1), *extra


class Rounded(nn.Module):
    """Four steps of a sigmoid for each feature, written by hand."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        steps = torch.round(3 * torch.sigmoid(x))
        return steps / 1.5 - 1, (steps * 4 ** torch.arange(x.shape[-1])).sum(-1).long()


class Signs(nn.Module):
    """One bit for each feature, straight through."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bits = x >= 0.25
        value = torch.where(bits, 1.0, -1.0)
        return value, (bits.long() * 2 ** torch.arange(x.shape[-1])).sum(-1)


VECTORS: dict[str, Callable[[], nn.Module]] = {
    "stiefel": lambda: StiefelQuantizer(16, 16),
    "stiefel frame": lambda: StiefelQuantizer(16, 40, mode="ste_ema"),
    "stiefel residual": lambda: ResidualQuantizer(16, 16, 3),
    "frozen": lambda: StiefelQuantizer(16, 16).freeze(),
    "frozen frame": lambda: StiefelQuantizer(16, 40).freeze(),
    "frozen residual": lambda: ResidualQuantizer(16, 16, 3).freeze(),
    "euclidean": lambda: VectorQuantize(dim=16, codebook_size=32),
    "cosine": lambda: VectorQuantize(dim=16, codebook_size=32, use_cosine_sim=True),
    "projections": lambda: VectorQuantize(dim=16, codebook_size=32, codebook_dim=8),
    "shared heads": lambda: VectorQuantize(dim=16, codebook_size=32, heads=2),
    "heads": lambda: VectorQuantize(dim=16, codebook_size=32, heads=2, separate_codebook_per_head=True),
    "learned": lambda: VectorQuantize(dim=16, codebook_size=32, learnable_codebook=True, ema_update=False),
    "regularized": lambda: VectorQuantize(dim=16, codebook_size=32, orthogonal_reg_weight=10, orthogonal_reg_max_codes=8),
    "residual": lambda: ResidualVQ(dim=16, codebook_size=32, num_quantizers=3),
    "residual cosine": lambda: ResidualVQ(dim=16, codebook_size=32, num_quantizers=3, use_cosine_sim=True),
    "grouped": lambda: GroupedResidualVQ(dim=16, codebook_size=32, num_quantizers=2, groups=2),
    "classic": Classic,
    "distances": Distances,
    "softmax": Softmax,
    "differences": Differences,
    "orthogonal": Orthogonal,
    "sizes": Residual,
}
STEPS: dict[str, Callable[[], nn.Module]] = {
    "fsq": lambda: FSQ(levels=[8, 5, 5, 5], dim=16),
    "fsq symmetric": lambda: FSQ(levels=[8, 5, 4], dim=16, preserve_symmetry=True),
    "fsq groups": lambda: FSQ(levels=[8, 5, 5], dim=16, num_codebooks=2),
    "lfq": lambda: LFQ(codebook_size=2**8, dim=16),
    "rounded": Rounded,
    "signs": Signs,
}
LOOKUPS = {"heads": 2, "residual cosine": 3, "grouped": 2}
"""How many lookups a kind becomes, where that is not one."""


def model(quantizer: nn.Module, d: int = 16) -> Coded:
    """Around a quantizer whose values have d features, in eval mode."""
    return Coded(quantizer, d).eval()


def samples(seed: int = 1, batch: int = 64) -> torch.Tensor:
    """(batch, 10, 12) float32."""
    return torch.randn(batch, TOKENS, FEATURES, generator=torch.Generator().manual_seed(seed))


def vq_model() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """A model and its example inputs, as the command line takes them."""
    return model(VectorQuantize(dim=16, codebook_size=32)), (samples(0, 3),)


def plain_model() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """The same without a codebook."""
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, 5)).eval(), (samples(0, 3),)


def stray_model() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """A frozen codebook that has lost orthonormality since."""
    quantizer = StiefelQuantizer(16, 16).freeze()
    quantizer.codes.add_(0.01 * torch.randn(16, 16, generator=torch.Generator().manual_seed(3)))
    quantizer.table.copy_(0.25 * quantizer.codes)
    return model(quantizer), (samples(0, 3),)


def bare_model() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """A codebook alone, whose scores are products: no number is too large for it to choose."""
    torch.manual_seed(0)
    return Softmax().eval(), (torch.randn(3, TOKENS, 16),)
