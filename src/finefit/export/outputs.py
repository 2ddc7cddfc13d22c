"""What a model says on a probe: the form in which two programs are compared, whatever loads the model.

A program is asked in a process of its own: it reads `probe.json` and leaves `outputs.safetensors` beside it.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from finefit.artifacts.records import Record, read_record, write_record
from finefit.errors import FinefitError

PROBE, OUTPUTS = "probe.json", "outputs.safetensors"


class Probe(Record):
    """Held-out prompts in tokens, as the trained model gets them, each with an answer on which logits are compared."""

    prompts: tuple[tuple[int, ...], ...]
    answers: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    """Of the greedy answers that are asked for beside the logits."""
    stop_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    logits: tuple[NDArray[np.float32], ...]
    """For each item one row per answer token: the logits that predict it (answer tokens x vocabulary)."""
    greedy: tuple[tuple[int, ...], ...]
    """For each item the greedy answer, without the stop token."""


def write_probe(folder: Path, probe: Probe) -> None:
    write_record(folder / PROBE, probe)


def read_probe(folder: Path) -> Probe:
    return read_record(folder / PROBE, Probe)


def write_outputs(folder: Path, outputs: Outputs) -> None:
    tensors = {f"logits.{at}": logits for at, logits in enumerate(outputs.logits)}
    tensors |= {f"greedy.{at}": np.asarray(tokens, dtype=np.int64) for at, tokens in enumerate(outputs.greedy)}
    save_file(tensors, folder / OUTPUTS)


def read_outputs(folder: Path) -> Outputs:
    path = folder / OUTPUTS
    if not path.is_file():
        raise FinefitError(f"{path} was not written by the program that was asked")
    tensors = load_file(path)
    count = sum(name.startswith("logits.") for name in tensors)
    return Outputs(
        logits=tuple(tensors[f"logits.{at}"] for at in range(count)),
        greedy=tuple(tuple(int(token) for token in tensors[f"greedy.{at}"]) for at in range(count)),
    )
