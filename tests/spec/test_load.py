"""Messages are read as a user reads them: where, which key, which value, what is accepted."""

import gzip
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finefit.errors import SpecError
from finefit.spec import Period, foreign, reader
from finefit.spec.data import Source
from finefit.spec.load import (
    changed_text,
    dumped,
    load_spec,
    parse_any,
    parse_spec,
    spec_from_json,
    spec_to_json,
    whole_text,
)
from finefit.spec.models import FolderModel, Full, Lora
from finefit.spec.pipeline import Pipeline
from finefit.spec.reader import Reader
from finefit.spec.schema import LeverSettings, Spec
from finefit.spec.stages import TrainStage
from finefit.spec.tasks import AmrForm

GOOD = """\
name: medical
model: {kind: hub, id: owner/name}
tuning:
  kind: lora
  rank: 8
data:
  train:
    - path: a.jsonl
optimizer:
  lr: 1e-5
"""


LEVERS = ", ".join(f"`{name}`" for name in LeverSettings.model_fields)


SOURCE = ", ".join(f"`{key}`" for key in Source.model_fields)


def parsed(text: str, *overrides: str) -> Spec:
    return parse_spec(text, where="run.yaml", overrides=overrides)


def complaints(text: str, *overrides: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parsed(text, *overrides)
    return str(caught.value).splitlines()


def complaint(text: str, *overrides: str) -> str:
    (line,) = complaints(text, *overrides)
    return line


def test_a_small_spec_is_filled_with_defaults() -> None:
    spec = parsed(GOOD)
    assert spec.optimizer.lr == 1e-5
    assert isinstance(spec.tuning, Lora)
    assert (spec.tuning.rank, spec.global_batch, spec.schedule.epochs) == (8, 16, 1)


def test_exponents_without_a_dot_are_numbers() -> None:
    for text, value in {"1e-5": 1e-5, "2E-4": 2e-4, ".5": 0.5, "3": 3.0, "+1.e-3": 1e-3}.items():
        assert parsed(GOOD.replace("1e-5", f"1e-5\n  eps: {text}")).optimizer.eps == value


def test_a_word_is_text_and_so_is_a_quoted_number() -> None:
    assert parsed(GOOD.replace("medical", "no")).name == "no"
    assert parsed(GOOD.replace("medical", "'7'")).name == "7"


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("200 steps", Period(unit="steps", count=200)),
        ("1 step", Period(unit="steps", count=1)),
        ("epoch", Period(unit="epoch")),
        ("15 minutes", Period(unit="minutes", count=15)),
    ],
)
def test_intervals_are_written_in_words(text: str, interval: Period) -> None:
    assert parsed(GOOD, f"save.every={text}").save.every == interval


@pytest.mark.parametrize(
    "text", ["0 steps", "00 steps", "steps", "200", "-1 steps", "2 epochs", "{unit: steps, count: -3}"]
)
def test_what_is_no_interval_is_refused_with_examples(text: str) -> None:
    line = complaint(GOOD + f"save: {{every: {text}}}\n")
    assert line.startswith("run.yaml:11 save.every: ")
    assert line.endswith("is not an interval; write for instance `200 steps`, `epoch` or `15 minutes`")


def test_json_and_back_is_the_same_spec_and_the_same_text() -> None:
    text = GOOD + (
        "validate: {every: epoch}\nevaluate: [{task: exact_match, limit: 10}]\nlevers: {micro_batch: "
        "2}\non_nan: {kind: skip}\n"
    )
    spec = parsed(text, "optimizer.lr=0.01234567890123456789", "tuning.targets=[q_proj, v_proj]", "optimizer.clip=null")
    document = spec_to_json(spec)
    assert spec_from_json(document) == spec
    assert spec_to_json(spec_from_json(document)) == document
    assert '"validate"' in document


def test_damaged_json_is_a_spec_error() -> None:
    for document in ("", "{", "[]", "{}", '{"name": NaN}', "\ud800", '{"seed": 1' + "0" * 5000 + "}"):
        with pytest.raises(SpecError, match=r"^spec\.json"):
            spec_from_json(document)


