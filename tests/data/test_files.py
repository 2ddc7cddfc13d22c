import json
import os
from pathlib import Path

import pytest

from finefit.data.files import DataFile, find_files, pin_hub_path
from finefit.data.records import DataRecord, read_records
from finefit.errors import DataError

LINE = '{"prompt": "2+2", "completion": "4"}\n'
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "f" * 40


def _make(base: Path, *names: str) -> None:
    for name in names:
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(LINE, encoding="utf-8")


def _names(path: str, base: Path, split: str = "train") -> list[str]:
    return [file.name for file in find_files(path, base, split=split)]


def _fault(path: str, base: Path, split: str = "train") -> DataError:
    with pytest.raises(DataError) as caught:
        find_files(path, base, split=split)
    assert caught.value.remedy
    return caught.value


ENDINGS = {"json": ".json .json.gz", "jsonl": ".jsonl .ndjson .jsonl.gz .JSONL", "csv": ".csv .tsv .csv.gz"}
ENDINGS |= {"parquet": ".parquet", "arrow": ".arrow", "text": ".txt .text .amr .txt.gz"}


@pytest.mark.parametrize(("ending", "form"), [(end, form) for form, ends in ENDINGS.items() for end in ends.split()])
def test_the_extension_tells_the_format_of_a_file(tmp_path: Path, ending: str, form: str) -> None:
    _make(tmp_path, f"data/my.rows{ending}")
    (file,) = find_files(f"./data/my.rows{ending}", tmp_path, split="test")
    assert (file.path.read_text(), file.name, file.format) == (LINE, f"./data/my.rows{ending}", form)


@pytest.mark.parametrize(
    "name", ["rows.xlsx", "rows", "rows.parquet.gz", "rows.jsonl.zst", "citations.xlsx", "notice.db"]
)
def test_an_unknown_extension_is_an_error_that_lists_the_known(tmp_path: Path, name: str) -> None:
    _make(tmp_path, f"data/{name}")
    for path in (f"data/{name}", "data", "data/*"):
        fault = _fault(path, tmp_path)
        assert "has no known extension" in fault.problem
        assert name in fault.problem
        assert ".jsonl" in fault.remedy


def test_a_file_is_taken_as_named_even_where_a_folder_would_leave_it_out(tmp_path: Path) -> None:
    _make(tmp_path, "state.json", "test[1].json", ".hidden.json")
    for name in ("state.json", "test[1].json", ".hidden.json", str(tmp_path / "state.json")):
        assert _names(name, tmp_path) == [name]


def test_a_folder_gives_all_data_below_it_in_order_and_nothing_else(tmp_path: Path) -> None:
    _make(tmp_path, "data/b.jsonl", "data/a/2.jsonl", "data/a/1.jsonl", "data/a.b/0.jsonl")
    _make(
        tmp_path,
        "data/README.md",
        "data/readme.txt",
        "data/LICENSE",
        "data/a/x.png",
        "data/spec.yaml",
        "data/dataset_info.json",
        "data/state.json",
    )
    _make(tmp_path, "data/.hidden.jsonl", "data/.git/x.jsonl", "data/__pycache__/x.jsonl", "data/cache-1f.arrow")
    expected = ["data/a.b/0.jsonl", "data/a/1.jsonl", "data/a/2.jsonl", "data/b.jsonl"]
    for path in ("data", "data/", "./data", "data/../data/."):
        files = find_files(path, tmp_path, split="train")
        assert [file.path.resolve() for file in files] == [tmp_path / name for name in expected]
    assert _names("./data/", tmp_path) == expected
    assert _names(str(tmp_path / "data"), tmp_path / "elsewhere") == [str(tmp_path / name) for name in expected]


