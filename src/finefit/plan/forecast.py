"""The forecast of one stage on one target: levers are chosen, memory and time predicted, and changes suggested."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from finefit.artifacts.forecasts import EvalBatchLimit, Forecast, GradientMap, Lengths, LeverCandidate, Suggestion
from finefit.custom.inputs import meta_twin
from finefit.errors import ModelError, SpecError
from finefit.model.attention import can_pack
from finefit.model.load import base_bits
from finefit.model.resolve_model import CustomSource, custom_source_in
from finefit.plan.eval_memory import (
    SharedRehearsals,
    held_bytes,
    largest_prompt_grids,
    make_eval_limits,
    step_config,
)
from finefit.plan.search import CandidateEvaluator, SearchResult, choose, decide_kernels, make_search_space
from finefit.plan.suggest import image_towers, notes_of, peak_notes, suggest
from finefit.plan.target import Target, decide_engine, nodes_of, require_several, shardings_of
from finefit.rehearse.cost_model import phase_seconds, total_flops
from finefit.rehearse.fake_model import ModelFootprint, StepConfig, measure_size, read_config
from finefit.spec.models import Lora, Subset
from finefit.spec.schema import DeepSpeed, Dpo, Evaluation, Fsdp2, LeverSettings, Router, Spec
from finefit.spec.tasks import WITH_LIKELIHOODS
from finefit.step.forward import is_reference_cached

_INSTANTS = ("load", "reference", "forward", "loss", "backward", "update", "validation")
_BESIDE = 3
"""Checkpoints in addition to those that are kept: the best, the one that a run resumed from, and the one being
written."""
_HOST_BYTES = 3 << 29
"""Host memory of a training process with torch, transformers and CUDA's libraries, without a model."""
_NOT_FOR_CUSTOM = {"keep_attention": False, "loss_chunk": "none", "offload": "none", "mlp_tiles": 1}
_NOT_FOR_CUSTOM |= {"kernels": "torch", "compile": False, "update": "after"}
"""Levers that act on parts of a language model, and the values that leave a custom model unchanged."""


