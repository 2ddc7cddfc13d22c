"""A merged model is a plain model folder, answers as base and adapter did, and what cannot be merged is refused."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.tuners import lora
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from finefit.artifacts.records import StageJob, WiredModel
from finefit.errors import FinefitError, ModelError
from finefit.model import merge, merged_weights, saved_weights
from finefit.model.saved_weights import FileSpan, InMemory
from finefit.report.stage_summary import summary_lines
from finefit.spec.models import FolderModel
from finefit.spec.stages import MergeAdapter
from finefit.stages.merge_adapter import make
from tests.conftest import make_model, make_model_folder, make_tokenizer
from tests.mixtures import FAMILIES, make_mixture

torch.set_num_threads(1)
PROBE = torch.arange(5, 45).reshape(2, 20)


def make_adapter(
    folder: Path,
    base: Path,
    *,
    size: float = 0.3,
    targets: Sequence[str] = ("q_proj", "v_proj", "down_proj"),
    **more: Any,
) -> Path:
    """One that has learnt something: its second matrices are not zero."""
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), task_type="CAUSAL_LM", **more)
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=size)
    adapted.save_pretrained(folder)
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_model_folder(tmp_path / "model")


def job_of(folder: Path, model: Path, laid: Path | None, /, **stage: Any) -> StageJob:
    spec = MergeAdapter.model_validate({"kind": "merge_adapter", "model": {"kind": "folder", "path": "model"}, **stage})
    wired = WiredModel(model=FolderModel(kind="folder", path=str(model)), adapter=None if laid is None else str(laid))
    return StageJob(
        name="merge",
        pipeline="p",
        seed=1,
        device="cpu",
        precision="fp32",
        base=str(folder),
        stage=spec,
        models={"model": wired},
    )


def merged(tmp_path: Path, base: Path, laid: Path | None, /, **stage: Any) -> tuple[dict[str, Any], Path]:
    out = tmp_path / "out"
    out.mkdir()
    return make(job_of(tmp_path, base, laid, **stage), out), out


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model.eval()(input_ids=PROBE).logits
    return found


@pytest.mark.parametrize(
    "more", [{}, {"use_dora": True}, {"use_rslora": True}], ids=["lora", "dora", "rank_stabilised"]
)
def test_plain_transformers_gives_the_logits_of_base_and_adapter(
    tmp_path: Path, base: Path, more: dict[str, Any]
) -> None:
    adapter = make_adapter(tmp_path / "adapter", base, **more)
    summary, out = merged(tmp_path, base, adapter)
    both = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    alone = logits(AutoModelForCausalLM.from_pretrained(base))
    found = logits(AutoModelForCausalLM.from_pretrained(out))
    assert torch.allclose(found, logits(both), atol=1e-5)
    assert not torch.allclose(found, alone, atol=1e-2)
    assert not list(out.glob("adapter*"))
    assert summary["difference"] < 1e-5 < summary["effect"]
    assert summary["parameters"] == make_model().num_parameters()
    assert summary["warnings"] == []


def test_tokenizer_template_and_generation_settings_go_along(tmp_path: Path, base: Path) -> None:
    GenerationConfig(eos_token_id=[0, 4], max_new_tokens=9).save_pretrained(base)
    adapter = make_adapter(tmp_path / "adapter", base)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }} as trained"
    tokenizer.save_pretrained(adapter)
    _, out = merged(tmp_path, base, adapter)
    assert AutoTokenizer.from_pretrained(out).chat_template.endswith(
        "as trained"
    )  # that of the training, not the base's
    assert json.loads((out / "generation_config.json").read_text()) == json.loads(
        (base / "generation_config.json").read_text()
    )


@pytest.mark.parametrize("in_files", [True, False], ids=["in files", "in tokenizer_config.json"])
def test_chat_templates_of_every_name_go_along_and_those_of_the_training_go_first(
    tmp_path: Path, base: Path, in_files: bool
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    (base / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(base, save_jinja_files=in_files)
    adapter = make_adapter(tmp_path / "adapter", base)
    _, out = merged(tmp_path, base, adapter)
    assert AutoTokenizer.from_pretrained(out).chat_template == tokenizer.chat_template
    tokenizer.chat_template = {"default": "{{ messages }} as trained", "tool_use": "{{ tools }} as trained"}
    tokenizer.save_pretrained(
        adapter
    )  # as a checkpoint is written: the templates are files, and tokenizer_config.json has none
    out.rename(tmp_path / "before")
    _, out = merged(tmp_path, base, adapter)
    assert AutoTokenizer.from_pretrained(out).chat_template == tokenizer.chat_template


def test_a_base_without_generation_settings_gets_none_of_ours(tmp_path: Path, base: Path) -> None:
    (base / "generation_config.json").unlink()
    _, out = merged(tmp_path, base, make_adapter(tmp_path / "adapter", base))
    assert not (out / "generation_config.json").exists()


@pytest.mark.parametrize(
    ("asked", "written"), [("auto", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_the_precision_is_the_one_that_was_asked_for(
    tmp_path: Path, base: Path, asked: str, written: torch.dtype
) -> None:
    summary, out = merged(tmp_path, base, make_adapter(tmp_path / "adapter", base), precision=asked)
    assert AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype == written
    assert summary["difference"] <= summary["tolerance"]


def test_an_adapter_that_rounding_would_swallow_is_told(tmp_path: Path, base: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", base, size=1e-4)
    summary, _ = merged(tmp_path, base, adapter, precision="bf16")
    (warning,) = summary["warnings"]
    assert "precision: fp32" in warning
    assert f"warning: {warning}" in summary_lines("merge_adapter", summary)


def test_large_models_are_written_in_shards(tmp_path: Path, base: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", base)
    (tmp_path / "out").mkdir()
    written = merged_weights.write_merged(base, adapter, tmp_path / "out", dtype=None, shard_bytes=8000)
    assert written.is_streamed
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    both = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.allclose(logits(found), logits(both), atol=1e-5)


def test_an_adapter_may_be_named_beside_a_plain_model(tmp_path: Path, base: Path) -> None:
    make_adapter(tmp_path / "mine", base)
    summary, _ = merged(tmp_path, base, None, adapter="mine")
    assert summary["effect"] > 0


@pytest.mark.parametrize(
    ("is_laid", "named", "words"),
    [
        (False, {}, "its model has none"),
        (True, {"adapter": "adapter"}, "has one already"),
        (False, {"adapter": "model"}, r"holds no adapter_config\.json"),
    ],
)
def test_one_adapter_is_merged_no_other_number(
    tmp_path: Path, base: Path, named: dict[str, str], words: str, *, is_laid: bool
) -> None:
    laid = make_adapter(tmp_path / "adapter", base) if is_laid else None
    with pytest.raises(ModelError, match=words):
        merged(tmp_path, base, laid, **named)


def test_packed_weights_are_refused(tmp_path: Path, base: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}})
    )
    with pytest.raises(ModelError, match=r"packed weights \(bitsandbytes\)"):
        merged(tmp_path, base, adapter)


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, base: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", base, size=float("inf"))
    with pytest.raises(ModelError, match="cannot be merged"):
        merged(tmp_path, base, adapter)


def test_a_merge_that_changes_the_answers_writes_nothing(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if peft had lost the adapter: what it merges is the bare base."""
    adapter = make_adapter(tmp_path / "adapter", base)
    monkeypatch.setattr(lora.Linear, "merge", lambda *_, **__: None)
    with pytest.raises(FinefitError, match="differs from base and adapter"):
        merged(tmp_path, base, adapter)
    assert not list((tmp_path / "out").iterdir())


