"""The rows of an evaluation: a run's own test rows, or others that are read, built and rendered in the same way; and
answers to them from elsewhere."""

import hashlib
import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from finefit.artifacts.atomic import Journal, staged_file
from finefit.artifacts.checkpoint import step_named
from finefit.artifacts.forecasts import Plan
from finefit.artifacts.reading import is_there
from finefit.artifacts.records import read_record, read_spec
from finefit.artifacts.rundir import EvalPaths, RunDir, stage_of
from finefit.artifacts.stage_records import EvalItem, EvalRequest, EvalStage, Stage, Subject
from finefit.data.files import find_files
from finefit.data.image_check import ModelProcessor
from finefit.data.records import is_amr, read_records
from finefit.data.rows import IMAGE_ARCHIVE, BadRow, Row, key_of, read_items
from finefit.errors import DataError, RunError
from finefit.evaluate.external_model import without_rows
from finefit.evaluate.score import score_item
from finefit.facts.files import FileFact, sha256_of
from finefit.model.resolve_model import resolve_model
from finefit.plan.client import Grids
from finefit.plan.prepared_data import PreparedData, prepare_data
from finefit.preflight.data import fix_or_drop, long_references, require_data, unreadable_references
from finefit.spec.data import ImageLimits, Source
from finefit.spec.models import CustomModel
from finefit.spec.schema import Evaluation, Sft, Spec
from finefit.spec.stages import moved
from finefit.spec.tasks import AmrForm, Form
from finefit.tasks import Reply, Task
from finefit.tasks.amr import prompt_of, read_graphs

ITEMS = "test.jsonl"
NO_ITEMS = hashlib.sha256(b"").hexdigest()
"""The digest of the items of a run without test rows; lm-eval tasks bring their own items."""
_DEFAULT_PROMPT_TOKENS = 4096
"""Used for a run that was planned without a forecast."""
_MAX_STEM = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRows:
    """A file of items among the prepared files."""

    file: str = ITEMS
    sha256: str
    suffix: str = ""
    """Added to the labels of its evaluations, because scores of other rows are separate scores. Empty for a run's own
    rows."""
    prompt_tokens: int
    """Tokens of the longest prompt."""
    prompt_grids: Grids = ()
    """Grids of the images in the prompt with the most pixels."""


def own_rows(run: RunDir) -> EvalRows:
    """Returns a run's own test rows, with the lengths found by the plan; without a forecast, with the maximum length of
    a row."""
    where = stage_of(run)
    if is_there(where.eval_stage):
        stage = read_record(where.eval_stage, EvalStage)
        file, sha256 = stage.subject.items, stage.subject.items_sha256
        return EvalRows(file=file, sha256=sha256, prompt_tokens=stage.prompt_tokens, prompt_grids=stage.prompt_grids)
    lengths = [forecast.lengths for forecast in read_record(run.plan, Plan).forecasts.values()]
    return EvalRows(
        sha256=read_record(where.stage, Stage).prepared.get(ITEMS, NO_ITEMS),
        prompt_tokens=max((found.prompt or found.longest for found in lengths), default=_DEFAULT_PROMPT_TOKENS),
        prompt_grids=next((found.grids if found.prompt is None else found.prompt_grids for found in lengths), ()),
    )


def other_rows(run: RunDir, data: str) -> EvalRows:
    """Prepares rows of another file with the run's template, form and lengths, and copies them into the run."""
    where = stage_of(run)
    if is_there(where.eval_stage):
        remedy = "score the model itself with --data, which creates another run directory"
        raise RunError(f"{run.path.name} can only be scored on its own rows", remedy)
    spec = read_spec(run)
    model = moved(spec.model, lambda path: str((run.path / path).resolve()))
    tokenizer = where.tokenizer
    if not isinstance(model, CustomModel):
        folder = resolve_model(model, where.run).folder
        if ModelProcessor(folder, folder / "config.json", ImageLimits())() is not None:
            tokenizer = folder  # that of a vision-language model, which has its config and processor
    like = spec.model_copy(update={"model": model, "data": without_rows(spec.data, form_base=run.path)})
    prepared = prepare_eval_rows(Source(path=data), like, tokenizer, base=Path.cwd())
    content = [*(fact.sha256 for fact in file_facts(prepared)), prepared.record.images_sha256 or ""]
    digest = hashlib.sha256("".join(content).encode()).hexdigest()[:8]
    # images that came as bytes are stored beside their items, which then have a folder of their own
    has_images = IMAGE_ARCHIVE in prepared.record.files
    place = where.prepared(f"items-{digest}/{ITEMS}" if has_images else f"items-{digest}.jsonl")
    place.parent.mkdir(exist_ok=True)
    images = ((IMAGE_ARCHIVE, place.with_name(IMAGE_ARCHIVE)),) if has_images else ()
    for name, target in (*images, (ITEMS, place)):
        with staged_file(target, durable=False) as temporary:
            shutil.copyfile(prepared.path(name), temporary)
    stem = "".join(c if c.isascii() and c.isalnum() else "-" for c in Path(data).stem)[:_MAX_STEM]
    return EvalRows(
        file=str(place.relative_to(where.prepared(""))),
        sha256=sha256_of(place),
        suffix=f"{stem}-{digest}",
        prompt_tokens=prepared.record.prompt_tokens or 1,
        prompt_grids=prepared.record.prompt_grids,
    )


