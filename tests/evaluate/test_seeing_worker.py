"""An evaluation of a model that sees, as its process does it: items with pictures, prompts and pixels as in training, images decoded in processes of
their own."""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from finefit.artifacts.evaluations import EvalRequest, ItemImage
from finefit.artifacts.forecasts import Room
from finefit.artifacts.records import write_record
from finefit.artifacts.rundir import StageDir
from finefit.data.budget import Budget
from finefit.data.eyes.eye import Eye
from finefit.data.items import item_line
from finefit.data.looking import OwnEye
from finefit.data.pictures import Picture
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import Message, Row
from finefit.data.tasks import make_task
from finefit.errors import DataError
from finefit.evaluate import answering
from finefit.evaluate.answering import Work, read_work
from finefit.evaluate.gallery import Gallery
from finefit.evaluate.replies import Voice, replies
from finefit.evaluate.worker import evaluate
from finefit.facts.files import read_file
from finefit.facts.model import read_model_folder
from finefit.spec.rows import ImageLimits
from finefit.spec.schema import Evaluation
from tests.evals import SUBJECT
from tests.evaluate.conftest import never
from tests.vision import digit_image, make_vlm, vlm_inputs, vlm_processor

torch.set_num_threads(1)

SIZES = ((90, 45), (40, 96), (36, 34))
NEW = 5
_ANY = Budget(max_tokens=4096, too_long="error", turns="last")


def _folder(family: str, folder: Path) -> Path:
    """Weights so far from zero that every patch makes a difference."""
    path = make_vlm(family, folder / "model")
    model = AutoModelForImageTextToText.from_pretrained(path)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and "embed" not in name:
            parameter.data.mul_(12)
    model.save_pretrained(path)
    return path


def _see(folder: Path) -> OwnEye:
    return OwnEye(folder, folder / "config.json", ImageLimits())


def _eye(folder: Path) -> Eye:
    eye = _see(folder)()
    assert eye is not None
    return eye


def _rows(folder: Path, eye: Eye) -> list[Row]:
    rows = []
    for at, size in enumerate(SIZES):
        path = folder / f"{at}.png"
        digit_image(at, size=size, seed=at).save(path)
        picture = Picture(str(path), "", hashlib.sha256(path.read_bytes()).hexdigest(), size, eye.grid(size), 100)
        messages = (Message("user", f"Which digit is {'it ' * at}?"), Message("assistant", str(at)))
        rows.append(Row(source="test.jsonl", number=at + 1, messages=messages, pictures=(picture,)))
    return rows


def _renderer(folder: Path) -> Renderer:
    return open_renderer(folder, _template(folder), eye=_eye(folder))


def _template(folder: Path) -> Any:
    return "plain" if vlm_processor(folder).chat_template is None else "chat"


def make_work(folder: Path, model: Path, *, task: Any = "exact_match") -> Work:
    where = StageDir(folder / "run" / "stages" / "1-sft")
    where.prepared("x").parent.mkdir(parents=True)
    renderer = _renderer(model)
    renderer.tokenizer.save_pretrained(where.tokenizer)
    where.prepared("test.jsonl").write_text("".join(map(item_line, _rows(folder, _eye(model)))), encoding="utf-8")
    (where.run / "model").symlink_to(model)
    subject = replace(
        SUBJECT,
        model_fingerprint=read_model_folder(model).fingerprint,
        template=_template(model),
        template_sha256=renderer.sha256(),
        items_sha256=read_file(where.prepared("test.jsonl"), where.path).sha256,
    )
    evaluation = Evaluation.model_validate({"task": task, "max_new_tokens": NEW})
    paths = where.evaluation(evaluation.label, "base", evaluation.limit)
    paths.folder.mkdir(parents=True)
    write_record(
        paths.request,
        EvalRequest(checkpoint="base", evaluation=evaluation, subject=subject, room=Room(rows=2, tokens=4096)),
    )
    return read_work(paths.request)


