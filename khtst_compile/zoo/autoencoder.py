"""An autoencoder whose middle is a code: what the codebook quantizer is trained in."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from khtst_compile.zoo.frozen import FrozenQuantizer, FrozenResidual
from khtst_compile.zoo.gsq import ResidualQuantizer, StiefelQuantizer
from khtst_compile.zoo.layers import Mlp
from khtst_compile.zoo.streams import fresh, stream


class Reconstruction(NamedTuple):
    """output: (..., features) float; ids: (...) int64, or (..., levels)."""

    output: Tensor
    ids: Tensor


class CodeAutoencoder(nn.Module):
    """x (..., features) -> an MLP to d -> the quantizer -> an MLP back: Reconstruction((..., features), ids)."""

    def __init__(
        self,
        features: int,
        d: int,
        quantizer: StiefelQuantizer | ResidualQuantizer | FrozenQuantizer | FrozenResidual,
        *,
        seed: int,
    ) -> None:
        super().__init__()
        with fresh(seed, "autoencoder/init"):
            self.encoder = Mlp(features, d)
            self.decoder = Mlp(d, features, 2 * features)
        self.quantizer = quantizer

    def forward(self, x: Tensor) -> Reconstruction:
        values, ids = self.quantizer(self.encoder(x))
        return Reconstruction(self.decoder(values), ids)

    def loss(self, x: Tensor, commitment: float = 0.25) -> tuple[Tensor, Tensor]:
        """x (n, features) -> mean squared errors, () each: of the reconstruction, and that plus `commitment` times the encoder's distance
        from the codes (van den Oord et al. 2017), which is what is minimized."""
        z = self.encoder(x)
        values = self.quantizer(z).values
        error = functional.mse_loss(self.decoder(values), x)
        return error, error + commitment * functional.mse_loss(z, values.detach())

    def freeze(self) -> CodeAutoencoder:
        """The same in eval mode with the quantizer frozen; weights of encoder and decoder are shared."""
        assert isinstance(self.quantizer, (StiefelQuantizer, ResidualQuantizer))
        made = CodeAutoencoder(1, 1, self.quantizer.freeze(), seed=0)
        made.encoder, made.decoder = self.encoder, self.decoder
        return made.eval()


def fit(model: CodeAutoencoder, x: Tensor, steps: int, *, seed: int, batch: int = 256, rate: float = 2e-3) -> list[float]:
    """AdamW on batches of x (n, features), drawn by `seed`; returns the reconstruction's error of each step."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], rate, weight_decay=0.01)
    rows, errors = stream(seed, "autoencoder/batches"), []
    for _ in range(steps):
        error, total = model.loss(x[torch.randint(len(x), (batch,), generator=rows).to(x.device)])
        optimizer.zero_grad()
        total.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        errors.append(float(error.detach()))
    return errors
