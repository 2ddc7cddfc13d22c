"""Weights into memory, adapters onto them, trainable parts chosen. Nothing is skipped in silence: a target that matches nothing is an error."""

import importlib.util
import json
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, BitsAndBytesConfig, GenerationConfig, PretrainedConfig, PreTrainedModel

from finefit.errors import ModelError, RunError, SpecError
from finefit.model.adapter import REFERENCE, TRAINED, attach
from finefit.model.adapter import as_reference as as_reference
from finefit.model.adapter import freeze_reference as freeze_reference
from finefit.model.adapter import resolve_targets as resolve_targets
from finefit.model.adapter_files import CONFIG as ADAPTER_CONFIG
from finefit.model.adapter_files import WEIGHTS as ADAPTER
from finefit.model.custom import load_own, own_of, save_own
from finefit.model.custom_files import written
from finefit.model.experts import choose_experts, experts_of, stand_ins_in
from finefit.model.foreign import with_adapter
from finefit.model.kept import Kept, save_part
from finefit.model.sight import auto_class, sight_in, sight_of
from finefit.model.sight.unused import is_among, unused_in
from finefit.model.spread import spread
from finefit.model.stored import Stored
from finefit.model.subset import train_only
from finefit.spec.models import CustomModel, Full, Lora, Subset, Tuning

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_HEAD = "lm_head"
"""As every model that sees calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    trainable: int
    total: int


def load_base(
    folder: Path,
    *,
    device: str,
    dtype: torch.dtype,
    attention: str = "sdpa",
    bits: int | None = None,
    num_cards: int = 1,
) -> PreTrainedModel:
    """Weights go to their device as they are read. `bits`: of the linear layers but the head; `dtype` is then what products are taken in.
    `num_cards`: that the layers are spread over."""
    if bits is not None and importlib.util.find_spec("bitsandbytes") is None:
        raise SpecError(
            f"tuning.base_bits {bits} needs bitsandbytes, which is not installed", "pip install 'finefit[gpu]'"
        )
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
    except (
        ValueError,
        OSError,
    ) as error:  # an architecture that transformers does not know, a file that it cannot read
        raise ModelError(
            f"{folder.name} cannot be loaded: {error}", "`finefit doctor` shows the installed versions"
        ) from error
    if missing := sorted(report["missing_keys"]):  # transformers would make them up and go on
        raise ModelError(
            f"{folder.name} has no weights for {', '.join(missing[:5])}",
            "the model's files are incomplete; fetch it again",
        )
    require_placed(model, folder.name)
    if device == "cpu" and bits == 4:
        _keep_packed(model)
    return model


def load_custom(
    model: CustomModel, base: Path, *, device: str, dtype: torch.dtype, seed: int, checkpoint: Path | None = None
) -> nn.Module:
    """A model of the user's own, with the weights of a checkpoint in the place of those that it starts from. `base`: where its paths start."""
    weights = checkpoint if checkpoint is not None else None if model.weights is None else base / model.weights
    return load_own(written(model, base), weights, device=device, dtype=dtype, seed=seed)


def _device_map(
    folder: Path, device: str, dtype: torch.dtype, bits: int | None, num_cards: int
) -> dict[str, torch.device | int] | None:
    if num_cards > 1:
        free = {card: torch.cuda.mem_get_info(card)[0] for card in range(num_cards)}
        return {**spread(folder, dtype=dtype, bits=bits, free=free)}
    return {"": _place(device)} if device != "cpu" or bits else None


def _place(device: str) -> torch.device:
    """The card of this rank by its number: weights are loaded by threads, which would take the first one."""
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)


def require_placed(model: nn.Module, name: str) -> None:
    """A tensor on the meta device has a shape and no values: everything after it would be made up, or fail far from here."""
    tensors = chain(model.named_parameters(), model.named_buffers())
    if left := sorted({key for key, tensor in tensors if tensor.is_meta}):
        raise ModelError(
            f"{name} was loaded without values for {', '.join(left[:5])}",
            "the model's files are incomplete or of another version; fetch it again",
        )


