"""What was measured by benchmarks/x86.py -> ratios, cliffs, what was asked and whether it is met, and Markdown. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.x86_peers import DECODER, LLAMA, OURS, OURS_AVX2, OURS_FP32, REFERENCE, RIVAL

Rows = list[dict[str, Any]]
CLIFF = 1.15
"""A time per token this far above the trend of its neighbors is a cliff."""


def ratio(rows: Rows, mine: str, other: str, shape: str, threads: int) -> float | None:
    """Time of `mine` over that of `other`, median over rounds; None where either was not measured."""
    found = {r["engine"]: r["turns_s"] for r in rows if (r["shape"], r["threads"]) == (shape, threads) and "turns_s" in r}
    if mine not in found or other not in found:
        return None
    return float(statistics.median(a / b for a, b in zip(found[mine], found[other], strict=True)))


def fastest(rows: Rows, mine: str, shape: str, threads: int, among: Callable[[str], bool]) -> tuple[str, float] | None:
    """The engine among others that `mine` looks worst beside, and the ratio."""
    names = dict.fromkeys(r["engine"] for r in rows if among(r["engine"]))
    ratios = {n: found for n in names if (found := ratio(rows, mine, n, shape, threads)) is not None}
    return max(ratios.items(), key=lambda item: item[1]) if ratios else None


def is_peer(name: str) -> bool:
    return name not in (OURS, OURS_AVX2, OURS_FP32)


def over_trend(times: Sequence[float]) -> list[float]:
    """times: per token, at sizes that double -> each one over what its neighbors let expect (1 where they say nothing).

    Expected is the lower of two: the time before it plus what attention adds, whose time per token is linear in the length, so that the
    last step up doubles (and a step down ends); and the geometric mean of the times on both sides.
    """
    over = []
    for i, time in enumerate(times):
        trends = []
        if i >= 1:
            trends.append(times[i - 1] + 2 * max(0.0, times[i - 1] - times[i - 2] if i >= 2 else 0.0))
        if 1 <= i < len(times) - 1:
            trends.append((times[i - 1] * times[i + 1]) ** 0.5)
        over.append(time / min(trends) if trends else 1.0)
    return over


def cliffs(points: Rows) -> Rows:
    """points: engine, batch, seq, us_per_token -> those above CLIFF along one of the two axes, with the axis and how far."""
    found = []
    for engine in dict.fromkeys(p["engine"] for p in points):
        own = [p for p in points if p["engine"] == engine]
        for axis, fixed in (("batch", "seq"), ("seq", "batch")):
            for value in sorted({p[fixed] for p in own}):
                line = sorted((p for p in own if p[fixed] == value), key=lambda p: int(p[axis]))
                over = over_trend([p["us_per_token"] for p in line])
                found += [{**p, "axis": axis, "over": o} for p, o in zip(line, over, strict=True) if o > CLIFF]
    return found


@dataclass(frozen=True)
class Asked:
    """what, and what it must be at most (smaller) or at least; measured: result -> (value, note), None where not measured."""

    what: str
    bound: float
    smaller: bool
    measured: Callable[[dict[str, Any]], tuple[float, str] | None]


def _beside_peers(shape: str, threads: int) -> Callable[[dict[str, Any]], tuple[float, str] | None]:
    def measured(result: dict[str, Any]) -> tuple[float, str] | None:
        rows = result.get("latency", [])
        worst = fastest(rows, OURS, shape, threads, is_peer)
        if worst is None:
            return None
        rival = ratio(rows, OURS, RIVAL, shape, threads)
        beside = f", {RIVAL}: {rival:.2f}" if rival is not None and worst[0] != RIVAL else ""
        return worst[1], f"against {worst[0]}{beside}"

    return measured


def _float32(shape: str) -> Callable[[dict[str, Any]], tuple[float, str] | None]:
    def measured(result: dict[str, Any]) -> tuple[float, str] | None:
        worst = fastest(result.get("fp32", []), OURS_FP32, shape, 1, is_peer)
        return None if worst is None else (worst[1], f"against {worst[0]}")

    return measured


def _avx2(result: dict[str, Any]) -> tuple[float, str] | None:
    rows = result.get("latency", [])
    mine = OURS_AVX2 if any(r["engine"] == OURS_AVX2 for r in rows) else OURS
    found = ratio(rows, mine, "onnxruntime fp32", "8x128", 1)
    return None if found is None else (found, "" if mine == OURS_AVX2 else "this CPU has no AVX512")


def _decoding(threads: int) -> Callable[[dict[str, Any]], tuple[float, str] | None]:
    def measured(result: dict[str, Any]) -> tuple[float, str] | None:
        rows = {r["engine"]: r for r in result.get("decode", []) if r["threads"] == threads and "decode_turns" in r}
        if DECODER not in rows or LLAMA not in rows:
            return None
        pairs = zip(rows[DECODER]["decode_turns"], rows[LLAMA]["decode_turns"], strict=True)
        rates = [rows[n]["decode_tokens_per_s"] for n in (DECODER, LLAMA)]
        return statistics.median(a / b for a, b in pairs), f"{rates[0]:.0f} and {rates[1]:.0f} tokens/s"

    return measured


def _prefill(result: dict[str, Any]) -> tuple[float, str] | None:
    rows = {r["engine"]: r for r in result.get("decode", []) if r["threads"] == 1 and "prefill_turns" in r}
    if DECODER not in rows:
        return None
    note = f"{LLAMA}: {rows[LLAMA]['prefill_tokens_per_s']:.0f}" if LLAMA in rows else ""
    return rows[DECODER]["prefill_tokens_per_s"], note


def _value(part: str, key: str) -> Callable[[dict[str, Any]], tuple[float, str] | None]:
    def measured(result: dict[str, Any]) -> tuple[float, str] | None:
        found = (result.get(part) or {}).get(key)
        return None if found is None else (float(found), "")

    return measured


def _cliffs(result: dict[str, Any]) -> tuple[float, str] | None:
    if "growth" not in result:
        return None
    mine = [c for c in result["growth"]["cliffs"] if c["engine"] == OURS]
    worst = max(mine, key=lambda c: float(c["over"]), default=None)
    return len(
        mine
    ), "" if worst is None else f"worst: {worst['over']:.2f} at ({worst['batch']}, {worst['seq']}) along {worst['axis']}"


SHAPES = ("1x16", "1x128", "8x128", "32x128")
ASKED = (
    *(
        Asked(f"MiniLM int8, {n} thread(s), {s}: time over the fastest peer's", bound, True, _beside_peers(s, n))
        for n, bounds in ((1, (0.55, 0.75, 0.80, 0.82)), (2, (0.50, 0.65, 0.76, 0.78)))
        for s, bound in zip(SHAPES, bounds, strict=True)
    ),
    Asked("share of int8 peak at 8x128, linear layers alone", 0.70, False, _value("peak", "share")),
    *(Asked(f"MiniLM float32, {s}: time over the better of the peers'", 0.95, True, _float32(s)) for s in ("1x128", "8x128")),
    Asked("MiniLM int8 on AVX2, 8x128: time over onnxruntime fp32's", 0.65, True, _avx2),
    Asked("SmolLM2-135M, prefill of 124 tokens, 1 thread, tokens/s", 900, False, _prefill),
    *(Asked(f"SmolLM2-135M, decode, {n} thread(s): tokens/s over llama.cpp's", 1.35, False, _decoding(n)) for n in (1, 2)),
    Asked("SmolLM2-135M, perplexity over its float32's, off 1 by", 0.005, True, _value("perplexity", "off")),
    Asked("two threads against one at 8x128", 1.85, False, _value("scaling", "speedup")),
    Asked("lower of MiniLM for all x86, s", 30, True, _value("build", "lower_s")),
    Asked("artifact over its stored weights", 1.3, True, _value("build", "over_weights")),
    Asked("cliffs in time per token, batch 1 to 32, sequence 16 to 512", 0, True, _cliffs),
)


def render(result: dict[str, Any]) -> str:
    """All of it as Markdown."""
    machine = result["machine"]
    lines = [
        "# MiniLM-L6 and SmolLM2-135M beside other engines on x86",
        "",
        f"{machine['cores']} cores ({', '.join(machine['cpu_flags'])}), {result['target']} runs. Ratios are medians over rounds in which "
        "engines take turns; below 1, khtst is faster. The bars were set for a Zen 4 with AVX512-VNNI.",
        "",
        "| what | asked | measured | met | |",
        "|---|---|---|---|---|",
    ]
    lines += [_asked(asked, result) for asked in ASKED]
    if "latency" in result:
        lines += _latency(result["latency"])
    if "decode" in result:
        lines += _decode(result["decode"])
    if "growth" in result:
        lines += _growth(result["growth"])
    for why in dict.fromkeys(result["not_run"].values()):
        lines += ["", f"Not run: {', '.join(n for n, w in result['not_run'].items() if w == why)} ({why})."]
    versions = {k: v for found in result["packages"].values() for k, v in found.items()}
    lines += ["", f"{', '.join(f'{k} {v}' for k, v in sorted(versions.items()))}.", ""]
    return "\n".join(lines)


def _asked(asked: Asked, result: dict[str, Any]) -> str:
    start = f"| {asked.what} | {'≤' if asked.smaller else '≥'} {asked.bound:g} |"
    found = asked.measured(result)
    if found is None:
        return f"{start} not measured | | |"
    met = found[0] <= asked.bound if asked.smaller else found[0] >= asked.bound
    return f"{start} {found[0]:.3g} | {'yes' if met else '**no**'} | {found[1]} |"


def _latency(rows: Rows) -> list[str]:
    """A table for each number of threads: milliseconds, and our time over the engine's."""
    lines = [
        "",
        f"## MiniLM: milliseconds, and in brackets the time of {OURS} over the engine's",
        "",
        f"Error: of the embedding at the largest shape, against {REFERENCE}.",
    ]
    for threads in sorted({r["threads"] for r in rows}):
        some = [r for r in rows if r["threads"] == threads]
        shapes = list(dict.fromkeys(r["shape"] for r in some))
        lines += ["", f"| {threads} thread(s) | {' | '.join(shapes)} | error, dB |", "|---" * (len(shapes) + 2) + "|"]
        for name in dict.fromkeys(r["engine"] for r in some):
            mine = {r["shape"]: r for r in some if r["engine"] == name}
            failed = next((r["failed"] for r in mine.values() if "failed" in r), None)
            cells = [_cell(mine[s], ratio(rows, OURS, name, s, threads)) for s in shapes]
            error = mine[shapes[-1]].get("error_db")
            last = failed or ("" if error is None else f"{max(error, -200):.1f}")
            lines.append(f"| {name} | {' | '.join(cells)} | {last} |")
    return lines