KINDS = "`hub`, `folder`, `embedded`, `shape`, `custom`"
LORA = (
    "`kind`, `rank`, `alpha`, `dropout`, `targets`, `experts`, `base_bits`, `rank_stabilised`, `dora`, `weights`, "
    "`adapter`"
)
NAN = "`kind: stop`, `kind: skip`, `kind: roll_back`"


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("rank", "rnak", "run.yaml:5 tuning.rnak: there is no such key; did you mean `rank`?"),
        ("rank: 8", "rank: 8\n  144:", "run.yaml:6 tuning.144: there is no such key; was a number cut by its comma?"),
        ("rank", "colour", f"run.yaml:5 tuning.colour: there is no such key; the keys here are {LORA}"),
        ("$", "validation: {every: epoch}\n", "run.yaml:11 validation: there is no such key; did you mean `validate`?"),
        ("1e-5", "2", "run.yaml:10 optimizer.lr: 2 is far above what AdamW can train with, so it is probably a typo"),
        (
            "$",
            "learning_rate: 1\n",
            "run.yaml:11 learning_rate: there is no such key; finefit has this setting as `optimizer.lr`",
        ),
        (
            "rank",
            "lora_alpha",
            "run.yaml:5 tuning.lora_alpha: there is no such key; finefit has this setting as `tuning.alpha`",
        ),
        ("kind: hub", "kind: hubb", f'run.yaml:2 model.kind: "hubb" is not accepted; accepted: {KINDS}; did you mean'),
        ("kind: hub, ", "", f"run.yaml:2 model.kind: missing; give {KINDS}"),
        (
            "{kind: hub, id: owner/name}",
            "owner/name",
            'run.yaml:2 model: "owner/name" is text; write {kind: hub, id: owner',
        ),
        (
            "{kind: hub, id: owner/name}",
            "./mine",
            'run.yaml:2 model: "./mine" is text; write {kind: folder, path: ./mine}',
        ),
        ("\n    - path: a.jsonl", " a.jsonl", 'run.yaml:7 data.train: "a.jsonl" is text; write [{path: a.jsonl}]'),
        ("path: a.jsonl", "a.jsonl", 'run.yaml:8 data.train.0: "a.jsonl" is text; write {path: a.jsonl}'),
        ("\n  train:\n    - path: a.jsonl", " a", 'run.yaml:6 data: "a" is text; write {train: [{path: a}]}'),
        ("$", "on_nan: stop\n", f'run.yaml:11 on_nan: "stop" is text; a mapping with {NAN} is needed'),
        ("$", "device: gpu\n", 'run.yaml:11 device: "gpu" is not accepted; accepted: `auto`, `cpu`, `cuda`'),
        ("1e-5", "0,001", 'run.yaml:10 optimizer.lr: "0,001" is text; a number is needed'),
        ("medical", "7", 'run.yaml:1 name: 7 is a number; text is needed: write "7"'),
        ("medical", "a/b", 'run.yaml:1 name: "a/b" is not a name; use letters, digits, `.`, `_` and `-`'),
        ("$", "evaluate: [{task: rouge, name: v1.2}]\n", 'run.yaml:11 evaluate.0.name: "v1.2" is not a name; use'),
        ("$", "levers: {micro_batch: x}\n", 'run.yaml:11 levers.micro_batch: "x" is text; a whole number or `auto`'),
        ("$", "levers: {micro_batch: 0}\n", "run.yaml:11 levers.micro_batch: 0 is out of range; give at least 1"),
    ],
)
def test_each_problem_is_reported_once_with_line_key_value_and_what_is_accepted(old: str, new: str, line: str) -> None:
    """`$` is the end of the text."""
    assert complaint(GOOD + new if old == "$" else GOOD.replace(old, new)).startswith(line)


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("seed: many", '"many" is text; a whole number is needed'),
        ("seed: 262,144", '"262,144" is text; a whole number is needed: write 262144'),
        ("seed: 1_000", '"1_000" is text; a whole number is needed: write 1000'),
        ("seed: '16'", '"16" is text; a whole number is needed: write 16'),
        ("seed: 1e3", "1000.0 is a number; a whole number is needed: write 1000"),
        ("seed: 1.5", "1.5 is a number; a whole number is needed"),
        ("seed: true", "true is a truth value; a whole number is needed"),
        ("seed:", "null is no value; a whole number is needed"),
        ("seed: [1]", "[1] is a list; a whole number is needed"),
        ("seed: .nan", "NaN is a number; a whole number is needed"),
        ("seed: -1", "-1 is out of range; give at least 0"),
        ("global_batch: 0", "0 is out of range; give at least 1"),
        ("levers: fast", '"fast" is text; a mapping with the keys ' + LEVERS + " or `auto` is needed"),
        ("evaluate: {task: exact_match}", '{"task": "exact_match"} is a mapping; a list is needed'),
    ],
)
def test_a_wrong_value_is_shown_with_what_is_accepted(setting: str, problem: str) -> None:
    assert complaint(GOOD + setting + "\n") == f"run.yaml:11 {setting.partition(':')[0]}: {problem}"


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("validation: {}", "data.validation: give either path or share"),
        ("validation: {path: b.jsonl, share: 0.1}", "data.validation: give either path or share"),
        (
            "validation: {share: 0.1, limit: 9}",
            "data.validation: fields, limit, where and images_root belong to a path; a share has those of train",
        ),
        ("validation: {share: 1.0}", "data.validation.share: 1.0 is out of range; give less than 1"),
        ("test: {path: b.jsonl, weight: 2}", "data: test.weight: only train has weights, a test row is answered once"),
        ("test: [{path: b.jsonl}, {path: c/b.csv}]", "data: test has two sources called b; give them a name each"),
        ("test: [{path: b.jsonl, pth: 2}]", "data.test.0.pth: there is no such key; did you mean `path`?"),
        ("test: [{}]", "data.test.0.path: missing; give text"),
        ("test: []", "data.test: [] has 0 items; give at least 1"),
        ("test: {path: b.jsonl, limit: 0}", "data.test.limit: 0 is out of range; give at least 1"),
        (
            "test: b.jsonl",
            f'data.test: "b.jsonl" is text; a mapping with the keys {SOURCE} or a list or `null` is needed',
        ),
        ("too_long: cut", 'data.too_long: "cut" is not accepted; accepted: `error`, `drop`, `cut_prompt`'),
        ("drop_at_most: 2", "data.drop_at_most: 2 is out of range; give at most 1"),
        (
            "images: {min_pixels: 200000, max_pixels: 100000}",
            (
                "data.images: min_pixels is 200000 and max_pixels is 100000, which no image satisfies; "
                "lower min_pixels, or raise max_pixels"
            ),
        ),
        ("images: {min_pixels: 0}", "data.images.min_pixels: 0 is out of range; give at least 1"),
        ("template_options: [fast]", 'data.template_options: ["fast"] is a list; a mapping is needed'),
    ],
)
def test_rows_that_cannot_be_meant_are_refused(setting: str, problem: str) -> None:
    text = GOOD.replace("optimizer:", f"  {setting}\noptimizer:")
    place, _, words = complaint(text).partition(" ")
    assert (place.partition(":")[0], words) == ("run.yaml", problem)


