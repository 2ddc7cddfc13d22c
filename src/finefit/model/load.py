"""Weights into memory, and the choice of what is trained. Nothing is skipped silently: a pattern that matches nothing
is an error.

A pattern of `tuning.trainable` matches a module whose dotted name ends with it, part by part; `*` stands for one part.
`layers.*.mlp` is the MLP of every layer with everything in it, `layers.0.mlp` that of the first, `norm` every module of
that name; in a vision-language model the name of a tower is that tower. The placeholder for the shared expert of a
mixture that has none lies in every `mlp` and is never trained.
"""

import importlib.util
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, get_args

import peft
import torch
import transformers
from accelerate import infer_auto_device_map, init_empty_weights
from accelerate.utils import CustomDtype, get_balanced_memory
from torch import Tensor, nn
from transformers import AutoConfig, BitsAndBytesConfig, GenerationConfig, PretrainedConfig, PreTrainedModel

from finefit.errors import ModelError, SpecError
from finefit.model.adapter import REFERENCE, attach, load_adapter
from finefit.model.experts import choose_experts, placeholder_experts
from finefit.model.resolve_model import ADAPTER_CONFIG
from finefit.model.saved_weights import whole_shape
from finefit.spec.models import Full, Lora, Subset, Tower, Tuning
from finefit.vision import (
    auto_class,
    is_inside,
    tower_of,
    unused_modules,
    vision_forward_in,
    vision_forward_of,
)

M = TypeVar("M", bound=nn.Module)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_PACKED_DTYPES: dict[int, Any] = {4: CustomDtype.INT4, 8: torch.int8}
_HEAD = "lm_head"
"""Of every vision-language model."""
_KINDS_SHOWN = 24


def load_base(
    folder: Path,
    *,
    device: str,
    dtype: torch.dtype,
    attention: str = "sdpa",
    bits: int | None = None,
    num_cards: int = 1,
) -> PreTrainedModel:
    """Weights go to their device as they are read. `bits`: of the linear layers but the head, with products in `dtype`.
    `num_cards`: that the layers are distributed over."""
    if bits is not None and importlib.util.find_spec("bitsandbytes") is None:
        problem = f"tuning.base_bits {bits} needs bitsandbytes, which is not installed"
        raise SpecError(problem, "pip install 'finefit[gpu]'")
    model: PreTrainedModel
    try:
        config = AutoConfig.from_pretrained(folder)
        model, report = auto_class(config).from_pretrained(
            folder,
            dtype=dtype,
            device_map=_device_map(folder, device, dtype, bits, num_cards),
            output_loading_info=True,
            attn_implementation=attention,
            experts_implementation=choose_experts(),
            quantization_config=_quantisation(bits, dtype, config),
        )
    except (ValueError, OSError) as error:  # an architecture that transformers does not know, an unreadable file
        problem = f"{folder.name} cannot be loaded: {error}"
        raise ModelError(problem, "`finefit doctor` shows the installed versions") from error
    if missing := sorted(report["missing_keys"]):  # transformers would initialise them at random and go on
        problem = f"{folder.name} has no weights for {', '.join(missing[:5])}"
        raise ModelError(problem, "the model's files are incomplete; download it again")
    require_placed(model, folder.name)
    if device == "cpu" and bits == 4:
        # With bf16 on a CPU, bitsandbytes repacks weights in eval mode and rounds their scales: validation would
        # change them.
        for module in model.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
    return model


def require_placed(model: nn.Module, name: str) -> None:
    """A tensor on the meta device has a shape and no values: everything computed from it would be invented."""
    tensors = chain(model.named_parameters(), model.named_buffers())
    if left := sorted({key for key, tensor in tensors if tensor.is_meta}):
        raise ModelError(
            f"{name} was loaded without values for {', '.join(left[:5])}",
            "the model's files are incomplete or of another version; download it again",
        )


def load_for_answers(
    base: Path,
    checkpoint: Path | None,
    *,
    device: str,
    dtype: torch.dtype,
    attention: str = "sdpa",
    bits: int | None = None,
    start: Path | None = None,
    num_cards: int = 1,
) -> nn.Module:
    """The starting model, or the one in a checkpoint or any other folder, ready to generate. `start`: an adapter of the
    starting model."""
    adapter = adapter_to_load(checkpoint, start)
    folder = base if checkpoint is None or adapter else checkpoint
    model: nn.Module = load_base(
        folder, device=device, dtype=dtype, attention=attention, bits=bits, num_cards=num_cards
    )
    model.generation_config = GenerationConfig()  # the model's own penalties would change greedy answers
    return (model if adapter is None else load_adapter(model, adapter)).eval()


