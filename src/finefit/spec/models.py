"""The model, and which of its weights are trained."""

from typing import Annotated, Any, Literal

from pydantic import Field

from finefit.spec import Part


class HubModel(Part):
    """A model of the Hugging Face hub, downloaded once."""

    kind: Literal["hub"]
    id: str
    """Repository on the hub, `owner/name`."""
    revision: str = "main"
    """Branch, tag or commit."""


class FolderModel(Part):
    """A model on this machine."""

    kind: Literal["folder"]
    path: str
    """A folder that transformers can load, relative to the spec file."""


class EmbeddedModel(Part):
    """A small model to try things with."""

    kind: Literal["embedded"]
    name: Literal["smollm2-135m"]
    """A model that an installed package contains: nothing is downloaded."""


class ShapeModel(Part):
    """The architecture of a model without its weights, to plan with."""

    kind: Literal["shape"]
    config: dict[str, Any]
    """The contents of a `config.json`, with `model_type`: enough to plan, but nothing to train."""


Tower = Literal["language", "vision", "projector"]
"""The towers of a vision-language model."""
Layers = Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)]


class CustomModel(Part):
    """A model of your own, built by a Python file. By naming the file here you consent to running it; its digest is
    shown and recorded."""

    kind: Literal["custom"]
    file: str
    """A Python file, relative to the spec file."""
    entry: str = "build"
    """The function that builds the model from `config`."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Passed to the function unchanged."""
    tokenizer: Annotated[HubModel | FolderModel | EmbeddedModel, Field(discriminator="kind")]
    """The model whose tokenizer and chat template are used."""
    weights: str | None = None
    """A safetensors file or a folder of them to start from, relative to the spec file; None: the function's own
    initialisation, seeded by the spec."""


Model = Annotated[HubModel | FolderModel | EmbeddedModel | ShapeModel | CustomModel, Field(discriminator="kind")]


class Lora(Part):
    """Low-rank adapters are trained, and the weights of the model stay unchanged."""

    kind: Literal["lora"]
    rank: int = Field(16, ge=1)
    """Rank of every adapter; memory and capacity grow linearly with it."""
    alpha: float = Field(32, gt=0)
    """Adapter outputs are scaled by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: Layers | dict[Tower, Layers] = "all-linear"
    """`all-linear` (every linear layer but the head; the plan names those that cannot carry an adapter and are left
    out), or names of linear layers such as [q_proj, v_proj]. In a vision-language model these are of the language
    tower; others are named by tower: {language: all-linear, vision: [qkv], projector: all-linear}."""
    experts: bool = False
    """Adapters also on the weights of the experts of a mixture, of `rank` for each expert (peft's
    target_parameters)."""
    base_bits: Literal[4, 8] | None = None
    """4: the frozen weights in NF4, 8: in 8 bits (both need bitsandbytes). Lossy, so never chosen automatically."""
    rank_stabilised: bool = False
    """Adapter outputs are scaled by alpha / sqrt(rank) instead of alpha / rank."""
    dora: bool = False
    """Direction and length of every weight are trained separately (DoRA): slower, often better at low rank."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """Type of the adapter's weights, gradients and moments. bf16 loses small updates, so it is never chosen
    automatically."""
    adapter: str | None = None
    """A folder with an adapter to continue from, relative to the spec file; no second one is added to it."""


class Full(Part):
    """All weights are trained."""

    kind: Literal["full"]


class Subset(Part):
    """The weights of some modules are trained."""

    kind: Literal["subset"]
    trainable: tuple[str, ...] = Field(min_length=1)
    """Modules whose weights are trained, by name, with `*` for a part of it: [layers.*.mlp]. All else stays unchanged,
    which is verified. In a vision-language model also towers: [projector, language]."""


Tuning = Annotated[Lora | Full | Subset, Field(discriminator="kind")]