def test_a_file_that_is_not_what_was_written_is_refused(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = make_adapter(tmp_path / "adapter", base)
    written = saved_weights.write_shards

    def torn(folder: Path, *given: Any) -> None:
        written(folder, *given)
        shutil.copyfile(base / "model.safetensors", folder / "model.safetensors")

    monkeypatch.setattr(merged_weights, "write_shards", torn)
    with pytest.raises(FinefitError, match="differs from base and adapter"):
        merged(tmp_path, base, adapter)


def make_rounded_mixture(folder: Path, family: str) -> Path:
    """In bf16, deep, and with experts that say much: rounding sends some tokens to others, which changes their
    answers."""
    model = make_mixture(
        family, num_experts=8, num_hidden_layers=8, hidden_size=64, head_dim=16, tie_word_embeddings=False
    )
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.data *= 4
    model.to(torch.bfloat16).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_that_rounding_sends_to_another_expert_is_no_fault_of_the_merge(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_rounded_mixture(tmp_path / "model", family)
    adapter = make_adapter(tmp_path / "adapter", base, size=0.1, targets=("q_proj", "v_proj"))
    passed: list[torch.Tensor] = []
    plain = merge._logits

    def noted(model: Any, probe: torch.Tensor) -> torch.Tensor:
        passed.append(plain(model, probe))
        return passed[-1]

    monkeypatch.setattr(merge, "_logits", noted)
    summary, out = merged(tmp_path, base, adapter)
    _, wanted, held = passed
    vocabulary = AutoConfig.from_pretrained(base).vocab_size
    probe = torch.randint(vocabulary, (merge._ROWS, merge._TOKENS), generator=torch.Generator().manual_seed(0))
    free = plain(AutoModelForCausalLM.from_pretrained(out, dtype="auto").eval(), probe)
    assert merge._apart(free, wanted) > summary["tolerance"]
    assert summary["difference"] == merge._apart(held, wanted) <= summary["tolerance"]


def test_a_router_that_is_merged_wrongly_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its choices are held while the rest is compared, so it is compared itself."""
    base = make_rounded_mixture(tmp_path / "model", "llama")
    adapter = make_adapter(tmp_path / "adapter", base, size=0.1, targets=("q_proj", "v_proj"))
    copied = merged_weights.copied

    def turned(*given: Any) -> Any:
        sources = copied(*given)
        (name,) = (name for name in sources if "layers.3." in name and name.endswith("gate.weight"))
        stored = sources[name]
        assert isinstance(stored, FileSpan)
        sources[name] = InMemory(stored.read().flip(0))
        return sources

    monkeypatch.setattr(merged_weights, "copied", turned)
    with pytest.raises(FinefitError, match="routers of the merged model"):
        merged(tmp_path, base, adapter)
    assert not list((tmp_path / "out").iterdir())
