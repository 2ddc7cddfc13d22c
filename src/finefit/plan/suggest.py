"""What would make a plan fit: the cheapest changes, each looked at, exact ones first. Lossy ones are only ever suggested."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from finefit.artifacts.forecasts import Suggestion
from finefit.artifacts.records import Levers
from finefit.model.custom_files import written_in
from finefit.plan.custom import narrowed
from finefit.plan.engine import engine_of
from finefit.plan.kernels import decide_kernels
from finefit.plan.look import Look, Looker
from finefit.plan.search import ASKED, Choice, Freedom, freedom_of
from finefit.rehearse.scene import Scene
from finefit.rehearse.showing import fitting
from finefit.spec.models import Full, Lora
from finefit.spec.schema import Dpo
from finefit.spec.schema import Levers as AskedLevers
from finefit.step.engines.choose import engine_problems
from finefit.step.objective import is_cached

_MOST = 6
_SMALLEST_RANK = 8
_LARGE_RANK = 32
"""From which on adapters are worth narrowing."""
_LONG = 16384
_NO_LESS = 64
"""Tokens: a row that is shorter still is no answer."""
_SAVES_NOTHING = {"update", "compile"}
"""Levers that, let go, leave a plan as large as it is."""


def suggest(looker: Looker, choice: Choice) -> tuple[Suggestion, ...]:
    """Nothing where the plan fits, and nothing lossy where exact levers suffice."""
    if choice.fits:
        return ()
    free = freedom_of(
        AskedLevers(),
        rows=looker.rows_per_step,
        supervised=looker.scene.sides * looker.scene.supervised,
        num_layers=looker.num_layers,
        precision=looker.scene.precision,
        device=looker.target.device,
        has_experts=looker.has_experts,
    )
    own = written_in(looker.scene.config)
    exact = list(_exact(looker, choice, free if own is None else narrowed(free, own)))
    lossy = [] if any(suggestion.fits for suggestion, _ in exact) else list(_lossy(looker, choice))
    if own is not None:  # whose weights nobody packs
        lossy = [
            (suggestion, seconds) for suggestion, seconds in lossy if "base_bits" not in " ".join(suggestion.changes)
        ]
    found = {
        suggestion.changes: (suggestion, seconds)
        for suggestion, seconds in (*exact, *lossy)
        if suggestion.saves_bytes > 0
    }
    return tuple(suggestion for suggestion, _ in sorted(found.values(), key=lambda pair: _order(*pair))[:_MOST])


def _order(suggestion: Suggestion, seconds: float) -> tuple[bool, bool, int, float]:
    """What fits before what does not, exact before lossy, few changes before many; then the fastest, or what brings it nearest."""
    return (
        not suggestion.fits,
        not suggestion.is_exact,
        len(suggestion.changes),
        seconds if suggestion.fits else suggestion.peak_bytes,
    )


Found = tuple[Suggestion, float]
"""With the seconds of a step, for the order."""


def _exact(looker: Looker, choice: Choice, free: Freedom) -> Iterator[Found]:
    """Levers that the user has fixed, let go: one at a time, then all of them."""
    frugal = free.most_frugal()
    changed = {name: getattr(frugal, name) for name in releasable(looker, choice, frugal)}
    sets = [(name,) for name in changed] + ([tuple(changed)] if len(changed) > 1 else [])
    for names in sets:
        look = looker.look(replace(choice.look.levers, **{name: changed[name] for name in names}), is_quick=True)
        yield _suggestion(
            looker,
            choice,
            look,
            tuple(f"levers.{name}={_word(name, changed[name], looker)}" for name in names),
            is_exact=True,
            price=_slower(choice, look),
        )
    yield from _cached_reference(looker, choice)


def releasable(looker: Looker, choice: Choice, frugal: Levers) -> list[str]:
    """Fixed levers that would have another value where they are free, and one that the rest of the plan can be run with."""
    levers, scene, left_out = choice.look.levers, looker.scene, set(_SAVES_NOTHING)
    if levers.update == "inside":  # needs the whole step at once
        left_out.add("micro_batch")
    free, _ = decide_kernels(
        AskedLevers(compile=levers.compile), looker.target, looker.sharding, has_experts=looker.has_experts
    )
    if free != frugal.kernels:
        left_out.add("kernels")
    fixed = [name for name, reason in choice.reasons.items() if reason == ASKED and name not in left_out]
    differs = [name for name in fixed if getattr(frugal, name) != getattr(levers, name)]
    return [
        name
        for name in differs
        if not _is_refused(looker, choice, scene, replace(levers, **{name: getattr(frugal, name)}))
    ]


def _is_refused(looker: Looker, choice: Choice, scene: Scene, levers: Levers) -> bool:
    """Whether the engine has something against it that it has not against the plan as it is; an update inside backward takes plain adamw."""
    if levers.update == "inside" and scene.optimizer.kind != "adamw":
        return True

    def problems(scene: Scene, levers: Levers) -> set[str]:
        return {
            odd.problem
            for odd in engine_problems(
                engine_of(looker.sharding, looker.target.count), scene.tuning, scene.optimizer, levers
            )
        }

    return bool(problems(scene, levers) - problems(looker.scene, choice.look.levers))


def _cached_reference(looker: Looker, choice: Choice) -> Iterator[Found]:
    """Without a second pass in every step, and without a copy of the adapter that training goes on from."""
    scene = looker.scene
    if isinstance(scene.objective, Dpo) and not is_cached(scene.objective, scene.tuning):
        kept = replace(scene, objective=scene.objective.model_copy(update={"reference": "cached"}))
        look = looker.look(choice.look.levers, scene=kept)
        if look.peak_bytes < looker.look(choice.look.levers).peak_bytes:
            yield _suggestion(
                looker,
                choice,
                look,
                ("objective.reference=cached",),
                is_exact=True,
                price="one pass over all pairs before the first step",
            )


def _word(name: str, value: object, looker: Looker) -> object:
    match name:
        case "recompute" if value == looker.num_layers:
            return "all"
        case "offload":
            return "inputs" if value else "none"
        case "loss_chunk" if value is None:
            return "none"
        case "keep_attention":
            return "true" if value else "false"
    return value


def _lossy(looker: Looker, choice: Choice) -> Iterator[Found]:
    """Each change alone, then one upon the other until it fits; the levers stay as frugal as they may be."""
    levers = _frugal(looker, choice)
    scene = looker.scene
    changes: tuple[str, ...] = ()
    prices: tuple[str, ...] = ()
    for change, price, apply in _changes(scene):
        if _is_refused(looker, choice, apply(looker.scene), levers):
            continue
        look = looker.look(levers, scene=apply(looker.scene))
        yield _suggestion(looker, choice, look, (change,), is_exact=False, price=price)
        scene, changes, prices = apply(scene), (*changes, change), (*prices, price)
        if len(changes) > 1:
            look = looker.look(levers, scene=scene)
            yield _suggestion(looker, choice, look, changes, is_exact=False, price="; ".join(prices))
        if looker.fits(look):
            break
    yield from _shorter(looker, choice, scene, changes, prices)
    yield from _shorter(looker, choice, looker.scene, (), ())


def _frugal(looker: Looker, choice: Choice) -> Levers:
    """As the plan that does not fit, which has pulled what it may; but tiles cost most, and where all layers are recomputed help long rows only."""
    levers = choice.look.levers
    has_use = (
        looker.scene.tokens >= _LONG or levers.recompute < looker.num_layers or choice.reasons["mlp_tiles"] == ASKED
    )
    return levers if has_use else replace(levers, mlp_tiles=1)


_Change = tuple[str, str, Callable[[Scene], Scene]]
"""What to set, what it costs, what it does."""


def _changes(scene: Scene) -> Iterator[_Change]:
    """The mildest first."""
    tuning = scene.tuning
    if isinstance(tuning, Full):
        adapter = Lora(kind="lora", rank=64, alpha=128)
        yield (
            "tuning={kind: lora, rank: 64, alpha: 128}",
            "adapters instead of all weights",
            lambda s: replace(s, tuning=adapter),
        )
    if scene.device == "cuda" and scene.optimizer.kind == "adamw":
        eight = scene.optimizer.model_copy(update={"kind": "adamw_8bit"})
        yield "optimizer.kind=adamw_8bit", "moments in 8 bits", lambda s: replace(s, optimizer=eight)
    if (
        scene.precision != "fp32"
        and isinstance(tuning, Lora)
        and tuning.weights == "fp32"
        and tuning.rank >= _LARGE_RANK
    ):
        yield (
            "tuning.weights=bf16",
            "adapters and their moments in bf16, which loses small updates",
            lambda s: replace(s, tuning=s.tuning.model_copy(update={"weights": "bf16"})),
        )
    if scene.device == "cuda" and scene.precision != "fp32" and isinstance(tuning, Lora) and tuning.base_bits is None:
        yield (
            "tuning.base_bits=4",
            "frozen weights in 4 bits, slower products",
            lambda s: replace(s, tuning=s.tuning.model_copy(update={"base_bits": 4})),
        )
    if isinstance(tuning, Lora) and tuning.rank > _SMALLEST_RANK:
        rank = max(_SMALLEST_RANK, tuning.rank // 4)
        yield (
            f"tuning.rank={rank}",
            "a smaller adapter",
            lambda s: replace(s, tuning=s.tuning.model_copy(update={"rank": rank})),
        )


def _shorter(
    looker: Looker, choice: Choice, scene: Scene, changes: tuple[str, ...], prices: tuple[str, ...]
) -> Iterator[Found]:
    """The longest rows that fit: memory grows with every token, so two lengths show the border."""
    levers, half = _frugal(looker, choice), _cut(scene, scene.tokens // 2)
    if scene.tokens < 2 * _NO_LESS:
        return
    whole, part = looker.look(levers, scene=scene), looker.look(levers, scene=half)
    slope = (whole.peak_bytes - part.peak_bytes) / (scene.tokens - half.tokens)
    over = whole.peak_bytes - looker.target.budget_bytes
    if slope <= 0 or over <= 0:
        return
    tokens = int((scene.tokens - over / slope * 1.02) // 64 * 64)
    if tokens >= _NO_LESS:
        look = looker.look(levers, scene=_cut(scene, tokens))
        more = (f"data.max_tokens={tokens}", "data.too_long=drop")
        yield _suggestion(
            looker,
            choice,
            look,
            (*changes, *more),
            is_exact=False,
            price="; ".join((*prices, "longer rows are left out")),
        )


def _cut(scene: Scene, tokens: int) -> Scene:
    return replace(
        scene,
        tokens=tokens,
        supervised=min(scene.supervised, tokens - 1),
        grids=fitting(scene.config, scene.grids, tokens),
    )


def _suggestion(
    looker: Looker, choice: Choice, look: Look, changes: tuple[str, ...], *, is_exact: bool, price: str
) -> Found:
    found = Suggestion(
        changes=changes,
        saves_bytes=choice.look.peak_bytes - look.peak_bytes,
        peak_bytes=look.peak_bytes,
        fits=looker.fits(look),
        is_exact=is_exact,
        price=price,
        step_seconds=look.step_seconds if looker.target.rates else None,
    )
    return found, look.step_seconds


def _slower(choice: Choice, look: Look) -> str:
    ratio = look.step_seconds / choice.look.step_seconds
    return f"{100 * (ratio - 1):.0f} % slower" if ratio > 1.005 else "no slower"
