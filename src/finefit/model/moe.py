"""Trained copies of one dense model -> a mixture of experts that plain transformers loads, or their average.

Experts may differ from the base in their MLPs alone. Every tensor of the base is mapped or the build fails, and files are written layer by
layer, so memory holds one layer of the experts and no model. The config comes last: a folder that a kill left half written is no model.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from finefit.artifacts.atomic import full_disk_named, sync_file, write_text
from finefit.errors import FinefitError, ModelError
from finefit.facts.model import INDEX, find_texts, read_config
from finefit.model.alike import require_alike, resolved
from finefit.model.experts import STAND_IN
from finefit.model.same_tokenizer import keep_tokenizer, require_same_tokenizer
from finefit.model.weights import Weights, is_rounded

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_MLP = re.compile(r"(model\.layers\.\d+)\.mlp\.(gate|up|down)_proj\.weight")

EXPERT_NAMES = "expert_names"
"""A key of ours in the mixture's config; transformers keeps it, in checkpoints too."""

Router = Callable[[int], Tensor]
"""The router's weight in a layer, experts x hidden."""
MakeRouter = Callable[[tuple[str, ...]], Router]
"""Given the experts in their order, once it is known which of them are copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a dense architecture is written as a mixture of experts."""

    model_type: str
    architecture: str
    router: str
    expert: str
    """Name of an expert's tensor, with {at} and {part} in braces."""
    parts: Mapping[str, str]
    """What the parts of an MLP are called there."""
    num_experts: str
    """The config's key."""
    has_shared: bool = False
    dropped: tuple[str, ...] = ()
    """Keys of the dense config that must be off, since the mixture has no place for what they say."""


