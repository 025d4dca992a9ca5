"""Recipes: text to a list of passes and back, and the recipes that have names.

smooth{alpha=trust} | rotate{block=128} | w8a8
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import re
import typing
from collections.abc import Callable, Sequence
from typing import Any

from khtst_compile.contract import Pass, options_of
from khtst_compile.errors import UsageError

# name on the command line -> "module:Class"; strings, so that listing passes imports none of them
PASSES: dict[str, str] = {
    "freeze_codebook": "khtst_compile.passes.freeze_codebook:FreezeCodebook",
    "smooth": "khtst_compile.passes.smooth:Smooth",
    "rotate": "khtst_compile.passes.rotate:Rotate",
    "w8a8": "khtst_compile.passes.w8a8:W8A8",
    "kv_cache": "khtst_compile.passes.kv_cache:KvCache",
}

# name -> recipe text; the first is the default
RECIPES: dict[str, str] = {
    "w8a8-rotated": "freeze_codebook | smooth{alpha=trust} | rotate{block=128} | w8a8",
    "w8a8-fast": "freeze_codebook | smooth{alpha=trust} | rotate{block=128,points=8} | w8a8",
    "w8a8-smooth": "freeze_codebook | smooth{alpha=trust} | w8a8",
    "w8a8-smooth-half": "freeze_codebook | smooth{alpha=0.5} | w8a8",
    "w8a8-plain": "freeze_codebook | w8a8{rounding=nearest}",
    "fp32": "",
}
DEFAULT_RECIPE = "w8a8-rotated"

_UNWRITABLE = re.compile(r"[,{}|]")
_STEP = re.compile(r"^(?P<name>[a-z0-9_]+)(?:\{(?P<options>[^{}]*)\})?$")


def pass_class(name: str) -> type[Pass]:
    """The class of the pass of that name. Raises UsageError naming the nearest ones."""
    if name not in PASSES:
        near = difflib.get_close_matches(name, PASSES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UsageError(f"recipe: no pass is called {name!r}; {hint}known: {', '.join(PASSES)}")
    module, _, attribute = PASSES[name].partition(":")
    found: type[Pass] = getattr(importlib.import_module(module), attribute)
    return found


def parse(text: str) -> list[Pass]:
    """Recipe text or the name of a recipe -> passes. Raises UsageError that quotes the part it could not read."""
    text = RECIPES.get(text.strip(), text)
    steps = [part.strip() for part in text.split("|")] if text.strip() else []
    passes = _link([_parse_step(part) for part in steps])
    for step in passes:
        try:
            step.check_options()
        except UsageError as error:
            raise UsageError(f"recipe: pass {step.name!r}: {error}") from error
    return passes


def keep(step: Pass, globs: Sequence[str]) -> Pass:
    """`step` with sites to leave in float32 besides its own. Raises UsageError for a glob that recipe text cannot hold."""
    for glob in globs:
        if _UNWRITABLE.search(glob) or glob.strip().lower() in ("", "none"):
            raise UsageError(f"keep-fp32 {glob!r} cannot be written in a recipe; write ? for each of , {{ }} |")
    if not globs or not hasattr(step, "keep_fp32"):
        return step
    return dataclasses.replace(step, keep_fp32=";".join(filter(None, (step.keep_fp32, *globs))))  # type: ignore[type-var]


def with_options(passes: Sequence[Pass], name: str, **options: bool) -> list[Pass]:
    """`passes` with options that are True set on the step of that name. Raises UsageError where there is none."""
    given = {k: True for k, v in options.items() if v}
    if given and not any(step.name == name for step in passes):
        asked = ", ".join("--" + k.replace("_", "-") for k in given)
        raise UsageError(f"{asked}: the recipe has no step {name!r}; add it at the front, or leave the option out")
    return [dataclasses.replace(step, **given) if step.name == name and given else step for step in passes]  # type: ignore[type-var]


def render(passes: list[Pass]) -> str:
    """The text that parses back to these passes; options at their defaults are left out."""
    parts = []
    for step in passes:
        defaults = {f.name: f.default for f in dataclasses.fields(step)}  # type: ignore[arg-type]
        given = {k: v for k, v in options_of(step).items() if v != defaults[k]}
        inside = ",".join(f"{k}={_text(v)}" for k, v in given.items())
        parts.append(step.name + (f"{{{inside}}}" if inside else ""))
    return " | ".join(parts)


def _parse_step(part: str) -> Pass:
    match = _STEP.match(part)
    if match is None:
        raise UsageError(
            f"recipe: cannot read {part!r}; write name or name{{option=value,...}}, steps separated by |; a value holds none of , {{ }} |"
        )
    cls = pass_class(match["name"])
    kinds = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    options: dict[str, Any] = {}
    for item in filter(None, (i.strip() for i in (match["options"] or "").split(","))):
        key, equals, value = (s.strip() for s in item.partition("="))
        if not equals:
            raise UsageError(
                f"recipe: {part!r}: {item!r} is no option=value; globs of one option are separated by ;, not by a comma"
            )
        if key not in names:
            raise UsageError(f"recipe: pass {match['name']!r} has no option {key!r}; its options: {', '.join(names) or 'none'}")
        if key in options:
            raise UsageError(f"recipe: {part!r} gives {key!r} twice; give it once")
        options[key] = _convert(f"{match['name']}{{{key}}}", value, kinds[key])
    return cls(**options)


_READERS: dict[Any, Callable[[str], Any]] = {int: int, float: float, str: str}


def _convert(where: str, value: str, kind: Any) -> Any:
    kinds = typing.get_args(kind) or (kind,)
    if bool in kinds and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if type(None) in kinds and value.lower() == "none":
        return None
    for reader in (int, float, str):
        if reader in kinds:
            try:
                return _READERS[reader](value)
            except ValueError:
                continue
    wanted = " or ".join(k.__name__ for k in kinds)
    raise UsageError(f"recipe: {where} is {value!r}; needed: {wanted}")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _link(passes: list[Pass]) -> list[Pass]:
    """Tell each pass what it has to know of those that follow.

    `smooth` learns the rotation, because alpha has to be chosen on the error that remains after rotating; `smooth` and `rotate` learn
    which layers `w8a8` will keep in float32, because a multiply or a rotation in front of those would stay at run time.
    """
    linked: list[Pass] = []
    for at, step in enumerate(passes):
        follower = {p.name: options_of(p) for p in reversed(passes[at + 1 :])}
        given: dict[str, Any] = {}
        if step.name == "smooth" and "rotate" in follower and getattr(step, "block", None) is None:
            given = {option: follower["rotate"][option] for option in ("block", "points")}
        if step.name in ("smooth", "rotate") and "w8a8" in follower and getattr(step, "keep_fp32", None) is None:
            given["keep_fp32"] = follower["w8a8"]["keep_fp32"]
        linked.append(dataclasses.replace(step, **given) if given else step)  # type: ignore[type-var]
    return linked
