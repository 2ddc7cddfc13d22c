"""F4, F6, F18 on the files themselves, without a model."""

import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finefit.artifacts.atomic import sweep
from finefit.artifacts.checkpoint import (
    MANIFEST,
    list_checkpoints,
    name_checkpoint,
    newest_verified,
    problems,
    rotate,
    step_of,
    write_checkpoint,
)
from finefit.errors import DiskFull, RunError
from tests.faults import PAGE, fill_disk, small_disk

FLIPS = 200
SIZES = {
    "adapter_model.safetensors": 3 * PAGE + 100,
    "finefit_optimizer.safetensors": 6 * PAGE,
    "config.json": 700,
    "tokenizer/merges.txt": PAGE + 1,
}


def fill(staging: Path) -> None:
    chance = random.Random(0)
    for name, size in SIZES.items():
        (staging / name).parent.mkdir(exist_ok=True)
        (staging / name).write_bytes(chance.randbytes(size))


def write(folder: Path, step: int) -> Path:
    return write_checkpoint(folder, step, fill, needed_bytes=sum(SIZES.values()))


def test_a_checkpoint_is_whole_as_it_was_written(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, 7)
    assert problems(checkpoint) == []
    assert step_of(checkpoint) == 7
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-7"]


def test_every_one_of_200_random_bit_flips_is_detected(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, 1)
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    chance = random.Random(8)
    detected = 0
    for number in range(FLIPS):
        file = (
            files[number % len(files)]
            if number < FLIPS // 2
            else chance.choices(files, [f.stat().st_size for f in files])[0]
        )
        whole = file.read_bytes()
        flipped = bytearray(whole)
        flipped[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        file.write_bytes(flipped)
        detected += problems(checkpoint) != []
        file.write_bytes(whole)
    assert (detected, problems(checkpoint)) == (FLIPS, [])


def test_every_single_bit_of_the_manifest_counts(tmp_path: Path) -> None:
    """Also those that would leave its meaning alone: white space, the version, the case of a digest."""
    manifest = write_checkpoint(tmp_path, 1, lambda staging: (staging / "weights").touch(), needed_bytes=0) / MANIFEST
    whole = manifest.read_bytes()
    unnoticed = []
    for at in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[at // 8] ^= 1 << at % 8
        manifest.write_bytes(flipped)
        if not problems(manifest.parent):
            unnoticed.append((at, bytes(flipped)))
    assert unnoticed == []


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"version": 1, "files": []}',
        b'{"version": 1, "files": {}}',
        b"\xff\xfe",
        b'{"files": {"a": 1}}',
    ],
)
def test_a_manifest_that_says_something_else_is_damage_not_a_crash(tmp_path: Path, text: bytes) -> None:
    checkpoint = write(tmp_path, 1)
    (checkpoint / MANIFEST).write_bytes(text)
    assert problems(checkpoint) != []


