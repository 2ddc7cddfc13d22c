"""Training the routers of a mixture of experts: the language-model loss, and what keeps a row's tokens from all going to the same experts.

Balance is a matter of one row: were it taken over a micro-batch, the cut into micro-batches would change the gradient. It weighs as much as the row
has supervised tokens, so that loss and balance are means over the same. It is 1 where a row's tokens are spread evenly, E where all go to one expert,
and has no gradient where every expert answers every token. N tokens of a batch, T of a row, L layers, E experts, of which K answer a token.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from finefit.objective.batch import Batch, Forward, LossSum


@dataclass(frozen=True, slots=True)
class Routed:
    """What the router of one layer said of all tokens of a batch, padding among them."""

    logits_NE: Tensor
    weights_NK: Tensor
    chosen_NK: Tensor
    """Numbers of experts, the first choice first."""


Listen = Callable[[], AbstractContextManager[list[Routed]]]
"""What the routers say within the block, layer by layer; a layer that backward computes again says nothing new."""


class RouterLoss:
    def __init__(self, *, balance: float, listen: Listen) -> None:
        self.balance, self.listen = balance, listen

    def __call__(self, forward: Forward, batch: Batch) -> LossSum:
        with self.listen() as said:
            loss = -forward(batch).sum()
        balances, entropies = zip(
            *(_row_sums(said, begin, end, supervised) for begin, end, supervised in _rows(batch)), strict=True
        )
        balance, entropy = torch.stack(balances).sum(), torch.stack(entropies).sum()
        measures = {"lm_loss": loss.detach(), "balance": balance.detach(), "entropy": entropy}
        return LossSum(loss + self.balance * balance, batch.num_supervised, measures)

    def count(self, batch: Batch) -> int:
        return batch.num_supervised


def _rows(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """Of every sequence the flat places of its tokens, and how many are supervised: known on the host, padding left out."""
    assert len(batch.lengths) == len(batch.supervised) == batch.num_sequences, "a batch that does not know its rows"
    width, begin = batch.input_ids_BT.shape[1], 0
    for at, (length, supervised) in enumerate(zip(batch.lengths, batch.supervised, strict=True)):
        begin = at * width if batch.packed is None else begin
        yield begin, begin + length, supervised
        begin += length


def _row_sums(said: list[Routed], begin: int, end: int, supervised: int) -> tuple[Tensor, Tensor]:
    """Balance and entropy of a row, means over its layers and tokens, times its supervised tokens."""
    logprobs_LTE = torch.stack([routed.logits_NE[begin:end] for routed in said]).to(torch.float32).log_softmax(-1)
    chosen_LTK = torch.stack([routed.chosen_NK[begin:end] for routed in said])
    probs_LTE = logprobs_LTE.exp()
    with torch.no_grad():
        shares_LE = torch.zeros_like(probs_LTE).scatter_(2, chosen_LTK, 1.0 / chosen_LTK.shape[2]).mean(1)
        entropy = -(probs_LTE * logprobs_LTE).sum(-1).mean()
    balance = (shares_LE * probs_LTE.mean(1)).sum(-1).mean() * probs_LTE.shape[2]
    return balance * supervised, entropy * supervised
