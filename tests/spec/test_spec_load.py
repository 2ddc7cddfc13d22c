"""Messages are read as a user reads them: where, which key, which value, what is accepted."""

from pathlib import Path

import pytest

from finefit.errors import SpecError
from finefit.spec import Spec, load_spec, parse_spec, spec_from_json, spec_to_json
from finefit.spec.every import Interval
from finefit.spec.models import FolderModel, Lora
from finefit.spec.rows import Source
from finefit.spec.schema import Levers

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


LEVERS = ", ".join(f"`{name}`" for name in Levers.model_fields)


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
        assert parsed(GOOD.replace("1e-5", text)).optimizer.lr == value


def test_no_is_a_word() -> None:
    assert parsed(GOOD.replace("medical", "no")).name == "no"


def test_quoted_numbers_are_text() -> None:
    assert parsed(GOOD.replace("medical", "'7'")).name == "7"


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("200 steps", Interval(unit="steps", count=200)),
        ("1 step", Interval(unit="steps", count=1)),
        ("epoch", Interval(unit="epoch")),
        ("15 minutes", Interval(unit="minutes", count=15)),
    ],
)
def test_intervals_are_written_in_words(text: str, interval: Interval) -> None:
    assert parsed(GOOD, f"save.every={text}").save.every == interval


@pytest.mark.parametrize(
    "text", ["0 steps", "00 steps", "steps", "200", "-1 steps", "2 epochs", "{unit: steps, count: -3}"]
)
def test_what_is_no_interval_is_refused_with_examples(text: str) -> None:
    line = complaint(GOOD + f"save: {{every: {text}}}\n")
    assert line.startswith("run.yaml:11 save.every: ")
    assert line.endswith("is no interval; write for instance `200 steps`, `epoch` or `15 minutes`")


def test_json_and_back_is_the_same_spec_and_the_same_text() -> None:
    text = (
        GOOD
        + "validate: {every: epoch}\nevaluate: [{task: exact_match, limit: 10}]\nlevers: {micro_batch: 2}\non_nan: {kind: skip}\n"
    )
    spec = parsed(text, "optimizer.lr=0.1234567890123456789", "tuning.targets=[q_proj, v_proj]", "optimizer.clip=null")
    document = spec_to_json(spec)
    assert spec_from_json(document) == spec
    assert spec_to_json(spec_from_json(document)) == document
    assert '"validate"' in document


def test_damaged_json_is_a_spec_error() -> None:
    for document in ("", "{", "[]", "{}", '{"name": NaN}', "\ud800", '{"seed": 1' + "0" * 5000 + "}"):
        with pytest.raises(SpecError, match=r"^spec\.json"):
            spec_from_json(document)


def test_a_misspelt_key_gets_the_nearest_one() -> None:
    assert (
        complaint(GOOD.replace("rank", "rnak")) == "run.yaml:5 tuning.rnak: there is no such key; did you mean `rank`?"
    )


def test_an_unheard_of_key_gets_the_list() -> None:
    cut = complaint(GOOD.replace("rank: 8", "rank: 8\n  144:"))
    assert (
        cut
        == "run.yaml:6 tuning.144: there is no such key; was a number cut by its comma? write it without, as in 262144"
    )
    keys = "`kind`, `rank`, `alpha`, `dropout`, `targets`, `base_bits`, `rank_stabilised`, `dora`, `weights`, `adapter`"
    expected = f"run.yaml:5 tuning.colour: there is no such key; the keys here are {keys}"
    assert complaint(GOOD.replace("rank", "colour")) == expected


def test_the_key_of_validation_is_validate() -> None:
    assert "did you mean `validate`?" in complaint(GOOD + "validation: {every: epoch}\n")


def test_a_missing_key_stands_at_the_line_of_its_parent() -> None:
    assert complaints(GOOD.replace("  lr: 1e-5", "  clip: 1")) == ["run.yaml:9 optimizer.lr: missing; give a number"]
    assert complaints(GOOD.replace("name: medical\n", "")) == ["run.yaml:1 name: missing; give text"]


def test_a_wrong_kind_gets_all_kinds_and_the_nearest() -> None:
    expected = 'run.yaml:2 model.kind: "hubb" is not accepted; accepted: `hub`, `folder`, `embedded`, `shape`, `custom`; did you mean `hub`?'
    assert complaint(GOOD.replace("kind: hub", "kind: hubb")) == expected


def test_a_missing_kind_gets_all_kinds() -> None:
    assert (
        complaint(GOOD.replace("kind: hub, ", ""))
        == "run.yaml:2 model.kind: missing; give `hub`, `folder`, `embedded`, `shape`, `custom`"
    )


