"""What the reader of a forecast must know besides its figures: what is assumed, what a run would refuse, what else would fit."""

from dataclasses import replace

from finefit.artifacts.forecasts import Lengths, Suggestion
from finefit.facts.cards import CARD_KINDS
from finefit.model.custom_files import written_in
from finefit.model.load import base_bits
from finefit.plan.look import Look, Looker
from finefit.plan.search import Choice
from finefit.plan.target import NCCL_BYTES, USABLE, Target
from finefit.rehearse.clock import phase_seconds
from finefit.rehearse.scene import Scene
from finefit.rehearse.showing import image_tokens
from finefit.rehearse.size import Size
from finefit.spec.models import Lora
from finefit.spec.schema import DeepSpeed, Dpo, Engine, FullyShard, Spec
from finefit.step.engines.choose import engine_problems
from finefit.step.objective import is_cached

_MORE_CARDS = (2, 4, 8)


def notes_of(
    spec: Spec,
    lengths: Lengths,
    looker: Looker,
    choice: Choice,
    size: Size,
    engine: Engine,
    peak: int,
    suggestions: tuple[Suggestion, ...],
) -> tuple[str, ...]:
    """`engine`: what it came to. `peak`: of all that the run does, in bytes."""
    return (
        *looker.target.notes,
        *_sharding_notes(looker, spec),
        *_refusal_notes(spec, engine, choice.look),
        *_tuning_notes(spec, size),
        *_tower_notes(spec, size, lengths, looker.scene),
        *_experts_notes(choice.look, size),
        *_reference_notes(spec, looker, choice.look),
        *_divided_notes(looker, choice),
        *_generation_notes(choice.look, peak),
        *_larger_cards(looker.target, choice, peak, suggestions),
    )


def looking_towers(size: Size) -> list[str]:
    """Trained towers that only rows with images reach."""
    return [tower for tower, found in size.towers.items() if tower != "language" and found.tensors]


_SHARDED = {
    "ddp": "a whole copy on each (DDP)",
    "fsdp2": "weights, gradients and optimizer state divided (FSDP2)",
    "zero2": "gradients and optimizer state divided (DeepSpeed ZeRO-2)",
    "zero3": "weights, gradients and optimizer state divided (DeepSpeed ZeRO-3)",
}


def _sharding_notes(looker: Looker, spec: Spec) -> tuple[str, ...]:
    if looker.sharding == "none":
        return ()
    what = "processes" if looker.target.device == "cpu" else "cards"
    found = [
        f"over {looker.target.count} {what}: {_SHARDED[looker.sharding]}; arithmetic on the rehearsed tensors, without the time between them"
    ]
    if looker.target.device == "cuda":
        found.append(f"{NCCL_BYTES >> 20} MiB are taken for the buffers of NCCL, an assumption")
    if isinstance(spec.engine, DeepSpeed) and spec.engine.config is not None:
        found.append(f"the buckets of {spec.engine.config} are not known to the forecast, which takes finefit's own")
    return tuple(found)


def _refusal_notes(spec: Spec, engine: Engine, look: Look) -> tuple[str, ...]:
    """What keeps a run from starting, however well it fits."""
    odd = engine_problems(engine, spec.tuning, spec.optimizer, look.levers)
    return tuple(f"a run would be refused: {finding.problem} ({finding.remedy})" for finding in odd)


def _tuning_notes(spec: Spec, size: Size) -> tuple[str, ...]:
    """What else the reader must know of what was asked for."""
    found = []
    if size.paged_bytes:
        found.append(
            f"{size.paged_bytes / 2**30:.2f} GiB of paged moments lie on the card while there is room, else in host memory; counted there"
        )
    if base_bits(spec.tuning) == 8:
        found.append(
            "in 8 bits the input of every adapted layer is kept even where the layer is computed again; columns with outliers come on top"
        )
    if base_bits(spec.tuning) and size.expert_bytes:
        size_gib = size.expert_bytes / 2**30
        found.append(
            f"the experts ({size_gib:.2f} GiB) are not packed into {base_bits(spec.tuning)} bits: bitsandbytes packs linear layers alone"
        )
    if isinstance(spec.tuning, Lora) and size.expert_bytes:
        found.append(
            "the experts carry no adapter and stay as they are: several lie in one tensor, and adapters are for linear layers alone"
        )
    return tuple(found)