_NAMED = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    router="block_sparse_moe.gate.weight",
    expert="block_sparse_moe.experts.{at}.{part}.weight",
    parts={"gate": "w1", "up": "w3", "down": "w2"},
    num_experts="num_local_experts",
    dropped=("attention_bias", "mlp_bias"),
)
FAMILIES: dict[str, Family] = {
    "llama": _MIXTRAL,
    "mistral": _MIXTRAL,
    "qwen2": Family(
        model_type="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        router="mlp.gate.weight",
        expert="mlp.experts.{at}.{part}.weight",
        parts=_NAMED,
        num_experts="num_experts",
        has_shared=True,
    ),
    "qwen3": Family(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        router="mlp.gate.weight",
        expert="mlp.experts.{at}.{part}.weight",
        parts=_NAMED,
        num_experts="num_experts",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    experts: tuple[str, ...]
    """Those that became one, in their order."""
    collapsed: dict[str, str]
    """Copies of another expert, and of which."""
    parameters: int
    dtype: str
    """Torch's name of what all weights are stored in: nothing that an expert has learnt is rounded away."""


def moe_config(
    dense: Mapping[str, Any], *, num_experts: int, top_k: int, shared: Literal["none", "base"] = "none"
) -> dict[str, Any]:
    """The mixture's config.json, from that of its base: what a stage that trains it is planned with, before it exists."""
    family, dense = _family(dense), resolved(dense)
    if shared == "base" and not family.has_shared:
        raise ModelError(
            f"{family.model_type} has no shared expert", "set shared: none, or take a base of the qwen2 family"
        )
    if not 1 <= top_k <= num_experts:
        raise ModelError(f"top_k {top_k} of {num_experts} experts", f"give 1 to {num_experts}")
    if on := [key for key in family.dropped if dense.get(key)]:
        raise ModelError(
            f"the base has {', '.join(on)}, for which {family.model_type} has no tensors", "take another base"
        )
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
        config |= {
            "shared_expert_intermediate_size": dense["intermediate_size"] if shared == "base" else STAND_IN,
            "qkv_bias": True,
        }
    return config


def _windows(family: Family, dense: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers see only what is near, said as the mixture's architecture reads it. Qwen2-MoE would choose other layers than Qwen2 unless each
    is named, as they are in `layer_types`; Mixtral and Qwen3-MoE have one window for all layers."""
    if family.model_type == "mixtral":
        return {"sliding_window": dense.get("sliding_window")}
    kinds = set(dense["layer_types"])
    if family.model_type == "qwen3_moe" and len(kinds) > 1:
        sliding = dense["layer_types"].count("sliding_attention")
        raise ModelError(
            f"{sliding} of the base's {len(dense['layer_types'])} layers have a sliding window, and {family.model_type} has one in all or in none",
            "take another base, or one whose use_sliding_window is false",
        )
    return {"use_sliding_window": "sliding_attention" in kinds}


def _family(dense: Mapping[str, Any]) -> Family:
    kind = dense.get("model_type")
    if kind not in FAMILIES:
        raise ModelError(
            f"a model of type {kind} has no mixture-of-experts twin that is known here",
            f"take one of {', '.join(FAMILIES)}",
        )
    return FAMILIES[kind]


def build_moe(
    base: Path,
    experts: Mapping[str, Path],
    out: Path,
    *,
    top_k: int,
    shared: Literal["none", "base"] = "none",
    copies: Literal["refuse", "collapse"] = "refuse",
    router: Router | None = None,
    start: MakeRouter | None = None,
    seed: int = 0,
) -> Built:
    """Fills the empty folder `out`. The routers are `router`, or what `start` makes once the experts are known to be fit; by default small random
    numbers, which say nothing of who knows what."""
    dense = read_config(base)
    moe_config(
        dense, num_experts=len(experts), top_k=top_k, shared=shared
    )  # what cannot be is told before anything is read
    dense = resolved(dense)
    with ExitStack() as stack:
        source, opened = _opened(base, experts, stack)
        collapsed = _copies(source, opened)
        if copies == "refuse":
            _refuse(collapsed, "they would take memory and add nothing")
        chosen = {name: weights for name, weights in opened.items() if name not in collapsed}
        config = moe_config(dense, num_experts=len(chosen), top_k=min(top_k, len(chosen)), shared=shared) | {
            EXPERT_NAMES: list(chosen)
        }
        make = router or (start(tuple(chosen)) if start else _random_router(len(chosen), dense, seed))
        mixture = _Mixture(
            family=_family(dense), base=source, experts=tuple(chosen.values()), shared=shared, router=make
        )
        dtype = _widest((source, *chosen.values()))
        _carry_texts(base, out, config)
        parameters = _write(out, config, mixture.layers(), dtype)
    require_same_tokenizer(base, out)
    return Built(experts=tuple(chosen), collapsed=collapsed, parameters=parameters, dtype=_name(dtype))


def average(
    base: Path, experts: Mapping[str, Path], out: Path, *, copies: Literal["refuse", "collapse"] = "refuse"
) -> Built:
    """A dense model whose MLPs are the mean of the experts': of the base's architecture, of its size. Read back, and held against them."""
    dense = read_config(base)
    with ExitStack() as stack:
        source, opened = _opened(base, experts, stack)
        collapsed = _copies(source, opened)
        if copies == "refuse":
            _refuse(collapsed, "the mean would lean to what they have learnt")
        chosen = {name: weights for name, weights in opened.items() if name not in collapsed}

        def layers() -> Iterator[dict[str, Tensor]]:
            for names in _by_layer(source.names):
                yield {
                    name: _mean([w[name] for w in chosen.values()]) if _MLP.fullmatch(name) else source[name]
                    for name in names
                }

        dtype = _widest((source, *chosen.values()))
        copy_texts(base, out)
        parameters = _write(out, dense, layers(), dtype)
        _require_mean(Weights(out, stack), source, tuple(chosen.values()))
    return Built(experts=tuple(chosen), collapsed=collapsed, parameters=parameters, dtype=_name(dtype))


def _refuse(collapsed: Mapping[str, str], why: str) -> None:
    if collapsed:
        told = ", ".join(f"{name} of {other}" for name, other in collapsed.items())
        raise ModelError(f"experts are copies: {told}; {why}", "leave them out, or set copies: collapse")


def _require_mean(found: Weights, base: Weights, experts: Sequence[Weights]) -> None:
    """Every value as far from each expert's to the one side as to the other, but for the last rounding; outside of the MLPs the base's."""
    for name in sorted(base.names):
        of = experts if _MLP.fullmatch(name) else (base,)
        value = found[name]
        apart = sum((weights[name].double() - value.double() for weights in of), torch.zeros(()).double()) / len(of)
        largest = max(float(weights[name].abs().max()) for weights in of)
        if not float(apart.abs().max()) <= torch.finfo(value.dtype).eps * largest:
            raise FinefitError(
                f"{name} was read back and is not the mean of {len(of)} tensors: it differs by {float(apart.abs().max()):.2g}",
                "the disk may be faulty; give the same command again",
            )


def _opened(base: Path, experts: Mapping[str, Path], stack: ExitStack) -> tuple[Weights, dict[str, Weights]]:
    config = read_config(base)
    for name, folder in experts.items():
        require_alike(name, config, read_config(folder))
    source = Weights(base, stack)
    opened = {name: Weights(folder, stack) for name, folder in experts.items()}
    _require_same_tensors(source, opened)
    return source, opened


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([tensor.float() for tensor in tensors]).mean(0)


def _widest(several: Sequence[Weights]) -> torch.dtype:
    """Training keeps trained weights in fp32 over a base in halves."""
    found = {dtype for weights in several for dtype in weights.dtypes()}
    return found.pop() if len(found) == 1 else torch.float32


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mixture:
    family: Family
    base: Weights
    experts: tuple[Weights, ...]
    shared: Literal["none", "base"]
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
        is_halved = (
            self.shared == "base" and part == "down"
        )  # the other half comes from the shared expert, whose gate is open by half
        found = {
            f"{prefix}.{self.family.expert.format(at=at, part=self.family.parts[part])}": weights[name] / 2
            if is_halved
            else weights[name]
            for at, weights in enumerate(self.experts)
        }
        if self.family.has_shared:
            whole = self.base[name]
            one = whole[:, :STAND_IN] if part == "down" else whole[:STAND_IN]
            found[f"{prefix}.mlp.shared_expert.{part}_proj.weight"] = (
                whole if self.shared == "base" else torch.zeros_like(one)
            )
        return found

    def _routers(self, prefix: str, layer: int) -> dict[str, Tensor]:
        weight = self.router(layer)
        hidden = self.base.shape(f"{prefix}.input_layernorm.weight")[0]
        if tuple(weight.shape) != (len(self.experts), hidden):
            raise ModelError(
                f"the router of layer {layer} is {tuple(weight.shape)}, and there are {len(self.experts)} experts of {hidden} hidden values"
            )
        routers = {f"{prefix}.{self.family.router}": weight}
        if self.family.has_shared:
            routers[f"{prefix}.mlp.shared_expert_gate.weight"] = torch.zeros(1, hidden)
        return routers


def _random_router(num_experts: int, dense: Mapping[str, Any], seed: int) -> Router:
    def router(layer: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed * 100_003 + layer)
        return torch.randn(num_experts, dense["hidden_size"], generator=generator) * float(
            dense.get("initializer_range", 0.02)
        )

    return router


def _by_layer(names: set[str]) -> list[list[str]]:
    """What lies outside of the layers first, then layer by layer."""
    groups: dict[int, list[str]] = {}
    for name in sorted(names):
        match = _LAYER.match(name)
        groups.setdefault(int(match[1]) if match else -1, []).append(name)
    return [groups[at] for at in sorted(groups)]


def foreign_part(names: Iterable[str]) -> str | None:
    """Of a dense model's tensors the first that lies in an MLP and is none of the parts that experts may differ in."""
    return min((name for name in names if ".mlp." in name and not _MLP.fullmatch(name)), default=None)


def _require_same_tensors(base: Weights, experts: Mapping[str, Weights]) -> None:
    """An expert has the base's tensors, in their shapes, and outside of its MLPs their values, rounded to what it is stored in."""
    if foreign := foreign_part(base.names):
        raise ModelError(
            f"the base's {foreign} is no part of an MLP that is known here", "take a dense base of another architecture"
        )
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
                    f"expert {expert} has moved {name}, which is no MLP: a mixture has one of it, and would lose what it learnt there",
                    "train experts with tuning: {kind: subset, trainable: [layers.*.mlp]}",
                )


def _copies(base: Weights, experts: Mapping[str, Weights]) -> dict[str, str]:
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
    """One file for each layer, an index, the config. Returns how many parameters there are."""
    place: dict[str, str] = {}
    sizes = num_bytes = 0
    for at, found in enumerate(layers):
        name, tensors = (
            f"model-{at:05d}.safetensors",
            {key: tensor.to(dtype).contiguous() for key, tensor in found.items()},
        )
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        with full_disk_named(out / name, size):
            save_file(tensors, out / name, metadata={"format": "pt"})
            sync_file(out / name)
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
    """Tried beside the mixture's config, which `out` gets last."""
    with TemporaryDirectory(prefix=".", dir=out) as tried:
        copy_texts(base, Path(tried))
        write_text(Path(tried, "config.json"), json.dumps(config))
        keep_tokenizer(base, Path(tried))
        copy_texts(Path(tried), out)


def copy_texts(folder: Path, out: Path) -> None:
    """All that decides a model's answers beside its weights and their config; over what is there."""
    for name, path in find_texts(folder).items():
        if name != "config.json":
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, out / name)