def prepare_eval_rows(source: Source, like: Spec, tokenizer: Path, *, base: Path) -> PreparedData:
    """`like`: the spec that sets template, prompt format and lengths. `base`: the folder that the source's path is
    relative to."""
    data = like.data.model_copy(update={"train": (), "validation": None, "test": source})
    prepared = prepare_data(like.model_copy(update={"data": data, "objective": Sft(kind="sft")}), base, tokenizer)
    for fault in prepared.record.problems:
        if fault.kind == "unusable" and fault.split == "test" and data.bad_rows == "error":
            more = f"\nand {fault.count - len(fault.lines)} more" if fault.count > len(fault.lines) else ""
            raise DataError("\n".join(fault.lines) + more, fix_or_drop(fault))
    if prepared.record.prompt_tokens is None:
        remedy = "rows need a prompt and an answer; docs/data.md lists the known shapes"
        raise DataError(f"{source.path} holds no row with a prompt", remedy)
    return prepared


def rows_of(run: RunDir, subject: Subject) -> list[Row]:
    return read_items(stage_of(run).verified(subject.items, {subject.items: subject.items_sha256}))


def require_readable(run: RunDir, subject: Subject, evaluations: Sequence[Evaluation]) -> tuple[str, ...]:
    """Reports a reference that its task cannot read before a model answers anything. Returns warnings."""
    if subject.items_sha256 == NO_ITEMS:
        return ()
    rows = rows_of(run, subject)
    require_data(unreadable_references(evaluations, rows, form=subject.form, base=run.path))
    return tuple(f"{found.problem}; {found.remedy}" for found in long_references(evaluations, rows))


def file_facts(prepared: PreparedData) -> tuple[FileFact, ...]:
    return tuple(fact for files in prepared.sources["test"] for fact in files)


_ANSWERS = ("answer", "response", "output", "prediction", "completion", "generated_text")
_PROMPTS = ("prompt", "question", "instruction", "input")
_ITEM = TypeAdapter(EvalItem)
_SHOWN = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalAnswer:
    place: str
    text: str
    id: str = ""
    """An item's key, the place of its row (`test.jsonl:3`, `record 3 of test.json`), or its number."""
    prompt: str = ""
    """The whole prompt, or its last message."""


def read_answers(path: Path, form: Form | None) -> list[ExternalAnswer]:
    """Reads JSON lines, JSON, CSV or Parquet with an answer and its prompt or id, or AMR graphs below sentences."""
    if not path.is_file():
        raise DataError(f"{path} does not exist", "--answers needs a file with one answer for every item")
    (file,) = find_files(path.name, path.parent, split="test")
    found = []
    if is_amr(file):
        method = form.method if isinstance(form, AmrForm) else None
        for graph in read_graphs(path):
            prompt = prompt_of(graph.sentence, method) if method else graph.sentence
            found.append(ExternalAnswer(place=graph.place, prompt=prompt, text=graph.graph))
        return found
    for record in read_records(file):
        if isinstance(record, BadRow):
            raise DataError(f"{record.place} {record.reason}", "fix the file: every item needs its answer")
        place, value = record.place, dict(record.value)
        answer = next((value[name] for name in _ANSWERS if name in value), None)
        id_, prompt = (
            next((str(value[name]) for name in names if value.get(name) not in (None, "")), "")
            for names in (("id",), _PROMPTS)
        )
        if not isinstance(answer, str) or not (id_ or prompt):
            problem = f"{place} has {', '.join(value) or 'nothing'}: it needs an answer as text, and its prompt or id"
            raise DataError(problem, "name the columns answer, and prompt or id")
        found.append(ExternalAnswer(place=place, id=id_, prompt=prompt, text=answer))
    return found


