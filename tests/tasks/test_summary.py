import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from rouge_score.rouge_scorer import RougeScorer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from finefit.data.rows import Message, Row
from finefit.errors import ModelError, SpecError
from finefit.spec.models import FolderModel
from finefit.spec.schema import Evaluation
from finefit.tasks import NoResult, Reply, Task
from finefit.tasks.make import make_task
from finefit.tasks.summary import CONTRADICTS, FOLLOWS, _passages, faithfulness
from finefit.tasks.text_overlap import words
from tests.tasks.task_rows import counts_of, make_row, metrics_of

SOURCE = "The court of appeal dismissed the case on Monday because the papers came too late."


def _task(**settings: Any) -> Task:
    return make_task(Evaluation.model_validate({"task": {"kind": "summary", **settings}}))


def test_rouge_lsum_is_that_of_rouge_score() -> None:
    answer, reference = (
        "The case was dismissed.\nPapers were late.",
        "Papers came late.\nThe case was dismissed on Monday.",
    )
    expected = RougeScorer(["rougeLsum"], use_stemmer=True).score(reference, answer)["rougeLsum"].fmeasure
    assert metrics_of(_task(), [make_row(reference, prompt=SOURCE)], [answer])["rougeLsum"] == pytest.approx(
        expected, abs=1e-12
    )


def test_the_length_ratio_is_of_all_words_and_a_missing_answer_has_none() -> None:
    rows = [make_row("one two three four", prompt=SOURCE), make_row("one two", prompt=SOURCE)]
    assert metrics_of(_task(), rows, ["one two three", "one two three"])["length_ratio"] == pytest.approx(6 / 6)
    assert metrics_of(_task(), rows, ["one two three", ""])["length_ratio"] == pytest.approx(3 / 6)


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        ("## Facts\nx\n## Holding\ny", 1.0),
        ("**Facts:** x\n\n1. Holding", 1.0),
        ("FACTS: the man left\n- holding -", 1.0),
        ("The facts are these.\nHolding back", 0.0),
        ("Facts and more\nHoldings", 0.0),
        ("Facts", 0.5),
    ],
)
def test_a_section_is_a_line_that_is_its_heading_or_begins_with_it_and_a_colon(answer: str, share: float) -> None:
    assert (
        metrics_of(_task(sections=("Facts", "2. Holding")), [make_row("x y", prompt=SOURCE)], [answer])["sections"]
        == share
    )


def test_what_is_copied_is_told_by_4_grams_and_by_passages() -> None:
    row = make_row("reference words", prompt=SOURCE)
    copied = metrics_of(_task(), [row], ["the court of appeal dismissed the case"])
    assert (copied["copied"], copied["density"]) == (1.0, 7.0)
    own = metrics_of(_task(), [row], ["judges threw it out, late, on some Monday"])
    assert (own["copied"], own["density"]) == (0.0, 3 / 8)  # late, on and monday stand in it one by one
    half = metrics_of(_task(), [row], ["the court of appeal said nothing"])
    assert half["copied"] == pytest.approx(1 / 3)
    assert half["density"] == pytest.approx(4**2 / 6)


@given(st.lists(st.sampled_from("abcd"), max_size=12), st.lists(st.sampled_from("abcd"), max_size=30))
def test_passages_are_the_longest_shared_ones_from_left_to_right(answer: list[str], source: list[str]) -> None:
    text, expected, at = "".join(source), [], 0
    while at < len(answer):
        length = max((n for n in range(len(answer) - at + 1) if "".join(answer[at : at + n]) in text), default=0)
        expected += [length] if length else []
        at += max(1, length)
    assert _passages(answer, source) == expected


def test_the_source_is_what_the_user_gave_and_not_the_system() -> None:
    messages = (
        Message("system", "the court of appeal"),
        Message("user", "other words stand here"),
        Message("assistant", "reference"),
    )
    row = Row(source="t", number=1, messages=messages)
    assert metrics_of(_task(), [row], ["the court of appeal"])["copied"] == 0.0
    with pytest.raises(NoResult, match="no text that could be summarised"):
        _task().require(Row(source="t", number=1, messages=(Message("user", "..."), Message("assistant", "reference"))))


