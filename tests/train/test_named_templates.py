"""A tokenizer with several chat templates, by name: transformers keeps them in a folder of their own."""

from pathlib import Path

from transformers import AutoTokenizer

from tests.conftest import TEMPLATE, make_project, make_tokenizer
from tests.faults import TRAINING, finish, make_job, start, words

TEMPLATES = {"default": TEMPLATE, "tool_use": f"Tools.{TEMPLATE}"}


def _project(folder: Path, *, spec: str) -> Path:
    path = make_project(folder, spec=spec)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATES
    tokenizer.save_pretrained(folder / "model")
    return path


def test_a_checkpoint_has_all_templates_of_its_model(tmp_path: Path) -> None:
    where = make_job(tmp_path, spec=TRAINING.replace("epochs: 3", "epochs: 1"), project=_project).fresh()
    assert finish(start(where)) == 0, words(where)
    assert AutoTokenizer.from_pretrained(where.checkpoints / "final").chat_template == TEMPLATES
