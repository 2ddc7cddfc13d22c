import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter
from safetensors.numpy import save_file

from finefit.errors import ModelError
from finefit.facts.files import (
    BLOCK_BYTES,
    NUM_BLOCKS,
    FileFact,
    fingerprint,
    free_bytes,
    hub_cache,
    read_config,
    read_file,
    read_model_folder,
    reading_model,
    sha256_of,
    stored_dtypes,
)
from tests.memory import peak_of


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


Weights = dict[str, np.ndarray]


def _weights(seed: int = 0) -> Weights:
    random = np.random.default_rng(seed)
    return {"embed": random.standard_normal((100, 8)).astype(np.float16), "norm": np.ones(8, np.float32)}


def _large_weights() -> Weights:
    """Three times what the blocks cover, with a router of 64 bytes in the middle."""
    half = np.zeros(NUM_BLOCKS * BLOCK_BYTES * 3 // 8, np.float32)
    return {"a": half, "b_router": np.zeros(16, np.float32), "c": half}


def _make_folder(path: Path, weights: Weights, **config: object) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (path / "tokenizer.json").write_text("{}")
    save_file(weights, path / "model.safetensors")
    return path


def _make_shards(path: Path) -> Path:
    _make_folder(path, _weights())
    (path / "model.safetensors").unlink()
    names = {name: f"model-0000{number}-of-00002.safetensors" for number, name in enumerate(_weights(), start=1)}
    for name, file in names.items():
        save_file({name: _weights()[name]}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return _make_folder(tmp_path / "smol", _weights())


def test_the_header_counts_parameters_and_bytes(folder: Path) -> None:
    header = read_model_folder(folder)
    assert header.num_parameters == 808
    assert header.weight_bytes == 800 * 2 + 8 * 4
    assert header.dtype == "float16"
    assert header.config["model_type"] == "llama"
    assert header.files == ("config.json", "tokenizer.json", "model.safetensors")


def test_shards_count_like_one_file(folder: Path, tmp_path: Path) -> None:
    header = read_model_folder(_make_shards(tmp_path / "sharded"))
    assert header.num_parameters == read_model_folder(folder).num_parameters
    assert header.weight_bytes == read_model_folder(folder).weight_bytes
    assert header.files[-2:] == ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def test_all_types_of_stored_weights_are_named_the_most_frequent_first(folder: Path, tmp_path: Path) -> None:
    assert stored_dtypes(folder) == stored_dtypes(_make_shards(tmp_path / "sharded")) == ("float16", "float32")
    computed = {"embed": _weights()["embed"], "layers.0.rotary_emb.inv_freq": np.ones(8, np.float32)}
    assert stored_dtypes(_make_folder(tmp_path / "old", computed)) == ("float16",)


def test_of_weights_that_are_not_there_or_not_whole_no_type_is_known(folder: Path, tmp_path: Path) -> None:
    (_make_shards(tmp_path / "sharded") / "model-00002-of-00002.safetensors").unlink()
    assert stored_dtypes(tmp_path / "sharded") == ()
    (folder / "model.safetensors").unlink()
    assert stored_dtypes(folder) == ()


def test_quantised_weights_have_no_known_parameter_count(tmp_path: Path) -> None:
    folder = _make_folder(tmp_path / "packed", _weights(), quantization_config={"bits": 4})
    assert read_model_folder(folder).num_parameters is None


def test_a_copied_folder_keeps_its_fingerprint(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "README.md").write_text("notes are not the model")
    assert read_model_folder(tmp_path / "elsewhere").fingerprint == read_model_folder(folder).fingerprint


def test_retrained_weights_of_the_same_shape_change_the_fingerprint(folder: Path) -> None:
    before = read_model_folder(folder).fingerprint
    save_file(_weights(seed=1), folder / "model.safetensors")
    assert read_model_folder(folder).fingerprint != before


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja", "merges.txt"]
)
def test_every_small_file_that_decides_answers_changes_the_fingerprint(folder: Path, name: str) -> None:
    before = read_model_folder(folder).fingerprint
    (folder / name).write_text('{"changed": true}')
    assert read_model_folder(folder).fingerprint != before


def test_a_named_chat_template_changes_the_fingerprint_and_an_empty_folder_of_them_does_not(folder: Path) -> None:
    before = read_model_folder(folder)
    templates = folder / "additional_chat_templates"
    templates.mkdir()
    (templates / "notes.md").write_text("no template")
    assert read_model_folder(folder) == before
    (templates / "tool_use.jinja").write_text("{{ tools }}")
    found = read_model_folder(folder)
    assert found.files == (
        "config.json",
        "tokenizer.json",
        "additional_chat_templates/tool_use.jinja",
        "model.safetensors",
    )
    (templates / "tool_use.jinja").rename(templates / "rag.jinja")
    assert len({before.fingerprint, found.fingerprint, read_model_folder(folder).fingerprint}) == 3


def test_a_retrained_router_between_the_blocks_changes_the_fingerprint(tmp_path: Path) -> None:
    folder = _make_folder(tmp_path / "moe", _large_weights())
    before = read_model_folder(folder).fingerprint
    save_file(_large_weights() | {"b_router": np.ones(16, np.float32)}, folder / "model.safetensors")
    assert read_model_folder(folder).fingerprint != before


def test_a_large_file_changed_at_its_last_byte_changes_the_fingerprint(tmp_path: Path) -> None:
    folder = _make_folder(tmp_path / "large", _large_weights())
    before = read_model_folder(folder).fingerprint
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    assert read_model_folder(folder).fingerprint != before


@pytest.mark.parametrize(("kept_bytes", "said"), [(3, "truncated"), (40, "truncated"), (1000, "truncated")])
def test_a_truncated_weight_file_is_refused_by_name(folder: Path, kept_bytes: int, said: str) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept_bytes])
    with pytest.raises(ModelError) as raised:
        read_model_folder(folder)
    assert str(weights) in raised.value.problem
    assert said in raised.value.problem
    assert "fetch it again" in raised.value.remedy