def test_a_glob_takes_every_file_with_a_data_extension_whatever_its_name(tmp_path: Path) -> None:
    names = [
        *("citations.jsonl", "dataset_info.json", "facts.jsonl", "license.jsonl", "notices.jsonl", "readme.jsonl"),
        "state.json",
    ]
    _make(tmp_path, *(f"parts/{name}" for name in names), "parts/README.txt", "parts/README.md", "parts/LICENSE")
    for ending in ("jsonl", "json", "txt"):
        expected = [f"parts/{name}" for name in [*names, "README.txt"] if name.endswith(f".{ending}")]
        assert _names(f"parts/*.{ending}", tmp_path) == expected
    assert "parts/README.txt" in _fault("parts/*", tmp_path).problem
    assert _names("parts/[fRL]*[!t]", tmp_path) == ["parts/facts.jsonl"]


@pytest.mark.parametrize("ending", ["json", "jsonl", "csv", "parquet", "txt", "jsonl.gz"])
def test_a_name_alone_leaves_no_file_of_a_folder_out(tmp_path: Path, ending: str) -> None:
    names = [f"data/{stem}.{ending}" for stem in ("changelogs", "citations", "licenses", "notices", "state", "states")]
    _make(
        tmp_path,
        *names,
        "data/README.txt",
        "data/LICENSE-MIT.txt",
        "data/citation.txt",
        "data/NOTICE",
        "data/CHANGELOG.md",
        "data/LICENSE-2.0",
    )
    assert _names("data", tmp_path) == names


def test_what_datasets_writes_beside_its_rows_is_left_out_of_a_folder(tmp_path: Path) -> None:
    _make(
        tmp_path,
        "d/dataset_dict.json",
        "d/train/data-00000-of-00001.arrow",
        "d/train/cache-1f.arrow",
        "d/train/state.json",
    )
    _make(tmp_path, "d/train/dataset_info.json", "d/dataset_infos.json")
    assert _names("d", tmp_path) == ["d/train/data-00000-of-00001.arrow"]


def test_linked_folders_are_entered_once(tmp_path: Path) -> None:
    _make(tmp_path, "big/a.jsonl", "data/b.jsonl")
    (tmp_path / "data" / "big").symlink_to(tmp_path / "big")
    (tmp_path / "big" / "round").symlink_to(tmp_path / "data")
    assert _names("data", tmp_path) == ["data/b.jsonl", "data/big/a.jsonl"]


def test_a_folder_that_cannot_be_entered_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _make(tmp_path, "data/a.jsonl", "data/locked/b.jsonl")
    enter = os.scandir

    def refuse(folder: str) -> object:
        if str(folder).endswith("locked"):
            raise PermissionError(13, "Permission denied", folder)
        return enter(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    assert "data cannot be looked up: " in _fault("data", tmp_path).problem


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("data/*.jsonl", ["data/test.jsonl", "data/train.jsonl"]),
        ("data/**/*.jsonl", ["data/deep/er/x.jsonl", "data/test.jsonl", "data/train.jsonl"]),
        ("data/**/**/x.json?", ["data/deep/er/x.jsonl"]),
        ("data/t[er]*.jsonl", ["data/test.jsonl", "data/train.jsonl"]),
    ],
)
def test_a_glob_is_taken_as_it_stands_whatever_the_split(tmp_path: Path, pattern: str, expected: list[str]) -> None:
    _make(tmp_path, "data/train.jsonl", "data/test.jsonl", "data/deep/er/x.jsonl", "data/notes.md", "other/x.jsonl")
    assert _names(pattern, tmp_path, "validation") == expected
    assert _names(str(tmp_path / pattern), tmp_path / "elsewhere") == [str(tmp_path / name) for name in expected]


def test_a_spec_folder_whose_name_looks_like_a_glob_is_none(tmp_path: Path) -> None:
    _make(tmp_path, "run[1]/data/a.jsonl")
    assert _names("data/*", tmp_path / "run[1]") == ["data/a.jsonl"]


