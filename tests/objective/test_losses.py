import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from finefit.data.collate import collate, pack
from finefit.data.examples import Example
from finefit.objective.batch import Batch, LossSum, Paired
from finefit.objective.losses import DpoLoss, Routed, RouterLoss, reference_from_batch, sft_loss

LOGPROBS = torch.tensor([-0.5, -2.0, -0.25])
BATCH = Batch(
    input_ids_BT=torch.zeros(1, 4, dtype=torch.long),
    positions_N=torch.tensor([0, 1, 2]),
    targets_N=torch.tensor([4, 0, 2]),
    num_supervised=3,
    num_tokens=4,
)


def test_the_loss_is_the_sum_of_surprises_and_comes_with_its_count() -> None:
    found = sft_loss(lambda batch: LOGPROBS[batch.positions_N], BATCH)
    assert found.total.item() == 2.75
    assert found.count == 3


BATCH_DPO = Batch(
    input_ids_BT=torch.zeros(4, 4, dtype=torch.long),
    positions_N=torch.arange(7),
    targets_N=torch.arange(7),
    num_supervised=7,
    num_tokens=16,
    paired=Paired(supervised=(2, 1, 3, 1)),
)
"""Two pairs: the preferred answers have 2 and 1 supervised tokens, their twins 3 and 1."""
LOGPROBS_DPO = torch.tensor([-1.0, -2.0, -0.5, -1.0, -1.0, -1.0, -4.0])
START = torch.tensor([-4.0, -0.5, -1.0, -3.0])


def test_the_loss_is_that_of_the_paper_summed_over_pairs() -> None:
    found = DpoLoss(beta=0.5, reference=lambda _: START)(lambda _: LOGPROBS_DPO, BATCH_DPO)
    gained = [(-3.0 - -4.0) - (-3.0 - -1.0), (-0.5 - -0.5) - (-4.0 - -3.0)]
    wanted = sum(math.log(1 + math.exp(-0.5 * gain)) for gain in gained)
    assert found.total.item() == pytest.approx(wanted, rel=1e-6)
    assert found.count == 2


def test_rewards_accuracy_and_margin_are_sums_without_gradient() -> None:
    logprobs = LOGPROBS_DPO.clone().requires_grad_()
    found = DpoLoss(beta=0.5, reference=lambda _: START)(lambda _: logprobs, BATCH_DPO)
    measures = {name: value.item() for name, value in found.measures.items()}
    assert measures == {"rewards_chosen": 0.5, "rewards_rejected": -1.5, "accuracy": 2.0, "margin": 2.0}
    assert found.total.requires_grad
    assert not any(value.requires_grad for value in found.measures.values())


def test_a_pair_that_stands_where_it_started_is_no_win() -> None:
    found = DpoLoss(beta=0.1, reference=lambda _: torch.tensor([-3.0, -0.5, -3.0, -4.0]))(
        lambda _: LOGPROBS_DPO, BATCH_DPO
    )
    assert found.total.item() / found.count == pytest.approx(math.log(2), abs=1e-7)
    assert found.measures["accuracy"].item() == 0


def test_the_preferred_answer_is_pushed_up_and_its_twin_down() -> None:
    logprobs = LOGPROBS_DPO.clone().requires_grad_()
    DpoLoss(beta=0.5, reference=lambda _: START)(lambda _: logprobs, BATCH_DPO).total.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert (logprobs.grad[:3] < 0).all()
    assert (logprobs.grad[3:] > 0).all()


def test_both_halves_go_through_one_forward_after_the_reference() -> None:
    calls: list[str] = []

    def forward(batch: Batch) -> Tensor:
        calls.append("policy" if batch is BATCH_DPO else "another batch")
        return LOGPROBS_DPO

    def reference(_: Batch) -> Tensor:
        calls.append("reference")
        return START

    DpoLoss(beta=0.1, reference=reference)(forward, BATCH_DPO)
    assert calls == ["reference", "policy"]


def test_a_reference_that_was_kept_comes_with_the_batch_and_moves_with_it() -> None:
    kept = replace(BATCH_DPO, paired=Paired(supervised=(2, 1, 3, 1), reference_R=START))
    assert reference_from_batch(kept.moved(lambda tensor: tensor + 1)).tolist() == (START + 1).tolist()
    assert reference_from_batch(kept).tolist() == START.tolist()


def test_a_pair_is_one_row_of_two_sequences() -> None:
    assert (BATCH_DPO.num_rows, BATCH_DPO.num_sequences) == (2, 4)
    assert replace(BATCH_DPO, paired=None).num_rows == 4
    assert DpoLoss(beta=0.1, reference=reference_from_batch).count(BATCH_DPO) == 2


# The router's objective against a plain implementation, number by number.

LENGTHS, SUPERVISED = (3, 6, 4), (1, 5, 2)
EXAMPLES = [
    Example(tokens=tuple(range(1, length + 1)), supervised=tuple(at >= length - answer for at in range(length)))
    for length, answer in zip(LENGTHS, SUPERVISED, strict=True)
]
PADDED, PACKED = collate(EXAMPLES, pad=0), pack(EXAMPLES)
LAYERS, EXPERTS, TOP_K = 2, 4, 2
LOGPROBS_ROUTER = -torch.arange(1.0, 9.0)


