"""The forecast of one stage on one target: levers chosen, memory and time foretold, changes suggested."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any, Literal

from finefit.artifacts.forecasts import Forecast, GradientMap, Lengths, Room, Suggestion, TowerSize
from finefit.errors import ModelError, SpecError
from finefit.model.attention import can_pack
from finefit.model.custom_files import written_in
from finefit.model.load import base_bits
from finefit.plan.custom import narrowed, require_own
from finefit.plan.engine import decide_engine, nodes_of, require_several, shardings_of
from finefit.plan.kernels import decide_kernels
from finefit.plan.look import Look, Looker
from finefit.plan.notes import looking_towers, notes_of
from finefit.plan.rooms import held_bytes, make_rooms, shown_most
from finefit.plan.search import Choice, choose, freedom_of
from finefit.plan.suggest import suggest
from finefit.plan.target import Target
from finefit.rehearse.clock import phase_seconds, total_flops
from finefit.rehearse.fake_model import read_config
from finefit.rehearse.rehearsal import Rehearsed
from finefit.rehearse.scene import Scene
from finefit.rehearse.size import Size, survey
from finefit.spec.models import Lora, Subset
from finefit.spec.schema import DeepSpeed, FullyShard, Spec
from finefit.spec.schema import Levers as AskedLevers
from finefit.step.objective import is_cached

_BESIDE = 3
"""Checkpoints that may lie beside those that are kept: the best, the one that a run resumed from, the one that is being written."""
_HOST_BYTES = 3 << 29
"""Of a training process with torch, transformers and CUDA's libraries, without a model."""


def make_forecast(
    spec: Spec, config: dict[str, Any], lengths: Lengths, target: Target, memo: dict[str, Rehearsed] | None = None
) -> Forecast:
    """`memo`: what was rehearsed for other targets."""
    require_own(spec, config)
    require_several(spec.engine, target.count)
    _require_one_update(spec, lengths, target)
    packing = decide_packing(
        spec.data.packing, config, lengths.longest, target.device, deterministic=spec.deterministic
    )
    scene = _scene(spec, config, lengths, target, packing)
    size = survey(scene)
    _require_divisible(spec, size, target)
    memo, has_experts = {} if memo is None else memo, size.active is not None
    looker, choice = _chosen(
        spec, lengths, scene, target, packing, memo, has_experts=has_experts, is_looking=bool(looking_towers(size))
    )
    return _forecast(spec, lengths, looker, choice, size)