def _keep_packed(model: nn.Module) -> None:
    """Where a CPU has bf16, bitsandbytes packs weights anew for a model that does not train, and rounds their scales: validation would move them."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def weight_dtype(precision: str, tuning: Tuning) -> torch.dtype:
    """What weights are loaded in. Whole models keep fp32 weights under autocast: halves would lose small updates. A subset is loaded in halves
    and its trained part then widened."""
    return torch.float32 if isinstance(tuning, Full) else _DTYPES[precision]


def base_bits(tuning: Tuning) -> int | None:
    return tuning.base_bits if isinstance(tuning, Lora) else None


def _quantisation(bits: int | None, dtype: torch.dtype, config: PretrainedConfig) -> BitsAndBytesConfig | None:
    """Embeddings, norms and head stay as they are stored, in `dtype`, and so does what is not the language tower of a model that sees."""
    if bits is None:
        return None
    whole = _left_whole(config)
    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=whole)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=whole,
    )


def _left_whole(config: PretrainedConfig) -> list[str] | None:
    """None: what transformers leaves by itself, the head."""
    sight = sight_of(config)
    return (
        None
        if sight is None
        else [_HEAD, *(name for tower, names in sight.towers.items() if tower != "language" for name in names)]
    )


def make_trainable(
    model: PreTrainedModel, tuning: Tuning, *, name: str, base: Path | None = None
) -> PreTrainedModel | peft.PeftModel:
    """`name` is recorded as the base of an adapter. `base` is where the path of `tuning.adapter` starts; None, for a rehearsal, reads no adapter and
    makes one of its shape."""
    match tuning:
        case Full():
            _allow_saving(model)
            return _all_that_is_used(model).train()
        case Lora():
            return attach(model, tuning, name=name, base=base).train()
        case Subset():
            _allow_saving(model)
            return train_only(model, tuning.trainable).train()


def _all_that_is_used(model: PreTrainedModel) -> PreTrainedModel:
    sight = sight_in(model)
    unused = (*stand_ins_in(model), *(() if sight is None else unused_in(model, sight)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_among(name, unused))
    return model


def starting_adapter(tuning: Tuning, base: Path) -> Path | None:
    return base / tuning.adapter if isinstance(tuning, Lora) and tuning.adapter is not None else None


def _allow_saving(model: PreTrainedModel) -> None:
    """Some models come with a temperature and without sampling; transformers loads that and refuses to save it."""
    config = getattr(model, "generation_config", None)
    if config is None or _refusal(config) is None:
        return
    config.do_sample = True
    if reason := _refusal(config):
        raise ModelError(
            f"the model's generation_config cannot be saved: {reason}", "mend generation_config.json in its folder"
        )


def _refusal(config: GenerationConfig) -> str | None:
    try:
        config.validate(strict=True)
    except ValueError as error:
        return " ".join(str(error).split())
    return None


Put = Callable[[nn.Parameter, Tensor], None]


def put_whole(parameter: Tensor, value: Tensor) -> None:
    parameter.detach().copy_(value)


def restore_weights(model: nn.Module, checkpoint: Path, put: Put = put_whole) -> None:
    """Puts a trainable model back to what `save_weights` wrote, tensor by tensor. `put`: into a parameter that may be divided over ranks."""
    if isinstance(model, peft.PeftModel):
        wanted = _stored_names(model, dict(model.named_parameters()))
        adapter = load_file(checkpoint / ADAPTER)
        _same_tensors(adapter, wanted, checkpoint)
        for name, tensor in adapter.items():
            _put(wanted[name], tensor, put)
        return
    stored = Stored(checkpoint)
    targets = model.state_dict(keep_vars=True)
    restored: set[int] = set()
    for name, target in targets.items():
        if (value := stored.take(model, name, _shape(target))) is not None:
            _put(target, value, put)
            restored.add(id(target))
    if stored.untaken:
        raise RunError(f"{checkpoint.name} holds {stored.untaken[0]}, which this model does not have in that shape")
    if missing := sorted(
        name for name, target in targets.items() if id(target) not in restored
    ):  # a tied tensor is stored under one of its names
        raise RunError(f"{checkpoint.name} lacks {', '.join(missing[:3])}")


def _put(target: Tensor, value: Tensor, put: Put) -> None:
    """A buffer is whole on every rank."""
    if isinstance(target, nn.Parameter):
        put(target, value)
    else:
        put_whole(target, value)


def _shape(tensor: Tensor) -> torch.Size:
    """Of the whole tensor; DeepSpeed leaves an empty one in the place of what it has divided."""
    shape: torch.Size = getattr(tensor, "ds_shape", tensor.shape)
    return shape


def _same_tensors(stored: dict[str, Tensor], wanted: dict[str, Tensor], checkpoint: Path) -> None:
    odd = sorted(stored.keys() ^ wanted.keys()) or sorted(
        name for name in wanted if stored[name].shape != _shape(wanted[name])
    )
    if odd:
        raise RunError(
            f"{checkpoint.name} holds an adapter for another model or other targets: {', '.join(odd[:3])} differ"
        )


def _stored_names(model: peft.PeftModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of the adapter that is trained, by the names that they are stored under; the tensors themselves are not looked at."""
    named: dict[str, Tensor] = peft.get_peft_model_state_dict(
        model, state_dict=tensors, adapter_name=TRAINED, save_embedding_layers=False
    )
    return named


