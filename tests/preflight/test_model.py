"""What is refused of a model's own files, and what cannot be known yet."""

from pathlib import Path

import pytest

from finefit.errors import ModelError
from finefit.model import resolve_model
from finefit.preflight.model import require_model, require_model_here
from finefit.spec.models import FolderModel, HubModel
from tests.conftest import make_model_folder

HUB = HubModel(kind="hub", id="someone/tiny")


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a model on the hub, as far as it was downloaded."""
    folder = make_model_folder(tmp_path / "snapshot")
    monkeypatch.setattr(resolve_model, "snapshot_download", lambda *_, **__: str(folder))
    return folder


def test_a_hub_model_that_is_not_downloaded_yet_is_no_problem(snapshot: Path, tmp_path: Path) -> None:
    (snapshot / "model.safetensors").unlink()
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
