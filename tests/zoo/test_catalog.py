"""Every entry of the catalog can be built twice alike, exports with its inputs, and calibrates and judges on different samples."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from khtst_compile.zoo import catalog as module
from khtst_compile.zoo.catalog import Entry, catalog
from khtst_compile.zoo.catalog_codes import ENTRIES


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_an_entry(entry: Entry) -> None:
    first, second, inputs = entry.build(), entry.build(), entry.inputs()
    assert first is not second and not any(m.training for m in first.modules()) and len(inputs[0]) >= 2
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True))
    samples = entry.samples()
    assert len(samples) >= 16 and all(s[0].shape[1:] == inputs[0].shape[1:] for s in samples)
    known = {row.numpy().tobytes() for s in samples[: len(samples) * 3 // 4] for row in s[0]}
    judged = [row.numpy().tobytes() for s in samples[len(samples) * 3 // 4 :] for row in s[0]]
    assert sum(row in known for row in judged) == 0, "what judges was calibrated on"
    with torch.no_grad():
        first(*inputs)


def test_one_name_is_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [n for n, e in catalog().items() if n != e.name] == [] and set(catalog()) >= {e.name for e in ENTRIES}
    monkeypatch.setattr(module, "find_spec", lambda name: name.endswith("_codes") or name.endswith("_moe"))
    monkeypatch.setattr(module, "import_module", lambda name: SimpleNamespace(ENTRIES=ENTRIES))
    with pytest.raises(ValueError, match="catalog_moe: 'gsq' is in the catalog already"):
        catalog()
