"""Whatever is wrong with a file of an interrupted run, the command that resumes it ends with the weights that it would
have ended with, or refuses by file, reason and remedy and keeps every checkpoint that is whole."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

from tests import damage
from tests.damage import (
    DAMAGE,
    READERS,
    RUN,
    Answer,
    copied,
    digests,
    files_of,
    finefit,
    has_started_over,
    require_kept,
    require_told,
    weights_of,
)

STAGE = "stages/1-sft"
SAMPLE = [
    ("run.json", "a link to itself"),
    ("spec.json", "cut in half"),
    ("facts.json", "a folder"),
    (f"{STAGE}/metrics.jsonl", "missing"),
    (f"{STAGE}/metrics.jsonl", "of another program"),
    (f"{STAGE}/data/train.safetensors", "cut in half"),
    (f"{STAGE}/tokenizer/tokenizer.json", "of another program"),
    (f"{STAGE}/stage.json", "nested deeply"),
    (f"{STAGE}/checkpoints/checkpoint-9/adapter_model.safetensors", "cut in half"),
    (f"{STAGE}/checkpoints/checkpoint-9/finefit_manifest.json", "a folder"),
    (f"{STAGE}/checkpoints/checkpoint-6/adapter_model.safetensors", "empty"),
]
PAIRS = [("stages/1-dpo/reference.safetensors", kind) for kind in ("cut in half", "a pipe", "a folder")]


@dataclass(frozen=True, slots=True)
class Interrupted:
    project: Path
    weights: str
    """The digest of those that the undamaged run ends with."""


def _resumable(project: Path, folder: Path) -> Interrupted:
    with copied(project, folder) as run:
        assert finefit("run", RUN, "--json").code == 0
        assert not has_started_over(run)
        return Interrupted(project=project, weights=weights_of(run))


@pytest.fixture(scope="module", autouse=True)
def _no_inhibitor() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("finefit.run.launch._command", lambda: None)
        yield


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    folder = tmp_path_factory.mktemp("interrupted")
    return _resumable(damage.make_interrupted(folder / "project"), folder / "copy")


@pytest.fixture(scope="module")
def interrupted_pairs(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    folder = tmp_path_factory.mktemp("pairs")
    return _resumable(damage.make_pairs_interrupted(folder / "project"), folder / "copy")


def _resume(found: Interrupted, folder: Path, file: Path, kind: str) -> Answer:
    """What is damaged is read, and said, or has no part in the result."""
    with copied(found.project, folder) as run:
        before = digests(run)
        DAMAGE[kind](run / file)
        answer = finefit("run", RUN, "--json")
        told = f"{file}, {kind}: {answer.code}\n{answer.err}"
        if answer.code:
            require_told(answer, file, told)
            require_kept(before, digests(run), file)
            return answer
        assert weights_of(run) == found.weights, told
        if has_started_over(run):
            assert any(part in answer.err for part in file.parts if part.startswith("checkpoint-")), told
        return answer


@pytest.mark.parametrize(("file", "kind"), SAMPLE)
def test_a_damaged_file_of_an_interrupted_run_changes_no_weight(
    file: str, kind: str, interrupted: Interrupted, tmp_path: Path
) -> None:
    _resume(interrupted, tmp_path / "copy", Path(file), kind)


@pytest.mark.parametrize(("file", "kind"), PAIRS)
def test_a_damaged_reference_changes_no_weight(
    file: str, kind: str, interrupted_pairs: Interrupted, tmp_path: Path
) -> None:
    """It is made again, which is said, or refused."""
    assert (interrupted_pairs.project / RUN / file).is_file()
    answer = _resume(interrupted_pairs, tmp_path / "copy", Path(file), kind)
    assert answer.code == (2 if kind == "a folder" else 0)
    assert Path(file).name in answer.err


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_damage_to_every_file_of_an_interrupted_run_changes_no_weight(
    interrupted: Interrupted, interrupted_pairs: Interrupted, tmp_path: Path
) -> None:
    tried = 0
    for found in (interrupted, interrupted_pairs):
        for file, kind in product(files_of(found.project / RUN), DAMAGE):
            _resume(found, tmp_path / "copy", file, kind)
            tried += 1
    assert tried > 700


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_verb_reads_every_damaged_file_of_an_interrupted_run(interrupted: Interrupted, tmp_path: Path) -> None:
    project = interrupted.project
    whole = damage.commands(project, tmp_path / "whole", READERS)
    for file, kind in product(files_of(project / RUN), DAMAGE):
        with copied(project, tmp_path / "copy") as run:
            DAMAGE[kind](run / file)
            for words, sound in whole.items():
                answer = finefit(*words.split())
                told = f"{file}, {kind}, finefit {words}: {answer.code}\n{answer.err}"
                if answer.code:
                    require_told(answer, file, told)
                elif file.suffix == ".json" and not words.startswith("run spec.yaml"):
                    assert answer.content == sound.content or (words.startswith("watch") and file.name == "stage.json")
