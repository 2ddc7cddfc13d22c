"""Every mistake of the user's gets its place and its remedy, exit code 2 and no traceback."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from finefit.spec.draft import commented
from tests.cli.conftest import STAGE, Finefit, process, rewrite
from tests.conftest import make_model_folder, make_rows, write_jsonl

Spoil = Callable[[Path], object]


@pytest.fixture(autouse=True)
def _no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def _spec(*replaced: tuple[str, str]) -> Spoil:
    return lambda folder: rewrite(folder / "spec.yaml", *replaced)


def _train(content: str | bytes) -> Spoil:
    return lambda folder: (folder / "train.jsonl").write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )


def _rows(*columns: str) -> Spoil:
    return _train(
        "".join(json.dumps({column: f"{column} {number}" for column in columns}) + "\n" for number in range(8))
    )


def _both(*spoils: Spoil) -> Spoil:
    return lambda folder: [spoil(folder) for spoil in spoils]


def _template(text: str) -> Spoil:
    return lambda folder: (folder / "model" / "chat_template.jinja").write_text(text)


def _in_both(split: str) -> Spoil:
    return lambda folder: write_jsonl(folder / f"{split}.jsonl", [*make_rows(2, seed=5), make_rows(22)[7]])


def _without_template(folder: Path) -> None:
    shutil.rmtree(folder / "model")
    make_model_folder(folder / "model", chat=False)


def _references_that_are_no_json(folder: Path) -> None:
    rows = make_rows(3)
    rows[1]["messages"][1]["content"] = "seven"
    write_jsonl(folder / "test.jsonl", rows)


ROW = json.dumps(make_rows(1)[0])
UNANSWERED = json.dumps({"messages": make_rows(1)[0]["messages"][:1]})
MEND = "fix or remove these rows, or set data.bad_rows: drop to drop and count them"


def _said(asked: str | None, answered: str | None) -> str:
    return json.dumps({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]})


MISTAKES: dict[str, tuple[Spoil, str, str]] = {
    "a misspelt key": (
        _spec(("global_batch", "globl_batch")),
        "spec.yaml:12 globl_batch: there is no such key",
        "did you mean `global_batch`?",
    ),
    "a wrong type": (_spec(("seed: 7", "seed: seven")), "spec.yaml:2 seed:", "a whole number is needed"),
    "a number with a comma": (
        _spec(("device: cpu", "device: cpu\nglobal_batch: 262,144"), ("\nglobal_batch: 4", "")),
        '"262,144"',
        "write 262144",
    ),
    "an empty spec": (lambda folder: (folder / "spec.yaml").write_text(""), "the spec is empty", "at least the keys"),
    "a data file that is not there": (
        _spec(("train.jsonl", "trian.jsonl")),
        "trian.jsonl does not exist",
        "did you mean train.jsonl? paths are relative to the spec file",
    ),
    "an empty data file": (_train(""), "train.jsonl holds no rows", "fetch the file again, or take it out of the spec"),
    "a data file of empty lines": (_train("\n\n"), "train.jsonl holds no rows", "fetch the file again"),
    "a folder without data": (
        _spec(("path: train.jsonl", "path: model")),
        "model holds model/chat_template.jinja, which has no known extension",
        "with a glob",
    ),
    "a file of an unknown kind": (
        _spec(("train.jsonl", "spec.yaml")),
        "spec.yaml has no known extension",
        "known are .json",
    ),
    "a row without an answer": (_train(f"{ROW}\n{UNANSWERED}\n"), "train.jsonl:2 has no answer", MEND),
    "an empty answer": (_train(f"{ROW}\n{_said('x', '')}\n"), "train.jsonl:2 has an empty answer", MEND),
    "a prompt that is null": (
        _train(f"{ROW}\n{_said(None, 'x')}\n"),
        "train.jsonl:2 messages[0].content is null, not text",
        MEND,
    ),
    "an answer that is null": (
        _train(f"{ROW}\n{_said('x', None)}\n"),
        "train.jsonl:2 messages[1].content is null, not text",
        MEND,
    ),
    "a row that is null": (_train(f"{ROW}\nnull\n"), "train.jsonl:2 is null, not an object", MEND),
    "a row that is a list": (_train(f"{ROW}\n[1, 2]\n"), "train.jsonl:2 is a list, not an object", MEND),
    "a truncated row": (_train(f"{ROW}\n{ROW[:20]}"), "train.jsonl:2 is not JSON: ", MEND),
    "a file that ends within a row": (_train(f"{ROW}\n{ROW[:20]}"), "the file may be cut off", MEND),
    "bytes that are no UTF-8": (
        _train(f"{ROW}\n".encode() + b'{"messages": "\xff"}\n'),
        "train.jsonl is not UTF-8: byte ",
        "save the file as UTF-8",
    ),
    "UTF-16": (_train(ROW.encode("utf-16")), "train.jsonl is not UTF-8: byte 0 is 0xff", "save the file as UTF-8"),
    "a column that is missing": (
        _rows("question"),
        "not recognised; their columns are question",
        "fields: {prompt: ..., answer: ...}",
    ),
    "a column that fields name and no row has": (
        _both(_rows("ask", "reply"), _spec(("train.jsonl}", "train.jsonl, fields: {prompt: ask, answer: replies}}"))),
        "train.jsonl has no column replies, which fields.answer names",
        "did you mean reply? the columns are ask, reply",
    ),
    "columns that may mean two things": (
        _rows("question", "answer", "response"),
        "train.jsonl may have its prompt in question and its answer in answer or response",
        "say which: fields: {prompt: question, answer: answer} or fields: {prompt: question, answer: response}",
    ),
    "preference pairs": (
        _rows("prompt", "chosen", "rejected"),
        "train.jsonl holds preference pairs",
        "fields: {prompt: prompt, answer: chosen}",
    ),
    "a row longer than max_tokens": (
        _spec(("data:", "data:\n  max_tokens: 76")),
        "2 train rows longer than data.max_tokens 76:\n  train.jsonl:15 too long: 77 tokens",
        "raise data.max_tokens, or set data.too_long: cut_prompt or drop; an answer is never cut",
    ),
    "all rows longer than max_tokens": (
        _spec(("data:", "data:\n  max_tokens: 20")),
        "train rows is left: ",
        "raise data.max_tokens",
    ),
    "answers that the template leaves out": (
        _template("{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"),
        "train.jsonl:1 the chat template does not write the answer unchanged",
        "`data.template: plain`",
    ),
    "a template that is broken": (
        _template("{% for m in messages %}"),
        "the chat template of the model cannot be read: line 1: Unexpected end of template",
        "use the template that belongs to the model",
    ),
    "a model without tokenizer": (
        lambda folder: (folder / "model" / "tokenizer.json").unlink(),
        "model has no tokenizer, so no row can be read",
        "put the model's tokenizer.json and tokenizer_config.json there",
    ),
    "a tokenizer that is cut off": (
        lambda folder: (folder / "model" / "tokenizer.json").write_text("{"),
        "model cannot be read: ",
        "put all of the model's tokenizer files there",
    ),
    "judged answers": (
        _train('{"prompt": "Why?", "completion": "So.", "label": true}\n'),
        "train.jsonl holds answers with a verdict",
        "fields: {prompt: prompt, answer: completion}",
    ),
    "a row of test in train": (
        _in_both("test"),
        "train.jsonl:8 (train) is test.jsonl:3 (test): the same row",
        "data.overlap: drop",
    ),
    "a row of validation in train": (
        _in_both("validation"),
        "train.jsonl:8 (train) is validation.jsonl:3 (validation)",
        "data.overlap: drop",
    ),
    "a share and a path": (
        _spec(("{path: validation.jsonl}", "{path: validation.jsonl, share: 0.1}")),
        "spec.yaml:8 data.validation",
        "path or share",
    ),
    "a share of one prompt": (
        _both(_train(f"{ROW}\n{ROW}\n"), _spec(("{path: validation.jsonl}", "{share: 0.1}"))),
        "a share of 0.1 cannot be held out of 2 rows with 1 different prompts",
        "give validation a path of its own",
    ),
    "a weight of test rows": (
        _spec(("{path: test.jsonl}", "{path: test.jsonl, weight: 2}")),
        "test.weight",
        "answered once",
    ),
    "a model folder that is not there": (_spec(("path: model", "path: modle")), "modle does not exist", "did you mean"),
    "a model without chat template": (_without_template, "has no chat template", "data.template: plain"),
    "a device that is not there": (
        _spec(("device: cpu", "device: cuda")),
        "device: cuda is requested, but torch ",
        "finefit doctor",
    ),
    "a task without test rows": (
        _spec(("  test: {path: test.jsonl}\n", "")),
        "data.test names no rows to answer",
        "add data.test",
    ),
    "references that the task cannot read": (
        _references_that_are_no_json,
        "test.jsonl:2 cannot be a reference of json_match",
        "fix these rows",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_spec_data_or_model_is_told_with_its_remedy(folder: Path, finefit: Finefit, mistake: str) -> None:
    spoil, problem, remedy = MISTAKES[mistake]
    spoil(folder)
    answer = finefit("run", "spec.yaml")
    assert answer.code == 2
    assert "error: " in answer.err
    assert problem in answer.err
    assert remedy in answer.err


@pytest.mark.usefixtures("without_rehearsal")
def test_a_byte_order_mark_is_no_mistake(folder: Path, finefit: Finefit) -> None:
    path = folder / "train.jsonl"
    path.write_text(path.read_text(encoding="utf-8"), encoding="utf-8-sig")
    answer = finefit("check", "spec.yaml", "--json")
    assert answer.code == 0
    train = answer.document["ledger"]["sources"][0]
    assert (train["read"], train["used"]) == (22, 22)


def test_all_that_is_wrong_with_the_data_is_told_at_once(folder: Path, finefit: Finefit) -> None:
    for spoil in (_train(f"{ROW}\n{UNANSWERED}\n"), _references_that_are_no_json):
        spoil(folder)
    rewrite(folder / "spec.yaml", ("data:", "data:\n  max_tokens: 60"))
    told = finefit("run", "spec.yaml").err
    for place in ("train.jsonl:2 has no answer", "validation.jsonl:2 too long", "test.jsonl:2 cannot be a reference"):
        assert place in told


@pytest.mark.parametrize(
    "mistake", ["a row without an answer", "a device that is not there", "a task without test rows"]
)
def test_what_is_refused_before_it_starts_leaves_no_run_behind(folder: Path, finefit: Finefit, mistake: str) -> None:
    MISTAKES[mistake][0](folder)
    assert finefit("run", "spec.yaml").code == 2
    assert not (folder / "runs").exists() or list((folder / "runs").iterdir()) == []


def test_a_target_that_matches_no_layer_comes_to_the_user_as_what_it_is(folder: Path, finefit: Finefit) -> None:
    rewrite(folder / "spec.yaml", ("rank: 4", "rank: 4, targets: [q_porj]"))
    answer = finefit("run", "spec.yaml", "--json")
    error = answer.document["error"]
    assert (error["kind"], error["exit_code"], answer.code) == ("ModelError", 2, 2)
    assert error["problem"] == "tuning.targets: q_porj matches no linear layer of the model"
    assert error["remedy"].startswith("its linear layers are down_proj, gate_proj")
    assert f"error: {error['problem']}\n{error['remedy']}" in answer.err
    assert not (folder / "runs").exists()


def test_all_that_is_wrong_with_a_spec_is_told_at_once(folder: Path, finefit: Finefit) -> None:
    rewrite(folder / "spec.yaml", ("seed: 7", "seed: seven"), ("rank: 4", "rank: 0"), ("lr: 1e-2", "lr: fast"))
    problems = [line for line in finefit("run", "spec.yaml").err.splitlines() if "spec.yaml:" in line]
    assert len(problems) == 3


LONG = "x" * 300


@pytest.mark.parametrize(
    ("arguments", "problem", "remedy"),
    [
        (("run", "sepc.yaml"), "sepc.yaml: there is no such file", "did you mean `spec.yaml`?"),
        (
            ("run", "spec.yaml", "--set", "nonsense"),
            "--set nonsense: this is not a valid override",
            "write key.path=value",
        ),
        (("run", "."), ". is not a run directory", "run directories are called"),
        (("eval", "spec.yaml"), "spec.yaml is a spec, but `eval` scores", "run `finefit run spec.yaml` first"),
        (("eval", "runs/tiny-1"), "the run runs/tiny-1 does not exist yet", "`finefit run SPEC`"),
        (("eval", "tiny-1"), "the run tiny-1 does not exist yet", "`finefit run SPEC`"),
        (("check", "train.jsonl"), "train.jsonl is a data file", "data: {train: [{path: train.jsonl}]}"),
        (
            ("plan", "spec.yaml", "--card", "MI300X"),
            "card 'MI300X' is not known; finefit plans",
            "give a card",
        ),
        (("eval", "nowhere"), "nowhere is not a run directory", "name a run directory, a folder with a model"),
        (("watch", "model"), "model is not a run directory", "run directories are called"),
        (("recipes", "dmeo"), "there is no recipe dmeo", ""),
        (("init", "train.jsonl", "--yes", "--out", LONG), "File name too long", "give a shorter path"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_mistake_in_the_arguments_is_told_with_its_remedy(
    finefit: Finefit, arguments: tuple[str, ...], problem: str, remedy: str
) -> None:
    answer = finefit(*arguments)
    assert answer.code == 2
    assert problem in answer.err
    assert remedy in answer.err
    document = finefit(*arguments, "--json").document
    assert problem in document["error"]["problem"]
    assert remedy in document["error"]["problem"] + document["error"]["remedy"]


@pytest.mark.parametrize(
    ("arguments", "problem", "remedy"),
    [
        (
            ("--checkpoint", "7"),
            "tiny-1 has no checkpoint 7",
            "choose from base, final, best, checkpoint-9, checkpoint-12",
        ),
        (("--checkpoint", "../data"), "tiny-1 has no checkpoint ../data", "choose from base"),
        (("--task", "rogue"), "there is no task rogue", "there are exact_match, json_match"),
    ],
)
def test_eval_of_what_is_not_there_says_what_is(
    finished: Path, finefit: Finefit, arguments: tuple[str, ...], problem: str, remedy: str
) -> None:
    answer = finefit("eval", "runs/tiny-1", *arguments)
    assert answer.code == 2
    assert problem in answer.err
    assert remedy in answer.err
    assert sorted(p.name for p in (finished / "runs/tiny-1" / STAGE / "evals").iterdir()) == ["json_match"]


@pytest.mark.parametrize(
    "arguments", [("run",), ("eval", "x", "--limit", "0"), ("nope",), ("run", "spec.yaml", "--nope")]
)
@pytest.mark.usefixtures("folder")
def test_a_wrong_command_line_is_a_json_document_too(finefit: Finefit, arguments: tuple[str, ...]) -> None:
    answer = finefit(*arguments, "--json")
    assert answer.code == 2
    assert answer.document["error"]["exit_code"] == 2
    assert answer.document["error"]["problem"]


def test_a_misspelt_key_is_told_by_the_real_command_without_waiting_for_torch(folder: Path) -> None:
    rewrite(folder / "spec.yaml", ("global_batch", "globl_batch"))
    answer = process("run", "spec.yaml", "--json", cwd=folder)
    assert answer.code == 2
    assert answer.document["error"]["kind"] == "SpecError"
    assert answer.err.startswith("error: spec.yaml:12 globl_batch: there is no such key; did you mean `global_batch`?")
    assert "Traceback" not in answer.err


@pytest.mark.usefixtures("folder")
def test_a_fault_of_finefit_is_reported_as_one(finefit: Finefit, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("one over nothing")

    monkeypatch.setattr("finefit.spec.load.load_pipeline", broken)
    monkeypatch.setattr("traceback.print_exc", lambda: None)
    answer = finefit("run", "spec.yaml", "--json")
    assert answer.code == answer.document["error"]["exit_code"] == 70
    assert "a fault of finefit: one over nothing" in answer.err


def test_a_time_limit_that_cannot_be_kept_is_refused_and_nothing_is_written(finefit: Finefit, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "2 lamps", "completion": "lamps: 2"}\n' * 4)
    out = tmp_path / "spec.yaml"
    answer = finefit(
        "init", str(rows), "--model", "owner/model", "--hours", "2", "--card", "cpu", "--yes", "--out", str(out)
    )
    assert answer.code == 2
    assert "--hours 2" in answer.err
    assert not out.exists()


def test_names_of_columns_control_neither_the_terminal_nor_the_spec(finefit: Finefit, tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "spec.yaml"
    write_jsonl(rows, [{"prompt": "2 lamps", "completion": "lamps: 2", "\x1b]0;mine\x07": 1}])
    answer = finefit("init", str(rows), "--model", "owner/model", "--card", "cpu", "--yes", "--out", str(out))
    assert "\x1b" not in answer.out
    assert "\\u001b]0;mine" in answer.out
    text = commented({"name": "a"}, {"name": "the column \x1b]0;mine"})
    assert YAML(typ="safe", pure=True).load(text) == {"name": "a"}
