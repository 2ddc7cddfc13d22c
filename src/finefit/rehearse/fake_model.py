"""What is rehearsed: the config of a step; the model, built on the meta device as training or an evaluation would load
it, then of fake tensors; and the images of a batch, as large as those of the row with the most image tokens."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from finefit import vision
from finefit.artifacts.forecasts import TowerSize
from finefit.artifacts.records import Levers
from finefit.custom.inputs import custom_on_meta
from finefit.errors import ModelError
from finefit.model.attention import STRETCHED_ROPE, choose_attention, for_answers
from finefit.model.experts import active_parameters, choose_experts, experts_of
from finefit.model.load import base_bits, make_trainable, weight_dtype
from finefit.model.resolve_model import custom_source_in
from finefit.objective.batch import Extra
from finefit.rehearse import fake_kernels
from finefit.rehearse.recorder import Recorder
from finefit.rehearse.trace import OUTSIDE, WARM_UP, Block
from finefit.spec.models import Lora, Tuning
from finefit.spec.schema import AdamW, Dpo, Objective, Sft
from finefit.step.forward import keep_reference_copy
from finefit.step.levers import layers_of, other_layers
from finefit.step.state import trainable_of
from finefit.vision.attention import PIECES, by_piece
from finefit.vision.family import Grid, ImageGeometry, ImageInput

_ATTENTION = "rehearsed"
_ENCODERS = (
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
    *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """Everything that a rehearsal needs to know."""

    config: dict[str, Any]
    tuning: Tuning
    optimizer: AdamW
    device: Literal["cpu", "cuda"]
    capability: tuple[int, int]
    precision: Literal["bf16", "fp16", "fp32"]
    levers: Levers
    tokens: int
    """Of the longest sequence; a micro-batch is padded to it, or packed into as much."""
    supervised: int
    """Tokens of a sequence."""
    accumulates: bool
    """Whether a step has more than one micro-batch: gradients then wait while the next one is computed."""
    objective: Objective = field(default_factory=lambda: Sft(kind="sft"))
    rows_per_step: int | None = None
    """No pack has more rows; None where that is not known."""
    validation: tuple[int, int] | None = None
    """Tokens and supervised tokens of the longest validation row; None where there are none."""
    grids: tuple[tuple[int, ...], ...] = ()
    """The images of the row with the most image tokens; every row is assumed to have them, validation rows too."""
    is_deterministic: bool = False
    """Then images are attended to one by one, not all by one kernel."""
    is_quick: bool = False
    """One micro-batch, gradients and state already there: a little off in reserved memory, without a gradient map."""

    @property
    def sides(self) -> int:
        """Sequences of a row: a preference pair has two."""
        return 2 if isinstance(self.objective, Dpo) else 1


def read_config(values: dict[str, Any]) -> PretrainedConfig:
    given = {key: value for key, value in values.items() if key != "quantization_config"}
    if "model_type" not in given:
        problem = "the model's config has no model_type, so its architecture is unknown"
        raise ModelError(problem, "take the config.json that belongs to the model")
    try:
        return AutoConfig.for_model(**given)
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        problem = f"the model's config cannot be read: {' '.join(str(error).split())}"
        raise ModelError(problem, "`finefit doctor` shows the installed versions") from error


def build_on_meta(cfg: StepConfig, kernels: fake_kernels.DeviceKernels, *, answers: bool = False) -> nn.Module:
    """`answers`: as an evaluation loads it, where nothing is trained."""
    dtype = weight_dtype(cfg.precision, cfg.tuning)
    if answers and cfg.precision == "bf16":  # an evaluation keeps what is no longer trained in bf16
        dtype = torch.bfloat16
    if (found := custom_source_in(cfg.config)) is not None:
        custom = custom_on_meta(found, cfg.tuning, dtype, answers=answers)
        if kernels.device == "cuda":
            fake_kernels.fuse_dropout(custom)
        return custom
    config = read_config(cfg.config)
    if config.model_type in _ENCODERS and not config.is_decoder:
        problem = f"{config.model_type} is an encoder: each token would see the one that it has to predict"
        raise ModelError(problem, "name a causal language model")
    config.use_cache = config.get_text_config().use_cache = False
    attention = choose_attention("cpu", (0, 0), cfg.precision, config, packing=cfg.levers.packing and not answers)
    if kernels.device == "cuda" and attention != "eager":
        attention = _ATTENTION
        AttentionInterface.register(_ATTENTION, kernels.decode_attention if answers else kernels.attention)
        has_kernel = (lambda *_: False) if cfg.is_deterministic else kernels.has_varlen
        AttentionInterface.register(_ATTENTION + PIECES, partial(by_piece, kernels.attention, has_kernel))
        AttentionMaskInterface.register(_ATTENTION, fake_kernels.rehearsed_mask)
    elif answers:
        attention = for_answers(attention)
    with torch.device("meta"):
        try:
            model = _built(config, dtype, attention)
        # the model has attention classes of its own: the CPU's kernel stands for the card's, which takes about as much
        except KeyError:
            model = _built(config, dtype, "sdpa")
        if bits := base_bits(cfg.tuning):
            head, towers = model.get_output_embeddings(), vision.vision_forward_of(model.config)
            linear = [(name, id(module)) for name, module in model.named_modules() if type(module) is nn.Linear]
            # bitsandbytes quantises all but the head, in a vision-language model those of its language tower
            packed = {at for name, at in linear if towers is None or vision.tower_of(towers, name) == "language"}
            fake_kernels.quantise(model, bits, packed - {id(head)})
        if answers and not isinstance(cfg.tuning, Lora):  # a checkpoint is a whole model
            trained: nn.Module = model
        else:
            trained = make_trainable(model, cfg.tuning, name="rehearsed")
        if answers:
            trained.requires_grad_(False)
        else:
            keep_reference_copy(cfg.objective, cfg.tuning, trained)
    if kernels.device == "cuda":
        fake_kernels.fuse_dropout(trained)
    for module in trained.modules():
        if getattr(module, "rope_type", None) in STRETCHED_ROPE:
            # those read the largest position, and fake tensors have no values
            module.rope_type = "default"  # type: ignore[assignment]
    return trained


def _built(config: PretrainedConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    chosen = {"attn_implementation": attention, "experts_implementation": choose_experts()}
    try:
        model: PreTrainedModel = vision.auto_class(config).from_config(config, dtype=dtype, **chosen)
    except (ValueError, TypeError, AttributeError, AssertionError, RuntimeError, ZeroDivisionError) as error:
        problem = f"{config.model_type} cannot be built as a causal language model: {error}"
        raise ModelError(problem, "name a causal language model") from error
    return model


def materialise_fakes(
    model: nn.Module, recorder: Recorder, *, is_loaded: bool, loaded: torch.dtype = torch.float32
) -> None:
    """Replaces every meta tensor by a fake one; shared parameters stay shared. `is_loaded`: transformers first
    allocates the sum of all weights in one piece and frees it, then fills the pieces. `loaded`: the dtype of trained
    weights before they are widened."""
    if is_loaded:
        weights = [(name, p) for name, p in model.named_parameters() if "lora_" not in name]
        total = sum(p.numel() * _loaded_as(name, p, loaded).itemsize for name, p in weights)
        ident = recorder.trace.allocate(Block(total, "load", "", WARM_UP, OUTSIDE), OUTSIDE)
        recorder.trace.free(ident, OUTSIDE, "load")
    unit_of = {id(m): at for at, layer in enumerate([*layers_of(model), *other_layers(model)]) for m in layer.modules()}
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for is_adapter in (False, True):
        for name, module in model.named_modules():
            if ("lora_" in name) is is_adapter:
                recorder.place(unit_of.get(id(module), OUTSIDE))
                dense = _dense(module)
                _fill(name, module, made, loaded)
                del dense  # quantised weights are made from it on the device
    recorder.place(OUTSIDE)
    made.clear()
    _widen(model, loaded)
    recorder.name((p for name, p in model.named_parameters() if "lora_" in name), "adapters")
    recorder.name((p for name, p in trainable_of(model).items() if "lora_" not in name), "weights")


def _dense(module: nn.Module) -> list[Tensor]:
    """What a quantised layer's weights are made from: as they are read, and for 8 bits once more in fp16."""
    match module:
        case fake_kernels.Nf4Linear():
            dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
        case fake_kernels.Int8Linear():
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
    """Trained weights of the model itself are loaded like the rest; adapters are never loaded."""
    return loaded if tensor.requires_grad and "lora_" not in path else tensor.dtype