def _alone(folder: Path, rows: Sequence[Row]) -> list[str]:
    """What transformers' own generation says to each row."""
    model, processor, renderer = (
        AutoModelForImageTextToText.from_pretrained(folder).eval(),
        vlm_processor(folder),
        _renderer(folder),
    )
    found = []
    for row, size in zip(rows, SIZES, strict=True):
        inputs = vlm_inputs(
            processor, row.prompt[0].content, [digit_image(row.number - 1, size=size, seed=row.number - 1)]
        )
        output = model.generate(
            **inputs, do_sample=False, max_new_tokens=NEW, eos_token_id=list(renderer.stop_tokens), pad_token_id=0
        )
        found.append(renderer.decode_answer(output[0, inputs["input_ids"].shape[1] :].tolist()))
    return found


def test_an_evaluation_answers_about_the_images_of_its_items(tmp_path: Path) -> None:
    model = _folder("qwen2_5_vl", tmp_path)
    work = make_work(tmp_path, model)
    result = evaluate(work)
    rows = _rows(tmp_path, _eye(model))
    wanted = _alone(model, rows)
    assert len(set(wanted)) == len(wanted)
    assert [item.answer for item in result.items] == wanted
    assert [item.images for item in result.items] == [
        (ItemImage(name=row.pictures[0].path, sha256=row.pictures[0].sha256),) for row in rows
    ]
    assert all("<|image_pad|>" in item.prompt for item in result.items)


@pytest.mark.parametrize("loses", [Path.unlink, lambda path: path.write_bytes(b"another")])
def test_a_missing_or_changed_image_is_told_by_row_before_a_model_is_loaded(
    tmp_path: Path, loses: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = make_work(tmp_path, make_vlm("llava", tmp_path / "model"))
    monkeypatch.setattr(answering, "load_for_answers", None)  # it must not come to that
    loses(tmp_path / "1.png")
    with pytest.raises(DataError, match=r"test.jsonl:2: its image"):
        evaluate(work)


def _at_once(call: Callable[..., Any], *given: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(call(*given))
    return future


def _logprob(model: Any, inputs: dict[str, Any], answer: list[int]) -> float:
    """Of an answer behind a prompt, by the model's own forward: token after token, so that no prompt sees its answer."""
    total, given = 0.0, dict(inputs)
    for token in answer:
        with torch.no_grad():
            total += float(model(**given).logits[0, -1].log_softmax(-1)[token])
        for name, value in (
            ("input_ids", token),
            ("attention_mask", 1),
            ("token_type_ids", 0),
            ("mm_token_type_ids", 0),
        ):
            if name in given:
                given[name] = torch.cat([given[name], torch.full((1, 1), value, dtype=given[name].dtype)], 1)
    return total


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "idefics3"])
def test_the_likelihood_of_a_given_answer_is_that_of_the_models_own_forward(family: str, tmp_path: Path) -> None:
    folder = make_vlm(family, tmp_path / "model")
    model, renderer, processor = (
        AutoModelForImageTextToText.from_pretrained(folder).eval(),
        _renderer(folder),
        vlm_processor(folder),
    )
    rows = _rows(tmp_path, _eye(folder))
    voice = Voice(
        model=model,
        renderer=renderer,
        room=Room(rows=3, tokens=4096),
        device="cpu",
        max_new_tokens=NEW,
        max_prompt_tokens=None,
        warn=never,
        gallery=Gallery(_see(folder), _at_once),
    )
    task = make_task(Evaluation.model_validate({"task": "perplexity"}), form=None, base=tmp_path, run=tmp_path)
    found = {told.at: told.reply.right[0] for told in replies(voice, task, dict(enumerate(rows)))}
    for at, (row, size) in enumerate(zip(rows, SIZES, strict=True)):
        inputs = vlm_inputs(processor, row.prompt[0].content, [digit_image(at, size=size, seed=at)])
        (rendered,) = renderer.render([row], _ANY)
        tokens = [
            token
            for token, is_own in zip(rendered.examples[0].tokens, rendered.examples[0].supervised, strict=True)
            if is_own
        ]
        assert found[at].tokens == len(tokens)
        assert found[at].logprob == pytest.approx(_logprob(model, inputs, tokens), rel=1e-4)
