"""The objectives: supervised fine-tuning, direct preference optimisation, and training the routers of a mixture.

R sequences of P pairs, N supervised tokens; for routers N tokens of a batch, T of a row, L layers, E experts, of which
K answer a token.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from finefit.errors import FinefitError
from finefit.objective.batch import Batch, Forward, LossSum, Paired


class SftLoss:
    """Cross entropy of the answer's tokens."""

    def __call__(self, forward: Forward, batch: Batch) -> LossSum:
        logprobs_N = forward(batch)
        return LossSum(-logprobs_N.sum(), batch.num_supervised)

    def count(self, batch: Batch) -> int:
        return batch.num_supervised


sft_loss = SftLoss()


Reference = Callable[[Batch], Tensor]
"""Computes Sums_R of the log-probabilities under the starting weights, without gradient and dropout."""


class DpoLoss:
    """Raises the likelihood of the preferred answer against the other one, relative to the starting model."""

    def __init__(self, *, beta: float, reference: Reference) -> None:
        self.beta, self.reference = beta, reference

    def __call__(self, forward: Forward, batch: Batch) -> LossSum:
        """Both answers go through one forward. The reference comes first, while nothing is kept for backward."""
        reference_R = self.reference(batch)
        rewards_R = self.beta * (sequence_sums(forward(batch), paired_of(batch)) - reference_R)
        chosen_P, rejected_P = rewards_R.chunk(2)
        margins_P = chosen_P - rejected_P
        with torch.no_grad():
            measures = {
                "rewards_chosen": chosen_P.sum(),
                "rewards_rejected": rejected_P.sum(),
                "accuracy": (margins_P > 0).to(margins_P.dtype).sum(),
                "margin": margins_P.sum(),
            }
        return LossSum(-logsigmoid(margins_P).sum(), self.count(batch), measures)

    def count(self, batch: Batch) -> int:
        return paired_of(batch).num_pairs


def reference_from_batch(batch: Batch) -> Tensor:
    """The reference of a batch, if it was computed before the first step."""
    reference_R = paired_of(batch).reference_R
    assert reference_R is not None, "a batch without its reference"
    return reference_R


def sequence_sums(logprobs_N: Tensor, paired: Paired) -> Tensor:
    """The sum of each sequence, in the same order on every device: the split is known on the host."""
    return torch.stack([part.sum() for part in torch.split(logprobs_N, list(paired.supervised))])


def paired_of(batch: Batch) -> Paired:
    assert batch.paired is not None, "a batch of single rows where pairs are compared"
    return batch.paired


@dataclass(frozen=True, slots=True)
class Routed:
    """The output of one layer's router for all tokens of a batch, including padding."""

    logits_NE: Tensor
    weights_NK: Tensor
    chosen_NK: Tensor
    """Numbers of experts, the first choice first."""


Listen = Callable[[], AbstractContextManager[list[Routed]]]
"""Records the routers' outputs within the block, layer by layer; recomputation in backward adds nothing."""


class RouterLoss:
    """The language-model loss plus a balance loss that keeps a row's tokens from all going to the same experts.

    Balance is computed per row: over a micro-batch, the split into micro-batches would change the gradient. It is
    weighted by the row's supervised tokens, so that loss and balance are means over the same tokens. It is 1 if a row's
    tokens are spread evenly and E if all go to one expert; if every expert answers every token, it has no gradient."""

    def __init__(self, *, balance: float, listen: Listen) -> None:
        self.balance, self.listen = balance, listen

    def __call__(self, forward: Forward, batch: Batch) -> LossSum:
        with self.listen() as said:
            loss = -forward(batch).sum()
        balances, entropies = zip(*(_row_sums(said, *row) for row in _rows(batch)), strict=True)
        balance, entropy = torch.stack(balances).sum(), torch.stack(entropies).sum()
        measures = {"lm_loss": loss.detach(), "balance": balance.detach(), "entropy": entropy}
        return LossSum(loss + self.balance * balance, batch.num_supervised, measures)

    def count(self, batch: Batch) -> int:
        return batch.num_supervised


def _rows(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """For every sequence, the flat range of its tokens without padding and the number of supervised ones."""
    assert len(batch.lengths) == len(batch.supervised) == batch.num_sequences, "a batch that does not know its rows"
    width, begin = batch.input_ids_BT.shape[1], 0
    for at, (length, supervised) in enumerate(zip(batch.lengths, batch.supervised, strict=True)):
        begin = at * width if batch.packed is None else begin
        yield begin, begin + length, supervised
        begin += length


def _row_sums(said: list[Routed], begin: int, end: int, supervised: int) -> tuple[Tensor, Tensor]:
    """Balance and entropy of a row: means over its layers and tokens, times its supervised tokens."""
    logprobs_LTE = torch.stack([routed.logits_NE[begin:end] for routed in said]).to(torch.float32).log_softmax(-1)
    chosen_LTK = torch.stack([routed.chosen_NK[begin:end] for routed in said])
    probs_LTE = logprobs_LTE.exp()
    with torch.no_grad():
        shares_LE = torch.zeros_like(probs_LTE).scatter_(2, chosen_LTK, 1.0 / chosen_LTK.shape[2]).mean(1)
        entropy = -(probs_LTE * logprobs_LTE).sum(-1).mean()
    balance = (shares_LE * probs_LTE.mean(1)).sum(-1).mean() * probs_LTE.shape[2]
    return balance * supervised, entropy * supervised


COUNT = "count"
"""The key in `Extra.host` of what the model counts in a batch."""


class CustomLoss:
    """`forward` returns only the sum: see `CustomFamily.own_forward`."""

    def __call__(self, forward: Forward, batch: Batch) -> LossSum:
        return LossSum(forward(batch), self.count(batch))

    def count(self, batch: Batch) -> int:
        if batch.extra is None:
            raise FinefitError("a batch for a custom model lacks the inputs that the model makes")
        count: int = batch.extra.host[COUNT]
        return count


custom_loss = CustomLoss()
