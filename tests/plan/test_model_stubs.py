"""What is prepared on an outline is what will be prepared on the model that it foretells."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from finefit.errors import ModelError
from finefit.moe.build import build_moe
from finefit.plan.stage_forecasts import ModelStubs, model_size
from tests.conftest import make_model, make_tokenizer
from tests.moe.test_build import make_base, make_expert
from tests.moe.test_dense import NAMED, in_bytes, require_equal, with_tokenizer
from tests.plan.test_stage_forecasts import pipeline_of

torch.set_num_threads(1)
STAGES = """\
  mixture: {kind: build_moe, base: {kind: folder, path: base}, experts: {a: {kind: folder, path: a}, b: {kind: folder, path: b}}}
  tuned: {kind: train, model: {kind: stage, name: mixture}, tuning: {kind: full}}
"""  # noqa: E501


@pytest.mark.parametrize(("family", "name"), NAMED)
def test_the_outline_of_a_mixture_tokenises_as_its_base_and_so_does_what_is_trained_from_it(
    tmp_path: Path, family: str, name: str
) -> None:
    base = with_tokenizer(make_base(tmp_path / "base", family), make_tokenizer(), tokenizer_class=name)
    outlines = ModelStubs(pipeline=pipeline_of(STAGES), base=tmp_path)
    for stage in ("mixture", "tuned"):
        require_equal(outlines.at(stage), base)


@pytest.mark.parametrize("name", ["TokenizersBackend", "Qwen2Tokenizer"])
def test_an_outline_has_the_tokenizer_files_of_the_mixture_that_is_built_later(tmp_path: Path, name: str) -> None:
    base = with_tokenizer(make_base(tmp_path / "base", "qwen2"), make_tokenizer(), tokenizer_class=name)
    (tmp_path / "moe").mkdir()
    build_moe(
        base,
        {"a": make_expert(base, tmp_path / "a", 2), "b": make_expert(base, tmp_path / "b", 3)},
        tmp_path / "moe",
        top_k=2,
    )
    outline = ModelStubs(pipeline=pipeline_of(STAGES), base=tmp_path).at("mixture")
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    assert [(outline / name).read_bytes() for name in names] == [
        (tmp_path / "moe" / name).read_bytes() for name in names
    ]


def test_a_base_without_a_tokenizer_has_an_outline_without_one(tmp_path: Path) -> None:
    make_base(tmp_path / "base", "qwen2")
    assert [path.name for path in ModelStubs(pipeline=pipeline_of(STAGES), base=tmp_path).at("mixture").iterdir()] == [
        "config.json"
    ]


def test_a_mixture_that_could_not_tokenise_as_its_base_is_told_before_it_is_built(tmp_path: Path) -> None:
    base = in_bytes(tmp_path, "llama")
    AutoTokenizer.from_pretrained(base).save_pretrained(base)
    (base / "vocab.json").write_text("{}")
    with pytest.raises(ModelError, match="the mixture would not tokenise as its base, a ByT5Tokenizer"):
        ModelStubs(pipeline=pipeline_of(STAGES), base=tmp_path).at("mixture")


def _config(**changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = make_model().config.to_dict()
    return config | changes


def test_a_size_is_what_the_model_has() -> None:
    model, size = make_model(), model_size(_config())
    assert size.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert size.largest_layer == sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    assert size.outside == size.parameters - 2 * size.largest_layer


def test_a_model_that_cannot_be_counted_is_reported_with_the_reason() -> None:
    with pytest.raises(ModelError, match=r"a model of type no such model cannot be counted: .*no such model"):
        model_size(_config(model_type="no such model"))