def _tower_notes(spec: Spec, size: Size, lengths: Lengths, scene: Scene) -> tuple[str, ...]:
    """Of a model that sees."""
    if not size.towers:
        return ()
    found = []
    if isinstance(spec.tuning, Lora) and not isinstance(spec.tuning.targets, dict):
        found.append("tuning.targets without towers mean the language tower: vision and projector stay as they are")
    if base_bits(spec.tuning):
        found.append(
            f"the language tower is packed into {base_bits(spec.tuning)} bits, vision and projector stay whole"
        )
    if size.unused and "vision" in looking_towers(size):
        found.append(
            f"features are taken before {', '.join(size.unused)}: no image passes there, and nothing of it is trained"
        )
    shown = image_tokens(scene.config, lengths.grids)
    most = (
        f"the row that shows most has {shown:,} image tokens ({len(lengths.grids)} images), and every row is planned so"
    )
    return (*found, most if lengths.grids else "no row has an image: the vision tower is never called")


def _experts_notes(look: Look, size: Size) -> tuple[str, ...]:
    if size.active is None:
        return ()
    tiles = (
        f"; levers.mlp_tiles {look.levers.mlp_tiles} does nothing to them, they are left whole"
        if look.levers.mlp_tiles > 1
        else ""
    )
    alone = (
        ""
        if look.rehearsed.kernels.has_grouped
        else "; no kernel takes them all at once: each has its own products, and the card is waited for"
    )
    return (
        f"experts: {size.active:,} of {size.parameters:,} parameters meet a token; memory is the same however tokens are routed{tiles}{alone}",
    )


def _reference_notes(spec: Spec, looker: Looker, look: Look) -> tuple[str, ...]:
    """What a kept reference would spare a run of several epochs; for one epoch it is the same work at another time."""
    is_repeated = (spec.schedule.epochs or 1) > 1
    if (
        not isinstance(spec.objective, Dpo)
        or is_cached(spec.objective, spec.tuning)
        or looker.target.rates is None
        or not is_repeated
    ):
        return ()
    phases = phase_seconds(look.rehearsed.trace, looker.target.rates)
    share = phases["reference"] / sum(phases.values())
    return (
        f"the reference takes {share:.0%} of a step; objective.reference=cached computes it once for all epochs, with the same numbers",
    )


def _divided_notes(looker: Looker, choice: Choice) -> tuple[str, ...]:
    """What does not fit on one card may fit on several that divide it."""
    target, scene = looker.target, looker.scene
    if choice.fits or target.count > 1 or target.device == "cpu" or written_in(scene.config) is not None:
        return ()
    levers = replace(choice.look.levers, kernels="torch")  # fused ones take whole weights
    if any(engine_problems(FullyShard(kind="fsdp2", devices=2), scene.tuning, scene.optimizer, levers)):
        return ()
    for count in _MORE_CARDS:
        context = target.context_bytes + NCCL_BYTES
        several = replace(
            looker, target=replace(target, count=count, context_bytes=context), sharding="fsdp2", looks={}
        )
        if several.fits(several.look(levers, is_quick=False)):
            return (f"divided over {count} of these cards it fits as it is: engine={{kind: fsdp2, devices: {count}}}",)
    return ()


def _generation_notes(look: Look, peak: int) -> tuple[str, ...]:
    return ("generating answers in the evaluation needs more than training does",) if peak > look.peak_bytes else ()


def _larger_cards(target: Target, choice: Choice, peak: int, suggestions: tuple[Suggestion, ...]) -> tuple[str, ...]:
    """Where nothing makes it fit: the smallest cards that hold it as it is, and with the best of the changes."""
    if choice.fits or target.device == "cpu" or any(s.fits for s in suggestions):
        return ()
    least = min((s.peak_bytes for s in suggestions), default=peak)
    needs = {"as it is": peak} | ({"with the best of these changes": least} if least < peak else {})
    found = [f"{_smallest_card(num_bytes)} {words}" for words, num_bytes in needs.items()]
    return (f"no change makes it fit on {target.name}; the smallest card that holds it: {', '.join(found)}",)


def _smallest_card(num_bytes: int) -> str:
    large = [kind for kind in CARD_KINDS if kind.memory_bytes * USABLE >= num_bytes and kind.has_bf16]
    return min(large, key=lambda kind: kind.memory_bytes).name if large else "none in the table"
