"""Encoder, predictor and the target that follows the encoder, for whatever was cut into patches.

After I-JEPA (Assran et al., 2023): the embedding of a masked block is predicted from what is visible, and where the block is.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from khtst_compile.errors import UsageError
from khtst_compile.zoo.jepa.losses import Losses, collapse, combine, squared
from khtst_compile.zoo.jepa.masks import Mask
from khtst_compile.zoo.layers import Mlp


def through(layer: nn.Module | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """x: (..., d) -> (what `layer` makes of it, its auxiliary loss () or 0). None passes x on.

    A layer returns a tensor, or a named tuple with `output` (and `auxiliary`) or, a quantizer's, with `values`.
    """
    nothing = x.new_zeros(())
    made = x if layer is None else layer(x)
    if isinstance(made, Tensor):
        return made, nothing
    output: Tensor = made.output if hasattr(made, "output") else made.values
    auxiliary: Tensor = getattr(made, "auxiliary", nothing)
    return output, auxiliary


class Encoder(nn.Module):
    """Patches (B, N, d_patch) -> embeddings (B, N, d): d_patch -> 2 d_patch -> d with SiLU, then `body`, any module of (B, N, d)."""

    def __init__(self, d_patch: int, d: int, body: nn.Module | None = None, *, hidden: int | None = None) -> None:
        super().__init__()
        self.embed = Mlp(d_patch, d, hidden)
        self.body = body

    def encode(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """-> (embeddings (B, N, d), auxiliary loss ())."""
        return through(self.body, self.embed(patches))

    def forward(self, patches: Tensor) -> Tensor:
        return self.encode(patches)[0]


class Predictor(nn.Module):
    """Predicts embeddings of `d_out` from a context of `d`, a question and a condition: all concatenated, through one MLP, then `body`."""

    def __init__(
        self,
        d: int,
        d_question: int,
        d_out: int,
        d_condition: int = 0,
        body: nn.Module | None = None,
        *,
        hidden: int | None = None,
    ) -> None:
        super().__init__()
        self.predict = Mlp(d + d_question + d_condition, d_out, hidden)
        self.body = body

    def answer(self, context: Tensor, questions: Tensor | None, condition: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """context: (B, d); questions: (K, d_question) one for all samples, or None for K = 1 without any; condition: (B, d_condition)
        -> (predictions (B, K, d_out), auxiliary loss ())."""
        batch, count = context.shape[0], 1 if questions is None else questions.shape[0]
        parts = [context.unsqueeze(1).expand(-1, count, -1)]
        if questions is not None:
            parts.append(questions.unsqueeze(0).expand(batch, -1, -1))
        if condition is not None:
            parts.append(condition.unsqueeze(1).expand(-1, count, -1))
        return through(self.body, self.predict(torch.cat(parts, -1)))

    def forward(self, context: Tensor, questions: Tensor | None, condition: Tensor | None = None) -> Tensor:
        return self.answer(context, questions, condition)[0]


class Follower(nn.Module):
    """A copy of a module, equal at birth, which follows it: target <- target + (1 - m)(module - target). It gets no gradient."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.copy = copy.deepcopy(module).requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Follower:
        """Always in eval mode: what follows neither draws noise nor counts."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, *inputs: Tensor) -> Tensor:
        made: Tensor = self.copy(*inputs)
        return made

    @torch.no_grad()
    def follow(self, module: nn.Module, momentum: float) -> None:
        """One step towards `module`; buffers (counts, scales) and further state (roles) are taken over. Raises UsageError unless
        0 <= momentum <= 1."""
        if not 0 <= momentum <= 1:
            raise UsageError(f"momentum is {momentum}; needed: 0 (equal at once) to 1 (never moves)")
        for mine, other in zip(self.copy.parameters(), module.parameters(), strict=True):
            mine.lerp_(other, 1 - momentum)
        for held, new in zip(self.copy.buffers(), module.buffers(), strict=True):
            held.copy_(new)
        for part, its in zip(self.copy.modules(), module.modules(), strict=True):
            if type(its).get_extra_state is not nn.Module.get_extra_state:
                part.set_extra_state(its.get_extra_state())


class Learner(nn.Module):
    """What `train` trains: forward(*inputs), with a mask where there is one, gives Losses, and targets follow after every step."""

    def followed(self) -> tuple[tuple[Follower, nn.Module], ...]:
        """Each target encoder and the encoder it follows."""
        raise NotImplementedError

    def follow(self, momentum: float) -> None:
        """After every step: each target encoder moves towards its encoder."""
        for target, encoder in self.followed():
            target.follow(encoder, momentum)


class Jepa(Learner):
    """L = mean_b ||P(z_ctx, pos_b, condition) - sg(target_b)||^2/d + weight V(z) + auxiliary losses.

    z_ctx: the mean embedding of the visible patches, each through `bottleneck` (a quantizer, say) where there is one; target_b: the mean
    target embedding of block b's patches; pos_b: the mean row of block b in a learned table (N, d_position); V over all visible patches.
    """

    def __init__(
        self,
        encoder: Encoder,
        predictor: Predictor,
        patches: int,
        d_position: int,
        *,
        bottleneck: nn.Module | None = None,
        weight: float = 1.0,
        gamma: float = 1.0,
    ) -> None:
        super().__init__()
        self.encoder, self.predictor, self.bottleneck = encoder, predictor, bottleneck
        self.target = Follower(encoder)
        self.positions = nn.Parameter(torch.randn(patches, d_position))
        self.weight, self.gamma = weight, gamma

    def forward(self, patches: Tensor, condition: Tensor | None = None, *, mask: Mask) -> Losses:
        """patches: (B, N, d_patch); condition: (B, d_condition); mask: which patches are seen and which blocks are asked for."""
        z, aux_encoder = self.encoder.encode(patches[:, mask.context])
        seen, aux_bottleneck = through(self.bottleneck, z)
        questions = torch.stack([self.positions[block].mean(0) for block in mask.targets])
        predictions, aux_predictor = self.predictor.answer(seen.mean(1), questions, condition)
        embedded = self.target(patches)
        wanted = torch.stack([embedded[:, block].mean(1) for block in mask.targets], 1)
        predictive, variance = squared(predictions, wanted), collapse(z, self.gamma)
        return combine(predictive, variance, aux_encoder + aux_bottleneck + aux_predictor, self.weight)

    def followed(self) -> tuple[tuple[Follower, nn.Module], ...]:
        return ((self.target, self.encoder),)
