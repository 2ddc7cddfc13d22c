"""What is exported: a model folder, perhaps with an adapter, and how it was trained to be prompted. Also the held-out
prompts on which an export is compared with it, rendered as the run renders them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from finefit.artifacts.records import WiredModel, read_record
from finefit.artifacts.rundir import RunDir, StageDir, is_pipeline, shown_parts, stage_holding
from finefit.artifacts.stage_records import Stage
from finefit.custom.inputs import processor_opener
from finefit.data.encode import Budget
from finefit.data.examples import Example, ExamplePairs, open_examples
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import Message, Row, read_items
from finefit.errors import DataError, ModelError
from finefit.evaluate.external_model import ExternalModel, find_external_model
from finefit.evaluate.worker import sample
from finefit.export.outputs import Probe
from finefit.spec.models import CustomModel, EmbeddedModel, FolderModel, HubModel, Lora

PROMPTS = 16
MAX_ANSWER = 48
"""Tokens of an answer on which logits are compared, and of a greedy answer: a row of logits is as long as the
vocabulary."""
_MAX_PROMPT = 1024
_ANY_LENGTH = 1 << 24
_TEST, _VALIDATION = "test.jsonl", "validation.safetensors"
_BUILT_IN = (
    ("What is the capital of France?", "The capital of France is Paris."),
    ("Name three colours.", "Red, green and blue."),
    ("Write one sentence about the sea.", "The sea was calm that morning, and a light wind came from the west."),
    ("How many minutes are there in two hours?", "There are 120 minutes in two hours."),
    ("Translate into German: good morning", "Guten Morgen"),
    ("List the first five prime numbers.", "2, 3, 5, 7, 11"),
    ("Explain in one sentence why the sky is blue.", "Air scatters blue light more than it scatters red light."),
    ("Complete the word: compu", "computer"),
)
"""Neutral prompts with answers, for a model without a run."""
Origin = Literal["test", "validation", "built-in"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSubject:
    """Paths are absolute."""

    name: str
    """What exported files are called after."""
    target: str
    """As it was asked for."""
    external: ExternalModel
    base: Path
    """The folder of the model below the adapter, or of the whole model."""
    base_name: str
    """A hub id, or the path as the user wrote it."""
    adapter: Path | None
    tokenizer: Path
    """The folder with tokenizer and chat template as they were trained with."""
    renderer: Renderer
    bits: Literal[4, 8] | None
    """Of the base's weights that the adapter was trained on."""
    precision: Literal["bf16", "fp16", "fp32"]
    """In which training computed."""
    where: StageDir | None = None
    """The training stage that it comes from."""
    checkpoint: str | None = None

    @property
    def run(self) -> RunDir | None:
        return None if self.where is None else RunDir(self.where.run)

    @property
    def template(self) -> str | None:
        """The text of the chat template; None for a model that was trained on plain text."""
        return None if self.renderer.template == "plain" else str(self.renderer.tokenizer.get_chat_template())

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The end of a turn first."""
        return self.renderer.stop_tokens

    @property
    def stop_texts(self) -> tuple[str, ...]:
        return tuple(str(self.renderer.tokenizer.convert_ids_to_tokens(token)) for token in self.stop_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptItem:
    """One item of a probe."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    row: Row | None = None
    """Of a test row, so that a task can score its answer."""


def open_subject(folder: str, *, target: str | None = None, base: str | None = None) -> ExportSubject:
    """`folder`: a checkpoint, a folder with a model or an adapter, hub:owner/name, or embedded:NAME. `base`: the model
    below an adapter that does not say what it belongs to."""
    return _subject(find_external_model(folder, base=base), target or folder)


def subject_of_stage(wired: WiredModel) -> ExportSubject:
    """The model of a stage of a pipeline, whose paths are absolute."""
    match wired.model:
        case FolderModel(path=path):
            model = path
        case HubModel(id=name, revision=revision):
            model = f"hub:{name}@{revision}"
        case EmbeddedModel(name=name):
            model = f"embedded:{name}"
        case _:
            raise ModelError("a model of your own code cannot be exported", "export models of transformers")
    if wired.adapter is None:
        return open_subject(model)
    return open_subject(wired.adapter, base=model)


def _subject(external: ExternalModel, target: str) -> ExportSubject:
    if isinstance(external.model, CustomModel):
        problem = f"{target} is a model of your own code, which no other program can load"
        raise ModelError(problem, "export models of transformers")
    whole = external.weights or external.resolved.folder
    where = StageDir(whole.resolve().parent.parent)
    stage = read_record(where.stage, Stage) if where.stage.is_file() else None
    data = external.prompts.data
    processor = processor_opener(external.model, Path.cwd(), external.resolved.folder, data.images)()
    return ExportSubject(
        name=_name(whole.resolve(), stage is not None, external),
        target=target,
        external=external,
        base=external.resolved.folder.resolve(),
        base_name=external.resolved.name if stage is None else stage.model_name,
        adapter=external.weights,
        tokenizer=external.tokenizer.resolve(),
        renderer=open_renderer(
            external.tokenizer, data.template, template_options=data.template_options, image_processor=processor
        ),
        bits=external.tuning.base_bits if isinstance(external.tuning, Lora) else None,
        precision="fp32" if stage is None else stage.precision,
        where=None if stage is None else where,
        checkpoint=None if stage is None else whole.resolve().name,
    )