def test_a_kind_without_its_mapping_is_shown_the_mapping() -> None:
    expected = (
        'run.yaml:11 on_nan: "stop" is text; a mapping with `kind: stop`, `kind: skip`, `kind: roll_back` is needed'
    )
    assert complaint(GOOD + "on_nan: stop\n") == expected


def test_a_wrong_word_gets_the_accepted_words() -> None:
    assert (
        complaint(GOOD + "device: gpu\n")
        == 'run.yaml:11 device: "gpu" is not accepted; accepted: `auto`, `cpu`, `cuda`'
    )


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
        (
            "schedule: {epochs: 1, steps: 2}",
            "epochs and steps are both given; keep one (on the command line, --set schedule.epochs=null removes the other)",
        ),
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
            "data.images: min_pixels is 200000 and max_pixels is 100000: no image has so many and so few; lower min_pixels, or raise max_pixels",
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
    assert said.endswith("evaluate: anls is asked of papers; data.test has docs, charts-2, text")
    assert complaint(GOOD + "evaluate: [{task: anls, sources: [papers]}]\n").endswith(
        "anls is asked of papers; data.test has no source"
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


def test_a_decimal_comma_is_not_taken_for_thousands() -> None:
    assert complaint(GOOD.replace("1e-5", "0,001")) == 'run.yaml:10 optimizer.lr: "0,001" is text; a number is needed'


@pytest.mark.parametrize(
    ("text", "shown"), [(".nan", "NaN"), (".inf", "Infinity"), ("-.INF", "-Infinity"), ("1e999", "Infinity")]
)
def test_numbers_are_finite(text: str, shown: str) -> None:
    assert (
        complaint(GOOD.replace("1e-5", text)) == f"run.yaml:10 optimizer.lr: {shown} is not finite; a number is needed"
    )


def test_a_number_for_a_name_gets_quotes() -> None:
    assert complaint(GOOD.replace("medical", "7")) == 'run.yaml:1 name: 7 is a number; text is needed: write "7"'


def test_a_name_that_is_no_folder_name_is_refused() -> None:
    assert complaint(GOOD.replace("medical", "a/b")).startswith(
        'run.yaml:1 name: "a/b" is no name; use letters, digits, `.`, `_` and `-`'
    )


def test_the_name_of_an_evaluation_has_no_dot() -> None:
    said = complaint(GOOD + "evaluate: [{task: rouge, name: v1.2}]\n")
    assert (
        said
        == 'run.yaml:11 evaluate.0.name: "v1.2" is no name; use letters, digits, `_` and `-`, 64 at most, a letter or digit first'
    )


@pytest.mark.parametrize("file", ["v1.2.py", "my task.py", "_u.py", "đo.py", f"{'x' * 65}.py"])
def test_a_task_file_that_cannot_give_its_name_needs_one(file: str) -> None:
    own = f'evaluate: [{{task: {{kind: python, path: "tasks/{file}"}}}}]\n'
    said = complaint(GOOD + own)
    assert said.startswith(
        f"run.yaml:11 evaluate.0: a task is called as its file is, and '{file.removesuffix('.py')}' is no name; give name: with"
    )
    assert parsed(GOOD + own.replace("}}]", "}, name: mine}]")).evaluate[0].label == "mine"


def test_a_union_that_no_member_takes_is_told_once() -> None:
    assert complaint(GOOD + "levers: {micro_batch: x}\n") == (
        'run.yaml:11 levers.micro_batch: "x" is text; a whole number or `auto` is needed'
    )
    assert (
        complaint(GOOD + "levers: {micro_batch: 0}\n")
        == "run.yaml:11 levers.micro_batch: 0 is out of range; give at least 1"
    )


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


def test_a_key_given_twice_is_an_error_with_both_lines() -> None:
    expected = "run.yaml:6 tuning.rank: given twice, first at run.yaml:5; keep one"
    assert complaint(GOOD.replace("rank: 8", "rank: 8\n  rank: 9")) == expected


def test_a_syntax_error_has_line_and_column() -> None:
    assert complaint(GOOD.replace("id: owner/name}", "id: owner/name")).startswith("run.yaml:3: column 7: ")


def test_a_tab_is_called_a_tab() -> None:
    assert complaint(GOOD.replace("  lr", "\tlr")) == "run.yaml:10: column 1: a tab stands here; use blanks"


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing yet\n", "---\n", "null"])
def test_an_empty_spec_is_told_what_it_needs(text: str) -> None:
    expected = "run.yaml:1: the spec is empty; a spec is a mapping with at least the keys `name`, `model`, `tuning`, `data`, `optimizer`"
    assert complaint(text) == expected


def test_a_spec_is_a_mapping() -> None:
    assert complaint("- name: a\n").startswith('run.yaml:1: [{"name": "a"}] is a list; a spec is a mapping')


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: &x 1\nb: *x\n", "run.yaml:2: column 4: `*x` is an alias; write the value out"),
        ("a: !python/object x\n", "run.yaml:1: column 4: `!python/object` is a tag; write the value without it"),
        ("a: 1\n---\nb: 2\n", "run.yaml:2: column 1: a second document begins here; keep one"),
        ("? [1]\n: 2\n", "run.yaml:1: column 3: a key is a word; check"),
        ("a: " + "[" * 1000 + "]" * 1000, "run.yaml:1: column 24: nested deeper than 20 levels; check"),
        ('a: "\\ud800"\n', "run.yaml:1: column 4: half a surrogate pair is no text; check"),
        ('a: "\\UFFFFFFFF"\n', "run.yaml:1: this is no YAML 1.2 ("),
        ("%YAML 1.3\n---\na: 1\n", "run.yaml:1: this is no YAML 1.2 ("),
        ("a: 1\nb: \x00\n", "run.yaml:2: this is no YAML 1.2 ("),
    ],
)
def test_yaml_beyond_plain_values_is_refused(text: str, problem: str) -> None:
    assert complaint(text).startswith(problem)


