"""Planted faults: each keeps the gradient from a trained tensor, or takes a tensor out of training, and is named with
its cause."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from finefit.artifacts.forecasts import grouped_names
from finefit.artifacts.records import Levers
from finefit.errors import ModelError
from finefit.rehearse.fake_model import StepConfig, measure_size
from finefit.rehearse.rehearsal import Rehearsal, explain, frozen_adapters, rehearse
from finefit.spec.models import Full, Lora, Tuning
from finefit.spec.schema import AdamW

BACKBONE = "base_model.model.model"
REENTRANT = "re-entrant checkpointing passes no gradient to layers whose input requires none"
LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def cfg(*, tuning: Tuning | None = None, levers: Levers | None = None) -> StepConfig:
    return StepConfig(
        config=LLAMA,
        tuning=tuning or Lora(kind="lora", rank=4, alpha=8),
        optimizer=AdamW(lr=1e-2),
        device="cpu",
        capability=(0, 0),
        precision="fp32",
        levers=levers or Levers(micro_batch=2),
        tokens=12,
        supervised=5,
        accumulates=False,
    )


def backbone(model: nn.Module) -> Any:
    return model.get_submodule(BACKBONE)


def unreached_modules(rehearsed: Rehearsal) -> list[str]:
    return grouped_names(name.partition(".lora_")[0].removesuffix(".weight") for name in rehearsed.unreached)


class Tower(nn.Module):
    """A frozen projection with an adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16, device="meta").requires_grad_(False)
        self.lora_A = nn.Linear(16, 4, bias=False, device="meta")
        self.lora_B = nn.Linear(4, 16, bias=False, device="meta")

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.base(hidden) + self.lora_B(self.lora_A(hidden))
        return out


def without_gradients(module: nn.Module) -> None:
    module.forward = torch.no_grad()(module.forward)


# nothing is wrong


@pytest.mark.parametrize("tuning", [Lora(kind="lora", rank=4), Full(kind="full")], ids=lambda tuning: str(tuning.kind))
@pytest.mark.parametrize(
    "levers",
    [Levers(micro_batch=1), Levers(micro_batch=1, recompute=2, loss_chunk=2, mlp_tiles=2)],
    ids=["kept", "recomputed"],
)
def test_every_tensor_of_a_sound_model_is_reached(tuning: Tuning, levers: Levers) -> None:
    whole = cfg(tuning=tuning, levers=levers)
    kept: list[nn.Module] = []
    rehearsed = rehearse(whole, kept.append)
    assert frozen_adapters(kept[0]) == ()
    assert measure_size(whole).trainable_tensors > 0
    assert rehearsed.unreached == ()
    assert rehearsed.causes == ()


# re-entrant checkpointing


class Checkpointed(nn.Module):
    """As models of the hub's own code do it: the flag and the function are the caller's, not the layer's."""

    gradient_checkpointing = True

    def __init__(self, layer: nn.Module, recompute: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = layer
        self._gradient_checkpointing_func = recompute

    def forward(self, hidden: Tensor, **rest: Any) -> Any:
        return self._gradient_checkpointing_func(partial(self.layer, **rest), hidden)


def checkpointed(model: nn.Module, *, recompute: Callable[..., Any]) -> None:
    layers = backbone(model).layers
    for at, layer in enumerate(layers):
        layers[at] = Checkpointed(layer, recompute)


def checkpointed_soundly(model: nn.Module) -> None:
    checkpointed(model, recompute=partial(checkpoint, use_reentrant=True))
    model.get_base_model().enable_input_require_grads()  # type: ignore[operator]


def set_to_re_entrant(model: nn.Module) -> None:
    """The levers put it right."""
    for layer in backbone(model).layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=True)


def with_a_used_tower(model: nn.Module) -> None:
    layer = backbone(model).layers[0]
    layer.tower = Tower()
    layer.mlp.register_forward_hook(lambda _, __, out: out + layer.tower(out))


SOUND: dict[str, Callable[[nn.Module], None]] = {
    "re-entrant with input gradients": checkpointed_soundly,
    "non-reentrant": partial(checkpointed, recompute=partial(checkpoint, use_reentrant=False)),
    "set to re-entrant before the levers": set_to_re_entrant,
    "a tower that is used": with_a_used_tower,
}