def _swap(checkpoint: Path) -> None:
    one, other, aside = checkpoint / "config.json", checkpoint / "tokenizer" / "merges.txt", checkpoint / "aside"
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def _fold(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (lambda c: os.truncate(c / "config.json", 699), "config.json has 699 bytes instead of 700"),
    "longer": (lambda c: os.truncate(c / "config.json", 701), "config.json has 701 bytes instead of 700"),
    "deleted": (lambda c: (c / "config.json").unlink(), "config.json is missing"),
    "without manifest": (lambda c: (c / MANIFEST).unlink(), f"{MANIFEST} is missing"),
    "swapped": (_swap, "config.json has 4,097 bytes instead of 700"),
    "added": (lambda c: (c / "tokenizer" / "more.txt").touch(), "tokenizer/more.txt is not in the manifest"),
    "added link to nowhere": (
        lambda c: (c / "model.safetensors").symlink_to("nowhere"),
        "model.safetensors is not in the manifest",
    ),
    "replaced by a folder": (lambda c: _fold(c / "config.json"), "config.json is missing"),
    "manifest replaced by a folder": (lambda c: _fold(c / MANIFEST), f"{MANIFEST} is a folder"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_the_checkpoint_before_is_taken(tmp_path: Path, damage: str) -> None:
    good, bad = write(tmp_path, 3), write(tmp_path, 6)
    strike, words = DAMAGE[damage]
    strike(bad)
    assert any(words in problem for problem in problems(bad)), problems(bad)
    taken, (line,) = newest_verified(tmp_path)
    assert taken == good
    assert line.startswith("checkpoint-6 is skipped: ")
    assert words in line


def test_a_damaged_checkpoint_is_written_again(tmp_path: Path) -> None:
    (write(tmp_path, 3) / "config.json").unlink()
    assert problems(write(tmp_path, 3)) == []
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def test_a_fill_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fails(staging: Path) -> None:
        fill(staging)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_checkpoint(tmp_path, 3, fails, needed_bytes=1)
    assert list(tmp_path.iterdir()) == []


def test_without_room_nothing_is_begun(tmp_path: Path) -> None:
    with pytest.raises(DiskFull, match=r"checkpoint-3 needs 5,000 bytes, 4,999 are free"):
        write_checkpoint(tmp_path, 3, fill, needed_bytes=5000, free=lambda _: 4999)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_named_at_every_page_of_every_file(tmp_path: Path) -> None:
    """First, middle and last byte of each file among them. The check beforehand is told that there is room."""
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        folder = disk / "checkpoints"
        before = write(folder, 1)
        pages = sum(-(-path.stat().st_size // PAGE) for path in before.rglob("*") if path.is_file())
        for leave in range(pages):
            fill_disk(disk, leave_pages=leave)
            with pytest.raises(DiskFull) as caught:
                write_checkpoint(folder, 2, fill, needed_bytes=123_456, free=lambda _: 1 << 40)
            assert (
                caught.value.problem
                == f"the disk is full: {folder / 'checkpoint-2'} needs 123,456 bytes, {leave * PAGE:,} are free"
            )
            assert [path.name for path in folder.iterdir()] == ["checkpoint-1"]
            assert problems(before) == []
            (disk / "filler").unlink()
        fill_disk(disk, leave_pages=pages)
        assert problems(write(folder, 2)) == []


steps = st.sets(st.integers(0, 60), min_size=1, max_size=14)


@given(steps=steps, keep=st.integers(1, 5), data=st.data())
def test_rotation_keeps_the_newest_and_the_protected_and_leaves_nothing_hidden(
    steps: set[int], keep: int, data: st.DataObject
) -> None:
    protected = data.draw(st.sets(st.sampled_from(sorted(steps)), max_size=3))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for step in steps:
            (folder / f"checkpoint-{step}").mkdir()
            (folder / f"checkpoint-{step}" / "config.json").touch()
        gone = rotate(folder, keep=keep, protected=protected)
        left = {step_of(path) for path in folder.iterdir()}
    assert left == steps - set(gone)
    assert protected <= left
    assert sorted(steps)[-keep:] == sorted(left)[-min(keep, len(steps)) :]
    assert len(left) <= keep + len(protected)


def test_a_name_follows_its_checkpoint_and_replaces_a_copy(tmp_path: Path) -> None:
    write(tmp_path, 3)
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "config.json").touch()
    name_checkpoint(tmp_path, "best", tmp_path / "checkpoint-3")
    assert (tmp_path / "best").readlink() == Path("checkpoint-3")
    assert problems(tmp_path / "best") == []


def test_sweeping_removes_what_kills_left_and_nothing_else(tmp_path: Path) -> None:
    kept = write(tmp_path, 3)
    (tmp_path / ".staging-checkpoint-6").mkdir()
    (tmp_path / ".removing-checkpoint-0").mkdir()
    (tmp_path / ".removing-checkpoint-0" / "config.json").touch()
    (tmp_path / ".best.77.tmp").symlink_to("nowhere")
    (tmp_path / ".mine").touch()
    sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-3", ".mine"}
    assert problems(kept) == []


def test_only_checkpoint_names_are_checkpoints(tmp_path: Path) -> None:
    for name in ("checkpoint-2", "checkpoint-10", "checkpoint-x", "best", ".staging-checkpoint-4"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-5").touch()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-10"]
    assert list_checkpoints(tmp_path / "absent") == []
    with pytest.raises(RunError, match="best is not a checkpoint name"):
        step_of(tmp_path / "best")
