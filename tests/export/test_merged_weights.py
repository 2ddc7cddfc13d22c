"""A merge that goes tensor by tensor equals base and adapter, in families whose files and modules differ in form."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from finefit.errors import ModelError
from finefit.model.merged_weights import write_merged
from tests.conftest import make_model_folder, make_tokenizer
from tests.merged_models import FAMILIES, make_family, save_adapter
from tests.mixtures import make_mixture

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings(
    "ignore:(?s).*tie_word_embeddings", "ignore:.*Setting `save_embedding_layers`", "ignore:(?s).*no longer tied"
)
"""Peft's own about what these tests are about."""
PROBE = torch.arange(5, 45).reshape(2, 20)


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model.eval()(input_ids=PROBE).logits
    return found


def require_equal(base: Path, adapter: Path, out: Path, *, atol: float = 1e-5) -> None:
    wanted = logits(peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter))
    alone = logits(AutoModelForCausalLM.from_pretrained(base))
    found = logits(AutoModelForCausalLM.from_pretrained(out))
    scale = float(wanted.abs().max())
    assert float((found - wanted).abs().max()) <= atol * scale
    assert float((found - alone).abs().max()) > 100 * atol * scale


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.mark.parametrize("kind", FAMILIES)
def test_merged_equals_base_and_adapter_in_every_family(kind: str, tmp_path: Path, out: Path) -> None:
    base = tmp_path / "base"
    make_family(kind).save_pretrained(base)
    # in mixtures, peft takes the linear layers that experts had before transformers 5 for those of today
    mixed = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]} if kind in ("qwen3_moe", "mixtral") else {}
    adapter = save_adapter(tmp_path / "adapter", base, **mixed)
    written = write_merged(base, adapter, out, dtype=None, shard_bytes=20_000)
    assert written.is_streamed
    require_equal(base, adapter, out)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("targets", ["attention", "experts"])
