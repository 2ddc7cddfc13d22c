"""Adds to a forecast what its reader must know besides the figures: the cheapest changes that would make it fit, each
rehearsed, exact ones first (lossy ones are only ever suggested); the assumptions; and settings that a run would
refuse."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from finefit.artifacts.forecasts import Lengths, Suggestion, grouped_names
from finefit.artifacts.records import Levers
from finefit.facts.cards import CARD_KINDS
from finefit.model.attention import RECURRENT, layer_types_of
from finefit.model.load import base_bits
from finefit.model.resolve_model import custom_source_in
from finefit.plan.search import ASKED, Candidate, CandidateEvaluator, SearchResult, decide_kernels
from finefit.plan.target import NCCL_BYTES, USABLE, engine_of
from finefit.rehearse.cost_model import phase_seconds
from finefit.rehearse.fake_model import ModelFootprint, StepConfig, fitting, image_tokens, read_config
from finefit.spec.models import Full, Lora
from finefit.spec.schema import DeepSpeed, Dpo, Engine, Fsdp2, LeverSettings, Spec
from finefit.step.engine_choice import engine_problems
from finefit.step.forward import is_reference_cached

_MOST = 6
_SMALLEST_RANK = 8
_LARGE_RANK = 32
"""Minimum rank at which bf16 adapters are worth suggesting."""
_LONG = 16384
_FEWEST_TOKENS = 64
"""Shorter rows are not worth suggesting."""
_SAVES_NOTHING = {"update", "compile"}
"""Levers that do not change the size of a plan."""
_MORE_CARDS = (2, 4, 8)
_SHARDED = {
    "ddp": "a whole copy on each (DDP)",
    "fsdp2": "weights, gradients and optimizer state divided (FSDP2)",
    "zero2": "gradients and optimizer state divided (DeepSpeed ZeRO-2)",
    "zero3": "weights, gradients and optimizer state divided (DeepSpeed ZeRO-3)",
}
Found = tuple[Suggestion, float]
"""A suggestion with the seconds of a step, for sorting."""


def suggest(choice: SearchResult) -> tuple[Suggestion, ...]:
    """Suggests nothing if the plan fits, and nothing lossy if exact levers suffice."""
    if choice.fits:
        return ()
    exact = list(_exact(choice, choice.evaluator.space(LeverSettings()).most_frugal()))
    lossy = [] if any(suggestion.fits for suggestion, _ in exact) else list(_lossy(choice))
    if custom_source_in(choice.evaluator.cfg.config) is not None:  # its weights cannot be quantised
        lossy = [found for found in lossy if "base_bits" not in " ".join(found[0].changes)]
    by_changes = {found[0].changes: found for found in (*exact, *lossy) if found[0].saves_bytes > 0}

    def order(found: Found) -> tuple[bool, bool, int, float]:
        """Sorts what fits first, exact before lossy, fewer changes before more; then by speed, or by distance from
        fitting."""
        suggestion, seconds = found
        last = seconds if suggestion.fits else suggestion.peak_bytes
        return not suggestion.fits, not suggestion.is_exact, len(suggestion.changes), last

    return tuple(suggestion for suggestion, _ in sorted(by_changes.values(), key=order)[:_MOST])


def _exact(choice: SearchResult, frugal: Levers) -> Iterator[Found]:
    """Frees levers that the user has set: one at a time, then all of them. Also tries a cached reference."""
    evaluator, levers, cfg = choice.evaluator, choice.candidate.levers, choice.evaluator.cfg
    changed = {name: getattr(frugal, name) for name in releasable(choice, frugal)}
    for names in [(name,) for name in changed] + ([tuple(changed)] if len(changed) > 1 else []):
        candidate = evaluator.evaluate(replace(levers, **{name: changed[name] for name in names}))
        ratio = candidate.step_seconds / choice.candidate.step_seconds
        price = f"{100 * (ratio - 1):.0f} % slower" if ratio > 1.005 else "no slower"
        changes = tuple(f"levers.{name}={_setting(name, changed[name], evaluator.num_layers)}" for name in names)
        yield _suggestion(choice, candidate, changes, is_exact=True, price=price)
    if isinstance(cfg.objective, Dpo) and not is_reference_cached(cfg.objective, cfg.tuning):
        # without a second pass in every step, and without a copy of the adapter that training continues
        cached = replace(cfg, objective=cfg.objective.model_copy(update={"reference": "cached"}))
        candidate = evaluator.evaluate(levers, cfg=cached)
        if candidate.peak_bytes < evaluator.evaluate(levers).peak_bytes:
            price, changes = "one pass over all pairs before the first step", ("objective.reference=cached",)
            yield _suggestion(choice, candidate, changes, is_exact=True, price=price)


def releasable(choice: SearchResult, frugal: Levers) -> list[str]:
    """Returns the levers that the user has set and that would differ if they were free, if the rest of the plan
    supports the new value."""
    evaluator, levers, left_out = choice.evaluator, choice.candidate.levers, set(_SAVES_NOTHING)
    if levers.update == "inside":  # this update needs the whole step at once
        left_out.add("micro_batch")
    asked, experts = LeverSettings(compile=levers.compile), evaluator.has_experts
    if decide_kernels(asked, evaluator.target, evaluator.sharding, has_experts=experts)[0] != frugal.kernels:
        left_out.add("kernels")
    fixed = [name for name, reason in choice.reasons.items() if reason == ASKED and name not in left_out]
    changed = {name: getattr(frugal, name) for name in fixed if getattr(frugal, name) != getattr(levers, name)}
    return [n for n in changed if not _is_refused(choice, evaluator.cfg, replace(levers, **{n: changed[n]}))]


def _is_refused(choice: SearchResult, cfg: StepConfig, levers: Levers) -> bool:
    """Returns whether the engine refuses the change but not the current plan; an update inside backward needs plain
    adamw."""
    evaluator = choice.evaluator
    if levers.update == "inside" and cfg.optimizer.kind != "adamw":
        return True
    engine = engine_of(evaluator.sharding, evaluator.target.count)

    def problems(cfg: StepConfig, levers: Levers) -> set[str]:
        return {found.problem for found in engine_problems(engine, cfg.tuning, cfg.optimizer, levers)}

    return bool(problems(cfg, levers) - problems(evaluator.cfg, choice.candidate.levers))


def _setting(name: str, value: object, num_layers: int) -> str:
    if name == "recompute" and value == num_layers:
        return "all"
    if name == "offload":
        return "inputs" if value else "none"
    return "none" if value is None else str(value).lower()


def _lossy(choice: SearchResult) -> Iterator[Found]:
    """Tries each change alone, then adds one after another until the plan fits. The levers stay as in the plan that
    does not fit, which already saves all it may; but tiles cost the most, and if all layers are recomputed they help
    only long rows."""
    evaluator, levers, cfg = choice.evaluator, choice.candidate.levers, choice.evaluator.cfg
    tiles_help = cfg.tokens >= _LONG or levers.recompute < evaluator.num_layers
    if not tiles_help and choice.reasons["mlp_tiles"] != ASKED:
        levers = replace(levers, mlp_tiles=1)
    changes: tuple[str, ...] = ()
    prices: tuple[str, ...] = ()
    for change, price, apply in _changes(cfg):
        if _is_refused(choice, apply(evaluator.cfg), levers):
            continue
        candidate = evaluator.evaluate(levers, cfg=apply(evaluator.cfg))
        yield _suggestion(choice, candidate, (change,), is_exact=False, price=price)
        cfg, changes, prices = apply(cfg), (*changes, change), (*prices, price)
        if len(changes) > 1:
            candidate = evaluator.evaluate(levers, cfg=cfg)
            yield _suggestion(choice, candidate, changes, is_exact=False, price="; ".join(prices))
        if evaluator.fits(candidate):
            break
    yield from _shorter(choice, levers, cfg, changes, prices)
    yield from _shorter(choice, levers, evaluator.cfg, (), ())


def _changes(cfg: StepConfig) -> Iterator[tuple[str, str, Callable[[StepConfig], StepConfig]]]:
    """Yields what to set, its price and its effect; the mildest change first."""

    def tuned(cfg: StepConfig, **update: object) -> StepConfig:
        return replace(cfg, tuning=cfg.tuning.model_copy(update=update))

    tuning, is_card, is_half = cfg.tuning, cfg.device == "cuda", cfg.precision != "fp32"
    if isinstance(tuning, Full):
        adapter = Lora(kind="lora", rank=64, alpha=128)
        change = "tuning={kind: lora, rank: 64, alpha: 128}"
        yield change, "adapters instead of all weights", lambda c: replace(c, tuning=adapter)
    if is_card and cfg.optimizer.kind == "adamw":
        eight = cfg.optimizer.model_copy(update={"kind": "adamw_8bit"})
        yield "optimizer.kind=adamw_8bit", "moments in 8 bits", lambda c: replace(c, optimizer=eight)
    if not isinstance(tuning, Lora):
        return
    if is_half and tuning.weights == "fp32" and tuning.rank >= _LARGE_RANK:
        price = "adapters and their moments in bf16, which loses small updates"
        yield "tuning.weights=bf16", price, partial(tuned, weights="bf16")
    if is_card and is_half and tuning.base_bits is None:
        yield "tuning.base_bits=4", "frozen weights in 4 bits, slower products", partial(tuned, base_bits=4)
    if tuning.rank > _SMALLEST_RANK:
        rank = max(_SMALLEST_RANK, tuning.rank // 4)
        yield f"tuning.rank={rank}", "a smaller adapter", partial(tuned, rank=rank)


def _shorter(
    choice: SearchResult, levers: Levers, cfg: StepConfig, changes: tuple[str, ...], prices: tuple[str, ...]
) -> Iterator[Found]:
    """Finds the longest rows that fit: memory grows with every token, so two lengths determine the limit."""
    evaluator = choice.evaluator

    def cut(tokens: int) -> StepConfig:
        grids = fitting(cfg.config, cfg.grids, tokens)
        return replace(cfg, tokens=tokens, supervised=min(cfg.supervised, tokens - 1), grids=grids)

    if cfg.tokens < 2 * _FEWEST_TOKENS:
        return
    half = cut(cfg.tokens // 2)
    whole, part = evaluator.evaluate(levers, cfg=cfg), evaluator.evaluate(levers, cfg=half)
    slope = (whole.peak_bytes - part.peak_bytes) / (cfg.tokens - half.tokens)
    over = whole.peak_bytes - evaluator.target.budget_bytes
    if slope <= 0 or over <= 0:
        return
    tokens = int((cfg.tokens - over / slope * 1.02) // 64 * 64)
    if tokens >= _FEWEST_TOKENS:
        candidate = evaluator.evaluate(levers, cfg=cut(tokens))
        changes = (*changes, f"data.max_tokens={tokens}", "data.too_long=drop")
        price = "; ".join((*prices, "longer rows are left out"))
        yield _suggestion(choice, candidate, changes, is_exact=False, price=price)


def _suggestion(
    choice: SearchResult, candidate: Candidate, changes: tuple[str, ...], *, is_exact: bool, price: str
) -> Found:
    found = Suggestion(
        changes=changes,
        saves_bytes=choice.candidate.peak_bytes - candidate.peak_bytes,
        peak_bytes=candidate.peak_bytes,
        fits=choice.evaluator.fits(candidate),
        is_exact=is_exact,
        price=price,
        step_seconds=candidate.step_seconds if choice.evaluator.target.rates else None,
    )
    return found, candidate.step_seconds


def notes_of(spec: Spec, lengths: Lengths, choice: SearchResult, size: ModelFootprint, engine: Engine) -> Iterator[str]:
    """`engine`: the engine that was chosen."""
    yield from choice.evaluator.target.notes
    yield from _sharding_notes(choice.evaluator, spec)
    for finding in engine_problems(engine, spec.tuning, spec.optimizer, choice.candidate.levers):
        yield f"a run would be refused: {finding.problem} ({finding.remedy})"
    yield from _model_notes(spec, lengths, choice, size)
    yield from _reference_notes(spec, choice)
    yield from _divided_notes(choice)


def image_towers(size: ModelFootprint) -> list[str]:
    """Returns the trained towers that only rows with images reach."""
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


def _model_notes(spec: Spec, lengths: Lengths, choice: SearchResult, size: ModelFootprint) -> Iterator[str]:
    bits, candidate = base_bits(spec.tuning), choice.candidate
    if size.paged_bytes:
        paged = f"{size.paged_bytes / 2**30:.2f} GiB of paged moments"
        yield f"{paged} stay on the card while there is room, otherwise in host memory, where they are counted"
    if bits == 8:
        kept = "the input of every adapted layer is kept even if the layer is recomputed"
        yield f"in 8 bits {kept}; columns with outliers take more"
    if bits and size.expert_bytes:
        experts = f"the experts ({size.expert_bytes / 2**30:.2f} GiB)"
        yield f"{experts} are not quantised to {bits} bits: bitsandbytes quantises linear layers only"
    if isinstance(spec.tuning, Lora) and size.expert_bytes and not spec.tuning.experts:
        why = "tuning.targets names linear layers; tuning.experts: true adapts the experts, too"
        yield f"the experts carry no adapter and are not trained: {why}"
    for reason, names in size.left_out.items():
        yield f"{', '.join(grouped_names(names))} carry no adapter and are not trained: {reason}"
    custom = custom_source_in(candidate.cfg.config)
    kinds = layer_types_of(read_config(candidate.cfg.config)) if custom is None else ()
    if recurrent := sorted(set(kinds).intersection(RECURRENT)):
        less = "kernels of other packages that transformers may find installed take less memory and time"
        yield f"layers of kind {', '.join(recurrent)} are planned as torch computes them; {less}"
    if size.towers:
        if isinstance(spec.tuning, Lora) and not isinstance(spec.tuning.targets, dict):
            yield "tuning.targets without towers apply to the language tower: vision and projector are not trained"
        if bits:
            yield f"the language tower is quantised to {bits} bits, vision and projector are not"
        if size.unused and "vision" in image_towers(size):
            unused = ", ".join(size.unused)
            yield f"features are taken before {unused}: no image reaches it, and nothing in it is trained"
        if lengths.grids:
            most = f"{image_tokens(candidate.cfg.config, lengths.grids):,} image tokens ({len(lengths.grids)} images)"
            yield f"the row with the most images has {most}, and the plan assumes as many for every row"
        else:
            yield "no row has an image: the vision tower is never called"
    if size.active is not None:
        tiles, has_grouped = candidate.levers.mlp_tiles, candidate.rehearsed.kernels.has_grouped
        untiled = f"; levers.mlp_tiles {tiles} does not apply to them" if tiles > 1 else ""
        single = "; no kernel computes them all at once: each has its own products, and the host waits for the card"
        uses = f"a token uses {size.active:,} of {size.parameters:,} parameters"
        yield f"experts: {uses}; memory does not depend on the routing{untiled}{'' if has_grouped else single}"


def _reference_notes(spec: Spec, choice: SearchResult) -> Iterator[str]:
    """Describes what a cached reference would save over several epochs; for one epoch it is the same work at another
    time."""
    rates = choice.evaluator.target.rates
    if not isinstance(spec.objective, Dpo) or is_reference_cached(spec.objective, spec.tuning) or rates is None:
        return
    if (spec.schedule.epochs or 1) > 1:
        phases = phase_seconds(choice.candidate.rehearsed.trace, rates)
        share = phases["reference"] / sum(phases.values())
        once = "objective.reference=cached computes it once for all epochs, with the same numbers"
        yield f"the reference takes {share:.0%} of a step; {once}"


def _divided_notes(choice: SearchResult) -> Iterator[str]:
    """A plan that does not fit on one card may fit on several that shard it."""
    evaluator, target, cfg = choice.evaluator, choice.evaluator.target, choice.evaluator.cfg
    if choice.fits or target.count > 1 or target.device == "cpu" or custom_source_in(cfg.config) is not None:
        return
    levers = replace(choice.candidate.levers, kernels="torch")  # fused kernels need unsharded weights
    if any(engine_problems(Fsdp2(kind="fsdp2", devices=2), cfg.tuning, cfg.optimizer, levers)):
        return
    for count in _MORE_CARDS:
        divided = replace(target, count=count, context_bytes=target.context_bytes + NCCL_BYTES)
        several = replace(evaluator, target=divided, sharding="fsdp2", known={})
        if several.fits(several.evaluate(levers, is_quick=False)):
            yield f"sharded over {count} of these cards it fits as it is: engine={{kind: fsdp2, devices: {count}}}"
            return


def peak_notes(choice: SearchResult, peak: int, suggestions: tuple[Suggestion, ...]) -> Iterator[str]:
    """`peak`: bytes of everything that the run does. If no change makes it fit, names the smallest cards that hold
    it."""
    target = choice.evaluator.target
    if peak > choice.candidate.peak_bytes:
        yield "generating answers in the evaluation needs more than training"
    if choice.fits or target.device == "cpu" or any(s.fits for s in suggestions):
        return
    least = min((s.peak_bytes for s in suggestions), default=peak)
    needs = {"as it is": peak} | ({"with the best of these changes": least} if least < peak else {})

    def smallest(num_bytes: int) -> str:
        large = [kind for kind in CARD_KINDS if kind.memory_bytes * USABLE >= num_bytes and kind.has_bf16]
        return min(large, key=lambda kind: kind.memory_bytes).name if large else "none in the table"

    found = ", ".join(f"{smallest(num_bytes)} {words}" for words, num_bytes in needs.items())
    yield f"no change makes it fit on {target.name}; the smallest card that holds it: {found}"
