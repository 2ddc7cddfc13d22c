"""The model of a rehearsal: built on the meta device as training or an evaluation would load it, then of fake tensors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from finefit.errors import ModelError
from finefit.model.attention import STRETCHED_ROPE, choose_attention, for_answers
from finefit.model.custom_files import written_in
from finefit.model.experts import choose_experts
from finefit.model.load import base_bits, make_trainable, weight_dtype
from finefit.model.sight import auto_class, sight_of, tower_of
from finefit.model.sight.attention import PIECES, by_piece
from finefit.rehearse.custom import own_on_meta
from finefit.rehearse.kernels import Kernels, rehearsed_mask
from finefit.rehearse.recorder import Recorder
from finefit.rehearse.scene import Scene
from finefit.rehearse.shadows import Int8Linear, Nf4Linear, fuse_dropout, quantise
from finefit.rehearse.trace import OUTSIDE, WARM_UP, Block
from finefit.spec.models import Lora, Tuning
from finefit.step.levers import layers_beside, layers_of
from finefit.step.objective import keep_start

_ATTENTION = "rehearsed"
_ENCODERS = (
    *(
        "bert",
        "bert-generation",
        "big_bird",
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "megatron-bert",
        "rembert",
    ),
    *("roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)


def read_config(values: dict[str, Any]) -> PretrainedConfig:
    given = {key: value for key, value in values.items() if key != "quantization_config"}
    if "model_type" not in given:
        raise ModelError(
            "the model's config has no model_type, so its architecture is unknown",
            "take the config.json that belongs to the model",
        )
    try:
        return AutoConfig.for_model(**given)
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        raise ModelError(
            f"the model's config cannot be read: {' '.join(str(error).split())}",
            "`finefit doctor` shows the installed versions",
        ) from error


def on_meta(scene: Scene, kernels: Kernels, *, answers: bool = False) -> nn.Module:
    """`answers`: as an evaluation loads it, where nothing is trained."""
    if (found := written_in(scene.config)) is not None:
        dtype = answers_dtype(scene.precision, scene.tuning) if answers else weight_dtype(scene.precision, scene.tuning)
        own = own_on_meta(found, scene.tuning, dtype, answers=answers)
        if kernels.device == "cuda":
            fuse_dropout(own)
        return own
    config = read_config(scene.config)
    if config.model_type in _ENCODERS and not config.is_decoder:
        raise ModelError(
            f"{config.model_type} is an encoder: each token would see the one that it has to predict",
            "name a causal language model",
        )
    config.use_cache = config.get_text_config().use_cache = False
    dtype = answers_dtype(scene.precision, scene.tuning) if answers else weight_dtype(scene.precision, scene.tuning)
    attention = choose_attention("cpu", (0, 0), scene.precision, config, packing=scene.levers.packing and not answers)
    if kernels.device == "cuda" and attention != "eager":
        attention = _ATTENTION
        AttentionInterface.register(_ATTENTION, kernels.answering if answers else kernels.attention)
        has_kernel = _never if scene.is_deterministic else kernels.has_varlen
        AttentionInterface.register(_ATTENTION + PIECES, partial(by_piece, kernels.attention, has_kernel))
        AttentionMaskInterface.register(_ATTENTION, rehearsed_mask)
    elif answers:
        attention = for_answers(attention)
    with torch.device("meta"):
        try:
            model = _built(config, dtype, attention)
        except KeyError:  # attention classes of the model's own: the CPU's kernel then stands for the card's, which takes about as much
            model = _built(config, dtype, "sdpa")
        if bits := base_bits(scene.tuning):
            quantise(model, bits, _is_packed(model))
        if answers and not isinstance(scene.tuning, Lora):  # a checkpoint is a whole model
            trained: nn.Module = model
        else:
            trained = make_trainable(model, scene.tuning, name="rehearsed")
        if answers:
            trained.requires_grad_(False)
        else:
            keep_start(scene.objective, scene.tuning, trained)
    if kernels.device == "cuda":
        fuse_dropout(trained)
    for module in trained.modules():
        if getattr(module, "rope_type", None) in STRETCHED_ROPE:
            module.rope_type = "default"  # type: ignore[assignment] # those ask for the largest position, which a rehearsal does not have
    return trained


def _never(*_: Tensor) -> bool:
    return False


def _is_packed(model: PreTrainedModel) -> Callable[[str, nn.Module], bool]:
    """Which linear layers bitsandbytes packs: all but the head, of a model that sees those of its language tower."""
    head, sight = model.get_output_embeddings(), sight_of(model.config)
    return lambda name, module: module is not head and (sight is None or tower_of(sight, name) == "language")


def answers_dtype(precision: str, tuning: Tuning) -> torch.dtype:
    """What an evaluation loads weights in: what is not trained any more is kept in bf16 where the card has it."""
    return torch.bfloat16 if precision == "bf16" else weight_dtype(precision, tuning)


def _built(config: PretrainedConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    chosen = {"attn_implementation": attention, "experts_implementation": choose_experts()}
    try:
        model: PreTrainedModel = auto_class(config).from_config(config, dtype=dtype, **chosen)
    except (ValueError, TypeError, AttributeError, AssertionError, RuntimeError, ZeroDivisionError) as error:
        raise ModelError(
            f"{config.model_type} cannot be built as a causal language model: {error}", "name a causal language model"
        ) from error
    return model


def put_fakes_in_place(
    model: nn.Module, recorder: Recorder, *, is_loaded: bool, loaded: torch.dtype = torch.float32
) -> None:
    """Replaces every meta tensor by a fake one; shared parameters stay shared. `is_loaded`: transformers first takes the sum of all weights
    from the allocator in one piece and gives it back, then fills the pieces. `loaded`: in halves, of which what is trained is then widened."""
    if is_loaded:
        total = sum(
            p.numel() * _loaded_as(name, p, loaded).itemsize
            for name, p in model.named_parameters()
            if "lora_" not in name
        )
        recorder.trace.free(
            recorder.trace.allocate(Block(total, "load", "", WARM_UP, OUTSIDE), OUTSIDE), OUTSIDE, "load"
        )
    unit_of = {
        id(m): at for at, layer in enumerate([*layers_of(model), *layers_beside(model)]) for m in layer.modules()
    }
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for is_adapter in (False, True):
        for name, module in model.named_modules():
            if ("lora_" in name) is is_adapter:
                recorder.place(unit_of.get(id(module), OUTSIDE))
                dense = _dense(module)
                _fill(name, module, made, loaded)
                del dense  # packed weights are made from it on the device
    recorder.place(OUTSIDE)
    made.clear()
    _widen(model, loaded)
    recorder.name((p for name, p in model.named_parameters() if "lora_" in name), "adapters")
    recorder.name((p for name, p in trainable_of(model).items() if "lora_" not in name), "weights")


def _dense(module: nn.Module) -> list[Tensor]:
    """What a quantised layer's weights are made from: as they are read, and for 8 bits once more in fp16."""
    match module:
        case Nf4Linear():
            dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
        case Int8Linear():
            dtypes = (torch.bfloat16, torch.float16)
        case _:
            return []
    return [torch.zeros(module.out_features, module.in_features, dtype=dtype) for dtype in dtypes]