def make_forecast(
    spec: Spec, config: dict[str, Any], lengths: Lengths, target: Target, shared: SharedRehearsals | None = None
) -> Forecast:
    """`shared`: rehearsals that were made for other targets."""
    require_custom(spec, config)
    require_several(spec.engine, target.count)
    rows = min(spec.global_batch, lengths.num_rows or spec.global_batch)  # no step has more rows than there are
    _require_one_update(spec, -(-rows // target.count), target)
    packing = decide_packing(
        spec.data.packing, config, lengths.longest, target.device, deterministic=spec.deterministic
    )
    asked = LeverSettings() if spec.levers == "auto" else spec.levers
    plainest = make_search_space(asked, target, rows=rows, supervised=1, num_layers=0)
    validation = lengths.validation or (lengths.longest, lengths.supervised)
    cfg = replace(
        step_config(config, spec.tuning, target),
        optimizer=spec.optimizer,
        levers=replace(plainest.levers(1, 0), packing=packing[0]),
        tokens=lengths.longest,
        supervised=lengths.supervised,
        objective=spec.objective,
        rows_per_step=rows,
        validation=validation if spec.data.validation is not None else None,
        grids=lengths.grids,
        is_deterministic=spec.deterministic,
    )
    size = measure_size(cfg)
    _require_divisible(spec, size, target)
    shared = shared or SharedRehearsals()
    choice = _searched(spec, asked, rows, cfg, target, packing, shared, size)
    return _Verdict(spec, lengths, rows, choice, size, shared).forecast()


def require_custom(spec: Spec, config: dict[str, Any]) -> None:
    """Reports all settings that a custom model does not support at once. Does nothing for any other model."""
    found = custom_source_in(config)
    if found is not None and (odd := list(_unsupported_by_custom(spec, found))):
        problems, remedies = zip(*odd, strict=True)
        raise SpecError(
            "\n".join(f"model.kind custom: {problem}" for problem in problems), "\n".join(dict.fromkeys(remedies))
        )


def _unsupported_by_custom(spec: Spec, found: CustomSource) -> Iterator[tuple[str, str]]:
    """Yields problems with their remedies."""
    if isinstance(spec.objective, Dpo | Router):
        remedy = "set objective: {kind: sft}; the loss is your model's own"
        yield f"objective.kind {spec.objective.kind} is computed from a language model's logits", remedy
    if isinstance(spec.engine, Fsdp2 | DeepSpeed):
        yield f"engine.kind {spec.engine.kind} shards only known layers", "set engine.kind: ddp"
    if isinstance(spec.tuning, Lora) and spec.tuning.base_bits is not None:
        yield "tuning.base_bits packs weights while transformers loads them", "leave tuning.base_bits out"
    if spec.data.packing == "best_fit":
        yield "data.packing best_fit does not apply to inputs that the model makes itself", "set data.packing: none"
    for key, off in _NOT_FOR_CUSTOM.items() if spec.levers != "auto" else ():
        value = getattr(spec.levers, key)
        if value not in ("auto", off):
            problem = f"levers.{key} {value} acts on parts of a transformers language model"
            yield problem, f"leave levers.{key} out; micro_batch and recompute are available"
    generates = meta_twin(found).generates
    for evaluation in spec.evaluate:
        if evaluation.server is not None:
            continue
        if isinstance(evaluation.task, WITH_LIKELIHOODS):
            problem = "asks for likelihoods of given answers, which only a transformers language model computes"
            remedy = "evaluate a task that reads an answer; the validation loss is your model's own"
            yield f"evaluate {evaluation.label} {problem}", remedy
        elif not generates:
            problem = f"needs answers, but {found.file.name} has no generate"
            yield f"evaluate {evaluation.label} {problem}", "give the model a generate, or remove evaluate"


def _require_one_update(spec: Spec, rows: int, target: Target) -> None:
    """Refuses settings with which an update inside backward cannot be rehearsed. `rows`: those of a step on one
    device."""
    if spec.levers == "auto" or spec.levers.update != "inside":
        return
    asked = spec.levers.micro_batch
    if asked != "auto" and asked < rows:
        need = f"levers.update: inside needs the whole step of {rows} rows in one micro-batch"
        problem = f"{need}, but levers.micro_batch is {asked}"
        raise SpecError(problem, "--set levers.update=after, or a smaller global_batch")
    if target.precision == "fp16":
        unable = "levers.update: inside cannot remove the loss scale of fp16 from the gradients first"
        problem = f"{unable}, but {target.name} is planned in fp16"
        raise SpecError(problem, "--set levers.update=after, or precision=fp32")


def _require_divisible(spec: Spec, size: ModelFootprint, target: Target) -> None:
    if target.count == 1:
        return
    if isinstance(spec.engine, Fsdp2 | DeepSpeed) and (towers := image_towers(size)):
        why = f"a rank whose rows have no image has none for {', '.join(towers)}: the other ranks would wait for it"
        problem = f"engine.kind {spec.engine.kind} divides gradients during backward, and {why}"
        raise SpecError(problem, "set engine.kind: ddp, or train the language tower alone")
    is_zero3 = isinstance(spec.engine, DeepSpeed) and spec.engine.stage == 3
    if is_zero3 and size.active is not None and isinstance(spec.tuning, Subset):
        lost = "loses the gradient of a router whose mixture is frozen: its weight is released too early"
        raise SpecError(
            f"engine.kind deepspeed with stage 3 {lost}", "set engine.kind: fsdp2, which divides weights too"
        )


def decide_packing(
    asked: Literal["auto", "best_fit", "none"],
    config: dict[str, Any],
    longest: int,
    device: str,
    *,
    deterministic: bool = False,
) -> tuple[bool, str]:
    """Returns whether rows are packed, and why. Packing is exact: `auto` packs if possible, and if its memory was
    measured."""
    if asked == "none":
        return False, "data.packing is none"
    if custom_source_in(config) is not None:
        return False, "a custom model makes its own inputs"
    problem = can_pack(read_config(config), longest)
    if problem is not None and asked == "best_fit":
        remedy = "set data.packing to auto, which packs if possible, or to none"
        raise ModelError(f"data.packing is best_fit, but {problem}", remedy)
    if problem is not None:
        return False, problem
    if device == "cuda" and asked == "auto" and deterministic:
        return False, "not with deterministic on a card: the memory of its kernel there is unknown"
    return True, "requested by data.packing" if asked == "best_fit" else "no padding, the same gradient"


def _searched(
    spec: Spec,
    asked: LeverSettings,
    rows: int,
    cfg: StepConfig,
    target: Target,
    packing: tuple[bool, str],
    shared: SharedRehearsals,
    size: ModelFootprint,
) -> SearchResult:
    """If the engine may be chosen, takes the mildest sharding that fits."""
    custom, has_experts, rows = custom_source_in(cfg.config), size.active is not None, -(-rows // target.count)
    is_plain = base_bits(spec.tuning) is None and spec.optimizer.kind == "adamw"  # nothing packed, no state in blocks
    can_divide = is_plain and not image_towers(size) and custom is None
    for sharding in shardings_of(spec.engine, target.count, can_divide=can_divide):
        evaluator = CandidateEvaluator(
            cfg=cfg, target=target, rows_per_step=rows, sharding=sharding, has_experts=has_experts, shared=shared
        )
        space = evaluator.space(asked)
        if sharding == "zero3":  # zero3 gathers weights again during recomputation
            space = replace(space, keep_attention=space.keep_attention[:1], mlp_tiles=space.mlp_tiles[:1])
        if custom is not None:
            space = replace(space, packing_reason=packing[1])
        else:
            kernels, why = decide_kernels(asked, target, sharding, has_experts=has_experts)
            space = replace(space, packing=packing[0], packing_reason=packing[1], kernels=kernels, kernels_reason=why)
        choice = choose(evaluator, space)
        if choice.fits:
            break
    return choice


@dataclass(frozen=True, slots=True)
class _Verdict:
    spec: Spec
    lengths: Lengths
    rows: int
    """Rows of one step, on all devices."""
    choice: SearchResult
    size: ModelFootprint
    shared: SharedRehearsals

    def forecast(self) -> Forecast:
        spec, lengths, choice, size = self.spec, self.lengths, self.choice, self.size
        candidate, evaluator, target = choice.candidate, choice.evaluator, choice.evaluator.target
        levers, rehearsed, answer = candidate.levers, candidate.rehearsed, candidate.replay
        trace, schedule = rehearsed.trace, spec.schedule
        block = trace.blocks[trace.events[answer.peak_at][0]]
        steps = schedule.steps
        if steps is None and lengths.num_rows is not None:
            steps = schedule.num_steps(math.ceil(lengths.num_rows / spec.global_batch))
        seconds, total = self._seconds(steps)
        tokens, accumulation = lengths.mean * evaluator.cfg.sides * self.rows, candidate.accumulation
        if levers.packing:  # those of a mean step, with packs as full as best fit makes them
            pack = levers.micro_batch * lengths.longest
            accumulation = max(1, math.ceil(evaluator.rows_per_step * lengths.mean / pack))
        price = target.price_per_hour
        reserved = answer.reserved_bytes if target.device == "cuda" else answer.allocated_bytes
        eval_limits = self._eval_limits(spec.evaluate)
        generation = max((limit.reserved_bytes or 0 for limit in eval_limits.values()), default=0)
        # what evaluations need, not what they take because it is free: a batch that is requested, and a single answer
        # that does not fit
        fixed = {one.label for one in spec.evaluate if one.batch != "auto"}
        held = {label: held_bytes(target, limit.reserved_bytes or 0) for label, limit in eval_limits.items()}
        needed = (one for label, one in held.items() if label in fixed or one > target.budget_bytes)
        peak = max((candidate.peak_bytes, *needed))
        suggestions = suggest(choice) if not choice.fits else self._smaller_answers(peak)
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
        flops = total_flops(trace) / micro_batches * evaluator.rows_per_step / levers.micro_batch
        return Forecast(
            card=target.name,
            devices=target.count,
            fits=choice.fits and peak <= target.budget_bytes,
            budget_bytes=target.budget_bytes,
            peak_bytes=peak,
            training_bytes=candidate.peak_bytes,
            allocated_bytes=answer.allocated_bytes,
            reserved_bytes=reserved,
            context_bytes=target.context_bytes,
            margin_bytes=peak - reserved - target.context_bytes,
            peak_instant=block.instant if peak == candidate.peak_bytes else "generation",
            peak_module=block.module,
            peak_operation=block.operation,
            components=trace.components(answer.peak_at),
            instants=instants | ({"generation": generation} if generation else {}),
            levers=levers,
            engine=engine,
            reasons=choice.reasons | {"engine": why},
            accumulation=accumulation,
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
            candidates=self._candidates(),
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
            notes=(*notes_of(spec, lengths, choice, size, engine), *peak_notes(choice, peak, suggestions)),
        )

    def _host_bytes(self, peak: int) -> int:
        """Returns the host memory of all processes on this machine."""
        target, size = self.choice.evaluator.target, self.size
        processes = target.count // nodes_of(self.spec.launcher)
        # each process loads all weights here before it moves its part
        whole = size.weight_bytes if self.choice.evaluator.sharding in ("fsdp2", "zero3") else 0
        if target.device == "cpu":
            return processes * max(peak, whole + target.context_bytes)
        own = _HOST_BYTES + whole + self.choice.candidate.rehearsed.trace.host_bytes + size.paged_bytes
        return processes * own + self._checkpoint_bytes()

    def _seconds(self, steps: int | None) -> tuple[float | None, float | None]:
        """Returns the seconds of a step and of the whole training. With a cached reference, every row passes through
        the model once before the first step."""
        cfg, target, lengths, candidate = (
            self.choice.evaluator.cfg,
            self.choice.evaluator.target,
            self.lengths,
            self.choice.candidate,
        )
        if target.rates is None:
            return None, None
        step = self._mean_step_seconds()
        if steps is None:
            return step, None
        total = step * steps
        if is_reference_cached(cfg.objective, cfg.tuning) and lengths.num_rows is not None:
            phases = phase_seconds(candidate.rehearsed.trace, target.rates)
            once = (phases["forward"] + phases["loss"]) / (2 if candidate.cfg.accumulates else 1)
            share = lengths.mean / lengths.longest
            total += once * share * lengths.num_rows / (candidate.levers.micro_batch * target.count)
        return step, total

    def _candidates(self) -> tuple[LeverCandidate, ...]:
        """The chosen levers and the others that a run can time; none for several cards, or on a CPU."""
        chosen, target = self.choice.candidate, self.choice.evaluator.target
        if target.device != "cuda" or target.count > 1:
            return ()
        found = (chosen, *self.choice.others)
        share = self._mean_step_seconds() / chosen.step_seconds  # the others take as much less for rows of mean length
        return tuple(
            LeverCandidate(
                levers=one.levers, predicted_bytes=one.replay.reserved_bytes, step_seconds=share * one.step_seconds
            )
            for one in found
        )

    def _mean_step_seconds(self) -> float:
        """Returns the seconds of a step with rows of mean length; memory is planned for the longest rows."""
        evaluator, lengths, candidate = self.choice.evaluator, self.lengths, self.choice.candidate
        mean, levers = max(2, round(lengths.mean)), candidate.levers
        if mean >= 0.98 * lengths.longest:
            return candidate.step_seconds
        supervised = min(mean - 1, max(1, round(lengths.mean_supervised)))
        usual = replace(evaluator.cfg, tokens=mean, supervised=supervised, grids=())
        if levers.packing:  # as many mean rows as a pack of the longest rows holds
            rows = min(evaluator.rows_per_step, levers.micro_batch * lengths.longest // mean)
            levers = replace(levers, micro_batch=rows)
        seconds = evaluator.evaluate(levers, cfg=usual).step_seconds
        if evaluator.cfg.grids:  # the longest rows have the images; shorter ones have fewer image tokens
            without = evaluator.evaluate(candidate.levers, cfg=replace(evaluator.cfg, grids=())).step_seconds
            images = evaluator.evaluate(candidate.levers).step_seconds - without
            seconds += max(0.0, images) * mean / lengths.longest
        return seconds

    def _eval_limits(self, evaluations: tuple[Evaluation, ...]) -> dict[str, EvalBatchLimit]:
        lengths, cfg, target = self.lengths, self.choice.evaluator.cfg, self.choice.evaluator.target
        prompts, most = lengths.prompt or lengths.longest, largest_prompt_grids(lengths)
        return make_eval_limits(
            cfg,
            target,
            evaluations,
            prompt_tokens=prompts,
            devices=target.count,
            grids=most,
            shared=self.shared,
        )

    def _smaller_answers(self, peak: int) -> tuple[Suggestion, ...]:
        """If training fits but generation does not, suggests the batch size that fits, which changes no answer."""
        target, evaluations = self.choice.evaluator.target, self.spec.evaluate
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
        """Returns the bytes of the saved weights (all of them unless only adapters are trained) and of two moments per
        trained weight. For a trained subset, the other weights are saved in the base's precision."""
        spec, size, config = self.spec, self.size, self.choice.evaluator.cfg.config
        by_kind = {"adamw": 2 * size.trainable_bytes, "paged_adamw": 8 * size.trainable}
        moments = by_kind.get(spec.optimizer.kind, 2 * size.trainable)
        if isinstance(spec.tuning, Subset):
            is_half = (config.get("dtype") or config.get("torch_dtype")) in ("bfloat16", "float16")
            return size.trainable_bytes + (2 if is_half else 4) * (size.parameters - size.trainable) + moments
        return (size.trainable_bytes if isinstance(spec.tuning, Lora) else size.weight_bytes) + moments
