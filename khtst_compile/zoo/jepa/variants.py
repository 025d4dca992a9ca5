"""The ten predictors of the zoo: what each trains on, how it is cut and masked, and what of it is compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from khtst_compile.zoo.jepa import masks, samples
from khtst_compile.zoo.jepa.compiled import Conditioned, Embedding, Prediction
from khtst_compile.zoo.jepa.core import Encoder, Jepa, Learner, Predictor
from khtst_compile.zoo.jepa.pairs import Bidirectional, CrossModal, Edited
from khtst_compile.zoo.jepa.patches import Patches, pieces
from khtst_compile.zoo.streams import fresh

D = 32  # features of an embedding


@dataclass(frozen=True)
class Variant:
    """load: the inputs, samples first, whole; cut: what makes patches of each of them; born: a model, from torch's own generator; draw: a
    mask of about that fraction, None for those that take none; compiled: name -> what of a model is compiled and which inputs it reads."""

    load: Callable[[], tuple[Tensor, ...]]
    cut: tuple[nn.Module, ...]
    born: Callable[[], Learner]
    draw: Callable[[float, torch.Generator], masks.Mask] | None
    compiled: Callable[[Learner], dict[str, tuple[nn.Module, tuple[int, ...]]]]

    def build(self, seed: int) -> Learner:
        """A new model, the same for a seed; torch's own generator is left as it was."""
        with fresh(seed, "jepa/birth"):
            return self.born()

    def patches(self) -> tuple[Tensor, ...]:
        """What the model trains on: `load`'s tensors, cut."""
        return tuple(c(x) for c, x in zip(self.cut, self.load(), strict=True))


def masked(
    load: Callable[[], tuple[Tensor, ...]], cut: Patches, block: masks.Block, *, condition: int = 0, count: int = 2, d: int = D
) -> Variant:
    """Blocks of patches from the other patches; `condition`: the features of a second input, which the predictor alone sees."""

    def born() -> Jepa:
        return Jepa(Encoder(cut.width, d), Predictor(d, d, d, condition), cut.count, d)

    def compiled(model: Learner) -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
        assert isinstance(model, Jepa)
        found: dict[str, tuple[nn.Module, tuple[int, ...]]] = {"encoder": (Embedding(cut, model.encoder), (0,))}
        if condition:
            found["predictor"] = (Conditioned(cut, model.encoder, model.predictor, model.positions), (0, 1))
        return found

    def draw(fraction: float, generator: torch.Generator) -> masks.Mask:
        return masks.draw_mask(block, cut.grid, fraction, generator, count)

    return Variant(load, (cut, *([nn.Identity()] if condition else [])), born, draw, compiled)


def grouped() -> Variant:
    """Points, which `samples` has put into 16 groups of 51 numbers: the search for neighbors stays outside what is compiled."""
    count, width = 16, 51

    def draw(fraction: float, generator: torch.Generator) -> masks.Mask:
        return masks.draw_mask(masks.intervals, (count,), fraction, generator)

    def compiled(model: Learner) -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
        assert isinstance(model, Jepa)
        return {"encoder": (Embedding(nn.Identity(), model.encoder), (0,))}

    return Variant(samples.land, (nn.Identity(),), lambda: Jepa(Encoder(width, D), Predictor(D, D, D), count, D), draw, compiled)


def crossed() -> Variant:
    """Luma and chroma of photographs, whose embeddings differ in width."""
    light, color = Patches((16, 16), (8, 8)), Patches((16, 16), (8, 8), channels=2)
    wide, narrow = 32, 24

    def compiled(model: Learner) -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
        assert isinstance(model, CrossModal)
        return {
            "first": (Embedding(light, model.first), (0,)),
            "second": (Embedding(color, model.second), (1,)),
            "predictor": (Prediction(light, model.first, model.there), (0,)),
        }

    return Variant(
        samples.light_and_color,
        (light, color),
        lambda: CrossModal(
            Encoder(light.width, wide), Encoder(color.width, narrow), Predictor(wide, 0, narrow), Predictor(narrow, 0, wide)
        ),
        None,
        compiled,
    )


def edited() -> Variant:
    """Digits, moved and made lighter or darker."""
    cut = Patches((8, 8), (4, 4))

    def compiled(model: Learner) -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
        assert isinstance(model, Edited)
        return {
            "encoder": (Embedding(cut, model.encoder), (0,)),
            "predictor": (Conditioned(cut, model.encoder, model.predictor, None), (0, 2)),
        }

    return Variant(
        samples.edits, (cut, cut, nn.Identity()), lambda: Edited(Encoder(cut.width, D), Predictor(D, 0, D, 3)), None, compiled
    )


def bidirectional() -> Variant:
    """An electrocardiogram's past and future."""
    cut = pieces(1, 64, 16)

    def compiled(model: Learner) -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
        assert isinstance(model, Bidirectional)
        return {
            "encoder": (Embedding(cut, model.encoder), (0,)),
            "ahead": (Prediction(cut, model.encoder, model.ahead), (0,)),
            "back": (Prediction(cut, model.encoder, model.back), (1,)),
        }

    return Variant(
        samples.past_and_future,
        (cut, cut),
        lambda: Bidirectional(Encoder(cut.width, D), Predictor(D, 0, D), Predictor(D, 0, D)),
        None,
        compiled,
    )


VARIANTS: dict[str, Callable[[], Variant]] = {
    "image": lambda: masked(samples.digit_images, Patches((8, 8), (3, 3)), masks.blocks),
    "photograph": lambda: masked(samples.photograph_images, Patches((32, 32), (8, 8), channels=3), masks.blocks, d=64),
    "video": lambda: masked(samples.head_clips, Patches((8, 8, 8), (2, 4, 4)), masks.tubes),
    "action": lambda: masked(samples.pans, Patches((4, 16, 16), (2, 4, 4)), masks.tubes, condition=2),
    "audio": lambda: masked(samples.spectrograms, Patches((32, 16), (8, 4)), masks.bands),
    "point": grouped,
    "volume": lambda: masked(samples.head_volumes, Patches((12, 12, 12), (5, 5, 5)), masks.blocks),
    "brain": lambda: masked(samples.channel_windows, pieces(4, 64, 16), masks.channels),
    "series": lambda: masked(samples.heart_windows, pieces(1, 128, 16), masks.intervals),
    "crossed": crossed,
    "edited": edited,
    "bidirectional": bidirectional,
}
