"""What an export is and how it was proved equal to the trained model: export.json, beside the exported files."""

from dataclasses import field
from typing import Literal

from finefit.artifacts.records import Record
from finefit.stats.intervals import Interval

EXPORT = "export.json"
Onto = Literal["original", "trained"]
"""`original`: the base as it is published. `trained`: the weights in few bits that were trained against, unpacked."""


class Bound(Record):
    """What an export may differ by and still be the model that was trained."""

    kl: float
    """Mean Kullback-Leibler divergence per token, in nats, of the trained model's distribution to the export's."""
    agreement: float
    """Least share of the tokens that both would choose."""
    logits: float | None = None
    """Largest difference between two logits, as a share of the largest logit; None: not bounded."""


class Distance(Record):
    """Of a model to the trained one on the probe; both compute the same tokens."""

    kl: Interval
    """Per token, in nats; resampled over items."""
    agreement: Interval
    """Share of the tokens that both would choose."""
    logits: float
    """Largest difference between two logits, as a share of the largest logit."""
    tokens: int


class Answers(Record):
    """Greedy answers to the same prompt."""

    prompt: str
    """Its end, if it is long."""
    trained: str
    exported: str

    @property
    def are_equal(self) -> bool:
        return self.trained == self.exported


class TaskScore(Record):
    """Of the greedy answers to the probe's items."""

    task: str
    metric: str
    trained: Interval
    exported: Interval


class ExportedFormat(Record):
    format: str
    """As it was asked for: `merged:bf16`, `gguf:q8_0`, `gguf-lora`, `adapter`."""
    path: str
    """A file, or a folder, relative to the export; `.` is the export itself."""
    files: dict[str, int]
    """Sizes by name, relative to the export."""
    loaded_by: str
    """The program that loaded it, with its version."""
    distance: Distance | None
    """None if no program has loaded it, for lack of memory."""
    bound: Bound
    template_is_equal: bool | None
    """Byte for byte; None if the format has no place for a template."""
    stops_are_equal: bool | None
    answers: tuple[Answers, ...]
    score: TaskScore | None = None
    problems: tuple[str, ...]
    """Why it would be refused. Only an export that was accepted has any."""
    notes: tuple[str, ...] = ()
    seconds: float
    """Of making it."""
    proof_seconds: float
    peak_bytes: int | None = None
    """Resident memory of the merge or conversion above what the process held before."""


class OntoCost(Record):
    """What an adapter loses on a base other than the packed one that it was trained on."""

    onto: Onto
    distance: Distance


class ExportedAdapter(Record):
    """As its adapter_config.json says."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    dora: bool = False
    rank_stabilised: bool = False
    trained_modules: tuple[str, ...] = ()
    """Embeddings or heads that were trained whole."""


class ExportReport(Record):
    version: Literal[1] = 1
    finefit: str
    created: str
    name: str
    """Of the exported model; its files are called after it."""
    target: str
    """As it was asked for."""
    checkpoint: str | None
    """Of a run."""
    base: str
    """A hub id, or the path as the user wrote it."""
    base_license: str | None
    """As the base's own model card says; None if it does not."""
    adapter: ExportedAdapter | None
    parameters: int
    bits: int | None
    """Of the weights that were trained against."""
    onto: Onto | None
    """Only for bases in 4 or 8 bits."""
    onto_costs: tuple[OntoCost, ...] = ()
    template: str | None
    """The text of the chat template."""
    stop_tokens: dict[str, int]
    """Their numbers by their text."""
    prompts: int
    prompts_from: Literal["test", "validation", "built-in"]
    """`built-in`: a few neutral prompts, for a model without a run."""
    answer_tokens: int
    """On which logits are compared."""
    computed_in: str | None
    """Device and precision in which the models were compared: `cpu fp32`. None: they were not, for lack of memory."""
    exports: tuple[ExportedFormat, ...]
    accepted: tuple[str, ...] = ()
    """Formats that are worse than their bound and were published all the same."""
    serving: dict[str, str] = field(default_factory=dict)
    """The command line by program; why not, where one does not accept it."""
    versions: dict[str, str]
    """Of finefit and of every package that made or loaded an export."""
    seconds: float
