import torch
from torch.nn.functional import log_softmax

from finefit.objective.batch import Batch
from finefit.objective.sft import sft

LOGITS = torch.linspace(-3, 3, 15).reshape(3, 5)
BATCH = Batch(
    input_ids_BT=torch.zeros(1, 4, dtype=torch.long),
    positions_N=torch.tensor([0, 1, 2]),
    targets_N=torch.tensor([4, 0, 2]),
    num_supervised=3,
    num_tokens=4,
)


def test_the_loss_is_the_sum_of_surprises_and_comes_with_its_count() -> None:
    found = sft(lambda _, positions: LOGITS[positions], BATCH)
    wanted = -sum(log_softmax(LOGITS, dim=1)[row, target] for row, target in enumerate([4, 0, 2]))
    torch.testing.assert_close(found.total, wanted)
    assert found.count == 3


def test_bf16_logits_are_summed_in_fp32() -> None:
    found = sft(lambda _, positions: LOGITS[positions].to(torch.bfloat16), BATCH)
    assert found.total.dtype is torch.float32
    torch.testing.assert_close(found.total, sft(lambda _, positions: LOGITS[positions].to(torch.bfloat16).float(), BATCH).total, rtol=0, atol=0)
