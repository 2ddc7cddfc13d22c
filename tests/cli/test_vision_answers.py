"""Answers about images that were made elsewhere: the same items as those that a model has answered, by what the images
hold."""

import base64
from pathlib import Path

import pytest

from finefit.artifacts.rundir import RunDir
from finefit.data.image_check import load_image
from finefit.data.rows import key_of, read_items
from finefit.review.items import RunTarget, read_image, review_set_of_runs
from finefit.run.eval_args import EvalArgs
from finefit.run.evaluation import open_evaluation
from tests.cli.conftest import Finefit
from tests.conftest import write_jsonl
from tests.data.image_rows import ASKED, asked, draw
from tests.vision_models import make_vlm

DIGITS = (3, 5)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same two images here, and elsewhere under other names; the working directory."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "theirs" / "png").mkdir(parents=True)
    for at, digit in enumerate(DIGITS):
        draw(tmp_path, f"{at}.png", digit)
        draw(tmp_path / "theirs" / "png", f"figure-{digit}.png", digit)
    write_jsonl(tmp_path / "test.jsonl", [asked(digit, f"{at}.png") for at, digit in enumerate(DIGITS)])
    write_jsonl(tmp_path / "theirs" / "test.jsonl", [asked(digit, f"figure-{digit}.png") for digit in reversed(DIGITS)])
    write_jsonl(
        tmp_path / "answers.jsonl",
        [{"id": str(at), "answer": str(digit)} for at, digit in enumerate(reversed(DIGITS), 1)],
    )
    return tmp_path


@pytest.mark.slow
def test_answers_made_elsewhere_are_compared_with_those_of_a_model_to_the_same_images(
    project: Path, finefit: Finefit
) -> None:
    make_vlm("qwen2_5_vl", project / "model")
    told = ("--task", "exact_match", "--max-new-tokens", "4", "--json")
    assert finefit("eval", "model", "--data", "test.jsonl", *told).code == 0
    assert finefit("eval", "--answers", "answers.jsonl", "--data", "theirs/test.jsonl", *told).code == 0
    first, second = sorted(path.name for path in Path("runs").iterdir())
    found = finefit("compare", f"runs/{second}", f"runs/{first}", "--json")
    assert found.code == 0, found.err
    (task,) = found.document["tasks"]
    (pairing,) = task["pairings"]
    assert (pairing["n"], pairing["only_first"], pairing["only_second"]) == (2, 0, 0)
    assert pairing["num_better"] == 2  # theirs are right

    items = review_set_of_runs([RunTarget.parse(f"runs/{first}"), RunTarget.parse(f"runs/{second}")]).items
    shown = [[read_image(image) for image in item.images] for item in items]
    assert sorted(shown) == sorted([(project / f"{at}.png").read_bytes()] for at in range(len(DIGITS)))


def _work(data: str) -> RunDir:
    return open_evaluation(EvalArgs(target=None, tasks=("exact_match",), data=data, answers=Path("answers.jsonl"))).run


def test_images_of_given_answers_can_be_shown_also_those_that_came_as_bytes(project: Path) -> None:
    inline = [
        "data:image/png;base64," + base64.b64encode((project / f"{at}.png").read_bytes()).decode()
        for at in range(len(DIGITS))
    ]
    rows = [{"image": url, "question": ASKED, "answer": str(digit)} for url, digit in zip(inline, DIGITS, strict=True)]
    write_jsonl(project / "inline.jsonl", rows)
    found = [read_items(_work(data).stage(1, "eval").prepared("test.jsonl")) for data in ("test.jsonl", "inline.jsonl")]
    beside, held = ([load_image(ref).tobytes() for item in items for ref in item.image_refs] for items in found)
    assert beside == held
    assert len(set(beside)) == len(DIGITS)


def test_another_image_under_the_same_name_is_another_item(project: Path) -> None:
    before = {key_of(item) for item in read_items(_work("test.jsonl").stage(1, "eval").prepared("test.jsonl"))}
    draw(project, "1.png", 6)
    after = {key_of(item) for item in read_items(_work("test.jsonl").stage(1, "eval").prepared("test.jsonl"))}
    assert (len(before & after), len(before | after)) == (1, 3)


def test_an_image_that_is_not_there_is_told_by_its_row(project: Path, finefit: Finefit) -> None:
    (project / "1.png").unlink()
    refused = finefit("eval", "--answers", "answers.jsonl", "--data", "test.jsonl", "--task", "exact_match")
    assert refused.code == 2
    assert "test.jsonl:2 1.png does not exist" in refused.err
