"""The forecast of one stage on one target: levers chosen, memory and time predicted, changes suggested."""

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal

from finefit.artifacts.forecasts import EvalBatchLimit, Forecast, GradientMap, Lengths, Suggestion
from finefit.errors import ModelError, SpecError
from finefit.model.attention import can_pack
from finefit.model.load import base_bits
from finefit.model.resolve_model import custom_source_in
from finefit.plan.custom import narrowed, require_custom
from finefit.plan.eval_memory import held_bytes, largest_prompt_grids, make_eval_limits
from finefit.plan.notes import image_towers, notes_of
from finefit.plan.search import Candidate, CandidateEvaluator, SearchResult, choose, decide_kernels, make_search_space
from finefit.plan.suggest import suggest
from finefit.plan.target import Target, decide_engine, nodes_of, require_several, shardings_of
from finefit.rehearse.cost_model import phase_seconds, total_flops
from finefit.rehearse.fake_model import ModelFootprint, measure_size, read_config
from finefit.rehearse.rehearsal import Rehearsal
from finefit.rehearse.step_config import StepConfig
from finefit.spec.models import Lora, Subset
from finefit.spec.schema import DeepSpeed, Evaluation, Fsdp2, LeverSettings, Spec
from finefit.step.forward import is_reference_cached

_INSTANTS = ("load", "reference", "forward", "loss", "backward", "update", "validation")
_BESIDE = 3
"""Checkpoints beside those that are kept: the best, the one that a run resumed from, the one being written."""
_HOST_BYTES = 3 << 29
"""Of a training process with torch, transformers and CUDA's libraries, without a model."""


def make_forecast(
    spec: Spec, config: dict[str, Any], lengths: Lengths, target: Target, memo: dict[str, Rehearsal] | None = None
) -> Forecast:
    """`memo`: what was rehearsed for other targets."""
    require_custom(spec, config)
    require_several(spec.engine, target.count)
    _require_one_update(spec, lengths, target)
    packing = decide_packing(
        spec.data.packing, config, lengths.longest, target.device, deterministic=spec.deterministic
    )
    cfg = _step_config(spec, config, lengths, target, is_packed=packing[0])
    size = measure_size(cfg)
    _require_divisible(spec, size, target)
    evaluator, choice = _searched(spec, lengths, cfg, target, packing, {} if memo is None else memo, size)
    return _Verdict(spec, lengths, evaluator, choice, size, target, choice.candidate).forecast()


