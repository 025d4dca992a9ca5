"""Predictors without a mask: of another modality, of an edited input, and of past and future from each other."""

from __future__ import annotations

from torch import Tensor, nn

from khtst_compile.zoo.jepa.core import Encoder, Follower, Learner, Predictor
from khtst_compile.zoo.jepa.losses import Losses, collapse, combine, squared


class CrossModal(Learner):
    """MC-JEPA: two modalities, whose encoders may differ in width. Each predicts what the *other's own* target encoder makes of the other.

    L = ||P_ab(z_a) - sg(t_b(b))||^2/d_b + ||P_ba(z_b) - sg(t_a(a))||^2/d_a + weight (V(z_a) + V(z_b)); z, t: means over patches.
    """

    def __init__(
        self, first: Encoder, second: Encoder, there: Predictor, back: Predictor, *, weight: float = 1.0, gamma: float = 1.0
    ) -> None:
        """there: predicts the second modality's embedding from the first's; back: the first's from the second's."""
        super().__init__()
        self.first, self.second, self.there, self.back = first, second, there, back
        self.first_target, self.second_target = Follower(first), Follower(second)
        self.weight, self.gamma = weight, gamma

    def wanted(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """What `there` and what `back` should predict: (B, d_b) and (B, d_a)."""
        return self.second_target(b).mean(1), self.first_target(a).mean(1)

    def forward(self, a: Tensor, b: Tensor) -> Losses:
        """a: (B, N_a, patch_a), b: (B, N_b, patch_b): patches of one scene in two modalities."""
        (z_a, aux_a), (z_b, aux_b) = self.first.encode(a), self.second.encode(b)
        there, aux_there = self.there.answer(z_a.mean(1), None)
        back, aux_back = self.back.answer(z_b.mean(1), None)
        want_there, want_back = self.wanted(a, b)
        predictive = squared(there.squeeze(1), want_there) + squared(back.squeeze(1), want_back)
        variance = collapse(z_a, self.gamma) + collapse(z_b, self.gamma)
        return combine(predictive, variance, aux_a + aux_b + aux_there + aux_back, self.weight)

    def followed(self) -> tuple[tuple[Follower, nn.Module], ...]:
        return (self.first_target, self.first), (self.second_target, self.second)


class Edited(Learner):
    """LeJEPA: the embedding of an edited input, predicted from the input and the vector that says what the edit was.

    L = ||P(z(x), edit) - sg(t(x'))||^2/d + weight V(z(x)).
    """

    def __init__(self, encoder: Encoder, predictor: Predictor, *, weight: float = 1.0, gamma: float = 1.0) -> None:
        super().__init__()
        self.encoder, self.predictor, self.target = encoder, predictor, Follower(encoder)
        self.weight, self.gamma = weight, gamma

    def forward(self, x: Tensor, edited: Tensor, edit: Tensor) -> Losses:
        """x, edited: (B, N, d_patch), before and after; edit: (B, d_condition)."""
        z, aux_encoder = self.encoder.encode(x)
        prediction, aux_predictor = self.predictor.answer(z.mean(1), None, edit)
        predictive = squared(prediction.squeeze(1), self.target(edited).mean(1))
        return combine(predictive, collapse(z, self.gamma), aux_encoder + aux_predictor, self.weight)

    def followed(self) -> tuple[tuple[Follower, nn.Module], ...]:
        return ((self.target, self.encoder),)


class Bidirectional(Learner):
    """BJEPA: the future predicted from the past and the past from the future, and there and back again is where it began.

    L = ||F(z_p) - sg(t_f)||^2/d + ||G(z_f) - sg(t_p)||^2/d + cycle (||G(F(z_p)) - sg(z_p)||^2 + ||F(G(z_f)) - sg(z_f)||^2)/d
        + weight V(z of both). The cycles' ends are targets: without the stop they would pull embeddings towards a constant.
    """

    def __init__(
        self, encoder: Encoder, ahead: Predictor, back: Predictor, *, cycle: float = 0.5, weight: float = 1.0, gamma: float = 1.0
    ) -> None:
        super().__init__()
        self.encoder, self.ahead, self.back, self.target = encoder, ahead, back, Follower(encoder)
        self.cycle, self.weight, self.gamma = cycle, weight, gamma

    def forward(self, past: Tensor, future: Tensor) -> Losses:
        """past, future: (B, N, d_patch)."""
        (tokens_p, aux_p), (tokens_f, aux_f) = self.encoder.encode(past), self.encoder.encode(future)
        z_p, z_f = tokens_p.mean(1), tokens_f.mean(1)
        ahead, aux_ahead = self.ahead.answer(z_p, None)
        back, aux_back = self.back.answer(z_f, None)
        predictive = squared(ahead.squeeze(1), self.target(future).mean(1)) + squared(back.squeeze(1), self.target(past).mean(1))
        around = squared(self.back(ahead.squeeze(1), None).squeeze(1), z_p) + squared(
            self.ahead(back.squeeze(1), None).squeeze(1), z_f
        )
        variance = (collapse(tokens_p, self.gamma) + collapse(tokens_f, self.gamma)) / 2
        losses = combine(predictive, variance, aux_p + aux_f + aux_ahead + aux_back, self.weight)
        return losses._replace(total=losses.total + self.cycle * around)

    def followed(self) -> tuple[tuple[Follower, nn.Module], ...]:
        return ((self.target, self.encoder),)
