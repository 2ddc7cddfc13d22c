"""Whatever is wrong with a file of a finished run, every verb ends with its own exit code and words, keeps every
checkpoint that is whole, and reports no other result as if nothing were wrong."""

import os
import random
import resource
import signal
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from tests import damage
from tests.damage import (
    DAMAGE,
    EXPORT,
    LESS_USED,
    READERS,
    RUN,
    WRITERS,
    Answer,
    copied,
    digests,
    files_of,
    finefit,
    look_at_page,
    require_kept,
    require_told,
)

FUZZED = int(os.environ.get("FINEFIT_FUZZ", "500"))
_FIRST_FUZZED = 20
_MOST_GROWTH_BYTES = 1 << 30
_LESS_USED_EVERY = 4
SAMPLE = [
    ("run.json", "cut in half"),
    ("run.json", "not UTF-8"),
    ("spec.json", "a folder"),
    ("spec.json", "of another program"),
    ("plan.json", "a link outside"),
    ("facts.json", "nested deeply"),
    ("run.lock", "a pipe"),
    ("reviews/review.jsonl", "of another program"),
    ("stages/1-sft/result.json", "empty"),
    ("stages/1-sft/result.json", "missing"),
    ("stages/1-sft/stage.json", "of a newer version"),
    ("stages/1-sft/metrics.jsonl", "a link to itself"),
    ("stages/1-sft/evals/json_match/checkpoint-12.json", "cut in half"),
    ("stages/1-sft/data/test.jsonl", "a folder"),
    ("stages/1-sft/evals/json_match/base.json", "too large"),
    ("stages/1-sft/evals/json_match/checkpoint-12.request.json", "a link to itself"),
    ("stages/1-sft/checkpoints/checkpoint-12/finefit_manifest.json", "a pipe"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return damage.make_finished(tmp_path_factory.mktemp("finished") / "project")


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
    if "evals" in file.parts:  # one of another version is not shown
        return kind in ("missing", "of a newer version") or words.startswith("eval ")
    return words == "watch runs/tiny-1" and file.name == "stage.json"


def _is_redone(file: Path, kind: str, words: str) -> bool:
    """What `eval` reads before it answers, and answers again where it cannot be read."""
    names = ("checkpoint-12.json", "checkpoint-12.request.json")
    return words.startswith("eval ") and file.name in names and kind != "missing"


def _strike(project: Path, folder: Path, file: Path, kind: str, whole: dict[str, Answer]) -> int:
    """The number of commands that were given."""
    with copied(project, folder) as run:
        before = digests(run)
        DAMAGE[kind](run / file)
        for words, sound in whole.items():
            answer = finefit(*words.split())
            told = f"{file}, {kind}, finefit {words}: {answer.code}\n{answer.err}"
            if answer.code:
                require_told(answer, file, told)
            else:
                assert _may_differ(file, kind, words) or answer.content == sound.content, told
                assert not _is_redone(file, kind, words) or file.name in answer.err, told
                if _is_redone(file, kind, words):  # and is whole again for whatever comes next
                    DAMAGE[kind](run / file)
        look_at_page(run)
        require_kept(before, digests(run), file)
    return len(whole)


@pytest.fixture(scope="module")
def sound(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """What every command says of the finished run where nothing is wrong."""
    verbs = (*READERS, *WRITERS, *LESS_USED)
    answers = damage.commands(finished, tmp_path_factory.mktemp("sound") / "project", verbs)
    assert all(answer.code == 0 for answer in answers.values()), answers
    return answers


@pytest.mark.parametrize(("file", "kind"), SAMPLE)
def test_a_damaged_file_of_a_finished_run_is_no_fault_of_ours(
    finished: Path, sound: dict[str, Answer], tmp_path: Path, file: str, kind: str
) -> None:
    seldom = {" ".join(map(str, words)) for words in LESS_USED}
    asked = {words: answer for words, answer in sound.items() if words not in seldom}
    if SAMPLE.index((file, kind)) % _LESS_USED_EVERY == 0:
        asked = sound
    assert _strike(finished, tmp_path / "copy", Path(file), kind, asked) >= 10


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_damage_to_every_file_of_a_finished_run_is_no_fault_of_ours(
    finished: Path, sound: dict[str, Answer], tmp_path: Path
) -> None:
    files = files_of(finished / damage.RUN)
    given = sum(_strike(finished, tmp_path / "copy", file, kind, sound) for file, kind in product(files, DAMAGE))
    assert (len(DAMAGE), given) == (12, len(files) * 12 * len(sound))
    assert given > 11_000


CHECKPOINT = "stages/1-sft/checkpoints/checkpoint-12"
EXPORTED = [
    (f"{CHECKPOINT}/adapter_model.safetensors", "cut in half"),
    ("stages/1-sft/stage.json", "of a newer version"),
]
"""The second is refused before a process is started."""


def _export(project: Path, folder: Path, file: Path, kind: str) -> None:
    """The weights are those of the checkpoint, or nothing is left."""
    with copied(project, folder) as run:
        weights = run / CHECKPOINT / "adapter_model.safetensors"
        trained = weights.read_bytes()
        DAMAGE[kind](run / file)
        answer = finefit(*EXPORT)
        told = f"{file}, {kind}: {answer.code}\n{answer.err}"
        if answer.code:
            require_told(answer, file, told)
            assert not Path("taken").exists(), told
        else:
            assert Path("taken", weights.name).read_bytes() == trained, told


@pytest.mark.parametrize(("file", "kind"), EXPORTED)
def test_a_damaged_run_is_exported_as_it_was_trained_or_not_at_all(
    finished: Path, tmp_path: Path, file: str, kind: str
) -> None:
    assert (finished / RUN / file).is_file()
    _export(finished, tmp_path / "copy", Path(file), kind)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_damage_to_a_file_that_an_export_reads_is_refused_or_changes_no_weight(
    finished: Path, tmp_path: Path
) -> None:
    read = [file for file in files_of(finished / RUN) if not {"evals", "reviews", "logs"} & {*file.parts}]
    files = [file for file in read if "checkpoints" not in file.parts or file.is_relative_to(CHECKPOINT)]
    assert len(files) > 25
    for file, kind in product(files, DAMAGE):
        _export(finished, tmp_path / "copy", file, kind)


def test_a_command_leaves_the_timer_of_a_test_running() -> None:
    """pytest-timeout has one, and without it a test that hangs would hang for good."""
    before = signal.setitimer(signal.ITIMER_REAL, 500)
    try:
        assert finefit("--version").code == 0
        assert 400 < signal.getitimer(signal.ITIMER_REAL)[0] <= 500
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)


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
@pytest.mark.timeout(7200)
def test_many_fuzzed_run_directories_are_no_fault_of_ours_and_take_little_memory(
    finished: Path, tmp_path: Path
) -> None:
    _fuzz_all(finished, tmp_path / "copy", range(1))
    before = _held_bytes()
    assert _fuzz_all(finished, tmp_path / "copy", range(FUZZED)) == FUZZED
    assert _held_bytes() - before < _MOST_GROWTH_BYTES
