"""Whatever is wrong with a record of a pipeline's stage, every verb refuses it by name or has no use for it. A stage
that was begun is never made again from the start because its own record cannot be read."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from finefit.artifacts.rundir import RunDir
from finefit.run.cache_inputs import tree_digest
from tests import damage
from tests.damage import (
    DAMAGE,
    STAGE_READERS,
    STAGES,
    Answer,
    copied,
    digests,
    files_of,
    finefit,
    has_started_over,
    look_at_page,
    require_kept,
    require_told,
    weights_of,
)

SAMPLE = [
    ("stages.json", "a folder"),
    ("stages.json", "cut in half"),
    ("plan.json", "not UTF-8"),
    ("stages/1-sft/begun.json", "nested deeply"),
    ("stages/1-sft/done.json", "cut in half"),
    ("stages/1-sft/done.json", "a link to itself"),
    ("stages/1-sft/run.json", "of another program"),
    ("stages/1-sft/stages/1-sft/stage.json", "of a newer version"),
    ("stages/1-sft/stages/1-sft/result.json", "a pipe"),
    ("stages/2-pairs/done.json", "of a newer version"),
    ("stages/2-pairs/outcome.json", "a folder"),
    ("stages/2-pairs/answers.jsonl", "cut in half"),
    ("stages/3-scores/done.json", "empty"),
    ("stages/3-scores/sft/run.json", "not UTF-8"),
    ("stages/3-scores/sft/stages/1-eval/evals/json_match/sft.json", "nested deeply"),
]
IN_TRAINING = [
    ("stages/1-sft/begun.json", "cut in half"),
    ("stages/1-sft/begun.json", "of a newer version"),
    ("stages/1-sft/begun.json", "a link to itself"),
    ("stages/1-sft/run.json", "empty"),
    ("stages/1-sft/stages/1-sft/checkpoints/checkpoint-2/adapter_model.safetensors", "cut in half"),
]
IN_SAMPLING = [
    ("stages/.unfinished-2-pairs/begun.json", "cut in half"),
    ("stages/.unfinished-2-pairs/begun.json", "a folder"),
]
WITH_A_PROCESS = [
    ("stages/.unfinished-2-pairs/answers.jsonl", "a folder"),
    ("stages/.unfinished-2-pairs/answers.jsonl", "of another program"),
]
"""Each starts the process that samples."""


@pytest.fixture(scope="module", autouse=True)
def _no_inhibitor() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("finefit.run.launch._command", lambda: None)
        yield


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return damage.make_staged(tmp_path_factory.mktemp("staged") / "project")


@pytest.fixture(scope="module")
def sound(staged: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    answers = damage.commands(staged, tmp_path_factory.mktemp("sound") / "project", STAGE_READERS)
    assert all(answer.code == 0 for answer in answers.values()), answers
    return answers


def _is_output(file: Path) -> bool:
    """A stage whose output has changed is out of date, which is said with the reason."""
    return "output" in file.parts or "checkpoints" in file.parts


def _strike(project: Path, folder: Path, file: Path, kind: str, whole: dict[str, Answer]) -> int:
    with copied(project, folder) as tiny:
        run = tiny.with_name(STAGES.name)
        before = digests(run)
        DAMAGE[kind](run / file)
        for words, sound in whole.items():
            answer = finefit(*words.split())
            told = f"{file}, {kind}, finefit {words}: {answer.code}\n{answer.err}"
            if answer.code:
                require_told(answer, file, told)
            elif kind != "missing" and file.suffix == ".json" and not _is_output(file):
                # a damaged run is another run for a spec file
                assert words.startswith("run spec.yaml") or answer.content == sound.content, told
        look_at_page(run)
        require_kept(before, digests(run), file)
    return len(whole)


@pytest.mark.parametrize(("file", "kind"), SAMPLE)
def test_a_damaged_record_of_a_finished_pipeline_is_no_fault_of_ours(
    file: str, kind: str, staged: Path, sound: dict[str, Answer], tmp_path: Path
) -> None:
    assert (staged / STAGES / file).is_file()
    assert _strike(staged, tmp_path / "copy", Path(file), kind, sound) == len(STAGE_READERS)


def test_a_training_is_not_repeated_because_its_record_is_damaged(staged: Path, tmp_path: Path) -> None:
    file = "done.json"
    with copied(staged, tmp_path / "copy"):
        DAMAGE["cut in half"](STAGES / "stages/1-sft" / file)
        before = tree_digest(STAGES / "stages")
        answer = finefit("run", STAGES, "--json")
        assert answer.code == 2
        assert file in answer.err
        assert tree_digest(STAGES / "stages") == before
        assert finefit("run", "spec.yaml", "--new", "--dry-run", "--json").code == 0  # the remedy


def _resume(project: Path, folder: Path, file: Path, kind: str, weights: str, pairs: str) -> None:
    with copied(project, folder):
        before = digests(STAGES)
        DAMAGE[kind](STAGES / file)
        answer = finefit("run", STAGES, "--json")
        told = f"{file}, {kind}: {answer.code}\n{answer.err}"
        if answer.code:
            require_told(answer, file, told)
            require_kept(before, digests(STAGES), file)
            return
        sft, made, _ = RunDir(STAGES).stages()
        assert (weights_of(sft.path), tree_digest(made.output)) == (weights, pairs), told
        assert "1-sft" not in file.parts or not has_started_over(sft.path), told


@pytest.fixture(scope="module")
def ends(staged: Path) -> tuple[str, str]:
    """Of the undamaged run: its weights and its pairs."""
    sft, made, _ = RunDir(staged / STAGES).stages()
    return weights_of(sft.path), tree_digest(made.output)


@pytest.fixture(scope="module")
def in_training(staged: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return damage.interrupt_training(staged, tmp_path_factory.mktemp("training") / "project")


@pytest.fixture(scope="module")
def in_sampling(staged: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return damage.interrupt_sampling(staged, tmp_path_factory.mktemp("sampling") / "project")


@pytest.mark.parametrize(("file", "kind"), IN_TRAINING)
def test_a_training_that_was_interrupted_keeps_its_checkpoints(
    file: str, kind: str, in_training: Path, ends: tuple[str, str], tmp_path: Path
) -> None:
    _resume(in_training, tmp_path / "copy", Path(file), kind, *ends)


@pytest.mark.parametrize(
    ("file", "kind"), [*IN_SAMPLING, *(pytest.param(*case, marks=pytest.mark.slow) for case in WITH_A_PROCESS)]
)
def test_a_stage_that_was_interrupted_keeps_its_answers(
    file: str, kind: str, in_sampling: Path, ends: tuple[str, str], tmp_path: Path
) -> None:
    _resume(in_sampling, tmp_path / "copy", Path(file), kind, *ends)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_damage_to_every_record_of_a_pipeline_is_no_fault_of_ours(
    staged: Path, sound: dict[str, Answer], tmp_path: Path
) -> None:
    files = files_of(staged / STAGES)
    given = sum(_strike(staged, tmp_path / "copy", file, kind, sound) for file, kind in product(files, DAMAGE))
    assert given > 6000


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("which", ["in_training", "in_sampling"])
def test_every_damage_to_every_record_of_an_interrupted_pipeline_changes_no_result(
    which: str, ends: tuple[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    project: Path = request.getfixturevalue(which)
    for file, kind in product(files_of(project / STAGES), DAMAGE):
        _resume(project, tmp_path / "copy", file, kind, *ends)
