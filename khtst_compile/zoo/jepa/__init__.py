"""Joint-embedding predictors: the embedding of what is hidden, predicted from what is seen (LeCun, 2022).

`core`: encoder, predictor, target that follows; `losses`; `masks`, `patches`, `points`: what is hidden of what; `training`, `bandit`;
`pairs`: predictors without a mask; `variants`: all ten; `compiled`: what of them is compiled.
"""

from khtst_compile.zoo.jepa.bandit import Bandit
from khtst_compile.zoo.jepa.core import Encoder, Follower, Jepa, Learner, Predictor
from khtst_compile.zoo.jepa.losses import Losses, collapse
from khtst_compile.zoo.jepa.masks import Mask, draw_mask
from khtst_compile.zoo.jepa.pairs import Bidirectional, CrossModal, Edited
from khtst_compile.zoo.jepa.patches import Patches, pieces
from khtst_compile.zoo.jepa.probe import digits_probe, linear_probe
from khtst_compile.zoo.jepa.training import Epoch, Settings, train
from khtst_compile.zoo.jepa.variants import VARIANTS, Variant

__all__ = [
    "VARIANTS",
    "Bandit",
    "Bidirectional",
    "CrossModal",
    "Edited",
    "Encoder",
    "Epoch",
    "Follower",
    "Jepa",
    "Learner",
    "Losses",
    "Mask",
    "Patches",
    "Predictor",
    "Settings",
    "Variant",
    "collapse",
    "digits_probe",
    "draw_mask",
    "linear_probe",
    "pieces",
    "train",
]