@pytest.mark.parametrize("path", ["data", "data/*"])
def test_files_of_several_formats_are_an_error_that_lists_them(tmp_path: Path, path: str) -> None:
    _make(tmp_path, "data/a.jsonl", "data/b.csv")
    fault = _fault(path, tmp_path)
    assert fault.problem == f"{path} holds files of several formats: csv: data/b.csv; jsonl: data/a.jsonl"
    assert fault.remedy == "name the files with a glob, such as data/*.jsonl"


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("train.jsonl", "train.jsonl does not exist (looked for {base}/train.jsonl)"),
        ("data/*.csv", "no file matches data/*.csv (looked for {base}/data/*.csv)"),
        ("empty", "empty is a folder without files (looked in {base}/empty)"),
    ],
)
def test_nothing_found_tells_what_was_looked_for(tmp_path: Path, path: str, problem: str) -> None:
    (tmp_path / "empty").mkdir()
    fault = _fault(path, tmp_path)
    assert fault.problem == problem.format(base=tmp_path)
    assert fault.remedy.startswith("paths are relative to the spec file")


def test_a_folder_of_images_holds_no_data(tmp_path: Path) -> None:
    _make(tmp_path, "data/a.png", "data/b.png")
    assert _fault("data", tmp_path).problem == "data has no data files, only 2 files such as data/a.png"


@pytest.mark.parametrize("path", ["x" * 300, "a\0b"])
def test_a_path_that_no_system_takes_is_an_error(tmp_path: Path, path: str) -> None:
    _fault(path, tmp_path)


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train", ["d/Train2017/x.parquet", "d/train-00000-of-00002.parquet", "d/train-00001-of-00002.parquet"]),
        ("validation", ["d/dev/train_of_thought/val_human.parquet", "d/x.valid.parquet"]),
        ("test", ["d/more/test.parquet"]),
    ],
)
def test_a_folder_of_several_splits_gives_the_one_that_is_asked_for(
    tmp_path: Path, split: str, expected: list[str]
) -> None:
    _make(tmp_path, "d/train-00000-of-00002.parquet", "d/train-00001-of-00002.parquet", "d/Train2017/x.parquet")
    _make(tmp_path, "d/dev/train_of_thought/val_human.parquet", "d/x.valid.parquet", "d/more/test.parquet")
    assert _names("d", tmp_path, split) == expected


def test_words_that_only_contain_a_split_tell_nothing(tmp_path: Path) -> None:
    _make(tmp_path, "test/latest.jsonl", "test/pretrained.jsonl", "test/interval.jsonl")
    assert len(_names("test", tmp_path, "validation")) == 3


def test_a_split_that_is_not_there_is_an_error_that_lists_what_is(tmp_path: Path) -> None:
    _make(tmp_path, "data/val_a.json", "data/val_b.json")
    fault = _fault("data", tmp_path)
    assert fault.problem == "data holds no files for train; there is data/val_a.json, data/val_b.json"
    assert fault.remedy == "name the files for train with a glob, such as data/*.json"


@pytest.mark.parametrize("other", ["more.jsonl", "train_test.jsonl"])
def test_a_file_of_no_split_beside_files_of_one_is_never_left_out_in_silence(tmp_path: Path, other: str) -> None:
    _make(tmp_path, "data/train.jsonl", f"data/{other}")
    assert _fault("data", tmp_path).problem.endswith(f"contain no split or several: data/{other}")


def test_a_missing_shard_is_an_error(tmp_path: Path) -> None:
    _make(
        tmp_path,
        "data/train-00000-of-00003.parquet",
        "data/train-00002-of-00003.parquet",
        "data/test-00000-of-00001.parquet",
    )
    assert _names("data", tmp_path, "test") == ["data/test-00000-of-00001.parquet"]
    assert _fault("data", tmp_path).problem == "data holds 2 of the 3 files data/train-*-of-00003.parquet"