def _name(folder: Path, is_trained: bool, external: ExternalModel) -> str:
    """`orders-1` for a run, `medical-1-sft` for a stage of a pipeline."""
    if is_trained:
        run = StageDir(folder.parent.parent).run
        inside = run.parent.name == "stages" and is_pipeline(run.parent.parent)
        return "-".join(shown_parts(run)[-2 if inside else -1 :])
    if folder.name == "output" and stage_holding(folder) is not None:
        return "-".join(shown_parts(folder)[-3:-1])
    return external.name.removeprefix("eval-")


def make_probe(subject: ExportSubject, n: int = PROMPTS) -> Probe:
    items, _ = held_out(subject, n)
    return probe_of(subject, items)


def probe_of(subject: ExportSubject, items: Sequence[PromptItem], *, max_new_tokens: int = MAX_ANSWER) -> Probe:
    """`max_new_tokens`: of the greedy answers."""
    return Probe(
        prompts=tuple(item.prompt for item in items),
        answers=tuple(item.answer for item in items),
        max_new_tokens=max_new_tokens,
        stop_tokens=subject.stop_tokens,
    )


def held_out(subject: ExportSubject, n: int = PROMPTS) -> tuple[list[PromptItem], Origin]:
    """Of the run's test rows, else of its validation rows, else built-in prompts. The same items in every export of a
    run. Rows with images are left out: programs that run converted models are asked with text alone."""
    readers: tuple[tuple[Origin, Iterator[PromptItem]], ...] = (
        ("test", _of_test(subject, n)),
        ("validation", _of_validation(subject, n)),
    )
    for origin, found in readers:
        if items := list(found):
            return items, origin
    return list(_built_in(subject, n)), "built-in"


def _of_test(subject: ExportSubject, n: int) -> Iterator[PromptItem]:
    prepared = _prepared(subject, _TEST)
    if prepared is None:
        return
    rows = [row for row in read_items(prepared) if not row.image_refs]
    for at in sample(rows, n):
        try:
            yield _item(subject.renderer, rows[at])
        except DataError:  # a row whose answer this template cannot write is asked in evaluations, but not compared
            continue


def _of_validation(subject: ExportSubject, n: int) -> Iterator[PromptItem]:
    prepared = _prepared(subject, _VALIDATION)
    if prepared is None:
        return
    examples = open_examples(prepared)
    for at in _spread(len(examples), n):
        example = examples[at].chosen if isinstance(examples, ExamplePairs) else examples[at]
        if not example.images and (split := _split(example)) is not None:
            yield split


def _built_in(subject: ExportSubject, n: int) -> Iterator[PromptItem]:
    for number, (question, answer) in enumerate(_BUILT_IN[:n], start=1):
        messages = (Message("user", question), Message("assistant", answer))
        yield _item(subject.renderer, Row(source="built-in", number=number, messages=messages, num_given=1))


def _prepared(subject: ExportSubject, name: str) -> Path | None:
    """A verified file of rows that the run has kept."""
    if subject.where is None:
        return None
    prepared = read_record(subject.where.stage, Stage).prepared
    return subject.where.verified(name, prepared) if name in prepared else None


def _item(renderer: Renderer, row: Row) -> PromptItem:
    if not row.text:
        kept = renderer.cut_prompt(row.prompt, tools=row.tools, max_tokens=_MAX_PROMPT)
        row = replace(row, messages=(*kept, row.messages[-1]), num_given=len(kept))
    (rendered,) = renderer.render([row], Budget(max_tokens=_ANY_LENGTH, too_long="error", turns="last"))
    if rendered.problem:
        raise DataError(f"{row.place} cannot be rendered: {rendered.problem}", rendered.remedy)
    found = _split(rendered.examples[-1])
    if found is None:
        raise DataError(f"{row.place} has no answer to compare", "give the row an answer")
    return PromptItem(prompt=found.prompt, answer=found.answer, row=None if row.text else row)


def _split(example: Example) -> PromptItem | None:
    """Prompt and beginning of the last answer. A text without a prompt is split in the middle."""
    starts = [at for at in range(1, len(example.tokens)) if example.supervised[at] and not example.supervised[at - 1]]
    start = starts[-1] if starts else 0
    if start <= 1:
        start = min(len(example.tokens) // 2, _MAX_PROMPT)
    answer = example.tokens[start : start + MAX_ANSWER]
    return PromptItem(prompt=example.tokens[:start], answer=answer) if start and answer else None


def _spread(count: int, n: int) -> Sequence[int]:
    """Evenly over all of them."""
    return range(count) if n >= count else [at * count // n for at in range(n)]
