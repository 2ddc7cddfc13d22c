"""The process that rehearses: a fault inside torch ends it and not its caller, and the caller need not import torch."""

import faulthandler
import sys
import warnings
from dataclasses import replace
from pathlib import Path

from finefit.artifacts.records import Answer, Failure, Forecast, Question, read_record, write_record
from finefit.errors import FinefitError
from finefit.facts.cards import parse_card
from finefit.facts.machine import read_machine
from finefit.plan.engine import devices_of, nodes_of, require_same_count
from finefit.plan.forecast import make_forecast
from finefit.plan.target import find_target
from finefit.rehearse.rehearsal import Rehearsed
from finefit.spec.load import spec_from_json


def answer(question: Question) -> list[Forecast]:
    spec, machine = spec_from_json(question.spec), read_machine()
    if question.visible is not None:
        machine = replace(machine, cards=tuple(card for at, card in enumerate(machine.cards) if at in question.visible))
    requests = [parse_card(card) for card in question.cards]
    for request in requests:
        require_same_count(request, spec.engine)
    devices, nodes = devices_of(spec.engine), nodes_of(spec.launcher)
    targets = [find_target(request, machine, spec.precision, devices=devices, nodes=nodes, allocator=question.allocator) for request in requests]
    if question.budget_bytes is not None:
        targets = [replace(target, budget_bytes=min(target.budget_bytes, question.budget_bytes)) for target in targets]
    memo: dict[str, Rehearsed] = {}
    return [make_forecast(spec, question.config, question.lengths, target, memo) for target in targets]


def main() -> None:
    faulthandler.enable()
    warnings.simplefilter("ignore")  # of transformers, about a config that nobody loads
    asked, answered = map(Path, sys.argv[1:])
    try:
        found = Answer(forecasts=tuple(answer(read_record(asked, Question))))
    except FinefitError as error:
        found = Answer(failure=Failure.of(error))
    write_record(answered, found)


if __name__ == "__main__":
    main()
