"""Programs cut at their codebooks: encoder and decoder together are the whole, to the bit, whatever the codebook is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from vector_quantize_pytorch import ResidualVQ, VectorQuantize

from khtst_compile.codebooks.halves import split
from khtst_compile.errors import UnsupportedError, UsageError
from khtst_compile.program import Program, call_nodes, site_of
from tests.codes.coders import frozen
from tests.quantizers import LOOKUPS, STEPS, VECTORS, model, samples

NARROW = {"rounded", "signs"}  # take and give six features


def compared(program: Program, x: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(outputs of the encoder, of the decoder on its ids), after each was found to be the whole's."""
    encoder, decoder, where = split(program)
    name = program.inputs[0].name
    whole, coded = program.run({name: x}), encoder.run({name: x})
    decoded = decoder.run({b.name: coded[b.name] for b in where.books})
    assert sorted((*where.kept, *where.decoded, *where.left_out)) == sorted(whole)
    for found, names in ((coded, where.kept), (decoded, where.decoded)):
        for output in names:
            assert found[output].numpy().tobytes() == whole[output].numpy().tobytes()
    return coded, decoded


@pytest.mark.parametrize("kind", [*VECTORS, *STEPS])
def test_every_codebook(kind: str) -> None:
    torch.manual_seed(0)
    program = frozen(model({**VECTORS, **STEPS}[kind](), 6 if kind in NARROW else 16))
    encoder, decoder, where = split(program)
    assert len(where.books) == LOOKUPS.get(kind, 1)
    for size in (1, 7, 0):
        coded, decoded = compared(program, samples(9, size))
        assert [v.dtype for v in coded.values()] == [torch.int32] * (len(where.books) + 1)
        assert coded["lost"].tolist() == [0] * len(where.books)
        assert decoded["output_0"].shape == (size, 10, 5)
    for book, output, given in zip(where.books, encoder.outputs, decoder.inputs, strict=False):
        assert output == given and output.shape[0] == "batch" and output.shape[-1] == book.entry["levels"]
    marks = [[e["sha256"] for e in p.meta["codebooks"]] for p in (program, encoder, decoder)]
    assert marks[0] == marks[1] == marks[2]
    assert not any(n.op == "placeholder" and n.name == "x" for n in decoder.graph.nodes)
    for half, site in ((encoder, "encoder"), (decoder, "decoder")):
        linears = [site_of(n) for n in call_nodes(half.graph, torch.ops.aten.linear.default)]
        assert site in linears and {"encoder": "decoder", "decoder": "encoder"}[site] not in linears


class Skipping(nn.Module):
    """A decoder that adds what goes around the codebook."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(12, 16), nn.Linear(16, 5)
        self.quantizer = VectorQuantize(dim=16, codebook_size=32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.encoder(x)
        return self.decoder(self.quantizer(z)[0] + 0.5 * F.relu(z))


def test_a_skip_connection_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"would need more than ids: 'add\w*' \(test_split.py:\d+: .*\) also reads .*relu"):
        split(frozen(Skipping().eval()))


class Row(nn.Module):
    """Two codebooks one after the other; `both`: the decoder reads both. It also returns the first encoder's vectors."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.both = both
        self.first, self.second, self.last = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 5)
        self.coarse, self.fine = (ResidualVQ(dim=16, codebook_size=16, num_quantizers=2) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        z = self.first(x)
        values, ids, _ = self.coarse(z)
        finer = self.fine(F.gelu(self.second(values)))[0]
        return self.last(finer + values if self.both else finer), z, ids


@pytest.mark.parametrize("both", [True, False])
def test_codebooks_in_a_row(both: bool) -> None:
    torch.manual_seed(0)
    program = frozen(Row(both).eval())
    where = split(program)[2]
    assert [b.name for b in where.books] == (["coarse", "fine"] if both else ["fine"])
    assert where.kept == (("output_1",) if both else ("output_1", "output_2")), (
        "ids of a codebook inside the encoder stay its output"
    )
    assert where.decoded == ("output_0",)
    coded, _ = compared(program, samples(9, 7))
    assert coded["lost"].shape == (len(where.books),)


def test_rows_without_a_code_are_counted_and_decoded_as_code_0() -> None:
    program = frozen(model(VECTORS["residual"]()))
    encoder, decoder, _ = split(program)
    x = samples(9, 4)
    x[1, 3:5] = torch.nan
    coded = encoder.run({program.inputs[0].name: x})
    assert coded["lost"].tolist() == [2] and coded["quantizer"][1, 3:5].eq(0).all()
    assert decoder.run({"quantizer": coded["quantizer"]})["output_0"].isfinite().all()


class Tokens(nn.Module):
    """Ids alone."""

    def __init__(self) -> None:
        super().__init__()
        self.quantizer = VectorQuantize(dim=12, codebook_size=32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids: torch.Tensor = self.quantizer(x)[1]
        return ids


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(x)
        return found


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (Plain, UsageError, "has no codebook"),
        (Tokens, UnsupportedError, "nothing to decode"),
    ],
)
def test_refusals(make: Callable[[], nn.Module], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        split(frozen(make().eval()))
