"""The planning process: all that a plan needs torch for, so that a crash inside torch ends this process and not its
caller, and the caller need not import torch.

It reads a job and its arguments from standard input, until its end, and answers with what the job returns or raises."""

import faulthandler
import json
import math
import os
import pickle
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from finefit.artifacts.forecasts import (
    EvalBatchLimit,
    Forecast,
    ModelSize,
    PlanningProgress,
    RehearsalRequest,
    RehearsalResult,
)
from finefit.custom.inputs import UNKNOWN_SIZE, meta_twin
from finefit.errors import FinefitError
from finefit.facts.cards import parse_card
from finefit.facts.machine import Machine, read_machine
from finefit.model.load import quiet
from finefit.model.loadable import prove_loadable
from finefit.model.resolve_model import custom_source_in
from finefit.moe.build import moe_config, unknown_mlp_tensor
from finefit.moe.dense import keep_tokenizer, require_same_config
from finefit.plan.client import Job
from finefit.plan.eval_memory import SharedRehearsals, largest_prompt_grids, make_eval_limits, step_config
from finefit.plan.forecast import make_forecast
from finefit.plan.stage_forecasts import AssumedImages, MixtureShape
from finefit.plan.target import devices_of, find_target, nodes_of, require_same_count
from finefit.rehearse.fake_model import read_config
from finefit.spec.data import ImageLimits
from finefit.spec.load import spec_from_json
from finefit.vision import auto_class, geometry_of, open_image_processor

Report = Callable[[PlanningProgress], None]
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_SIDE_STEP, _LARGEST_SIDE = 28, 4480
"""Pixels of the square images that are tried."""
_TOKENS_BESIDE_IMAGE = 2
"""One before the image, and one to be answered."""


def rehearse(request: RehearsalRequest, report: Report = lambda _: None) -> RehearsalResult:
    """`report` is told of every candidate before it is rehearsed."""
    machine = read_machine()
    if request.visible is not None:
        cards = tuple(card for at, card in enumerate(machine.cards) if at in request.visible)
        machine = replace(machine, cards=cards)
    if request.only_eval_limits:
        return RehearsalResult(eval_limits=tuple(_eval_limits(request, machine, report)))
    return RehearsalResult(forecasts=tuple(_forecasts(request, machine, report)))


def _notes_of(request: RehearsalRequest, report: Report) -> Iterator[Callable[[str], None]]:
    """For each card: what tells the caller that one of its candidates is being rehearsed."""
    for number, card in enumerate(request.cards, 1):

        def note(doing: str, card: str = card, number: int = number) -> None:
            report(PlanningProgress(card=card, number=number, num_cards=len(request.cards), doing=doing))

        yield note


def _forecasts(request: RehearsalRequest, machine: Machine, report: Report) -> list[Forecast]:
    spec, cards = spec_from_json(request.spec), [parse_card(card) for card in request.cards]
    for card in cards:
        require_same_count(card, spec.engine)
    devices, nodes, allocator = devices_of(spec.engine), nodes_of(spec.launcher), request.allocator
    targets = [
        find_target(card, machine, spec.precision, devices=devices, nodes=nodes, allocator=allocator) for card in cards
    ]
    if request.budget_bytes is not None:
        targets = [replace(target, budget_bytes=min(target.budget_bytes, request.budget_bytes)) for target in targets]
    shared = SharedRehearsals()
    return [
        make_forecast(spec, request.config, request.lengths, target, replace(shared, note=note))
        for target, note in zip(targets, _notes_of(request, report), strict=True)
    ]


def _eval_limits(request: RehearsalRequest, machine: Machine, report: Report) -> list[dict[str, EvalBatchLimit]]:
    """Of evaluations alone, on one card at a time; their items are shared over all cards."""
    spec, lengths = spec_from_json(request.spec), request.lengths
    prompt, grids = lengths.prompt or lengths.longest, largest_prompt_grids(lengths)
    found, shared = [], SharedRehearsals()
    for card, note in zip(map(parse_card, request.cards), _notes_of(request, report), strict=True):
        target = find_target(card, machine, spec.precision, allocator=request.allocator)
        cfg = step_config(request.config, spec.tuning, target)
        devices = max(1, len(machine.cards)) if card.is_auto else card.count
        shared = replace(shared, note=note)
        found.append(
            make_eval_limits(
                cfg, target, spec.evaluate, prompt_tokens=prompt, devices=devices, grids=grids, shared=shared
            )
        )
    return found


