"""lm-evaluation-harness through its own package: its samples become items, and what is no mean of them is said to be
none."""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from finefit.artifacts.forecasts import EvalBatchLimit
from finefit.artifacts.records import write_record
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.stage_records import EvalRequest
from finefit.errors import ModelError, RunError
from finefit.evaluate import harness
from finefit.evaluate.harness import HarnessOutput, command_of, make_result, read_output
from finefit.facts.files import read_model_folder
from finefit.spec.models import FolderModel
from finefit.spec.schema import Evaluation
from tests.conftest import make_model_folder, make_tokenizer
from tests.evals import SUBJECT

TIME = "2026-01-31T09-08-07.123456"
SETTINGS = {"task": {"kind": "lm_eval", "tasks": ["sums"], "shots": 2}, "limit": 4}


def make_request(**subject: Any) -> EvalRequest:
    evaluation = Evaluation.model_validate_json(json.dumps(SETTINGS | subject.pop("settings", {})))
    from dataclasses import replace

    return EvalRequest(
        checkpoint="base",
        evaluation=evaluation,
        subject=replace(SUBJECT, **subject),
        batch_limit=EvalBatchLimit(rows=2, tokens=4096),
    )


def sample(doc: int, *, how: str = "none", **values: Any) -> dict[str, Any]:
    asked = {"gen_args_0": {"arg_0": f"question {doc}", "arg_1": {"until": ["\n"]}}}
    about = {
        "doc_id": doc,
        "arguments": asked,
        "target": "3",
        "filtered_resps": [f"answer {doc}"],
        "doc_hash": f"{doc:064x}",
        "filter": how,
    }
    return about | values


def test_a_metric_of_zeros_and_ones_is_a_rate_with_its_interval_from_the_samples() -> None:
    found = HarnessOutput(
        results={"sums": {"alias": "sums", "acc,none": 0.75, "acc_stderr,none": 0.2}},
        samples={"sums": [sample(at, acc=float(at > 0)) for at in range(4)]},
        available=90,
    )
    result = make_result(make_request(), found)
    (metric,) = result.definitions
    assert (metric.aggregate, metric.unit, result.n, result.available, result.coverage) == ("rate", "share", 4, 90, 1.0)
    assert result.warnings == (
        "4 of 90 items: lm-eval takes the first 4 of each task, not a random sample",
        "4 items: the intervals may be too narrow",
    )
    score = result.metrics["acc"]
    assert score.value == 0.75
    assert score.low == pytest.approx(0.3006, abs=1e-3)  # Wilson's, not 1.96 standard errors
    first = result.items[0]
    assert (first.prompt, first.answer, first.reference, first.scores) == ("question 0", "answer 0", "3", {"acc": 0.0})


def test_several_tasks_and_filters_count_each_their_own_samples() -> None:
    found = HarnessOutput(
        results={"a": {"acc,none": 0.5}, "b": {"exact_match,strict": 1.0, "exact_match,loose": 0.0}},
        samples={
            "a": [sample(0, acc=1.0), sample(1, acc=0.0)],
            "b": [sample(0, how="strict", exact_match=1.0), sample(0, how="loose", exact_match=0.0)],
        },
        available=3,
    )
    result = make_result(make_request(), found)
    assert {name: score.value for name, score in result.metrics.items()} == {
        "a.acc": 0.5,
        "b.exact_match_strict": 1.0,
        "b.exact_match_loose": 0.0,
    }
    assert (result.n, [item.place for item in result.items]) == (3, ["a:0", "a:1", "b:0"])
    assert all(item.counts.keys() == result.items[0].counts.keys() for item in result.items)


def test_what_is_no_mean_of_its_samples_stands_as_it_was_reported_and_says_so() -> None:
    found = HarnessOutput(
        results={
            "wiki": {
                "perplexity,none": 12.5,
                "perplexity_stderr,none": 0.5,
                "bleu,none": 7.0,
                "bleu_stderr,none": "N/A",
            }
        },
        samples={"wiki": [sample(0, perplexity=[-3.0, 2])]},
        available=1,
        better={"wiki": {"perplexity": False}},
    )
    result = make_result(make_request(), found)
    assert result.definitions == ()
    assert result.metrics["perplexity"].low == pytest.approx(11.52)
    assert result.metrics["perplexity"].high == pytest.approx(13.48)
    assert (result.metrics["bleu"].low, result.metrics["bleu"].high) == (-math.inf, math.inf)
    assert result.warnings[0] == "1 item: nothing is known of the spread"
    assert "1.96 x the standard error that lm-eval reports" in result.warnings[1]
    assert "it has no interval" in result.warnings[2]