def test_what_datasets_saved_is_read_by_split(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {
        "train": datasets.Dataset.from_list([{"q": "a"}, {"q": "b"}]),
        "test": datasets.Dataset.from_list([{"q": "c"}]),
    }
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    found = [row for file in find_files("saved", tmp_path, split="train") for row in read_records(file)]
    assert [row.value for row in found if isinstance(row, DataRecord)] == [{"q": "a"}, {"q": "b"}]


# The hub, from a cache on disk as huggingface_hub lays it out


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return cache


def _cached(cache: Path, commit: str, *names: str, ref: str = "main", listed: tuple[str, ...] | None = None) -> None:
    repo = cache / "datasets--owner--name"
    (repo / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
    (repo / "refs" / ref).write_text(commit)
    for name in names:
        blob = repo / "blobs" / f"{commit}-{name.replace('/', '-')}"
        _make(repo, f"blobs/{blob.name}")
        link = repo / "snapshots" / commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    if listed is not None:
        (repo / "trees").mkdir()
        files = {name: {"size": len(LINE), "blob_id": "0" * 40} for name in listed}
        (repo / "trees" / f"{commit}.json").write_text(json.dumps({"format_version": 1, "files": files}))


def test_a_hub_data_set_gives_the_files_of_the_split_with_their_hub_names(cache: Path, tmp_path: Path) -> None:
    _cached(cache, COMMIT, "data/train.jsonl", "data/test.jsonl", "README.md", ".gitattributes")
    (file,) = find_files("hf://datasets/owner/name", tmp_path, split="test")
    assert file == DataFile(
        cache / "datasets--owner--name" / "snapshots" / COMMIT / "data" / "test.jsonl",
        "hf://datasets/owner/name/data/test.jsonl",
        "jsonl",
    )
    assert len(list(read_records(file))) == 1


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        ("/data/a.jsonl", ["data/a.jsonl"]),
        ("/data", ["data/a.jsonl", "data/deep/b.jsonl"]),
        ("/data/*.jsonl", ["data/a.jsonl"]),
        ("/data/**/*.jsonl", ["data/a.jsonl", "data/deep/b.jsonl"]),
        ("/", ["data/a.jsonl", "data/deep/b.jsonl", "other/c.jsonl"]),
    ],
)
def test_a_hub_path_may_go_on_with_a_file_a_folder_or_a_glob(
    cache: Path, tmp_path: Path, inside: str, expected: list[str]
) -> None:
    names = ("data/a.jsonl", "data/deep/b.jsonl", "other/c.jsonl")
    _cached(cache, COMMIT, *names, listed=names)
    assert _names(f"hf://datasets/owner/name{inside}", tmp_path) == [
        f"hf://datasets/owner/name/{name}" for name in expected
    ]


@pytest.mark.parametrize(
    ("ref", "written"),
    [
        ("main", ""),
        ("v1.0", "@v1.0"),
        ("refs/convert/parquet", "@refs/convert/parquet"),
        ("refs/pr/3", "@refs%2Fpr%2F3"),
    ],
)
def test_a_pinned_path_names_the_commit_and_gives_the_same_file_when_the_branch_has_moved(
    cache: Path, tmp_path: Path, ref: str, written: str
) -> None:
    _cached(cache, OLDER, "data/a.jsonl", ref=ref)
    path = f"hf://datasets/owner/name{written}/data/*.jsonl"
    (before,) = find_files(path, tmp_path, split="train")
    pinned = pin_hub_path(path)
    assert pinned == f"hf://datasets/owner/name@{OLDER}/data/*.jsonl"
    _cached(cache, COMMIT, "data/a.jsonl", ref=ref)
    (after,) = find_files(pinned, tmp_path, split="train")
    assert after.path == before.path
    assert pin_hub_path(pinned) == pinned


def test_pinning_never_asks_the_hub_where_the_branch_may_have_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, local_files_only: bool, **__: object) -> str:
        return f"snapshots/{OLDER if local_files_only else COMMIT}"

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert pin_hub_path("hf://datasets/owner/name") == f"hf://datasets/owner/name@{OLDER}"


