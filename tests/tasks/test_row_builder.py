"""`data.task` builds rows between reading and rendering, for every split alike; what cannot be built is unusable, with
its place and its reason."""

from pathlib import Path
from typing import Any

import pytest

from finefit.artifacts.atomic import read_lines
from finefit.artifacts.stage_records import Preparation
from finefit.data.examples import Examples
from finefit.data.prepare import prepare
from finefit.data.render import open_renderer
from finefit.data.rows import key_of, read_items
from finefit.preflight.data import preparation_is_reported
from finefit.spec.data import Data
from finefit.spec.schema import Evaluation, Spec
from finefit.tasks import Reply
from finefit.tasks.custom import row_builder
from finefit.tasks.make import make_task
from tests.conftest import make_tokenizer, write_jsonl
from tests.preflight.test_data import SPEC

TRAIN = """\
#::snt một
(a / con mèo)
\t
#::snt hai
(m / mèo :classifier(c / con) :theme(c1 / chuột :classifier(c / con)))

#::snt ba
(b / bé :mod(c / nhỏ)

#::snt bốn
(d / đi :agent(b / bé) :mod b)
"""
TEST = "#::snt năm\n(e / em bé)\n\n#::snt sáu\n(n / ngủ :agent(n / người))\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return folder


def prepared(folder: Path, tokenizer: Path, **task: Any) -> tuple[Preparation, Path]:
    (folder / "train.txt").write_text(TRAIN, encoding="utf-8")
    (folder / "test.txt").write_text(TEST, encoding="utf-8")
    out = folder / "-".join(["out", *map(str, task.values())])
    out.mkdir()
    data = {
        "train": [{"path": "train.txt"}],
        "test": {"path": "test.txt"},
        "task": {"kind": "amr", **task} if task else None,
    }
    found = Data.model_validate(data, strict=False)
    build = row_builder(found.task, base=folder)
    return prepare(found, base=folder, tokenizer=tokenizer, seed=0, folder=out, build=build), out


def texts(out: Path, tokenizer: Path) -> list[tuple[str, str]]:
    """What is given and what is supervised of each training row."""
    decode = open_renderer(tokenizer, "chat").tokenizer.decode
    examples = [
        list(zip(example.tokens, example.supervised, strict=True)) for example in Examples(out / "train.safetensors")
    ]
    return [(decode([t for t, s in example if not s]), decode([t for t, s in example if s])) for example in examples]


def test_training_rows_are_built_before_they_are_rendered(tmp_path: Path, tokenizer: Path) -> None:
    _, out = prepared(tmp_path, tokenizer, method="mtup2", repair_gold=True)
    (prompt, answer), *_ = texts(out, tokenizer)
    assert "Task 1: the graph without variables" in prompt
    assert prompt.endswith("Sentence: một<|end|>\n<|assistant|>")
    assert answer == "Task 1: (con_mèo)\nTask 2: (a / con_mèo)<|end|>"


def test_built_lengths_are_what_a_plan_sees(tmp_path: Path, tokenizer: Path) -> None:
    lengths = {method: prepared(tmp_path, tokenizer, method=method)[0].lengths for method in ("baseline", "mtup4")}
    plain = prepared(tmp_path, tokenizer)[0].lengths
    longest = [found.longest for found in (plain, lengths["baseline"], lengths["mtup4"]) if found]
    prompts = [found.prompt for found in (plain, lengths["baseline"], lengths["mtup4"]) if found and found.prompt]
    assert longest == sorted(set(longest))
    assert prompts == sorted(set(prompts))


def test_a_row_that_cannot_be_built_is_unusable_with_its_reason_at_its_place(tmp_path: Path, tokenizer: Path) -> None:
    found, out = prepared(tmp_path, tokenizer, method="baseline")
    ledgers = {source.split: source for source in found.sources}
    assert (ledgers["train"].read, ledgers["train"].used, ledgers["train"].dropped) == (4, 2, {"unusable": 2})
    assert (ledgers["test"].read, ledgers["test"].used, ledgers["test"].dropped) == (2, 1, {"unusable": 1})
    lines = {fault.split: fault.lines for fault in found.problems if fault.kind == "unusable"}
    assert lines["train"] == (
        "train.txt:2 has a graph that defines c twice; give the second another name, or set repair_gold: true",
        "train.txt:3 a bracket is not closed",
    )
    assert lines["test"][0].startswith("test.txt:2 has a graph that defines n twice")
    assert {line["row"] for line in read_lines(out / "ledger.jsonl") if line.get("what") == "dropped"} == {2, 3}


