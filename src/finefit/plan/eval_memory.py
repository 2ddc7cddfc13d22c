"""Computes how much an evaluation may hold at once: the largest number of longest prompts whose rehearsal fits, and
more rows of shorter prompts within the same number of tokens.

An evaluation has its own process and batching is exact, so it may use the whole card."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from finefit.artifacts.forecasts import EvalBatchLimit, Lengths
from finefit.artifacts.records import Levers
from finefit.model.resolve_model import custom_source_in
from finefit.plan.target import CPU_EVAL_BYTES, Target
from finefit.rehearse.fake_kernels import device_kernels
from finefit.rehearse.fake_model import StepConfig, fitting, num_tokens, num_values
from finefit.rehearse.generation import GenerationRehearsal, extrapolated_bytes, rehearse_answers, rehearse_likelihood
from finefit.rehearse.layer_kinds import memo_key
from finefit.rehearse.rehearsal import Rehearsal
from finefit.spec.models import Lora, Tuning
from finefit.spec.schema import AdamW, Evaluation
from finefit.spec.tasks import Hallucination, LmEval, Perplexity, TruthfulQa

_MOST_ROWS = {"cuda": 64, "cpu": 16}
"""Maximum rows of the longest prompts: more gain little, and a long batch waits for its slowest row."""
_MORE = 4
"""Factor by which the rows may grow if prompts are shorter."""
_MOST_VALUES = 1 << 29
"""Pixel values of a batch, which are in host memory before they reach the card: 2 GiB."""
_LONG_PROMPT = 16384
"""Longer prompts may pass an MLP in tiles."""
_TILES = (1, 4, 16)
_CPU_SHARE = 0.5
"""Share of a machine's memory; other programs use it too."""
_HARNESS_ROWS, _HARNESS_TOKENS = 8, 2048
_CUSTOM_ROWS = 8
"""Rows of a custom model: the memory of its `generate` is not rehearsed, and a batch that is too large is split."""
_SPREAD = 1.15
"""What the fullest of several cards may hold, relative to an even share of a model, because layers are not divided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRehearsals:
    """Rehearsals of steps and answers that several cards share; each is executed once for all cards whose kernels
    behave the same."""

    steps: dict[str, Rehearsal] = field(default_factory=dict)
    answers: dict[str, GenerationRehearsal] = field(default_factory=dict)
    note: Callable[[str], None] = lambda _: None
    """Called with a short description of the next rehearsal."""


def held_bytes(target: Target, reserved: int) -> int:
    """Returns the bytes that a card must hold for a process that reserves this much; 0 if no process starts."""
    if not reserved:
        return 0
    imported = CPU_EVAL_BYTES if target.device == "cpu" else 0
    return reserved + target.margin_of(reserved) + target.context_bytes + imported


def step_config(config: dict[str, Any], tuning: Tuning, target: Target) -> StepConfig:
    """Returns the config of a step with an empty row, which suffices if nothing is trained."""
    return StepConfig(
        config=config,
        tuning=tuning,
        optimizer=AdamW(lr=1e-5),
        device=target.device,
        capability=target.capability,
        precision=target.precision,
        levers=Levers(micro_batch=1),
        tokens=1,
        supervised=1,
        accumulates=False,
    )


def largest_prompt_grids(lengths: Lengths) -> tuple[tuple[int, ...], ...]:
    """Returns the grids of the prompt with the most image tokens; if prompts are unknown, those of any row."""
    return lengths.grids if lengths.prompt is None else lengths.prompt_grids


def make_eval_limits(
    cfg: StepConfig,
    target: Target,
    evaluations: Iterable[Evaluation],
    *,
    prompt_tokens: int,
    devices: int,
    grids: tuple[tuple[int, ...], ...] = (),
    shared: SharedRehearsals | None = None,
) -> dict[str, EvalBatchLimit]:
    """Returns limits by label; a server needs none. `devices`: cards over which the items may be divided. `grids`: the
    images of the prompt with the most image tokens; every prompt is assumed to have as many of them as fit into it."""
    evaluations = [one for one in evaluations if one.server is None]
    if custom_source_in(cfg.config) is not None:
        sizes = [(one, _CUSTOM_ROWS if one.batch == "auto" else one.batch) for one in evaluations]
        return {
            one.label: EvalBatchLimit(rows=rows, tokens=rows * (prompt_tokens + one.max_new_tokens), devices=devices)
            for one, rows in sizes
        }
    prompt_tokens = max(prompt_tokens, num_tokens(cfg.config, grids)) if grids else prompt_tokens
    cfg = _without_training(cfg, target, grids)
    known: dict[tuple[Any, ...], EvalBatchLimit] = {}
    limits, shared = {}, shared or SharedRehearsals()
    for one in evaluations:
        key = (one.batch, one.max_new_tokens, _reads(one), _window(one), _generates(one), isinstance(one.task, LmEval))
        if key not in known:
            limit = _limit_of(cfg, target, one, prompt_tokens, devices, shared)
            if limit.reserved_bytes is not None:
                held = held_bytes(target, limit.reserved_bytes)
                limit = replace(limit, held_bytes=held, budget_bytes=target.budget_bytes)
            known[key] = limit
        limits[one.label] = known[key]
    return limits


def _without_training(cfg: StepConfig, target: Target, grids: tuple[tuple[int, ...], ...]) -> StepConfig:
    """Leaves out what answers do not depend on, so that the stages of a pipeline share their rehearsals."""
    shape = {"adapter": None} if isinstance(cfg.tuning, Lora) else {}
    answering = step_config(cfg.config, cfg.tuning.model_copy(update=shape), target)
    return replace(answering, grids=grids, is_deterministic=cfg.is_deterministic)


def _generates(evaluation: Evaluation) -> bool:
    task = evaluation.task
    return task.generate if isinstance(task, TruthfulQa) else not isinstance(task, Hallucination | Perplexity)


def _reads(evaluation: Evaluation) -> bool:
    """Returns whether likelihoods of given answers are requested."""
    return isinstance(evaluation.task, Hallucination | Perplexity | TruthfulQa)


def _window(evaluation: Evaluation) -> int:
    """Returns the tokens of plain text that are read together, if the items are plain text; a prompt may be shorter."""
    return evaluation.task.window if isinstance(evaluation.task, Perplexity) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _EvalRehearsals:
    """Rehearses what an evaluation does with a batch, for any number of rows."""

    cfg: StepConfig
    target: Target
    evaluation: Evaluation
    shared: SharedRehearsals
    known: dict[tuple[int, int, int], int] = field(default_factory=dict)

    def full(self, rows: int, prompt: int, tiles: int) -> tuple[int, float | None]:
        """Returns reserved bytes and seconds."""
        found, rates = [run(self.cfg) for run in self._runs(rows, prompt, tiles)], self.target.rates
        seconds = None if rates is None else sum(one.seconds(rates) for one in found)
        return max(one.reserved_bytes for one in found), seconds

    def quick(self, rows: int, prompt: int, tiles: int) -> int:
        """Returns allocated bytes."""
        key = (rows, prompt, tiles)
        if key not in self.known:
            self.known[key] = max(extrapolated_bytes(self.cfg, run) for run in self._runs(*key))
        return self.known[key]

    def _runs(self, rows: int, prompt: int, tiles: int) -> Sequence[Callable[[StepConfig], GenerationRehearsal]]:
        new_tokens, grow = self.evaluation.max_new_tokens, self.target.expandable

        def generate(cfg: StepConfig) -> GenerationRehearsal:
            shape = {"rows": rows, "prompt_tokens": prompt, "new_tokens": new_tokens, "mlp_tiles": tiles}
            return self._shared(cfg, rehearse_answers, **shape, expandable=grow)

        def read(cfg: StepConfig) -> GenerationRehearsal:
            """A given answer may be as long as a generated one. For longer windows of plain text, in which every token
            counts, as many are read at once as the tokens allow, but at least one."""
            tokens, window = prompt + new_tokens, _window(self.evaluation)
            shapes = [(rows, tokens, new_tokens)]
            if window > tokens:
                shapes.append((max(1, rows * tokens // window), window, window - 1))
            found = [
                self._shared(cfg, rehearse_likelihood, rows=r, tokens=t, counted=c, mlp_tiles=tiles, expandable=grow)
                for r, t, c in shapes
            ]
            return max(found, key=lambda one: one.reserved_bytes)

        return [generate] * _generates(self.evaluation) + [read] * _reads(self.evaluation)

    def _shared(
        self, cfg: StepConfig, rehearse: Callable[..., GenerationRehearsal], **shape: int
    ) -> GenerationRehearsal:
        kernels = device_kernels(cfg.device, cfg.capability, cfg.precision)
        key = repr((rehearse.__name__, kernels, memo_key(cfg), shape))
        if key not in self.shared.answers:
            self.shared.note(f"evaluation {self.evaluation.label}, {shape['rows']} rows at once")
            self.shared.answers[key] = rehearse(cfg, **shape)
        return self.shared.answers[key]

    def most_rows(self, prompt: int) -> int:
        """Returns how many rows' images fit into host memory."""
        values = num_values(self.cfg.config, fitting(self.cfg.config, self.cfg.grids, prompt))
        return _MOST_VALUES // values if values else _MOST_VALUES

    def fits(self, reserved: int) -> bool:
        share = _CPU_SHARE if self.target.device == "cpu" else 1.0
        return held_bytes(self.target, reserved) <= self.target.budget_bytes * share