def test_figures_without_samples_cover_nothing() -> None:
    result = make_result(make_request(), HarnessOutput(results={"t": {"acc,none": 0.3}}, samples={}, available=0))
    assert (result.n, result.coverage, len(result.warnings)) == (0, 0.0, 1)


def test_each_of_several_tasks_says_that_it_has_few_samples() -> None:
    samples = {"a": [sample(at, acc=1.0) for at in range(40)], "b": [sample(at, acc=1.0) for at in range(9)]}
    result = make_result(
        make_request(settings={"limit": None}),
        HarnessOutput(results={t: {"acc,none": 1.0} for t in "ab"}, samples=samples, available=49),
    )
    assert result.warnings == ("b: 9 items: the intervals may be too narrow",)


def test_a_figure_that_its_samples_do_not_average_to_is_taken_as_reported() -> None:
    found = HarnessOutput(
        results={"t": {"mcc,none": 0.3}}, samples={"t": [sample(0, mcc=1.0), sample(1, mcc=0.0)]}, available=2
    )
    result = make_result(make_request(), found)
    assert (result.definitions, result.metrics["mcc"].value) == ((), 0.3)
    assert "mcc is not a mean of samples" in result.warnings[-1]


def test_what_should_be_low_is_better_when_it_is_lower() -> None:
    found = HarnessOutput(
        results={"t": {"loss,none": 2.0}},
        samples={"t": [sample(0, loss=1.0), sample(1, loss=3.0)]},
        available=2,
        better={"t": {"loss": False}},
    )
    (metric,) = make_result(make_request(), found).definitions
    assert (metric.better, metric.unit) == ("lower", "number")


def test_the_output_folder_is_read_and_an_empty_one_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="left no results"):
        read_output(tmp_path)
    (tmp_path / "model").mkdir()
    counts = {"sums": {"original": 7, "effective": 1}}
    (tmp_path / "model" / f"results_{TIME}.json").write_text(
        json.dumps({"results": {"sums": {"acc,none": 1.0}}, "n-samples": counts})
    )
    (tmp_path / "model" / f"samples_sums_{TIME}.jsonl").write_text(json.dumps(sample(0, acc=1.0)) + "\n")
    found = read_output(tmp_path)
    assert (found.available, len(found.samples["sums"])) == (7, 1)


def test_samples_are_those_of_the_task_itself_and_a_group_has_none(tmp_path: Path) -> None:
    results = {name: {"acc,none": 0.5} for name in ("sums", "sums_cot", "arithmetic", "arithmetic_hard")}
    (tmp_path / f"results_{TIME}.json").write_text(json.dumps({"results": results}))
    for name, docs in (("sums", 1), ("sums_cot", 2), ("arithmetic_hard", 3)):
        (tmp_path / f"samples_{name}_{TIME}.jsonl").write_text(
            "".join(json.dumps(sample(at, acc=1.0)) + "\n" for at in range(docs))
        )
    found = read_output(tmp_path)
    assert {name: len(lines) for name, lines in found.samples.items()} == {
        "sums": 1,
        "sums_cot": 2,
        "arithmetic_hard": 3,
    }
    assert found.available == 6


def test_lm_eval_ends_with_the_process_that_started_it_when_that_is_killed(tmp_path: Path) -> None:
    """Any module of its name will do: what it computes does not matter here."""
    (tmp_path / "lm_eval").mkdir()
    (tmp_path / "lm_eval" / "__main__.py").write_text(
        "import os, sys, time\nprint(os.getpid(), *sys.argv[1:], flush=True)\ntime.sleep(300)\n"
    )
    command = "[sys.executable, '-P', '-m', 'finefit.artifacts.processes', str(os.getpid()), 'lm_eval', '--tasks', 'x']"
    code = (
        f"import os, sys\nfrom pathlib import Path\nfrom finefit.evaluate.harness import _run\n_run({command}, "
        "cwd=Path())\n"
    )
    found, environment = subprocess.PIPE, os.environ | {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=found, text=True, env=environment, cwd=tmp_path
    ) as parent:
        assert parent.stdout is not None
        number, *arguments = parent.stdout.readline().split()
        parent.kill()
    assert arguments == ["--tasks", "x"]
    for _ in range(200):
        if not _is_alive(int(number)):
            return
        time.sleep(0.1)
    os.kill(int(number), signal.SIGKILL)
    pytest.fail("lm-eval went on")