def test_an_empty_answer_counts_as_nothing_found() -> None:
    task, row = _task(sections=("Facts",)), make_row("one two", prompt=SOURCE)
    counts = counts_of(task, row, Reply(text=" "))
    assert {name for name, count in counts.items() if count} == {"reference_words"}
    assert set(counts) >= {count for metric in task.metrics for count in metric.counts}


def test_what_only_describes_is_neither_better_higher_nor_lower() -> None:
    assert {metric.name for metric in _task().metrics if metric.better == "neither"} == {
        "length_ratio",
        "copied",
        "density",
    }
    assert _task().finish is None


def test_a_list_of_sections_in_a_spec_is_read() -> None:
    task = make_task(Evaluation.model_validate_json('{"task": {"kind": "summary", "sections": ["Facts", "Holding"]}}'))
    assert task.signature["sections"] == "Facts, Holding"
    with pytest.raises(ValidationError, match="sections"):
        Evaluation.model_validate_json('{"task": {"kind": "summary", "sections": "Facts"}}')


# A judge of one layer, taught the known pairs in the test: it really can tell them apart, or really cannot.

FILLER = [f"filler{n}" for n in range(20)]
NAMES = {0: "contradiction", 1: "entailment", 2: "neutral"}
ENTAILED, DENIED = FOLLOWS[0][1], CONTRADICTS[0][1]
NLI_SOURCE = FOLLOWS[0][0]


def _tokenizer() -> PreTrainedTokenizerFast:
    texts = [text for pair in (*FOLLOWS, *CONTRADICTS) for text in pair]
    vocabulary = dict.fromkeys(
        ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *FILLER, *(word for text in texts for word in words(text))]
    )
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def _untaught(tokenizer: PreTrainedTokenizerFast) -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=66,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.1,
            id2label=NAMES,
            label2id={name: at for at, name in NAMES.items()},
        )
    )


