"""An evaluation's own world: a stage directory with a tokenizer and items, a model folder, and a request. Nothing was
trained here."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from finefit.artifacts.forecasts import EvalBatchLimit
from finefit.artifacts.records import write_record
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.stage_records import EvalRequest
from finefit.data.render import Renderer
from finefit.data.rows import Message, Row, item_line
from finefit.evaluate.score import made_with
from finefit.evaluate.worker import EvalJob, read_job
from finefit.facts.files import read_model_folder, sha256_of
from finefit.spec.schema import Evaluation
from finefit.step.state import make_optimizer
from tests.conftest import make_rows, make_tokenizer
from tests.data.conftest import render_one
from tests.evals import SUBJECT
from tests.step.conftest import ADAMW, FULL, cut, step, tuned

torch.set_num_threads(1)

RENDERER = Renderer(make_tokenizer(), "chat")
MESSAGES = [[Message(m["role"], m["content"]) for m in row["messages"]] for row in make_rows(14)]
ROWS = [Row(source="test.jsonl", number=at + 1, messages=tuple(messages)) for at, messages in enumerate(MESSAGES)]
LIMIT = EvalBatchLimit(rows=4, tokens=4096)


def never(words: str) -> None:
    """In the place of `warn` where there is nothing to warn of."""
    raise AssertionError(words)


@pytest.fixture(scope="session")
def talker() -> nn.Module:
    """Knows how answers look and end, so that they differ in length."""
    trained = tuned(FULL)
    optimizer = make_optimizer(trained, ADAMW)
    batches = cut([render_one(RENDERER, messages).examples[0] for messages in MESSAGES], 7)
    for _ in range(60):
        step(trained, optimizer, batches)
    return trained.eval()


@pytest.fixture(scope="session")
def talker_folder(talker: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("talker")
    talker.save_pretrained(folder)  # type: ignore[operator]
    make_tokenizer().save_pretrained(folder)
    return folder


def make_work(
    folder: Path,
    model: Path,
    rows: list[Row] | None = None,
    *,
    task: Any = "json_match",
    batch_limit: EvalBatchLimit = LIMIT,
    max_new_tokens: int = 24,
    renderer: Renderer = RENDERER,
    template: Literal["chat", "plain"] = SUBJECT.template,
    **more: Any,
) -> EvalJob:
    """`model` is put beside the run."""
    where = StageDir(folder / "run" / "stages" / "1-sft")
    where.prepared("x").parent.mkdir(parents=True)
    renderer.tokenizer.save_pretrained(where.tokenizer)
    where.prepared("test.jsonl").write_text("".join(map(item_line, ROWS if rows is None else rows)), encoding="utf-8")
    (where.run / "model").symlink_to(model)
    subject = replace(
        SUBJECT,
        model_fingerprint=read_model_folder(model).fingerprint,
        template=template,
        template_sha256=renderer.sha256(),
        items_sha256=sha256_of(where.prepared("test.jsonl")),
    )
    evaluation = Evaluation.model_validate({"task": task, "max_new_tokens": max_new_tokens, **more})
    paths = where.evaluation(evaluation.label, "base", evaluation.limit)
    paths.folder.mkdir(parents=True)
    request = EvalRequest(
        checkpoint="base", evaluation=evaluation, subject=subject, batch_limit=batch_limit, made_with=made_with()
    )
    write_record(paths.request, request)
    return read_job(paths.request)