@pytest.mark.parametrize("header", [b"[1, 2]", b'{"a": {"dtype": "F32"}}', b"\xff\xfe{}", b"null"])
def test_a_header_that_is_not_safetensors_is_refused_by_name(folder: Path, header: bytes) -> None:
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match=r"model\.safetensors has a header that is not safetensors'"):
        read_model_folder(folder)


def test_a_git_lfs_pointer_is_named_with_its_remedy(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ModelError, match="Git LFS pointer") as raised:
        read_model_folder(folder)
    assert "git lfs pull" in raised.value.remedy


def test_pickled_weights_are_refused_with_the_way_to_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is pickled") as raised:
        read_model_folder(folder)
    assert "convert it to safetensors" in raised.value.remedy


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = _make_shards(tmp_path / "sharded")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks 1 of 2 weight files: model-00002-of-00002\.safetensors"):
        read_model_folder(folder)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": [1]}'])
def test_an_index_without_a_weight_map_is_refused(tmp_path: Path, index: str) -> None:
    folder = _make_shards(tmp_path / "sharded")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match="has no weight_map"):
        read_model_folder(folder)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no weights"):
        read_model_folder(folder)


def test_a_misspelt_folder_is_answered_with_the_nearest(folder: Path) -> None:
    with pytest.raises(ModelError, match="does not exist") as raised:
        read_model_folder(folder.parent / "smoll")
    assert raised.value.remedy == f"did you mean {folder}?"


def test_a_folder_above_the_model_is_answered_with_the_model(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json") as raised:
        read_model_folder(folder.parent)
    assert raised.value.remedy == f"did you mean {folder}?"


def test_an_adapter_is_told_apart_from_a_model(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")
    with pytest.raises(ModelError) as raised:
        read_model_folder(folder)
    assert "it is an adapter" in raised.value.remedy


def test_a_file_in_place_of_the_folder_is_answered_with_its_folder(folder: Path) -> None:
    with pytest.raises(ModelError, match="is a file") as raised:
        read_model_folder(folder / "model.safetensors")
    assert str(folder) in raised.value.remedy


@pytest.mark.parametrize("config", ["[]", "{", ""])
def test_a_broken_config_is_refused_by_name(folder: Path, config: str) -> None:
    (folder / "config.json").write_text(config)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_model_folder(folder)


# what libraries raise


@pytest.mark.parametrize(
    ("error", "package"),
    [
        (ModuleNotFoundError("No module named 'timm'", name="timm"), "timm"),
        (ImportError("\nTimmWrapperModel requires the timm library but it was not found in your environment."), "timm"),
        (ImportError("requires the following packages not found in your environment: einops"), "einops"),
    ],
)
def test_a_package_that_a_model_needs_is_named_with_the_command_that_installs_it(
    error: ImportError, package: str
) -> None:
    with pytest.raises(ModelError, match=f"not installed: {package}\n") as refused, reading_model("the model"):
        raise error
    assert refused.value.remedy == f"pip install {package}"


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt(), RuntimeError("CUDA error: no device")])
def test_what_is_not_about_the_files_of_a_model_passes_their_boundary(error: BaseException) -> None:
    with pytest.raises(type(error)), reading_model("the model"):
        raise error


def test_a_long_message_of_a_library_is_cut_to_its_beginning() -> None:
    said = ValueError("no such type " + "AlbertConfig, " * 500)
    with (
        pytest.raises(ModelError, match=r"^config.json cannot be read: no such") as refused,
        reading_model("config.json"),
    ):
        raise said
    assert len(refused.value.problem) < 400


def test_an_infinite_number_is_read_as_transformers_writes_it(tmp_path: Path) -> None:
    text = '{"time_step_limit": [0.0, {"__float__": "Infinity"}], "rope": {"__float__": "1.0", "kind": "x"}}'
    (tmp_path / "config.json").write_text(text)
    found = read_config(tmp_path)
    assert found == {"time_step_limit": [0.0, float("inf")], "rope": {"__float__": "1.0", "kind": "x"}}


@pytest.mark.parametrize(("name", "at_most"), [("config.json", 4 << 20), ("tokenizer.json", 64 << 20)])
def test_a_file_of_a_model_beyond_any_published_one_is_refused(tmp_path: Path, name: str, at_most: int) -> None:
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, at_most + 1)
    with pytest.raises(ModelError, match=f"{name} has {at_most + 1:,} bytes, more than the {at_most:,}"):
        fingerprint({name: tmp_path / name}, [])


def test_a_config_of_a_million_small_values_is_refused_in_little_memory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": [' + "[]," * (8 << 20) + "[]]}")
    code = """
try:
    find_weight_files(Path(sys.argv[1]))
except ModelError as error:
    assert "values" in error.problem, error
else:
    raise AssertionError
"""
    setup = "from finefit.errors import ModelError; from finefit.facts.files import find_weight_files"
    assert peak_of(code, tmp_path, setup=setup) < 100 << 20


def test_the_content_of_what_is_not_a_file_has_no_digest(tmp_path: Path) -> None:
    (tmp_path / "endless").symlink_to("/dev/zero")
    with pytest.raises(OSError, match="a device"):
        sha256_of(tmp_path / "endless")
