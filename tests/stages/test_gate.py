"""A gate learns which expert a prompt is for, from the base's embeddings alone."""

import json
import os
import random
import shutil
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from finefit.artifacts.records import SequenceGate, StageJob, WiredModel, read_record, write_record
from finefit.data.render import open_renderer
from finefit.data.rows import Message
from finefit.errors import DataError, ModelError, RunError
from finefit.moe.gate import GATE_RECORD, GATE_TABLE, choose_experts, fit_gate, mean_embeddings, token_scores
from finefit.report.stage_summary import summary_lines
from finefit.run.cache_inputs import outside_inputs
from finefit.spec.models import FolderModel
from finefit.spec.pipeline import Pipeline
from finefit.spec.stages import Gate
from finefit.stages import gate
from finefit.stats.intervals import Interval
from tests.conftest import TEMPLATE, make_model_folder, make_tokenizer, write_jsonl

Rows = list[dict[str, Any]]


def _rows(letters: str, count: int, *, seed: int = 0) -> Rows:
    chance = random.Random(seed)
    return [{"prompt": "".join(chance.choices(letters, k=12)), "completion": "yes"} for _ in range(count)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("base"))


def _order(base: Path, folder: Path, rows: Mapping[str, Rows], **settings: Any) -> StageJob:
    model = {"kind": "folder", "path": str(base)}
    for name, several in rows.items():
        write_jsonl(folder / f"{name}.jsonl", several)
    stage = Gate.model_validate(
        {
            "kind": "gate",
            "base": model,
            "experts": dict.fromkeys(rows, model),
            "data": {name: {"path": f"{name}.jsonl"} for name in rows},
        }
        | settings
    )
    wired = WiredModel(model=FolderModel(kind="folder", path=str(base)))
    models = {"base": wired} | {f"experts.{name}": wired for name in rows}
    return StageJob(
        name="choice",
        pipeline="p",
        seed=3,
        device="cpu",
        precision="fp32",
        base=str(folder),
        stage=stage,
        models=models,
    )


def _made(base: Path, folder: Path, rows: Mapping[str, Rows], **settings: Any) -> tuple[dict[str, Any], Path]:
    out = folder / "output"
    out.mkdir(exist_ok=True)
    return json.loads(json.dumps(gate.make(_order(base, folder, rows, **settings), out))), out


def _tokens(base: Path, prompts: list[str]) -> list[list[int]]:
    renderer = open_renderer(base, "chat")
    return [renderer.prompt_tokens((Message("user", prompt),)) for prompt in prompts]


def test_prompts_of_different_letters_are_told_apart_on_rows_that_were_held_out(base: Path, tmp_path: Path) -> None:
    summary, out = _made(base, tmp_path, {"vowels": _rows("aeiou", 30), "digits": _rows("0123456789", 50)})
    assert summary["accuracy"]["value"] == 1.0
    assert summary["accuracy"]["n"] == 24  # 0.3 of 80
    assert sum(summary["trained"].values()) == 56
    unseen = _tokens(base, ["oiaueo", "918273", "7", "ae"])
    assert choose_experts(out, unseen) == ["vowels", "digits", "digits", "vowels"]


def test_the_accuracy_is_that_of_choosing_the_held_out_prompts(base: Path, tmp_path: Path) -> None:
    rows = {
        "one": _rows("abcdef", 40),
        "other": _rows("cdefgh", 40, seed=1),
    }  # they share most letters, so some are chosen wrongly
    summary, out = _made(base, tmp_path, rows)
    confusion, accuracy = summary["confusion"], summary["accuracy"]
    assert {name: sum(found.values()) for name, found in confusion.items()} == summary["held"]
    assert accuracy["value"] == pytest.approx(sum(confusion[name][name] for name in rows) / accuracy["n"])
    everything = {
        name: choose_experts(out, _tokens(base, [row["prompt"] for row in several])) for name, several in rows.items()
    }
    assert sum(everything["one"].count(name) for name in rows) == 40
    assert confusion["one"]["other"] <= everything["one"].count("other")
    assert confusion["one"]["other"] + confusion["other"]["one"] > 0


