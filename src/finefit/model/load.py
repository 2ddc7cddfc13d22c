"""Loads weights into memory and chooses what is trained. A pattern that matches nothing is an error.

A pattern of `tuning.trainable` matches a module whose dotted name ends with it, part by part; `*` stands for one part.
`layers.*.mlp` is the MLP of every layer with everything in it, `layers.0.mlp` that of the first, `norm` every module of
that name; in a vision-language model the name of a tower is that tower. The all-zero placeholder of a mixture without a
shared expert is inside every `mlp` and is never trained.
"""

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, get_args

import peft
import torch
import transformers
from accelerate import infer_auto_device_map, init_empty_weights
from accelerate.utils import CustomDtype, get_balanced_memory
from huggingface_hub.utils import are_progress_bars_disabled  # type: ignore[attr-defined]
from torch import nn
from transformers import AutoConfig, BitsAndBytesConfig, GenerationConfig, PretrainedConfig, PreTrainedModel

from finefit.errors import ModelError, SpecError
from finefit.facts.files import read_config, reading_model, require_small_texts
from finefit.model.adapter import REFERENCE, attach, load_adapter
from finefit.model.experts import choose_experts, placeholder_experts
from finefit.model.quantised import packed_weights, quantization_of
from finefit.model.resolve_model import ADAPTER_CONFIG
from finefit.model.saved_weights import full_shape
from finefit.model.unpacked import never_packed
from finefit.spec.models import Full, Lora, Subset, Tower, Tuning
from finefit.vision import auto_class, is_inside, tower_of, unused_modules, vision_forward_in

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_PACKED_DTYPES: dict[int, Any] = {4: CustomDtype.INT4, 8: torch.int8}
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
    """Reads weights straight to their device. `bits` applies to the linear layers except the head; products are
    computed in `dtype`. `num_cards` is the number of cards that the layers are distributed over. Weights that are
    stored packed are loaded as they are."""
    values = read_config(folder)
    if (packed := packed_weights(values)) is not None:
        bits = packed.bits
    if bits is not None and importlib.util.find_spec("bitsandbytes") is None:
        what = f"tuning.base_bits {bits}" if packed is None else f"{folder.name}, stored in {bits} bits,"
        problem = f"{what} needs bitsandbytes, which is not installed"
        raise SpecError(problem, "pip install 'finefit[gpu]'")
    model: PreTrainedModel
    places: Mapping[str, torch.device | int] | None = None
    if num_cards > 1:
        free = {card: torch.cuda.mem_get_info(card)[0] for card in range(num_cards)}
        places = device_map(folder, dtype=dtype, bits=bits, free=free)
    elif device != "cpu" or bits:
        places = {"": device_here(device)}
    with reading_model(folder, "`finefit doctor` shows the installed versions"):
        config = AutoConfig.from_pretrained(folder)
        if packed is not None:  # whose config.json says in which precision products were computed once
            config.quantization_config = {**(quantization_of(values) or {}), "bnb_4bit_compute_dtype": dtype}
        model, report = auto_class(config).from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            device_map=places,
            output_loading_info=True,
            attn_implementation=attention,
            experts_implementation=choose_experts(),
            quantization_config=None if packed is not None else _quantisation(bits, dtype, config),
        )
    if missing := sorted(report["missing_keys"]):  # transformers would initialise them at random and go on
        problem = f"{folder.name} has no weights for {', '.join(missing[:5])}"
        raise ModelError(problem, "the model's files are incomplete; download it again")
    # a tensor on the meta device has a shape and no values: everything computed from it would be invented
    tensors = chain(model.named_parameters(), model.named_buffers())
    if left := sorted({key for key, tensor in tensors if tensor.is_meta}):
        problem = f"{folder.name} was loaded without values for {', '.join(left[:5])}"
        raise ModelError(problem, "the model's files are incomplete or of another version; download it again")
    if device == "cpu" and bits:
        # What is not packed lies in the mapped file and would keep all of it in memory.
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.clone()
    if device == "cpu" and bits == 4:
        # With bf16 on a CPU, bitsandbytes repacks weights in eval mode and rounds their scales: validation would
        # change them.
        for module in model.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
    return model


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Makes a folder that transformers can load from a model in one GGUF file."""
    auto = transformers.AutoModelForCausalLM
    loaded = auto.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    left_out = ("quantization_config", "_name_or_path")
    config = type(loaded.config)(**{k: v for k, v in loaded.config.to_dict().items() if k not in left_out})
    plain = auto.from_config(config, dtype=torch.float32)  # one loaded from GGUF refuses to be saved
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers takes the GGUF's <|im_start|> for the end token; the model's config is right
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config.pad_token_id)
    tokenizer.save_pretrained(folder)


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
    """The starting model with its adapter `start`, or with the one in a checkpoint or other folder, ready to
    generate."""
    adapter = adapter_to_load(checkpoint, start)
    folder = base if checkpoint is None or adapter else checkpoint
    model = load_base(folder, device=device, dtype=dtype, attention=attention, bits=bits, num_cards=num_cards)
    model.generation_config = GenerationConfig()  # the model's own penalties would change greedy answers
    adapted: nn.Module = model if adapter is None else load_adapter(model, adapter)
    return adapted.eval()


def adapter_to_load(checkpoint: Path | None, start: Path | None) -> Path | None:
    """None if the checkpoint is a whole model."""
    if checkpoint is None:
        return start
    return checkpoint if (checkpoint / ADAPTER_CONFIG).exists() else None


def weight_dtype(precision: str, tuning: Tuning) -> torch.dtype:
    """The dtype in which weights are loaded. A model trained whole keeps fp32 weights under autocast, because half
    precision would lose small updates. If only a subset is trained, the model is loaded in half precision and the
    trained part is then widened."""
    return torch.float32 if isinstance(tuning, Full) else _DTYPES[precision]


def base_bits(tuning: Tuning) -> int | None:
    return tuning.base_bits if isinstance(tuning, Lora) else None


def starting_adapter(tuning: Tuning, base: Path) -> Path | None:
    return base / tuning.adapter if isinstance(tuning, Lora) and tuning.adapter is not None else None


def quiet() -> None:
    """Hides the progress bars of libraries. `finefit/__init__.py` quiets the log of bitsandbytes, because it begins
    with its import."""
    transformers.utils.logging.disable_progress_bar()


@contextmanager
def quiet_inside() -> Iterator[None]:
    """In a program that is not ours, which gets its progress bars back."""
    are_shown = transformers.utils.logging.is_progress_bar_enabled() and not are_progress_bars_disabled()
    quiet()
    try:
        yield
    finally:
        if are_shown:
            transformers.utils.logging.enable_progress_bar()


def _quantisation(bits: int | None, dtype: torch.dtype, config: PretrainedConfig) -> BitsAndBytesConfig | None:
    """The quantised linear layers. Embeddings, norms, the head and the other towers of a vision-language model stay in
    `dtype`."""
    if bits is None:
        return None
    skipped = never_packed(config)
    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=None if skipped is None else list(skipped))
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=None if skipped is None else list(skipped),
    )


def device_here(device: str) -> torch.device:
    """This rank's GPU by number: weights are loaded by threads, which would otherwise use the first GPU."""
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)


