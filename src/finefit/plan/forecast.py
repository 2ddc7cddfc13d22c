"""The forecast of one stage on one target: levers chosen, memory and time foretold, changes suggested."""

import math
import re
from dataclasses import replace
from typing import Any, Literal

from finefit.artifacts.records import Forecast, GradientMap, Lengths, Suggestion
from finefit.errors import ModelError
from finefit.facts.cards import CARD_KINDS
from finefit.model.attention import can_pack
from finefit.plan.look import Look, Looker
from finefit.plan.search import Choice, choose, freedom_of
from finefit.plan.suggest import suggest
from finefit.plan.target import USABLE, Target
from finefit.rehearse.clock import total_flops
from finefit.rehearse.rehearsal import Rehearsed, Scene, Size, read_config, rehearse_generation, survey
from finefit.rehearse.shard import Sharding
from finefit.rehearse.trace import OUTSIDE, Block
from finefit.spec.schema import Full, Spec
from finefit.spec.schema import Levers as AskedLevers

_BESIDE = 3
"""Checkpoints that may lie beside those that are kept: the best, the one that a run resumed from, the one that is being written."""
_HOST_BYTES = 3 << 29
"""Of a training process with torch, transformers and CUDA's libraries, without a model."""


def make_forecast(spec: Spec, config: dict[str, Any], lengths: Lengths, target: Target, memo: dict[str, Rehearsed] | None = None) -> Forecast:
    """`memo`: what was rehearsed for other targets."""
    packing = decide_packing(spec.data.packing, config, lengths.longest, target.device)
    scene = _scene(spec, config, lengths, target, packing)
    looker, choice = _chosen(spec, lengths, scene, target, packing, {} if memo is None else memo)
    return _forecast(spec, lengths, looker, choice)


def decide_packing(asked: Literal["auto", "best_fit", "none"], config: dict[str, Any], longest: int, device: str) -> tuple[bool, str]:
    """Whether rows are packed, and why. It is exact, so `auto` packs where that can be done and its forecast has been held against the truth."""
    if asked == "none":
        return False, "data.packing is none"
    problem = can_pack(read_config(config), longest)
    if problem is not None and asked == "best_fit":
        raise ModelError(f"data.packing is best_fit, but {problem}", "set data.packing to auto, which packs where it can, or to none")
    if problem is not None:
        return False, problem
    if device == "cuda" and asked == "auto":
        return False, "on a card only where data.packing is best_fit, until its forecast has been measured on one"
    return True, "data.packing asks for it" if asked == "best_fit" else "no padding, the same gradient"


def _scene(spec: Spec, config: dict[str, Any], lengths: Lengths, target: Target, packing: tuple[bool, str]) -> Scene:
    asked = AskedLevers() if spec.levers == "auto" else spec.levers
    first = freedom_of(asked, rows=_rows_per_step(spec, lengths), supervised=1, num_layers=0, precision=target.precision, device=target.device)
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
        rows_per_step=_rows_per_step(spec, lengths),
        validation=_validation(spec, lengths),
    )


def _validation(spec: Spec, lengths: Lengths) -> tuple[int, int] | None:
    """As counted, or where it was not as the training rows are."""
    return (lengths.validation or (lengths.longest, lengths.supervised)) if spec.data.validation is not None else None


def _rows_per_step(spec: Spec, lengths: Lengths) -> int:
    """No step has more rows than there are."""
    return min(spec.global_batch, lengths.num_rows or spec.global_batch)


