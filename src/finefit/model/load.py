"""Weights into memory, adapters onto them, trainable parts chosen. Nothing is skipped in silence: a target that matches nothing is an error."""

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from finefit.errors import ModelError, RunError, SpecError
from finefit.spec.schema import Full, Lora, Subset, Tuning

ADAPTER = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    trainable: int
    total: int


def load_base(folder: Path, *, device: str, dtype: torch.dtype, attention: str = "sdpa", bits: int | None = None) -> PreTrainedModel:
    place = {"": device} if device != "cpu" else None
    model: PreTrainedModel
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            device_map=place,
            output_loading_info=True,
            attn_implementation=attention,
            quantization_config=_quantisation(bits),
        )
    except (ValueError, OSError) as error:  # an architecture that transformers does not know, a file that it cannot read
        raise ModelError(f"{folder.name} cannot be loaded: {error}", "`finefit doctor` shows the installed versions") from error
    if missing := sorted(report["missing_keys"]):  # transformers would make them up and go on
        raise ModelError(f"{folder.name} has no weights for {', '.join(missing[:5])}", "the model's files are incomplete; fetch it again")
    return model


def weight_dtype(precision: str, tuning: Tuning) -> torch.dtype:
    """Whole models keep fp32 weights under autocast: bf16 ones would lose small updates."""
    return torch.bfloat16 if precision == "bf16" and not isinstance(tuning, Full) else torch.float32


def base_bits(tuning: Tuning) -> int | None:
    return tuning.base_bits if isinstance(tuning, Lora) else None


def _quantisation(bits: int | None) -> BitsAndBytesConfig | None:
    if bits is None:
        return None
    if importlib.util.find_spec("bitsandbytes") is None:
        raise SpecError("tuning.base_bits 4 needs bitsandbytes, which is not installed", "pip install 'finefit[gpu]'")
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)


def make_trainable(model: PreTrainedModel, tuning: Tuning, *, name: str) -> PreTrainedModel | peft.PeftModel:
    """`name` is recorded as the base of an adapter."""
    match tuning:
        case Full():
            _allow_saving(model)
            return model.requires_grad_(True).train()
        case Lora():
            config = peft.LoraConfig(
                r=tuning.rank,
                lora_alpha=tuning.alpha,
                lora_dropout=tuning.dropout,
                target_modules=resolve_targets(model, tuning),
                task_type="CAUSAL_LM",
            )
            try:
                adapted = peft.get_peft_model(model, config)
            except ValueError as error:  # layers that peft knows of and cannot adapt
                raise ModelError(f"{type(model).__name__} cannot carry these adapters: {error}", "name others in tuning.targets") from error
            adapted.peft_config["default"].base_model_name_or_path = name
            adapted.peft_config["default"].inference_mode = False
            return adapted.train()
        case Subset():
            raise SpecError("tuning.kind subset is not built yet")


def _allow_saving(model: PreTrainedModel) -> None:
    """Some models come with a temperature and without sampling; transformers loads that and refuses to save it."""
    config = model.generation_config
    if config is None or _refusal(config) is None:
        return
    config.do_sample = True
    if reason := _refusal(config):
        raise ModelError(f"the model's generation_config cannot be saved: {reason}", "mend generation_config.json in its folder")


def _refusal(config: GenerationConfig) -> str | None:
    try:
        config.validate(strict=True)
    except ValueError as error:
        return " ".join(str(error).split())
    return None


def resolve_targets(model: PreTrainedModel, tuning: Lora) -> list[str]:
    """Names of the modules that get an adapter, and of no others."""
    head = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D) and module is not head}
    if not linear:
        raise ModelError(f"{type(model).__name__} has no linear layer that could carry an adapter", "train it in full: `tuning: {kind: full}`")
    if tuning.targets == "all-linear":
        return _shortest(set(linear), model)
    chosen: set[str] = set()
    for target in tuning.targets:
        matched = {name for name in linear if name == target or name.endswith(f".{target}")}
        if not matched:
            known = sorted({name.rsplit(".", 1)[-1] for name in linear})
            raise ModelError(f"tuning.targets: {target} matches no linear layer of the model", f"its linear layers are {', '.join(known)}")
        chosen |= matched
    return _shortest(chosen, model)


