"""Whatever is wrong with a file of a run directory, every verb ends with its own exit code and words, keeps every
checkpoint that is whole, and reports no other result as if nothing were wrong."""

import os
import random
import resource
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from tests import damage
from tests.damage import DAMAGE, READERS, WRITERS, Answer, copied, digests, files_of, finefit

FUZZED = int(os.environ.get("FINEFIT_FUZZ", "500"))
_FIRST_FUZZED = 20
_MOST_GROWTH_BYTES = 1 << 30
SCORED_AGAIN = ("missing", "of a newer version", "a link to itself")
SAMPLE = [
    ("run.json", "cut in half"),
    ("run.json", "not UTF-8"),
    ("spec.json", "a folder"),
    ("spec.json", "of another program"),
    ("plan.json", "a link outside"),
    ("facts.json", "nested deeply"),
    ("run.lock", "a pipe"),
    ("stages/1-sft/result.json", "empty"),
    ("stages/1-sft/result.json", "missing"),
    ("stages/1-sft/stage.json", "of a newer version"),
    ("stages/1-sft/metrics.jsonl", "a link to itself"),
    ("stages/1-sft/metrics.jsonl", "nested deeply"),
    ("stages/1-sft/data/test.jsonl", "a folder"),
    ("stages/1-sft/evals/json_match/base.json", "too large"),
    ("stages/1-sft/evals/json_match/base.request.json", "a link to itself"),
    ("stages/1-sft/checkpoints/checkpoint-12/finefit_manifest.json", "a pipe"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return damage.make_finished(tmp_path_factory.mktemp("finished") / "project")


@pytest.fixture(scope="module")
def interrupted(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return damage.make_interrupted(finished, tmp_path_factory.mktemp("interrupted") / "project")


@pytest.fixture(scope="module", autouse=True)
def _no_inhibitor() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("finefit.run.launch._command", lambda: None)
        yield


def _may_differ(file: Path, kind: str, words: str) -> bool:
    """Journals may end early, as a kill leaves them; an evaluation without its record is made again; a damaged run is
    another run for a spec file; and without a stage there is no progress to watch."""
    if file.suffix in (".jsonl", ".log") or words.startswith("run spec.yaml"):
        return True
    if "evals" in file.parts:
        return kind in SCORED_AGAIN
    return words == "watch runs/tiny-1" and file.name == "stage.json"


def _strike(project: Path, folder: Path, file: Path, kind: str, whole: dict[str, Answer]) -> int:
    """The number of commands that were given."""
    with copied(project, folder) as run:
        before = digests(run)
        DAMAGE[kind](run / file)
        for words, sound in whole.items():
            answer = finefit(*words.split())
            told = f"{file}, {kind}, finefit {words}: {answer.code}\n{answer.err}"
            assert answer.code in (0, 1, 2, 3), told
            if answer.code:
                assert "error: " in answer.err, told
            elif not _may_differ(file, kind, words):
                assert answer.content == sound.content, told
        after = digests(run)
        assert {name: after.get(name) for name in before if name != str(file)} == {
            name: sha256 for name, sha256 in before.items() if name != str(file)
        }
    return len(whole)


@pytest.fixture(scope="module")
def sound(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """What every command says of the finished run where nothing is wrong."""
    answers = damage.commands(finished, tmp_path_factory.mktemp("sound") / "project", (*READERS, *WRITERS))
    assert all(answer.code == 0 for answer in answers.values())
    return answers


@pytest.mark.parametrize(("file", "kind"), SAMPLE)
def test_a_damaged_file_of_a_finished_run_is_no_fault_of_ours(
    finished: Path, sound: dict[str, Answer], tmp_path: Path, file: str, kind: str
) -> None:
    assert _strike(finished, tmp_path / "copy", Path(file), kind, sound) == 8


@pytest.mark.slow
def test_every_damage_to_every_file_of_a_finished_run_is_no_fault_of_ours(
    finished: Path, sound: dict[str, Answer], tmp_path: Path
) -> None:
    files = files_of(finished / damage.RUN)
    given = sum(_strike(finished, tmp_path / "copy", file, kind, sound) for file, kind in product(files, DAMAGE))
    assert (len(DAMAGE), given) == (12, len(files) * 12 * 8)
    assert given > 4000


@pytest.mark.slow
def test_every_damage_to_every_file_of_an_interrupted_run_is_no_fault_of_ours(
    interrupted: Path, tmp_path: Path
) -> None:
    """What resumes is not compared: it goes on from an earlier checkpoint where the last one is damaged."""
    whole, files = damage.commands(interrupted, tmp_path / "whole", READERS), files_of(interrupted / damage.RUN)
    given = sum(_strike(interrupted, tmp_path / "copy", file, kind, whole) for file, kind in product(files, DAMAGE))
    assert given > 2000
    for file, kind in product(files, DAMAGE):
        with copied(interrupted, tmp_path / "copy") as run:
            before = digests(run)
            DAMAGE[kind](run / file)
            if finefit("run", damage.RUN, "--json").code:
                after = digests(run)
                assert all(after.get(name) == before[name] for name in before if name != str(file)), (file, kind)


def _fuzz(run: Path, chance: random.Random) -> str:
    """Flips bytes, cuts, repeats or swaps files; returns what was done."""
    files = [run / file for file in files_of(run)]
    done = []
    for _ in range(chance.randint(1, 3)):
        path, other = chance.choice(files), chance.choice(files)
        content = bytearray(path.read_bytes() or b"\n")
        kind = chance.choice(("flip", "flip", "cut", "repeat", "swap"))
        if kind == "flip":
            for _ in range(chance.randint(1, 8)):
                content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        elif kind == "cut":
            del content[chance.randrange(len(content)) :]
        elif kind == "repeat":
            at = chance.randrange(len(content))
            content[at:at] = content[at : at + chance.randint(1, 200)]
        else:
            content, mine = bytearray(other.read_bytes()), bytes(content)
            other.write_bytes(mine)
        path.write_bytes(bytes(content))
        done.append(f"{kind} {path.relative_to(run)} ({other.name})")
    return ", ".join(done)


def _held_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _fuzz_all(project: Path, folder: Path, seeds: range) -> int:
    for seed in seeds:
        with copied(project, folder) as run:
            done = _fuzz(run, random.Random(seed))
            for words in READERS:
                try:
                    assert finefit(*words).code in (0, 1, 2, 3)
                except AssertionError as error:
                    raise AssertionError(f"seed {seed}: {done}\n{error}") from None
    return len(seeds)


def test_fuzzed_run_directories_are_no_fault_of_ours(finished: Path, tmp_path: Path) -> None:
    assert _fuzz_all(finished, tmp_path / "copy", range(min(FUZZED, _FIRST_FUZZED))) > 0


@pytest.mark.slow
def test_many_fuzzed_run_directories_are_no_fault_of_ours_and_take_little_memory(
    finished: Path, tmp_path: Path
) -> None:
    _fuzz_all(finished, tmp_path / "copy", range(1))
    before = _held_bytes()
    assert _fuzz_all(finished, tmp_path / "copy", range(FUZZED)) == FUZZED
    assert _held_bytes() - before < _MOST_GROWTH_BYTES
