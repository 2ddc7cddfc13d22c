"""`finefit check`, and `finefit run` where a check finds something: nothing begins that is known to go wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finefit.facts.files import finefit_cache
from finefit.run.check_stages import check_pipeline
from finefit.spec.load import load_pipeline
from tests.cli.conftest import Finefit, rewrite
from tests.cli.test_plan import STAGES
from tests.conftest import make_model_folder, make_rows, make_tokenizer, write_jsonl

Spoil = Callable[[Path], object]
SOUND = "no problems found that would stop this run\n"
ALL_WARM_UP = ("--set", "schedule={epochs: 1, warmup: 0.99}")


@pytest.mark.parametrize(("arguments", "is_sound"), [((), True), (ALL_WARM_UP, False)])
def test_the_document_has_findings_and_gradients(
    folder: Path, finefit: Finefit, arguments: tuple[str, ...], is_sound: bool
) -> None:
    answer = finefit("check", "spec.yaml", *arguments, "--json")
    document = answer.document
    assert document.keys() >= {"ok", "findings", "ledger", "gradients"}
    assert (answer.code, document["ok"]) == ((0, True) if is_sound else (1, False))
    assert [finding["level"] for finding in document["findings"]] == ([] if is_sound else ["error"])
    assert document["gradients"] == {"trainable": 28, "reached": 28, "unreached": [], "causes": [], "frozen": []}
    assert not (folder / "runs").exists()


def test_a_run_with_a_finding_stops_before_anything_is_loaded(folder: Path, finefit: Finefit) -> None:
    answer = finefit("run", "spec.yaml", *ALL_WARM_UP, "--json")
    assert answer.code == answer.document["error"]["exit_code"] == 1
    assert answer.document["error"]["kind"] == "FindingError"
    assert "makes all 6 steps of the run warm-up" in answer.err
    assert not (folder / "runs").exists()


def test_a_run_that_its_disk_cannot_hold_stops_before_anything_is_loaded(
    folder: Path, finefit: Finefit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finefit.run.check_stages.free_bytes", lambda _: 10)
    answer = finefit("run", "spec.yaml")
    assert answer.code == 1
    assert "10 are free" in answer.err
    assert "lower save.keep (now 2)" in answer.err
    assert not (folder / "runs").exists()


def _unlike_rows(folder: Path) -> None:
    """Of six rows one has no answer and two are too long for 70 tokens."""
    rows = make_rows(6)
    for row, length in zip(rows, (4, 5, 6, 7, 70, 80), strict=True):
        row["messages"][0]["content"] = "add " + "z" * length
        row["messages"][1]["content"] = "{}"
    rows[1]["messages"].pop()
    write_jsonl(folder / "train.jsonl", rows)


UNLIKE = ("--set", "data.max_tokens=70", "--set", "data.bad_rows=drop", "--set", "data.drop_at_most=1")


def _adds_up(ledger: dict[str, Any]) -> bool:
    return bool(ledger["used"] + sum(ledger["dropped"].values()) == ledger["read"])


@pytest.mark.usefixtures("without_rehearsal")
@pytest.mark.parametrize(
    ("too_long", "used", "cut", "dropped"),
    [("drop", 3, 0, {"unusable": 1, "too long": 2}), ("cut_prompt", 5, 2, {"unusable": 1})],
)
def test_the_ledger_accounts_for_every_row(
    folder: Path, finefit: Finefit, too_long: str, used: int, cut: int, dropped: dict[str, int]
) -> None:
    _unlike_rows(folder)
    answer = finefit("check", "spec.yaml", *UNLIKE, "--set", f"data.too_long={too_long}", "--json")
    assert answer.code == 0
    ledger = answer.document["ledger"]
    train, validation, test = ledger["sources"]
    assert [(s["split"], s["source"], s["read"]) for s in (train, validation, test)] == [
        ("train", "train.jsonl", 6),
        ("validation", "validation.jsonl", 4),
        ("test", "test.jsonl", 5),
    ]
    assert (train["used"], train["cut"], train["dropped"]) == (used, cut, dropped)
    assert (ledger["read"], ledger["used"], ledger["cut"], ledger["dropped"]) == (15, used + 9, cut, dropped)
    for entry in (ledger, train, validation, test):
        assert _adds_up(entry)
    for name in ("tokens", "supervised_tokens"):
        assert ledger[name] == sum(source[name] for source in ledger["sources"]) > 0
    assert train["supervised_tokens"] == used * len("{}e")
    assert (validation["supervised_tokens"], test["supervised_tokens"]) == (114, 0)


@pytest.mark.usefixtures("without_rehearsal", "folder")
def test_shown_rows_mark_exactly_what_is_supervised(finefit: Finefit) -> None:
    answer = finefit("check", "spec.yaml", "--show", "2")
    assert answer.code == 0
    examples = answer.out.split("example ")
    assert len(examples) == 3
    for number, (text, row) in enumerate(zip(examples[1:], make_rows(2), strict=True), start=1):
        asked, answered = (message["content"] for message in row["messages"])
        assert text.startswith(f"{number}\n<|user|>{asked}<|end|>\n<|assistant|>⟦{answered}<|end|>⟧\n")
        assert text.count("⟦") == 1


@pytest.mark.usefixtures("without_rehearsal", "folder")
def test_no_rows_are_shown_unasked_or_in_a_document(finefit: Finefit) -> None:
    assert "example 1" not in finefit("check", "spec.yaml").out
    assert finefit("check", "spec.yaml", "--show", "2", "--json").document["ok"] is True


def _in_test_too(folder: Path) -> None:
    write_jsonl(folder / "test.jsonl", [*make_rows(2, seed=5), make_rows(22)[7]])


def _unanswered(folder: Path) -> None:
    rows = make_rows(22)
    rows[3]["messages"].pop()
    write_jsonl(folder / "train.jsonl", rows)


def _added_token(folder: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(folder / "model")
    rows = make_rows(3, seed=9)
    rows[1]["messages"][0]["content"] += " <new>"
    write_jsonl(folder / "train.jsonl", rows)


def _nothing(_: Path) -> None:
    pass


FINDINGS: dict[str, tuple[Spoil, tuple[str, ...], str, str]] = {
    "overlap": (
        _in_test_too,
        (),
        (
            "test shares 1 row with the rows on which the model is trained or selected:\n  train.jsonl:8 (train) is "
            "test.jsonl:3 (test): the same row"
        ),
        "data.overlap: drop",
    ),
    "bad rows": (
        _unanswered,
        (),
        "1 train row cannot be used:\n  train.jsonl:4 has no answer",
        "set data.bad_rows: drop",
    ),
    "an added token in train": (
        _added_token,
        (),
        "the rows contain token 261, but the model has embeddings for 261",
        "resize its embeddings",
    ),
    "no training file": (
        lambda folder: (folder / "train.jsonl").unlink(),
        (),
        "train.jsonl does not exist",
        "relative to the spec file",
    ),
    "a misspelt training file": (
        _nothing,
        ("data.train.0.path=trian.jsonl",),
        "trian.jsonl does not exist",
        "did you mean train.jsonl?",
    ),
    "no test file": (
        lambda folder: (folder / "test.jsonl").unlink(),
        (),
        "test.jsonl does not exist",
        "relative to the spec file",
    ),
    "a task without test rows": (
        _nothing,
        ("data.test=null",),
        "evaluate names a task, but data.test names no rows",
        "add data.test",
    ),
}


@pytest.mark.usefixtures("without_rehearsal")
@pytest.mark.parametrize("name", FINDINGS)
def test_what_is_wrong_with_the_data_is_a_finding_with_exit_code_1(folder: Path, finefit: Finefit, name: str) -> None:
    spoil, overrides, problem, remedy = FINDINGS[name]
    spoil(folder)
    arguments = ("check", "spec.yaml", *(part for override in overrides for part in ("--set", override)))
    answer = finefit(*arguments)
    assert answer.code == 1
    assert f"error: {problem}" in answer.out
    assert remedy in answer.out
    assert SOUND not in answer.out
    document = finefit(*arguments, "--json").document
    assert document["ok"] is False
    errors = [finding for finding in document["findings"] if finding["level"] == "error"]
    assert any(finding["problem"].startswith(problem) and remedy in finding["remedy"] for finding in errors)
    assert not (folder / "runs").exists()


@pytest.mark.usefixtures("without_rehearsal")
def test_one_row_is_enough_to_begin_and_worth_a_warning(folder: Path, finefit: Finefit) -> None:
    write_jsonl(folder / "train.jsonl", make_rows(1))
    answer = finefit("check", "spec.yaml")
    assert answer.code == 0
    assert "a step takes 4 (global_batch): every step is a whole epoch\n  --set global_batch=1" in answer.out


@pytest.mark.usefixtures("without_rehearsal")
def test_overlap_that_is_to_be_dropped_is_counted_and_goes_on(folder: Path, finefit: Finefit) -> None:
    _in_test_too(folder)
    answer = finefit("check", "spec.yaml", "--set", "data.overlap=drop", "--json")
    assert (answer.code, answer.document["ok"]) == (0, True)
    assert answer.document["ledger"]["dropped"] == {"is in test": 1}


@pytest.mark.usefixtures("without_rehearsal")
def test_rows_in_another_shape_are_read_and_the_mapping_is_told(folder: Path, finefit: Finefit) -> None:
    text = "".join(f'"How many, {n}?","{n}"\n' for n in range(8))
    (folder / "train.csv").write_text(f"\ufeffask,reply\n{text}", encoding="utf-8")
    rewrite(folder / "spec.yaml", ("{path: train.jsonl}", "{path: train.csv, fields: {prompt: ask, answer: reply}}"))
    answer = finefit("check", "spec.yaml")
    assert answer.code == 0
    assert "read as question and answer: prompt = ask, answer = reply" in answer.out
    assert "8 records; 8 used" in answer.out


@pytest.mark.usefixtures("without_rehearsal")
def test_a_model_without_a_chat_template_is_told_the_choice(folder: Path, finefit: Finefit) -> None:
    make_model_folder(folder / "model", chat=False)
    (folder / "model" / "chat_template.jinja").unlink(missing_ok=True)
    answer = finefit("check", "spec.yaml", "--json")
    assert answer.code == answer.document["error"]["exit_code"] == 2
    assert "has no chat template" in answer.document["error"]["problem"]
    assert "data.template: plain" in answer.document["error"]["remedy"]


@pytest.mark.usefixtures("without_rehearsal", "folder")
def test_a_second_check_reads_what_the_first_has_prepared(finefit: Finefit, monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> list[str]:  # the free space of the disk is any other program's matter
        return [line for line in finefit("check", "spec.yaml").out.splitlines() if not line.startswith("disk ")]

    first, prepared = check(), finefit_cache() / "prepared"
    before = {path: path.stat().st_ctime_ns for path in prepared.rglob("train.safetensors")}
    assert before
    monkeypatch.setattr("finefit.data.prepare.prepare", None)
    assert check() == first
    assert {path: path.stat().st_ctime_ns for path in prepared.rglob("train.safetensors")} == before


@pytest.mark.usefixtures("without_rehearsal")
def test_what_is_grave_comes_first_whether_rows_or_run_are_at_fault(folder: Path, finefit: Finefit) -> None:
    _unlike_rows(folder)
    answer = finefit("check", "spec.yaml", "--set", "data.max_tokens=70", "--set", "save.every=1000 steps", "--json")
    levels = [finding["level"] for finding in answer.document["findings"]]
    assert {"error", "warning"} <= set(levels)
    assert levels == sorted(levels, key=["error", "warning", "note"].index)


# `finefit check` of a spec with stages: every finding has the name of its stage.

SCORES = """\
  scores:
    kind: evaluate
    models: {base: {kind: folder, path: model}, dpo: {kind: stage, name: dpo}}
    data: {test: {path: test.jsonl}}
    evaluate: [{task: json_match, max_new_tokens: 8}]