def count_parameters(config: dict[str, Any]) -> ModelSize:
    """On the meta device; tied tensors count once."""
    read = read_config(config)
    with torch.device("meta"):
        model = auto_class(read).from_config(read)
    sizes: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        match = _LAYER.search(name)
        sizes[match[1] if match else "outside"] += parameter.numel()
    outside = sizes.pop("outside", 0)
    return ModelSize(
        parameters=outside + sizes.total(),
        outside=outside,
        largest_layer=max(sizes.values(), default=0),
        foreign=unknown_mlp_tensor(name for name, _ in model.named_parameters()),
    )


def fill_mixture_stub(folder: Path, dense: dict[str, Any], mixture: MixtureShape, tokenizer: Path | None) -> None:
    """Which has the texts of the tokenizer already."""
    config = moe_config(dense, num_experts=mixture.num_experts, top_k=mixture.top_k, shared=mixture.shared)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if tokenizer is not None:
        keep_tokenizer(tokenizer, folder)  # which opens it with the mixture's config


def assume_images(config: dict[str, Any], tokenizer: Path | None, limits: ImageLimits, tokens: int) -> AssumedImages:
    """In rows of `tokens` tokens, image tokens included: the largest square image that `max_pixels` allows; without
    `max_pixels` one whose tokens fill half a row, or else the smallest. A model of kind shape has no processor and is
    assumed not to scale images; a custom one gets them as they are, as many as it asks for, or one."""
    if (source := custom_source_in(config)) is not None:
        twin = meta_twin(source)
        count = (1 if twin.views is None else twin.views) if twin.has_vision else 0
        width, height = UNKNOWN_SIZE
        images = "an image" if count == 1 else f"{count} images"
        note = f", each with {images} of {width} x {height} pixels" if count else ""
        return AssumedImages(grids=(UNKNOWN_SIZE,) * count, note=note)
    geometry = geometry_of(config)
    if geometry is None:
        return AssumedImages()
    processor = None if tokenizer is None else open_image_processor(tokenizer, config, limits)
    largest = _LARGEST_SIDE if limits.max_pixels is None else math.isqrt(limits.max_pixels)
    sides = (*range(_SIDE_STEP, largest, _SIDE_STEP), largest)
    grids = [geometry.square_grid(side) if processor is None else processor.grid((side, side)) for side in sides]
    fitting = [grid for grid in grids if geometry.num_tokens(grid) <= tokens - _TOKENS_BESIDE_IMAGE]
    if not fitting:
        return AssumedImages(note=f", without images: none fits into {tokens:,} tokens")
    small = [grid for grid in fitting if limits.max_pixels is not None or 2 * geometry.num_tokens(grid) <= tokens]
    grid = max(small or fitting[:1], key=geometry.num_tokens)
    return AssumedImages(grids=(grid,), note=f", each with an image of {geometry.num_tokens(grid):,} tokens")


JOBS: dict[Job, Callable[..., object]] = {
    "rehearse": rehearse,
    "count_parameters": count_parameters,
    "fill_mixture_stub": fill_mixture_stub,
    "require_same_config": require_same_config,
    "assume_images": assume_images,
    "prove_loadable": prove_loadable,
}


def main() -> None:
    faulthandler.enable()
    quiet()
    warnings.simplefilter("ignore")  # of transformers, about a config that nobody loads
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is not an answer

    def say(answer: object) -> None:
        pickle.dump(answer, answers)
        answers.flush()

    while True:
        try:
            job, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = JOBS[job](*arguments, *((say,) if job == "rehearse" else ()))
        except FinefitError as error:
            answer = error
        say(answer)


if __name__ == "__main__":
    main()
