"""A process that builds some variants for another: python -m khtst_compile.lower.helper SOURCE FOLDER TRIPLE TARGET.. (see variants.py)."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy.typing as npt

from khtst_compile import artifact
from khtst_compile.errors import KhtstError
from khtst_compile.lower.variants import FAILURE, RECORDS, build_variant, write_results
from khtst_compile.targets import table


def main(source: str, folder: str, triple: str, names: list[str]) -> int:
    """Build, and leave results or the reason of a failure in `folder`; returns the exit code."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    place = Path(folder)
    try:
        from khtst_compile.api import load_program
        from khtst_compile.lower.relax import kernel_graph
        from khtst_compile.lower.tune import records_of

        graph = kernel_graph(load_program(artifact.read(source, kind="quantized", hashes=False)))
        arrays: dict[str, npt.NDArray[Any]] = {}
        records = records_of({"tuning": json.loads((place / RECORDS).read_text(encoding="utf-8"))}, place)
        for name in names:
            write_results(place, build_variant(graph, table.target(name).on(triple), place, arrays, records), graph, arrays)
    except KhtstError as error:
        text = json.dumps({"class": type(error).__name__, "message": str(error)})
        (place / FAILURE).write_text(text, encoding="utf-8")
        return error.exit_code
    return 0


def _end_with_parent() -> None:
    """Standard input is a pipe nobody writes to: it ends when the parent does."""
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]))
