"""Tokens drawn by chance, so that one prompt gets several answers. What chance says to a row at a step is fixed beforehand by (seed, row, sample), so
an answer is the same whatever rows share its batch, but for what kernels round.
B rows, V words of the vocabulary.
"""

from collections.abc import Sequence
from functools import partial
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from finefit.evaluate.decoding import Choose


def chances(seed: int, row: str, sample: int, *, steps: int) -> list[float]:
    """Even numbers from 0 to 1, one for each step. `row`: what is asked, so that another row before it changes nothing."""
    digest = blake2b(f"{seed}\x1e{sample}\x1e{row}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
    drawn: list[float] = np.random.Generator(np.random.PCG64(int.from_bytes(digest))).random(steps).tolist()
    return drawn


def drawn_by(said: Sequence[Sequence[float]], *, temperature: float, device: str) -> Choose:
    """`said`: by chance, to each row at each step."""
    return partial(_drawn, torch.tensor(said, dtype=torch.float64, device=device), temperature)


def _drawn(said: Tensor, temperature: float, rows_B: Tensor, step: int, logits_BV: Tensor) -> Tensor:
    """The first word at which the summed probabilities pass what chance says. In float64, since sums over a vocabulary in less would cut its tail."""
    summed_BV = torch.softmax(logits_BV.to(torch.float64) / temperature, dim=-1).cumsum(-1)
    wanted_B1 = said[rows_B, step].unsqueeze(1) * summed_BV[:, -1:]
    tokens_B: Tensor = (
        torch.searchsorted(summed_BV, wanted_B1, right=True).squeeze(1).clamp_(max=logits_BV.shape[1] - 1)
    )
    return tokens_B
