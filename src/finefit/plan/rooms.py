"""How much an evaluation may hold at once: the most rows of the longest prompts whose rehearsal fits, and more of shorter ones within as many tokens.

It has a process of its own and is exact, so it takes all that the card has.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from finefit.artifacts.forecasts import Lengths, Room
from finefit.artifacts.records import Levers
from finefit.model.custom_files import written_in
from finefit.plan.custom import own_rooms
from finefit.plan.target import Target
from finefit.rehearse.generation import Generated, allocated_by_depth, generate, read_through
from finefit.rehearse.scene import Scene
from finefit.rehearse.showing import fitting, num_tokens, num_values
from finefit.spec.models import Tuning
from finefit.spec.schema import AdamW, Evaluation
from finefit.spec.tasks import Hallucination, LmEval, Perplexity, TruthfulQa

_MOST_ROWS = {"cuda": 64, "cpu": 16}
"""Of the longest prompts: more gain little, and a long batch waits for its slowest row."""
_MORE = 4
"""Times as many rows where prompts are shorter."""
_MOST_VALUES = 1 << 29
"""Numbers of pixels in a batch, which lie in the machine's memory before they reach the card; 2 GiB of them."""
_LONG_PROMPT = 16384
"""Longer ones may pass an MLP in pieces."""
_TILES = (1, 4, 16)
_PROCESSOR_SHARE = 0.5
"""Of a machine's memory: it is not there for this alone."""
_HARNESS_ROWS, _HARNESS_TOKENS = 8, 2048
_SPREAD = 1.15
"""Of an even share of a model, what the fullest of several cards may get: layers are not divided."""


def held_bytes(target: Target, reserved: int) -> int:
    """What a card must hold for a process that reserves so much; nothing for one that is not started."""
    return reserved + int(reserved * target.margin) + target.margin_bytes + target.context_bytes if reserved else 0


def scene_for_answers(config: dict[str, Any], tuning: Tuning, target: Target) -> Scene:
    """Where nothing is trained."""
    return Scene(
        config=config,
        tuning=tuning,
        optimizer=AdamW(lr=1.0),
        device=target.device,
        capability=target.capability,
        precision=target.precision,
        levers=Levers(micro_batch=1),
        tokens=1,
        supervised=1,
        accumulates=False,
    )


def make_rooms(
    scene: Scene,
    target: Target,
    evaluations: Iterable[Evaluation],
    *,
    prompt_tokens: int,
    devices: int,
    grids: tuple[tuple[int, ...], ...] = (),
) -> dict[str, Room]:
    """By label. `devices`: cards that the items may be shared over. `grids`: of the images of the prompt that shows most; every prompt is taken to
    show them, as far as it has room."""
    if written_in(scene.config) is not None:
        return own_rooms(evaluations, prompt_tokens=prompt_tokens, devices=devices)
    prompt_tokens = max(prompt_tokens, num_tokens(scene.config, grids)) if grids else prompt_tokens
    scene = replace(scene, levers=Levers(micro_batch=1), grids=grids)
    known: dict[tuple[Any, ...], Room] = {}
    rooms = {}
    for evaluation in evaluations:
        reading = _reads(evaluation), _window(evaluation)
        key = (
            evaluation.batch,
            evaluation.max_new_tokens,
            *reading,
            _generates(evaluation),
            isinstance(evaluation.task, LmEval),
        )
        if key not in known:
            known[key] = _held(_room(scene, target, evaluation, prompt_tokens, devices), target)
        rooms[evaluation.label] = known[key]
    return rooms


def shown_most(lengths: Lengths) -> tuple[tuple[int, ...], ...]:
    """By a prompt; where none is known, by any row."""
    return lengths.grids if lengths.prompt is None else lengths.prompt_grids


def _held(room: Room, target: Target) -> Room:
    """With what that asks of the device."""
    if room.reserved_bytes is None:
        return room
    return replace(room, held_bytes=held_bytes(target, room.reserved_bytes), budget_bytes=target.budget_bytes)


def _generates(evaluation: Evaluation) -> bool:
    match evaluation.task:
        case Hallucination() | Perplexity():
            return False
        case TruthfulQa():
            return evaluation.task.generate
    return True


def _reads(evaluation: Evaluation) -> bool:
    """Whether likelihoods of given answers are asked for."""
    return isinstance(evaluation.task, Hallucination | Perplexity | TruthfulQa)