def test_overrides_reach_into_mappings_and_lists() -> None:
    spec = parsed(GOOD, "schedule.epochs=2", "data.train.0.path=x.jsonl", "tuning={kind: full}", "optimizer.clip=null")
    assert (spec.schedule.epochs, spec.data.train[0].path, spec.tuning.kind, spec.optimizer.clip) == (
        2,
        "x.jsonl",
        "full",
        None,
    )


def test_a_later_override_wins() -> None:
    assert parsed(GOOD, "seed=1", "seed=2").seed == 2


def test_an_override_replaces_a_word_by_a_mapping() -> None:
    assert parsed(GOOD + "levers: auto\n", "levers.micro_batch=4").levers == Levers(micro_batch=4)


def test_an_override_mends_the_file() -> None:
    assert parsed(
        GOOD.replace("{kind: hub, id: owner/name}", "oops"), "model={kind: folder, path: m}"
    ).model == FolderModel(kind="folder", path="m")


@pytest.mark.parametrize("override", ["", "seed", "=1", "seed=", "seed= ", "a..b=1", ".a=1", "a b=1", "seed: 1"])
def test_what_is_no_override_is_refused_with_an_example(override: str) -> None:
    assert complaint(GOOD, override) == (
        f"--set {override}: this is no override; write key.path=value, for instance schedule.epochs=2; `null` stands for no value"
    )


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("schedule.epochs=two", 'schedule.epochs: "two" is text; a whole number or `null` is needed'),
        ("shedule.epochs=2", "shedule: there is no such key; did you mean `schedule`?"),
        (
            "data.train.1.path=b",
            "data.train.1.path: `1` is no item of a list of 1 (the first is 0); override the whole list",
        ),
        ("data.train=[]", "data.train: [] has 0 items; give at least 1"),
        ("optimizer.betas=[0.9]", "optimizer.betas.1: missing; give a number"),
        ("optimizer.betas=[0.9, 0.9, 0.9]", "optimizer.betas: [0.9, 0.9, 0.9] has 3 items; give at most 2"),
        ("model={kind: folder}", "model.path: missing; give text"),
    ],
)
def test_a_wrong_override_is_told_at_the_override(override: str, problem: str) -> None:
    assert complaint(GOOD, override).startswith(f"--set {override} {problem}")


def test_a_broken_override_is_told_once() -> None:
    assert complaint(GOOD, "schedule.epochs={").startswith("--set schedule.epochs={: column 2: ")


def test_an_override_does_not_hide_what_it_contradicts() -> None:
    assert complaint(GOOD + "schedule: {steps: 10}\n", "schedule.epochs=2") == (
        "run.yaml:11 schedule: epochs and steps are both given; keep one (on the command line, --set schedule.epochs=null removes the other)"
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
    with pytest.raises(SpecError, match=r"there is no such file; the folder holds medical\.yaml$"):
        load_spec(tmp_path / "x")
    with pytest.raises(SpecError, match="its folder cannot be listed either"):
        load_spec(tmp_path / "nowhere" / "x.yaml")


def test_a_folder_is_no_spec(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"cannot be read .*; give a YAML file"):
        load_spec(tmp_path)
    with pytest.raises(SpecError, match="cannot be read"):
        load_spec(tmp_path / "a\0b")


def test_bytes_that_are_no_utf8_have_their_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(GOOD.encode() + b"# caf\xe9\n")
    with pytest.raises(SpecError, match=r"run\.yaml:11: byte 0xe9 is not UTF-8 text; save the file as UTF-8"):
        load_spec(path)