def test_other_paths_are_not_pinned() -> None:
    assert pin_hub_path("data/*.jsonl") == "data/*.jsonl"


def test_what_is_not_in_the_cache_is_an_error_offline(cache: Path, tmp_path: Path) -> None:
    for path in ("hf://datasets/owner/name", f"hf://datasets/owner/name@{OLDER}"):
        fault = _fault(path, tmp_path)
        assert fault.problem.startswith(f"{path} is not complete in the local cache and the hub cannot be reached: ")
        assert fault.remedy == "connect, or name local files"
        with pytest.raises(DataError):
            pin_hub_path(path)
    assert not cache.exists()


@pytest.mark.parametrize(
    ("inside", "missing"),
    [
        ("", "b.jsonl"),
        ("", "B.JSONL"),
        ("/data", "data/b.jsonl"),
        ("/data/**/*.jsonl", "data/b.jsonl"),
        ("/b.jsonl", "b.jsonl"),
    ],
)
def test_a_download_that_was_broken_off_is_not_taken_for_the_whole(
    cache: Path, tmp_path: Path, inside: str, missing: str
) -> None:
    _cached(cache, COMMIT, "data/a.jsonl", listed=("data/a.jsonl", missing, "README.md"))
    assert f"1 file(s) are missing ({missing})" in _fault(f"hf://datasets/owner/name{inside}", tmp_path).problem
    assert _names("hf://datasets/owner/name/data/a.jsonl", tmp_path) == ["hf://datasets/owner/name/data/a.jsonl"]


@pytest.mark.parametrize(
    "path", ["hf://datasets/name", "hf://models/owner/name", "hf://datasets/owner/na me--x", "hf://"]
)
def test_a_hub_path_that_names_no_data_set_is_an_error(cache: Path, tmp_path: Path, path: str) -> None:
    assert path in _fault(path, tmp_path).problem
    assert not cache.exists()


def test_errors_of_the_hub_tell_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx
    from huggingface_hub import errors

    answer = httpx.Response(403, request=httpx.Request("GET", "https://hub"))
    expected = {
        errors.GatedRepoError("terms", response=answer): ("hf://datasets/owner/name is gated", "hf auth login"),
        errors.RepositoryNotFoundError("404", response=answer): (
            "the hub has no such dataset: hf://datasets/owner/name: 404",
            "check owner",
        ),
        errors.RevisionNotFoundError("404", response=answer): (
            "the hub has no such dataset: hf://datasets/owner/name: 404",
            "check owner",
        ),
        httpx.ProxyError("no proxy"): ("hf://datasets/owner/name cannot be downloaded: no proxy", "connect"),
        OSError(28, "No space left"): (
            "hf://datasets/owner/name cannot be looked up: [Errno 28] No space left",
            "check",
        ),
    }
    for error, (problem, remedy) in expected.items():

        def refuse(*_: object, error: Exception = error, **__: object) -> str:
            raise error

        monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
        fault = _fault("hf://datasets/owner/name", tmp_path)
        assert fault.problem == problem
        assert remedy in fault.remedy


def test_a_folder_gives_its_regular_files_alone(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text("{}")
    os.mkfifo(tmp_path / "rows" / "b.jsonl")
    (tmp_path / "rows" / "c.jsonl").symlink_to("/dev/zero")
    for named in ("rows", "rows/*.jsonl"):
        assert [file.name for file in find_files(named, tmp_path, split="train")] == ["rows/a.jsonl"]


@pytest.mark.parametrize("kind", ["a pipe", "a device"])
def test_what_is_named_and_is_not_a_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "rows.jsonl"
    os.mkfifo(path) if kind == "a pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(DataError, match=rf"rows\.jsonl is {kind}"):
        find_files("rows.jsonl", tmp_path, split="train")