def device_map(folder: Path, *, dtype: torch.dtype, bits: int | None, free: Mapping[int, int]) -> dict[str, int]:
    """The GPU of every module of a model larger than one: whole layers, GPU after GPU, in equal shares (accelerate's
    own arithmetic), and nothing on the host or on disk, a hundred times slower. `free`: bytes of each GPU."""
    require_small_texts(folder)
    with reading_model(folder), init_empty_weights():
        config = AutoConfig.from_pretrained(folder)
        model = auto_class(config).from_config(config, dtype=dtype)
    model.tie_weights()
    sizes: dict[str, Any] = {"dtype": dtype, "special_dtypes": {}}
    if bits:
        # all but the linear layers of the language tower keep their precision, and so does the head
        head, vision_forward = model.get_output_embeddings(), vision_forward_in(model)
        packed = {
            id(module.weight)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
            and module is not head
            and (vision_forward is None or tower_of(vision_forward, name) == "language")
        }
        unpacked = [name for name, parameter in model.named_parameters() if id(parameter) not in packed]
        sizes = {"dtype": _PACKED_DTYPES[bits], "special_dtypes": dict.fromkeys(unpacked, dtype)}
    whole: Any = list(model._no_split_modules or ())
    balanced = get_balanced_memory(model, max_memory=dict(free), no_split_module_classes=whole, **sizes)
    limits = {card: num_bytes for card, num_bytes in balanced.items() if card in free}
    places = infer_auto_device_map(model, max_memory=limits, no_split_module_classes=whole, **sizes)
    if left := sorted(name for name, place in places.items() if place not in free):
        given = ", ".join(f"{num_bytes / 2**30:.1f} GiB" for num_bytes in free.values())
        problem = f"{folder.name} does not fit on {len(free)} cards with {given} free"
        remedy = "free the cards, take more of them, or load the weights in 4 bits"
        raise ModelError(f"{problem}: {', '.join(left[:3])} would be left over", remedy)
    return {name: int(place) for name, place in places.items()}


