"""An ONNX model in onnxruntime under emulation, with marks for arm_count.c around each call: runs in an ARM Python.

    python arm_worker.py MARK.so NOTHING.onnx MODEL.onnx INPUTS.npz OUTPUT.npy CALLS

First CALLS calls of NOTHING.onnx, which has the same inputs and returns one number: what a call costs in Python and in onnxruntime around
a model. Then as many of MODEL.onnx.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
import onnxruntime as ort


def session(model: str) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1  # no thread beside this one, so none that waits busily
    options.log_severity_level = 3
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def main(library: str, nothing: str, model: str, inputs: str, output: str, calls: str) -> None:
    mark = ctypes.CDLL(library).khtst_mark
    with np.load(inputs) as data:
        given = {name: data[name] for name in data.files}
    found: list[Any] = []
    for runs in (session(nothing), session(model)):
        for _ in range(int(calls)):
            mark()
            found = runs.run(None, given)
            mark()
    np.save(output, found[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