def _limit_of(
    cfg: StepConfig, target: Target, evaluation: Evaluation, prompt: int, devices: int, shared: SharedRehearsals
) -> EvalBatchLimit:
    is_free, rows = evaluation.batch == "auto", 1 if evaluation.batch == "auto" else evaluation.batch
    if isinstance(evaluation.task, LmEval):  # its prompts are unknown before it runs
        rows = _HARNESS_ROWS if is_free else rows
        return EvalBatchLimit(rows=rows, tokens=rows * _HARNESS_TOKENS)
    batches = _EvalRehearsals(cfg=cfg, target=target, evaluation=evaluation, shared=shared)
    tiles = 1
    if max(prompt, _window(evaluation)) > _LONG_PROMPT:  # no more tiles than one long prompt needs to fit
        tiles = next((tiles for tiles in _TILES if batches.fits(batches.quick(1, prompt, tiles))), _TILES[-1])
    if is_free:  # the largest power of two by allocated memory, which is slightly less than reserved memory
        most = min(_MOST_ROWS[target.device], batches.most_rows(prompt))
        powers = [1 << n for n in range(1, most.bit_length())]
        too_many = bisect_left(powers, True, key=lambda count: not batches.fits(batches.quick(count, prompt, tiles)))
        rows = 1 << too_many
    reserved, seconds = batches.full(rows, prompt, tiles)
    while rows > 1 and is_free and not batches.fits(reserved):
        rows //= 2
        reserved, seconds = batches.full(rows, prompt, tiles)
    tokens = rows * (prompt + evaluation.max_new_tokens)
    limit = EvalBatchLimit(
        rows=rows, tokens=tokens, mlp_tiles=tiles, reserved_bytes=reserved, batch_seconds=seconds, devices=devices
    )
    if not batches.fits(reserved) and devices > 1 and batches.fits(share := int(reserved / devices * _SPREAD)):
        return replace(limit, is_split_over_cards=True, reserved_bytes=share)
    return _with_shorter(batches, limit, prompt) if is_free else limit


def _with_shorter(batches: _EvalRehearsals, limit: EvalBatchLimit, longest: int) -> EvalBatchLimit:
    """Allows more rows of shorter prompts with the same number of tokens: their cache is as large, and what each row
    needs besides is rehearsed. The ratio of reserved to allocated memory is assumed to equal that of the longest
    prompts."""
    most = _MOST_ROWS["cuda"] * _MORE if batches.target.device == "cuda" else _MOST_ROWS["cpu"]
    rows, new_tokens = min(most, _MORE * limit.rows), batches.evaluation.max_new_tokens
    prompt = limit.tokens // rows - new_tokens
    while rows > limit.rows and (prompt < 2 or rows > batches.most_rows(prompt)):
        rows, prompt = rows // 2, limit.tokens // (rows // 2) - new_tokens
    if rows <= limit.rows or limit.reserved_bytes is None:
        return limit
    beyond = limit.reserved_bytes / batches.quick(limit.rows, longest, limit.mlp_tiles)
    reserved = int(batches.quick(rows, prompt, limit.mlp_tiles) * beyond)
    more = replace(limit, rows=rows, reserved_bytes=max(limit.reserved_bytes, reserved))
    return more if batches.fits(reserved) else limit
