"""`khtst-compile inspect --codebooks`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from khtst_compile import usage
from khtst_compile.cli.console import Console, table

HEADER = ("codebook", "kind", "scores", "codes", "features", "delta_ort", "perplexity", "used", "dead", "lost", "sha256")
PROOF = ("codebook", "vectors", "differ", "near ties", "ulp", "int8 first", "rescored", "candidates", "pruned")


def show(console: Console, path: Path, plot: Path | None) -> None:
    """Print what an artifact says of its codebooks, and draw it where asked."""
    found = usage.codebooks(path)
    if plot is not None:
        usage.plot(found["codebooks"], plot)
        console.note(f"plot: written to {plot}")
    console.emit(found, "\n".join(lines(found)))


def lines(found: dict[str, Any]) -> list[str]:
    """What codebooks there are, what is proved of them, and a histogram a level."""
    entries = found["codebooks"]
    title = f"{found['path']}: {found['kind']}, " + (f"codebooks: {len(entries)}" if entries else "no codebooks")
    if not entries:
        return [title]
    sizes, proofs = [_sizes(e) for e in entries], [_proof(e) for e in entries]
    shown = [title, "", *table(HEADER, sizes).splitlines(), "", *table(PROOF, proofs).splitlines()]
    for entry in entries:
        for level in usage.levels(entry):
            shown += ["", *_histogram(level)]
    return shown


def _sizes(entry: dict[str, Any]) -> tuple[str, ...]:
    levels, delta = usage.levels(entry), entry.get("delta_ort")
    counted = all(level.counts is not None for level in levels)
    return (
        entry["site"],
        f"{entry['kind']} ({entry['source']})",
        entry["scores"],
        _each(entry["codes"]),
        str(entry["features"]),
        "-" if not delta else " -> ".join(f"{max(delta[when]):.1e}" for when in ("before", "after")),
        _each([f"{level.perplexity:.1f}" for level in levels]),
        _each([level.used for level in levels]) if counted else "-",
        str(sum(len(level.dead) for level in levels)) if counted else "-",
        str(entry["lost"]),
        str(entry["sha256"])[:12],
    )


def _proof(entry: dict[str, Any]) -> tuple[str, ...]:
    share, left, pruned = entry.get("rescored"), entry.get("candidates"), entry.get("pruned")
    return (
        entry["site"],
        str(entry["vectors"]),
        str(entry["differ"]),
        str(entry["near_ties"]),
        f"{entry['value_ulp']:g}",
        "yes" if entry["certified"] else "no",
        "-" if share is None else f"{share:.1%}",
        "-" if left is None else f"{left:.2f}",
        "no" if pruned is None else f"to {_each([len(ids) for ids in pruned])}",
    )


def _histogram(level: usage.Level) -> list[str]:
    if level.counts is None:
        return [f"{level.label}: {level.codes} codes, too many to count one by one"]
    bars, width = usage.histogram(level.counts)
    codes = "a code" if width == 1 else f"{width} codes"
    dead = f"dead: {usage.named(level.dead)}" if level.dead else "no code is dead"
    return [f"{level.label}: ids 0 to {level.codes - 1}, {codes} a bar", f"  {bars}", f"  {dead}"]


def _each(values: Sequence[object]) -> str:
    """One value where all levels have the same, else all of them."""
    texts = [str(v) for v in values]
    same = len(texts) > 1 and len(set(texts)) == 1
    return f"{len(texts)} x {texts[0]}" if same else ", ".join(texts)