def _widen(model: nn.Module, loaded: torch.dtype) -> None:
    """One tensor after the other, each freed at once."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFootprint:
    """The size of a model, known without a rehearsal."""

    parameters: int
    trainable: int
    trainable_tensors: int
    weight_bytes: int
    """Of the frozen and the trained weights on the device."""
    trainable_bytes: int
    paged_bytes: int = 0
    """Of optimizer state that the driver moves between card and host."""
    active: int | None = None
    """Parameters that a token uses in a mixture of experts; None where it uses all."""
    expert_bytes: int = 0
    """Of weights in tensors that hold several experts."""
    towers: dict[str, TowerSize] = field(default_factory=dict)
    """Of a vision-language model."""
    tower_names: dict[str, frozenset[str]] = field(default_factory=dict)
    """Trained tensors of each."""
    unused: tuple[str, ...] = ()
    """Modules of a vision tower that no image passes."""


def measure_size(cfg: StepConfig) -> ModelFootprint:
    """A quantised parameter counts as the values that it holds."""
    model = build_on_meta(cfg, fake_kernels.device_kernels(cfg.device, cfg.capability, cfg.precision))
    trained, kind = trainable_of(model), cfg.optimizer.kind
    is_paged, is_eight_bit = kind.startswith("paged"), kind.endswith("8bit")
    quantised = [module for module in model.modules() if isinstance(module, fake_kernels.Nf4Linear)]
    packed = sum(module.in_features * module.out_features - module.weight.numel() for module in quantised)
    of_experts = [p for experts in experts_of(model).values() for p in experts.parameters()]
    has_vision = vision.vision_forward_in(model) is not None
    towers: dict[str, TowerSize] = {}
    tower_names: dict[str, set[str]] = {}
    values = {id(module.weight): module.in_features * module.out_features for module in quantised}
    for name, parameter in model.named_parameters() if has_vision else ():
        tower, count = str(vision.tower_in(model, name)), values.get(id(parameter), parameter.numel())
        before = towers.get(tower, TowerSize(parameters=0, trainable=0, tensors=0))
        towers[tower] = TowerSize(
            parameters=before.parameters + count,
            trainable=before.trainable + count * parameter.requires_grad,
            tensors=before.tensors + parameter.requires_grad,
        )
        if parameter.requires_grad:
            tower_names.setdefault(tower, set()).add(name)
    return ModelFootprint(
        parameters=sum(p.numel() for p in model.parameters()) + packed,
        active=active_parameters(model) + packed if of_experts else None,
        expert_bytes=_bytes(of_experts),
        trainable=sum(p.numel() for p in trained.values()),
        trainable_tensors=len(trained),
        weight_bytes=_bytes(model.parameters()),
        trainable_bytes=_bytes(trained.values()),
        paged_bytes=fake_kernels.paged_bytes(trained.values(), is_eight_bit=is_eight_bit) if is_paged else 0,
        towers=towers,
        tower_names={tower: frozenset(names) for tower, names in tower_names.items()},
        unused=vision.unused_modules(model) if has_vision else (),
    )


def _bytes(parameters: Iterable[Tensor]) -> int:
    return sum(p.nbytes for p in parameters)


def fake_images(config: Mapping[str, Any], *, rows: int, tokens: int, grids: Sequence[Grid]) -> Extra | None:
    """Of `rows` equal rows, on the meta device; None for a model that takes no images. Not to be called under fake
    tensors: a geometry counts and sorts, so it works on blank pixels, and only the shapes of its tensors are kept."""
    geometry = vision.geometry_of(config)
    return None if geometry is None else _fake_images(geometry, rows, tokens, tuple(grids))  # type: ignore[arg-type] # every geometry is frozen


@lru_cache(maxsize=64)
def _fake_images(geometry: ImageGeometry, rows: int, tokens: int, grids: tuple[Grid, ...]) -> Extra:
    """A word before each image, and words to the end. Cached: a model of fewer layers has the same geometry."""
    row = [ImageInput(grid, geometry.blank_pixels(grid)) for grid in grids]
    word = int(geometry.image_token == 0)
    ids = [token for grid in grids for token in (word, *[geometry.image_token] * geometry.num_tokens(grid))]
    ids += [word] * (tokens - len(ids))
    ids_BT = np.tile(np.array(ids, dtype=np.int64), (rows, 1))
    return geometry.extra(ids_BT, [ids_BT.shape[1]] * rows, [row] * rows).moved(
        lambda tensor: torch.empty_like(tensor, device="meta")
    )


def num_tokens(config: Mapping[str, Any], grids: Sequence[Grid]) -> int:
    """The fewest tokens of a row with these images: theirs, a word before each and one of the answer."""
    return image_tokens(config, grids) + len(grids) + 1


def image_tokens(config: Mapping[str, Any], grids: Sequence[Grid]) -> int:
    geometry = vision.geometry_of(config)
    return 0 if geometry is None else sum(map(geometry.num_tokens, grids))


def fitting(config: Mapping[str, Any], grids: Sequence[Grid], tokens: int) -> tuple[Grid, ...]:
    """As many of the images as a shorter row has room for."""
    counts = range(len(grids), 0, -1)
    return next((tuple(grids[:count]) for count in counts if num_tokens(config, grids[:count]) <= tokens), ())


def num_values(config: Mapping[str, Any], grids: Sequence[Grid]) -> int:
    """Of the pixels of these images."""
    geometry = vision.geometry_of(config)
    return 0 if geometry is None else sum(part.size for grid in grids for part in geometry.blank_pixels(grid).values())
