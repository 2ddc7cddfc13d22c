"""The planning process: does everything for which a plan needs torch, so that a crash inside torch ends only this
process, and its caller need not import torch.

It reads jobs with their arguments from standard input until that ends, and answers with the job's result or error."""

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
from functools import partial
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
from finefit.custom.model import prove_custom_loadable
from finefit.errors import FinefitError
from finefit.facts.cards import parse_card
from finefit.facts.machine import Machine, read_machine
from finefit.facts.nvml import numbered
from finefit.model.load import quiet
from finefit.model.loadable import prove_loadable
from finefit.model.resolve_model import custom_source_in
from finefit.moe.build import moe_config, unknown_mlp_tensor
from finefit.moe.dense import keep_tokenizer, require_same_config
from finefit.plan.client import Job
from finefit.plan.eval_memory import SharedRehearsals, largest_prompt_grids, make_eval_limits, step_config
from finefit.plan.forecast import make_forecast
from finefit.plan.stage_forecasts import LongestPossibleImages, MixtureShape
from finefit.plan.target import devices_of, find_target, nodes_of, require_same_count
from finefit.rehearse.fake_model import read_config
from finefit.rehearse.generation import GenerationRehearsal
from finefit.rehearse.host_speed import host_speed
from finefit.spec.data import ImageLimits
from finefit.spec.load import spec_from_json
from finefit.vision import auto_class, geometry_of, open_image_processor

Report = Callable[[PlanningProgress], None]
_answers: dict[str, GenerationRehearsal] = {}
"""Rehearsals of evaluations that the stages of a pipeline share, for the lifetime of the process."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_SIDE_STEP, _LARGEST_SIDE = 28, 4480
"""Sides of the square images that are tried, in pixels."""
_TOKENS_BESIDE_IMAGE = 2
"""One token before the image, and one token to answer."""


def rehearse(request: RehearsalRequest, report: Report = lambda _: None) -> RehearsalResult:
    """`report` is called with every candidate before it is rehearsed."""
    machine = read_machine()
    machine = replace(machine, cards=numbered(machine.cards, request.visible))
    if request.only_eval_limits:
        return RehearsalResult(eval_limits=tuple(_eval_limits(request, machine, report)))
    return RehearsalResult(forecasts=tuple(_forecasts(request, machine, report)))


def _notes_of(request: RehearsalRequest, report: Report) -> Iterator[Callable[[str], None]]:
    """Yields for each card the function that reports the rehearsal of a candidate to the caller."""
    for number, card in enumerate(request.cards, 1):

        def note(doing: str, card: str = card, number: int = number) -> None:
            report(PlanningProgress(card=card, number=number, num_cards=len(request.cards), doing=doing))

        yield note


def _forecasts(request: RehearsalRequest, machine: Machine, report: Report) -> list[Forecast]:
    spec, cards = spec_from_json(request.spec), [parse_card(card) for card in request.cards]
    for card in cards:
        require_same_count(card, spec.engine)
    devices, nodes, allocator = devices_of(spec.engine), nodes_of(spec.launcher), request.allocator
    locate = partial(find_target, devices=devices, nodes=nodes, allocator=allocator)
    host_factor = host_speed(machine).factor if machine.cards else 1.0
    targets = [locate(card, machine, spec.precision, host_factor=host_factor) for card in cards]
    if request.budget_bytes is not None:
        targets = [replace(target, budget_bytes=min(target.budget_bytes, request.budget_bytes)) for target in targets]
    shared = SharedRehearsals(answers=_answers)
    return [
        make_forecast(spec, request.config, request.lengths, target, replace(shared, note=note))
        for target, note in zip(targets, _notes_of(request, report), strict=True)
    ]


def _eval_limits(request: RehearsalRequest, machine: Machine, report: Report) -> list[dict[str, EvalBatchLimit]]:
    """Computes the limits of evaluations alone, for one card at a time; their items are divided over all cards."""
    spec, lengths = spec_from_json(request.spec), request.lengths
    prompt, grids = lengths.prompt or lengths.longest, largest_prompt_grids(lengths)
    found, shared = [], SharedRehearsals(answers=_answers)
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
    """Counts on the meta device; tied tensors count once."""
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
    """Fills a folder that already holds the tokenizer's text files."""
    config = moe_config(dense, num_experts=mixture.num_experts, top_k=mixture.top_k, shared=mixture.shared)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if tokenizer is not None:
        keep_tokenizer(tokenizer, folder)  # this opens the tokenizer with the mixture's config


def longest_possible_images(
    config: dict[str, Any], tokenizer: Path | None, limits: ImageLimits, tokens: int
) -> LongestPossibleImages:
    """Returns the images assumed in rows of `tokens` tokens, image tokens included: the largest square image that
    `max_pixels` allows; without `max_pixels`, one whose tokens fill half a row, or else the smallest. A model of kind
    shape has no processor and is assumed not to scale images; a custom model gets them unscaled, as many as it
    requests, or one."""
    if (source := custom_source_in(config)) is not None:
        twin = meta_twin(source)
        count = (1 if twin.views is None else twin.views) if twin.has_vision else 0
        width, height = UNKNOWN_SIZE
        images = "an image" if count == 1 else f"{count} images"
        note = f", each with {images} of {width} x {height} pixels" if count else ""
        return LongestPossibleImages(grids=(UNKNOWN_SIZE,) * count, note=note)
    geometry = geometry_of(config)
    if geometry is None:
        return LongestPossibleImages()
    processor = None if tokenizer is None else open_image_processor(tokenizer, config, limits)
    largest = _LARGEST_SIDE if limits.max_pixels is None else math.isqrt(limits.max_pixels)
    sides = (*range(_SIDE_STEP, largest, _SIDE_STEP), largest)
    grids = [geometry.square_grid(side) if processor is None else processor.grid((side, side)) for side in sides]
    fitting = [grid for grid in grids if geometry.num_tokens(grid) <= tokens - _TOKENS_BESIDE_IMAGE]
    if not fitting:
        return LongestPossibleImages(note=f", without images: none fits into {tokens:,} tokens")
    small = [grid for grid in fitting if limits.max_pixels is not None or 2 * geometry.num_tokens(grid) <= tokens]
    grid = max(small or fitting[:1], key=geometry.num_tokens)
    return LongestPossibleImages(grids=(grid,), note=f", each with an image of {geometry.num_tokens(grid):,} tokens")


JOBS: dict[Job, Callable[..., object]] = {
    "rehearse": rehearse,
    "count_parameters": count_parameters,
    "fill_mixture_stub": fill_mixture_stub,
    "require_same_config": require_same_config,
    "longest_possible_images": longest_possible_images,
    "prove_loadable": prove_loadable,
    "prove_custom_loadable": prove_custom_loadable,
}


def main() -> None:
    faulthandler.enable()
    quiet()
    warnings.simplefilter("ignore")  # transformers warns about a config that nobody loads
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output that a library prints must not be read as an answer

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