def _chosen(
    spec: Spec, lengths: Lengths, scene: Scene, target: Target, packing: tuple[bool, str], memo: dict[str, Rehearsed]
) -> tuple[Looker, Choice]:
    """On several cards the mildest sharding that fits."""
    shardings: tuple[Sharding, ...] = ("none",) if target.count == 1 else ("ddp", "zero2", "zero3")
    asked = AskedLevers() if spec.levers == "auto" else spec.levers
    rows = -(-_rows_per_step(spec, lengths) // target.count)
    for sharding in shardings:
        looker = Looker(scene=scene, target=target, rows_per_step=rows, sharding=sharding, memo=memo)
        freedom = freedom_of(
            asked, rows=rows, supervised=scene.supervised, num_layers=looker.num_layers, precision=target.precision, device=target.device
        )
        choice = choose(looker, replace(freedom, packing=packing[0], packing_reason=packing[1]))
        if choice.fits:
            break
    return looker, choice


def _forecast(spec: Spec, lengths: Lengths, looker: Looker, choice: Choice) -> Forecast:
    look, target = choice.look, looker.target
    trace, answer = look.rehearsed.trace, look.replay
    block = trace.blocks[trace.events[answer.peak_at][0]]
    size = survey(looker.scene)
    seconds = _usual_seconds(looker, look, lengths) if target.rates else None
    steps = _total_steps(spec, lengths)
    tokens = lengths.mean * _rows_per_step(spec, lengths)
    total = seconds * steps if seconds is not None and steps is not None else None
    reserved = answer.reserved_bytes if target.device == "cuda" else answer.allocated_bytes
    generation = _generation_bytes(spec, lengths, looker)
    disk = _checkpoint_bytes(spec, size) * (spec.save.keep + _BESIDE)
    peak = max(look.peak_bytes, _held(target, generation))
    suggestions = suggest(looker, choice) if not choice.fits else _smaller_answers(spec, lengths, looker, peak)
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
        peak_module=_placed(block),
        peak_operation=block.operation,
        components=trace.components(answer.peak_at),
        instants=_instants(trace.peaks(), generation),
        levers=look.levers,
        reasons=choice.reasons,
        accumulation=_accumulation(look, lengths, looker.rows_per_step),
        tokens_per_step=tokens,
        step_seconds=seconds,
        tokens_per_second=tokens / seconds if seconds else None,
        total_steps=steps,
        total_seconds=total,
        price_per_hour=target.price_per_hour,
        cost=target.price_per_hour * total / 3600 if target.price_per_hour is not None and total is not None else None,
        flops_per_step=total_flops(trace) / (2 if look.scene.accumulates else 1) * looker.rows_per_step / look.levers.micro_batch * target.count,
        host_bytes=peak if target.device == "cpu" else _HOST_BYTES + trace.host_bytes + _checkpoint_bytes(spec, size),
        disk_bytes=disk,
        parameters=size.parameters,
        trainable_parameters=size.trainable,
        lengths=lengths,
        gradients=GradientMap(
            trainable=size.trainable_tensors,
            reached=size.trainable_tensors - len(look.rehearsed.unreached),
            unreached=look.rehearsed.unreached,
            causes=look.rehearsed.causes,
            frozen=look.rehearsed.frozen,
        ),
        suggestions=suggestions,
        notes=(*target.notes, *_sharding_notes(looker), *_generation_notes(look, peak), *_larger_cards(target, choice, peak, suggestions)),
    )


def _placed(block: Block) -> str:
    """The module with the number of the layer that it stands for: only a few layers were executed."""
    return block.module if block.unit == OUTSIDE else re.sub(r"\.\d+\b", f".{block.unit}", block.module, count=1)


def _usual_seconds(looker: Looker, look: Look, lengths: Lengths) -> float:
    """Of a step with rows of mean length; memory is planned for the longest."""
    mean = max(2, round(lengths.mean))
    if mean >= 0.98 * lengths.longest:
        return look.step_seconds
    usual = replace(looker.scene, tokens=mean, supervised=min(mean - 1, max(1, round(lengths.mean_supervised))))
    levers = look.levers
    if levers.packing:  # as many usual rows as a pack of the longest holds
        levers = replace(levers, micro_batch=min(looker.rows_per_step, levers.micro_batch * lengths.longest // mean))
    return looker.look(levers, scene=usual).step_seconds


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


def _held(target: Target, reserved: int) -> int:
    """What a card must hold for a process that reserves so much; nothing for one that is not started."""
    return reserved + int(reserved * target.margin) + target.margin_bytes + target.context_bytes if reserved else 0


def _generation_bytes(spec: Spec, lengths: Lengths, looker: Looker, rows: int | None = None) -> int:
    """Evaluations have a process of their own: the longest prompt, and answers as long as the task allows."""
    prompt = lengths.prompt or lengths.longest
    asked = [(rows or e.batch, e.max_new_tokens) for e in spec.evaluate]
    return max((rehearse_generation(looker.scene, rows=n, prompt_tokens=prompt, new_tokens=new) for n, new in asked), default=0)


def _smaller_answers(spec: Spec, lengths: Lengths, looker: Looker, peak: int) -> tuple[Suggestion, ...]:
    """Where training fits and answering does not: fewer answers at a time, which changes none of them."""
    if peak <= looker.target.budget_bytes:
        return ()
    fewer = _held(looker.target, _generation_bytes(spec, lengths, looker, rows=1))
    changes = tuple(f"evaluate.{at}.batch=1" for at in range(len(spec.evaluate)))
    fits = fewer <= looker.target.budget_bytes
    return (Suggestion(changes=changes, saves_bytes=peak - fewer, peak_bytes=fewer, fits=fits, is_exact=True, price="slower evaluation"),)


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


def _instants(peaks: dict[str, int], generation: int) -> dict[str, int]:
    order = ("load", "forward", "loss", "backward", "update", "validation")
    return {name: peaks[name] for name in order if name in peaks} | ({"generation": generation} if generation else {})


def _checkpoint_bytes(spec: Spec, size: Size) -> int:
    """Weights that are trained and two moments for each of them."""
    moments = 2 * size.trainable if spec.optimizer.kind == "adamw_8bit" else 8 * size.trainable
    return (size.weight_bytes if isinstance(spec.tuning, Full) else size.trainable_bytes) + moments


def _sharding_notes(looker: Looker) -> tuple[str, ...]:
    if looker.sharding == "none":
        return ()
    words = {"ddp": "a whole copy on each (DDP)", "zero2": "gradients and optimizer state divided (ZeRO-2)", "zero3": "everything divided (ZeRO-3)"}
    return (
        f"over {looker.target.count} cards: {words[looker.sharding]}; arithmetic on the rehearsed tensors, without the time between cards",
        "`run` trains on one card yet",
    )
