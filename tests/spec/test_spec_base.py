"""`base:` in a spec file: one file says what several have in common, and each says what is its own."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finefit.errors import SpecError
from finefit.spec import load_spec, parse_spec, whole_text
from finefit.spec.edit import dumped
from finefit.spec.models import FolderModel, Full, Lora
from finefit.spec.reader import Reader
from finefit.spec.tasks import AmrForm

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


def complaints(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load_spec(path, overrides)
    return str(caught.value).replace(f"{path.parent}/", "").splitlines()


def test_a_mapping_keeps_what_the_child_does_not_say(folder: Path) -> None:
    spec = load_spec(
        child(
            folder,
            "base: base.yaml\nname: a\ndata: {task: {method: mtup2}, template: plain}\noptimizer: {weight_decay: 0.1}\n",
        )
    )
    assert spec.data.task == AmrForm(kind="amr", method="mtup2")
    assert (spec.seed, spec.data.max_tokens, spec.data.template) == (7, 1024, "plain")
    assert [source.path for source in spec.data.train] == ["one.txt", "two.txt"]
    assert (spec.optimizer.lr, spec.optimizer.weight_decay) == (1e-5, 0.1)


def test_a_mapping_of_another_kind_replaces_the_whole(folder: Path) -> None:
    spec = load_spec(child(folder, "base: base.yaml\nname: a\ntuning: {kind: full}\nmodel: {kind: folder, path: m}\n"))
    assert spec.tuning == Full(kind="full")
    assert spec.model == FolderModel(kind="folder", path="m")


def test_a_mapping_that_names_no_kind_is_of_the_kind_below(folder: Path) -> None:
    assert load_spec(child(folder, "base: base.yaml\nname: a\ntuning: {rank: 8}\n")).tuning == Lora(
        kind="lora", rank=8, alpha=256
    )


def test_a_kind_that_chooses_no_other_keys_is_one_value_among_others(folder: Path) -> None:
    (folder / "base.yaml").write_text(
        BASE.replace("{lr: 1e-5}", "{kind: adamw, lr: 1e-5}") + "schedule: {kind: cosine, epochs: 5, warmup: 0.1}\n"
    )
    spec = load_spec(
        child(folder, "base: base.yaml\nname: a\nschedule: {kind: linear}\noptimizer: {kind: adamw_8bit}\n")
    )
    assert (spec.schedule.kind, spec.schedule.epochs, spec.schedule.warmup) == ("linear", 5, 0.1)
    assert (spec.optimizer.kind, spec.optimizer.lr) == ("adamw_8bit", 1e-5)


def test_a_list_replaces_the_list(folder: Path) -> None:
    assert [
        source.path
        for source in load_spec(child(folder, "base: base.yaml\nname: a\ndata: {train: [{path: x}]}\n")).data.train
    ] == ["x"]


def test_null_takes_a_value_away(folder: Path) -> None:
    assert load_spec(child(folder, "base: base.yaml\nname: a\ndata: {task: null}\n")).data.task is None


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
    assert complaints(path) == [
        'child.yaml:3 data.task.method: "mtup9" is not accepted; accepted: `baseline`, `mtup2`, `mtup3a`, `mtup3b`, `mtup4`; did you mean `mtup4`?',
        "child.yaml:4 optimizer.lr: -1 is out of range; give more than 0",
        "base.yaml:1 sed: there is no such key; did you mean `seed`?",
        'base.yaml:8 data.max_tokens: "1,024" is text; a whole number is needed: write 1024',
    ]


def test_a_value_that_gave_way_is_not_complained_about_where_it_stood(folder: Path) -> None:
    (folder / "base.yaml").write_text(
        BASE.replace("    - {path: two.txt, weight: 3}\n", "    - {path: two.txt, weigth: 3}\n")
    )
    path = child(folder, "base: base.yaml\nname: a\ndata:\n  train:\n    - {path: x}\n    - {pth: y}\n")
    assert complaints(path) == [
        "child.yaml:6 data.train.1.path: missing; give text",
        "child.yaml:6 data.train.1.pth: there is no such key; did you mean `path`?",
    ]


def test_a_file_that_stands_below_itself_is_refused(folder: Path) -> None:
    child(folder, "base: child.yaml\n", name="base.yaml")
    (line,) = complaints(child(folder, "base: base.yaml\nname: a\n"))
    assert (
        line
        == "base.yaml:1 base: child.yaml -> base.yaml -> child.yaml is a circle; let one of these files stand alone"
    )
    (line,) = complaints(child(folder, "name: a\nbase: ./own.yaml\n", name="own.yaml"))
    assert line.startswith("own.yaml:2 base: own.yaml -> own.yaml is a circle")


def test_a_base_that_is_not_there_is_told_alone_and_the_nearest_name_with_it(folder: Path) -> None:
    (line,) = complaints(child(folder, "name: a\nbase: bse.yaml\n"))
    assert line.startswith("child.yaml:2 base: bse.yaml: there is no such file; did you mean `base.yaml`?")


@pytest.mark.parametrize("value", ["3", "[base.yaml]", '""', "null"])
def test_a_base_that_is_no_path_is_refused(value: str, folder: Path) -> None:
    (line,) = complaints(child(folder, f"name: a\nbase: {value}\n"))
    assert line.endswith("is no path; give the path of a spec file, relative to this one")


def test_a_base_that_is_no_mapping_is_refused_in_its_own_name(folder: Path) -> None:
    (folder / "base.yaml").write_text("- 1\n")
    assert any(
        line.startswith("base.yaml:1: [1] is a list; a spec is a mapping")
        for line in complaints(child(folder, "base: base.yaml\nname: a\n"))
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
    assert reader.faults == []


def test_a_text_with_a_base_is_parsed_beside_its_name(folder: Path) -> None:
    assert parse_spec("base: base.yaml\nname: a\n", where=str(folder / "child.yaml")).seed == 7