def _require_one_update(spec: Spec, lengths: Lengths, target: Target) -> None:
    """What an update inside backward cannot be rehearsed with, let alone run."""
    if spec.levers == "auto" or spec.levers.update != "inside":
        return
    rows, asked = -(-_rows_per_step(spec, lengths) // target.count), spec.levers.micro_batch
    if asked != "auto" and asked < rows:
        problem = f"levers.update: inside needs the whole step of {rows} rows in one micro-batch, and levers.micro_batch is {asked}"
        raise SpecError(problem, "--set levers.update=after, or a smaller global_batch")
    if target.precision == "fp16":
        problem = f"levers.update: inside cannot take the loss scale of fp16 out of the gradients first, and {target.name} is planned in fp16"
        raise SpecError(problem, "--set levers.update=after, or precision=fp32")


def _require_divisible(spec: Spec, size: Size, target: Target) -> None:
    if isinstance(spec.engine, FullyShard | DeepSpeed) and target.count > 1 and looking_towers(size):
        problem = (
            f"engine.kind {spec.engine.kind} divides gradients while backward goes on, and a rank whose rows have no image has none for the towers "
            f"{', '.join(looking_towers(size))}: the others would wait for it"
        )
        raise SpecError(problem, "set engine.kind: ddp, or train the language tower alone")
    is_zero3 = isinstance(spec.engine, DeepSpeed) and spec.engine.stage == 3
    if is_zero3 and target.count > 1 and size.active is not None and isinstance(spec.tuning, Subset):
        problem = "engine.kind deepspeed with stage 3 loses the gradient of a router whose mixture is frozen: its weight is given back too early"
        raise SpecError(problem, "set engine.kind: fsdp2, which divides weights too")


def decide_packing(
    asked: Literal["auto", "best_fit", "none"],
    config: dict[str, Any],
    longest: int,
    device: str,
    *,
    deterministic: bool = False,
) -> tuple[bool, str]:
    """Whether rows are packed, and why. It is exact, so `auto` packs where that can be done and its forecast has been held against the truth."""
    if asked == "none":
        return False, "data.packing is none"
    if written_in(config) is not None:
        return False, "a model of your own makes its inputs itself"
    problem = can_pack(read_config(config), longest)
    if problem is not None and asked == "best_fit":
        raise ModelError(
            f"data.packing is best_fit, but {problem}", "set data.packing to auto, which packs where it can, or to none"
        )
    if problem is not None:
        return False, problem
    if device == "cuda" and asked == "auto" and deterministic:
        return False, "on a card not where deterministic is asked for: what its kernel takes then is not known"
    return True, "data.packing asks for it" if asked == "best_fit" else "no padding, the same gradient"


def _scene(spec: Spec, config: dict[str, Any], lengths: Lengths, target: Target, packing: tuple[bool, str]) -> Scene:
    asked = AskedLevers() if spec.levers == "auto" else spec.levers
    first = freedom_of(
        asked,
        rows=_rows_per_step(spec, lengths),
        supervised=1,
        num_layers=0,
        precision=target.precision,
        device=target.device,
    )
    return Scene(
        config=config,
        tuning=spec.tuning,
        optimizer=spec.optimizer,
        device=target.device,
        capability=target.capability,
        precision=target.precision,
        levers=replace(first.levers(1, 0), packing=packing[0]),
        tokens=lengths.longest,
        supervised=lengths.supervised,
        accumulates=False,
        objective=spec.objective,
        rows_per_step=_rows_per_step(spec, lengths),
        validation=_validation(spec, lengths),
        grids=lengths.grids,
        is_deterministic=spec.deterministic,
    )


def _validation(spec: Spec, lengths: Lengths) -> tuple[int, int] | None:
    """As counted, or where it was not as the training rows are."""
    return (lengths.validation or (lengths.longest, lengths.supervised)) if spec.data.validation is not None else None


def _rows_per_step(spec: Spec, lengths: Lengths) -> int:
    """No step has more rows than there are."""
    return min(spec.global_batch, lengths.num_rows or spec.global_batch)


def _chosen(
    spec: Spec,
    lengths: Lengths,
    scene: Scene,
    target: Target,
    packing: tuple[bool, str],
    memo: dict[str, Rehearsed],
    *,
    has_experts: bool,
    is_looking: bool,
) -> tuple[Looker, Choice]:
    """Where the engine is free to choose, the mildest sharding that fits. `is_looking`: whether a tower is trained that some rows may not reach."""
    asked = AskedLevers() if spec.levers == "auto" else spec.levers
    rows = -(-_rows_per_step(spec, lengths) // target.count)
    for sharding in shardings_of(
        spec.engine, target.count, can_divide=_can_divide(spec) and not is_looking and written_in(scene.config) is None
    ):
        looker = Looker(
            scene=scene, target=target, rows_per_step=rows, sharding=sharding, has_experts=has_experts, memo=memo
        )
        freedom = freedom_of(
            asked,
            rows=rows,
            supervised=scene.sides * scene.supervised,
            num_layers=looker.num_layers,
            precision=target.precision,
            device=target.device,
            has_experts=has_experts,
        )
        if sharding == "zero3":  # gathers weights anew inside what is computed again
            freedom = replace(freedom, keep_attention=freedom.keep_attention[:1], mlp_tiles=freedom.mlp_tiles[:1])
        if (found := written_in(scene.config)) is not None:
            choice = choose(looker, replace(narrowed(freedom, found), packing_reason=packing[1]))
        else:
            kernels, why = decide_kernels(asked, target, sharding, has_experts=has_experts)
            choice = choose(
                looker,
                replace(freedom, packing=packing[0], packing_reason=packing[1], kernels=kernels, kernels_reason=why),
            )
        if choice.fits:
            break
    return looker, choice


def _forecast(spec: Spec, lengths: Lengths, looker: Looker, choice: Choice, size: Size) -> Forecast:
    look, target = choice.look, looker.target
    trace, answer = look.rehearsed.trace, look.replay
    block = trace.blocks[trace.events[answer.peak_at][0]]
    seconds = _usual_seconds(looker, look, lengths) if target.rates else None
    steps = _total_steps(spec, lengths)
    tokens = lengths.mean * looker.scene.sides * _rows_per_step(spec, lengths)
    total = (
        seconds * steps + _caching_seconds(looker, look, lengths) if seconds is not None and steps is not None else None
    )
    reserved = answer.reserved_bytes if target.device == "cuda" else answer.allocated_bytes
    prompts, most = lengths.prompt or lengths.longest, shown_most(lengths)
    rooms = make_rooms(looker.scene, target, spec.evaluate, prompt_tokens=prompts, devices=target.count, grids=most)
    generation = max((room.reserved_bytes or 0 for room in rooms.values()), default=0)
    disk = _checkpoint_bytes(spec, size, looker.scene.config) * _num_checkpoints(spec, steps)
    peak = max(look.peak_bytes, held_bytes(target, _needed(spec, rooms, target)))
    suggestions = suggest(looker, choice) if not choice.fits else _smaller_answers(spec, lengths, looker, peak)
    engine, why = decide_engine(spec.engine, looker.sharding, target.count // nodes_of(spec.launcher), fits=choice.fits)
    return Forecast(
        card=target.name,
        devices=target.count,
        fits=choice.fits and peak <= target.budget_bytes,
        budget_bytes=target.budget_bytes,
        peak_bytes=peak,
        allocated_bytes=answer.allocated_bytes,
        reserved_bytes=reserved,
        context_bytes=target.context_bytes,
        margin_bytes=peak - reserved - target.context_bytes,
        peak_instant=block.instant if peak == look.peak_bytes else "generation",
        peak_module=block.module,
        peak_operation=block.operation,
        components=trace.components(answer.peak_at),
        instants=_instants(trace.peaks(), generation),
        levers=look.levers,
        engine=engine,
        reasons=choice.reasons | {"engine": why},
        accumulation=_accumulation(look, lengths, looker.rows_per_step),
        tokens_per_step=tokens,
        step_seconds=seconds,
        tokens_per_second=tokens / seconds if seconds else None,
        total_steps=steps,
        total_seconds=total,
        price_per_hour=target.price_per_hour,
        cost=target.price_per_hour * total / 3600 if target.price_per_hour is not None and total is not None else None,
        flops_per_step=total_flops(trace)
        / (2 if look.scene.accumulates else 1)
        * looker.rows_per_step
        / look.levers.micro_batch
        * target.count,
        host_bytes=_host_bytes(spec, looker, look, size, peak),
        disk_bytes=disk,
        parameters=size.parameters,
        trainable_parameters=size.trainable,
        active_parameters=size.active,
        towers=_towers(size, look.rehearsed.unreached),
        lengths=lengths,
        gradients=GradientMap(
            trainable=size.trainable_tensors,
            reached=size.trainable_tensors - len(look.rehearsed.unreached),
            unreached=look.rehearsed.unreached,
            causes=look.rehearsed.causes,
            frozen=look.rehearsed.frozen,
        ),
        suggestions=suggestions,
        rooms=rooms,
        notes=notes_of(spec, lengths, looker, choice, size, engine, peak, suggestions),
    )


def _host_bytes(spec: Spec, looker: Looker, look: Look, size: Size, peak: int) -> int:
    """Of all processes on this machine."""
    processes = looker.target.count // nodes_of(spec.launcher)
    whole = (
        size.weight_bytes if looker.sharding in ("fsdp2", "zero3") else 0
    )  # each loads all weights here, and then moves its part
    if looker.target.device == "cpu":
        return processes * max(peak, whole + looker.target.context_bytes)
    return processes * (_HOST_BYTES + whole + look.rehearsed.trace.host_bytes + size.paged_bytes) + _checkpoint_bytes(
        spec, size, looker.scene.config
    )


def _caching_seconds(looker: Looker, look: Look, lengths: Lengths) -> float:
    """Before the first step: every row once through the model, where the reference is kept."""
    scene, rates = looker.scene, looker.target.rates
    if not is_cached(scene.objective, scene.tuning) or rates is None or lengths.num_rows is None:
        return 0.0
    phases = phase_seconds(look.rehearsed.trace, rates)
    once = (phases["forward"] + phases["loss"]) / (2 if look.scene.accumulates else 1)
    share = lengths.mean / lengths.longest
    return once * share * lengths.num_rows / (look.levers.micro_batch * looker.target.count)


def _usual_seconds(looker: Looker, look: Look, lengths: Lengths) -> float:
    """Of a step with rows of mean length; memory is planned for the longest."""
    mean = max(2, round(lengths.mean))
    if mean >= 0.98 * lengths.longest:
        return look.step_seconds
    usual = replace(
        looker.scene, tokens=mean, supervised=min(mean - 1, max(1, round(lengths.mean_supervised))), grids=()
    )
    levers = look.levers
    if levers.packing:  # as many usual rows as a pack of the longest holds
        levers = replace(levers, micro_batch=min(looker.rows_per_step, levers.micro_batch * lengths.longest // mean))
    return looker.look(levers, scene=usual).step_seconds + _looking_seconds(looker, look) * mean / lengths.longest


def _looking_seconds(looker: Looker, look: Look) -> float:
    """Of a step whose rows all show as much as any; a row shows less as it is shorter."""
    if not looker.scene.grids:
        return 0.0
    return max(
        0.0,
        looker.look(look.levers).step_seconds
        - looker.look(look.levers, scene=replace(looker.scene, grids=())).step_seconds,
    )


def _accumulation(look: Look, lengths: Lengths, rows: int) -> int:
    """Micro-batches of a usual step; packs are as full as best fit makes them."""
    if not look.levers.packing:
        return look.accumulation
    return max(1, math.ceil(rows * lengths.mean / (look.levers.micro_batch * lengths.longest)))


def _total_steps(spec: Spec, lengths: Lengths) -> int | None:
    if spec.schedule.steps is not None:
        return spec.schedule.steps
    if lengths.num_rows is None:
        return None
    return (spec.schedule.epochs or 1) * math.ceil(lengths.num_rows / spec.global_batch)


def _needed(spec: Spec, rooms: dict[str, Room], target: Target) -> int:
    """By the evaluations, beyond what they take because it is there: a batch that is asked for, and one answer that does not fit."""
    asked = {evaluation.label for evaluation in spec.evaluate if evaluation.batch != "auto"}
    sizes = {label: room.reserved_bytes or 0 for label, room in rooms.items()}
    return max(
        (size for label, size in sizes.items() if label in asked or held_bytes(target, size) > target.budget_bytes),
        default=0,
    )


def _smaller_answers(spec: Spec, lengths: Lengths, looker: Looker, peak: int) -> tuple[Suggestion, ...]:
    """Where training fits and answering does not: as few answers at a time as fit, which changes none of them."""
    asked = [at for at, evaluation in enumerate(spec.evaluate) if evaluation.batch != "auto"]
    if peak <= looker.target.budget_bytes or not asked:
        return ()
    free = [evaluation.model_copy(update={"batch": "auto"}) for evaluation in spec.evaluate]
    prompts, most = lengths.prompt or lengths.longest, shown_most(lengths)
    rooms = make_rooms(
        looker.scene, looker.target, free, prompt_tokens=prompts, devices=looker.target.count, grids=most
    )
    fewer = held_bytes(looker.target, max(room.reserved_bytes or 0 for room in rooms.values()))
    changes = tuple(f"evaluate.{at}.batch=auto" for at in asked)
    fits = fewer <= looker.target.budget_bytes
    return (
        Suggestion(
            changes=changes,
            saves_bytes=peak - fewer,
            peak_bytes=fewer,
            fits=fits,
            is_exact=True,
            price="slower evaluation",
        ),
    )


def _instants(peaks: dict[str, int], generation: int) -> dict[str, int]:
    order = ("load", "reference", "forward", "loss", "backward", "update", "validation")
    return {name: peaks[name] for name in order if name in peaks} | ({"generation": generation} if generation else {})


def _num_checkpoints(spec: Spec, steps: int | None) -> int:
    """That may lie there at once: no more than are ever saved, and the one that a stopped run leaves."""
    most, every = spec.save.keep + _BESIDE, spec.save.every
    return most if steps is None or every.unit != "steps" else min(most, math.ceil(steps / every.count) + 1)


def _checkpoint_bytes(spec: Spec, size: Size, config: dict[str, Any]) -> int:
    """Weights as they are saved, whole where they are the model's own, and two moments for each that is trained. Beside a trained part the rest
    is saved as the base stores it."""
    moments = {"adamw": 2 * size.trainable_bytes, "paged_adamw": 8 * size.trainable}.get(
        spec.optimizer.kind, 2 * size.trainable
    )
    if isinstance(spec.tuning, Subset):
        is_halved = (config.get("dtype") or config.get("torch_dtype")) in ("bfloat16", "float16")
        return size.trainable_bytes + (2 if is_halved else 4) * (size.parameters - size.trainable) + moments
    return (size.trainable_bytes if isinstance(spec.tuning, Lora) else size.weight_bytes) + moments


def _towers(size: Size, unreached: tuple[str, ...]) -> dict[str, TowerSize]:
    missed = Counter(tower for name in unreached for tower, names in size.tower_names.items() if name in names)
    return {tower: replace(found, unreached=missed[tower]) for tower, found in size.towers.items()}


def _can_divide(spec: Spec) -> bool:
    """Weights that are packed into bits and optimizer state in blocks stay whole."""
    return base_bits(spec.tuning) is None and spec.optimizer.kind == "adamw"
