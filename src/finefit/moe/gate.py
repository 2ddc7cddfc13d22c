"""A linear choice among experts by the mean of a prompt's input embeddings.

The score of a mean is the mean of scores, so such a gate is a table of one score per token and expert. It depends on
the tokens of a prompt, but not on their order, nor on the hidden states that a mixture's router sees. Only the model's
embeddings are read, some rows at a time.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from finefit.artifacts.records import SequenceGate, read_record
from finefit.errors import ModelError
from finefit.facts.files import find_weight_files, read_weight_file

GATE_RECORD = "gate.json"
GATE_TABLE = "gate.safetensors"
GATE_SCORES = "scores"
"""The tensor of the table that choosing needs: tokens x experts."""
# Shapes: N prompts, V tokens of the vocabulary, D width of an embedding, K experts.
_NAMES = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "tok_embeddings.weight")
_ROWS = 8192
"""Rows of the embeddings read at a time."""
_PROMPTS = 32
"""Prompts per step."""
_DECAY = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptGate:
    """Scores are weight_KD times the distance of a mean from the centre of all prompts, in units of the prompts'
    spread."""

    weight_KD: Tensor
    centre_D: Tensor
    unit: float


def mean_embeddings(folder: Path, prompts: Sequence[Sequence[int]]) -> Tensor:
    """N x D."""
    row_of = torch.tensor([at for at, prompt in enumerate(prompts) for _ in prompt])
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    lengths_N = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.float32)
    with _embeddings(folder) as table:
        _require_known(tokens, table.get_shape()[0])
        sums_ND = torch.zeros(len(prompts), table.get_shape()[1])
        for start, part in _parts(table):
            inside = (tokens >= start) & (tokens < start + len(part))
            places = torch.stack([row_of[inside], tokens[inside] - start])
            ones, size = torch.ones(places.shape[1]), (len(prompts), len(part))
            counts = torch.sparse_coo_tensor(places, ones, size, check_invariants=True)
            sums_ND += torch.sparse.mm(counts, part)
    return sums_ND / lengths_N[:, None]


def fit_gate(means_ND: Tensor, labels_N: Tensor, *, num_experts: int, epochs: int, lr: float, seed: int) -> PromptGate:
    """Experts weigh equally, whatever their number of prompts: in the loss and, since there is no bias, in the
    centre."""
    weights_K = len(labels_N) / (num_experts * torch.bincount(labels_N, minlength=num_experts).float())
    weights_N1 = weights_K[labels_N][:, None]
    centre_D = (weights_N1 * means_ND).mean(0)
    unit = float((weights_N1 * (means_ND - centre_D).square()).mean().sqrt().clamp(min=1e-12))
    inputs_ND = (means_ND - centre_D) / unit
    weight_KD = torch.zeros(num_experts, means_ND.shape[1], requires_grad=True)
    optimizer = torch.optim.AdamW([weight_KD], lr=lr, weight_decay=_DECAY)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for chosen in torch.split(torch.randperm(len(labels_N), generator=generator), _PROMPTS):
            optimizer.zero_grad()
            scores_NK = inputs_ND[chosen] @ weight_KD.T
            loss = torch.nn.functional.cross_entropy(scores_NK, labels_N[chosen], weight=weights_K)
            torch.autograd.backward(loss)
            optimizer.step()
    return PromptGate(weight_KD=weight_KD.detach(), centre_D=centre_D, unit=unit)


def token_scores(folder: Path, gate: PromptGate) -> Tensor:
    """V x K: the gate as a table, which no longer needs the model."""
    with _embeddings(folder) as table:
        return torch.cat([((part - gate.centre_D) / gate.unit) @ gate.weight_KD.T for _, part in _parts(table)])


def _parts(table: Any) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, table.get_shape()[0], _ROWS):
        yield start, table[start : start + _ROWS].float()


@contextmanager
def _embeddings(folder: Path) -> Iterator[Any]:
    """A slice of the file; nothing is read yet."""
    for file in find_weight_files(folder):
        with safe_open(folder / file, framework="pt") as opened:
            found = [name for name in opened.keys() if name.endswith(_NAMES)]  # noqa: SIM118  (not a mapping)
            if found:
                table = opened.get_slice(found[0])
                if len(table.get_shape()) != 2 or table.get_dtype() not in ("F32", "F16", "BF16", "F64"):
                    problem = f"{found[0]} of {folder} is stored as {table.get_dtype()}, which is not a plain table"
                    raise ModelError(problem, "take an unquantised base")
                yield table
                return
    raise ModelError(f"{folder} has no input embeddings under a known name: {', '.join(_NAMES)}", "take another base")


def _require_known(tokens: Tensor, size: int) -> None:
    if not len(tokens):
        raise ModelError("a prompt has no tokens, so no expert can be chosen", "give every row a prompt")
    if int(tokens.max()) >= size:
        problem = f"token {int(tokens.max())} is beyond the base's {size} embeddings"
        raise ModelError(problem, "take the tokenizer that the base came with")


def choose_experts(folder: Path, tokens: Sequence[Sequence[int]]) -> list[str]:
    """The name of an expert for each prompt, given as token ids. If scores are equal, the first expert is chosen."""
    experts = read_record(folder / GATE_RECORD, SequenceGate).experts
    try:
        read_weight_file(folder / GATE_TABLE)  # a file, and as large as its header says
        scores_VK = load_file(folder / GATE_TABLE)[GATE_SCORES]
    except (OSError, ModelError, SafetensorError, KeyError) as error:
        problem = f"{folder / GATE_TABLE} holds no gate: {error}"
        raise ModelError(problem, "make it again: finefit run SPEC --force STAGE") from None
    return experts_chosen(scores_VK, experts, tokens)


def experts_chosen(scores_VK: Tensor, experts: Sequence[str], tokens: Sequence[Sequence[int]]) -> list[str]:
    prompts = [torch.tensor(list(prompt)) for prompt in tokens]
    for prompt in prompts:
        _require_known(prompt, len(scores_VK))
    return [experts[int(scores_VK[prompt].mean(0).argmax())] for prompt in prompts]