def test_labels_by_lot_are_not_learnt(base: Path, tmp_path: Path) -> None:
    chance, rows = random.Random(5), _rows("abcdefghij", 120)
    split: dict[str, Rows] = {"left": [], "right": []}
    for row in rows:
        split[chance.choice(["left", "right"])].append(row)
    summary, _ = _made(base, tmp_path, split)
    assert summary["accuracy"]["low"] < 0.5 < summary["accuracy"]["high"]


def test_only_the_records_that_a_source_asks_for_are_looked_at(base: Path, tmp_path: Path) -> None:
    mixed = [row | {"kind": "wanted"} for row in _rows("aeiou", 30)] + [
        row | {"kind": "other"} for row in _rows("xyz", 40)
    ]
    rows = {"vowels": mixed, "digits": _rows("0123456789", 50)}
    summary, _ = _made(
        base,
        tmp_path,
        rows,
        data={"vowels": {"path": "vowels.jsonl", "where": {"kind": "wanted"}}, "digits": {"path": "digits.jsonl"}},
    )
    assert summary["trained"]["vowels"] + summary["held"]["vowels"] == 30


@pytest.mark.parametrize("share", [0.2, 0.35, 0.5, 0.65])
def test_equal_prompts_are_never_on_both_sides(share: float, base: Path, tmp_path: Path) -> None:
    rows = {
        "left": [row for row in _rows("ab", 8, seed=1) for _ in range(10)],
        "right": [row for row in _rows("ab", 8, seed=2) for _ in range(10)],
    }
    summary, _ = _made(base, tmp_path, rows, held_out=share)
    assert all(count % 10 == 0 for side in ("trained", "held") for count in summary[side].values())


def test_a_prompt_of_two_experts_is_counted_and_told(base: Path, tmp_path: Path) -> None:
    both = _rows("xyz", 2)
    summary, _ = _made(base, tmp_path, {"vowels": [*_rows("aeiou", 20), *both], "digits": [*_rows("0123", 20), *both]})
    assert summary["shared_prompts"] == 2
    assert any("2 prompts are in the rows of several experts" in line for line in summary_lines("gate", summary))


def test_a_rare_expert_counts_as_if_its_prompts_were_repeated() -> None:
    rare, frequent = (
        torch.randn(2, 4, generator=torch.Generator().manual_seed(1)),
        torch.randn(8, 4, generator=torch.Generator().manual_seed(2)),
    )
    unequal = fit_gate(
        torch.cat([rare, frequent]), torch.tensor([0] * 2 + [1] * 8), num_experts=2, epochs=9, lr=0.1, seed=0
    )
    equal = fit_gate(
        torch.cat([rare] * 4 + [frequent]), torch.tensor([0] * 8 + [1] * 8), num_experts=2, epochs=9, lr=0.1, seed=0
    )
    torch.testing.assert_close(unequal.weight_KD, equal.weight_KD)
    torch.testing.assert_close(unequal.centre_D, equal.centre_D)
    assert unequal.unit == pytest.approx(equal.unit)


def test_the_table_scores_a_prompt_as_the_linear_layer_scores_its_mean_embedding(base: Path) -> None:
    prompts = _tokens(base, ["hello", "some more words", "1"])
    means = mean_embeddings(base, prompts)
    embedding = AutoModelForCausalLM.from_pretrained(base).get_input_embeddings().weight.detach()
    torch.testing.assert_close(means, torch.stack([embedding[torch.tensor(prompt)].mean(0) for prompt in prompts]))
    learnt = fit_gate(means, torch.tensor([0, 1, 0]), num_experts=2, epochs=3, lr=0.1, seed=0)
    table = token_scores(base, learnt)
    expected = ((means - learnt.centre_D) / learnt.unit) @ learnt.weight_KD.T
    torch.testing.assert_close(torch.stack([table[torch.tensor(prompt)].mean(0) for prompt in prompts]), expected)
    assert expected.std() > 0.01


