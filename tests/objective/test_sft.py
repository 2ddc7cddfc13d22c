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
    found = sft(lambda _, positions, __: LOGPROBS[positions], BATCH)
    assert found.total.item() == 2.75
    assert found.count == 3


def test_an_objective_is_given_what_the_batch_holds() -> None:
    given: list[torch.Tensor] = []

    def forward(*tensors: torch.Tensor) -> torch.Tensor:
        given.extend(tensors)
        return LOGPROBS

    sft(forward, BATCH)
    assert [g is w for g, w in zip(given, (BATCH.input_ids_BT, BATCH.positions_N, BATCH.targets_N), strict=True)] == [True] * 3