def _require_one_update(spec: Spec, lengths: Lengths, target: Target) -> None:
    """Refuses what an update inside backward cannot be rehearsed with, let alone run."""
    if spec.levers == "auto" or spec.levers.update != "inside":
        return
    rows, asked = -(-_rows_per_step(spec, lengths) // target.count), spec.levers.micro_batch
    if asked != "auto" and asked < rows:
        need = f"levers.update: inside needs the whole step of {rows} rows in one micro-batch"
        raise SpecError(
            f"{need}, and levers.micro_batch is {asked}", "--set levers.update=after, or a smaller global_batch"
        )
    if target.precision == "fp16":
        problem = "levers.update: inside cannot take the loss scale of fp16 out of the gradients first"
        raise SpecError(
            f"{problem}, and {target.name} is planned in fp16", "--set levers.update=after, or precision=fp32"
        )


def _require_divisible(spec: Spec, size: ModelFootprint, target: Target) -> None:
    if target.count == 1:
        return
    if isinstance(spec.engine, Fsdp2 | DeepSpeed) and (towers := image_towers(size)):
        problem = (
            f"engine.kind {spec.engine.kind} divides gradients during backward, and a rank whose rows have no image "
            f"has none for the towers {', '.join(towers)}: the others would wait for it"
        )
        raise SpecError(problem, "set engine.kind: ddp, or train the language tower alone")
    is_zero3 = isinstance(spec.engine, DeepSpeed) and spec.engine.stage == 3
    if is_zero3 and size.active is not None and isinstance(spec.tuning, Subset):
        problem = (
            "engine.kind deepspeed with stage 3 loses the gradient of a router whose mixture is frozen: its weight "
            "is released too early"
        )
        raise SpecError(problem, "set engine.kind: fsdp2, which divides weights too")


def decide_packing(
    asked: Literal["auto", "best_fit", "none"],
    config: dict[str, Any],
    longest: int,
    device: str,
    *,
    deterministic: bool = False,
) -> tuple[bool, str]:
    """Whether rows are packed, and why. Packing is exact, so `auto` packs wherever it is possible and its memory has
    been compared with measurements."""
    if asked == "none":
        return False, "data.packing is none"
    if custom_source_in(config) is not None:
        return False, "a custom model makes its own inputs"
    problem = can_pack(read_config(config), longest)
    if problem is not None and asked == "best_fit":
        remedy = "set data.packing to auto, which packs where it can, or to none"
        raise ModelError(f"data.packing is best_fit, but {problem}", remedy)
    if problem is not None:
        return False, problem
    if device == "cuda" and asked == "auto" and deterministic:
        return False, "not with deterministic on a card: the memory of its kernel is not known there"
    return True, "data.packing asks for it" if asked == "best_fit" else "no padding, the same gradient"


def _step_config(
    spec: Spec, config: dict[str, Any], lengths: Lengths, target: Target, *, is_packed: bool
) -> StepConfig:
    rows, validation = _rows_per_step(spec, lengths), lengths.validation or (lengths.longest, lengths.supervised)
    space = make_search_space(
        _settings(spec), rows=rows, supervised=1, num_layers=0, precision=target.precision, device=target.device
    )
    return StepConfig(
        config=config,
        tuning=spec.tuning,
        optimizer=spec.optimizer,
        device=target.device,
        capability=target.capability,
        precision=target.precision,
        levers=replace(space.levers(1, 0), packing=is_packed),
        tokens=lengths.longest,
        supervised=lengths.supervised,
        accumulates=False,
        objective=spec.objective,
        rows_per_step=rows,
        validation=validation if spec.data.validation is not None else None,
        grids=lengths.grids,
        is_deterministic=spec.deterministic,
    )


def _settings(spec: Spec) -> LeverSettings:
    return LeverSettings() if spec.levers == "auto" else spec.levers


def _rows_per_step(spec: Spec, lengths: Lengths) -> int:
    """No step has more rows than there are."""
    return min(spec.global_batch, lengths.num_rows or spec.global_batch)


def _searched(
    spec: Spec,
    lengths: Lengths,
    cfg: StepConfig,
    target: Target,
    packing: tuple[bool, str],
    memo: dict[str, Rehearsal],
    size: ModelFootprint,
) -> tuple[CandidateEvaluator, SearchResult]:
    """Where the engine is free to choose, with the mildest sharding that fits."""
    asked, custom, has_experts = _settings(spec), custom_source_in(cfg.config), size.active is not None
    rows = -(-_rows_per_step(spec, lengths) // target.count)
    is_plain = (
        base_bits(spec.tuning) is None and spec.optimizer.kind == "adamw"
    )  # no packed weights, no state in blocks
    can_divide = is_plain and not image_towers(size) and custom is None
    for sharding in shardings_of(spec.engine, target.count, can_divide=can_divide):
        evaluator = CandidateEvaluator(
            cfg=cfg, target=target, rows_per_step=rows, sharding=sharding, has_experts=has_experts, memo=memo
        )
        space = make_search_space(
            asked,
            rows=rows,
            supervised=cfg.sides * cfg.supervised,
            num_layers=evaluator.num_layers,
            precision=target.precision,
            device=target.device,
            has_experts=has_experts,
        )
        if sharding == "zero3":  # gathers weights again during recomputation
            space = replace(space, keep_attention=space.keep_attention[:1], mlp_tiles=space.mlp_tiles[:1])
        if custom is not None:
            space = replace(narrowed(space, custom), packing_reason=packing[1])
        else:
            kernels, why = decide_kernels(asked, target, sharding, has_experts=has_experts)
            space = replace(space, packing=packing[0], packing_reason=packing[1], kernels=kernels, kernels_reason=why)
        choice = choose(evaluator, space)
        if choice.fits:
            break
    return evaluator, choice


@dataclass(frozen=True, slots=True)
class _Verdict:
    spec: Spec
    lengths: Lengths
    evaluator: CandidateEvaluator
    choice: SearchResult
    size: ModelFootprint
    target: Target
    candidate: Candidate

    def forecast(self) -> Forecast:
        spec, lengths, evaluator, choice, size = self.spec, self.lengths, self.evaluator, self.choice, self.size
        candidate, target, rehearsed = self.candidate, self.target, self.candidate.rehearsed
        trace, answer = rehearsed.trace, candidate.replay
        block = trace.blocks[trace.events[answer.peak_at][0]]
        seconds = self._mean_step_seconds() if target.rates else None
        steps = self._total_steps()
        tokens = lengths.mean * evaluator.cfg.sides * _rows_per_step(spec, lengths)
        total = seconds * steps + self._caching_seconds() if seconds is not None and steps is not None else None
        price = target.price_per_hour
        reserved = answer.reserved_bytes if target.device == "cuda" else answer.allocated_bytes
        eval_limits = self._eval_limits(spec.evaluate)
        generation = max((limit.reserved_bytes or 0 for limit in eval_limits.values()), default=0)
        peak = max(candidate.peak_bytes, held_bytes(target, self._eval_bytes(eval_limits)))
        suggestions = suggest(evaluator, choice) if not choice.fits else self._smaller_answers(peak)
        per_node = target.count // nodes_of(spec.launcher)
        engine, why = decide_engine(spec.engine, evaluator.sharding, per_node, fits=choice.fits)
        owners = {name: tower for tower, names in size.tower_names.items() for name in names}
        missed = Counter(owners[name] for name in rehearsed.unreached if name in owners)
        peaks = trace.peaks()
        instants = {name: peaks[name] for name in _INSTANTS if name in peaks}
        # no more than are ever saved, and the one that a stopped run leaves
        num_checkpoints, every = spec.save.keep + _BESIDE, spec.save.every
        if steps is not None and every.unit == "steps":
            num_checkpoints = min(num_checkpoints, math.ceil(steps / every.count) + 1)
        micro_batches = 2 if candidate.cfg.accumulates else 1
        flops = total_flops(trace) / micro_batches * evaluator.rows_per_step / candidate.levers.micro_batch
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
            peak_instant=block.instant if peak == candidate.peak_bytes else "generation",
            peak_module=block.module,
            peak_operation=block.operation,
            components=trace.components(answer.peak_at),
            instants=instants | ({"generation": generation} if generation else {}),
            levers=candidate.levers,
            engine=engine,
            reasons=choice.reasons | {"engine": why},
            accumulation=self._accumulation(),
            tokens_per_step=tokens,
            step_seconds=seconds,
            tokens_per_second=tokens / seconds if seconds else None,
            total_steps=steps,
            total_seconds=total,
            price_per_hour=price,
            cost=price * total / 3600 if price is not None and total is not None else None,
            flops_per_step=flops * target.count,
            host_bytes=self._host_bytes(peak),
            disk_bytes=self._checkpoint_bytes() * num_checkpoints,
            parameters=size.parameters,
            trainable_parameters=size.trainable,
            active_parameters=size.active,
            towers={name: replace(tower, unreached=missed[name]) for name, tower in size.towers.items()},
            lengths=lengths,
            gradients=GradientMap(
                trainable=size.trainable_tensors,
                reached=size.trainable_tensors - len(rehearsed.unreached),
                unreached=rehearsed.unreached,
                causes=rehearsed.causes,
                frozen=rehearsed.frozen,
            ),
            suggestions=suggestions,
            eval_limits=eval_limits,
            notes=notes_of(spec, lengths, evaluator, choice, size, engine, peak, suggestions),
        )

    def _host_bytes(self, peak: int) -> int:
        """Of all processes on this machine."""
        target, size = self.target, self.size
        processes = target.count // nodes_of(self.spec.launcher)
        # each process loads all weights here before it moves its part
        whole = size.weight_bytes if self.evaluator.sharding in ("fsdp2", "zero3") else 0
        if target.device == "cpu":
            return processes * max(peak, whole + target.context_bytes)
        own = _HOST_BYTES + whole + self.candidate.rehearsed.trace.host_bytes + size.paged_bytes
        return processes * own + self._checkpoint_bytes()

    def _caching_seconds(self) -> float:
        """Before the first step: every row once through the model, where the reference is cached."""
        cfg, rates, lengths, candidate = self.evaluator.cfg, self.target.rates, self.lengths, self.candidate
        if not is_reference_cached(cfg.objective, cfg.tuning) or rates is None or lengths.num_rows is None:
            return 0.0
        phases = phase_seconds(candidate.rehearsed.trace, rates)
        once = (phases["forward"] + phases["loss"]) / (2 if candidate.cfg.accumulates else 1)
        share = lengths.mean / lengths.longest
        return once * share * lengths.num_rows / (candidate.levers.micro_batch * self.target.count)

    def _mean_step_seconds(self) -> float:
        """Of a step with rows of mean length; memory is planned for the longest."""
        evaluator, lengths, levers = self.evaluator, self.lengths, self.candidate.levers
        mean = max(2, round(lengths.mean))
        if mean >= 0.98 * lengths.longest:
            return self.candidate.step_seconds
        supervised = min(mean - 1, max(1, round(lengths.mean_supervised)))
        usual = replace(evaluator.cfg, tokens=mean, supervised=supervised, grids=())
        if levers.packing:  # as many mean rows as a pack of the longest holds
            rows = min(evaluator.rows_per_step, levers.micro_batch * lengths.longest // mean)
            levers = replace(levers, micro_batch=rows)
        return evaluator.evaluate(levers, cfg=usual).step_seconds + self._image_seconds() * mean / lengths.longest

    def _image_seconds(self) -> float:
        """Of a step whose rows all have as many image tokens as any; shorter rows have fewer."""
        evaluator, levers = self.evaluator, self.candidate.levers
        if not evaluator.cfg.grids:
            return 0.0
        without = evaluator.evaluate(levers, cfg=replace(evaluator.cfg, grids=()))
        return max(0.0, evaluator.evaluate(levers).step_seconds - without.step_seconds)

    def _accumulation(self) -> int:
        """Micro-batches of a mean step; packs are as full as best fit makes them."""
        candidate, lengths = self.candidate, self.lengths
        if not candidate.levers.packing:
            return candidate.accumulation
        pack = candidate.levers.micro_batch * lengths.longest
        return max(1, math.ceil(self.evaluator.rows_per_step * lengths.mean / pack))

    def _total_steps(self) -> int | None:
        schedule, num_rows = self.spec.schedule, self.lengths.num_rows
        if schedule.steps is not None:
            return schedule.steps
        return None if num_rows is None else (schedule.epochs or 1) * math.ceil(num_rows / self.spec.global_batch)

    def _eval_limits(self, evaluations: tuple[Evaluation, ...]) -> dict[str, EvalBatchLimit]:
        prompts, most = self.lengths.prompt or self.lengths.longest, largest_prompt_grids(self.lengths)
        target = self.target
        return make_eval_limits(
            self.evaluator.cfg, target, evaluations, prompt_tokens=prompts, devices=target.count, grids=most
        )

    def _eval_bytes(self, eval_limits: dict[str, EvalBatchLimit]) -> int:
        """What evaluations need, beyond what they take because it is there: a batch that is asked for, and a single
        answer that does not fit."""
        target, asked = self.target, {one.label for one in self.spec.evaluate if one.batch != "auto"}
        sizes = {label: limit.reserved_bytes or 0 for label, limit in eval_limits.items()}
        needed = (n for label, n in sizes.items() if label in asked or held_bytes(target, n) > target.budget_bytes)
        return max(needed, default=0)

    def _smaller_answers(self, peak: int) -> tuple[Suggestion, ...]:
        """Where training fits and generation does not: as few answers at a time as fit, which changes none of them."""
        target, evaluations = self.target, self.spec.evaluate
        asked = [at for at, evaluation in enumerate(evaluations) if evaluation.batch != "auto"]
        if peak <= target.budget_bytes or not asked:
            return ()
        limits = self._eval_limits(tuple(one.model_copy(update={"batch": "auto"}) for one in evaluations))
        fewer = held_bytes(target, max(limit.reserved_bytes or 0 for limit in limits.values()))
        suggestion = Suggestion(
            changes=tuple(f"evaluate.{at}.batch=auto" for at in asked),
            saves_bytes=peak - fewer,
            peak_bytes=fewer,
            fits=fewer <= target.budget_bytes,
            is_exact=True,
            price="slower evaluation",
        )
        return (suggestion,)

    def _checkpoint_bytes(self) -> int:
        """Weights as they are saved, all of them where they are the model's own, and two moments for each trained one.
        Beside a trained subset the rest is saved as the base stores it."""
        spec, size, config = self.spec, self.size, self.evaluator.cfg.config
        by_kind = {"adamw": 2 * size.trainable_bytes, "paged_adamw": 8 * size.trainable}
        moments = by_kind.get(spec.optimizer.kind, 2 * size.trainable)
        if isinstance(spec.tuning, Subset):
            is_half = (config.get("dtype") or config.get("torch_dtype")) in ("bfloat16", "float16")
            return size.trainable_bytes + (2 if is_half else 4) * (size.parameters - size.trainable) + moments
        return (size.trainable_bytes if isinstance(spec.tuning, Lora) else size.weight_bytes) + moments
