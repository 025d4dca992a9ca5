"""What JSON must look like, written as an example of itself, and the first place where a value does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NUMBER, COUNT, ANY = "a number", "a whole number of at least 0", "anything"
_WORDS = {str: "text", int: "a whole number", bool: "true or false", dict: "an object", list: "a list", type(None): "null"}


@dataclass(frozen=True)
class Each:
    """An object whose keys may be any and whose values are all alike."""

    value: Any


@dataclass(frozen=True)
class Either:
    """One of several patterns; the complaint is about the last."""

    patterns: tuple[Any, ...]


def complaint(value: Any, pattern: Any, where: str) -> str | None:
    """None where `value` is as `pattern` says, else one sentence that names the place.

    pattern: str, int, bool, dict, list or type(None); NUMBER, COUNT or ANY; [pattern] for a list of these; {name: pattern} for an
    object with at least these; Each; Either.
    """
    if isinstance(pattern, Either):
        found = [complaint(value, p, where) for p in pattern.patterns]
        return None if None in found else found[-1]
    if isinstance(pattern, list):
        return _first(enumerate(value), pattern[0], where, "[{}]") if isinstance(value, list) else _no(value, list, where)
    if isinstance(pattern, (dict, Each)):
        if not isinstance(value, dict):
            return _no(value, dict, where)
        if isinstance(pattern, Each):
            return _first(value.items(), pattern.value, where, ".{}")
        missing = [name for name in pattern if name not in value]
        if missing:
            return f"{where} lacks {', '.join(map(repr, missing))}"
        return next((c for name, p in pattern.items() if (c := complaint(value[name], p, f"{where}.{name}"))), None)
    return None if _is(value, pattern) else _no(value, pattern, where)


def _is(value: Any, pattern: Any) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if pattern == COUNT:
        return whole and value >= 0
    if pattern == NUMBER:
        return whole or isinstance(value, float)
    if pattern is int:
        return whole
    return pattern == ANY or (isinstance(pattern, type) and isinstance(value, pattern))


def _first(entries: Any, pattern: Any, where: str, form: str) -> str | None:
    return next((c for key, entry in entries if (c := complaint(entry, pattern, where + form.format(key)))), None)


def _no(value: Any, pattern: Any, where: str) -> str:
    shown = repr(value)
    return f"{where} is {shown if len(shown) <= 60 else shown[:57] + '...'}; needed: {_WORDS.get(pattern, pattern)}"