def test_a_built_mixture_is_merged_with_its_experts(family: str, targets: str, tmp_path: Path, out: Path) -> None:
    base = tmp_path / "base"
    make_mixture(family, num_experts=3).save_pretrained(base)
    config: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
    if targets == "experts":
        config["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapter = save_adapter(tmp_path / "adapter", base, **config)
    written = write_merged(base, adapter, out, dtype=None)
    assert written.is_streamed
    merged_experts = [name for name in written.merged if ".experts." in name]
    assert len(merged_experts) == (0 if targets == "attention" else 2 * 3 * 3)
    require_equal(base, adapter, out)
    ours, theirs = load_file(out / "model.safetensors"), load_file(base / "model.safetensors")
    assert ours.keys() == theirs.keys()


@pytest.mark.parametrize(
    "config",
    [
        {"use_dora": True},
        {"use_rslora": True},
        {"alpha_pattern": {"q_proj": 3}, "rank_pattern": {"v_proj": 2}},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["lm_head", "embed_tokens"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"trainable_token_indices": [7, 8, 9]},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_every_kind_of_trained_tensor_is_in_the_merged_model(
    config: dict[str, Any], tmp_path: Path, out: Path, *, is_tied: bool
) -> None:
    base = tmp_path / "base"
    make_family("llama", tie_word_embeddings=is_tied, attention_bias=True).save_pretrained(base)
    adapter = save_adapter(tmp_path / "adapter", base, **config)
    write_merged(base, adapter, out, dtype=None)
    require_equal(base, adapter, out)


@pytest.mark.parametrize("targets", [["q_proj"], ["lm_head", "q_proj"]], ids=["tied", "untied"])
def test_a_tied_head_stays_tied_unless_it_is_trained_alone(targets: list[str], tmp_path: Path, out: Path) -> None:
    base = tmp_path / "base"
    make_family("llama", tie_word_embeddings=True).save_pretrained(base)
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=targets)
    written = write_merged(base, adapter, out, dtype=None)
    is_untied = "lm_head" in targets
    assert written.is_untied == is_untied
    assert ("lm_head.weight" in load_file(out / "model.safetensors")) == is_untied
    assert AutoConfig.from_pretrained(out).tie_word_embeddings != is_untied


def test_what_the_adapter_does_not_change_is_copied_byte_for_byte(tmp_path: Path, out: Path) -> None:
    base = tmp_path / "base"
    make_family("llama").to(torch.bfloat16).save_pretrained(base)
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    write_merged(base, adapter, out, dtype=torch.bfloat16)
    ours, theirs = load_file(out / "model.safetensors"), load_file(base / "model.safetensors")
    changed = {name for name in ours if not torch.equal(ours[name], theirs[name])}
    assert changed == {name for name in theirs if "q_proj" in name}
    assert {tensor.dtype for tensor in ours.values()} == {torch.bfloat16}


def test_each_weight_is_rounded_once(tmp_path: Path, out: Path) -> None:
    """Summed in bf16, an update smaller than half a step of the weight would be lost on the way."""
    base = tmp_path / "base"
    make_family("llama").to(torch.bfloat16).save_pretrained(base)
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    write_merged(base, adapter, out, dtype=torch.bfloat16)
    whole = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    exact = whole.merge_and_unload().state_dict()
    for name, tensor in load_file(out / "model.safetensors").items():
        assert torch.equal(tensor, exact[name].to(torch.bfloat16)), name


def test_a_whole_model_is_copied_in_the_precision_that_was_asked_for(tmp_path: Path, out: Path) -> None:
    base = make_model_folder(tmp_path / "base")
    written = write_merged(base, None, out, dtype=torch.float16)
    assert written.merged == ()
    before = load_file(base / "model.safetensors")
    for name, tensor in load_file(out / "model.safetensors").items():
        assert torch.equal(tensor, before[name].to(torch.float16))
    assert AutoConfig.from_pretrained(out).dtype == torch.float16


def test_an_adapter_of_another_model_is_refused(tmp_path: Path, out: Path) -> None:
    make_family("llama").save_pretrained(tmp_path / "base")
    make_family("llama", hidden_size=16).save_pretrained(tmp_path / "other")
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "other")
    with pytest.raises(ModelError):
        write_merged(tmp_path / "base", adapter, out, dtype=None)
    assert not list(out.iterdir())


MERGE = """
import resource, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from finefit.errors import ModelError
from finefit.export.merged import merge_base, write_merged_folder
from finefit.export.structure import folder_problems
from finefit.export.subject import open_subject
from finefit.facts.machine import read_peak_resident_bytes
from finefit.model.load import load_base
adapter, out = map(Path, sys.argv[1:3])
subject = open_subject(str(adapter))
base = merge_base(subject, "original", out)
resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))
try:
    load_base(subject.base, device="cpu", dtype=torch.bfloat16)
except (MemoryError, RuntimeError, ModelError) as error:
    print("loaded whole:", type(error).__name__)
Path("/proc/self/clear_refs").write_text("5")
before = read_peak_resident_bytes()
assert write_merged_folder(subject, base, out, "bf16").is_streamed
print("peak", read_peak_resident_bytes() - before)
print("problems", list(folder_problems(subject, out, base, "bf16")))
"""


def save_large(folder: Path, config: LlamaConfig) -> int:
    """A file for each layer; their random numbers are the same at another scale. Returns the bytes of the tensors."""
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    torch.manual_seed(0)
    values = {shape: (torch.randn(shape) / 50).to(torch.bfloat16) for shape in set(shapes.values())}
    places = {name: name.split(".")[2] if ".layers." in name else "ends" for name in shapes}
    folder.mkdir()
    for at, place in enumerate(dict.fromkeys(places.values())):
        tensors = {name: values[shape] * (1 + at / 64) for name, shape in shapes.items() if places[name] == place}
        save_file(tensors, folder / f"model-{place}.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: f"model-{place}.safetensors" for name, place in places.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return sum(2 * shape.numel() for shape in shapes.values())


def save_large_adapter(folder: Path, base: Path, config: LlamaConfig) -> None:
    """Without the base's weights in memory."""
    lora = peft.LoraConfig(r=8, target_modules=["q_proj", "down_proj", "lm_head"], task_type="CAUSAL_LM")
    with torch.device("meta"):
        adapted = peft.get_peft_model(LlamaForCausalLM(config), lora)
    names = {name.replace(".default", ""): p.shape for name, p in adapted.named_parameters() if "lora_" in name}
    lora.base_model_name_or_path = str(base)
    lora.save_pretrained(folder)
    torch.manual_seed(1)
    tensors = {name: torch.randn(shape) / 50 for name, shape in names.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    make_tokenizer().save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_model_of_4_gib_is_merged_and_compared_in_2_gib_of_memory(tmp_path: Path, out: Path) -> None:
    """Under a limit of the kernel, under which the model cannot be loaded whole."""
    if shutil.disk_usage(tmp_path).free < 12 << 30:
        pytest.skip("needs 12 GiB of disk")
    config = LlamaConfig(
        vocab_size=len(make_tokenizer()),
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=36,
        num_attention_heads=16,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    num_bytes = save_large(base, config)
    assert num_bytes > 4 << 30
    save_large_adapter(adapter, base, config)
    command = [sys.executable, "-W", "ignore", "-c", MERGE, str(adapter), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("peak", "problems")))
    assert "loaded whole:" in done.stdout
    assert said["problems"] == "[]"
    assert int(said["peak"]) < 512 << 20
    assert sum(file.stat().st_size for file in out.glob("*.safetensors")) >= num_bytes
