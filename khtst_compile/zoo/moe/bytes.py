"""The next byte of a text from those before it: a small model whose middle is any layer, to compare mixtures with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from khtst_compile.zoo.moe.experts import Routed
from khtst_compile.zoo.streams import stream

BYTES = 256


class ByteModel(nn.Module):
    """ids: (n, context) int64, 0 to 255 -> logits of the byte that follows: (n, 256). Each of the n texts is one token of `layers`.

    layers: of (n, d) -> (n, d) or Routed; each reads what came before through a LayerNorm and is added to it.
    """

    def __init__(self, d: int, layers: Sequence[nn.Module], context: int = 16, embedding: int = 16) -> None:
        super().__init__()
        self.context = context
        self.table = nn.Embedding(BYTES, embedding)
        self.enter = nn.Linear(context * embedding, d)
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in layers)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(d, BYTES)

    def routed(self, ids: Tensor) -> tuple[Tensor, tuple[Routed, ...]]:
        """The logits, and what each mixture among the layers did."""
        x = self.enter(self.table(ids).flatten(1))
        mixtures = []
        for norm, layer in zip(self.norms, self.layers, strict=True):
            found: Tensor | Routed = layer(norm(x))
            if isinstance(found, Routed):
                mixtures.append(found)
                found = found.output
            x = x + found
        return self.head(x), tuple(mixtures)

    def forward(self, ids: Tensor) -> Tensor:
        return self.routed(ids)[0]


def windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """text: (N,) int64; starts: (n,) int64 below N - context -> the bytes from there (n, context), and the one after them (n,)."""
    places = starts.unsqueeze(-1) + torch.arange(context + 1, device=starts.device)
    found = text[places]
    return found[:, :-1], found[:, -1]


def train(model: ByteModel, text: Tensor, steps: int, *, batch: int, seed: int, balance: float = 0.01) -> list[float]:
    """AdamW on the cross-entropy, plus `balance` times the auxiliary losses. Returns the cross-entropy of each step, in bits per byte;
    batches come from the stream "batches"."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    draws, losses = stream(seed, "batches", text.device), []
    model.train()
    for _ in range(steps):
        starts = torch.randint(len(text) - model.context, (batch,), generator=draws, device=text.device)
        ids, wanted = windows(text, starts, model.context)
        logits, mixtures = model.routed(ids)
        loss = functional.cross_entropy(logits, wanted)
        total = loss + balance * sum((m.auxiliary for m in mixtures), torch.zeros((), device=text.device))
        optimizer.zero_grad()
        torch.autograd.backward(total)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()) / 0.6931471805599453)  # ln 2: nats to bits
    model.eval()
    return losses
