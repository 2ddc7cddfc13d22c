"""Prepared rows with images are used again while every image is what it was, and prepared anew when one is not."""

from pathlib import Path

import pytest

from finefit.data.store import Examples
from finefit.pipeline.data import PreparedData, prepare_data
from finefit.spec.models import FolderModel, Full
from finefit.spec.rows import Data
from finefit.spec.schema import AdamW, Spec
from tests.conftest import write_jsonl
from tests.data.seen import asked, draw
from tests.vision import make_vlm


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_vlm("llava", tmp_path / "model")
    draw(tmp_path, "a.png", 1)
    write_jsonl(tmp_path / "a.jsonl", [asked(0, "a.png"), asked(1, "b.png")])
    return tmp_path


def prepared(folder: Path) -> PreparedData:
    spec = Spec(
        name="seeing",
        model=FolderModel(kind="folder", path="model"),
        tuning=Full(kind="full"),
        data=Data.model_validate({"train": [{"path": "a.jsonl"}]}, strict=False),
        optimizer=AdamW(lr=1e-3),
    )
    return prepare_data(spec, folder, folder / "model")


def shown(found: PreparedData) -> list[str]:
    return [picture.sha256 for example in Examples(found.path("train.safetensors")) for picture in example.images]


def stamp(found: PreparedData) -> int:
    """Other where the folder was filled anew."""
    return found.path("train.safetensors").stat().st_ino


def test_rows_are_prepared_anew_when_an_image_was_changed_or_mended_and_only_then(project: Path) -> None:
    first = prepared(project)
    assert [fault.count for fault in first.record.faults] == [1]
    assert stamp(prepared(project)) == stamp(first)
    (old,) = shown(first)
    draw(project, "a.png", 2)
    (changed,) = shown(prepared(project))
    assert changed != old
    draw(project, "b.png", 3)
    mended = prepared(project)
    assert (mended.record.faults, len(shown(mended))) == ((), 2)
    assert len({first.record.pictures_sha256, mended.record.pictures_sha256}) == 2


def test_a_copy_of_a_project_is_prepared_from_its_own_images(project: Path) -> None:
    prepared(project)
    copy = project / "copy"
    copy.mkdir()
    for name in ("a.jsonl", "a.png"):
        (copy / name).write_bytes((project / name).read_bytes())
    (copy / "model").symlink_to(project / "model")
    (picture,) = [
        picture for example in Examples(prepared(copy).path("train.safetensors")) for picture in example.images
    ]
    assert picture.path == str(copy / "a.png")
