"""A linear layer as a program of ExecuTorch with dynamic int8 activations in XNNPACK: runs in the environment "executorch" of x86_peers.py.

    python arm_export.py WEIGHTS.npz ROWS PROGRAM.pte

WEIGHTS.npz: weight (n, k) and bias (n,) float32.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config
from executorch.exir import to_edge_transform_and_lower
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e


def main(weights: str, rows: int, program: Path) -> None:
    with np.load(weights) as data:
        weight, bias = torch.from_numpy(data["weight"]), torch.from_numpy(data["bias"])
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0])
    layer.load_state_dict({"weight": weight, "bias": bias})
    example = (torch.randn(rows, weight.shape[1]),)
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True))
    prepared = prepare_pt2e(torch.export.export(layer.eval(), example, strict=True).module(), quantizer)
    prepared(*example)
    exported = torch.export.export(convert_pt2e(prepared), example, strict=True)
    program.write_bytes(to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()]).to_executorch().buffer)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
