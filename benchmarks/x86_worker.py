"""One engine in a process of its own, in the peer's environment: reads commands as JSON lines, answers on standard output.

    {"inputs": "inputs.npz"}                       what to run on
    {"output": "y.npy"}                            run once, store the embedding
    {"seconds": 0.1, "warm": true}                 run for so long; answers the seconds of each run
    {"ids": [1, 2, 3], "new": 64}                  language models: go on with a text; answers prefill_s and decode_s

Started by x86_peers.py as: python x86_worker.py ENGINE THREADS FOLDER. FOLDER holds `library`, `library_fp32` (artifacts), `fp32.onnx`,
`calibration.npz`, `model` (a link to the Hugging Face folder) `decoder` (a link to an artifact of SmolLM2) and `smollm2-q8_0.gguf`. Needs
nothing of khtst_compile except for its own engines.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Inputs = dict[str, Any]
Run = Callable[[Inputs], Any]
Talk = Callable[[list[int], int], tuple[float, float]]
"""(token ids of the prompt, how many to add) -> seconds until the first token was there, and from there to the last."""


def khtst(folder: Path, threads: int, name: str = "library") -> Run:
    """An artifact of this project."""
    import khtst_compile

    loaded = khtst_compile.load(folder / name, threads=threads)
    return lambda inputs: next(iter(loaded.run(inputs).values()))


def khtst_fp32(folder: Path, threads: int) -> Run:
    return khtst(folder, threads, "library_fp32")


def khtst_avx2(folder: Path, threads: int) -> Run:
    """The same artifact as it runs on a CPU with no more than AVX2."""
    import khtst_compile

    loaded = khtst_compile.load(folder / "library", threads=threads, variant="x86-avx2")
    return lambda inputs: next(iter(loaded.run(inputs).values()))


def onnxruntime(folder: Path, threads: int, model: str = "fp32.onnx") -> Run:
    """onnxruntime on the exported float32 graph."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
    session = ort.InferenceSession(str(folder / model), options, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, inputs)[0]


def onnxruntime_int8(folder: Path, threads: int) -> Run:
    """Its own dynamic quantization: int8 weights, uint8 activations."""
    import logging

    from onnxruntime.quantization import QuantType, quantize_dynamic

    target = folder / "ort_int8.onnx"
    if not target.exists():
        logging.getLogger().setLevel(logging.ERROR)
        partial = folder / f"ort_int8.{os.getpid()}.onnx"
        quantize_dynamic(folder / "fp32.onnx", partial, weight_type=QuantType.QInt8)
        partial.replace(target)
    return onnxruntime(folder, threads, target.name)


def openvino(folder: Path, threads: int, precision: str = "f32", model: str = "fp32.onnx") -> Run:
    """OpenVINO; without the precision said, "fp32" silently runs in bf16 where the CPU has it."""
    import openvino as ov

    core = ov.Core()
    options = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision, "PERFORMANCE_HINT": "LATENCY"}
    compiled = core.compile_model(core.read_model(folder / model), "CPU", {**options, "NUM_STREAMS": 1})
    request = compiled.create_infer_request()
    return lambda inputs: request.infer(inputs)[compiled.output(0)]


def openvino_bf16(folder: Path, threads: int) -> Run:
    import openvino as ov

    if "BF16" not in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise RuntimeError("this CPU has no bf16")
    return openvino(folder, threads, "bf16")


def openvino_nncf(folder: Path, threads: int) -> Run:
    """Post-training quantization by NNCF with calibration, for transformers."""
    target = folder / "nncf_int8.xml"
    if not target.exists():
        import nncf
        import numpy as np
        import openvino as ov

        with np.load(folder / "calibration.npz") as data:
            samples = [{k: data[k][i : i + 1] for k in data.files} for i in range(len(data[data.files[0]]))]
        model = ov.Core().read_model(folder / "fp32.onnx")
        quantized = nncf.quantize(model, nncf.Dataset(samples), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(samples))
        ov.save_model(quantized, target)
    return openvino(folder, threads, model=target.name)


def _embedder(folder: Path, threads: int, plain_mask: bool = False) -> Any:
    """The model as a torch module: mean of the last hidden states the mask keeps, normalized.

    plain_mask: hand the model what to add to scores; it would make that itself by indexing with positions it computes, which do not
    stay integers in what prepare_pt2e returns.
    """
    import torch
    from transformers import AutoModel

    torch.set_num_threads(threads)

    class Embedder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModel.from_pretrained(folder / "model")

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            mask = attention_mask
            if plain_mask:
                added = (1.0 - attention_mask[:, None, None, :].to(torch.float32)) * -1e9
                mask = added.expand(-1, 1, input_ids.shape[1], -1)
            hidden = self.model(input_ids=input_ids, attention_mask=mask).last_hidden_state
            kept = attention_mask[..., None].to(hidden.dtype)
            pooled = (hidden * kept).sum(1) / kept.sum(1).clamp(min=1e-9)
            return torch.nn.functional.normalize(pooled, dim=1)

    return Embedder().eval()


def _call(module: Any) -> Run:
    import torch

    def run(inputs: Inputs) -> Any:
        with torch.inference_mode():
            return module(**{k: torch.from_numpy(v) for k, v in inputs.items()}).numpy()

    return run


def torch_eager(folder: Path, threads: int) -> Run:
    return _call(_embedder(folder, threads))


def torch_compile(folder: Path, threads: int) -> Run:
    import torch

    return _call(torch.compile(_embedder(folder, threads), dynamic=False))