def _lesson(chance: random.Random) -> tuple[str, str, int]:
    """A known pair somewhere among words that say nothing, or only such words."""
    label = chance.randrange(3)
    source, sentence = chance.choice([*FOLLOWS, *CONTRADICTS] if label == 2 else CONTRADICTS if label == 0 else FOLLOWS)
    filler = [chance.choice(FILLER) for _ in range(chance.randrange(30))]
    at = chance.randrange(len(filler) + 1)
    return " ".join([*filler[:at], *([] if label == 2 else [source]), *filler[at:]] or FILLER), sentence, label


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer, chance = tmp_path_factory.mktemp("nli"), _tokenizer(), random.Random(0)
    torch.set_num_threads(1)
    model = _untaught(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        sources, answers, labels = zip(*(_lesson(chance) for _ in range(16)), strict=True)
        loss = model(
            **tokenizer(list(sources), list(answers), padding=True, return_tensors="pt"), labels=torch.tensor(labels)
        ).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _nli(folder: Path) -> FolderModel:
    return FolderModel(kind="folder", path=folder.name)


def _renamed(folder: Path, copy: Path, names: dict[int, str]) -> Path:
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    config |= {
        "id2label": {str(at): name for at, name in names.items()},
        "label2id": {name: at for at, name in names.items()},
    }
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def test_sentences_that_the_source_entails_are_counted(taught: Path) -> None:
    faithful = faithfulness(_nli(taught), taught.parent)
    assert faithful(NLI_SOURCE, ENTAILED) == 1.0
    assert faithful(NLI_SOURCE, f"{ENTAILED} {DENIED}") == 0.5
    assert faithful(NLI_SOURCE, DENIED) == 0.0
    assert faithful(NLI_SOURCE, " ") == 0.0


@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_the_whole_source_is_looked_at_however_long_it_is(taught: Path, place: float) -> None:
    """And not its first window alone."""
    filler = [random.Random(1).choice(FILLER) for _ in range(300)]
    at = int(place * len(filler))
    long = " ".join([*filler[:at], NLI_SOURCE, *filler[at:]])
    faithful = faithfulness(_nli(taught), taught.parent)
    assert faithful(long, ENTAILED) == 1.0
    assert faithful(" ".join(filler), ENTAILED) == 0.0


def test_an_endless_sentence_is_judged_in_parts(taught: Path) -> None:
    faithful = faithfulness(_nli(taught), taught.parent)
    endless = " ".join(random.Random(2).choice(FILLER) for _ in range(200))
    parts = -(-200 // 32)
    assert faithful(NLI_SOURCE, f"{ENTAILED} {endless}") >= 1 / (1 + parts)
    assert faithful(" ".join(FILLER), f"{ENTAILED} {endless}") < 1


def test_labels_without_names_are_found_by_the_known_pairs(taught: Path, tmp_path: Path) -> None:
    unnamed = _renamed(taught, tmp_path / "unnamed", {at: f"LABEL_{at}" for at in NAMES})
    faithful = faithfulness(_nli(unnamed), tmp_path)
    assert (faithful(NLI_SOURCE, ENTAILED), faithful(NLI_SOURCE, DENIED)) == (1.0, 0.0)


def test_labels_that_are_named_wrongly_are_refused(taught: Path, tmp_path: Path) -> None:
    """The first label of many models is contradiction; one that is called entailment there would turn the score
    round."""
    swapped = _renamed(taught, tmp_path / "swapped", {0: "entailment", 1: "contradiction", 2: "neutral"})
    with pytest.raises(ModelError, match="the label contradiction, and it is entailment"):
        faithfulness(_nli(swapped), tmp_path)
    shifted = _renamed(taught, tmp_path / "shifted", {0: "neutral", 1: "entailment", 2: "contradiction"})
    with pytest.raises(ModelError, match="the label neutral, and it is contradiction"):
        faithfulness(_nli(shifted), tmp_path)


def test_two_labels_are_enough(taught: Path, tmp_path: Path) -> None:
    named = _renamed(taught, tmp_path / "two", {0: "not_entailment", 1: "entailment", 2: "LABEL_2"})
    assert faithfulness(_nli(named), tmp_path)(NLI_SOURCE, ENTAILED) == 1.0


def test_a_model_that_cannot_tell_known_pairs_apart_is_refused(tmp_path: Path) -> None:
    tokenizer = _tokenizer()
    _untaught(tokenizer).save_pretrained(tmp_path / "untaught")
    tokenizer.save_pretrained(tmp_path / "untaught")
    with pytest.raises(ModelError, match=r"same label|of one kind|and it is"):
        faithfulness(_nli(tmp_path / "untaught"), tmp_path)


def test_a_summary_is_scored_for_faithfulness_once_all_are_answered(taught: Path) -> None:
    evaluation = Evaluation.model_validate(
        {"task": {"kind": "summary", "nli": {"kind": "folder", "path": taught.name}}}
    )
    task = make_task(evaluation, base=taught.parent)
    row = make_row("A man plays.", prompt=NLI_SOURCE)
    assert task.read(Reply(text=ENTAILED), row).counts["faithful"] == 0.0
    assert task.finish is not None
    found = task.finish([(row, Reply(text=ENTAILED)), (row, Reply(text=DENIED)), (row, Reply())])
    assert [counts["faithful"] for counts in found] == [1.0, 0.0, 0.0]
    assert "faithful" in {metric.name for metric in task.metrics}
    assert task.signature["nli"] == taught.name


def test_an_nli_model_that_is_not_there_is_told_when_the_task_is_made(tmp_path: Path) -> None:
    evaluation = Evaluation.model_validate({"task": {"kind": "summary", "nli": {"kind": "folder", "path": "absent"}}})
    with pytest.raises(SpecError, match="folder absent, which holds no model"):
        make_task(evaluation, base=tmp_path)


def test_a_model_without_weights_is_told_without_a_traceback(taught: Path, tmp_path: Path) -> None:
    hollow = _renamed(taught, tmp_path / "hollow", NAMES)
    (hollow / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no weights"):
        faithfulness(_nli(hollow), tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_nli_model_with_a_damaged_file_is_named(taught: Path, tmp_path: Path, name: str) -> None:
    damaged = tmp_path / "nli"
    shutil.copytree(taught, damaged)
    (damaged / name).write_bytes((damaged / name).read_bytes()[:-7] + b"[[[[[[[")
    with pytest.raises(ModelError, match="nli") as caught:
        faithfulness(_nli(damaged), tmp_path)
    assert caught.value.remedy
