"""Every kind of model source, and every way it can be unusable: one error that says what to do."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from khtst_compile.capture import capture, capture_module
from khtst_compile.errors import CaptureError, UsageError

torch.set_num_threads(1)

FACTORY = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 5)
    def forward(self, x, scale):
        return {"y": torch.relu(self.first(x)) * scale, "raw": x}
def build():
    return Net(), {"x": torch.randn(2, 6), "scale": torch.ones(2, 1)}
def alone():
    return Net()
def broken():
    raise ValueError("no weights")
"""


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working directory, importable only because that is searched."""
    name = f"factory_{abs(hash(tmp_path)) % 10**8}"
    (tmp_path / f"{name}.py").write_text(FACTORY)
    (tmp_path / f"{name}_bad.py").write_text("import not_a_module_at_all\n")
    monkeypatch.chdir(tmp_path)
    return name


def test_factory_names_inputs_and_outputs(factory: str) -> None:
    program = capture(f"{factory}:build", seed=3)
    assert [s.name for s in program.inputs] == ["x", "scale"] and [s.name for s in program.outputs] == ["y", "raw"]
    assert [s.shape for s in program.inputs] == [("batch", 6), ("batch", 1)]
    got = program.run({"x": torch.ones(5, 6), "scale": torch.full((5, 1), 2.0)})
    torch.manual_seed(3)
    want = torch.relu(nn.Linear(6, 5)(torch.ones(5, 6))) * 2
    assert torch.allclose(got["y"], want, atol=1e-6), "the seed must reach the factory"
    assert program.meta["source"] == f"{factory}:build"


@pytest.mark.parametrize(
    ("suffix", "said"),
    [
        (":alone", "needed: (torch.nn.Module, example inputs"),
        (":broken", "no weights"),
        (":nothing", "no callable 'nothing'; it has Net, alone, broken, build"),
        ("_bad:build", "not_a_module_at_all"),
        ("_absent:build", "No module named"),
    ],
)
def test_factory_errors(factory: str, suffix: str, said: str) -> None:
    with pytest.raises((UsageError, CaptureError)) as caught:
        capture(factory + suffix)
    assert said in str(caught.value) and factory in str(caught.value)


def test_pt2_round_trip(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    ep = torch.export.export(model, (torch.randn(3, 4),), dynamic_shapes=({0: batch},))
    torch.export.save(ep, tmp_path / "m.pt2")
    program = capture(tmp_path / "m.pt2")
    assert program.inputs[0].shape == ("batch", 4) and program.outputs[0].shape == ("batch", 2)
    assert program.axes["batch"][1] == 64
    x = torch.randn(1, 4)
    assert torch.allclose(program.run({program.inputs[0].name: x})["output"], model(x), atol=1e-6)
    with pytest.raises(UsageError, match="fixed when it is exported"):
        capture(tmp_path / "m.pt2", shapes={"batch": (1, 8)})


class Exploding:
    """Unpickling this fails the test."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return pytest.fail, ("a pickle was opened",)


def test_pt2_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    with pytest.raises(UsageError, match=r"no such file"):
        capture(path)
    path.write_bytes(b"not a zip at all")
    with pytest.raises(UsageError, match=r"not a \.pt2 archive"):
        capture(path)
    torch.save(Exploding(), path)
    with pytest.raises(UsageError, match=r"write it with torch\.export\.save, not torch\.save"):
        capture(path)
    torch.export.save(torch.export.export(nn.Linear(4, 2).eval(), (torch.randn(3, 4),)), path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UsageError, match=r"damaged"):
        capture(path)


def test_pt2_with_a_pickled_weight_is_not_opened(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.pt2", tmp_path / "bad.pt2"
    torch.export.save(torch.export.export(nn.Linear(4, 2).eval(), (torch.randn(3, 4),)), good)
    poison = io.BytesIO()
    torch.save(Exploding(), poison)
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(bad, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            if name.endswith("_weights_config.json"):
                config = json.loads(data)
                next(iter(config["config"].values()))["use_pickle"] = True
                data = json.dumps(config).encode()
            elif "/data/weights/weight_" in name:
                data = poison.getvalue()
            target.writestr(name, data)
    with pytest.raises(UsageError, match="stored as a pickle"):
        capture(bad)


def test_folder_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config\.json"):
        capture(tmp_path)
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UsageError, match=r"pytorch_model\.bin.*convert them to safetensors"):
        capture(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(UsageError, match=r"config\.json: cannot be read as JSON"):
        capture(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "never_heard_of"}')
    with pytest.raises(CaptureError, match="never_heard_of"):
        capture(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert", "quantization_config": {"quant_method": "awq"}}')
    with pytest.raises(CaptureError, match=r"already quantized .awq."):
        capture(tmp_path)
    config = {
        "model_type": "bert",
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["BertForSomethingElse"]}))
    with pytest.raises(UsageError, match="--task, one of feature-extraction, sentence-embedding"):
        capture(tmp_path)
    with pytest.raises(UsageError, match="'nonsense' is unknown"):
        capture(tmp_path, task="nonsense")
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["BertModel"]}))
    with pytest.raises(UsageError, match="damaged"):
        capture(tmp_path)


def test_a_head_without_weights_is_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=9, max_position_embeddings=32
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(CaptureError, match=r"classifier\.\w+.* not in the folder"):
        capture(tmp_path, task="token-classification")
    with pytest.raises(UsageError, match="32 positions"):
        capture(tmp_path, shapes={"seq": (1, 33)})
    program = capture(tmp_path, shapes={"seq": (16, 16), "batch": (1, 8)})
    assert program.inputs[0].shape == ("batch", 16) and program.axes == {"batch": (1, 8)}


def test_unknown_source() -> None:
    with pytest.raises(UsageError, match=r"Hugging Face folder, package\.module:factory, or a \.pt2 file"):
        capture("no/such/thing")


def test_the_users_module_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).half().train()
    program = capture_module(model, (torch.randn(2, 4).half(),))
    assert model.training and model[0].weight.dtype is torch.float16
    assert program.inputs[0].dtype == "float32"
    x = torch.randn(3, 4)
    assert torch.allclose(program.run({"input": x})["output"], x @ model[0].weight.float().T + model[0].bias.float(), atol=1e-6)


@pytest.mark.parametrize("examples", [(), {}, (3,), {"x": [1.0]}, (torch.ones(1), torch.ones(1))])
def test_unusable_examples(examples: object) -> None:
    with pytest.raises(UsageError, match="example input"):
        capture_module(nn.Linear(1, 1), examples)  # type: ignore[arg-type]