def torchao(folder: Path, threads: int) -> Run:
    """int8 dynamic activations, int8 weights, compiled: eager mode would dequantize."""
    import torch
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    module = _embedder(folder, threads)
    quantize_(module, Int8DynamicActivationInt8WeightConfig())
    return _call(torch.compile(module, dynamic=False))


def executorch(folder: Path, threads: int) -> Run:
    """XNNPACK with dynamic int8 activations and int8 weights a channel (qd8); one program for each shape, kept in `folder`."""
    import torch
    from executorch.extension.pybindings.portable_lib import _unsafe_reset_threadpool
    from executorch.runtime import Runtime

    _unsafe_reset_threadpool(threads)
    programs = dict[tuple[int, ...], Any]()

    def run(inputs: Inputs) -> Any:
        given = tuple(torch.from_numpy(inputs[k]) for k in ("input_ids", "attention_mask"))
        shape = tuple(given[0].shape)
        if shape not in programs:
            file = folder / f"executorch_{shape[0]}x{shape[1]}.pte"
            if not file.exists():
                partial = file.with_suffix(f".{os.getpid()}")
                partial.write_bytes(_executorch_program(folder, given))
                partial.replace(file)
            program = Runtime.get().load_program(file)
            programs[shape] = program, program.load_method("forward")  # the method does not keep its program alive
        return programs[shape][1].execute(given)[0].numpy()

    return run


def _executorch_program(folder: Path, example: tuple[Any, ...]) -> bytes:
    import torch
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from executorch.exir import to_edge_transform_and_lower
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    module = _embedder(folder, 1, plain_mask=True)
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True))
    prepared = prepare_pt2e(torch.export.export(module, example, strict=True).module(), quantizer)
    prepared(*example)
    exported = torch.export.export(convert_pt2e(prepared), example, strict=True)
    return bytes(to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()]).to_executorch().buffer)


def khtst_decoder(folder: Path, threads: int) -> Talk:
    """An artifact of this project, everything a user waits for included."""
    import khtst_compile

    loaded = khtst_compile.load(folder / "decoder", threads=threads)

    def talk(ids: list[int], new: int) -> tuple[float, float]:
        started = time.perf_counter()
        steps = loaded.generate(ids, max_new_tokens=new, ignore_end=True)
        next(steps)
        first = time.perf_counter()
        for _ in steps:
            pass
        return first - started, time.perf_counter() - first

    return talk


def llama_cpp(folder: Path, threads: int) -> Talk:
    """llama.cpp on Q8_0 weights, by its own clock, which starts with the prompt's first token and leaves out the server around it."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(folder / "smollm2-q8_0.gguf")
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    parameters.n_ctx, parameters.n_parallel = 512, 1
    server = xllamacpp.Server(parameters)

    def talk(ids: list[int], new: int) -> tuple[float, float]:
        asked = {"prompt": ids, "n_predict": new, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
        found = server.handle_completions(asked)
        timings = (json.loads(found) if isinstance(found, str) else found)["timings"]
        if (timings["prompt_n"], timings["predicted_n"]) != (len(ids), new):
            raise RuntimeError(f"computed {timings['prompt_n']} + {timings['predicted_n']} tokens; asked: {len(ids)} + {new}")
        return timings["prompt_ms"] / 1e3, timings["predicted_ms"] / 1e3

    return talk


ENGINES: dict[str, Callable[[Path, int], Run]] = {
    "khtst int8": khtst,
    "khtst int8 avx2": khtst_avx2,
    "khtst fp32": khtst_fp32,
    "onnxruntime fp32": onnxruntime,
    "onnxruntime dynamic int8": onnxruntime_int8,
    "openvino fp32": openvino,
    "openvino bf16": openvino_bf16,
    "openvino nncf int8": openvino_nncf,
    "torch eager fp32": torch_eager,
    "torch compile fp32": torch_compile,
    "torchao int8": torchao,
    "executorch xnnpack int8": executorch,
}


TALKERS: dict[str, Callable[[Path, int], Talk]] = {"khtst decoder": khtst_decoder, "llama.cpp q8_0": llama_cpp}


def burst(run: Run, inputs: Inputs, seconds: float, warm: bool) -> list[float]:
    """Seconds of each run, at least one. warm: a run first that is not counted, for it brings the weights back into the cache."""
    if warm:
        run(inputs)
    spent: list[float] = []
    while not spent or sum(spent) < seconds:
        started = time.perf_counter()
        run(inputs)
        spent.append(time.perf_counter() - started)
    return spent


def main() -> None:
    engine, threads, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an engine prints is no answer

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        started = time.perf_counter()
        loop = _talking(TALKERS[engine](folder, threads)) if engine in TALKERS else _running(ENGINES[engine](folder, threads))
        answer({"ready_s": time.perf_counter() - started})
        for line in sys.stdin:
            answer(loop(json.loads(line)))
    except Exception as error:  # whatever goes wrong in a peer is a line of the table
        answer({"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]})


def _running(run: Run) -> Callable[[dict[str, Any]], dict[str, Any]]:
    import numpy as np

    inputs: Inputs = {}

    def obey(command: dict[str, Any]) -> dict[str, Any]:
        if "inputs" in command:
            with np.load(command["inputs"]) as data:
                inputs.update({k: data[k] for k in data.files})
            return {"ok": True}
        if "output" in command:
            np.save(command["output"], run(inputs))
            return {"ok": True}
        return {"times": burst(run, inputs, command["seconds"], command["warm"])}

    return obey


def _talking(talk: Talk) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def obey(command: dict[str, Any]) -> dict[str, Any]:
        prefill_s, decode_s = talk(command["ids"], command["new"])
        return {"prefill_s": prefill_s, "decode_s": decode_s}

    return obey


if __name__ == "__main__":
    main()