def _cell(row: dict[str, Any], over: float | None) -> str:
    if "failed" in row:
        return "-"
    return f"{row['median_ms']:.2f}" + ("" if over is None or row["engine"] == OURS else f" ({over:.2f})")


def _decode(rows: Rows) -> list[str]:
    lines = ["", "## SmolLM2-135M: tokens a second", "", "| engine | threads | prefill | decode |", "|---|---|---|---|"]
    for r in rows:
        found = f"{r['prefill_tokens_per_s']:.0f} | {r['decode_tokens_per_s']:.1f}" if "failed" not in r else f"{r['failed']} | -"
        lines.append(f"| {r['engine']} | {r['threads']} | {found} |")
    return lines


def _growth(found: dict[str, Any]) -> list[str]:
    """A table for each engine, batches down and lengths across, and what stands out."""
    lines = [
        "",
        "## MiniLM: microseconds a token, one thread",
        "",
        f"A cliff (‡) is more than {CLIFF - 1:.0%} above the trend of its neighbors.",
    ]
    marked = {(c["engine"], c["batch"], c["seq"]) for c in found["cliffs"]}
    for engine in dict.fromkeys(p["engine"] for p in found["points"]):
        own = {(p["batch"], p["seq"]): p["us_per_token"] for p in found["points"] if p["engine"] == engine}
        lengths = sorted({s for _, s in own})
        lines += ["", f"| {engine}: batch | {' | '.join(str(s) for s in lengths)} |", "|---" * (len(lengths) + 1) + "|"]
        for batch in sorted({b for b, _ in own}):
            cells = [
                f"{own[batch, s]:.0f}{'‡' if (engine, batch, s) in marked else ''}" if (batch, s) in own else "" for s in lengths
            ]
            lines.append(f"| {batch} | {' | '.join(cells)} |")
    return lines + [f"\n{name}: {why}." for name, why in found["failed"].items()]
