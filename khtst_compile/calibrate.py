"""Samples -> running statistics of the activations that reach each linear layer, and of the vectors that reach each codebook."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from khtst_compile.codebooks.find import find_codebooks
from khtst_compile.codebooks.watch import CodebookStats, Watch
from khtst_compile.errors import CalibrationError
from khtst_compile.linears import find_linears
from khtst_compile.ops.codebook import lost_rows
from khtst_compile.progress import NullProgress, Progress
from khtst_compile.reservoir import Reservoir
from khtst_compile.samples import Samples, load_samples

if TYPE_CHECKING:
    from khtst_compile.program import Program

__all__ = ["ActivationStats", "Samples", "Stats", "calibrate", "load_samples"]

log = logging.getLogger(__name__)
Batch = dict[str, torch.Tensor]
# From this many samples on, held-out tokens come from samples of their own; below, tokens are drawn one by one.
SPLIT_SAMPLES = 8
MOMENT_TOKENS = 16384  # tokens second moments are summed over, at most
WHOLE_SAMPLES = 32  # held-out samples kept whole
WHOLE_WINDOWS = 8  # the same of a language model, whose windows each have logits at every position


@dataclass
class ActivationStats:
    """What calibration saw of one activation that linear layers read.

    absmax: (features,) float32, largest |x| per channel over all real (unpadded) tokens.
    rows: (n, features) float32, a bounded uniform sample of tokens to calibrate on; held_rows: (m, features), other tokens to judge on.
    grads, held_grads: linear node name -> (n | m, out_features) float32, d(random projection of the outputs) / d(that
    linear's output) for the same tokens.
    tokens: number of real tokens seen; zero_channels: how many channels never left zero.
    moments: (features, features) float32, the sum of x x^T over the first MOMENT_TOKENS tokens that are not held out, or None.
    """

    absmax: torch.Tensor
    rows: torch.Tensor
    held_rows: torch.Tensor
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    held_grads: dict[str, torch.Tensor] = field(default_factory=dict)
    tokens: int = 0
    zero_channels: int = 0
    moments: torch.Tensor | None = None

    def scaled(self, factor: torch.Tensor) -> ActivationStats:
        """What would have been seen of the activation times `factor`, (features,)."""
        return replace(
            self,
            absmax=self.absmax * factor.abs(),
            rows=self.rows * factor,
            held_rows=self.held_rows * factor,
            moments=None if self.moments is None else self.moments * factor * factor[:, None],
        )


@dataclass
class Stats:
    """activations: name of the graph node linear layers read -> its statistics; samples: calibration samples seen.

    held_samples: a few whole batches (public input name -> tensor) of samples that `rows` took nothing from, for end-to-end checks.
    codebooks: site -> what was seen of the codebook there; see `codebooks.find`.
    """

    activations: dict[str, ActivationStats]
    samples: int
    source: str = ""
    held_samples: list[Batch] = field(default_factory=list)
    codebooks: dict[str, CodebookStats] = field(default_factory=dict)


def calibrate(
    program: Program,
    samples: Samples | Iterable[Batch],
    *,
    rows: int = 512,
    held_rows: int = 512,
    gradients: bool = True,
    moments: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> Stats:
    """Run the program over `samples` and keep, for every input of a linear, channel ranges and a bounded sample of tokens.

    rows, held_rows: tokens kept per activation to calibrate on and to judge on, from different samples where there are at least
    eight. gradients: also keep what the outputs' seeded random projection does at each linear. moments: also sum up second moments.
    Memory is one batch, the kept tokens and the moments, whatever the number of samples. Raises CalibrationError for no samples at all
    and for NaN or infinity in an activation (vectors that reach a codebook are counted instead), PassError for a broken codebook.
    """
    count, source = (samples.count, samples.source) if isinstance(samples, Samples) else (None, "samples given in Python")
    collector = _Collector(program, rows, held_rows, gradients, moments, seed, count)
    reporter = progress or NullProgress()
    for batch in samples:
        try:
            size = collector.see(batch)
        except RuntimeError as error:
            # Only the first batch can tell: an operator has a derivative or it has none.
            if not (gradients and collector.seen == 0 and "derivative for" in str(error)):
                raise
            log.warning("calibrating without gradients, layers will be judged on their own errors: %s", error)
            options: dict[str, Any] = {"rows": rows, "held_rows": held_rows, "moments": moments, "seed": seed}
            return calibrate(program, samples, gradients=False, progress=progress, **options)
        reporter.advance(size)
    if collector.seen == 0:
        raise CalibrationError("calibration: there are no samples; needed: at least one")
    return collector.stats(source)


@dataclass
class _Tracked:
    """One activation: its running range and its two reservoirs."""

    absmax: torch.Tensor
    keep: Reservoir
    held: Reservoir
    tokens: int = 0
    moments: torch.Tensor | None = None
    summed: int = 0

    def sum_up(self, rows: torch.Tensor) -> None:
        """rows: (n, features) float32; adds what there is room for to the moments."""
        rows = rows[: MOMENT_TOKENS - self.summed]
        if self.moments is not None and len(rows):
            self.moments.addmm_(rows.T, rows)
            self.summed += len(rows)


@dataclass
class _Picked:
    """Which flat tokens of this batch went where, for one activation, so that gradients can follow."""

    reservoir: Reservoir
    slots: torch.Tensor
    tokens: torch.Tensor


class _Collector:
    """State across batches."""

    def __init__(self, program: Program, rows: int, held_rows: int, gradients: bool, moments: bool, seed: int, count: int | None):
        self.program, self.sizes, self.gradients, self.moments, self.seed = program, (rows, held_rows), gradients, moments, seed
        found = find_linears(program.graph, program.tensors())
        self.linears = [linear.node for linear in found]
        self.reads = {linear.node: linear.x.name for linear in found}
        self.readers: dict[str, list[fx.Node]] = {}
        for node, read in self.reads.items():
            self.readers.setdefault(read, []).append(node)
        codebooks = find_codebooks(program)
        self.watches = [Watch(book, rows) for book in codebooks.codebooks]
        self.watched = {name for watch in self.watches for name in watch.needs()}
        self.scored = codebooks.replaced()
        self.through = {name: z for book in codebooks.codebooks for name, z in book.through_forms()}
        self.tracked: dict[str, _Tracked] = {}
        self.seen = 0
        self.batch_number = 0
        self.with_gradient: set[str] = set()
        self.held_samples = self._held_samples(count)
        self.kept_batches: list[Batch] = []

    def _held_samples(self, count: int | None) -> set[int] | None:
        """The samples that give held-out tokens, or None where tokens are split one by one."""
        keep, held = self.sizes
        if count is None or count < SPLIT_SAMPLES or not held:
            return None
        generator = torch.Generator().manual_seed(self.seed)
        number = min(max(round(count * held / (keep + held)), 1), count - 1) if keep else count
        return set(torch.randperm(count, generator=generator)[:number].tolist())

    def see(self, batch: Batch) -> int:
        """Run one batch; returns how many samples it held."""
        values = dict(self.program.tensors())
        for graph_name, spec in zip(self.program.user_inputs(), self.program.inputs, strict=True):
            if spec.name not in batch:
                raise CalibrationError(
                    f"calibration batch {self.batch_number}: input {spec.name!r} is missing; found {sorted(batch)}"
                )
            values[graph_name] = batch[spec.name]
        layout = _Layout(self, batch)
        runner = _Runner(self, layout)
        ordered = [values[n.name] for n in self.program.graph.nodes if n.op == "placeholder"]
        try:
            with torch.set_grad_enabled(self.gradients):
                results = runner.run(*ordered)
        except IndexError as error:
            raise CalibrationError(
                f"calibration batch {self.batch_number}: {str(error).splitlines()[0]}: a value in it indexes past the end of a table; "
                "correct the data"
            ) from error
        for watch in self.watches:
            z = runner.kept[watch.codebook.z]
            lead = tuple(z.shape[:-1]) if getattr(watch.codebook, "head", None) is None else tuple(z.shape[1:-1])
            real, _, keys = layout.tokens(lead)
            watch.see(runner.kept, real, keys)
        if self.gradients:
            self._backward(results, layout)
        self._keep_whole(batch, layout.batch)
        self.seen += layout.batch
        self.batch_number += 1
        return layout.batch

    def _keep_whole(self, batch: Batch, size: int) -> None:
        """Keep the held-out samples of this batch, up to a few in all; none where the model fixes its batch."""
        inputs, cached = self.program.inputs, "cache" in self.program.meta
        left = (WHOLE_WINDOWS if cached else WHOLE_SAMPLES) - sum(len(kept[inputs[0].name]) for kept in self.kept_batches)
        axes = self.program.batch_axes()
        if left <= 0 or self.held_samples is None or not axes or not (cached or len(axes) == len(inputs)):
            return
        mine = [i for i in range(size) if self.seen + i in self.held_samples][:left]
        if len(mine) >= max(1, self.program.axes.get(str(inputs[0].shape[0]), (1, 1))[0]):
            self.kept_batches.append(self.program.choose(batch, mine))

    def _backward(self, results: Iterable[Any], layout: _Layout) -> None:
        """Push a seeded random projection of the float outputs back through the graph; hooks pick up what arrives at linears."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.batch_number)
        loss: torch.Tensor | None = None
        wanted = set(self.program.results())
        for spec, result in zip(self.program.outputs, results, strict=True):
            if spec.name not in wanted or not isinstance(result, torch.Tensor) or not result.requires_grad:
                continue
            weight = torch.randn(result.shape, generator=generator)
            if layout.mask is not None and result.shape[:2] == layout.mask.shape:
                weight *= layout.mask.reshape(*layout.mask.shape, *(1,) * (result.dim() - 2))
            part = (result * weight).sum()
            loss = part if loss is None else loss + part
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]

    def stats(self, source: str) -> Stats:
        """What was gathered, in graph order."""
        found: dict[str, ActivationStats] = {}
        for name, t in self.tracked.items():
            found[name] = ActivationStats(
                absmax=t.absmax,
                rows=t.keep.rows,
                held_rows=t.held.rows,
                grads=t.keep.grads,
                held_grads=t.held.grads,
                tokens=t.tokens,
                zero_channels=int((t.absmax == 0).sum()),
                moments=t.moments if t.summed else None,
            )
        silent = [n.name for n in self.linears if self.gradients and n.name not in self.with_gradient]
        if silent:
            log.warning(
                "no gradient reaches %d of %d linears (%s ...); each of them is judged by its own relative error",
                len(silent),
                len(self.linears),
                silent[0],
            )
        return Stats(found, self.seen, source, self.kept_batches, {w.codebook.site: w.result() for w in self.watches})


