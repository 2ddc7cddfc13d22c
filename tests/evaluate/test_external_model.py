"""Models that lie outside a run, found with what answers of them need, or refused by file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finefit.errors import ModelError
from finefit.evaluate.external_model import find_external_model
from finefit.spec.models import FolderModel, Lora
from tests.conftest import make_model_folder
from tests.stages.test_merge_adapter import make_adapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Fault = Callable[[Path], object]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "adapter", base)


def _changed(**values: Any) -> Fault:
    def plant(adapter: Path) -> None:
        config = json.loads((adapter / CONFIG).read_text())
        (adapter / CONFIG).write_text(json.dumps(config | values))

    return plant


def _written(name: str, content: bytes) -> Fault:
    return lambda adapter: (adapter / name).write_bytes(content)


def _cut(adapter: Path) -> None:
    raw = (adapter / WEIGHTS).read_bytes()
    (adapter / WEIGHTS).write_bytes(raw[:-100])


FAULTS: dict[str, tuple[str, Fault]] = {
    "nested deeply": (CONFIG, _written(CONFIG, b"[" * 100_000 + b"]" * 100_000)),
    "not JSON": (CONFIG, _written(CONFIG, b"{")),
    "not UTF-8": (CONFIG, _written(CONFIG, b'{"r": "\xff"}')),
    "a list": (CONFIG, _written(CONFIG, b"[1]")),
    "a list as rank": (CONFIG, _changed(r=[1])),
    "a negative rank": (CONFIG, _changed(r=-1)),
    "an object as alpha": (CONFIG, _changed(lora_alpha={"a": 1})),
    "mixed targets": (CONFIG, _changed(target_modules=["q_proj", 1, None])),
    "a base of too many letters": (CONFIG, _changed(base_model_name_or_path="x" * 5000)),
    "weights missing": (WEIGHTS, lambda adapter: (adapter / WEIGHTS).unlink()),
    "weights cut": (WEIGHTS, _cut),
    "weights without bytes": (WEIGHTS, _written(WEIGHTS, b"")),
    "weights with another header": (WEIGHTS, _written(WEIGHTS, (4).to_bytes(8, "little") + b"{]}{")),
}


def test_an_adapter_is_found_on_its_base(adapter: Path, base: Path) -> None:
    found = find_external_model(str(adapter))
    assert found.weights == adapter
    assert found.model == FolderModel(kind="folder", path=str(base.resolve()))
    assert found.tuning == Lora(kind="lora", rank=4, alpha=8, targets=("down_proj", "q_proj", "v_proj"))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_adapter_is_a_mistake_of_the_user_with_file_and_remedy(fault: str, adapter: Path) -> None:
    file, plant = FAULTS[fault]
    plant(adapter)
    with pytest.raises(ModelError) as refused:
        find_external_model(str(adapter))
    assert str(adapter / file) in refused.value.problem
    assert refused.value.remedy
    assert refused.value.exit_code == 2