def test_a_test_may_have_several_sources_and_a_task_is_asked_of_some() -> None:
    tests = "data.test=[{path: val/docs.json}, {path: hf://datasets/a/charts@main, name: charts-2}, {path: hf://datasets/a/text@main/}]"
    spec = parsed(
        GOOD, tests, "evaluate=[{task: anls, sources: [docs, text]}, {task: relaxed_accuracy, sources: [charts-2]}]"
    )
    assert [source.label for source in spec.data.test_sources()] == ["docs", "charts-2", "text"]
    assert spec_from_json(spec_to_json(spec)) == spec
    said = complaint(GOOD + "evaluate: [{task: anls, sources: [papers]}]\n", tests)
    assert said.endswith("evaluate: anls names papers; data.test has docs, charts-2, text")
    assert complaint(GOOD + "evaluate: [{task: anls, sources: [papers]}]\n").endswith(
        "anls names papers; data.test has no source"
    )


def test_sources_are_told_by_split() -> None:
    spec = parsed(
        GOOD,
        "data.validation={path: b.csv, limit: 5, fields: {prompt: ask, answer: reply}}",
        "data.test={path: c.json}",
    )
    sources = spec.data.sources()
    assert {split: [source.path for source in found] for split, found in sources.items()} == {
        "train": ["a.jsonl"],
        "validation": ["b.csv"],
        "test": ["c.json"],
    }
    assert (sources["validation"][0].limit, sources["validation"][0].fields.answer) == (5, "reply")
    shared = parsed(GOOD, "data.validation={share: 0.1}").data.sources()
    assert (shared["validation"], shared["test"]) == ((), ())


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("tuning.base_bits=5", "5 is not accepted; accepted: `4`, `8`"),
        ("model={kind: shape}", "missing; give a mapping"),
        ("model={kind: shape, config: 3}", "3 is a number; a mapping is needed"),
        ("levers.recompute=some", '"some" is text; a whole number or `auto`, `none`, `all` is needed'),
    ],
)
def test_a_wrong_value_of_a_choice_is_shown_with_what_is_accepted(override: str, problem: str) -> None:
    assert complaint(GOOD, override).endswith(f": {problem}")


@pytest.mark.parametrize(
    ("text", "shown"), [(".nan", "NaN"), (".inf", "Infinity"), ("-.INF", "-Infinity"), ("1e999", "Infinity")]
)
def test_numbers_are_finite(text: str, shown: str) -> None:
    assert (
        complaint(GOOD.replace("1e-5", text)) == f"run.yaml:10 optimizer.lr: {shown} is not finite; a number is needed"
    )


@pytest.mark.parametrize("file", ["v1.2.py", "my task.py", "_u.py", "đo.py", f"{'x' * 65}.py"])
def test_a_task_file_that_cannot_give_its_name_needs_one(file: str) -> None:
    own = f'evaluate: [{{task: {{kind: python, path: "tasks/{file}"}}}}]\n'
    said = complaint(GOOD + own)
    assert said.startswith(
        f"run.yaml:11 evaluate.0: a task is named after its file, and '{file.removesuffix('.py')}' is not a "
        "name; give name: with"
    )
    assert parsed(GOOD + own.replace("}}]", "}, name: mine}]")).evaluate[0].label == "mine"


def test_a_list_with_bad_items_is_not_also_called_too_short() -> None:
    assert complaints(GOOD.replace("path:", "pth:")) == [
        "run.yaml:8 data.train.0.path: missing; give text",
        "run.yaml:8 data.train.0.pth: there is no such key; did you mean `path`?",
    ]


