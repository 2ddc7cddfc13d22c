"""What the reader of a forecast must know besides its figures: what is assumed, what a run would refuse, what else
would fit."""

from collections.abc import Iterator
from dataclasses import replace

from finefit.artifacts.forecasts import Lengths, Suggestion
from finefit.facts.card_table import CARD_KINDS
from finefit.model.load import base_bits
from finefit.model.resolve_model import custom_source_in
from finefit.plan.search import Candidate, CandidateEvaluator, SearchResult
from finefit.plan.target import NCCL_BYTES, USABLE, Target
from finefit.rehearse.cost_model import phase_seconds
from finefit.rehearse.fake_images import image_tokens
from finefit.rehearse.fake_model import ModelFootprint
from finefit.rehearse.step_config import StepConfig
from finefit.spec.models import Lora
from finefit.spec.schema import DeepSpeed, Dpo, Engine, Fsdp2, Spec
from finefit.step.engine_choice import engine_problems
from finefit.step.forward import is_reference_cached

_MORE_CARDS = (2, 4, 8)
_SHARDED = {
    "ddp": "a whole copy on each (DDP)",
    "fsdp2": "weights, gradients and optimizer state divided (FSDP2)",
    "zero2": "gradients and optimizer state divided (DeepSpeed ZeRO-2)",
    "zero3": "weights, gradients and optimizer state divided (DeepSpeed ZeRO-3)",
}


def notes_of(
    spec: Spec,
    lengths: Lengths,
    evaluator: CandidateEvaluator,
    choice: SearchResult,
    size: ModelFootprint,
    engine: Engine,
    peak: int,
    suggestions: tuple[Suggestion, ...],
) -> tuple[str, ...]:
    """`engine`: the one that was decided. `peak`: bytes of all that the run does."""
    candidate = choice.candidate
    refused = engine_problems(engine, spec.tuning, spec.optimizer, candidate.levers)
    return (
        *evaluator.target.notes,
        *_sharding_notes(evaluator, spec),
        *(f"a run would be refused: {finding.problem} ({finding.remedy})" for finding in refused),
        *_tuning_notes(spec, size),
        *_tower_notes(spec, size, lengths, evaluator.cfg),
        *_experts_notes(candidate, size),
        *_reference_notes(spec, evaluator, candidate),
        *_divided_notes(evaluator, choice),
        *(("generating answers in the evaluation needs more than training",) if peak > candidate.peak_bytes else ()),
        *_larger_cards(evaluator.target, choice, peak, suggestions),
    )


def image_towers(size: ModelFootprint) -> list[str]:
    """Trained towers that only rows with images reach."""
    return [tower for tower, found in size.towers.items() if tower != "language" and found.tensors]


def _sharding_notes(evaluator: CandidateEvaluator, spec: Spec) -> Iterator[str]:
    target, sharding = evaluator.target, evaluator.sharding
    if sharding == "none":
        return
    what = "processes" if target.device == "cpu" else "cards"
    how = "arithmetic on the rehearsed tensors, without the time of communication"
    yield f"over {target.count} {what}: {_SHARDED[sharding]}; {how}"
    if target.device == "cuda":
        yield f"{NCCL_BYTES >> 20} MiB are assumed for the buffers of NCCL"
    if isinstance(spec.engine, DeepSpeed) and spec.engine.config is not None:
        yield f"the forecast does not know the buckets of {spec.engine.config}; it assumes finefit's own"


def _tuning_notes(spec: Spec, size: ModelFootprint) -> Iterator[str]:
    bits, experts_gib = base_bits(spec.tuning), size.expert_bytes / 2**30
    if size.paged_bytes:
        paged = f"{size.paged_bytes / 2**30:.2f} GiB of paged moments"
        yield f"{paged} stay on the card while there is room, else in host memory, where they are counted"
    if bits == 8:
        yield (
            "in 8 bits the input of every adapted layer is kept even where the layer is recomputed; columns with "
            "outliers take more"
        )
    if bits and size.expert_bytes:
        packs = "bitsandbytes quantises linear layers only"
        yield f"the experts ({experts_gib:.2f} GiB) are not quantised to {bits} bits: {packs}"
    if isinstance(spec.tuning, Lora) and size.expert_bytes:
        yield (
            "the experts carry no adapter and are not trained: several share one tensor, and adapters are for linear "
            "layers only"
        )