@pytest.mark.parametrize("adjust", SOUND.values(), ids=SOUND)
def test_sound_models_are_not_accused(adjust: Callable[[nn.Module], None]) -> None:
    levers = Levers(micro_batch=1, recompute=2 if adjust is set_to_re_entrant else 0)
    assert rehearse(cfg(levers=levers), adjust).unreached == ()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_re_entrant_checkpointing_over_frozen_embeddings_is_named() -> None:
    rehearsed = rehearse(cfg(), partial(checkpointed, recompute=partial(checkpoint, use_reentrant=True)))
    assert len(rehearsed.unreached) == measure_size(cfg()).trainable_tensors
    (cause,) = rehearsed.causes
    assert cause.startswith(f"{BACKBONE}.layers.{{0..1}}.layer: {REENTRANT}")
    assert "enable_input_require_grads()" in cause


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_re_entrant_checkpointing_of_a_single_forward_is_named() -> None:
    def adjust(model: nn.Module) -> None:
        attention = backbone(model).layers[0].self_attn
        projection = attention.q_proj
        projection.forward = partial(checkpoint, projection.forward, use_reentrant=True)

    rehearsed = rehearse(cfg(), adjust)
    assert unreached_modules(rehearsed) == [f"{BACKBONE}.layers.0.self_attn.q_proj"]
    assert len(rehearsed.causes) == 1
    assert REENTRANT in rehearsed.causes[0]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_checkpointing_that_cannot_be_looked_into_is_named_as_a_possible_cause() -> None:
    def adjust(model: nn.Module) -> None:
        layer = backbone(model).layers[0]
        forward = layer.forward

        @wraps(forward)
        def hidden_away(hidden: Tensor, **rest: Any) -> Any:
            return checkpoint(partial(forward, **rest), hidden, use_reentrant=True)

        layer.forward = hidden_away

    rehearsed = rehearse(cfg(), adjust)
    assert {".layers.0." in name for name in rehearsed.unreached} == {True}
    (cause,) = rehearsed.causes
    assert "is computed under no_grad" in cause
    assert REENTRANT in cause


# no_grad


def test_a_layer_under_no_grad_is_named() -> None:
    rehearsed = rehearse(cfg(), lambda model: without_gradients(backbone(model).layers[1].mlp))
    linear = [f"{BACKBONE}.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")]
    assert unreached_modules(rehearsed) == linear
    (cause,) = rehearsed.causes
    assert cause.startswith(f"{', '.join(linear)}: is computed under no_grad")
    assert "checkpointing" not in cause, "its input requires gradients, so this is not in question"


def test_no_grad_inside_a_re_entrant_layer_is_not_blamed_on_checkpointing() -> None:
    def adjust(model: nn.Module) -> None:
        without_gradients(backbone(model).layers[1].mlp)
        checkpointed_soundly(model)

    (cause,) = rehearse(cfg(), adjust).causes
    assert "is computed under no_grad" in cause
    assert "checkpointing" not in cause


def test_what_lies_behind_a_layer_under_no_grad_is_told_apart_from_it() -> None:
    """Layer 1 is computed under no_grad: layer 0 was called with gradients, and none can come back to it."""
    rehearsed = rehearse(cfg(), lambda model: without_gradients(backbone(model).layers[1]))
    assert len(rehearsed.unreached) == measure_size(cfg()).trainable_tensors
    behind, blind = rehearsed.causes
    assert "layers.0." in behind
    assert "its output does not reach the loss" in behind
    assert "layers.1." in blind
    assert "is computed under no_grad" in blind


def test_a_backbone_under_no_grad_has_one_cause() -> None:
    """All that backward says of it is that element 0 of tensors does not require grad."""
    rehearsed = rehearse(cfg(), lambda model: without_gradients(backbone(model)))
    assert len(rehearsed.unreached) == measure_size(cfg()).trainable_tensors
    (cause,) = rehearsed.causes
    assert cause.startswith(f"{BACKBONE}.layers.{{0..1}}: is computed under no_grad")


def test_no_grad_around_the_whole_model_is_not_blamed_on_its_checkpointing() -> None:
    """A decorator on the function that takes log-probabilities, which calls the policy too."""
    kept: list[nn.Module] = []

    def adjust(model: nn.Module) -> None:
        kept.append(model)
        checkpointed_soundly(model)

    assert rehearse(cfg(), adjust).unreached == ()
    (model,) = kept
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    (cause,) = explain(model, trained, {name: False for name, _ in model.named_modules() if name.startswith(BACKBONE)})
    assert cause.startswith(f"{BACKBONE}: is computed under no_grad")
    assert "checkpointing" not in cause


# no input, no output


def test_a_tower_that_the_batch_does_not_feed_is_named_as_a_whole() -> None:
    def adjust(model: nn.Module) -> None:
        backbone(model).tower = nn.ModuleList([Tower(), Tower()])

    rehearsed = rehearse(cfg(), adjust)
    assert len(rehearsed.unreached) == 4
    assert rehearsed.causes == (
        (
            f"{BACKBONE}.tower: gets no input (a tower that the batch does not use); feed it, or leave it out of "
            "tuning.targets"
        ),
    )


