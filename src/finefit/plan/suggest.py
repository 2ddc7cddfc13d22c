"""What would make a plan fit: the cheapest changes, each rehearsed, exact ones first. Lossy ones are only ever
suggested."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from finefit.artifacts.forecasts import Suggestion
from finefit.artifacts.records import Levers
from finefit.model.resolve_model import custom_source_in
from finefit.plan.custom import narrowed
from finefit.plan.search import (
    ASKED,
    Candidate,
    CandidateEvaluator,
    SearchResult,
    SearchSpace,
    decide_kernels,
    make_search_space,
)
from finefit.plan.target import engine_of
from finefit.rehearse.fake_images import fitting
from finefit.rehearse.step_config import StepConfig
from finefit.spec.models import Full, Lora
from finefit.spec.schema import Dpo, LeverSettings
from finefit.step.engine_choice import engine_problems
from finefit.step.forward import is_reference_cached

_MOST = 6
_SMALLEST_RANK = 8
_LARGE_RANK = 32
"""From this rank on, bf16 adapters are worth suggesting."""
_LONG = 16384
_FEWEST_TOKENS = 64
"""A shorter row is not worth suggesting."""
_SAVES_NOTHING = {"update", "compile"}
"""Levers whose release leaves a plan as large as it is."""


def suggest(evaluator: CandidateEvaluator, choice: SearchResult) -> tuple[Suggestion, ...]:
    """Nothing where the plan fits, and nothing lossy where exact levers suffice."""
    if choice.fits:
        return ()
    free = make_search_space(
        LeverSettings(),
        rows=evaluator.rows_per_step,
        supervised=evaluator.cfg.sides * evaluator.cfg.supervised,
        num_layers=evaluator.num_layers,
        precision=evaluator.cfg.precision,
        device=evaluator.target.device,
        has_experts=evaluator.has_experts,
    )
    custom = custom_source_in(evaluator.cfg.config)
    exact = list(_exact(evaluator, choice, free if custom is None else narrowed(free, custom)))
    lossy = [] if any(suggestion.fits for suggestion, _ in exact) else list(_lossy(evaluator, choice))
    if custom is not None:  # whose weights cannot be quantised
        lossy = [found for found in lossy if "base_bits" not in " ".join(found[0].changes)]
    by_changes = {found[0].changes: found for found in (*exact, *lossy) if found[0].saves_bytes > 0}
    return tuple(suggestion for suggestion, _ in sorted(by_changes.values(), key=_order)[:_MOST])


Found = tuple[Suggestion, float]
"""With the seconds of a step, for the order."""


def _order(found: Found) -> tuple[bool, bool, int, float]:
    """What fits before what does not, exact before lossy, few changes before many; then the fastest, or what comes
    nearest."""
    suggestion, seconds = found
    last = seconds if suggestion.fits else suggestion.peak_bytes
    return not suggestion.fits, not suggestion.is_exact, len(suggestion.changes), last


def _exact(evaluator: CandidateEvaluator, choice: SearchResult, free: SearchSpace) -> Iterator[Found]:
    """Levers that the user has fixed, let go: one at a time, then all of them."""
    frugal = free.most_frugal()
    changed = {name: getattr(frugal, name) for name in releasable(evaluator, choice, frugal)}
    for names in [(name,) for name in changed] + ([tuple(changed)] if len(changed) > 1 else []):
        candidate = evaluator.evaluate(replace(choice.candidate.levers, **{name: changed[name] for name in names}))
        ratio = candidate.step_seconds / choice.candidate.step_seconds
        price = f"{100 * (ratio - 1):.0f} % slower" if ratio > 1.005 else "no slower"
        changes = tuple(f"levers.{name}={_setting(name, changed[name], evaluator)}" for name in names)
        yield _suggestion(evaluator, choice, candidate, changes, is_exact=True, price=price)
    yield from _cached_reference(evaluator, choice)


def releasable(evaluator: CandidateEvaluator, choice: SearchResult, frugal: Levers) -> list[str]:
    """Fixed levers that would have another value where they are free, and one that the rest of the plan can run
    with."""
    levers, cfg, left_out = choice.candidate.levers, evaluator.cfg, set(_SAVES_NOTHING)
    if levers.update == "inside":  # needs the whole step at once
        left_out.add("micro_batch")
    asked, experts = LeverSettings(compile=levers.compile), evaluator.has_experts
    if decide_kernels(asked, evaluator.target, evaluator.sharding, has_experts=experts)[0] != frugal.kernels:
        left_out.add("kernels")
    fixed = [name for name, reason in choice.reasons.items() if reason == ASKED and name not in left_out]
    changed = {name: getattr(frugal, name) for name in fixed if getattr(frugal, name) != getattr(levers, name)}
    return [
        name for name in changed if not _is_refused(evaluator, choice, cfg, replace(levers, **{name: changed[name]}))
    ]


def _is_refused(evaluator: CandidateEvaluator, choice: SearchResult, cfg: StepConfig, levers: Levers) -> bool:
    """Whether the engine refuses it but not the plan as it is; an update inside backward takes plain adamw."""
    if levers.update == "inside" and cfg.optimizer.kind != "adamw":
        return True
    engine = engine_of(evaluator.sharding, evaluator.target.count)

    def problems(cfg: StepConfig, levers: Levers) -> set[str]:
        return {found.problem for found in engine_problems(engine, cfg.tuning, cfg.optimizer, levers)}

    return bool(problems(cfg, levers) - problems(evaluator.cfg, choice.candidate.levers))


def _cached_reference(evaluator: CandidateEvaluator, choice: SearchResult) -> Iterator[Found]:
    """Without a second pass in every step, and without a copy of the adapter that training continues."""
    cfg, levers = evaluator.cfg, choice.candidate.levers
    if isinstance(cfg.objective, Dpo) and not is_reference_cached(cfg.objective, cfg.tuning):
        cached = replace(cfg, objective=cfg.objective.model_copy(update={"reference": "cached"}))
        candidate = evaluator.evaluate(levers, cfg=cached)
        if candidate.peak_bytes < evaluator.evaluate(levers).peak_bytes:
            price = "one pass over all pairs before the first step"
            changes = ("objective.reference=cached",)
            yield _suggestion(evaluator, choice, candidate, changes, is_exact=True, price=price)


def _setting(name: str, value: object, evaluator: CandidateEvaluator) -> object:
    match name:
        case "recompute" if value == evaluator.num_layers:
            return "all"
        case "offload":
            return "inputs" if value else "none"
        case "loss_chunk" if value is None:
            return "none"
        case "keep_attention":
            return "true" if value else "false"
    return value


def _lossy(evaluator: CandidateEvaluator, choice: SearchResult) -> Iterator[Found]:
    """Each change alone, then one on top of the other until it fits; the levers stay as frugal as they may be."""
    levers, cfg = _frugal(evaluator, choice), evaluator.cfg
    changes: tuple[str, ...] = ()
    prices: tuple[str, ...] = ()
    for change, price, apply in _changes(cfg):
        if _is_refused(evaluator, choice, apply(evaluator.cfg), levers):
            continue
        candidate = evaluator.evaluate(levers, cfg=apply(evaluator.cfg))
        yield _suggestion(evaluator, choice, candidate, (change,), is_exact=False, price=price)
        cfg, changes, prices = apply(cfg), (*changes, change), (*prices, price)
        if len(changes) > 1:
            candidate = evaluator.evaluate(levers, cfg=cfg)
            yield _suggestion(evaluator, choice, candidate, changes, is_exact=False, price="; ".join(prices))
        if evaluator.fits(candidate):
            break
    yield from _shorter(evaluator, choice, cfg, changes, prices)
    yield from _shorter(evaluator, choice, evaluator.cfg, (), ())


def _frugal(evaluator: CandidateEvaluator, choice: SearchResult) -> Levers:
    """As in the plan that does not fit, which has pulled all it may; but tiles cost most, and where all layers are
    recomputed they help only long rows."""
    levers, is_asked = choice.candidate.levers, choice.reasons["mlp_tiles"] == ASKED
    helps = evaluator.cfg.tokens >= _LONG or levers.recompute < evaluator.num_layers or is_asked
    return levers if helps else replace(levers, mlp_tiles=1)


_Change = tuple[str, str, Callable[[StepConfig], StepConfig]]
"""What to set, what it costs, what it does."""


def _changes(cfg: StepConfig) -> Iterator[_Change]:
    """The mildest first."""
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
        yield "tuning.weights=bf16", price, partial(_tuned, weights="bf16")
    if is_card and is_half and tuning.base_bits is None:
        yield "tuning.base_bits=4", "frozen weights in 4 bits, slower products", partial(_tuned, base_bits=4)
    if tuning.rank > _SMALLEST_RANK:
        rank = max(_SMALLEST_RANK, tuning.rank // 4)
        yield f"tuning.rank={rank}", "a smaller adapter", partial(_tuned, rank=rank)


def _tuned(cfg: StepConfig, **update: object) -> StepConfig:
    return replace(cfg, tuning=cfg.tuning.model_copy(update=update))


def _shorter(
    evaluator: CandidateEvaluator,
    choice: SearchResult,
    cfg: StepConfig,
    changes: tuple[str, ...],
    prices: tuple[str, ...],
) -> Iterator[Found]:
    """The longest rows that fit: memory grows with every token, so two lengths show the border."""
    levers, half = _frugal(evaluator, choice), _cut(cfg, cfg.tokens // 2)
    if cfg.tokens < 2 * _FEWEST_TOKENS:
        return
    whole, part = evaluator.evaluate(levers, cfg=cfg), evaluator.evaluate(levers, cfg=half)
    slope = (whole.peak_bytes - part.peak_bytes) / (cfg.tokens - half.tokens)
    over = whole.peak_bytes - evaluator.target.budget_bytes
    if slope <= 0 or over <= 0:
        return
    tokens = int((cfg.tokens - over / slope * 1.02) // 64 * 64)
    if tokens >= _FEWEST_TOKENS:
        candidate = evaluator.evaluate(levers, cfg=_cut(cfg, tokens))
        changes = (*changes, f"data.max_tokens={tokens}", "data.too_long=drop")
        price = "; ".join((*prices, "longer rows are left out"))
        yield _suggestion(evaluator, choice, candidate, changes, is_exact=False, price=price)


def _cut(cfg: StepConfig, tokens: int) -> StepConfig:
    grids = fitting(cfg.config, cfg.grids, tokens)
    return replace(cfg, tokens=tokens, supervised=min(cfg.supervised, tokens - 1), grids=grids)


def _suggestion(
    evaluator: CandidateEvaluator,
    choice: SearchResult,
    candidate: Candidate,
    changes: tuple[str, ...],
    *,
    is_exact: bool,
    price: str,
) -> Found:
    found = Suggestion(
        changes=changes,
        saves_bytes=choice.candidate.peak_bytes - candidate.peak_bytes,
        peak_bytes=candidate.peak_bytes,
        fits=evaluator.fits(candidate),
        is_exact=is_exact,
        price=price,
        step_seconds=candidate.step_seconds if evaluator.target.rates else None,
    )
    return found, candidate.step_seconds