def adapter_to_load(checkpoint: Path | None, start: Path | None) -> Path | None:
    """None where the checkpoint is a whole model."""
    if checkpoint is None:
        return start
    return checkpoint if (checkpoint / ADAPTER_CONFIG).exists() else None


def weight_dtype(precision: str, tuning: Tuning) -> torch.dtype:
    """In which weights are loaded. Whole models keep fp32 weights under autocast: half precision would lose small
    updates. A subset is loaded in half precision and its trained part then widened."""
    return torch.float32 if isinstance(tuning, Full) else _DTYPES[precision]


def base_bits(tuning: Tuning) -> int | None:
    return tuning.base_bits if isinstance(tuning, Lora) else None


def starting_adapter(tuning: Tuning, base: Path) -> Path | None:
    return base / tuning.adapter if isinstance(tuning, Lora) and tuning.adapter is not None else None


def quiet() -> None:
    """No progress bars of libraries between our own lines, nor a line for each product in 8 bits."""
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def _quantisation(bits: int | None, dtype: torch.dtype, config: PretrainedConfig) -> BitsAndBytesConfig | None:
    """Embeddings, norms, the head and the other towers of a vision-language model stay in `dtype`."""
    if bits is None:
        return None
    vision_forward, skipped = vision_forward_of(config), None  # None: transformers skips the head by itself
    if vision_forward is not None:
        others = (names for tower, names in vision_forward.towers.items() if tower != "language")
        skipped = [_HEAD, *chain.from_iterable(others)]
    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skipped)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=skipped,
    )


def _device_map(
    folder: Path, device: str, dtype: torch.dtype, bits: int | None, num_cards: int
) -> dict[str, torch.device | int] | None:
    if num_cards > 1:
        free = {card: torch.cuda.mem_get_info(card)[0] for card in range(num_cards)}
        return {**device_map(folder, dtype=dtype, bits=bits, free=free)}
    return {"": device_here(device)} if device != "cpu" or bits else None


def device_here(device: str) -> torch.device:
    """The GPU of this rank by its number: weights are loaded by threads, which would take the first one."""
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)


def device_map(folder: Path, *, dtype: torch.dtype, bits: int | None, free: Mapping[int, int]) -> dict[str, int]:
    """The GPU of every module of a model larger than one: whole layers, GPU after GPU, in equal shares (accelerate's
    own arithmetic), and nothing on the host or on disk, which would be a hundred times slower. `free`: bytes of each
    GPU."""
    config = AutoConfig.from_pretrained(folder)
    with init_empty_weights():
        model = auto_class(config).from_config(config, dtype=dtype)
    model.tie_weights()
    sizes: dict[str, Any] = {
        "dtype": _PACKED_DTYPES[bits] if bits else dtype,
        "special_dtypes": dict.fromkeys(_unpacked(model), dtype) if bits else {},
    }
    whole: Any = list(model._no_split_modules or ())
    balanced = get_balanced_memory(model, max_memory=dict(free), no_split_module_classes=whole, **sizes)
    limits = {card: num_bytes for card, num_bytes in balanced.items() if card in free}
    places = infer_auto_device_map(model, max_memory=limits, no_split_module_classes=whole, **sizes)
    if left := sorted(name for name, place in places.items() if place not in free):
        given = ", ".join(f"{num_bytes / 2**30:.1f} GiB" for num_bytes in free.values())
        raise ModelError(
            f"{folder.name} does not fit on {len(free)} cards with {given} free: {', '.join(left[:3])} would be left "
            "over",
            "free the cards, take more of them, or load the weights in 4 bits",
        )
    return {name: int(place) for name, place in places.items()}


def _unpacked(model: nn.Module) -> list[str]:
    """Tensors that keep their precision: all but the linear layers of the language tower, and the head."""
    head, vision_forward = model.get_output_embeddings(), vision_forward_in(model)  # type: ignore[operator]
    packed = {
        id(module.weight)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not head
        and (vision_forward is None or tower_of(vision_forward, name) == "language")
    }
    return [name for name, parameter in model.named_parameters() if id(parameter) not in packed]


# what is trained


def make_trainable(
    model: PreTrainedModel, tuning: Tuning, *, name: str, base: Path | None = None
) -> PreTrainedModel | peft.PeftModel:
    """`name` is recorded as the base of an adapter. `base`: the folder that `tuning.adapter` is relative to; None, for
    a rehearsal, reads no adapter and makes one of its shape."""
    if isinstance(tuning, Lora):
        return attach(model, tuning, name=name, base=base).train()
    _allow_saving(model)
    if isinstance(tuning, Subset):
        return train_only(model, tuning.trainable).train()
    unused = (*placeholder_experts(model), *unused_modules(model))
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(not is_inside(key, unused))
    return model.train()


