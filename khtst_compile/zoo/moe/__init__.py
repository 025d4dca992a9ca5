"""Mixtures of experts: one whose tokens go where they are most probable, and one whose experts change roles."""

from khtst_compile.zoo.moe.experts import Experts, Output, Routed, fair_capacity
from khtst_compile.zoo.moe.prototypes import Refinement, Refiner, k_means, nearest, refine
from khtst_compile.zoo.moe.redirectable import RedirectableMoe
from khtst_compile.zoo.moe.roles import DECODER, ENCODER, Roles
from khtst_compile.zoo.moe.routing import Routing, balance, route
from khtst_compile.zoo.moe.sonic import SonicMoe

__all__ = [
    "DECODER",
    "ENCODER",
    "Experts",
    "Output",
    "RedirectableMoe",
    "Refinement",
    "Refiner",
    "Roles",
    "Routed",
    "Routing",
    "SonicMoe",
    "balance",
    "fair_capacity",
    "k_means",
    "nearest",
    "refine",
    "route",
]
