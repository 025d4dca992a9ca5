"""What was measured by benchmarks/arm.py -> Markdown. Pure functions."""

from __future__ import annotations

from typing import Any

OURS, OURS_FP32 = "khtst int8", "khtst fp32"
ORT, ORT_FP32, XNNPACK = "onnxruntime dynamic int8", "onnxruntime fp32", "xnnpack int8"
ENGINES = (OURS, ORT, XNNPACK, OURS_FP32, ORT_FP32)
PEER = {OURS: (ORT, XNNPACK), OURS_FP32: (ORT_FP32,)}
ASKED, JUDGED = 0.75, ("cortex-a72", "neoverse-n1")
"""Instructions of MiniLM over those of onnxruntime's dynamic int8, and the processors that holds for."""
Rows = list[dict[str, Any]]


def ratio(rows: Rows, task: str, cpu: str, mine: str, other: str) -> float | None:
    """Instructions of `mine` over those of `other`; None where either is missing."""
    found = {r["engine"]: r["instructions"] for r in rows if (r["task"], r["cpu"]) == (task, cpu) and "instructions" in r}
    return found[mine] / found[other] if mine in found and other in found else None


def render(result: dict[str, Any]) -> str:
    """All of it."""
    rows: Rows = result["rows"]
    lines = [
        "# ARM builds, counted and modeled",
        "",
        f"Instructions of one call under qemu, one thread; peers: {', '.join(result['packages'])}. Loops: llvm-mca-19. "
        "Instructions are not time: docs/benchmarks.md says what these figures mean.",
    ]
    judged = [(cpu, ratio(rows, "minilm", cpu, OURS, ORT)) for cpu in JUDGED]
    if any(found is not None for _, found in judged):
        lines += ["", "| what | asked | measured | met |", "|---|---|---|---|"]
    for cpu, found in judged:
        if found is not None:
            met = "yes" if found <= ASKED else "**no**"
            lines.append(f"| MiniLM {result['shape']} on {cpu}: instructions over {ORT}'s | ≤ {ASKED} | {found:.3f} | {met} |")
    tasks, cpus = dict.fromkeys(r["task"] for r in rows), dict.fromkeys(r["cpu"] for r in rows)
    for task in tasks:
        lines += _instructions([r for r in rows if r["task"] == task], task, list(cpus))
    lines += _loops(rows)
    return "\n".join(lines) + "\n"


def _instructions(rows: Rows, task: str, cpus: list[str]) -> list[str]:
    """A row for each engine, a column for each processor: millions of instructions, and in brackets ours over the engine's."""
    title = "MiniLM" if task == "minilm" else f"Linear layer {task.removeprefix('linear_')} (rows, input and output features)"
    lines = ["", f"## {title}: millions of instructions, and in brackets ours over the engine's", ""]
    lines += [f"| engine | {' | '.join(cpus)} | error, dB |", "|---" * (len(cpus) + 2) + "|"]
    for engine in (e for e in ENGINES if any(r["engine"] == e for r in rows)):
        own = {r["cpu"]: r for r in rows if r["engine"] == engine}
        mine = next((m for m, peers in PEER.items() if engine in peers), None)
        cells = [_cell(own.get(cpu, {}), ratio(rows, task, cpu, mine, engine) if mine else None) for cpu in cpus]
        errors = [r["error_db"] for r in own.values() if "error_db" in r]
        lines.append(f"| {engine} | {' | '.join(cells)} | {f'{max(errors):.1f}' if errors else ''} |")
    failed = dict.fromkeys(f"{r['engine']} on {r['cpu']}: {r['failed']}" for r in rows if "failed" in r)
    return lines + (["", *(f"- {line}" for line in failed)] if failed else [])


def _cell(row: dict[str, Any], over: float | None) -> str:
    if "instructions" not in row:
        return "-"
    return f"{row['instructions'] / 1e6:.2f}" + ("" if over is None else f" ({over:.2f})")


def _loops(rows: Rows) -> list[str]:
    """The hottest loop of each kernel of ours, once for each variant."""
    lines = [
        "",
        "## Innermost loops",
        "",
        "The loop in which a kernel executes most instructions. Share: of the kernel's instructions. Bound: cycles that the busiest unit "
        "alone takes over cycles of the loop, by LLVM's model.",
        "",
        "| variant | kernel | millions | loop | share | MAC | spills | by model: cycles a turn, MAC a cycle, share of the bound |",
        "|---|---|---|---|---|---|---|---|",
    ]
    seen = set[tuple[str, str]]()
    for row in rows:
        for kernel in row.get("kernels", []):
            # The body of a parallel loop is a function without a name, so it counts as the last of TVM's helpers before it.
            unnamed = kernel["name"].startswith("__tvm_set_raised")
            name = f"{row['task']}: parallel loop" if unnamed else kernel["name"]
            key = (row["variant"], name)
            if key in seen or "loop" not in kernel:
                continue
            seen.add(key)
            loop = kernel["loop"]
            models = "; ".join(
                f"{cpu} {m['cycles']:.1f}"
                + (f", {loop['macs'] / m['cycles']:.1f}" if loop["macs"] else "")
                + f", {m['share']:.0%}"
                for cpu, m in loop["models"].items()
            )
            cells = [
                row["variant"],
                name,
                f"{kernel['instructions'] / 1e6:.2f}",
                loop["instructions"],
                f"{loop['share']:.0%}",
            ]
            lines.append(f"| {' | '.join(map(str, [*cells, loop['macs'], loop['spills'], models]))} |")
    return lines