def align_answers(answers: Iterable[ExternalAnswer], rows: Sequence[Row]) -> list[str]:
    """Returns one answer per row; rows of the same content are answered in order. An id is never taken for a prompt,
    nor a prompt for an id: an answer to the wrong question would be a wrong score that nobody notices."""
    by_id = _named([key_of(row) for row in rows], [row.place for row in rows], [str(row.number) for row in rows])
    whole = ["\n\n".join(message.content for message in row.prompt) for row in rows]
    by_prompt = _named(whole, [row.prompt[-1].content if row.prompt else "" for row in rows])
    found: dict[int, ExternalAnswer] = {}
    for one in answers:
        asked = _rows_asked(one, rows, by_id.get(_plain(one.id), ()), by_prompt.get(_plain(one.prompt), ()))
        at = next((at for at in asked if at not in found), asked[-1])
        if at in found:
            problem = f"{one.place} answers {rows[at].place}, which {found[at].place} answers already"
            raise DataError(problem, "keep one answer for every item")
        found[at] = one
    if missing := [row.place for at, row in enumerate(rows) if at not in found]:
        more = f", and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        remedy = "an unanswered item counts too: give it an empty answer"
        raise DataError(f"{missing[0]} has no answer{more}", remedy)
    return [found[at].text for at in range(len(rows))]


def _rows_asked(
    one: ExternalAnswer, rows: Sequence[Row], by_id: Sequence[int], by_prompt: Sequence[int]
) -> Sequence[int]:
    """Returns one row, or several of the same content. An unknown id is ignored if there is a prompt."""
    asked = [at for at in by_id if at in by_prompt] if by_id and by_prompt else by_id or by_prompt
    name = _plain(one.id or one.prompt)
    shown = name if len(name) <= _SHOWN else f"{name[:_SHOWN]} ..."
    if not (by_id or by_prompt):
        problem = f"{one.place} answers `{shown}`, which matches none of the {len(rows):,} items"
        raise DataError(problem, "give answers to these rows")
    if not asked:
        here, there = rows[by_id[0]].place, rows[by_prompt[0]].place
        problem = f"{one.place} has the id {one.id} of {here} and the prompt of {there}"
        raise DataError(problem, "name one item: fix the id, or leave it out")
    if len({key_of(rows[at]) for at in asked}) > 1:
        first, second, *_ = (rows[at].place for at in asked)
        problem = f"{one.place} answers `{shown}`, which names {first} and {second}, two different items"
        raise DataError(problem, f"name each by its place: id {first}")
    return asked


def _named(*kinds: Sequence[str]) -> dict[str, list[int]]:
    """Maps names to rows by precedence: a name of an earlier kind hides the same name of a later one."""
    found: dict[str, list[int]] = {}
    for kind in kinds:
        here: defaultdict[str, list[int]] = defaultdict(list)
        for at, name in enumerate(map(_plain, kind)):
            if name:
                here[name].append(at)
        found = here | found
    return found


def _plain(text: str) -> str:
    return " ".join(text.split())


def answers_name(path: Path) -> str:
    """Returns the name under which the scores of these answers are stored. It depends on the content of the file."""
    kept = "".join(c if c.isascii() and c.isalnum() else "-" for c in path.stem).strip("-")
    name = f"{kept[:40] or 'answers'}-{sha256_of(path)[:8]}"
    # a file called checkpoint.jsonl, with a digest without letters, would look like a checkpoint
    return name if step_named(name) is None else f"answers-{name}"


def write_answers(
    task: Task, request: EvalRequest, paths: EvalPaths, answers: Sequence[str], rows: Sequence[Row]
) -> None:
    """Writes them as answered items, so that the scoring process has nothing left to generate."""
    if not task.generates or any(any(task.candidates(row)) for row in rows):
        problem = f"{request.evaluation.label} needs a model's likelihoods, which a file of answers does not contain"
        raise DataError(problem, "leave --answers out and name a model")
    paths.folder.mkdir(parents=True, exist_ok=True)
    paths.items.unlink(missing_ok=True)
    with Journal(paths.items) as items:
        for at, (row, answer) in enumerate(zip(rows, answers, strict=True)):
            prompt = "\n\n".join(message.content for message in row.prompt)
            item = score_item(task, at, row, prompt=prompt, reply=Reply(text=answer))
            items.write(**_ITEM.dump_python(item, mode="json"))