def test_all_errors_come_at_once_in_the_order_of_the_file() -> None:
    text = (
        GOOD.replace("hub", "hubb").replace("rank: 8", "rank: eight\n  rank: 9").replace("lr: 1e-5", "lr: -1")
        + "sed: 1\n"
    )
    lines = complaints(text.replace("rank: 9", "rnk: 9"), "global_batch=x", "oops")
    assert [line.split(": ")[0] for line in lines] == [
        "run.yaml:2 model.kind",
        "run.yaml:5 tuning.rank",
        "run.yaml:6 tuning.rnk",
        "run.yaml:11 optimizer.lr",
        "run.yaml:12 sed",
        "--set global_batch=x global_batch",
        "--set oops",
    ]


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("rank: 8", "rank: 8\n  rank: 9", "run.yaml:6 tuning.rank: given twice, first at run.yaml:5; keep one"),
        ("id: owner/name}", "id: owner/name", "run.yaml:3: column 7: "),
        ("  lr", "\tlr", "run.yaml:10: column 1: there is a tab here; use spaces"),
    ],
)
def test_a_fault_of_the_yaml_has_its_place(old: str, new: str, line: str) -> None:
    assert complaint(GOOD.replace(old, new)).startswith(line)


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing yet\n", "---\n", "null"])
def test_an_empty_spec_is_told_what_it_needs(text: str) -> None:
    assert complaint(text).startswith(
        "run.yaml:1: the spec is empty; a spec is a mapping with at least the keys `model`, `data`"
    )
    assert complaint("- name: a\n").startswith('run.yaml:1: [{"name": "a"}] is a list; a spec is a mapping')


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: &x 1\nb: *x\n", "run.yaml:2: column 4: `*x` is an alias; write the value out"),
        ("a: !python/object x\n", "run.yaml:1: column 4: `!python/object` is a tag; write the value without it"),
        ("a: 1\n---\nb: 2\n", "run.yaml:2: column 1: a second document begins here; keep one"),
        ("? [1]\n: 2\n", "run.yaml:1: column 3: a key must be plain text; check"),
        ("a: " + "[" * 1000 + "]" * 1000, "run.yaml:1: column 24: nested deeper than 20 levels; check"),
        ('a: "\\ud800"\n', "run.yaml:1: column 4: an unpaired surrogate is not valid text; check"),
        ('a: "\\UFFFFFFFF"\n', "run.yaml:1: this is not YAML 1.2 ("),
        ("%YAML 1.3\n---\na: 1\n", "run.yaml:1: this is not YAML 1.2 ("),
        ("a: 1\nb: \x00\n", "run.yaml:2: this is not YAML 1.2 ("),
    ],
)
def test_yaml_beyond_plain_values_is_refused(text: str, problem: str) -> None:
    assert complaint(text).startswith(problem)


def test_overrides_reach_into_mappings_and_lists_and_mend_the_file_and_a_later_one_wins() -> None:
    spec = parsed(GOOD, "schedule.epochs=2", "data.train.0.path=x.jsonl", "tuning={kind: full}", "optimizer.clip=null")
    found = (spec.schedule.epochs, spec.data.train[0].path, spec.tuning.kind, spec.optimizer.clip)
    assert found == (2, "x.jsonl", "full", None)
    assert parsed(GOOD, "seed=1", "seed=2").seed == 2
    assert parsed(GOOD + "levers: auto\n", "levers.micro_batch=4").levers == LeverSettings(micro_batch=4)
    broken = GOOD.replace("{kind: hub, id: owner/name}", "oops")
    assert parsed(broken, "model={kind: folder, path: m}").model == FolderModel(kind="folder", path="m")


@pytest.mark.parametrize("override", ["", "seed", "=1", "seed=", "seed= ", "a..b=1", ".a=1", "a b=1", "seed: 1"])
def test_what_is_no_override_is_refused_with_an_example(override: str) -> None:
    assert complaint(GOOD, override).startswith(f"--set {override}: this is not a valid override; write key.path=value")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("schedule.epochs=two", 'schedule.epochs: "two" is text; a number or `null` is needed'),
        ("shedule.epochs=2", "shedule: there is no such key; did you mean `schedule`?"),
        ("data.train.1.path=b", "data.train.1.path: `1` is not an item of a list of 1 (the first is 0); override"),
        ("data.train=[]", "data.train: [] has 0 items; give at least 1"),
        ("optimizer.betas=[0.9]", "optimizer.betas.1: missing; give a number"),
        ("optimizer.betas=[0.9, 0.9, 0.9]", "optimizer.betas: [0.9, 0.9, 0.9] has 3 items; give at most 2"),
        ("model={kind: folder}", "model.path: missing; give text"),
    ],
)
def test_a_wrong_override_is_told_at_the_override(override: str, problem: str) -> None:
    assert complaint(GOOD, override).startswith(f"--set {override} {problem}")


def test_an_override_that_is_broken_or_contradicts_the_file_is_told_once() -> None:
    assert complaint(GOOD, "schedule.epochs={").startswith("--set schedule.epochs={: column 2: ")
    said = complaint(GOOD + "schedule: {steps: 10}\n", "schedule.epochs=2")
    assert said.startswith(
        "run.yaml:11 schedule: epochs and steps are both given; keep one (on the command line, --set"
    )


