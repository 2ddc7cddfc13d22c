"""After its first backward a run knows that every trained tensor was reached, or says which was not and why, before
anything is updated."""

import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from finefit.artifacts.atomic import read_lines
from finefit.artifacts.checkpoint import list_checkpoints
from finefit.errors import FindingError
from finefit.model.load import load_base
from finefit.step.engine import SINGLE_PROCESS
from finefit.train.audit import Audit
from finefit.train.ranks import ONE_RANK, Ranks
from tests.faults import Reference, at_step, change_model, events, failure_of, finish, run_to_end, send_self, start
from tests.mixtures import make_mixture_folder
from tests.ranks import Beside

FOUND = 1
FINITE = torch.tensor(True)


def test_every_run_audits_its_first_two_backwards(lora: Reference) -> None:
    """An adapter's A gets an exact zero from the first one, for its B is zero; from the second one nothing is zero any
    more."""
    where = run_to_end(lora.job)
    first, second = events(where, "audited")
    assert (first["step"], second["step"]) == (1, 2)
    assert (
        first["tensors"] == first["reached"] == second["reached"] == 28
    )  # A and B of seven layers' parts in two layers
    assert all("lora_A" in name for name in first["waiting"])
    assert len(first["waiting"]) == 7  # grouped: both layers in one name
    assert not {"zero", "faint", "not_finite", "idle"} & first.keys()
    assert not {"waiting", "zero", "faint", "not_finite", "idle"} & second.keys()


def test_a_tensor_that_no_gradient_reaches_stops_the_run_before_the_first_update(lora: Reference) -> None:
    where = lora.job.fresh()

    def detach(model: nn.Module) -> None:
        """As the user's own code may, of what one layer's projections make."""
        mlp = model.get_submodule("base_model.model.model.layers.1.mlp")
        mlp.register_forward_hook(lambda *given: given[-1].detach())

    assert finish(start(where, lambda: change_model(detach))) == FOUND
    failure = failure_of(where)
    assert failure.kind == "FindingError"
    assert failure.problem.startswith("6 of 28 trained tensors got no gradient from the first backward: ")
    assert "layers.1.mlp.down_proj.lora_A" in failure.problem
    assert "No update was made" in failure.problem
    assert "its output does not reach the loss" in failure.remedy
    assert list_checkpoints(where.checkpoints) == []
    assert [line for line in read_lines(where.metrics) if "loss" in line] == []


def test_a_policy_under_no_grad_is_named_with_its_cause(lora: Reference) -> None:
    where = lora.job.fresh()

    def blind(model: nn.Module) -> None:
        layer = model.get_submodule("base_model.model.model.layers.0.self_attn")
        layer.forward = torch.no_grad()(layer.forward)

    assert finish(start(where, lambda: change_model(blind))) == FOUND
    failure = failure_of(where)
    assert "self_attn" in failure.problem
    assert "no_grad" in failure.remedy


def test_a_run_that_goes_on_is_audited_again_and_expects_no_zeros(lora: Reference) -> None:
    where = lora.job.fresh()
    assert finish(start(where, lambda: at_step(5, lambda: send_self(signal.SIGTERM)))) == 3
    before = len(events(where, "audited"))
    assert finish(start(where)) == 0
    again = events(where, "audited")[before:]
    assert len(again) == 2
    assert all("waiting" not in line for line in again)