def _shortest(chosen: set[str], model: PreTrainedModel) -> list[str]:
    """Last parts of the names where they mean the same modules, as other tools expect them in adapter_config.json; else whole names."""
    last = {name.rsplit(".", 1)[-1] for name in chosen}
    meant = {name for name, _ in model.named_modules() if name.rsplit(".", 1)[-1] in last}
    return sorted(last if meant == chosen else chosen)


def restore_weights(model: nn.Module, checkpoint: Path) -> None:
    """Puts a trainable model back to what `save_weights` wrote, tensor by tensor."""
    if isinstance(model, peft.PeftModel):
        stored = load_file(checkpoint / ADAPTER)
        _same_tensors(stored, peft.get_peft_model_state_dict(model, save_embedding_layers=False), checkpoint)
        peft.set_peft_model_state_dict(model, stored)
        return
    target = model.state_dict()
    for shard in sorted(checkpoint.glob("model*.safetensors")):
        for name, tensor in load_file(shard).items():
            if name not in target or target[name].shape != tensor.shape:
                raise RunError(f"{checkpoint.name} holds {name}, which this model does not have in that shape")
            target.pop(name).copy_(tensor)
    _only_tied_left(target, model, checkpoint)


def _same_tensors(stored: dict[str, Tensor], wanted: dict[str, Tensor], checkpoint: Path) -> None:
    odd = sorted(stored.keys() ^ wanted.keys()) or sorted(name for name in wanted if stored[name].shape != wanted[name].shape)
    if odd:
        raise RunError(f"{checkpoint.name} holds an adapter for another model or other targets: {', '.join(odd[:3])} differ")


def _only_tied_left(left: dict[str, Tensor], model: nn.Module, checkpoint: Path) -> None:
    """Tied tensors are stored once, under one of their names."""
    restored = {t.data_ptr() for name, t in model.state_dict().items() if name not in left}
    if missing := [name for name, t in left.items() if t.data_ptr() not in restored]:
        raise RunError(f"{checkpoint.name} lacks {', '.join(sorted(missing)[:3])}")


def load_for_answers(
    base: Path, checkpoint: Path | None, *, device: str, dtype: torch.dtype, attention: str = "sdpa", bits: int | None = None
) -> nn.Module:
    """The starting model, or the one that a checkpoint holds, ready to generate."""
    adapter = checkpoint if checkpoint is not None and (checkpoint / ADAPTER).exists() else None
    model: nn.Module = load_base(base if checkpoint is None or adapter else checkpoint, device=device, dtype=dtype, attention=attention, bits=bits)
    model.generation_config = GenerationConfig()  # else the model's own penalties would bend the greedy answers
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    return model.eval()


def save_weights(model: nn.Module, folder: Path) -> None:
    """adapter_model.safetensors and adapter_config.json, or the whole model: peft and transformers read the folder as it is."""
    if isinstance(model, peft.PeftModel):
        model.save_pretrained(folder, save_embedding_layers=False)
        _sort_targets(folder / "adapter_config.json")
    else:
        assert isinstance(model, PreTrainedModel)
        model.save_pretrained(folder)


def _sort_targets(config: Path) -> None:
    """peft writes a set in whatever order it has; equal checkpoints shall be equal files."""
    values = json.loads(config.read_text(encoding="utf-8"))
    values["target_modules"] = sorted(values["target_modules"])
    config.write_text(json.dumps(values, indent=2, sort_keys=True), encoding="utf-8")


def quiet() -> None:
    """No progress bars of libraries between our own lines."""
    transformers.utils.logging.disable_progress_bar()


def counts(model: nn.Module) -> Counts:
    return Counts(
        trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        total=sum(p.numel() for p in model.parameters()),
    )


def weight_bytes(model: nn.Module) -> int:
    """What `save_weights` will write."""
    whole = not isinstance(model, peft.PeftModel)
    return sum(p.numel() * p.element_size() for p in model.parameters() if whole or p.requires_grad)
