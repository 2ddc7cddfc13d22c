"""The model card of an export: made from the records of its run, valid for the hub, and without anything private."""

import getpass
import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from finefit.artifacts.atomic import Journal
from finefit.artifacts.export_records import ExportReport, TaskScore
from finefit.artifacts.rundir import RunDir
from finefit.export.card import model_card
from finefit.export.subject import ExportSubject, open_subject
from finefit.stats.intervals import Interval
from tests.conftest import make_model_folder
from tests.exports import make_format, make_report
from tests.runs import MACHINE, make_run

LEDGER = {
    "split": "train",
    "source": "/home/ann/private/orders.jsonl",
    "shape": "chat messages",
    "mapping": {"messages": "messages"},
    "records": 22,
    "read": 22,
    "used": 21,
    "cut": 0,
    "cut_tokens": 0,
    "dropped": {"too long": 1},
    "examples": 21,
    "repeated": 0,
    "tokens": 1453,
    "supervised_tokens": 605,
    "images": 0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("card") / "model")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    hits = {"base": [0.0] * 10, "checkpoint-6": [1.0] * 9 + [0.0]}
    made = make_run(
        tmp_path / "runs" / "tiny-1", results=hits, overrides=["tuning.rank=12", "optimizer.weight_decay=0.1"]
    )
    with Journal(made.stage(1, "sft").ledger) as ledger:
        ledger.write(**LEDGER)
    return made


def _subject(folder: Path, run: RunDir | None = None) -> ExportSubject:
    where = None if run is None else run.stage(1, "sft")
    return replace(open_subject(str(folder)), where=where, checkpoint=None if run is None else "checkpoint-6")


def _front(card: str) -> Mapping[str, Any]:
    _, front, _ = card.split("---\n", 2)
    found: Mapping[str, Any] = YAML(typ="safe").load(io.StringIO(front))
    return found


def _card(folder: Path, run: RunDir | None, report: ExportReport) -> str:
    return model_card(report, run, _subject(folder, run))


def test_the_front_matter_is_what_the_hub_reads(folder: Path, run: RunDir) -> None:
    front = _front(_card(folder, run, make_report(make_format("adapter"))))
    assert front["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert front["license"] == "apache-2.0"
    assert (front["library_name"], front["base_model_relation"]) == ("peft", "adapter")
    assert front["pipeline_tag"] == "text-generation"
    assert {"finefit", "lora", "sft"} <= set(front["tags"])
    assert "language" not in front


@pytest.mark.parametrize(
    ("formats", "library", "relation"),
    [
        (("merged:bf16", "adapter"), "transformers", "finetune"),
        (("gguf:q8_0",), "gguf", "quantized"),
        (("gguf-lora",), "gguf", "adapter"),
        (("adapter", "gguf:q4_k_m"), "peft", "adapter"),
    ],
)
def test_the_library_follows_from_the_formats(
    folder: Path, run: RunDir, formats: tuple[str, ...], library: str, relation: str
) -> None:
    front = _front(_card(folder, run, make_report(*map(make_format, formats))))
    assert (front["library_name"], front["base_model_relation"]) == (library, relation)
    assert ("gguf" in front["tags"]) == any("gguf" in one for one in formats)


def test_a_base_that_is_no_repository_and_an_unknown_license_are_left_out(folder: Path, run: RunDir) -> None:
    card = _card(folder, run, make_report(base="/home/ann/models/my-base", base_license=None))
    assert not {"base_model", "base_model_relation", "license"} & set(_front(card))
    assert "my-base" in card


def test_the_card_has_the_runs_data_settings_scores_and_machine(folder: Path, run: RunDir) -> None:
    card = _card(folder, run, make_report())
    assert "| train | orders.jsonl | 21 | 1,453 | 605 |" in card
    assert "| exact_match | hit | 10 | 50.0% (10.0% to 90.0%) | 50.0% (10.0% to 90.0%) |" in card
    assert "6 of 6 steps" in card
    assert MACHINE.cpu_model in card
    assert "0.1.0" in card


def test_the_proof_of_every_format_is_in_the_card_with_what_was_accepted(folder: Path, run: RunDir) -> None:
    half = Interval(value=0.5, low=0.4, high=0.6, n=40)
    scored = TaskScore(task="json_match", metric="all_fields", trained=half, exported=half)
    worse = make_format("gguf:q4_k_m", path="orders-q4_k_m.gguf", problems=("KL 0.1 is above 0.05",), score=scored)
    card = _card(folder, run, make_report(make_format("merged:bf16"), worse, accepted=("gguf:q4_k_m",)))
    assert (
        "| merged:bf16 | transformers 5.17.0 | 2e-05 (1e-05 to 3e-05) | 99.0% (97.0% to 100.0%) | equal | equal |"
        in card
    )
    assert "KL 0.1 is above 0.05" in card
    assert "| gguf:q4_k_m | json_match, all_fields | 50.0% (40.0% to 60.0%) | 50.0% (40.0% to 60.0%) |" in card


def test_the_card_says_how_to_load_each_format(folder: Path, run: RunDir) -> None:
    formats = (
        make_format("adapter", path="adapter"),
        make_format("merged:bf16", path="merged"),
        make_format("gguf:q4_k_m", path="gguf/orders-q4_k_m.gguf"),
        make_format("gguf-lora", path="gguf/orders-lora.gguf"),
    )
    serving = {
        "vLLM": "vllm serve /home/ann/base --enable-lora --lora-modules x=/home/ann/x",
        "SGLang": "its rank is 12",
    }
    card = _card(folder, run, make_report(*formats, serving=serving))
    assert (
        'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")' in card
    )
    assert 'AutoModelForCausalLM.from_pretrained("owner/name", subfolder="merged")' in card
    assert "--hf-file gguf/orders-q4_k_m.gguf" in card
    assert "ollama run hf.co/owner/name:Q4_K_M" in card
    assert "--lora orders-lora.gguf" in card
    assert "--enable-lora --max-lora-rank 16 --lora-modules orders-1=owner/name" in card


def test_an_adapter_that_vllm_refuses_has_no_command(folder: Path, run: RunDir) -> None:
    card = _card(folder, run, make_report(make_format("adapter"), serving={"vLLM": "it is a DoRA adapter"}))
    assert "--enable-lora" not in card


def test_no_path_no_host_no_user_no_token_and_no_row_is_in_the_card(
    folder: Path, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-plain-secret-token")
    report = make_report(
        make_format("merged:bf16", problems=(f"{tmp_path}/out/model.safetensors has a-plain-secret-token in it",)),
        base=str(folder),
        target=str(run.path),
        serving={"vLLM": f"vllm serve {folder} --lora-modules x={tmp_path}/x"},
    )
    card = _card(folder, run, report)
    private = (str(tmp_path), str(folder.parent), "/home/", "private", "a-plain-secret-token", f"host {MACHINE.host}")
    assert not any(text in card for text in private)
    assert f"/{getpass.getuser()}/" not in card
    assert "prompt 0" not in card  # of an evaluated item


def test_a_model_without_a_run_has_a_card_too(folder: Path) -> None:
    card = _card(folder, None, make_report(adapter=None, checkpoint=None, prompts_from="built-in"))
    assert "## Proof" in card
    assert "## Data" not in card
    assert _front(card)["tags"] == ["finefit"]