def test_the_embeddings_are_read_in_parts(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = _tokens(base, ["hello", "another prompt"])
    whole = mean_embeddings(base, prompts)
    learnt = fit_gate(whole, torch.tensor([0, 1]), num_experts=2, epochs=2, lr=0.1, seed=0)
    table = token_scores(base, learnt)
    monkeypatch.setattr("finefit.moe.gate._ROWS", 7)
    torch.testing.assert_close(mean_embeddings(base, prompts), whole)
    torch.testing.assert_close(token_scores(base, learnt), table)


def test_the_same_order_makes_the_same_gate(base: Path, tmp_path: Path) -> None:
    rows = {"one": _rows("abcdef", 20), "other": _rows("cdefgh", 20, seed=1)}
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    tables = [load_file(_made(base, folder, rows)[1] / "gate.safetensors") for folder in folders]
    assert all(torch.equal(tables[0][name], tables[1][name]) for name in ("scores", "weight", "centre"))


def test_it_is_said_what_speaks_for_each_expert_and_what_a_gate_is_not(base: Path, tmp_path: Path) -> None:
    summary, out = _made(base, tmp_path, {"vowels": _rows("aeiou", 30), "digits": _rows("0123", 30)})
    template = {"<|user|>", "<|end|>", "\n", "<|assistant|>"}
    assert set(summary["telling"]["vowels"]) - template <= set("aeiou")
    assert set(summary["telling"]["digits"]) - template <= set("0123")
    assert {summary["telling"][name][0] for name in ("vowels", "digits")} & template == set()
    told = summary_lines("gate", summary)
    assert told[0].startswith("right for 18 of 18 held-out prompts: 100.0 % (82.4 % to 100.0 %); always ")
    assert "it is not a router" in told[-1]
    assert read_record(out / "gate.json", SequenceGate).experts == ("vowels", "digits")


def test_prompts_are_rendered_with_the_options_of_the_training(base: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(base, tmp_path / "base")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ tone }} " + TEMPLATE
    tokenizer.save_pretrained(folder)
    options = {"tone": "kind"}
    summary, _ = _made(
        folder, tmp_path, {"vowels": _rows("aeiou", 20), "digits": _rows("0123", 20)}, template_options=options
    )
    assert summary["template_sha256"] == open_renderer(folder, "chat", template_options=options).sha256()


def test_rows_are_built_before_a_gate_sees_them_as_trainings_build_them(base: Path, tmp_path: Path) -> None:
    bare = {"vowels": _rows("aeiou", 20), "digits": _rows("0123", 20)}
    built = {
        name: [row | {"prompt": f"{row['prompt'].upper()} -> ?"} for row in several] for name, several in bare.items()
    }
    (tmp_path / "form.py").write_text('def build(prompt, answer): return f"{prompt.upper()} -> ?", answer\n')
    settings: dict[str, dict[str, Any]] = {
        "bare": {},
        "task": {"task": {"kind": "python", "path": "form.py"}},
        "built": {},
    }
    tables, records = {}, {}
    for name, more in settings.items():
        _, out = _made(base, tmp_path, built if name == "built" else bare, **more)
        tables[name], records[name] = (
            load_file(out / "gate.safetensors")["scores"],
            read_record(out / "gate.json", SequenceGate),
        )
    assert torch.equal(tables["task"], tables["built"])
    assert not torch.equal(tables["task"], tables["bare"])
    form = f"python {sha256((tmp_path / 'form.py').read_bytes()).hexdigest()}"
    assert {name: record.form for name, record in records.items()} == {"bare": None, "task": form, "built": None}


def test_a_gate_that_was_made_before_forms_were_recorded_is_one_of_bare_rows(base: Path, tmp_path: Path) -> None:
    _, out = _made(base, tmp_path, {"vowels": _rows("aeiou", 9), "digits": _rows("0123", 9)})
    record = json.loads((out / "gate.json").read_text())
    del record["form"]
    (out / "gate.json").write_text(json.dumps(record))
    assert read_record(out / "gate.json", SequenceGate).form is None


def test_a_change_of_the_file_that_rows_are_built_with_makes_a_gate_anew(base: Path, tmp_path: Path) -> None:
    stage = _order(
        base,
        tmp_path,
        {"vowels": _rows("aeiou", 9), "digits": _rows("0123", 9)},
        task={"kind": "python", "path": "form.py"},
    ).stage
    (tmp_path / "form.py").write_text("def build(prompt, answer): return prompt, answer\n")
    pipeline = Pipeline(name="p", stages={"choice": stage})
    before = outside_inputs(pipeline, tmp_path)
    (tmp_path / "form.py").write_text("def build(prompt, answer): return answer, prompt\n")
    after = outside_inputs(pipeline, tmp_path)
    assert [name for name in after if after[name] != before[name]] == ["choice.task.path"]