def test_messages_can_always_be_printed() -> None:
    for line in complaints(GOOD, "na\udcffme=1", "name=\udcff") + complaints(GOOD.replace("medical", '"a\\nb"')):
        line.encode()


def test_a_file_is_named_in_its_errors(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(GOOD)
    assert load_spec(path, ["seed=7"]).seed == 7
    path.write_text(GOOD + "sed: 7\n")
    with pytest.raises(SpecError, match=r"run\.yaml:11 sed: there is no such key; did you mean `seed`\?"):
        load_spec(path)


def test_windows_line_ends_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load_spec(path) == parsed(GOOD)


def test_a_missing_file_gets_the_nearest_names(tmp_path: Path) -> None:
    for name in ("medical.yaml", "notes.txt"):
        (tmp_path / name).touch()
    with pytest.raises(SpecError, match=r"medcal\.yaml: there is no such file; did you mean `medical\.yaml`\?"):
        load_spec(tmp_path / "medcal.yaml")
    with pytest.raises(SpecError, match=r"there is no such file; `finefit recipes` lists specs to start from$"):
        load_spec(tmp_path / "x")
    with pytest.raises(SpecError, match="its folder cannot be listed either"):
        load_spec(tmp_path / "nowhere" / "x.yaml")


def test_a_folder_is_no_spec(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is a folder, but a spec is a YAML file"):
        load_spec(tmp_path)
    with pytest.raises(SpecError, match="cannot be read"):
        load_spec(tmp_path / "a\0b")


def test_bytes_that_are_no_utf8_have_their_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(GOOD.encode() + b"# caf\xe9\n")
    with pytest.raises(SpecError, match=r"run\.yaml:11: byte 0xe9 is not UTF-8 text; save the file as UTF-8"):
        load_spec(path)


# `base:` in a spec file: one file says what several have in common, and each says what is its own.

BASE = """\
seed: 7
model: {kind: hub, id: owner/name}
tuning: {kind: lora, rank: 128, alpha: 256}
data:
  train:
    - {path: one.txt}
    - {path: two.txt, weight: 3}
  max_tokens: 1024
  task: {kind: amr, method: baseline}
optimizer: {lr: 1e-5}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE)
    return tmp_path


def child(folder: Path, text: str, *, name: str = "child.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def base_complaints(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load_spec(path, overrides)
    return str(caught.value).replace(f"{path.parent}/", "").splitlines()


def test_a_mapping_keeps_what_the_child_does_not_say(folder: Path) -> None:
    more = "data: {task: {method: mtup2}, template: plain}\noptimizer: {weight_decay: 0.1}\ntuning: {rank: 8}\n"
    spec = load_spec(child(folder, f"base: base.yaml\nname: a\n{more}"))
    assert spec.data.task == AmrForm(kind="amr", method="mtup2")
    assert (spec.seed, spec.data.max_tokens, spec.data.template) == (7, 1024, "plain")
    assert [source.path for source in spec.data.train] == ["one.txt", "two.txt"]
    assert (spec.optimizer.lr, spec.optimizer.weight_decay) == (1e-5, 0.1)
    assert spec.tuning == Lora(kind="lora", rank=8, alpha=256)


def test_a_mapping_of_another_kind_and_a_list_replace_the_whole_and_null_takes_a_value_away(folder: Path) -> None:
    more = "tuning: {kind: full}\nmodel: {kind: folder, path: m}\ndata: {train: [{path: x}], task: null}\n"
    spec = load_spec(child(folder, f"base: base.yaml\nname: a\n{more}"))
    assert (spec.tuning, spec.model) == (Full(kind="full"), FolderModel(kind="folder", path="m"))
    assert ([source.path for source in spec.data.train], spec.data.task) == (["x"], None)


def test_a_kind_that_chooses_no_other_keys_is_one_value_among_others(folder: Path) -> None:
    (folder / "base.yaml").write_text(
        BASE.replace("{lr: 1e-5}", "{kind: adamw, lr: 1e-5}") + "schedule: {kind: cosine, epochs: 5, warmup: 0.1}\n"
    )
    spec = load_spec(
        child(folder, "base: base.yaml\nname: a\nschedule: {kind: linear}\noptimizer: {kind: adamw_8bit}\n")
    )
    assert (spec.schedule.kind, spec.schedule.epochs, spec.schedule.warmup) == ("linear", 5, 0.1)
    assert (spec.optimizer.kind, spec.optimizer.lr) == ("adamw_8bit", 1e-5)


def test_an_override_comes_last(folder: Path) -> None:
    assert load_spec(child(folder, "base: base.yaml\nname: a\nseed: 8\n"), ["seed=9"]).seed == 9
    assert load_spec(folder / "child.yaml", ["data.max_tokens=9"]).data.max_tokens == 9


def test_a_base_has_a_base_of_its_own(folder: Path) -> None:
    (folder / "deep").mkdir()
    child(folder, "base: ../base.yaml\nseed: 8\ntuning: {rank: 64}\n", name="deep/middle.yaml")
    spec = load_spec(child(folder, "base: deep/middle.yaml\nname: a\ntuning: {rank: 32}\n"))
    assert (spec.seed, spec.tuning) == (8, Lora(kind="lora", rank=32, alpha=256))


def test_what_is_wrong_is_told_with_the_file_and_line_that_it_stands_in(folder: Path) -> None:
    (folder / "base.yaml").write_text(
        BASE.replace("seed: 7", "sed: 7").replace("max_tokens: 1024", "max_tokens: 1,024")
    )
    path = child(folder, "base: base.yaml\nname: a\ndata: {task: {method: mtup9}}\noptimizer: {lr: -1}\n")
    assert base_complaints(path) == [
        'child.yaml:3 data.task.method: "mtup9" is not accepted; accepted: `baseline`, `mtup2`, `mtup3a`, `mtup3b`, `mtup4`; did you mean `mtup4`?',  # noqa: E501
        "child.yaml:4 optimizer.lr: -1 is out of range; give more than 0",
        "base.yaml:1 sed: there is no such key; did you mean `seed`?",
        'base.yaml:8 data.max_tokens: "1,024" is text; a whole number is needed: write 1024',
    ]


def test_a_value_that_gave_way_is_not_complained_about_where_it_stood(folder: Path) -> None:
    (folder / "base.yaml").write_text(
        BASE.replace("    - {path: two.txt, weight: 3}\n", "    - {path: two.txt, weigth: 3}\n")
    )
    path = child(folder, "base: base.yaml\nname: a\ndata:\n  train:\n    - {path: x}\n    - {pth: y}\n")
    assert base_complaints(path) == [
        "child.yaml:6 data.train.1.path: missing; give text",
        "child.yaml:6 data.train.1.pth: there is no such key; did you mean `path`?",
    ]


def test_a_file_that_stands_below_itself_is_refused(folder: Path) -> None:
    child(folder, "base: child.yaml\n", name="base.yaml")
    (line,) = base_complaints(child(folder, "base: base.yaml\nname: a\n"))
    assert (
        line == "base.yaml:1 base: child.yaml -> base.yaml -> child.yaml: these files name each other as base; "
        "remove `base` from one of these files"
    )
    (line,) = base_complaints(child(folder, "name: a\nbase: ./own.yaml\n", name="own.yaml"))
    assert line.startswith("own.yaml:2 base: own.yaml -> own.yaml: these files name")


def test_a_base_that_is_not_there_is_told_alone_and_the_nearest_name_with_it(folder: Path) -> None:
    (line,) = base_complaints(child(folder, "name: a\nbase: bse.yaml\n"))
    assert line.startswith("child.yaml:2 base: bse.yaml: there is no such file; did you mean `base.yaml`?")


@pytest.mark.parametrize("value", ["3", "[base.yaml]", '""', "null"])
def test_a_base_that_is_no_path_is_refused(value: str, folder: Path) -> None:
    (line,) = base_complaints(child(folder, f"name: a\nbase: {value}\n"))
    assert line.endswith("is not a path; give the path of a spec file, relative to this one")


def test_a_base_that_is_no_mapping_is_refused_in_its_own_name(folder: Path) -> None:
    (folder / "base.yaml").write_text("- 1\n")
    assert any(
        line.startswith("base.yaml:1: [1] is a list; a spec is a mapping")
        for line in base_complaints(child(folder, "base: base.yaml\nname: a\n"))
    )


def test_the_whole_text_stands_alone_and_shows_what_was_written(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = child(folder, "# Ours.\nbase: base.yaml\nname: a\ndata: {task: {method: mtup2}}\n")
    text = whole_text(path)
    assert "# # Ours.\n# base: base.yaml\n# name: a\n" in text
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "spec.yaml"
    elsewhere.write_text(text)
    assert load_spec(elsewhere) == load_spec(path)


def test_a_spec_without_a_base_is_kept_as_it_is_written(folder: Path) -> None:
    text = f"# mine\nname:   a\n{BASE}"
    assert whole_text(child(folder, text)) == text


WORDS = st.text(max_size=12) | st.sampled_from(
    ["no", "1_000", "1e-5", "0x1f", "~", "null", "Null", ".inf", "- a", "a: b", "#x", " x ", "2026-01-01"]
)
LEAVES = st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False) | WORDS
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=8
)


@given(st.dictionaries(WORDS, VALUES, min_size=1, max_size=4))
def test_values_are_read_again_as_they_were_written(values: dict[str, object]) -> None:
    reader = Reader(dumped(values), lambda line: (line, str(line)))
    assert reader.read() == values
    assert reader.problems == []


def test_a_text_with_a_base_is_parsed_beside_its_name(folder: Path) -> None:
    assert parse_spec("base: base.yaml\nname: a\n", where=str(folder / "child.yaml")).seed == 7


# What is changed in a spec's text is changed there alone.

TEXT = """\
# the first attempt
name: medical  # names the folder
model: {kind: hub, id: "owner/name"}
tuning:
  kind: lora
  rank: 64  # as in the paper
data: {train: [{path: a.jsonl}]}
optimizer: {lr: 1e-4}

levers: auto
# the end
"""


ITEMS = "evaluate:\n- {task: exact_match, batch: 8} # all of them\n- task: json_match\n"


@pytest.mark.parametrize(
    ("text", "changes", "old", "new"),
    [
        (TEXT, [], "", ""),
        (TEXT, ["tuning.rank=16"], "rank: 64  #", "rank: 16  #"),
        (TEXT, ["optimizer.kind=adamw_8bit"], "{lr: 1e-4}", "{lr: 1e-4, kind: adamw_8bit}"),
        (ITEMS, ["evaluate.0.batch=1"], "batch: 8", "batch: 1"),
        (ITEMS, ["evaluate.1.batch=2"], "json_match\n", "json_match\n  batch: 2\n"),
        (TEXT + "evaluate: [{task: rouge, batch: 8}]\n", ["evaluate.0.batch=auto"], "batch: 8", "batch: auto"),
    ],
)
def test_a_value_is_changed_where_it_stands_and_all_else_stays(
    text: str, changes: list[str], old: str, new: str
) -> None:
    assert changed_text(text, changes) == text.replace(old, new)


def test_comments_order_and_quotes_stay() -> None:
    changed = changed_text(TEXT, ["levers.micro_batch=4", "optimizer.kind=adamw_8bit", "data.max_tokens=1024"])
    assert [line.split(":")[0] for line in changed.splitlines() if line[:1].isalpha()] == [
        *("name", "model", "tuning", "data", "optimizer", "levers")
    ]
    comments = ("# the first attempt", "# names the folder", "# as in the paper", "# the end")
    assert all(kept in changed for kept in (*comments, '"owner/name"', "lr: 1e-4"))


def test_a_word_gives_way_to_a_mapping() -> None:
    changed = changed_text(TEXT, ["levers.micro_batch=4", "levers.recompute=all"])
    assert "auto" not in changed
    levers = parse_spec(changed, where="spec.yaml").levers
    assert levers != "auto"
    assert (levers.micro_batch, levers.recompute) == (4, "all")


def test_keys_that_are_not_there_are_made_at_the_end() -> None:
    changed = changed_text(TEXT, ["save.keep=1", "save.every=20 steps"])
    assert parse_spec(changed, where="spec.yaml").save.keep == 1
    assert changed.index("save:") > changed.index("levers:")


@pytest.mark.parametrize(
    "override",
    ["tuning={kind: lora, rank: 64, alpha: 128}", "levers.keep_attention=true", "levers.loss_chunk=none", "seed=7"],
)
def test_a_written_change_means_what_the_override_means(override: str) -> None:
    assert parse_spec(changed_text(TEXT, [override]), where="spec.yaml") == parse_spec(
        TEXT, where="spec.yaml", overrides=(override,)
    )


def test_an_item_of_a_list_that_stands_in_the_base_is_not_written_beside_it() -> None:
    with pytest.raises(
        SpecError, match=r"evaluate is in base\.yaml, so evaluate\.0\.batch=auto cannot be written here"
    ):
        changed_text("base: base.yaml\nname: a\n", ["levers.micro_batch=4", "evaluate.0.batch=auto"])


SMALLEST = "model: {kind: hub, id: owner/name}\ndata: {train: [{path: a.jsonl}]}\n"


@pytest.mark.parametrize(
    "change",
    [
        "tuning.base_bits=4",
        "tuning.rank=8",
        "tuning.weights=bf16",
        "optimizer.kind=adamw_8bit",
        "optimizer.weight_decay=0.1",
        "engine.devices=2",
        "levers.micro_batch=4",
        "schedule.steps=3",
        "save.keep=1",
        "data.max_tokens=512",
    ],
)
def test_one_key_can_be_changed_in_the_smallest_spec(change: str) -> None:
    spec, key, value = parsed(SMALLEST, change), change.partition("=")[0].split("."), change.partition("=")[2]
    part = getattr(spec, key[0])
    assert str(getattr(part, key[1])) == value
    assert part.model_fields_set == {key[1]} | ({"train"} if key[0] == "data" else set())
    assert (spec.tuning.kind, spec.optimizer.lr) == ("lora", 2e-4)


def test_a_stage_has_the_same_defaults_as_a_flat_spec() -> None:
    stage = (
        f"{{kind: train, {', '.join(SMALLEST.strip().splitlines())}, tuning: {{rank: 4}}, optimizer: {{eps: 1e-7}}}}"
    )
    found = parse_any(f"stages: {{a: {stage}}}\n", where="run.yaml")
    assert isinstance(found, Pipeline)
    training = found.stages["a"]
    assert isinstance(training, TrainStage)
    assert isinstance(training.tuning, Lora)
    assert (training.tuning.rank, training.optimizer.lr, training.optimizer.eps) == (4, 2e-4, 1e-7)


@pytest.mark.parametrize("change", ["tuning={trainable: [layers.*]}", "on_nan.at_most=2", "engine.stage=3"])
def test_keys_of_another_kind_than_the_default_ask_for_the_kind(change: str) -> None:
    section = change.partition("=")[0].partition(".")[0]
    assert f"{section}.kind: missing; give" in complaint(SMALLEST, change)


def test_the_smallest_spec_names_a_model_and_data(tmp_path: Path) -> None:
    path = tmp_path / "my chat.yaml"
    path.write_text(SMALLEST, encoding="utf-8")
    spec = load_spec(path)
    assert (spec.name, spec.tuning.kind, spec.optimizer.lr) == ("my-chat", "lora", 2e-4)
    assert load_spec(path, ["tuning={kind: full}"]).optimizer.lr == 1e-5
    assert spec.model_fields_set == {"model", "data"}


def test_a_part_of_an_epoch_is_trained() -> None:
    assert parsed(GOOD, "schedule.epochs=0.5").schedule.num_steps(7) == 4
    assert parsed(GOOD, "schedule.epochs=0.001").schedule.num_steps(7) == 1
    assert '"epochs": 2,' in spec_to_json(parsed(GOOD, "schedule.epochs=2"))


def test_a_wrong_tuning_is_not_reported_at_the_optimizer_that_depends_on_it() -> None:
    with pytest.raises(SpecError) as caught:
        parsed(SMALLEST, "tuning={kind: lora, rank: 0}")
    assert len(str(caught.value).splitlines()) == 1


def test_what_may_be_endless_or_is_huge_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (Path("/dev/zero"), tmp_path / "pipe.yaml"):
        with pytest.raises(SpecError, match="is not a regular file"):
            load_spec(path)
    huge = tmp_path / "huge.yaml"
    huge.touch()
    os.truncate(huge, 1 << 40)
    with pytest.raises(SpecError, match="is larger than 1 MiB"):
        load_spec(huge)


def test_aliases_that_multiply_are_refused_at_the_first() -> None:
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 40))]
    with pytest.raises(SpecError, match="is an alias"):
        parsed("\n".join(lines))


ROW = b'{"prompt": "a", "answer": "b"}'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", ROW),
        ("rows.txt", b"a text"),
        ("rows.json", b"[" + ROW + b"]"),
        ("rows.json", ROW + b"\n" + ROW),
        ("rows.json", b"[" + b" " * (2 << 20)),
        ("rows.json.gz", gzip.compress(ROW, mtime=0)),
        ("rows", gzip.compress(ROW, mtime=0)),
    ],
)
def test_a_data_file_is_answered_with_the_spec_that_uses_it(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(SpecError, match="is a data file") as caught:
        load_spec(path)
    assert f"`finefit init {path}`" in caught.value.remedy
    spec = parse_spec(caught.value.remedy.partition(":\n")[2], where="spec.yaml")
    assert spec.data.train[0].path == str(path)


def test_every_key_of_another_tool_leads_to_a_key_that_exists() -> None:
    for key, place in foreign.PLACES.items():
        section, _, inner = place.partition(" ")[0].partition(":")[0].partition(".")
        declared = Spec.model_fields["validation" if section == "validate" else section]
        classes = reader.classes_of(declared.annotation)
        assert not inner or any(inner.partition(".")[0] in reader.fields_of(found) for found in classes), (key, place)


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ("stage=sft", "did you mean `stages`?"),
        ("evaluate=[{task: rouge, batch_size: 2}]", "the keys here are"),
        ("evaluate=[{task: rouge, epochs: 2}]", "the keys here are"),
        ("load_in_4bit=true", "`tuning.base_bits`"),
        ("optimizer.learning_rate=1e-4", "`optimizer.lr`"),
        ("batch_size=4", "`global_batch`"),
    ],
)
def test_a_key_of_another_tool_is_translated_only_where_it_means_that(change: str, hint: str) -> None:
    assert hint in complaint(GOOD, change)


@pytest.mark.parametrize(
    ("text", "tool"),
    [
        ("base_model: a/b\nsequence_len: 2048\nlora_r: 8\ndatasets: [{path: x}]\n", "axolotl"),
        ("model_name_or_path: a/b\nstage: sft\nfinetuning_type: lora\ncutoff_len: 2048\n", "LLaMA-Factory"),
        ("model_name_or_path: a/b\ndataset_name: c/d\nuse_peft: true\n", "TRL"),
        ("model: {_component_: torchtune.models.llama3.llama3_8b}\nepochs: 1\n", "torchtune"),
    ],
)
def test_a_config_of_another_tool_is_named(text: str, tool: str) -> None:
    with pytest.raises(SpecError, match=f"run.yaml is a config of {tool}"):
        parsed(text)


@pytest.mark.parametrize("key", ["sk-proj-abc.def", "Bearer abc", "$SERVER_KEY", ""])
def test_a_secret_in_place_of_its_variable_is_refused_and_not_repeated(key: str) -> None:
    judge = f'{{url: "http://localhost:8000/v1", model: m, key: "{key}"}}'
    with pytest.raises(SpecError, match="environment variable") as caught:
        parse_spec(f"{GOOD}evaluate: [{{task: rouge, judge: {judge}}}]\n", where="spec.yaml")
    assert not key or key not in str(caught.value)
