"""The spec that is written means what was recognised and chosen, and its defaults follow from the rows and the card."""

from pathlib import Path
from typing import Any

import pytest

from finefit.drafts.data_file import InspectedData, look_at
from finefit.drafts.from_data import (
    Choices,
    default_epochs,
    default_model,
    global_batch,
    max_tokens,
    model_values,
    parse_fields,
    plan_of,
    propose,
    rounded_hours,
    text_of,
    within_hours,
    worth_a_plan,
)
from finefit.drafts.sizes import EMBEDDED, SIZES
from finefit.errors import SpecError
from finefit.spec.data import Fields, HeldOut, Source
from finefit.spec.load import parse_spec
from finefit.spec.models import EmbeddedModel, FolderModel, HubModel
from finefit.spec.schema import Dpo, Spec
from tests.conftest import make_rows, write_jsonl

HUB = "Qwen/Qwen3-0.6B"


def _spec(found: InspectedData, folder: Path, **chosen: Any) -> Spec:
    asked = Choices(**({"model": HUB, "task": found.task, "card": "cpu", "epochs": 2.0} | chosen))
    return parse_spec(text_of(found, asked, folder), where="spec.yaml")


def _rows(folder: Path, count: int) -> InspectedData:
    write_jsonl(folder / "train.jsonl", make_rows(count))
    return look_at("train.jsonl", folder)


def test_the_written_spec_means_what_was_recognised_and_chosen(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "test.jsonl", make_rows(8, seed=5))
    found = _rows(tmp_path, 400)
    spec = _spec(found, tmp_path, card="RTX 4090", epochs=1.5)
    assert spec.model == HubModel(kind="hub", id=HUB)
    assert (spec.card, spec.schedule.epochs, spec.global_batch) == ("RTX 4090", 1.5, 16)
    assert spec.data.train == (Source(path="train.jsonl"),)
    assert spec.data.test == Source(path="test.jsonl")
    assert spec.data.validation == HeldOut(share=0.05)
    assert [one.label for one in spec.evaluate] == ["json_match"]
    assert spec.data.overlap == ("drop" if found.shared else "error")


def test_every_choice_is_explained_in_the_spec(tmp_path: Path) -> None:
    found = _rows(tmp_path, 400)
    text = text_of(found, Choices(model=HUB, task=found.task, card="cpu", epochs=2), tmp_path)
    lines = text.splitlines()
    for key in ("model:", "card:", "train:", "max_tokens:", "validation:", "tuning:", "schedule:", "global_batch:"):
        at = next(number for number, line in enumerate(lines) if line.strip().startswith(key))
        assert lines[at - 1].strip().startswith("#"), key
    assert "test: {path: ...}" in text  # what to add, so that answers are scored


def test_pairs_become_a_dpo_training(tmp_path: Path) -> None:
    write_jsonl(
        tmp_path / "pairs.jsonl", [{"prompt": f"why {n}?", "chosen": "so", "rejected": "no"} for n in range(40)]
    )
    spec = _spec(look_at("pairs.jsonl", tmp_path), tmp_path)
    assert isinstance(spec.objective, Dpo)
    assert (spec.optimizer.lr, spec.data.too_long) == (5e-6, "drop")


def test_plain_text_needs_no_chat_template_and_goes_on_from_row_to_row(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("a line of a book\n" * 40_000)
    found = look_at("book.txt", tmp_path)
    spec = _spec(found, tmp_path)
    assert (spec.data.template, spec.data.max_tokens) == ("plain", 2048)
    assert spec.data.train[0].fields == Fields(text="document")
    assert spec.global_batch > 1  # by the rows that the one text fills


def test_judged_rows_are_selected(tmp_path: Path) -> None:
    rows = [{"prompt": f"why {n}?", "completion": "so", "label": n % 2 == 0} for n in range(10)]
    write_jsonl(tmp_path / "judged.jsonl", rows)
    assert _spec(look_at("judged.jsonl", tmp_path), tmp_path).data.train[0].where == {"label": "true"}


def test_given_fields_are_those_of_all_splits(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}.csv").write_text("ticket,team\n" + "".join(f"{name} {n},billing\n" for n in range(9)))
    fields = parse_fields("{prompt: 'Which team?\\n{ticket}', answer: team}".replace("'", '"'))
    spec = _spec(look_at("train.csv", tmp_path, fields), tmp_path)
    assert spec.data.train[0].fields == spec.data.test_sources()[0].fields == fields
    assert fields == Fields(prompt="Which team?\n{ticket}", answer="team")


def test_misspelt_fields_are_refused() -> None:
    with pytest.raises(SpecError, match="promt"):
        parse_fields("{promt: ticket}")


def test_no_row_reaches_the_limit_whatever_the_tokenizer(tmp_path: Path) -> None:
    found = _rows(tmp_path, 50)
    assert max_tokens(found) > max(found.bytes)
    long = [{"question": "word " * 9000, "answer": "yes"}] * 3
    write_jsonl(tmp_path / "long.jsonl", long)
    assert max_tokens(look_at("long.jsonl", tmp_path)) == 8192


def test_few_rows_are_seen_more_often_and_in_smaller_batches(tmp_path: Path) -> None:
    assert default_epochs(_rows(tmp_path, 60)) == 3
    assert default_epochs(_rows(tmp_path, 1200)) == 2
    assert [global_batch(rows) for rows in (1, 39, 40, 100, 300, 320, 10**6)] == [1, 1, 2, 4, 8, 16, 16]


def test_fewer_epochs_are_chosen_where_the_time_is_short() -> None:
    chosen = Choices(model=HUB, task=None, card="cpu", epochs=3)
    assert within_hours(chosen, 3600.0, 1.0) == chosen
    assert within_hours(chosen, 2 * 3600.0, 1.0).epochs == 1.5
    for seconds in (0.3, 36.0, 1234.5, 90_000.0):  # the default keeps all epochs
        assert within_hours(chosen, seconds, float(rounded_hours(seconds))) == chosen


def test_a_model_is_a_folder_a_hub_id_or_the_embedded_one(tmp_path: Path) -> None:
    (tmp_path / "mine" / "model").mkdir(parents=True)
    kinds = {
        EMBEDDED: EmbeddedModel(kind="embedded", name="smollm2-135m"),
        HUB: HubModel(kind="hub", id=HUB),
        "mine/model": FolderModel(kind="folder", path="mine/model"),
        "./there": FolderModel(kind="folder", path="./there"),
    }
    found = _rows(tmp_path, 5)
    assert {name: _spec(found, tmp_path, model=name).model for name in kinds} == kinds
    assert model_values("mine/other", tmp_path)["kind"] == "hub"


def test_larger_cards_are_offered_larger_models() -> None:
    offered = [worth_a_plan(card)[0].parameters for card in ("8GiB", "24GiB", "80GiB")]
    assert offered == sorted(set(offered))
    assert worth_a_plan("2GiB")[-1] == SIZES[0]


def test_the_proposed_size_is_the_largest_that_its_plan_fits(tmp_path: Path) -> None:
    found = _rows(tmp_path, 40)
    *refused, last = propose(found, "6GiB", 1, tmp_path)
    assert last.fits
    assert not any(one.fits for one in refused)
    planned = plan_of(found, last.size, "6GiB", 1, tmp_path)
    assert last.gib_needed == planned.peak_bytes / 2**30 <= 6
    assert default_model(found, "6GiB", (*refused, last)) == last.size.id