def test_layers_that_are_passed_over_are_grouped_by_their_numbers() -> None:
    def adjust(model: nn.Module) -> None:
        for layer in backbone(model).layers:
            layer.mlp.forward = lambda hidden: hidden

    (cause,) = rehearse(cfg(), adjust).causes
    linear = [f"{BACKBONE}.layers.{{0..1}}.mlp.{name}_proj" for name in ("gate", "up", "down")]
    assert cause.startswith(f"{', '.join(linear)}: gets no input")


def test_a_merged_adapter_is_named() -> None:
    def adjust(model: nn.Module) -> None:
        backbone(model).layers[1].self_attn.q_proj.merged_adapters.append("default")

    (cause,) = rehearse(cfg(), adjust).causes
    assert cause.startswith(f"{BACKBONE}.layers.1.self_attn.q_proj: is called without its adapter")


@pytest.mark.parametrize("use", [lambda _: 0, lambda extra: extra.detach()], ids=["thrown away", "detached"])
def test_an_output_that_is_not_used_is_named(use: Callable[[Tensor], Any]) -> None:
    def adjust(model: nn.Module) -> None:
        layer = backbone(model).layers[0]
        layer.tower = Tower()
        layer.mlp.register_forward_hook(lambda _, __, out: out + use(layer.tower(out)))

    rehearsed = rehearse(cfg(), adjust)
    assert unreached_modules(rehearsed) == [f"{BACKBONE}.layers.0.tower"]
    (cause,) = rehearsed.causes
    assert cause.startswith(f"{BACKBONE}.layers.0.tower: its output does not reach the loss")


def test_each_fault_has_its_own_sentence() -> None:
    def adjust(model: nn.Module) -> None:
        backbone(model).tower = Tower()
        without_gradients(backbone(model).layers[1].mlp)

    causes = rehearse(cfg(), adjust).causes
    assert [("no input" in cause, "no_grad" in cause) for cause in causes] == [(False, True), (True, False)]


def test_a_trained_tensor_outside_of_any_called_module_is_explained() -> None:
    model = nn.Module()
    model.scale = nn.Parameter(torch.ones(1))
    model.inner = nn.Linear(1, 1)
    (cause,) = explain(model, ["scale"], {"inner": True})
    assert cause.startswith("the model: gets no input")


# frozen adapters


def test_frozen_adapters_are_named_though_no_gradient_is_missing() -> None:
    kept: list[nn.Module] = []

    def adjust(model: nn.Module) -> None:
        kept.append(model)
        for layer in backbone(model).layers:
            layer.mlp.up_proj.lora_B.requires_grad_(False)

    assert rehearse(cfg(), adjust).unreached == ()
    assert frozen_adapters(kept[0]) == (f"{BACKBONE}.layers.{{0..1}}.mlp.up_proj.lora_B.default.weight",)


# targets


def test_a_target_that_matches_nothing_is_refused_with_the_known_layers() -> None:
    with pytest.raises(ModelError, match="query_proj matches no linear layer") as error:
        rehearse(cfg(tuning=Lora(kind="lora", targets=("q_proj", "query_proj"))))
    assert error.value.remedy == "its linear layers are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"


# names


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], []),
        (["head"], ["head"]),
        (["layers.3.q"], ["layers.3.q"]),
        (["layers.0.q", "layers.1.q", "layers.2.q"], ["layers.{0..2}.q"]),
        (["layers.10.q", "layers.9.q", "layers.2.q", "layers.11.q"], ["layers.{2,9..11}.q"]),
        (["layers.0.q", "layers.0.k", "layers.1.q", "layers.1.k"], ["layers.{0..1}.q", "layers.{0..1}.k"]),
        (["l.0.e.0", "l.0.e.1", "l.1.e.0", "l.1.e.1"], ["l.{0..1}.e.{0..1}"]),
        (["l.0.e.0", "l.0.e.1", "l.1.e.0"], ["l.{0..1}.e.0", "l.0.e.1"]),
        (["l.0", "l.0.q", "l.1"], ["l.{0..1}", "l.0.q"]),
        (["q", "q"], ["q"]),
        (["conv2d.0", "conv3d.0"], ["conv2d.0", "conv3d.0"]),
    ],
)
def test_names_that_differ_in_numbers_are_grouped(names: list[str], expected: list[str]) -> None:
    assert grouped_names(names) == expected