def _window(evaluation: Evaluation) -> int:
    """Tokens of plain text that are read together, should the items be that; a prompt may be shorter."""
    return evaluation.task.window if isinstance(evaluation.task, Perplexity) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batches:
    """What an evaluation does with a batch, rehearsed for as many rows as asked."""

    scene: Scene
    target: Target
    evaluation: Evaluation
    new_tokens: int
    known: dict[tuple[int, int, int], int] = field(default_factory=dict)

    def whole(self, rows: int, prompt: int, tiles: int) -> tuple[int, float | None]:
        """Reserved bytes and seconds."""
        found = [self._generated(self.scene, rows, prompt, tiles)] if _generates(self.evaluation) else []
        found += [self._read(self.scene, rows, prompt, tiles)] if _reads(self.evaluation) else []
        rates = self.target.rates
        return max(one.reserved_bytes for one in found), None if rates is None else sum(
            one.seconds(rates) for one in found
        )

    def quick(self, rows: int, prompt: int, tiles: int) -> int:
        """Allocated bytes."""
        key = (rows, prompt, tiles)
        if key not in self.known:
            self.known[key] = self._quick(*key)
        return self.known[key]

    def _quick(self, rows: int, prompt: int, tiles: int) -> int:
        found = [lambda scene: self._generated(scene, rows, prompt, tiles)] if _generates(self.evaluation) else []
        found += [lambda scene: self._read(scene, rows, prompt, tiles)] if _reads(self.evaluation) else []
        return max(allocated_by_depth(self.scene, rehearse) for rehearse in found)

    def most_shown(self, prompt: int) -> int:
        """Rows whose images are not too many numbers."""
        shown = num_values(self.scene.config, fitting(self.scene.config, self.scene.grids, prompt))
        return _MOST_VALUES // shown if shown else _MOST_VALUES

    def fits(self, reserved: int) -> bool:
        share = _PROCESSOR_SHARE if self.target.device == "cpu" else 1.0
        return held_bytes(self.target, reserved) <= self.target.budget_bytes * share

    def _generated(self, scene: Scene, rows: int, prompt: int, tiles: int) -> Generated:
        expandable = self.target.expandable
        return generate(
            scene, rows=rows, prompt_tokens=prompt, new_tokens=self.new_tokens, mlp_tiles=tiles, expandable=expandable
        )

    def _read(self, scene: Scene, rows: int, prompt: int, tiles: int) -> Generated:
        """An answer that is given may be as long as one that is generated. Of longer windows of plain text, in which every token counts, as many are
        read as there are tokens for, and one at least."""
        tokens, window = prompt + self.new_tokens, _window(self.evaluation)
        shapes = [(rows, tokens, self.new_tokens)]
        if window > tokens:
            shapes.append((max(1, rows * tokens // window), window, window - 1))
        expandable = self.target.expandable
        found = [
            read_through(scene, rows=r, tokens=t, counted=counted, mlp_tiles=tiles, expandable=expandable)
            for r, t, counted in shapes
        ]
        return max(found, key=lambda one: one.reserved_bytes)


def _room(scene: Scene, target: Target, evaluation: Evaluation, prompt: int, devices: int) -> Room:
    if isinstance(evaluation.task, LmEval):  # whose prompts are not known before it runs
        rows = _HARNESS_ROWS if evaluation.batch == "auto" else evaluation.batch
        return Room(rows=rows, tokens=rows * _HARNESS_TOKENS)
    batches = _Batches(scene=scene, target=target, evaluation=evaluation, new_tokens=evaluation.max_new_tokens)
    tiles = _tiles(batches, prompt)
    rows = _rows(batches, prompt, tiles) if evaluation.batch == "auto" else evaluation.batch
    reserved, seconds = batches.whole(rows, prompt, tiles)
    while rows > 1 and evaluation.batch == "auto" and not batches.fits(reserved):
        rows //= 2
        reserved, seconds = batches.whole(rows, prompt, tiles)
    room = Room(
        rows=rows,
        tokens=rows * (prompt + evaluation.max_new_tokens),
        mlp_tiles=tiles,
        reserved_bytes=reserved,
        batch_seconds=seconds,
    )
    if not batches.fits(reserved) and devices > 1 and batches.fits(int(reserved / devices * _SPREAD)):
        return replace(room, devices=devices, is_spread=True, reserved_bytes=int(reserved / devices * _SPREAD))
    return replace(_with_shorter(batches, room, prompt) if evaluation.batch == "auto" else room, devices=devices)


def _tiles(batches: _Batches, prompt: int) -> int:
    """An MLP is cut only where one long prompt would not fit otherwise, and into no more pieces than that takes."""
    if max(prompt, _window(batches.evaluation)) <= _LONG_PROMPT or batches.fits(batches.quick(1, prompt, 1)):
        return 1
    return next((tiles for tiles in _TILES if batches.fits(batches.quick(1, prompt, tiles))), _TILES[-1])


def _rows(batches: _Batches, prompt: int, tiles: int) -> int:
    """The largest power of two by what is allocated, which is a little less than what is reserved."""
    rows, most = 1, min(_MOST_ROWS[batches.target.device], batches.most_shown(prompt))
    while 2 * rows <= most and batches.fits(batches.quick(2 * rows, prompt, tiles)):
        rows *= 2
    return rows


def _with_shorter(batches: _Batches, room: Room, longest: int) -> Room:
    """More rows of shorter prompts, in as many tokens: their cache is as large, what each row has of its own is rehearsed. The allocator is taken to
    hold as much beyond what is allocated as for the longest."""
    most = _MOST_ROWS["cuda"] * _MORE if batches.target.device == "cuda" else _MOST_ROWS["cpu"]
    rows = min(most, _MORE * room.rows)
    prompt = room.tokens // rows - batches.new_tokens
    while rows > room.rows and (prompt < 2 or rows > batches.most_shown(prompt)):
        rows, prompt = rows // 2, room.tokens // (rows // 2) - batches.new_tokens
    if rows <= room.rows or room.reserved_bytes is None:
        return room
    beyond = room.reserved_bytes / batches.quick(room.rows, longest, room.mlp_tiles)
    reserved = int(batches.quick(rows, prompt, room.mlp_tiles) * beyond)
    return (
        replace(room, rows=rows, reserved_bytes=max(room.reserved_bytes, reserved)) if batches.fits(reserved) else room
    )
