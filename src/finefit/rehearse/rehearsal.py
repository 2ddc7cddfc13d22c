"""The real step, executed on fake tensors: no GPU, no weights.

Two optimizer steps: the first allocates the optimizer's state, the second is the steady state.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from finefit.artifacts.records import Levers
from finefit.data.packing import capacity_of
from finefit.errors import ModelError
from finefit.model.attention import STRETCHED_ROPE, choose_attention
from finefit.model.load import base_bits, make_trainable, weight_dtype
from finefit.objective.batch import Batch, Packed
from finefit.objective.sft import sft
from finefit.rehearse.allocator import replay
from finefit.rehearse.gradients import explain, frozen_adapters
from finefit.rehearse.kernels import Kernels, kernels_for, rehearsed_mask
from finefit.rehearse.recorder import Recorder
from finefit.rehearse.shadows import EightBitAdamW, Nf4Linear, fuse_dropout, quantise
from finefit.rehearse.trace import OUTSIDE, WARM_UP, Block, Trace
from finefit.spec.schema import AdamW, Tuning
from finefit.step.forward import autocast_for, bind
from finefit.step.levers import layers_of, pull
from finefit.step.optimize import optimizer_step
from finefit.step.state import make_optimizer

_ATTENTION = "rehearsed"
_ENCODERS = (
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert"),
    *("roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """All that a rehearsal is told."""

    config: dict[str, Any]
    tuning: Tuning
    optimizer: AdamW
    device: Literal["cpu", "cuda"]
    capability: tuple[int, int]
    precision: Literal["bf16", "fp32"]
    levers: Levers
    tokens: int
    """Of the longest row; a micro-batch is padded to it, or packed into as much."""
    supervised: int
    """Of a row's tokens."""
    accumulates: bool
    """Whether a step has more than one micro-batch: gradients then wait while the next one is computed."""
    rows_per_step: int | None = None
    """No pack has more rows; None where that is not known."""
    validation: tuple[int, int] | None = None
    """Tokens and supervised tokens of the longest validation row; None where there are none."""
    is_quick: bool = False
    """One micro-batch with gradients and optimizer state already there: enough to compare, a little off in what the allocator holds, and without a
    gradient map."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    parameters: int
    trainable: int
    trainable_tensors: int
    weight_bytes: int
    """Of the frozen and the trained weights as they lie on the device."""
    trainable_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    trace: Trace
    unreached: tuple[str, ...]
    """Trained tensors that no gradient reached."""
    causes: tuple[str, ...]
    """Why, as far as the rehearsal can tell."""
    frozen: tuple[str, ...]
    """Adapters that are not trained."""
    kernels: Kernels


def rehearse(scene: Scene, adjust: Callable[[nn.Module], None] = lambda _: None) -> Rehearsed:
    """`adjust` may change the model before the first step, as a user's own code would."""
    kernels = kernels_for(scene.device, scene.capability, scene.precision)
    model = _on_meta(scene, kernels)
    adjust(model)
    recorder = Recorder(kernels)
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        put_fakes_in_place(model, recorder, is_loaded=scene.device == "cuda")
        recorder.watch(model, layers_of(model), _backbone(model))
        pull(model, scene.levers, _HostMemory(recorder.trace))
        if not _trainable(model):
            raise ModelError(
                f"nothing is trained: {', '.join(frozen_adapters(model)) or 'every tensor'} is frozen",
                "leave requires_grad of what is to be trained on",
            )
        optimizer = _optimizer(model, scene.optimizer, scene.device)
        unreached = _steps(scene, model, optimizer, recorder)
    return Rehearsed(
        trace=recorder.trace,
        unreached=unreached,
        causes=explain(model, unreached, recorder.entered),
        frozen=frozen_adapters(model),
        kernels=kernels,
    )


def survey(scene: Scene) -> Size:
    """How large the model is, without a rehearsal."""
    return _size(_on_meta(scene, kernels_for(scene.device, scene.capability, scene.precision)))


def _size(model: nn.Module) -> Size:
    """A parameter that is packed into bits counts as what it stands for."""
    trained = _trainable(model).values()
    packed = sum(module.in_features * module.out_features - module.weight.numel() for module in model.modules() if isinstance(module, Nf4Linear))
    return Size(
        parameters=sum(p.numel() for p in model.parameters()) + packed,
        trainable=sum(p.numel() for p in trained),
        trainable_tensors=len(trained),
        weight_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        trainable_bytes=sum(p.numel() * p.element_size() for p in trained),
    )


