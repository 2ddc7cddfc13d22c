"""Turns trained copies of one dense model into a mixture of experts that plain transformers loads, or into their
average.

Experts may differ from the base only in their MLPs. Every tensor of the base is mapped or the build fails, and files
are written layer by layer, so memory holds one layer of the experts and no model. The config is written last: a folder
that a kill left half written is not a model.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from finefit.artifacts.atomic import report_disk_full, sync, write_text
from finefit.errors import FinefitError, ModelError
from finefit.facts.files import INDEX, read_config
from finefit.model.experts import PLACEHOLDER_SIZE, forward_hooks, routers_of
from finefit.model.load import load_base
from finefit.model.merge import copy_texts
from finefit.moe.dense import DenseWeights, keep_tokenizer, require_same_config, require_same_tokenizer, with_defaults

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_MLP = re.compile(r"(model\.layers\.\d+)\.mlp\.(gate|up|down)_proj\.weight")
_TOKENS = 16
_WINDOW = 6
"""Replaces the sliding window of layers that have one, so that a few tokens suffice to test them."""
_TOLERANCE = 1e-4
"""A share of the largest logit, for fp32 rounding under another order of products."""
_SHUT = -1e4
"""The value of a shared expert's gate before its sigmoid, so that it is closed."""

EXPERT_NAMES = "expert_names"
"""finefit's own key in the mixture's config; transformers keeps it, in checkpoints too."""