def make_trainable(
    model: PreTrainedModel, tuning: Tuning, *, name: str, base: Path | None = None
) -> PreTrainedModel | peft.PeftModel:
    """`name` is recorded as the base of an adapter. `base` is the folder that `tuning.adapter` is relative to; if it is
    None, as in a rehearsal, no adapter is read and a new one of its shape is made."""
    if isinstance(tuning, Lora):
        return attach(model, tuning, name=name, base=base).train()
    _allow_saving(model)
    if isinstance(tuning, Subset):
        _train_only(model, tuning.trainable)
        return model.train()
    unused = (*placeholder_experts(model), *unused_modules(model))
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(not is_inside(key, unused))
    return model.train()


def _allow_saving(model: PreTrainedModel) -> None:
    """Some models ship a temperature with sampling turned off; transformers loads that setting but refuses to save
    it."""
    config = getattr(model, "generation_config", None)
    if config is None:
        return
    try:
        config.validate(strict=True)
    except ValueError:
        config.do_sample = True
        try:
            config.validate(strict=True)
        except ValueError as error:
            problem = f"the model's generation_config cannot be saved: {' '.join(str(error).split())}"
            raise ModelError(problem, "fix generation_config.json in its folder") from None


def _train_only(model: nn.Module, patterns: Sequence[str]) -> None:
    """Trained weights become fp32, where small updates are not lost; autocast brings trained and frozen weights
    together."""
    chosen = {name for pattern in patterns for name in _chosen(model, pattern)}
    _require_untied(model, chosen)
    excluded = placeholder_experts(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_is_chosen(name, chosen) and not is_inside(name, excluded))
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)


def _chosen(model: nn.Module, pattern: str) -> set[str]:
    """Names of the modules that match, or of parameters if the pattern is a tower, since one tower may be inside
    another."""
    vision_forward = vision_forward_in(model)
    if vision_forward is not None and pattern in get_args(Tower):
        unused = unused_modules(model)
        names = (name for name, _ in model.named_parameters(remove_duplicate=False))
        return {name for name in names if tower_of(vision_forward, name) == pattern and not is_inside(name, unused)}
    wanted, excluded = pattern.split("."), placeholder_experts(model)
    with_weights = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    found = {name for name, _ in model.named_modules() if name and _ends_with(name.split("."), wanted)}
    if weighty := {name for name in found.intersection(with_weights) if not is_inside(name, excluded)}:
        return weighty
    what = "only modules without trainable weights" if found else "no module of the model"
    starred = (".".join("*" if part.isdigit() else part for part in name.split(".")) for name in with_weights)
    kinds = list(dict.fromkeys(starred))
    more = [f"and {len(kinds) - _KINDS_SHOWN} more"] if len(kinds) > _KINDS_SHOWN else []
    known = ", ".join([*kinds[:_KINDS_SHOWN], *more])
    raise ModelError(f"tuning.trainable: {pattern} matches {what}", f"its modules are {known}")


def _ends_with(parts: list[str], wanted: list[str]) -> bool:
    end = parts[-len(wanted) :]
    return len(end) == len(wanted) and all(theirs in ("*", ours) for ours, theirs in zip(end, wanted, strict=True))


def _require_untied(model: nn.Module, chosen: set[str]) -> None:
    """Refuses a shared tensor if only one of its modules is chosen, because it would be trained in both."""
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    for names in names_of.values():
        inside = [name for name in names if _is_chosen(name, chosen)]
        if inside and len(inside) < len(names):
            outside = sorted(set(names) - set(inside))[0]
            raise ModelError(
                f"tuning.trainable: {inside[0]} is one tensor with {outside}, which would be trained with it and is "
                "not to be trained",
                f"name {outside.rsplit('.', 1)[0]} in tuning.trainable too, or leave {inside[0].rsplit('.', 1)[0]} out",
            )


def _is_chosen(parameter: str, modules: set[str]) -> bool:
    parts = parameter.split(".")
    return any(".".join(parts[:end]) in modules for end in range(1, len(parts) + 1))


class Counts(NamedTuple):
    trainable: int
    total: int


def counts(model: nn.Module) -> Counts:
    """Counts parameters. A packed weight counts with its unpacked values; a frozen copy of the adapter does not
    count."""
    sizes = {True: 0, False: 0}
    for parameter in (p for name, p in model.named_parameters() if f".{REFERENCE}." not in name):
        packed = getattr(parameter, "quant_state", None)
        values = full_shape(parameter).numel() if packed is None else math.prod(packed.shape)
        sizes[parameter.requires_grad] += values
    return Counts(trainable=sizes[True], total=sum(sizes.values()))
