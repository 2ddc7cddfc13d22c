import torch

from finefit.objective.batch import Batch
from finefit.objective.sft import sft

LOGPROBS = torch.tensor([-0.5, -2.0, -0.25])
BATCH = Batch(
    input_ids_BT=torch.zeros(1, 4, dtype=torch.long),
    positions_N=torch.tensor([0, 1, 2]),
    targets_N=torch.tensor([4, 0, 2]),
    num_supervised=3,
    num_tokens=4,
)


def test_the_loss_is_the_sum_of_surprises_and_comes_with_its_count() -> None:
    found = sft(lambda batch: LOGPROBS[batch.positions_N], BATCH)
    assert found.total.item() == 2.75
    assert found.count == 3


def test_an_objective_hands_its_batch_on_as_it_is() -> None:
    given: list[Batch] = []

    def forward(batch: Batch) -> torch.Tensor:
        given.append(batch)
        return LOGPROBS

    sft(forward, BATCH)
    assert [batch is BATCH for batch in given] == [True]