Router = Callable[[int], Tensor]
"""The router's weight in a layer, experts x hidden."""
MakeRouter = Callable[[tuple[str, ...]], Router]
"""Called with the experts in their order, once copies among them are known."""
Shared = Literal["none", "base"]
Copies = Literal["refuse", "collapse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeFamily:
    """How a dense architecture is written as a mixture of experts."""

    model_type: str
    architecture: str
    router: str
    expert: str
    """The name of an expert's tensor, with {at} and {part} in braces."""
    parts: Mapping[str, str]
    """Names of the parts of an MLP."""
    num_experts: str
    """The config key for the number of experts."""
    has_shared: bool = False
    dropped: tuple[str, ...] = ()
    """Keys of the dense config that must be off, since the mixture has no place for them."""


_MIXTRAL = MoeFamily(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    router="block_sparse_moe.gate.weight",
    expert="block_sparse_moe.experts.{at}.{part}.weight",
    parts={"gate": "w1", "up": "w3", "down": "w2"},
    num_experts="num_local_experts",
    dropped=("attention_bias", "mlp_bias"),
)
_QWEN3 = MoeFamily(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    router="mlp.gate.weight",
    expert="mlp.experts.{at}.{part}.weight",
    parts={"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
    num_experts="num_experts",
)
_QWEN2 = replace(_QWEN3, model_type="qwen2_moe", architecture="Qwen2MoeForCausalLM", has_shared=True)
MOE_FAMILIES: dict[str, MoeFamily] = {"llama": _MIXTRAL, "mistral": _MIXTRAL, "qwen2": _QWEN2, "qwen3": _QWEN3}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltMoe:
    experts: tuple[str, ...]
    """The experts of the result, in order."""
    collapsed: dict[str, str]
    """Experts that are copies of another one, and of which."""
    parameters: int
    dtype: str
    """Torch's name of the dtype of all weights, wide enough for every expert."""


def moe_config(dense: Mapping[str, Any], *, num_experts: int, top_k: int, shared: Shared = "none") -> dict[str, Any]:
    """The mixture's config.json, made from that of its base; a stage that trains the mixture is planned before it
    exists."""
    family, dense = _family(dense), with_defaults(dense)
    if shared == "base" and not family.has_shared:
        problem = f"{family.model_type} has no shared expert"
        raise ModelError(problem, "set shared: none, or take a base of the qwen2 family")
    if not 1 <= top_k <= num_experts:
        raise ModelError(f"top_k {top_k} of {num_experts} experts", f"give 1 to {num_experts}")
    if on := [key for key in family.dropped if dense.get(key)]:
        problem = f"the base has {', '.join(on)}, for which {family.model_type} has no tensors"
        raise ModelError(problem, "take another base")
    left_out = {"model_type", "architectures", "auto_map", *family.dropped, "pretraining_tp"}
    config = {key: value for key, value in dense.items() if key not in left_out} | {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        family.num_experts: num_experts,
        "num_experts_per_tok": top_k,
    }
    if family.model_type == "mixtral":
        return config | {"sliding_window": dense.get("sliding_window")}
    # Mixtral and Qwen3-MoE have one window for all layers; Qwen2-MoE would choose other layers than Qwen2 unless each
    # is named in `layer_types`
    kinds: list[str] = dense["layer_types"]
    if family.model_type == "qwen3_moe" and len(set(kinds)) > 1:
        raise ModelError(
            f"{kinds.count('sliding_attention')} of the base's {len(kinds)} layers have a sliding window, and "
            f"{family.model_type} has one in all or in none",
            "take another base, or one whose use_sliding_window is false",
        )
    config |= {
        "use_sliding_window": "sliding_attention" in kinds,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": dense["intermediate_size"],
    }
    if family.has_shared:
        size = dense["intermediate_size"] if shared == "base" else PLACEHOLDER_SIZE
        config |= {"shared_expert_intermediate_size": size, "qkv_bias": True}
    return config


def _family(dense: Mapping[str, Any]) -> MoeFamily:
    kind = dense.get("model_type")
    if kind not in MOE_FAMILIES:
        problem = f"a model of type {kind} has no known mixture-of-experts architecture"
        raise ModelError(problem, f"take one of {', '.join(MOE_FAMILIES)}")
    return MOE_FAMILIES[kind]


def build_moe(
    base: Path,
    experts: Mapping[str, Path],
    out: Path,
    *,
    top_k: int,
    shared: Shared = "none",
    copies: Copies = "refuse",
    start: MakeRouter | None = None,
    seed: int = 0,
) -> BuiltMoe:
    """Fills the empty folder `out`. `start` makes the routers once the experts are known to fit; by default they are
    small random numbers."""
    dense = read_config(base)
    moe_config(dense, num_experts=len(experts), top_k=top_k, shared=shared)  # fails before anything is read
    dense = with_defaults(dense)
    source, chosen, collapsed = _opened(base, experts, copies, "they would take memory and add nothing")
    config = moe_config(dense, num_experts=len(chosen), top_k=min(top_k, len(chosen)), shared=shared)
    config[EXPERT_NAMES] = list(chosen)
    router = start(tuple(chosen)) if start else partial(_random_router, len(chosen), dense, seed)
    layers = _mixture_layers(_family(dense), source, tuple(chosen.values()), shared, router)
    dtype = _widest((source, *chosen.values()))
    with TemporaryDirectory(prefix=".", dir=out) as tried:  # beside the mixture's config, which `out` gets last
        copy_texts(base, Path(tried))
        write_text(Path(tried, "config.json"), json.dumps(config))
        keep_tokenizer(base, Path(tried))
        copy_texts(Path(tried), out)
    parameters = _write(out, config, layers, dtype)
    require_same_tokenizer(base, out)
    return BuiltMoe(experts=tuple(chosen), collapsed=collapsed, parameters=parameters, dtype=_name(dtype))


def _random_router(num_experts: int, dense: Mapping[str, Any], seed: int, layer: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 100_003 + layer)
    values = torch.randn(num_experts, dense["hidden_size"], generator=generator)
    return values * float(dense.get("initializer_range", 0.02))


def average_experts(base: Path, experts: Mapping[str, Path], out: Path, *, copies: Copies = "refuse") -> BuiltMoe:
    """A dense model of the base's size whose MLPs are the mean of the experts'; it is read back and compared with
    them."""
    why = "the mean would be biased towards what they have learnt"
    source, chosen, collapsed = _opened(base, experts, copies, why)

    def tensor(name: str) -> Tensor:
        is_mlp = _MLP.fullmatch(name)
        return torch.stack([of[name].float() for of in chosen.values()]).mean(0) if is_mlp else source[name]

    layers = ({name: tensor(name) for name in names} for names in _by_layer(source.names))
    dtype = _widest((source, *chosen.values()))
    copy_texts(base, out)
    parameters = _write(out, read_config(base), layers, dtype)
    _require_mean(DenseWeights(out), source, tuple(chosen.values()))
    return BuiltMoe(experts=tuple(chosen), collapsed=collapsed, parameters=parameters, dtype=_name(dtype))


def _opened(
    base: Path, experts: Mapping[str, Path], copies: Copies, why: str
) -> tuple[DenseWeights, dict[str, DenseWeights], dict[str, str]]:
    """The base, the experts that are not copies of one another, and the copies. `why` says why a copy is a problem."""
    config = read_config(base)
    for name, folder in experts.items():
        require_same_config(name, config, read_config(folder))
    source = DenseWeights(base)
    opened = {name: DenseWeights(folder) for name, folder in experts.items()}
    if unknown := unknown_mlp_tensor(source.names):
        problem = f"the base's {unknown} is not a known part of an MLP"
        raise ModelError(problem, "take a dense base of another architecture")
    for expert, weights in opened.items():
        _require_same_tensors(expert, weights, source)
    first: dict[str, str] = {}
    collapsed: dict[str, str] = {}
    for expert, weights in opened.items():
        digest = hashlib.sha256()
        for name in sorted(name for name in source.names if _MLP.fullmatch(name)):
            digest.update(weights[name].float().contiguous().view(torch.uint8).numpy().data)
        if (same := first.setdefault(digest.hexdigest(), expert)) != expert:
            collapsed[expert] = same
    if collapsed and copies == "refuse":
        pairs = ", ".join(f"{name} of {other}" for name, other in collapsed.items())
        raise ModelError(f"experts are copies: {pairs}; {why}", "leave them out, or set copies: collapse")
    return source, {name: weights for name, weights in opened.items() if name not in collapsed}, collapsed


def _require_same_tensors(expert: str, weights: DenseWeights, base: DenseWeights) -> None:
    """Requires an expert to have the base's tensors in the same shapes and, outside its MLPs, the same values rounded
    to its dtype."""
    remedy = "train it from this base"
    if odd := sorted(weights.names ^ base.names):
        problem = f"expert {expert} and the base do not have the same tensors: {', '.join(odd[:3])}"
        raise ModelError(problem, remedy)
    for name in sorted(base.names):
        if weights.shape(name) != base.shape(name):
            problem = f"expert {expert} has {name} as {weights.shape(name)}, the base as {base.shape(name)}"
            raise ModelError(problem, remedy)
    for name in sorted(base.names):
        if not _MLP.fullmatch(name) and not _is_rounded(weights[name], base[name]):
            raise ModelError(
                f"expert {expert} has changed {name}, which is not an MLP: a mixture has only one of it and would "
                "lose the change",
                "train experts with tuning: {kind: subset, trainable: [layers.*.mlp]}",
            )


def _is_rounded(found: Tensor, exact: Tensor) -> bool:
    """Whether two tensors are equal up to the first one's dtype: an adapter may be merged at a lower precision than its
    base has."""
    return torch.equal(found, exact.to(found.dtype))


def _require_mean(found: DenseWeights, base: DenseWeights, experts: Sequence[DenseWeights]) -> None:
    """Requires every value to be the mean of the experts' up to the last rounding, and outside the MLPs to be the
    base's."""
    for name in sorted(base.names):
        of = experts if _MLP.fullmatch(name) else (base,)
        value = found[name]
        apart = sum((weights[name].double() - value.double() for weights in of), torch.zeros(()).double()) / len(of)
        largest = max(float(weights[name].abs().max()) for weights in of)
        difference = float(apart.abs().max())
        if not difference <= torch.finfo(value.dtype).eps * largest:
            problem = f"{name} was read back and is not the mean of {len(of)} tensors: it differs by {difference:.2g}"
            raise FinefitError(problem, "the disk may be faulty; give the same command again")


def _widest(several: Sequence[DenseWeights]) -> torch.dtype:
    """The widest dtype among them. Training keeps trained weights in fp32 over a base in half precision."""
    found = {dtype for weights in several for dtype in weights.dtypes()}
    return found.pop() if len(found) == 1 else torch.float32


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _mixture_layers(
    family: MoeFamily, base: DenseWeights, experts: Sequence[DenseWeights], shared: Shared, router: Router
) -> Iterator[dict[str, Tensor]]:
    for names in _by_layer(base.names):
        tensors: dict[str, Tensor] = {}
        for name in names:
            match = _MLP.fullmatch(name)
            if match is None:
                tensors[name] = base[name]
                continue
            prefix, part = match[1], match[2]
            # the other half comes from the shared expert, whose gate is half open
            is_halved = shared == "base" and part == "down"
            for at, weights in enumerate(experts):
                key = f"{prefix}.{family.expert.format(at=at, part=family.parts[part])}"
                tensors[key] = weights[name] / 2 if is_halved else weights[name]
            if family.has_shared:
                whole = base[name]
                one = whole[:, :PLACEHOLDER_SIZE] if part == "down" else whole[:PLACEHOLDER_SIZE]
                used = whole if shared == "base" else torch.zeros_like(one)
                tensors[f"{prefix}.mlp.shared_expert.{part}_proj.weight"] = used
        if layer := _LAYER.match(names[0]):
            prefix, weight = layer[0].rstrip("."), router(int(layer[1]))
            hidden = base.shape(f"{prefix}.input_layernorm.weight")[0]
            if tuple(weight.shape) != (len(experts), hidden):
                raise ModelError(
                    f"the router of layer {layer[1]} is {tuple(weight.shape)}, and there are {len(experts)} experts of "
                    f"{hidden} hidden values"
                )
            tensors[f"{prefix}.{family.router}"] = weight
            if family.has_shared:
                tensors[f"{prefix}.mlp.shared_expert_gate.weight"] = torch.zeros(1, hidden)
        yield tensors


def _by_layer(names: set[str]) -> list[list[str]]:
    """Tensors outside the layers first, then layer by layer."""
    groups: dict[int, list[str]] = {}
    for name in sorted(names):
        match = _LAYER.match(name)
        groups.setdefault(int(match[1]) if match else -1, []).append(name)
    return [groups[at] for at in sorted(groups)]


def unknown_mlp_tensor(names: Iterable[str]) -> str | None:
    """The first tensor of a dense model that is in an MLP but is not one of the parts in which experts may differ."""
    return min((name for name in names if ".mlp." in name and not _MLP.fullmatch(name)), default=None)


def _write(out: Path, config: Mapping[str, Any], layers: Iterator[dict[str, Tensor]], dtype: torch.dtype) -> int:
    """Writes one file for each layer, an index and the config. Returns the number of parameters."""
    place: dict[str, str] = {}
    sizes = num_bytes = 0
    for at, found in enumerate(layers):
        name = f"model-{at:05d}.safetensors"
        tensors = {key: tensor.to(dtype).contiguous() for key, tensor in found.items()}
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        with report_disk_full(out / name, size):
            save_file(tensors, out / name, metadata={"format": "pt"})
            sync(out / name)
        if twice := place.keys() & tensors.keys():
            raise ModelError(f"{sorted(twice)[0]} would be written twice", "please report this")
        place |= dict.fromkeys(tensors, name)
        sizes, num_bytes = sizes + sum(tensor.numel() for tensor in tensors.values()), num_bytes + size
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(place.items()))}
    write_text(out / INDEX, json.dumps(index, indent=2) + "\n")
    stored = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": _name(dtype)}
    write_text(out / "config.json", json.dumps(stored, indent=2, sort_keys=True) + "\n")
    return sizes


