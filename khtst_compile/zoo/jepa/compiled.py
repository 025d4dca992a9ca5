"""What of a predictor is compiled: modules of plain tensors, from what was recorded to what is read."""

from __future__ import annotations

from torch import Tensor, nn

from khtst_compile.zoo.frozen import FrozenQuantizer
from khtst_compile.zoo.jepa.core import Encoder, Predictor


class Embedding(nn.Module):
    """A recording (batch, ...) -> the embeddings of its patches (batch, N, d)."""

    def __init__(self, cut: nn.Module, encoder: Encoder) -> None:
        super().__init__()
        self.cut, self.encoder = cut, encoder

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.encoder(self.cut(x))
        return y


class Coded(nn.Module):
    """A recording (batch, ...) -> what a frozen codebook makes of the embeddings of its patches (batch, N, d), and which codes those are
    (batch, N) int64."""

    def __init__(self, cut: nn.Module, encoder: Encoder, codebook: FrozenQuantizer) -> None:
        super().__init__()
        self.cut, self.encoder, self.codebook = cut, encoder, codebook

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = self.codebook(self.encoder(self.cut(x)))
        return values, ids


class Prediction(nn.Module):
    """A recording (batch, ...) -> the predicted mean embedding of another (batch, d)."""

    def __init__(self, cut: nn.Module, encoder: Encoder, predictor: Predictor) -> None:
        super().__init__()
        self.cut, self.encoder, self.predictor = cut, encoder, predictor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.predictor(self.encoder(self.cut(x)).mean(1), None)
        return y.squeeze(1)


class Conditioned(nn.Module):
    """A recording (batch, ...) and a condition (batch, c) -> the predicted embedding of every place of the table `positions` (batch, N, d),
    or, without a table, of the whole (batch, d)."""

    def __init__(self, cut: nn.Module, encoder: Encoder, predictor: Predictor, positions: Tensor | None) -> None:
        super().__init__()
        self.cut, self.encoder, self.predictor, self.positions = cut, encoder, predictor, positions

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        y: Tensor = self.predictor(self.encoder(self.cut(x)).mean(1), self.positions, condition)
        return y.squeeze(1) if self.positions is None else y
