import hashlib
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from finefit.facts.files import FileFact, free_bytes, hub_cache, read_file


def test_a_file_fact_holds_size_and_digest_under_a_relative_posix_path(tmp_path: Path) -> None:
    file = tmp_path / "data" / "train.jsonl"
    file.parent.mkdir()
    file.write_bytes(b"x" * 100_000)
    fact = read_file(file, relative_to=tmp_path)
    assert fact == FileFact(
        path="data/train.jsonl", size_bytes=100_000, sha256=hashlib.sha256(b"x" * 100_000).hexdigest()
    )


def test_a_file_beside_the_folder_is_reached_through_its_parent(tmp_path: Path) -> None:
    (tmp_path / "specs").mkdir()
    (tmp_path / "rows.jsonl").touch()
    assert read_file(tmp_path / "rows.jsonl", relative_to=tmp_path / "specs").path == "../rows.jsonl"


def test_a_file_fact_survives_json(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    fact = read_file(tmp_path / "rows.jsonl", relative_to=tmp_path)
    adapter = TypeAdapter(FileFact)
    assert adapter.validate_json(adapter.dump_json(fact)) == fact


def test_free_bytes_of_a_folder_to_be_made_are_those_of_its_disk(tmp_path: Path) -> None:
    unmade = free_bytes(tmp_path / "runs" / "demo-1" / "checkpoints")
    assert unmade > 0
    assert abs(unmade - free_bytes(tmp_path)) < 2**30


def test_the_hub_cache_is_where_huggingface_hub_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert hub_cache() == Path.home() / ".cache" / "huggingface" / "hub"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert hub_cache() == tmp_path / "xdg" / "huggingface" / "hub"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert hub_cache() == tmp_path / "home" / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    assert hub_cache() == tmp_path / "cache"
