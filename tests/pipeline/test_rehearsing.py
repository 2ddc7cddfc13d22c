"""The process that rehearses, seen from outside: one for many questions, gone when they are answered, and its end is no silence."""

import os
import signal

import psutil
import pytest

from finefit.artifacts.forecasts import Lengths, Question
from finefit.errors import ModelError
from finefit.pipeline.rehearsing import Rehearser, ask, one_rehearser
from finefit.spec.load import parse_spec, spec_to_json
from tests.rehearse.conftest import make_config

SPEC = """\
name: planned
model: {kind: folder, path: model}
tuning: {kind: full}
data: {train: [{path: train.jsonl}]}
optimizer: {lr: 1e-4}
schedule: {epochs: 3}
global_batch: 2
levers: {micro_batch: 1, recompute: none, keep_attention: false, loss_chunk: none, offload: none, mlp_tiles: 1}
"""
LENGTHS = Lengths(num_rows=8, longest=32, mean=32.0, supervised=16, mean_supervised=16.0, source="counted")


def _question(layers: int = 2, **changes: object) -> Question:
    config = make_config("llama-3.2-1b", layers=layers, vocab_size=512) | changes
    return Question(
        spec=spec_to_json(parse_spec(SPEC, where="spec.yaml", overrides=())),
        config=config,
        cards=("A100-80GB",),
        lengths=LENGTHS,
    )


def _workers() -> list[int]:
    return [child.pid for child in psutil.Process().children() if "finefit.plan.worker" in child.cmdline()]


def test_one_process_answers_all_that_is_asked_inside_and_then_ends() -> None:
    with one_rehearser():
        small = ask(_question(2)).forecasts[0]
        (first,) = _workers()
        with one_rehearser():  # of one stage among several
            large = ask(_question(3)).forecasts[0]
        assert _workers() == [first]
    assert large.peak_bytes > small.peak_bytes
    assert _workers() == []


def test_a_question_that_cannot_be_answered_leaves_the_process_to_the_next() -> None:
    with one_rehearser():
        refused = ask(_question(model_type="no such model")).failure
        assert refused is not None
        assert refused.kind == "ModelError"
        (first,) = _workers()
        assert ask(_question()).forecasts
        assert _workers() == [first]


def test_a_process_that_was_ended_is_told_with_its_signal_and_started_anew() -> None:
    with Rehearser() as rehearser:
        rehearser.ask(_question())
        os.kill(_workers()[0], signal.SIGKILL)
        with pytest.raises(ModelError, match="the rehearsal was ended by SIGKILL inside torch"):
            rehearser.ask(_question())
        assert rehearser.ask(_question()).forecasts
    assert _workers() == []


def _broken_off() -> None:
    with one_rehearser():
        ask(_question())
        raise KeyboardInterrupt


def test_nothing_is_left_where_the_asking_is_broken_off() -> None:
    with pytest.raises(KeyboardInterrupt):
        _broken_off()
    assert _workers() == []