def test_a_repair_is_written_into_the_ledger_and_told(tmp_path: Path, tokenizer: Path) -> None:
    found, out = prepared(tmp_path, tokenizer, method="baseline", repair_gold=True)
    repaired = [
        (line["split"], line["row"], line["reason"])
        for line in read_lines(out / "ledger.jsonl")
        if line.get("what") == "repaired"
    ]
    assert repaired == [
        ("test", 2, "n / người is n2 now, since n was defined before"),
        ("train", 2, "c / con is c2 now, since c was defined before"),
    ]
    told = list(preparation_is_reported(found, Spec.model_validate(SPEC)))
    assert [finding.level for finding in told] == ["note", "note"]
    assert "train.txt:2 c / con is c2 now" in "".join(finding.problem for finding in told)


def test_an_item_whose_gold_was_repaired_is_scored_as_if_it_were_repaired_now(tmp_path: Path, tokenizer: Path) -> None:
    """So that a run's own evaluation and one of the same answers from a file agree."""
    copied = Reply(text="(n / ngủ :agent(n / người))")
    built, raw = (
        read_items(prepared(tmp_path, tokenizer, **task)[1] / "test.jsonl")[1] for task in ({"repair_gold": True}, {})
    )
    task = make_task(Evaluation.model_validate({"task": {"kind": "amr", "repair_gold": True}}))
    now, before = task.read(copied, raw), task.read(copied, built)
    assert before.counts == now.counts
    assert before.counts["matched"] == before.counts["gold"] == 4.0
    assert (
        before.extracted["gold_repairs"]
        == now.extracted["gold_repairs"]
        == ["n / người is n2 now, since n was defined before"]
    )


def test_an_item_is_the_same_item_whatever_it_was_built_into(tmp_path: Path, tokenizer: Path) -> None:
    methods = ("baseline", "mtup2", "mtup4")
    built = [
        read_items(prepared(tmp_path, tokenizer, method=method, repair_gold=True)[1] / "test.jsonl")
        for method in methods
    ]
    assert len({rows[0].answer for rows in built}) == len(methods)
    keys = [[key_of(row) for row in rows] for rows in built]
    plain = [key_of(row) for row in read_items(prepared(tmp_path, tokenizer)[1] / "test.jsonl")]
    assert keys == [plain] * len(methods)
    assert len(set(plain)) == 2


def test_a_pair_is_the_same_item_with_and_without_a_form(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "form.py").write_text("def build(prompt, answer):\n    return prompt.upper(), f'= {answer}'\n")
    write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "two and two", "chosen": "4", "rejected": "5"}])
    items = {}
    for name, task in {"plain": None, "built": {"kind": "python", "path": "form.py"}}.items():
        (tmp_path / name).mkdir()
        data = Data.model_validate(
            {"train": [{"path": "pairs.jsonl"}], "test": {"path": "pairs.jsonl"}, "task": task, "overlap": "warn"},
            strict=False,
        )
        build = row_builder(data.task, base=tmp_path)
        prepare(data, base=tmp_path, tokenizer=tokenizer, seed=0, folder=tmp_path / name, pairs=True, build=build)
        (items[name],) = read_items(tmp_path / name / "test.jsonl")
    assert (items["built"].prompt[-1].content, items["built"].answer, items["built"].wrong) == (
        "TWO AND TWO",
        "= 4",
        ("= 5",),
    )
    assert key_of(items["built"]) == key_of(items["plain"])


def test_without_a_task_rows_stay_as_they_are_read(tmp_path: Path, tokenizer: Path) -> None:
    found, out = prepared(tmp_path, tokenizer)
    assert [source.used for source in found.sources] == [4, 2]
    assert texts(out, tokenizer)[0] == ("<|user|>một<|end|>\n<|assistant|>", "(a / con mèo)<|end|>")
    assert all(row.key == "" for row in read_items(out / "test.jsonl"))
