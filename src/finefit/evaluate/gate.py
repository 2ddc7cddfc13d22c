"""Which expert answers a prompt: the choice of a sequence gate, by the prompt's tokens alone."""

from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from finefit.artifacts.pipelines import SequenceGate
from finefit.artifacts.records import read_record
from finefit.errors import ModelError
from finefit.model.gate import prompt_scores

RECORD = "gate.json"
TABLE = "gate.safetensors"
SCORES = "scores"
"""Of the table's tensors the one that choosing needs: tokens x experts."""


def choose(folder: Path, tokens: Sequence[Sequence[int]]) -> list[str]:
    """The name of an expert for each prompt, given as token ids. Of equal scores the first expert has it."""
    experts = read_record(folder / RECORD, SequenceGate).experts
    try:
        scores_VK = load_file(folder / TABLE)[SCORES]
    except (FileNotFoundError, SafetensorError, KeyError) as error:
        raise ModelError(
            f"{folder / TABLE} holds no gate: {error}", "make it again: finefit run SPEC --force STAGE"
        ) from None
    return chosen(scores_VK, experts, tokens)


def chosen(scores_VK: Tensor, experts: Sequence[str], tokens: Sequence[Sequence[int]]) -> list[str]:
    return [experts[int(prompt_scores(scores_VK, prompt).argmax())] for prompt in tokens]
