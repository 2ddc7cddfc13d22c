"""What is refused of a model's own files, and what cannot be known yet."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from finefit.errors import ModelError
from finefit.preflight.model import require_model, require_model_here
from finefit.spec.models import FolderModel, HubModel
from tests.conftest import make_model_folder

HUB = HubModel(kind="hub", id="someone/tiny")


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a model on the hub, as far as it was downloaded."""
    folder = make_model_folder(tmp_path / "snapshot")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(folder))
    return folder


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("offline")
def test_a_hub_model_that_is_not_downloaded_yet_is_a_note(snapshot: Path, tmp_path: Path) -> None:
    assert require_model_here(HUB, None, tmp_path) == ()
    (snapshot / "model.safetensors").unlink()
    (unknown,) = require_model_here(HUB, None, tmp_path)
    assert unknown.level == "note"
    assert "model.safetensors of someone/tiny" in unknown.problem


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": [1]}', "{}"])
def test_a_damaged_index_is_refused_whatever_is_downloaded(index: str, snapshot: Path, tmp_path: Path) -> None:
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        require_model_here(HUB, None, tmp_path)


@pytest.mark.usefixtures("offline")
def test_a_hub_model_without_a_tokenizer_is_refused_before_its_weights_are_fetched(
    snapshot: Path, tmp_path: Path
) -> None:
    (snapshot / "model.safetensors").unlink()
    (snapshot / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="has no tokenizer"):
        require_model_here(HUB, None, tmp_path)
    assert require_model_here(HUB, None, tmp_path, reads_rows=False)


@pytest.mark.usefixtures("offline")
def test_pickled_weights_alone_are_refused_without_the_hub(snapshot: Path, tmp_path: Path) -> None:
    (snapshot / "model.safetensors").rename(snapshot / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
        require_model_here(HUB, None, tmp_path)


class _Hub(BaseHTTPRequestHandler):
    """Knows one repository by the names of its files."""

    files: tuple[str, ...] = ()

    def do_GET(self) -> None:
        siblings = [{"rfilename": name} for name in self.files]
        body = json.dumps({"id": "someone/tiny", "sha": "a" * 40, "siblings": siblings}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Hub]]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        Thread(target=server.serve_forever, daemon=True).start()
        yield _Hub
        server.shutdown()


SHARDS = tuple(f"model-0000{at}-of-00002.safetensors" for at in (1, 2))
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("files", "refused"),
    [
        (("config.json", "model.safetensors"), False),
        (("config.json", INDEX, *SHARDS), False),
        (("config.json", "pytorch_model.bin", "onnx/model.safetensors"), True),
        (("config.json",), True),
    ],
)
def test_what_the_repository_does_not_have_is_refused_before_a_download(
    files: tuple[str, ...], refused: bool, hub: type[_Hub], snapshot: Path, tmp_path: Path
) -> None:
    (snapshot / "model.safetensors").unlink()
    hub.files = files
    if not refused:
        (unknown,) = require_model_here(HUB, None, tmp_path)
        assert unknown.level == "note"
        return
    with pytest.raises(ModelError, match="someone/tiny has ") as found:
        require_model_here(HUB, None, tmp_path)
    assert found.value.remedy


@pytest.mark.parametrize("there", [SHARDS, SHARDS[:1]])
def test_a_shard_that_only_the_index_knows_is_refused(
    there: tuple[str, ...], hub: type[_Hub], snapshot: Path, tmp_path: Path
) -> None:
    (snapshot / "model.safetensors").unlink()
    (snapshot / INDEX).write_text(json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))}))
    hub.files = (INDEX, *there)
    if there == SHARDS:
        assert [found.level for found in require_model_here(HUB, None, tmp_path)] == ["note"]
        return
    with pytest.raises(ModelError, match=SHARDS[1]):
        require_model_here(HUB, None, tmp_path)


def test_a_hub_model_that_is_downloaded_is_checked(snapshot: Path, tmp_path: Path) -> None:
    require_model_here(HUB, None, tmp_path)
    (snapshot / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ModelError, match="no causal language model of type vit"):
        require_model_here(HUB, None, tmp_path)


def test_a_model_is_proved_loadable_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = FolderModel(kind="folder", path="model"), make_model_folder(tmp_path / "model", seed=41)
    first = require_model(model, None, tmp_path)
    monkeypatch.setattr("finefit.plan.client.ask", None)
    assert require_model(model, None, tmp_path) == first
    make_model_folder(tmp_path / "model", seed=42)
    with pytest.raises(TypeError, match="not callable"):  # other weights are asked about again
        require_model(model, None, tmp_path)
