"""The process that rehearses: a fault inside torch ends it and not its caller, and the caller need not import torch.

A line on its standard input names a file with a question and the one for its answer; when that is written, a line says so.
"""

import faulthandler
import sys
import warnings
from dataclasses import replace
from pathlib import Path

from finefit.artifacts.forecasts import Answer, Forecast, Question, Room
from finefit.artifacts.records import Failure, read_record, write_record
from finefit.errors import FinefitError
from finefit.facts.cards import CardRequest, parse_card
from finefit.facts.machine import Machine, read_machine
from finefit.plan.engine import devices_of, nodes_of, require_same_count
from finefit.plan.forecast import make_forecast
from finefit.plan.rooms import make_rooms, scene_for_answers, shown_most
from finefit.plan.target import find_target
from finefit.rehearse.rehearsal import Rehearsed
from finefit.spec.load import spec_from_json


def answer(question: Question) -> list[Forecast]:
    spec, machine = spec_from_json(question.spec), _machine(question)
    requests = [parse_card(card) for card in question.cards]
    for request in requests:
        require_same_count(request, spec.engine)
    devices, nodes = devices_of(spec.engine), nodes_of(spec.launcher)
    targets = [
        find_target(request, machine, spec.precision, devices=devices, nodes=nodes, allocator=question.allocator)
        for request in requests
    ]
    if question.budget_bytes is not None:
        targets = [replace(target, budget_bytes=min(target.budget_bytes, question.budget_bytes)) for target in targets]
    memo: dict[str, Rehearsed] = {}
    return [make_forecast(spec, question.config, question.lengths, target, memo) for target in targets]


def rooms(question: Question) -> list[dict[str, Room]]:
    """Of evaluations alone, on one card at a time; their items are shared over all that are there."""
    spec, machine = spec_from_json(question.spec), _machine(question)
    found = []
    for request in map(parse_card, question.cards):
        target = find_target(request, machine, spec.precision, allocator=question.allocator)
        scene = scene_for_answers(question.config, spec.tuning, target)
        prompt = question.lengths.prompt or question.lengths.longest
        most = shown_most(question.lengths)
        found.append(
            make_rooms(
                scene, target, spec.evaluate, prompt_tokens=prompt, devices=_devices(request, machine), grids=most
            )
        )
    return found


def _devices(request: CardRequest, machine: Machine) -> int:
    return max(1, len(machine.cards)) if request.is_auto else request.count


def _machine(question: Question) -> Machine:
    machine = read_machine()
    if question.visible is None:
        return machine
    return replace(machine, cards=tuple(card for at, card in enumerate(machine.cards) if at in question.visible))


def main() -> None:
    faulthandler.enable()
    warnings.simplefilter("ignore")  # of transformers, about a config that nobody loads
    said, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    for line in sys.stdin:
        asked, answered = map(Path, line.rstrip("\n").split("\t"))
        write_record(answered, reply(read_record(asked, Question)))
        print("answered", file=said, flush=True)


def reply(question: Question) -> Answer:
    try:
        return (
            Answer(rooms=tuple(rooms(question))) if question.only_rooms else Answer(forecasts=tuple(answer(question)))
        )
    except FinefitError as error:
        return Answer(failure=Failure.of(error))


if __name__ == "__main__":
    main()
