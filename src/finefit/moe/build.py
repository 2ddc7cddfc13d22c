"""Trained copies of one dense model -> a mixture of experts that plain transformers loads, or their average.

Experts may differ from the base in their MLPs alone. Every tensor of the base is mapped or the build fails, and files
are written layer by layer, so memory holds one layer of the experts and no model. The config is written last: a folder
that a kill left half written is not a model.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from finefit.artifacts.atomic import report_disk_full, sync, write_text
from finefit.errors import FinefitError, ModelError
from finefit.facts.files import INDEX, read_config
from finefit.model.experts import PLACEHOLDER_SIZE
from finefit.model.merge import copy_texts
from finefit.moe.dense import (
    DenseWeights,
    is_rounded,
    keep_tokenizer,
    require_same_config,
    require_same_tokenizer,
    with_defaults,
)

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_MLP = re.compile(r"(model\.layers\.\d+)\.mlp\.(gate|up|down)_proj\.weight")

EXPERT_NAMES = "expert_names"
"""A key of ours in the mixture's config; transformers keeps it, in checkpoints too."""

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
    """Name of an expert's tensor, with {at} and {part} in braces."""
    parts: Mapping[str, str]
    """Names of the parts of an MLP."""
    num_experts: str
    """The config's key."""
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


def _qwen(model_type: str, architecture: str, *, has_shared: bool) -> MoeFamily:
    return MoeFamily(
        model_type=model_type,
        architecture=architecture,
        router="mlp.gate.weight",
        expert="mlp.experts.{at}.{part}.weight",
        parts={"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
        num_experts="num_experts",
        has_shared=has_shared,
    )


MOE_FAMILIES: dict[str, MoeFamily] = {
    "llama": _MIXTRAL,
    "mistral": _MIXTRAL,
    "qwen2": _qwen("qwen2_moe", "Qwen2MoeForCausalLM", has_shared=True),
    "qwen3": _qwen("qwen3_moe", "Qwen3MoeForCausalLM", has_shared=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltMoe:
    experts: tuple[str, ...]
    """Those that became one, in their order."""
    collapsed: dict[str, str]
    """Copies of another expert, and of which."""
    parameters: int
    dtype: str
    """Torch's name of the dtype of all weights, wide enough for every expert."""


def moe_config(dense: Mapping[str, Any], *, num_experts: int, top_k: int, shared: Shared = "none") -> dict[str, Any]:
    """The mixture's config.json, from that of its base; a stage that trains it is planned with this before it
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
    config = {key: value for key, value in dense.items() if key not in left_out} | _windows(family, dense)
    config |= {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        family.num_experts: num_experts,
        "num_experts_per_tok": top_k,
    }
    if family.model_type == "mixtral":
        return config
    config |= {
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": dense["intermediate_size"],
    }
    if family.has_shared:
        size = dense["intermediate_size"] if shared == "base" else PLACEHOLDER_SIZE
        config |= {"shared_expert_intermediate_size": size, "qkv_bias": True}
    return config


def _windows(family: MoeFamily, dense: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers have a sliding window, as the mixture's architecture reads it. Qwen2-MoE would choose other layers
    than Qwen2 unless each is named in `layer_types`; Mixtral and Qwen3-MoE have one window for all layers."""
    if family.model_type == "mixtral":
        return {"sliding_window": dense.get("sliding_window")}
    kinds = set(dense["layer_types"])
    if family.model_type == "qwen3_moe" and len(kinds) > 1:
        sliding = dense["layer_types"].count("sliding_attention")
        raise ModelError(
            f"{sliding} of the base's {len(dense['layer_types'])} layers have a sliding window, and "
            f"{family.model_type} has one in all or in none",
            "take another base, or one whose use_sliding_window is false",
        )
    return {"use_sliding_window": "sliding_attention" in kinds}


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
    router: Router | None = None,
    start: MakeRouter | None = None,
    seed: int = 0,
) -> BuiltMoe:
    """Fills the empty folder `out`. The routers are `router`, or what `start` makes once the experts are known to fit;
    by default small random numbers."""
    dense = read_config(base)
    moe_config(dense, num_experts=len(experts), top_k=top_k, shared=shared)  # fails before anything is read
    dense = with_defaults(dense)
    with ExitStack() as stack:
        source, chosen, collapsed = _opened(base, experts, stack, copies, "they would take memory and add nothing")
        config = moe_config(dense, num_experts=len(chosen), top_k=min(top_k, len(chosen)), shared=shared)
        config[EXPERT_NAMES] = list(chosen)
        make = router or (start(tuple(chosen)) if start else _random_router(len(chosen), dense, seed))
        mixture = _Mixture(
            family=_family(dense), base=source, experts=tuple(chosen.values()), shared=shared, router=make
        )
        dtype = _widest((source, *chosen.values()))
        _carry_texts(base, out, config)
        parameters = _write(out, config, mixture.layers(), dtype)
    require_same_tokenizer(base, out)
    return BuiltMoe(experts=tuple(chosen), collapsed=collapsed, parameters=parameters, dtype=_name(dtype))


def average_experts(base: Path, experts: Mapping[str, Path], out: Path, *, copies: Copies = "refuse") -> BuiltMoe:
    """A dense model of the base's architecture and size whose MLPs are the mean of the experts'. Read back, and
    compared with them."""
    with ExitStack() as stack:
        why = "the mean would be biased towards what they have learnt"
        source, chosen, collapsed = _opened(base, experts, stack, copies, why)

        def layers() -> Iterator[dict[str, Tensor]]:
            for names in _by_layer(source.names):
                yield {
                    name: _mean([w[name] for w in chosen.values()]) if _MLP.fullmatch(name) else source[name]
                    for name in names
                }

        dtype = _widest((source, *chosen.values()))
        copy_texts(base, out)
        parameters = _write(out, read_config(base), layers(), dtype)
        _require_mean(DenseWeights(out, stack), source, tuple(chosen.values()))
    return BuiltMoe(experts=tuple(chosen), collapsed=collapsed, parameters=parameters, dtype=_name(dtype))


def _opened(
    base: Path, experts: Mapping[str, Path], stack: ExitStack, copies: Copies, why: str
) -> tuple[DenseWeights, dict[str, DenseWeights], dict[str, str]]:
    """The base, the experts that are not copies of one another, and the copies. `why`: a copy is a problem."""
    config = read_config(base)
    for name, folder in experts.items():
        require_same_config(name, config, read_config(folder))
    source = DenseWeights(base, stack)
    opened = {name: DenseWeights(folder, stack) for name, folder in experts.items()}
    _require_same_tensors(source, opened)
    collapsed = _copies(source, opened)
    if collapsed and copies == "refuse":
        pairs = ", ".join(f"{name} of {other}" for name, other in collapsed.items())
        raise ModelError(f"experts are copies: {pairs}; {why}", "leave them out, or set copies: collapse")
    return source, {name: weights for name, weights in opened.items() if name not in collapsed}, collapsed


def _require_mean(found: DenseWeights, base: DenseWeights, experts: Sequence[DenseWeights]) -> None:
    """Every value is the mean of the experts' up to the last rounding; outside of the MLPs it is the base's."""
    for name in sorted(base.names):
        of = experts if _MLP.fullmatch(name) else (base,)
        value = found[name]
        apart = sum((weights[name].double() - value.double() for weights in of), torch.zeros(()).double()) / len(of)
        largest = max(float(weights[name].abs().max()) for weights in of)
        difference = float(apart.abs().max())
        if not difference <= torch.finfo(value.dtype).eps * largest:
            raise FinefitError(
                f"{name} was read back and is not the mean of {len(of)} tensors: it differs by {difference:.2g}",
                "the disk may be faulty; give the same command again",
            )


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([tensor.float() for tensor in tensors]).mean(0)


def _widest(several: Sequence[DenseWeights]) -> torch.dtype:
    """Training keeps trained weights in fp32 over a base in half precision."""
    found = {dtype for weights in several for dtype in weights.dtypes()}
    return found.pop() if len(found) == 1 else torch.float32


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mixture:
    family: MoeFamily
    base: DenseWeights
    experts: tuple[DenseWeights, ...]
    shared: Shared
    router: Router

    def layers(self) -> Iterator[dict[str, Tensor]]:
        for names in _by_layer(self.base.names):
            tensors: dict[str, Tensor] = {}
            for name in names:
                tensors |= self._mapped(name)
            if layer := _LAYER.match(names[0]):
                tensors |= self._routers(layer[0].rstrip("."), int(layer[1]))
            yield tensors

    def _mapped(self, name: str) -> dict[str, Tensor]:
        match = _MLP.fullmatch(name)
        if match is None:
            return {name: self.base[name]}
        prefix, part = match[1], match[2]
        # the other half comes from the shared expert, whose gate is half open
        is_halved = self.shared == "base" and part == "down"
        found = {
            f"{prefix}.{self.family.expert.format(at=at, part=self.family.parts[part])}": weights[name] / 2
            if is_halved
            else weights[name]
            for at, weights in enumerate(self.experts)
        }
        if self.family.has_shared:
            whole = self.base[name]
            one = whole[:, :PLACEHOLDER_SIZE] if part == "down" else whole[:PLACEHOLDER_SIZE]
            shared = whole if self.shared == "base" else torch.zeros_like(one)
            found[f"{prefix}.mlp.shared_expert.{part}_proj.weight"] = shared
        return found

    def _routers(self, prefix: str, layer: int) -> dict[str, Tensor]:
        weight = self.router(layer)
        hidden = self.base.shape(f"{prefix}.input_layernorm.weight")[0]
        if tuple(weight.shape) != (len(self.experts), hidden):
            raise ModelError(
                f"the router of layer {layer} is {tuple(weight.shape)}, and there are {len(self.experts)} experts of "
                f"{hidden} hidden values"
            )
        routers = {f"{prefix}.{self.family.router}": weight}
        if self.family.has_shared:
            routers[f"{prefix}.mlp.shared_expert_gate.weight"] = torch.zeros(1, hidden)
        return routers


def _random_router(num_experts: int, dense: Mapping[str, Any], seed: int) -> Router:
    scale = float(dense.get("initializer_range", 0.02))

    def router(layer: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed * 100_003 + layer)
        return torch.randn(num_experts, dense["hidden_size"], generator=generator) * scale

    return router


def _by_layer(names: set[str]) -> list[list[str]]:
    """What lies outside of the layers first, then layer by layer."""
    groups: dict[int, list[str]] = {}
    for name in sorted(names):
        match = _LAYER.match(name)
        groups.setdefault(int(match[1]) if match else -1, []).append(name)
    return [groups[at] for at in sorted(groups)]


def unknown_mlp_tensor(names: Iterable[str]) -> str | None:
    """The first tensor of a dense model that lies in an MLP and is not one of the parts that experts may differ in."""
    return min((name for name in names if ".mlp." in name and not _MLP.fullmatch(name)), default=None)


def _require_same_tensors(base: DenseWeights, experts: Mapping[str, DenseWeights]) -> None:
    """An expert has the base's tensors, in their shapes, and outside of its MLPs their values, rounded to its dtype."""
    if unknown := unknown_mlp_tensor(base.names):
        problem = f"the base's {unknown} is not a known part of an MLP"
        raise ModelError(problem, "take a dense base of another architecture")
    for expert, weights in experts.items():
        if odd := sorted(weights.names ^ base.names):
            raise ModelError(
                f"expert {expert} and the base do not have the same tensors: {', '.join(odd[:3])}",
                "train it from this base",
            )
        for name in sorted(base.names):
            if weights.shape(name) != base.shape(name):
                raise ModelError(
                    f"expert {expert} has {name} as {weights.shape(name)}, the base as {base.shape(name)}",
                    "train it from this base",
                )
        for name in sorted(base.names):
            if not _MLP.fullmatch(name) and not is_rounded(weights[name], base[name]):
                raise ModelError(
                    f"expert {expert} has changed {name}, which is not an MLP: a mixture has one of it, and would lose "
                    "the change",
                    "train experts with tuning: {kind: subset, trainable: [layers.*.mlp]}",
                )


def _copies(base: DenseWeights, experts: Mapping[str, DenseWeights]) -> dict[str, str]:
    first: dict[str, str] = {}
    names = sorted(name for name in base.names if _MLP.fullmatch(name))
    copies: dict[str, str] = {}
    for expert, weights in experts.items():
        digest = hashlib.sha256()
        for name in names:
            digest.update(weights[name].float().contiguous().view(torch.uint8).numpy().data)
        if (found := first.setdefault(digest.hexdigest(), expert)) != expert:
            copies[expert] = found
    return copies


def _write(out: Path, config: Mapping[str, Any], layers: Iterator[dict[str, Tensor]], dtype: torch.dtype) -> int:
    """One file for each layer, an index, the config. Returns the number of parameters."""
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


def _carry_texts(base: Path, out: Path, config: Mapping[str, Any]) -> None:
    """Checked beside the mixture's config, which `out` gets last."""
    with TemporaryDirectory(prefix=".", dir=out) as tried:
        copy_texts(base, Path(tried))
        write_text(Path(tried, "config.json"), json.dumps(config))
        keep_tokenizer(base, Path(tried))
        copy_texts(Path(tried), out)