def _fill(path: str, module: nn.Module, made: dict[int, tuple[Tensor, Tensor]], loaded: torch.dtype) -> None:
    for slots in (module._parameters, module._buffers):
        for name, old in slots.items():
            if old is None:
                continue
            if id(old) not in made:
                dtype = _loaded_as(path, old, loaded)
                new: Tensor = torch.empty_strided(old.shape, old.stride(), dtype=dtype, device="cpu")
                made[id(old)] = (
                    nn.Parameter(new, requires_grad=old.requires_grad) if slots is module._parameters else new,
                    old,
                )
            slots[name] = made[id(old)][0]  # type: ignore[assignment]


def _loaded_as(path: str, tensor: Tensor, loaded: torch.dtype) -> torch.dtype:
    """What is trained of the model's own weights is loaded as the rest is; adapters are never loaded."""
    return loaded if tensor.requires_grad and "lora_" not in path else tensor.dtype


def _widen(model: nn.Module, loaded: torch.dtype) -> None:
    """One tensor after the other, each given back at once."""
    places: dict[int, list[tuple[dict[str, nn.Parameter | None], str]]] = {}
    for name, module in model.named_modules():
        for slot, old in module._parameters.items():
            if old is not None and old.requires_grad and "lora_" not in name and loaded is not torch.float32:
                places.setdefault(id(old), []).append((module._parameters, slot))
    for shared in places.values():
        slots, slot = shared[0]
        wide = nn.Parameter(slots[slot].detach().to(torch.float32))  # type: ignore[union-attr]
        for slots, slot in shared:
            slots[slot] = wide


def trainable_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