def _steps(scene: Scene, model: nn.Module, optimizer: torch.optim.Optimizer, recorder: Recorder) -> tuple[str, ...]:
    unreached: list[str] = []

    def decide(_: Tensor) -> bool:
        gradients = {name: p.grad for name, p in _trainable(model).items()}
        recorder.name((g for g in gradients.values() if g is not None), "gradients")
        unreached[:] = [name for name, gradient in gradients.items() if gradient is None]
        return True

    forward = bind(model, loss_chunk=scene.levers.loss_chunk, autocast=autocast_for("cpu", scene.precision))
    if scene.is_quick:
        _settle(scene, model, optimizer, recorder)
    for num_batches in (1,) if scene.is_quick else (1, 2 if scene.accumulates else 1):
        recorder.phase = "batch"
        recorder.place(OUTSIDE)
        batches = [_batch(scene) for _ in range(num_batches)]
        recorder.phase = "step"
        recorder.trace.marks["step"] = len(recorder.trace.events)
        recorder.trace.costs.clear()
        recorder.trace.operations.clear()
        try:
            optimizer_step(batches, forward=forward, objective=sft, optimizer=optimizer, clip=scene.optimizer.clip, decide=decide)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            if "does not require grad" in str(error):  # nothing that is trained has a part in the loss
                return tuple(_trainable(model))
            raise _untraceable(model, recorder, error) from error
        recorder.name((t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)), "optimizer")
        del batches
    if scene.validation is not None:
        tokens, supervised = scene.validation
        padded = replace(scene, tokens=tokens, supervised=supervised, levers=replace(scene.levers, packing=False))
        _validate(padded, model, forward, recorder)
    return tuple(unreached)


def rehearse_generation(scene: Scene, *, rows: int, prompt_tokens: int, new_tokens: int) -> int:
    """Reserved bytes while answers are generated: the prompts at once, then one token with everything before it in the cache."""
    kernels = kernels_for(scene.device, scene.capability, scene.precision)
    model = _on_meta(scene, kernels).eval()
    recorder = Recorder(kernels)
    with FakeTensorMode(allow_non_fake_inputs=True), recorder, torch.no_grad():
        put_fakes_in_place(model, recorder, is_loaded=scene.device == "cuda")
        recorder.phase = "generation"
        try:
            prompt = torch.ones(rows, prompt_tokens + new_tokens - 1, dtype=torch.long)
            mask = torch.ones_like(prompt)  # prompts of unequal length are padded
            answer = model(input_ids=prompt, attention_mask=mask, use_cache=True, logits_to_keep=1)
            model(input_ids=prompt[:, :1], past_key_values=answer.past_key_values, use_cache=True)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise _untraceable(model, recorder, error) from error
    found = replay(recorder.trace.stream())
    return found.reserved_bytes if scene.device == "cuda" else found.allocated_bytes


def _settle(scene: Scene, model: nn.Module, optimizer: torch.optim.Optimizer, recorder: Recorder) -> None:
    """As after some steps and, where gradients accumulate, some micro-batches."""
    recorder.phase = "update"
    for parameter in _trainable(model).values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    if not scene.accumulates:
        optimizer.zero_grad(set_to_none=True)


def _validate(scene: Scene, model: nn.Module, forward: Any, recorder: Recorder) -> None:
    recorder.phase = "validation"
    model.eval()
    with torch.no_grad():
        sft(forward, _batch(scene))


def _untraceable(model: nn.Module, recorder: Recorder, error: Exception) -> ModelError:
    module, operation = recorder.last
    place = f" in {module}" if module else ""
    return ModelError(
        f"{type(model).__name__} cannot be rehearsed: {operation}{place} failed on fake tensors: {str(error).strip().splitlines()[0]}",
        "a rehearsal has shapes but no values: remove `.item()`, boolean masks and `if tensor` from this module's forward",
    )


def _batch(scene: Scene) -> Batch:
    rows, supervised = scene.levers.micro_batch, scene.levers.micro_batch * scene.supervised
    shape = (1, rows * scene.tokens) if scene.levers.packing else (rows, scene.tokens)
    return Batch(
        input_ids_BT=torch.ones(shape, dtype=torch.long),
        positions_N=torch.zeros(supervised, dtype=torch.long),
        targets_N=torch.zeros(supervised, dtype=torch.long),
        num_supervised=supervised,
        num_tokens=rows * scene.tokens,
        packed=_packed(scene) if scene.levers.packing else None,
    )


def _packed(scene: Scene) -> Packed:
    """The longest rows, with boundaries for as many as a pack may have: what the kernel takes grows with both."""
    rows, most = scene.levers.micro_batch, scene.rows_per_step or scene.levers.micro_batch * scene.tokens
    capacity = capacity_of(micro_batch=rows, longest=scene.tokens, supervised=scene.supervised, rows_per_step=most)
    return Packed(
        position_ids_BT=torch.zeros(1, rows * scene.tokens, dtype=torch.long),
        boundaries_R1=torch.zeros(capacity.rows + 1, dtype=torch.int32),
        lengths=(scene.tokens,) * rows,
    )


# the model


