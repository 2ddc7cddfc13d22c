"""Searches the exact levers for the fastest candidate that fits, since the card's memory is a budget to spend; if none
fits, for the one that needs the least.

Candidates are compared by quick rehearsals of a few layers. The winner is rehearsed in full, and replaced by the next
one if it then needs more memory than the card has."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter
from typing import Literal

from finefit.artifacts.processes import MMAP_BYTES
from finefit.artifacts.records import Levers
from finefit.custom.inputs import meta_twin
from finefit.errors import SpecError
from finefit.model.load import base_bits
from finefit.model.resolve_model import custom_source_in
from finefit.plan.eval_memory import SharedRehearsals
from finefit.plan.target import Target
from finefit.rehearse.allocator import Replay, replay
from finefit.rehearse.cost_model import Rates, phase_seconds
from finefit.rehearse.fake_model import StepConfig, read_config
from finefit.rehearse.layer_extrapolation import REHEARSED_PERIODS
from finefit.rehearse.layer_kinds import layer_kinds, rehearse_extrapolated
from finefit.rehearse.rehearsal import Rehearsal
from finefit.rehearse.trace import Sharding, sharded
from finefit.spec.models import Full, Lora
from finefit.spec.schema import LeverSettings

TYPICAL_RATES = Rates(half_flops=130e12, full_flops=15e12, bytes_per_second=1e12)
FUSED_RECOMPUTE_MARGIN = 0.025
"""Share of the reserved memory that is added if full weights are trained in recomputed layers with fused kernels."""
ASKED = "requested"
_FUSED_REASON = "the same numbers with fewer and larger operations"
_CHUNK, _SMALL_CHUNK, _MOST_CHUNKS = 1024, 256, 256
_TILES = 8
_GUESSES = 3
"""Guesses of the smallest depth that fits, before bisection takes over."""
NUM_TIMED_BESIDE = 2
"""Candidates that the start of a run times beside the chosen one."""
_WORTH = 0.995
"""A candidate replaces a simpler one if it takes at most this share of its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    cfg: StepConfig
    rehearsed: Rehearsal
    replay: Replay
    peak_bytes: int
    """Bytes that the card must hold."""
    accumulation: int
    step_seconds: float
    """Predicted by the target's rates, or by those of a typical card if they are unknown, which suffices for
    comparison."""

    @property
    def levers(self) -> Levers:
        return self.cfg.levers


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateEvaluator:
    """Rehearses candidates of one stage on one target, each only once."""

    cfg: StepConfig
    target: Target
    rows_per_step: int
    """Rows of one card."""
    sharding: Sharding = "none"
    has_experts: bool = False
    shared: SharedRehearsals = field(default_factory=SharedRehearsals)
    known: dict[str, Candidate] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        found = custom_source_in(self.cfg.config)
        return len(layer_kinds(read_config(self.cfg.config))) if found is None else len(meta_twin(found).layers())

    def space(self, asked: LeverSettings) -> "SearchSpace":
        """A custom model has only micro_batch and recompute, since all other levers act on parts of a language model.
        There are few candidates, because each is rehearsed in full if layers do not repeat."""
        layers, experts, supervised = self.num_layers, self.has_experts, self.cfg.sides * self.cfg.supervised
        space = make_search_space(
            asked, self.target, rows=self.rows_per_step, supervised=supervised, num_layers=layers, has_experts=experts
        )
        if custom_source_in(self.cfg.config) is None:
            return space
        recompute = space.recompute if "recompute" in space.fixed else tuple(dict.fromkeys((0, layers // 2, layers)))
        return replace(
            space,
            recompute=recompute,
            keep_attention=(False,),
            loss_chunk=(None,),
            offload=(False,),
            mlp_tiles=(1,),
            kernels="torch",
            kernels_reason=ASKED if "kernels" in space.fixed else "a custom model chooses its own kernels",
        )

    def fits(self, candidate: Candidate) -> bool:
        return candidate.peak_bytes <= self.target.budget_bytes

    def evaluate(self, levers: Levers, *, is_quick: bool = True, cfg: StepConfig | None = None) -> Candidate:
        accumulation = -(-self.rows_per_step // levers.micro_batch)
        asked = replace(cfg or self.cfg, levers=levers, is_quick=is_quick, accumulates=accumulation > 1)
        key = repr(asked)
        if key not in self.known:
            self.shared.note(_named(asked))
            self.known[key] = self._rehearsed(asked, accumulation)
        return self.known[key]

    def _rehearsed(self, cfg: StepConfig, accumulation: int) -> Candidate:
        rehearsed, target = rehearse_extrapolated(cfg, self.shared.steps), self.target
        if self.sharding != "none":
            # adapters and a trained subset are stored beside frozen 16-bit weights already
            halves = cfg.precision != "fp32" and isinstance(cfg.tuning, Full)
            trace = sharded(rehearsed.trace, self.sharding, target.count, gathers_halves=halves)
            rehearsed = replace(rehearsed, trace=trace)
        answer = replay(rehearsed.trace.stream(), expandable=target.expandable)
        reserved = answer.reserved_bytes if target.device == "cuda" else answer.allocated_bytes
        small = rehearsed.trace.peak_below(MMAP_BYTES) if target.device == "cpu" else 0
        margin = target.margin_of(reserved, small) + fragmentation_bytes(reserved, rehearsed, cfg)
        phases = phase_seconds(rehearsed.trace, target.rates or TYPICAL_RATES)
        update, batches = phases.pop("update", 0.0), 2 if cfg.accumulates and not cfg.is_quick else 1
        copies = 2 * rehearsed.trace.host_bytes / target.host_bytes_per_second
        beside = max(sum(phases.values()) / batches, copies)  # copies run while the card computes
        return Candidate(
            cfg=cfg,
            rehearsed=rehearsed,
            replay=answer,
            peak_bytes=reserved + target.context_bytes + margin,
            accumulation=accumulation,
            step_seconds=beside * self.rows_per_step / cfg.levers.micro_batch + update,
        )


def _named(cfg: StepConfig) -> str:
    """Describes a candidate in a few words."""
    levers = cfg.levers
    parts = {
        f"micro_batch {levers.micro_batch}": True,
        f"recompute {levers.recompute}": levers.recompute,
        f"{cfg.tokens:,} tokens": True,
        f"in {base_bits(cfg.tuning)} bits": base_bits(cfg.tuning) is not None,
        cfg.optimizer.kind: cfg.optimizer.kind != "adamw",
        "in full": not cfg.is_quick,
    }
    return ", ".join(words for words, is_said in parts.items() if is_said)


def fragmentation_bytes(reserved: int, rehearsed: Rehearsal, cfg: StepConfig) -> int:
    """Returns what the allocator may hold beyond its prediction. A layer's input on its way to the host and back may
    leave a hole of its size. Full weights in recomputed layers with fused kernels reserved 3.1 % more than predicted
    (docs/memory.md), although their allocations were predicted."""
    levers, is_full = cfg.levers, not isinstance(cfg.tuning, Lora)
    is_affected = levers.kernels == "fused" and levers.recompute and is_full and cfg.device == "cuda"
    more = int(reserved * FUSED_RECOMPUTE_MARGIN) if is_affected else 0
    return more + (rehearsed.trace.host_bytes // levers.recompute if levers.offload and levers.recompute else 0)


def decide_kernels(
    asked: LeverSettings, target: Target, sharding: Sharding, *, has_experts: bool
) -> tuple[Literal["torch", "fused"], str]:
    """Fused kernels read weights in place, so the weights must not be sharded."""
    if asked.compile and has_experts:
        why = "torch compiles their grouped products only in bf16, which was not compared with uncompiled layers"
        raise SpecError(f"levers.compile: true excludes mixtures of experts: {why}", "--set levers.compile=false")
    if asked.kernels == "fused" and asked.compile:
        problem = "levers.kernels: fused and levers.compile: true contradict each other: torch compiles its own layers"
        raise SpecError(problem, "--set levers.kernels=torch, or --set levers.compile=false")
    if asked.kernels != "auto":
        return asked.kernels, ASKED
    if asked.compile:
        return "torch", "the layers are compiled"
    if sharding in ("fsdp2", "zero3"):
        return "torch", "the weights are sharded over the devices"
    if target.device == "cuda" and not target.has_liger:
        return "torch", "liger-kernel is not installed here: pip install 'finefit[gpu]'"
    return "fused", _FUSED_REASON


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """The values that each lever may take, the simplest first; only one if the user has set it."""

    micro_batch: tuple[int, ...]
    recompute: tuple[int, ...]
    keep_attention: tuple[bool, ...]
    loss_chunk: tuple[int | None, ...]
    offload: tuple[bool, ...]
    mlp_tiles: tuple[int, ...]
    adapter_inputs: str
    kernels: Literal["torch", "fused"]
    kernels_reason: str
    update: Literal["after", "inside"] = "after"
    compile: bool = False
    packing: bool = False
    packing_reason: str = "not requested"
    fixed: frozenset[str] = frozenset()
    """Names of the levers that the user has set."""

    def most_frugal(self) -> Levers:
        return self.levers(self.micro_batch[0], self.recompute[-1], is_frugal=True)

    def levers(self, micro_batch: int, recompute: int, *, is_frugal: bool = False) -> Levers:
        """The loss is computed in chunks if that may be chosen; `is_frugal` applies everything that saves memory."""
        return Levers(
            micro_batch=micro_batch,
            recompute=recompute,
            keep_attention=self.keep_attention[0],
            loss_chunk=self.loss_chunk[-1] if is_frugal else self.loss_chunk[len(self.loss_chunk) // 2],
            offload=self.offload[-1] and recompute > 0 if is_frugal else self.offload[0],
            mlp_tiles=self.mlp_tiles[-1] if is_frugal else self.mlp_tiles[0],
            adapter_inputs="bf16" if self.adapter_inputs == "bf16" else "fp32",
            packing=self.packing,
            kernels=self.kernels,
            update=self.update,
            compile=self.compile,
        )


def make_search_space(
    asked: LeverSettings, target: Target, *, rows: int, supervised: int, num_layers: int, has_experts: bool = False
) -> SearchSpace:
    """`rows`: those of one optimizer step on one card, each with at most `supervised` tokens that have logits.
    `has_experts`: MLPs are then not tiled."""
    # numbers of recomputed layers: recomputed and kept layers must both be enough for a rehearsal by a few of them
    depths = [k for k in range(num_layers + 1) if min(k, num_layers - k) >= REHEARSED_PERIODS or k in (0, num_layers)]
    named = {"none": 0, "all": num_layers}.get(str(asked.recompute), asked.recompute)
    chunk = None if asked.loss_chunk == "none" else asked.loss_chunk
    least = 1 << max(0, (supervised // _MOST_CHUNKS).bit_length())  # each chunk reads the whole head
    free_offload = (False, True) if target.device == "cuda" else (False,)
    free_tiles = (1,) if has_experts else (1, _TILES)
    free_inputs = "fp32" if target.precision == "fp32" else "bf16"
    settings = LeverSettings.model_fields.items()
    # powers of two, and the whole step; beyond 64 rows a card is busy anyway
    doubled = [1 << n for n in range(7) if 1 << n < rows]
    micro_batches = (*doubled, rows) if rows <= 64 else tuple(doubled)
    if asked.micro_batch != "auto":
        micro_batches = (min(asked.micro_batch, rows),)
    elif asked.update == "inside":  # this update needs the whole step at once
        micro_batches = (rows,)
    return SearchSpace(
        micro_batch=micro_batches,
        recompute=tuple(depths) if asked.recompute == "auto" else (named,),  # type: ignore[arg-type]
        keep_attention=(False, True) if asked.keep_attention == "auto" else (asked.keep_attention,),
        loss_chunk=(None, max(_CHUNK, least), max(_SMALL_CHUNK, least)) if chunk == "auto" else (chunk,),
        offload=free_offload if asked.offload == "auto" else (asked.offload == "inputs",),
        mlp_tiles=free_tiles if asked.mlp_tiles == "auto" else (asked.mlp_tiles,),
        adapter_inputs=free_inputs if asked.adapter_inputs == "auto" else asked.adapter_inputs,
        kernels="fused" if asked.kernels == "auto" else asked.kernels,
        kernels_reason=_FUSED_REASON,
        update="after" if asked.update == "auto" else asked.update,
        compile=asked.compile,
        fixed=frozenset(name for name, field in settings if getattr(asked, name) != field.default),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    evaluator: CandidateEvaluator
    candidate: Candidate
    fits: bool
    reasons: dict[str, str]
    others: tuple[Candidate, ...] = ()
    """Those of other micro-batches that fit and come next by predicted time; only rehearsed quickly."""


def choose(evaluator: CandidateEvaluator, space: SearchSpace) -> SearchResult:
    """Returns the first candidate, in order of speed, whose full rehearsal fits; otherwise the one that needs the least
    memory. Others are named only for one card, on which a run can time them."""
    search = _LeverSearch(evaluator, space)
    for levers in chain(search.candidates(), (space.most_frugal(),)):
        candidate = evaluator.evaluate(levers, is_quick=False)
        if evaluator.fits(candidate):
            break
    fits, reasons = evaluator.fits(candidate), search.reasons(candidate)
    can_be_timed = fits and evaluator.target.device == "cuda" and evaluator.target.count == 1
    others = search.others(candidate) if can_be_timed else ()
    return SearchResult(evaluator=evaluator, candidate=candidate, fits=fits, reasons=reasons, others=others)


@dataclass(frozen=True, slots=True)
class _LeverSearch:
    evaluator: CandidateEvaluator
    space: SearchSpace
    fitting: list[Candidate] = field(default_factory=list)
    """The first candidate of each micro-batch that fits."""

    def others(self, chosen: Candidate) -> tuple[Candidate, ...]:
        beside = (one for one in self.fitting if one.levers.micro_batch != chosen.levers.micro_batch)
        return tuple(sorted(beside, key=attrgetter("step_seconds"))[:NUM_TIMED_BESIDE])

    def candidates(self) -> Iterator[Levers]:
        """Yields the fastest candidate first, refined; then some that need a little less memory, by speed; the costlier
        levers last."""
        space, by_seconds = self.space, attrgetter("step_seconds")
        plain, best_seconds = [], float("inf")
        for micro_batch in space.micro_batch:  # up to the first one that does not fit at all
            found = self._fewest_recomputed(micro_batch)
            if found is None:
                break
            self.fitting.append(found)
            if found.step_seconds < _WORTH * best_seconds:  # a larger micro-batch has to be worth its memory
                plain.append(found)
            best_seconds = min(best_seconds, found.step_seconds)
        plain.sort(key=by_seconds)
        if plain:
            best = self._refined(plain[0])
            yield best.levers
            deeper = [k for k in space.recompute if k > best.levers.recompute][:3]
            others = [self.evaluator.evaluate(replace(best.levers, recompute=k)) for k in deeper]
            others += [self._refined(candidate) for candidate in plain[1:3]]
            yield from (candidate.levers for candidate in sorted(others, key=by_seconds))
            depth, chunk = space.recompute[-1], space.loss_chunk[-1]
            yield from (replace(candidate.levers, recompute=depth, loss_chunk=chunk) for candidate in plain)
        yield self._frugal()

    def _fewest_recomputed(self, micro_batch: int) -> Candidate | None:
        space, depths = self.space, self.space.recompute
        all_kept = self.evaluator.evaluate(space.levers(micro_batch, depths[0]))
        if self.evaluator.fits(all_kept):
            return all_kept
        for chunk in dict.fromkeys((space.levers(1, 0).loss_chunk, space.loss_chunk[-1])):
            plain = replace(space.levers(micro_batch, depths[-1]), loss_chunk=chunk)
            if self.evaluator.fits(self.evaluator.evaluate(plain)):
                return self._border(plain, all_kept)
        return None

    def _border(self, levers: Levers, near: Candidate) -> Candidate:
        """Memory falls with every recomputed layer, so the smallest depth that fits lies between the first depth, which
        does not fit, and the last, which does. Memory falls almost linearly, so the first guesses extrapolate from the
        memory of `near` with the slope at its other levers; two are usually enough. Bisection does the rest."""
        evaluator, depths = self.evaluator, self.space.recompute
        most, least = (evaluator.evaluate(replace(near.levers, recompute=depths[at])).peak_bytes for at in (0, -1))
        found, low, high, num_tries = near, 0, len(depths) - 1, 0
        while high - low > 1:
            middle, num_tries = (low + high) // 2, num_tries + 1
            if num_tries <= _GUESSES and most > least:
                over = (found.peak_bytes - evaluator.target.budget_bytes) / (most - least)
                depth = found.levers.recompute + over * (depths[-1] - depths[0])
                middle = min(max(bisect_left(depths, depth), low + 1), high - 1)
            found = evaluator.evaluate(replace(levers, recompute=depths[middle]))
            low, high = (low, middle) if evaluator.fits(found) else (middle, high)
        return evaluator.evaluate(replace(levers, recompute=depths[high]))

    def _refined(self, found: Candidate) -> Candidate:
        """Computes all logits at once if they fit, or smaller chunks if that saves a recomputed layer; keeps attention
        if that is cheaper than recomputing it."""
        evaluator, space, levers = self.evaluator, self.space, found.levers
        others = [replace(levers, loss_chunk=space.loss_chunk[0])]
        if levers.recompute:
            others.append(self._border(replace(levers, loss_chunk=space.loss_chunk[-1]), found).levers)
        for other in map(evaluator.evaluate, others):
            if evaluator.fits(other) and other.step_seconds < _WORTH * found.step_seconds:
                found = other
        if not found.levers.recompute:
            return found
        kept = evaluator.evaluate(replace(found.levers, keep_attention=space.keep_attention[-1]))
        return kept if evaluator.fits(kept) and kept.step_seconds < _WORTH * found.step_seconds else found

    def _frugal(self) -> Levers:
        """Adds the costlier levers one after another, until the candidate fits or none is left."""
        space = self.space
        plain = replace(space.levers(space.micro_batch[0], space.recompute[-1]), loss_chunk=space.loss_chunk[-1])
        offloaded = replace(plain, offload=space.offload[-1] and plain.recompute > 0)
        tiled = replace(plain, mlp_tiles=space.mlp_tiles[-1])
        for levers in (offloaded, tiled):
            if self.evaluator.fits(self.evaluator.evaluate(levers)):
                return levers
        return space.most_frugal()

    def reasons(self, candidate: Candidate) -> dict[str, str]:
        levers, space = candidate.levers, self.space
        is_whole, is_partial = levers.micro_batch == space.micro_batch[-1], levers.recompute < self.evaluator.num_layers
        rows = "the whole step at once fits" if is_whole else "the fastest of those that fit"
        recompute = "the fewest that fit" if is_partial else "all are needed"
        attention = "saves more time than it costs memory" if levers.keep_attention else "not worth its memory here"
        whole_loss = levers.loss_chunk is None
        searched = {
            "micro_batch": rows if self.evaluator.fits(candidate) else "the smallest, since nothing fits",
            "recompute": recompute if levers.recompute else "no layer needs it",
            "keep_attention": attention,
            "loss_chunk": "all logits at once fit" if whole_loss else "memory is better spent elsewhere",
            "offload": "needed to fit" if levers.offload else "not needed",
            "mlp_tiles": "needed to fit" if levers.mlp_tiles > 1 else "not needed",
        }
        others = {
            "adapter_inputs": f"products are computed in {candidate.cfg.precision}",
            "packing": space.packing_reason,
            "kernels": space.kernels_reason,
            "update": "not requested",
            "compile": "not requested",
        }
        found = {name: f"searched: {reason}" for name, reason in searched.items()} | others
        return found | dict.fromkeys(space.fixed, ASKED)