def _is_alive(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _stage(tmp_path: Path) -> tuple[StageDir, EvalRequest]:
    folder = make_model_folder(tmp_path / "model")
    where = StageDir(tmp_path / "run" / "stages" / "1-eval")
    make_tokenizer().save_pretrained(where.tokenizer)
    fingerprint = read_model_folder(folder).fingerprint
    settings = {"task": {"kind": "lm_eval", "tasks": ["finefit_sums"], "folder": "tasks"}, "limit": None}
    return where, make_request(
        model=FolderModel(kind="folder", path="../model"), model_fingerprint=fingerprint, settings=settings
    )


def test_the_command_names_model_precision_tasks_and_everything_that_was_asked(tmp_path: Path) -> None:
    where, request = _stage(tmp_path)
    words = command_of(where, request, tmp_path / "evals", tmp_path / "out")
    arguments = dict(pair.split("=", 1) for pair in words[words.index("--model_args") + 1].split(","))
    assert arguments == {"tokenizer": str(where.tokenizer), "dtype": "float32", "pretrained": str(tmp_path / "model")}
    assert words[words.index("--tasks") + 1] == "finefit_sums"
    assert words[words.index("--include_path") + 1] == str(tmp_path / "evals" / "tasks")
    assert "--apply_chat_template" in words
    assert "--log_samples" in words
    assert "--limit" not in words
    (tmp_path / "run" / "adapter").mkdir()
    (tmp_path / "run" / "adapter" / "adapter_model.safetensors").touch()
    from dataclasses import replace

    adapted = replace(request, subject=replace(request.subject, weights="adapter"))
    assert f"peft={tmp_path / 'run' / 'adapter'}" in " ".join(command_of(where, adapted, tmp_path, tmp_path))


def test_a_model_that_has_changed_is_refused(tmp_path: Path) -> None:
    where, request = _stage(tmp_path)
    make_model_folder(tmp_path / "model", seed=5)
    with pytest.raises(RunError, match="has changed since"):
        command_of(where, request, tmp_path, tmp_path)


def test_without_the_package_the_user_is_told_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, request = _stage(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(RunError, match="lm_eval needs lm-eval, which is not installed") as caught:
        harness.evaluate(where, request, tmp_path)
    assert caught.value.remedy == "pip install 'finefit[lm-eval]'"


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")
def test_the_real_package_scores_a_task_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    where, request = _stage(tmp_path)
    paths = where.evaluation("lm_eval", "base")
    (paths.folder / "tasks").mkdir(parents=True)
    (paths.folder / "tasks" / "rows.jsonl").write_text(
        '{"question": "add 1 and 2", "answer": "3"}\n{"question": "add 2 and 2", "answer": "4"}\n'
    )
    (paths.folder / "tasks" / "sums.yaml").write_text(
        "task: finefit_sums\ndataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\ntest_split: test\n"
        'output_type: generate_until\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\n'
        'generation_kwargs: {until: ["\\n"], max_gen_toks: 4}\n'
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\nmetadata: {version: 1.0}\n"
    )
    write_record(paths.request, request)
    result = harness.evaluate(where, request, paths.folder)
    assert (result.n, result.available, list(result.metrics)) == (2, 2, ["exact_match"])
    assert result.items[0].prompt == "<|user|>add 1 and 2<|end|>\n<|assistant|>"
    assert result.signature["tasks"] == "finefit_sums v1.0"


def test_a_template_without_end_is_refused_before_lm_eval_renders_it(tmp_path: Path) -> None:
    where, _ = _stage(tmp_path)
    (where.tokenizer / "chat_template.jinja").write_text("{{ 'x' * 9999999999 }}")
    with pytest.raises(ModelError, match="template"):
        harness.require_bounded_template(where.tokenizer)
    make_tokenizer().save_pretrained(where.tokenizer)
    harness.require_bounded_template(where.tokenizer)