def read_config(values: dict[str, Any]) -> PretrainedConfig:
    given = {key: value for key, value in values.items() if key != "quantization_config"}
    if "model_type" not in given:
        raise ModelError("the model's config has no model_type, so its architecture is unknown", "take the config.json that belongs to the model")
    try:
        return AutoConfig.for_model(**given)
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        raise ModelError(
            f"the model's config cannot be read: {' '.join(str(error).split())}", "`finefit doctor` shows the installed versions"
        ) from error


def _on_meta(scene: Scene, kernels: Kernels) -> nn.Module:
    config = read_config(scene.config)
    if config.model_type in _ENCODERS and not config.is_decoder:
        raise ModelError(f"{config.model_type} is an encoder: each token would see the one that it has to predict", "name a causal language model")
    config.use_cache = False
    dtype = weight_dtype(scene.precision, scene.tuning)
    attention = choose_attention("cpu", (0, 0), scene.precision, config, packing=scene.levers.packing)
    if kernels.device == "cuda" and attention != "eager":
        attention = _ATTENTION
        AttentionInterface.register(_ATTENTION, kernels.attention)
        AttentionMaskInterface.register(_ATTENTION, rehearsed_mask)
    with torch.device("meta"):
        try:
            model = _built(config, dtype, attention)
        except KeyError:  # attention classes of the model's own: the CPU's kernel then stands for the card's, which takes about as much
            model = _built(config, dtype, "sdpa")
        if base_bits(scene.tuning):
            quantise(model, model.get_output_embeddings())
        trained: nn.Module = make_trainable(model, scene.tuning, name="rehearsed")
    if kernels.device == "cuda":
        fuse_dropout(trained)
    for module in trained.modules():
        if getattr(module, "rope_type", None) in STRETCHED_ROPE:
            module.rope_type = "default"  # type: ignore[assignment] # those ask for the largest position, which a rehearsal does not have
    return trained


def _built(config: PretrainedConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    except (ValueError, TypeError, AttributeError, AssertionError, RuntimeError, ZeroDivisionError) as error:
        raise ModelError(f"{config.model_type} cannot be built as a causal language model: {error}", "name a causal language model") from error
    return model


def put_fakes_in_place(model: nn.Module, recorder: Recorder, *, is_loaded: bool) -> None:
    """Replaces every meta tensor by a fake one; shared parameters stay shared. `is_loaded`: transformers first takes the sum of all weights
    from the allocator in one piece and gives it back, then fills the pieces."""
    if is_loaded:
        total = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if "lora_" not in name)
        recorder.trace.free(recorder.trace.allocate(Block(total, "load", "", WARM_UP, OUTSIDE), OUTSIDE), OUTSIDE, "load")
    unit_of = {id(m): at for at, layer in enumerate(layers_of(model)) for m in layer.modules()}
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for is_adapter in (False, True):
        for name, module in model.named_modules():
            if ("lora_" in name) is is_adapter:
                recorder.place(unit_of.get(id(module), OUTSIDE))
                dense = torch.zeros(module.out_features, module.in_features, dtype=torch.bfloat16) if isinstance(module, Nf4Linear) else None
                _fill(module, made)
                del dense  # packed weights are made from it on the device
    recorder.place(OUTSIDE)
    trained = set(_trainable(model).values())
    is_part = len(trained) < sum(1 for _ in model.parameters())
    recorder.name((p for p in trained), "adapters" if is_part else "weights")


def _fill(module: nn.Module, made: dict[int, tuple[Tensor, Tensor]]) -> None:
    for slots in (module._parameters, module._buffers):
        for name, old in slots.items():
            if old is None:
                continue
            if id(old) not in made:
                new: Tensor = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device="cpu")
                made[id(old)] = (nn.Parameter(new, requires_grad=old.requires_grad) if slots is module._parameters else new, old)
            slots[name] = made[id(old)][0]  # type: ignore[assignment]


def _optimizer(model: nn.Module, spec: AdamW, device: str) -> torch.optim.Optimizer:
    real = make_optimizer(model, spec.model_copy(update={"kind": "adamw"}), device=device)
    return EightBitAdamW(copy.copy(group) for group in real.param_groups) if spec.kind == "adamw_8bit" else real


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _backbone(model: nn.Module) -> nn.Module:
    causal: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return causal.base_model  # type: ignore[return-value]


class _HostMemory:
    """Stands for pinned memory: what is put there is counted apart from the device's."""

    def __init__(self, trace: Trace) -> None:
        self._trace, self._now = trace, 0

    def put(self, tensor: Tensor) -> Callable[[], Tensor]:
        num_bytes = 1 << (tensor.numel() * tensor.element_size() - 1).bit_length()  # pinned memory comes in powers of two
        self._now += num_bytes
        self._trace.host_bytes = max(self._trace.host_bytes, self._now)

        def fetch() -> Tensor:
            self._now -= num_bytes
            return torch.empty(tensor_shape, dtype=dtype)

        tensor_shape, dtype = tensor.shape, tensor.dtype
        return fetch