class Parts(nn.Module):
    """`used` is, `unused` is not; `experts` are used by chance; `off` is multiplied by zero; `faint` by next to
    nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.off, self.faint = (nn.Linear(3, 3, bias=False) for _ in range(4))
        self.mlp = nn.Module()
        self.mlp.experts = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.used(x) + 0.0 * self.off(x) + 1e-18 * self.faint(x) + self.mlp.experts[0](x)  # type: ignore[index, operator]
        return found


def make_audit(model: nn.Module, ranks: Ranks = ONE_RANK) -> tuple[Audit, list[dict[str, Any]]]:
    """And what it tells."""
    told: list[dict[str, Any]] = []
    return Audit(model, SINGLE_PROCESS, ranks, lambda **event: told.append(event)), told


def look(model: Parts, *, steps: int = 1) -> list[dict[str, Any]]:
    audit, told = make_audit(model)
    for step in range(1, steps + 1):
        model.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        audit.decide(step, lambda: model(torch.ones(2, 3)), FINITE)
    return told


def test_an_unused_module_is_an_error_with_its_reason_and_leaves_the_forward_as_it_was() -> None:
    """Only where something is missing is a loss computed once more, with hooks that are gone afterwards."""
    model = Parts()
    with pytest.raises(
        FindingError, match=r"1 of 6 trained tensors got no gradient from the first backward: unused\.weight"
    ) as raised:
        look(model)
    assert "unused: gets no input" in raised.value.remedy
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_an_expert_without_rows_is_named_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    model = Parts()
    del model.unused
    first, second = look(model, steps=4)  # a third backward is not audited
    assert first["idle"] == ["mlp.experts.1.weight"]
    assert (first["tensors"], first["reached"]) == (5, 4)
    assert second["zero"] == ["off.weight"]
    assert second["faint"] == ["faint.weight"]
    assert "exactly zero for off.weight" in caplog.text
    assert "rounding (below 1e-12 of the largest) for faint.weight" in caplog.text


def test_a_step_that_is_not_finite_names_its_tensors_and_is_not_counted() -> None:
    model = Parts()
    del model.unused
    audit, told = make_audit(model)
    model(torch.full((2, 3), float("nan"))).sum().backward()
    assert audit.decide(1, lambda: None, torch.tensor(False)) is False
    assert "used.weight" in told[0]["not_finite"]
    model.zero_grad()
    for step in (2, 3, 4):
        model(torch.ones(2, 3)).sum().backward()
        audit.decide(step, lambda: None, FINITE)
    assert [line["step"] for line in told] == [1, 2, 3]


def test_gradients_that_are_given_back_within_backward_are_heard_as_they_come_by() -> None:
    model = Parts()
    audit, told = make_audit(model)

    def given_back(parameter: nn.Parameter) -> None:
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(given_back)  # type: ignore[no-untyped-call]
    audit.hear()
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(
        FindingError, match=r"1 of 6 trained tensors got no gradient from the first backward: unused\.weight"
    ):
        audit.decide(1, lambda: model(torch.ones(2, 3)), FINITE)
    del model.unused
    for step in (1, 2):
        model(torch.ones(2, 3)).sum().backward()
        audit.decide(step, lambda: None, FINITE)
        audit.hear()
    assert [line["zero"] for line in told] == [["off.weight"], ["off.weight"]]
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_what_any_rank_holds_a_gradient_of_is_reached() -> None:
    model = Parts()
    audit, told = make_audit(model, Beside({"unused.weight": 1.0}))
    model(torch.ones(2, 3)).sum().backward()
    audit.decide(1, lambda: None, FINITE)
    assert told[0]["reached"] == 5


# Experts that share a tensor: the tensor has a gradient, and those that no token was sent to are named.

TOKENS = torch.arange(5, 205).view(1, 200)


@pytest.fixture
def mixture(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    """Four experts, of which a token meets two."""
    folder = make_mixture_folder(tmp_path_factory.mktemp("mixture") / "model", "qwen3", num_experts=4, top_k=2)
    model: nn.Module = load_base(folder, device="cpu", dtype=torch.float32).requires_grad_(True)
    return model


def _audited(model: nn.Module, *, inside: bool = False) -> dict[str, Any]:
    audit, told = make_audit(model)
    if inside:
        audit.hear()
    model(input_ids=TOKENS).logits.logsumexp(-1).sum().backward()
    audit.decide(1, lambda: None, torch.tensor(True))
    return told[0]


def _leave_out(model: nn.Module, experts: list[int]) -> None:
    """No token is sent to them: whatever a router says of them is lowered."""

    def lowered(logits_NE: torch.Tensor) -> torch.Tensor:
        return logits_NE.index_fill(1, torch.tensor(experts), -1e4)

    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda _, __, given: _routed(lowered(given[0])))


def _routed(logits_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weights_NK, chosen_NK = torch.topk(logits_NE.softmax(-1), 2, dim=-1)
    return logits_NE, weights_NK / weights_NK.sum(-1, keepdim=True), chosen_NK


@pytest.mark.parametrize("inside", [False, True], ids=["after backward", "within backward"])
def test_experts_without_tokens_are_named_by_their_numbers_and_no_error(mixture: nn.Module, inside: bool) -> None:
    _leave_out(mixture, [0, 3])
    found = _audited(mixture, inside=inside)
    assert set(found["idle"]) == {
        "model.layers.{0..1}.mlp.experts.{0,3}.down_proj",
        "model.layers.{0..1}.mlp.experts.{0,3}.gate_up_proj",
    }
    assert found["tensors"] == found["reached"] == len(list(mixture.parameters()))
    assert "zero" not in found


def test_experts_that_all_have_tokens_are_not_named(mixture: nn.Module) -> None:
    assert "idle" not in _audited(mixture)
