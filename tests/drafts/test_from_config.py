"""A spec from a config of another tool: the text that is written means the translation, and rows that are here are
compared."""

from pathlib import Path

import pytest

from finefit.drafts.from_config import import_config
from finefit.errors import SpecError
from finefit.spec.load import parse_spec
from finefit.spec.models import FolderModel, Lora
from tests.conftest import make_model_folder, make_rows, write_jsonl

CONFIG = """\
base_model: tiny
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
datasets:
  - path: train.jsonl
    type: chat_template
sequence_len: 256
micro_batch_size: 2
gradient_accumulation_steps: 2
num_epochs: 2
learning_rate: 0.0003
"""


def _config(folder: Path, text: str = CONFIG) -> Path:
    path = folder / "axolotl.yaml"
    path.write_text(text)
    return path


def test_the_written_text_means_the_translation(tmp_path: Path) -> None:
    found = import_config(_config(tmp_path), tmp_path / "spec.yaml")
    spec = parse_spec(found.text, where=str(tmp_path / "spec.yaml"))
    assert spec == found.spec
    assert isinstance(spec.tuning, Lora)
    assert (spec.tuning.rank, spec.global_batch, spec.optimizer.lr, spec.schedule.epochs) == (8, 4, 3e-4, 2)


def test_without_rows_it_says_why_nothing_is_compared(tmp_path: Path) -> None:
    found = import_config(_config(tmp_path), tmp_path / "spec.yaml")
    assert found.compared is None
    assert "train.jsonl" in found.not_compared


def test_rows_that_are_here_are_counted_as_both_tools_train_on_them(tmp_path: Path) -> None:
    make_model_folder(tmp_path / "tiny")
    write_jsonl(tmp_path / "train.jsonl", make_rows(20))
    found = import_config(_config(tmp_path), tmp_path / "spec.yaml")
    assert isinstance(found.spec.model, FolderModel)
    assert found.compared is not None
    assert found.compared.ours.rows == found.compared.theirs.rows == 20
    assert found.compared.ours.steps == found.compared.theirs.steps == 10


def test_a_config_of_no_known_tool_is_refused_with_the_tools(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refused:
        import_config(_config(tmp_path, "weather: fine\n"), tmp_path / "spec.yaml")
    assert "axolotl" in refused.value.remedy
