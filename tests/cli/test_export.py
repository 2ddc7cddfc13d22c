"""`finefit export` of a finished run, as a user gives it."""

import os
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from finefit.artifacts.export_records import EXPORT, ExportReport
from finefit.artifacts.records import read_record
from tests.cli.conftest import Finefit

RUN = "runs/tiny-1"


@pytest.mark.parametrize("arguments", [("export", "nowhere", "--to", "merged"), ("chat", "nowhere")], ids=str)
def test_a_verb_that_computes_itself_sets_what_workers_have_and_leaves_what_the_user_set(
    arguments: tuple[str, ...], finefit: Finefit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that spin while they wait take three times as long on shared cores."""
    for asked, wanted in ((None, "2000"), ("7", "7")):
        monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
        if asked is not None:
            monkeypatch.setenv("GOMP_SPINCOUNT", asked)
        assert finefit(*arguments).code == 2
        assert os.environ["GOMP_SPINCOUNT"] == wanted


def test_a_run_is_exported_with_its_held_out_rows_and_its_task(finished: Path, finefit: Finefit) -> None:
    answer = finefit("export", RUN, "--to", "merged", "--out", "taken", "--json")
    assert answer.code == 0, answer.err
    report = read_record(finished / "taken" / EXPORT, ExportReport)
    assert answer.document["out"] == "taken"
    assert answer.document["export"]["name"] == report.name == "tiny-1"
    assert (report.prompts, report.prompts_from) == (5, "test")
    (one,) = report.exports
    assert (one.format, one.path, one.problems) == ("merged:fp32", ".", ())
    assert one.score is not None
    assert one.score.trained == one.score.exported
    assert AutoModelForCausalLM.from_pretrained(finished / "taken").num_parameters() == report.parameters
    assert AutoTokenizer.from_pretrained(finished / "taken").chat_template == report.template


@pytest.mark.parametrize("target", [RUN, f"{RUN}:9", f"{RUN}/stages/1-sft/checkpoints/final"])
def test_a_checkpoint_is_named_in_every_usual_way(target: str, finished: Path, finefit: Finefit) -> None:
    answer = finefit("export", target, "--to", "adapter", "-o", "taken", "--prompts", "1")
    assert answer.code == 0, answer.err
    checkpoint = read_record(finished / "taken" / EXPORT, ExportReport).checkpoint
    wanted = {RUN: "best", f"{RUN}:9": "checkpoint-9"}.get(target, "final")
    assert checkpoint == (finished / RUN / "stages/1-sft/checkpoints" / wanted).resolve().name
    assert not list((finished / "taken").glob("finefit_state*"))


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (f"{RUN}/stages/1-sft/checkpoints/best/adapter_model.safetensors", "does not verify"),
        ("model/model.safetensors", "has changed since tiny-1 was trained"),
    ],
)
def test_weights_that_are_not_those_of_the_training_are_not_exported(
    file: str, words: str, finished: Path, finefit: Finefit
) -> None:
    path = finished / file
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    answer = finefit("export", RUN, "--to", "adapter", "-o", "taken", "--prompts", "1")
    assert answer.code == 2, answer.err
    assert words in answer.err
    assert not (finished / "taken").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([RUN, "--to", "onnx"], "onnx"),
        ([RUN, "--to", "merged", "--checkpoint", "77"], "77"),
        ([RUN, "--to", "merged", "--public"], "--push"),
        ([RUN, "--to", "merged", "--ollama"], "gguf"),
        (["nowhere", "--to", "merged"], "nowhere"),
        (["model", "--to", "adapter"], "merged"),
        (["model", "--to", "merged", "--checkpoint", "best"], "best"),
    ],
)
def test_a_mistake_ends_at_once_and_makes_nothing(
    arguments: list[str], words: str, finished: Path, finefit: Finefit
) -> None:
    before = sorted(path.name for path in finished.iterdir())
    answer = finefit("export", *arguments, "-o", "taken")
    assert answer.code == 2
    assert words in answer.err
    assert sorted(path.name for path in finished.iterdir()) == before