def _tower_notes(spec: Spec, size: ModelFootprint, lengths: Lengths, cfg: StepConfig) -> Iterator[str]:
    """Of a vision-language model."""
    if not size.towers:
        return
    if isinstance(spec.tuning, Lora) and not isinstance(spec.tuning.targets, dict):
        yield "tuning.targets without towers mean the language tower: vision and projector are not trained"
    if bits := base_bits(spec.tuning):
        yield f"the language tower is quantised to {bits} bits, vision and projector are not"
    if size.unused and "vision" in image_towers(size):
        yield f"features are taken before {', '.join(size.unused)}: no image passes there, and nothing there is trained"
    if not lengths.grids:
        yield "no row has an image: the vision tower is never called"
        return
    tokens = image_tokens(cfg.config, lengths.grids)
    most = f"{tokens:,} image tokens ({len(lengths.grids)} images)"
    yield f"the row with the most images has {most}, and the plan assumes as many for every row"


def _experts_notes(candidate: Candidate, size: ModelFootprint) -> Iterator[str]:
    if size.active is None:
        return
    tiles = candidate.levers.mlp_tiles
    untiled = f"; levers.mlp_tiles {tiles} does not apply to them" if tiles > 1 else ""
    single = "; no kernel computes them all at once: each has its own products, and the host waits for the card"
    grouped = candidate.rehearsed.kernels.has_grouped
    yield (
        f"experts: a token uses {size.active:,} of {size.parameters:,} parameters; memory does not depend on the "
        f"routing{untiled}{'' if grouped else single}"
    )


def _reference_notes(spec: Spec, evaluator: CandidateEvaluator, candidate: Candidate) -> Iterator[str]:
    """What a cached reference would save over several epochs; for one epoch it is the same work at another time."""
    rates = evaluator.target.rates
    if not isinstance(spec.objective, Dpo) or is_reference_cached(spec.objective, spec.tuning) or rates is None:
        return
    if (spec.schedule.epochs or 1) > 1:
        phases = phase_seconds(candidate.rehearsed.trace, rates)
        share = phases["reference"] / sum(phases.values())
        once = "objective.reference=cached computes it once for all epochs, with the same numbers"
        yield f"the reference takes {share:.0%} of a step; {once}"


def _divided_notes(evaluator: CandidateEvaluator, choice: SearchResult) -> Iterator[str]:
    """What does not fit on one card may fit on several that divide it."""
    target, cfg = evaluator.target, evaluator.cfg
    if choice.fits or target.count > 1 or target.device == "cpu" or custom_source_in(cfg.config) is not None:
        return
    levers = replace(choice.candidate.levers, kernels="torch")  # fused kernels take undivided weights
    if any(engine_problems(Fsdp2(kind="fsdp2", devices=2), cfg.tuning, cfg.optimizer, levers)):
        return
    for count in _MORE_CARDS:
        divided = replace(target, count=count, context_bytes=target.context_bytes + NCCL_BYTES)
        several = replace(evaluator, target=divided, sharding="fsdp2", known={})
        if several.fits(several.evaluate(levers, is_quick=False)):
            yield f"divided over {count} of these cards it fits as it is: engine={{kind: fsdp2, devices: {count}}}"
            return


def _larger_cards(
    target: Target, choice: SearchResult, peak: int, suggestions: tuple[Suggestion, ...]
) -> Iterator[str]:
    """Where nothing makes it fit: the smallest cards that hold it as it is, and with the best of the changes."""
    if choice.fits or target.device == "cpu" or any(s.fits for s in suggestions):
        return
    least = min((s.peak_bytes for s in suggestions), default=peak)
    needs = {"as it is": peak} | ({"with the best of these changes": least} if least < peak else {})
    found = ", ".join(f"{_smallest_card(num_bytes)} {words}" for words, num_bytes in needs.items())
    yield f"no change makes it fit on {target.name}; the smallest card that holds it: {found}"


def _smallest_card(num_bytes: int) -> str:
    large = [kind for kind in CARD_KINDS if kind.memory_bytes * USABLE >= num_bytes and kind.has_bf16]
    return min(large, key=lambda kind: kind.memory_bytes).name if large else "none in the table"