@pytest.mark.parametrize(
    ("rows", "settings", "words"),
    [
        (
            {"few": _rows("a", 1), "many": _rows("bcd", 40)},
            {"held_out": 0.1},
            "no prompt of few is left to measure on: 41 prompts, 0.1 of them held out",
        ),
        (
            {name: [{"prompt": words, "completion": "y"} for words in ("Why?", "why")] for name in ("one", "other")},
            {},
            "all 4 prompts ask the same, so none can be held out to measure the gate on",
        ),
        ({"texts": [{"text": "once upon a time"}] * 4, "rows": _rows("ab", 4)}, {}, r"texts\.jsonl:1 is plain text"),
        (
            {"one": [*_rows("ab", 4), {"prompt": None, "completion": "x"}], "other": _rows("cd", 4)},
            {},
            r"one\.jsonl:5 ",
        ),
        ({"digits": _rows("0123", 8), "vowels": _rows("aeiou", 8)}, {"task": "amr"}, r"digits\.jsonl:1 "),
    ],
)
def test_rows_that_no_gate_can_learn_from_are_refused(
    base: Path, tmp_path: Path, rows: dict[str, Rows], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        _made(base, tmp_path, rows, **settings)


def test_a_limit_takes_so_many_rows(base: Path, tmp_path: Path) -> None:
    data = {"vowels": {"path": "vowels.jsonl", "limit": 10}, "digits": {"path": "digits.jsonl"}}
    summary, _ = _made(base, tmp_path, {"vowels": _rows("aeiou", 30), "digits": _rows("0123", 30)}, data=data)
    assert summary["trained"]["vowels"] + summary["held"]["vowels"] == 10


def test_quantised_embeddings_are_refused(tmp_path: Path) -> None:
    broken = make_model_folder(tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    save_file(
        tensors | {"model.embed_tokens.weight": torch.zeros(10, 4, dtype=torch.uint8)},
        broken / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(ModelError, match="is stored as U8"):
        mean_embeddings(broken, [[1, 2]])


def test_tokens_of_another_vocabulary_are_refused(base: Path, tmp_path: Path) -> None:
    _, out = _made(base, tmp_path, {"vowels": _rows("aeiou", 9), "digits": _rows("0123", 9)})
    with pytest.raises(ModelError, match="token 5000 is beyond the base's 261 embeddings"):
        choose_experts(out, [[5000]])


def test_a_folder_without_a_gate_is_no_gate(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"gate\.json is missing"):
        choose_experts(tmp_path, [[1]])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"vowels": {"path": "vowels.jsonl"}}, "digits is an expert without rows, or rows without an expert"),
        (
            {"vowels": {"path": "vowels.jsonl", "weight": 3.0}, "digits": {"path": "digits.jsonl"}},
            r"data\.vowels\.weight: experts count equally",
        ),
    ],
)
def test_every_expert_has_rows_and_they_count_equally(
    base: Path, tmp_path: Path, data: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        _order(base, tmp_path, {"vowels": [], "digits": []}, data=data)


_GATE = SequenceGate(
    experts=("a", "b"),
    template_sha256="",
    trained={},
    held={},
    accuracy=Interval(value=1.0, low=0.0, high=1.0, n=1),
    confusion={},
    telling={},
    shared_prompts=0,
)


@pytest.mark.parametrize("place", ["a folder", "a pipe", "a cut file"])
def test_a_table_of_scores_that_cannot_be_one_is_named(tmp_path: Path, place: str) -> None:
    write_record(tmp_path / GATE_RECORD, _GATE)
    path = tmp_path / GATE_TABLE
    match place:
        case "a folder":
            path.mkdir()
        case "a pipe":
            os.mkfifo(path)
        case _:
            path.write_bytes(b"\x10")
    with pytest.raises(ModelError, match=GATE_TABLE):
        choose_experts(tmp_path, [[1]])
