"""`khtst-compile passes`."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import click

from khtst_compile.cli.console import Console, common
from khtst_compile.recipe import DEFAULT_RECIPE, PASSES, RECIPES


@click.command("passes")
@common
def command(console: Console) -> None:
    """List passes with their options and defaults, and the named recipes."""
    found = {name: describe(where) for name, where in PASSES.items()}
    lines: list[str] = []
    for name, entry in found.items():
        lines += [f"{name}: {entry['summary']}"]
        lines += [f"    {o['name']}: {o['type']} = {o['default']}" for o in entry["options"]]
    lines += ["", "recipes:"]
    width = max(len(n) for n in RECIPES)
    lines += [
        f"  {n.ljust(width)}  {text or '(nothing)'}{'  [default]' if n == DEFAULT_RECIPE else ''}" for n, text in RECIPES.items()
    ]
    console.emit({"passes": found, "recipes": RECIPES, "default": DEFAULT_RECIPE}, "\n".join(lines))


def describe(where: str) -> dict[str, Any]:
    """Summary and options of the pass class "module:Class", read from its source: importing it would load torch."""
    module, _, name = where.partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, where
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    cls = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    fields = [s for s in cls.body if isinstance(s, ast.AnnAssign) and s.value is not None]
    options = [
        {"name": ast.unparse(f.target), "type": ast.unparse(f.annotation), "default": ast.literal_eval(f.value)}
        for f in fields
        if f.value is not None and not ast.unparse(f.annotation).startswith("ClassVar")
    ]
    first = (ast.get_docstring(tree) or "").split("\n\n")[0].replace("\n", " ")
    summary = first.partition(": ")[2] or first
    return {"summary": summary, "doc": " ".join((ast.get_docstring(cls) or "").split()), "options": options}