class _Layout:
    """One batch: how many samples, which tokens are real, and a random key per token that all activations of a shape share."""

    def __init__(self, collector: _Collector, batch: Batch):
        first = collector.program.inputs[0].name
        self._collector = collector
        self.batch = batch[first].shape[0] if batch[first].dim() else 1
        mask = batch.get("attention_mask")
        self.mask = mask != 0 if mask is not None and mask.dim() == 2 else None
        self._cache: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def tokens(self, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """shape: an activation's, without its features.

        Returns (real, held, keys), each over the flat tokens: bool, bool and float32 in [0, 1).
        """
        if shape not in self._cache:
            self._cache[shape] = self._make(shape)
        return self._cache[shape]

    def _make(self, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        collector = self._collector
        total = int(torch.tensor(shape, dtype=torch.int64).prod()) if shape else 1
        generator = torch.Generator().manual_seed(collector.seed * 1_000_003 + collector.batch_number)
        keys = torch.rand(total, generator=generator)
        coin = torch.rand(total, generator=generator)
        real = self._spread(self.mask, shape, total) if self.mask is not None else None
        if real is None:
            real = torch.ones(total, dtype=torch.bool)
        held = None
        if collector.held_samples is not None:
            owners = torch.tensor([collector.seen + i in collector.held_samples for i in range(self.batch)])
            wide = owners[:, None].expand(self.batch, self.mask.shape[1] if self.mask is not None else 1)
            held = self._spread(wide, shape, total)
        if held is None:
            keep, hold = collector.sizes
            held = coin < hold / max(keep + hold, 1)
        return real, held, keys

    @staticmethod
    def _spread(grid: torch.Tensor, shape: tuple[int, ...], total: int) -> torch.Tensor | None:
        """grid: (batch, seq) bool -> (total,) for activations of (batch, seq, ...), (batch * seq, ...) or, seq apart, (batch, ...)."""
        if shape[:2] == tuple(grid.shape):
            return grid.reshape(*grid.shape, *(1,) * (len(shape) - 2)).expand(shape).reshape(-1)
        if shape[:1] == (grid.numel(),):
            return grid.reshape(-1, *(1,) * (len(shape) - 1)).expand(shape).reshape(-1)
        if shape[:1] == grid.shape[:1] and bool((grid == grid[:, :1]).all()):
            return grid[:, 0].reshape(-1, *(1,) * (len(shape) - 1)).expand(shape).reshape(-1)
        return None


class _Runner(fx.Interpreter):
    """Runs one batch, watching what linears read and, with gradients, what comes back to them."""

    def __init__(self, collector: _Collector, layout: _Layout):
        super().__init__(collector.program.ep.graph_module, garbage_collect_values=True)
        self.extra_traceback = False  # else fx appends the model's whole traceback to the message of any error
        self._collector, self._layout = collector, layout
        self._picked: dict[str, list[_Picked]] = {}
        self.kept: dict[str, torch.Tensor] = {}  # what codebooks are judged on

    def run_node(self, n: fx.Node) -> Any:
        if getattr(n.target, "namespace", "") == "khtst":
            # Integer operators have no derivative: what lies before them gets no gradient.
            with torch.no_grad():
                value = super().run_node(n)
        else:
            value = super().run_node(n)
        collector = self._collector
        if n.name in collector.watched:
            self.kept[n.name] = value.detach()
        if n.name in collector.through:
            # Capture leaves out that the difference has no gradient: without it, none would reach what lies before a codebook.
            z = next(self.env[a] for a in n.all_input_nodes if a.name == collector.through[n.name])
            value = z + (value - z).detach()
        if n.name in collector.readers and isinstance(value, torch.Tensor) and value.is_floating_point():
            self._observe(n, value.detach())
        if n in collector.reads and value.is_floating_point():
            if n.name not in collector.scored:
                self._check(n, value, f"{_site(n)!r} gives")
            if collector.gradients:
                value = self._listen(n, value)
        return value

    def _observe(self, n: fx.Node, value: torch.Tensor) -> None:
        """value: (..., features) float32."""
        collector = self._collector
        real, held, keys = self._layout.tokens(tuple(value.shape[:-1]))
        flat = value.reshape(-1, value.shape[-1])
        if all(reader.name in collector.scored for reader in collector.readers[n.name]):
            real = real & ~lost_rows(flat)  # rows without a code are counted
        seen = flat if bool(real.all()) else flat[real]
        tracked = collector.tracked.get(n.name)
        if tracked is None:
            features = value.shape[-1]
            keep, hold = collector.sizes
            tracked = _Tracked(torch.zeros(features), Reservoir(keep, features), Reservoir(hold, features))
            tracked.moments = torch.zeros(features, features) if collector.moments else None
            collector.tracked[n.name] = tracked
        self._picked[n.name] = []
        if seen.shape[0] == 0:
            return
        peak = torch.linalg.vector_norm(seen, torch.inf, dim=0)
        if not bool(torch.isfinite(peak).all()):
            self._check(n, value, f"the input of {_site(collector.readers[n.name][0])!r} is", real)
        tracked.absmax = torch.maximum(tracked.absmax, peak)
        tracked.tokens += seen.shape[0]
        if tracked.moments is not None:
            tracked.sum_up(flat[real & ~held])
        for reservoir, mine in ((tracked.keep, real & ~held), (tracked.held, real & held)):
            slots, tokens = reservoir.offer(flat, torch.where(mine, keys, torch.inf))
            if slots.numel():
                self._picked[n.name].append(_Picked(reservoir, slots, tokens))

    def _listen(self, n: fx.Node, value: torch.Tensor) -> torch.Tensor:
        """Attach the hook that keeps the gradient of the tokens that were kept."""
        if not value.requires_grad:
            value = value.detach().requires_grad_()
        picked = self._picked.get(self._collector.reads[n], [])

        def keep(grad: torch.Tensor) -> None:
            self._collector.with_gradient.add(n.name)
            flat = grad.reshape(-1, grad.shape[-1])
            for p in picked:
                p.reservoir.fill(n.name, p.slots, flat[p.tokens])

        value.register_hook(keep)  # type: ignore[no-untyped-call]
        return value

    def _check(self, n: fx.Node, value: torch.Tensor, what: str, real: torch.Tensor | None = None) -> None:
        """Raise CalibrationError where a real token of `value` is not finite, naming the sample."""
        value = value.detach()
        # A sum is finite only where every term is, and costs one pass.
        if bool(torch.isfinite(value.sum())):
            return
        bad = ~torch.isfinite(value).reshape(-1, value.shape[-1]).all(-1)
        mask = self._layout.tokens(tuple(value.shape[:-1]))[0] if real is None else real
        bad &= mask
        if not bool(bad.any()):
            return
        per_sample = max(bad.numel() // max(self._layout.batch, 1), 1)
        sample = self._collector.seen + int(torch.nonzero(bad)[0]) // per_sample
        raise CalibrationError(
            f"calibration sample {sample}: {what} not finite (NaN or infinity), in node {n.name!r}; clean the sample, or check the "
            "model's weights"
        )


def _site(node: fx.Node) -> str:
    """`program.site_of`, imported late: program.py imports this module."""
    from khtst_compile.program import site_of

    return site_of(node)
