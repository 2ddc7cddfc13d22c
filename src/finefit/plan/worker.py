"""The process that rehearses: a crash inside torch ends it and not its caller, and the caller need not import torch.

A line on its standard input names the file of a request and the one for its result; when the result is written, it
answers with a line.
"""

import faulthandler
import sys
import warnings
from dataclasses import replace
from pathlib import Path

from finefit.artifacts.forecasts import EvalBatchLimit, Forecast, RehearsalRequest, RehearsalResult
from finefit.artifacts.records import Failure, read_record, write_record
from finefit.errors import FinefitError
from finefit.facts.cards import parse_card
from finefit.facts.machine import Machine, read_machine
from finefit.plan.eval_memory import eval_config, largest_prompt_grids, make_eval_limits
from finefit.plan.forecast import make_forecast
from finefit.plan.target import devices_of, find_target, nodes_of, require_same_count
from finefit.rehearse.rehearsal import Rehearsal
from finefit.spec.load import spec_from_json


def answer(request: RehearsalRequest) -> list[Forecast]:
    spec, machine = spec_from_json(request.spec), _machine(request)
    cards = [parse_card(card) for card in request.cards]
    for card in cards:
        require_same_count(card, spec.engine)
    devices, nodes, allocator = devices_of(spec.engine), nodes_of(spec.launcher), request.allocator
    targets = [
        find_target(card, machine, spec.precision, devices=devices, nodes=nodes, allocator=allocator) for card in cards
    ]
    if request.budget_bytes is not None:
        targets = [replace(target, budget_bytes=min(target.budget_bytes, request.budget_bytes)) for target in targets]
    memo: dict[str, Rehearsal] = {}
    return [make_forecast(spec, request.config, request.lengths, target, memo) for target in targets]


def eval_limits(request: RehearsalRequest) -> list[dict[str, EvalBatchLimit]]:
    """Of evaluations alone, on one card at a time; their items are shared over all cards."""
    spec, machine, lengths = spec_from_json(request.spec), _machine(request), request.lengths
    prompt, grids = lengths.prompt or lengths.longest, largest_prompt_grids(lengths)
    found = []
    for card in map(parse_card, request.cards):
        target = find_target(card, machine, spec.precision, allocator=request.allocator)
        cfg = eval_config(request.config, spec.tuning, target)
        devices = max(1, len(machine.cards)) if card.is_auto else card.count
        found.append(make_eval_limits(cfg, target, spec.evaluate, prompt_tokens=prompt, devices=devices, grids=grids))
    return found


def _machine(request: RehearsalRequest) -> Machine:
    machine, visible = read_machine(), request.visible
    if visible is None:
        return machine
    return replace(machine, cards=tuple(card for at, card in enumerate(machine.cards) if at in visible))


def main() -> None:
    faulthandler.enable()
    warnings.simplefilter("ignore")  # of transformers, about a config that nobody loads
    replies, sys.stdout = sys.stdout, sys.stderr  # what a library prints is not a reply
    for line in sys.stdin:
        asked, answered = map(Path, line.rstrip("\n").split("\t"))
        write_record(answered, reply(read_record(asked, RehearsalRequest)))
        print("answered", file=replies, flush=True)


def reply(request: RehearsalRequest) -> RehearsalResult:
    try:
        if request.only_eval_limits:
            return RehearsalResult(eval_limits=tuple(eval_limits(request)))
        return RehearsalResult(forecasts=tuple(answer(request)))
    except FinefitError as error:
        return RehearsalResult(failure=Failure.of(error))


if __name__ == "__main__":
    main()