def _allow_saving(model: PreTrainedModel) -> None:
    """Some models come with a temperature and without sampling; transformers loads that and refuses to save it."""
    config = getattr(model, "generation_config", None)
    if config is None or _refusal(config) is None:
        return
    config.do_sample = True
    if reason := _refusal(config):
        problem = f"the model's generation_config cannot be saved: {reason}"
        raise ModelError(problem, "fix generation_config.json in its folder")


def _refusal(config: GenerationConfig) -> str | None:
    try:
        config.validate(strict=True)
    except ValueError as error:
        return " ".join(str(error).split())
    return None


def train_only(model: M, patterns: Sequence[str]) -> M:
    """Trained weights are kept in fp32, where small updates are not lost; frozen ones stay as loaded. Autocast brings
    them together."""
    chosen = {name for pattern in patterns for name in _chosen(model, pattern)}
    _require_untied(model, chosen)
    excluded = placeholder_experts(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_is_chosen(name, chosen) and not is_inside(name, excluded))
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)
    return model


def _chosen(model: nn.Module, pattern: str) -> set[str]:
    """Names of modules, or of parameters where the pattern is a tower: one tower may lie inside another."""
    vision_forward = vision_forward_in(model)
    if vision_forward is None or pattern not in get_args(Tower):
        return _matched(model, pattern)
    unused = unused_modules(model)
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return {name for name in names if tower_of(vision_forward, name) == pattern and not is_inside(name, unused)}


def _matched(model: nn.Module, pattern: str) -> set[str]:
    wanted, excluded = pattern.split("."), placeholder_experts(model)
    found = {name for name, _ in model.named_modules() if name and _ends_with(name.split("."), wanted)}
    weighty = {
        name
        for name in found
        if any(True for _ in model.get_submodule(name).parameters()) and not is_inside(name, excluded)
    }
    if not weighty:
        what = "only modules without trainable weights" if found else "no module of the model"
        raise ModelError(f"tuning.trainable: {pattern} matches {what}", f"its modules are {', '.join(_kinds(model))}")
    return weighty


def _ends_with(parts: list[str], wanted: list[str]) -> bool:
    end = parts[-len(wanted) :]
    return len(end) == len(wanted) and all(theirs in ("*", ours) for ours, theirs in zip(end, wanted, strict=True))


def _kinds(model: nn.Module) -> Iterator[str]:
    """Names of modules with weights, `*` for their numbers."""
    kinds = {
        ".".join("*" if part.isdigit() else part for part in name.split(".")): None
        for name, module in model.named_modules()
        if name and any(True for _ in module.parameters())
    }
    yield from list(kinds)[:_KINDS_SHOWN]
    if len(kinds) > _KINDS_SHOWN:
        yield f"and {len(kinds) - _KINDS_SHOWN} more"


def _require_untied(model: nn.Module, chosen: set[str]) -> None:
    """A tensor that two modules share is trained in both."""
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    for names in names_of.values():
        inside = [name for name in names if _is_chosen(name, chosen)]
        if inside and len(inside) < len(names):
            outside = sorted(set(names) - set(inside))[0]
            raise ModelError(
                f"tuning.trainable: {inside[0]} is one tensor with {outside}, which would be trained with it "
                "and is not "
                "to be trained",
                f"name {outside.rsplit('.', 1)[0]} in tuning.trainable too, or leave {inside[0].rsplit('.', 1)[0]} out",
            )


def _is_chosen(parameter: str, modules: set[str]) -> bool:
    parts = parameter.split(".")
    return any(".".join(parts[:end]) in modules for end in range(1, len(parts) + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    trainable: int
    total: int


def counts(model: nn.Module) -> Counts:
    """A weight that is packed into bits counts with its unpacked values. A frozen copy of the adapter does not
    count."""
    sizes = [(_num_values(p), p.requires_grad) for name, p in model.named_parameters() if f".{REFERENCE}." not in name]
    return Counts(trainable=sum(size for size, is_trained in sizes if is_trained), total=sum(size for size, _ in sizes))


def _num_values(parameter: Tensor) -> int:
    packed = getattr(parameter, "quant_state", None)
    return whole_shape(parameter).numel() if packed is None else math.prod(packed.shape)