"""


@pytest.fixture
def stages(folder: Path) -> Path:
    path = folder / "stages.yaml"
    path.write_text(STAGES, encoding="utf-8")
    return path


@pytest.mark.usefixtures("without_rehearsal")
def test_a_sound_pipeline_is_proved_and_what_is_to_come_is_said_to_be_unknown(stages: Path, finefit: Finefit) -> None:
    answer = finefit("check", stages.name)
    assert answer.code == 0
    assert answer.out.startswith("sft (train)\ntrain       train.jsonl\n")
    assert "note: stage dpo: stage://pairs/train.jsonl is not made yet" in answer.out
    assert answer.out.endswith(SOUND)
    assert not (stages.parent / "runs").exists()
    document = finefit("check", stages.name, "--json").document
    assert document["ok"] is True
    assert list(document["stages"]) == ["sft", "pairs", "dpo", "merged"]
    assert document["stages"]["sft"]["ledger"]["used"] == 22
    assert document["stages"]["dpo"]["ledger"] is None
    assert document["stages"]["pairs"] == {"kind": "make_pairs"}
    assert {finding["stage"] for finding in document["findings"]} == {"sft", "dpo"}


@pytest.mark.usefixtures("without_rehearsal")
def test_all_stages_are_examined_and_each_finding_names_its_own(stages: Path, finefit: Finefit) -> None:
    rewrite(
        stages,
        (
            "pairs: {kind: make_pairs, train: [{path: train.jsonl}]}",
            "pairs: {kind: make_pairs, train: [{path: nowhere.jsonl}]}",
        ),
    )
    answer = finefit("check", stages.name, "--set", "stages.dpo.schedule={epochs: 1, warmup: 0.99}")
    assert answer.code == 1
    errors = [line for line in answer.out.splitlines() if line.startswith("error: ")]
    assert errors == [
        "error: stage pairs: nowhere.jsonl does not exist",
        "error: stage dpo: schedule.warmup 0.99 makes all 12 steps of the run warm-up",
    ]
    assert "--set stages.dpo.schedule.warmup=0" in answer.out
    assert SOUND not in answer.out


@pytest.mark.usefixtures("without_rehearsal")
def test_rows_that_a_stage_would_refuse_hours_later_are_refused_now(stages: Path, finefit: Finefit) -> None:
    write_jsonl(stages.parent / "short.jsonl", [{"prompt": f"Is it {at}?", "completion": "a"} for at in range(4)])
    rewrite(
        stages,
        (
            "pairs: {kind: make_pairs, train: [{path: train.jsonl}]}",
            "pairs: {kind: make_pairs, train: [{path: short.jsonl}]}",
        ),
    )
    answer = finefit("check", stages.name)
    assert answer.code == 1
    assert (
        "error: stage pairs: no pair could be made for train of 4 rows: 4 has an answer that no rule can change"
        in answer.out
    )
    begun = finefit("run", stages.name)
    assert begun.code == 1
    assert "stage pairs: no pair could be made for train of 4 rows" in begun.err
    assert not (stages.parent / "runs").exists()


@pytest.mark.usefixtures("without_rehearsal")
def test_a_model_that_is_not_there_does_not_hide_what_else_is_wrong(stages: Path, finefit: Finefit) -> None:
    rewrite(
        stages,
        ("path: model}", "path: modell}"),
        ("train: [{path: train.jsonl}]}\n  dpo", "train: [{path: nowhere.jsonl}]}\n  dpo"),
    )
    answer = finefit("check", stages.name)
    assert answer.code == 1
    assert "error: stage sft: the model folder" in answer.out
    assert "error: stage pairs: nowhere.jsonl does not exist" in answer.out


@pytest.mark.usefixtures("without_rehearsal")
def test_a_disk_that_does_not_hold_all_stages_is_told_once(
    stages: Path, finefit: Finefit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finefit.run.check_stages.free_bytes", lambda _: 1)
    answer = finefit("check", stages.name)
    assert answer.code == 1
    assert answer.out.count("bytes of disk") == 1
    assert "error: the run takes up to " in answer.out


@pytest.mark.usefixtures("without_rehearsal")
@pytest.mark.parametrize("through_pairs", [False, True])
def test_rows_that_a_model_was_trained_on_are_found_among_those_it_is_scored_by(
    through_pairs: bool, stages: Path, finefit: Finefit
) -> None:
    """Of pairs to come, the rows that they will be made from tell."""
    rows = make_rows(22)
    write_jsonl(stages.parent / "test.jsonl", [*make_rows(3, seed=2), rows[4]])
    with stages.open("a", encoding="utf-8") as file:
        file.write(SCORES)
    if through_pairs:
        write_jsonl(stages.parent / "others.jsonl", make_rows(8, seed=3))
        rewrite(stages, ("data: {train: [{path: train.jsonl}]}}", "data: {train: [{path: others.jsonl}]}}"))
    answer = finefit("check", stages.name)
    assert answer.code == 1
    guilty = "dpo" if through_pairs else "sft"
    assert f"error: stage scores: 1 of its rows are also training rows of stage {guilty}:" in answer.out
    assert "test.jsonl" in answer.out


@pytest.mark.usefixtures("without_rehearsal")
def test_examples_are_shown_of_every_stage_whose_rows_are_there(stages: Path, finefit: Finefit) -> None:
    rewrite(
        stages,
        ("tuning: {kind: lora, rank: 4, alpha: 8}", "tuning: {kind: full}"),
        ("  merged: {kind: merge_adapter, model: {kind: stage, name: dpo}}\n", ""),
    )
    with stages.open("a", encoding="utf-8") as file:
        file.write(
            "  more: {kind: train, model: {kind: stage, name: sft}, data: {train: [{path: validation.jsonl}]}}\n"
        )
    answer = finefit("check", stages.name, "--show", "1")
    assert answer.code == 0
    assert answer.out.count("example 1\n") == 2


def _without_usable_row(folder: Path) -> None:
    rows = (folder / "train.jsonl").read_text(encoding="utf-8").replace("assistant", "user")
    (folder / "train.jsonl").write_text(rows, encoding="utf-8")


@pytest.mark.parametrize("spoil", [lambda folder: (folder / "train.jsonl").unlink(), _without_usable_row])
def test_rows_of_which_none_is_there_or_left_are_reported_without_a_rehearsal(
    folder: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(folder)
    found = check_pipeline(load_pipeline(folder / "spec.yaml"), folder, folder / "runs")
    assert found.has_errors
    assert found.stages["sft"].forecast is None


@pytest.mark.parametrize("verb", ["check", "run"])
def test_a_hostile_chat_template_is_refused_with_its_model_the_limit_and_what_to_do(
    verb: str, folder: Path, finefit: Finefit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finefit.data.template_process.SECONDS", 0.5)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (folder / "model/chat_template.jinja").write_text(loop)
    answer = finefit(verb, "spec.yaml")
    assert answer.code == 2
    assert f"{folder / 'model'} takes more than 0.6 s of CPU time for 1 conversation" in answer.err
    assert "use the template that belongs to the model" in answer.err
    assert not list(folder.glob("runs/tiny-*"))
