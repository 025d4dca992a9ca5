from __future__ import annotations

import pytest
import torch

from khtst_compile.zoo import catalog_jepa
from khtst_compile.zoo.catalog import Entry
from khtst_compile.zoo.catalog_jepa import ENTRIES, PARTS
from khtst_compile.zoo.jepa.training import Settings
from khtst_compile.zoo.jepa.variants import VARIANTS


def test_every_variant_is_in_the_catalog() -> None:
    assert set(PARTS) >= set(VARIANTS) - {"image-small", "image-dense"}
    assert len({e.name for e in ENTRIES}) == len(ENTRIES)


@pytest.mark.parametrize("entry", ENTRIES, ids=[e.name for e in ENTRIES])
def test_entries_hold_a_model_and_what_it_takes(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_jepa, "BRIEFLY", Settings(epochs=1))
    catalog_jepa._trained.cache_clear()
    module, again = entry.build(), entry.build()
    assert not module.training and module is not again
    inputs, samples = entry.inputs(), entry.samples()
    assert len(inputs[0]) >= 2 and len(samples) >= 8
    cut = len(samples) * 3 // 4
    known = {tuple(t[i].numpy().tobytes() for t in batch) for batch in samples[:cut] for i in range(len(batch[0]))}
    judged = [tuple(t[i].numpy().tobytes() for t in batch) for batch in samples[cut:] for i in range(len(batch[0]))]
    assert judged and not known & set(judged), "what judges was calibrated on"
    with torch.no_grad():
        for given in (inputs, samples[-1]):
            a, b = module(*given), again(*given)
            a, b = (a, b) if isinstance(a, tuple) else ((a,), (b,))
            assert all(torch.equal(x, y) and len(x) == len(given[0]) for x, y in zip(a, b, strict=True))
    catalog_jepa._trained.cache_clear()