def prove_experts(moe: Path, experts: Mapping[str, Path], *, shared: Path | None = None) -> dict[str, float]:
    """The largest difference of logits by expert, on a few tokens, in fp32 on the CPU. With every token routed to one
    expert, a mixture must answer as that expert does; with its shared expert alone, as the base. `shared` is the base
    if its own MLP is the shared expert and the experts' down_proj are halved."""
    mixture = load_base(moe, device="cpu", dtype=torch.float32).eval()
    vocabulary = mixture.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(0, vocabulary, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    differences = {}
    modules = dict(mixture.named_modules())
    shared_experts = [module for path, module in modules.items() if path.endswith(".shared_expert")]
    gates = [module for path, module in modules.items() if path.endswith(".shared_expert_gate")]
    for at, (name, folder) in enumerate(experts.items()):
        shut = forward_hooks(gates, lambda _, __, said: torch.full_like(said, _SHUT)) if shared else nullcontext()
        with _sent_to(mixture, at, weight=1.0 if shared is None else 2.0), shut:
            fault = f"with every token sent to {name} does not answer as {name} does"
            differences[name] = _difference(mixture, folder, tokens, fault)
    if shared is not None:
        # its gate stays half open: that is part of the proof
        with _sent_to(mixture, 0, weight=0.0), forward_hooks(shared_experts, lambda _, __, said: 2 * said):
            _difference(mixture, shared, tokens, "by its shared expert alone does not answer as the base does")
    return differences


def _difference(mixture: PreTrainedModel, folder: Path, tokens: Tensor, fault: str) -> float:
    dense = load_base(folder, device="cpu", dtype=torch.float32).eval()
    # outside of its MLPs an expert may have fewer bits than the base, from which the mixture has those weights
    exact = dict(mixture.named_parameters())
    stored = DenseWeights(folder)
    for name, parameter in dense.named_parameters():
        if name in exact and name in stored.names and _is_rounded(stored[name], exact[name]):
            parameter.detach().copy_(exact[name])
    window = getattr(dense.config, "sliding_window", None)
    with _narrowed(dense, window), _narrowed(mixture, window):
        wanted, found = _logits(dense, tokens), _logits(mixture, tokens)
    difference = float((found - wanted).abs().max())
    if not difference <= _TOLERANCE * float(wanted.abs().max()):
        problem = f"the mixture {fault}: logits differ by {difference:.2g}"
        raise FinefitError(problem, "this is a fault of finefit; please report it with the base's config.json")
    return difference


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(tokens, use_cache=False).logits
    return logits


@contextmanager
def _narrowed(model: PreTrainedModel, window: int | None) -> Iterator[None]:
    """Sets the model's sliding window to `_WINDOW` if it is `window` now. Any other value stays and shows as a
    difference."""
    config: Any = model.config
    if not window or getattr(config, "sliding_window", None) != window:
        yield
        return
    config.sliding_window = _WINDOW  # what masks are made from
    try:
        yield
    finally:
        config.sliding_window = window


def _sent_to(mixture: nn.Module, expert: int, *, weight: float) -> AbstractContextManager[None]:
    def answer(_: nn.Module, __: Any, said: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        tokens, device = said[0].shape[0], said[0].device
        weights = torch.full((tokens, 1), weight, dtype=said[1].dtype, device=device)
        return said[0], weights, torch.full((tokens, 1), expert, dtype=said[2].dtype, device=device)

    return forward_hooks(routers_of(mixture).values(), answer)