def whole_weights(
    model: nn.Module, weight: Callable[[nn.Parameter], Tensor], *, keeps: bool, kept: Kept | None = None
) -> dict[str, Tensor]:
    """What `save_weights` is given where parameters are divided. `weight` puts one together, with the help of all ranks; who `keeps` them gets
    them, tied ones still tied. Those that are `kept` in files are not asked for."""
    named = dict(_trained(model)) if isinstance(model, peft.PeftModel) else model.state_dict(keep_vars=True)
    if kept:
        named = {
            **dict(_trained(model)),
            **{name: tensor for name, tensor in named.items() if not isinstance(tensor, nn.Parameter)},
        }
    whole: dict[int, Tensor] = {}
    for ident, tensor in {id(tensor): tensor for tensor in named.values()}.items():
        value = weight(tensor) if isinstance(tensor, nn.Parameter) else tensor.detach()
        if keeps:
            whole[ident] = value
    return {name: whole[id(tensor)] for name, tensor in named.items()} if keeps else {}


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


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
    """The starting model, or the one that a checkpoint or any other folder holds, ready to generate. `start`: an adapter that the starting model has.
    `num_cards`: that one model is spread over."""
    adapter = start if checkpoint is None else checkpoint if (checkpoint / ADAPTER_CONFIG).exists() else None
    folder = base if checkpoint is None or adapter else checkpoint
    model: nn.Module = load_base(
        folder, device=device, dtype=dtype, attention=attention, bits=bits, num_cards=num_cards
    )
    model.generation_config = GenerationConfig()  # else the model's own penalties would bend the greedy answers
    if adapter is not None:
        model = with_adapter(model, adapter)
    return model.eval()


def load_custom_for_answers(
    model: CustomModel,
    base: Path,
    checkpoint: Path | None,
    *,
    device: str,
    dtype: torch.dtype,
    seed: int,
    start: Path | None = None,
) -> nn.Module:
    """As `load_for_answers`, of a model of the user's own. `base`: where its paths start; `seed`: of the run that trained it."""
    adapter = start if checkpoint is None else checkpoint if (checkpoint / ADAPTER_CONFIG).exists() else None
    whole = checkpoint if adapter is None else None
    found = load_custom(model, base, device=device, dtype=dtype, seed=seed, checkpoint=whole)
    return (found if adapter is None else with_adapter(found, adapter)).eval()


def save_weights(
    model: nn.Module, folder: Path, whole: dict[str, Tensor] | None = None, kept: Kept | None = None
) -> None:
    """adapter_model.safetensors and adapter_config.json, or the whole model: peft and transformers read the folder as it is. `whole`: the weights
    by name, where those of the model are divided. `kept`: where frozen ones lie as they were before anything was rounded."""
    if isinstance(model, peft.PeftModel):
        model.save_pretrained(folder, save_embedding_layers=False, selected_adapters=[TRAINED], state_dict=whole)
        _sort_targets(folder / ADAPTER_CONFIG)
    elif own_of(model) is not None:
        save_own(model, folder, whole)
    elif kept is not None:
        assert isinstance(model, PreTrainedModel)
        save_part(
            model, folder, kept, whole_weights(model, _to_host, keeps=True, kept=kept) if whole is None else whole
        )
    else:
        assert isinstance(model, PreTrainedModel)
        model.save_pretrained(folder, state_dict=_on_host(model) if whole is None else whole)


def _on_host(model: PreTrainedModel) -> dict[str, Tensor] | None:
    """Experts are stored one by one, and taking them apart copies them: not on the card, whose memory was planned without that."""
    is_apart = model.device.type != "cpu" and experts_of(model)
    return whole_weights(model, _to_host, keeps=True) if is_apart else None


def _to_host(parameter: nn.Parameter) -> Tensor:
    return parameter.detach().cpu()


def _sort_targets(config: Path) -> None:
    """peft writes a set in whatever order it has; equal checkpoints shall be equal files."""
    values = json.loads(config.read_text(encoding="utf-8"))
    values["target_modules"] = sorted(values["target_modules"])
    config.write_text(json.dumps(values, indent=2, sort_keys=True), encoding="utf-8")


def quiet() -> None:
    """No progress bars of libraries between our own lines, nor a line for each product in 8 bits."""
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def counts(model: nn.Module) -> Counts:
    """A weight that is packed into bits counts as what it stands for. A frozen copy of the adapter is no part of the model."""
    sizes = [(_num_values(p), p.requires_grad) for name, p in model.named_parameters() if f".{REFERENCE}." not in name]
    return Counts(trainable=sum(size for size, is_trained in sizes if is_trained), total=sum(size for size, _ in sizes))


def _num_values(parameter: Tensor) -> int:
    packed = getattr(parameter, "quant_state", None)
    return _shape(parameter).numel() if packed is None else math.prod(packed.shape)


def weight_bytes(model: nn.Module, kept: Kept | None = None) -> int:
    """What `save_weights` will write."""
    whole = not (isinstance(model, peft.PeftModel) or kept)
    return sum(_shape(p).numel() * p.element_size() for p in model.parameters() if whole or p.requires_grad) + (
        kept.num_bytes if kept else 0
    )
