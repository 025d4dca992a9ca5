"""The ten predictors of the zoo, and Image-JEPA with other insides: data, patches, masks, and what is compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from khtst_compile.zoo.gsq import StiefelQuantizer
from khtst_compile.zoo.jepa import masks, samples
from khtst_compile.zoo.jepa.arms import ARMS
from khtst_compile.zoo.jepa.compiled import Coded, Conditioned, Embedding, Prediction
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
    load: Callable[[], tuple[Tensor, ...]],
    cut: Patches,
    block: masks.Block,
    *,
    condition: int = 0,
    d: int = D,
    body: Callable[[int], nn.Module] | None = None,
    codes: int = 0,
) -> Variant:
    """Blocks of patches from the other patches. condition: features of a second input, which the predictor alone sees; body: what stands
    behind the MLPs of encoder and predictor; codes: of a codebook between encoder and predictor."""

    def born() -> Jepa:
        encoder = Encoder(cut.width, d, body(d) if body else None)
        predictor = Predictor(d, d, d, condition, body(d) if body else None)
        return Jepa(encoder, predictor, cut.count, d, bottleneck=StiefelQuantizer(d, codes, mode="ste_ema") if codes else None)

    def compiled(model: Learner) -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
        assert isinstance(model, Jepa)
        found: dict[str, tuple[nn.Module, tuple[int, ...]]] = {"encoder": (Embedding(cut, model.encoder), (0,))}
        if isinstance(model.bottleneck, StiefelQuantizer):
            found["codes"] = (Coded(cut, model.encoder, model.bottleneck.freeze()), (0,))
        if condition:
            found["predictor"] = (Conditioned(cut, model.encoder, model.predictor, model.positions), (0, 1))
        return found

    def draw(fraction: float, generator: torch.Generator) -> masks.Mask:
        return masks.draw_mask(block, cut.grid, fraction, generator)

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


def image(body: Callable[[int], nn.Module] | None = None, codes: int = 0) -> Variant:
    """Digits of 8 x 8 in patches of 3 x 3, the last of which overhang."""
    return masked(samples.digit_images, Patches((8, 8), (3, 3)), masks.blocks, body=body, codes=codes)


VARIANTS: dict[str, Callable[[], Variant]] = {
    "image": image,
    **{f"image-{name}": partial(image, body) for name, body in ARMS.items()},
    "image-codes": partial(image, codes=32),
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