def make_logits(*, seed: int = 0) -> list[list[Tensor]]:
    """By row and layer, for the tokens that it has."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(length, EXPERTS, generator=generator, dtype=torch.float64) * 2 for _ in range(LAYERS)]
        for length in LENGTHS
    ]


def laid_out(rows: list[list[Tensor]], batch: Batch, *, padding: float = 9.0) -> list[Tensor]:
    """As a router would see them: one behind the other, or each with padding, which all wants the first expert."""
    width = batch.input_ids_BT.shape[1]
    layers = []
    for layer in range(LAYERS):
        parts = [row[layer] for row in rows]
        if batch.packed is None:
            empty = torch.zeros(1, EXPERTS, dtype=torch.float64)
            empty[0, 0] = padding
            parts = [torch.cat([part, empty.expand(width - len(part), -1)]) for part in parts]
        layers.append(torch.cat(parts))
    return layers


def taken(
    rows: list[list[Tensor]], batch: Batch, *, balance: float = 0.5, top_k: int = TOP_K, padding: float = 9.0
) -> LossSum:
    logits, said = laid_out(rows, batch, padding=padding), list[Routed]()

    @contextmanager
    def listen() -> Iterator[list[Routed]]:
        yield said
        assert said, "the forward ran outside of the block"

    def forward(_: Batch) -> Tensor:
        said.extend(Routed(layer, *layer.softmax(-1).topk(top_k)) for layer in logits)
        return LOGPROBS_ROUTER

    return RouterLoss(balance=balance, listen=listen)(forward, batch)


def plainly(rows: list[list[Tensor]], *, top_k: int = TOP_K) -> tuple[float, float]:
    """Balance and entropy, token by token."""
    balance = entropy = 0.0
    for row, supervised in zip(rows, SUPERVISED, strict=True):
        for layer in row:
            shares, means, disorder = [0.0] * EXPERTS, [0.0] * EXPERTS, 0.0
            for token in layer.tolist():
                exps = [math.exp(value) for value in token]
                probs = [value / sum(exps) for value in exps]
                for expert in sorted(range(EXPERTS), key=lambda e: -token[e])[:top_k]:
                    shares[expert] += 1 / top_k / len(layer)
                means = [mean + p / len(layer) for mean, p in zip(means, probs, strict=True)]
                disorder -= sum(p * math.log(p) for p in probs) / len(layer)
            balance += supervised / LAYERS * EXPERTS * sum(f * p for f, p in zip(shares, means, strict=True))
            entropy += supervised / LAYERS * disorder
    return balance, entropy


@pytest.mark.parametrize("batch", [PADDED, PACKED], ids=["padded", "packed"])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_loss_balance_and_entropy_are_those_of_the_formula(batch: Batch, top_k: int) -> None:
    rows = make_logits()
    found, (balance, entropy) = taken(rows, batch, top_k=top_k), plainly(rows, top_k=top_k)
    assert found.count == 8
    assert found.measures["lm_loss"].item() == pytest.approx(36.0)
    assert found.measures["balance"].item() == pytest.approx(balance, rel=1e-5)
    assert found.measures["entropy"].item() == pytest.approx(entropy, rel=1e-5)
    assert found.total.item() == pytest.approx(36.0 + 0.5 * balance, rel=1e-5)


def test_what_padding_would_choose_changes_nothing() -> None:
    rows = make_logits()
    assert taken(rows, PADDED, padding=9.0).total.item() == taken(rows, PADDED, padding=-9.0).total.item()


def test_the_sum_over_rows_is_the_same_in_any_cut() -> None:
    rows = make_logits()
    alone = [taken_alone(rows, at) for at in range(3)]
    assert sum(alone) == pytest.approx(taken(rows, PADDED).measures["balance"].item(), rel=1e-6)


def taken_alone(rows: list[list[Tensor]], at: int) -> float:
    batch = collate([EXAMPLES[at]], pad=0)
    said = [Routed(layer, *layer.softmax(-1).topk(TOP_K)) for layer in rows[at]]

    @contextmanager
    def listen() -> Iterator[list[Routed]]:
        yield said

    return RouterLoss(balance=0.5, listen=listen)(lambda _: LOGPROBS_ROUTER[:1], batch).measures["balance"].item()


def test_balance_is_one_where_tokens_are_spread_evenly_and_all_experts_where_one_has_them() -> None:
    even = [[torch.zeros(length, EXPERTS, dtype=torch.float64) for _ in range(LAYERS)] for length in LENGTHS]
    assert taken(even, PACKED).measures["balance"].item() == pytest.approx(8)
    one = [
        [torch.tensor([50.0, 0, 0, 0], dtype=torch.float64).expand(length, -1) for _ in range(LAYERS)]
        for length in LENGTHS
    ]
    assert taken(one, PACKED, top_k=1).measures["balance"].item() == pytest.approx(8 * EXPERTS)
    assert taken(one, PACKED, top_k=EXPERTS).measures["balance"].item() == pytest.approx(
        8
    )  # nothing to balance where all answer


def test_balance_draws_tokens_away_from_the_expert_that_has_most() -> None:
    rows = [[(layer + torch.tensor([9.0, 0, 0, 0])).requires_grad_() for layer in row] for row in make_logits()]
    found = taken(rows, PACKED, balance=1.0, top_k=1)
    assert not any(value.requires_grad for value in found.measures.values())
    found.total.backward()  # type: ignore[no-untyped-call]
    gradients = [layer.grad for row in rows for layer in row if layer.grad is not None]
    assert len(gradients) == 3 * LAYERS
    assert all(gradient[:, 0].sum() > 0 for gradient in gradients)


def test_a_batch_that_does_not_know_its_rows_is_a_fault() -> None:
    with pytest.raises(AssertionError, match="does not know its rows"):
        taken(make_logits(), replace(PADDED, lengths=()))
