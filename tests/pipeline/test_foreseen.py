"""A pipeline is foretold before any of its stages has run."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from finefit.artifacts.forecasts import Suggestion
from finefit.errors import FindingError, ModelError
from finefit.pipeline.foreseen import foresee_stages, require_fitting, sharing_adapter, within_pipeline
from finefit.pipeline.outlines import Outlines, copies_in
from finefit.pipeline.outlooks import look_ahead, look_at
from finefit.spec.load import parse_any
from finefit.spec.stages import BuildMoe, Pipeline
from tests.conftest import make_model_folder, make_rows, write_jsonl
from tests.forecasts import GIB, make_forecast

CARD = ("RTX 4090",)
MODEL = "{kind: folder, path: model}"
HEAD = """\
name: staged
device: cpu
defaults:
  tuning: {kind: lora, rank: 4, alpha: 8}
  data: {train: [{path: train.jsonl}]}
  optimizer: {lr: 1e-2}
  global_batch: 4
stages:
"""
PREFERENCES = f"""\
  sft: {{kind: train, model: {MODEL}}}
  pairs: {{kind: make_pairs, method: {{kind: rules, per_row: 2}}, train: [{{path: train.jsonl}}]}}
  dpo:
    kind: train
    model: {{kind: stage, name: sft}}
    objective: {{kind: dpo}}
    data: {{train: [{{path: stage://pairs/train.jsonl}}], max_tokens: 128}}
"""
SHAPE = (
    "{model_type: qwen2, hidden_size: 896, intermediate_size: 4864, num_hidden_layers: 24, num_attention_heads: 14, num_key_value_heads: 2, "
    "vocab_size: 151936, tie_word_embeddings: true, max_position_embeddings: 32768}"
)


def pipeline_of(stages: str) -> Pipeline:
    found = parse_any(HEAD + stages, where="spec.yaml")
    assert isinstance(found, Pipeline)
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    make_model_folder(folder / "model")
    write_jsonl(folder / "train.jsonl", make_rows(10))
    write_jsonl(folder / "test.jsonl", make_rows(5, seed=2))
    return folder


def test_a_stage_is_foretold_before_what_it_stands_on_exists(base: Path) -> None:
    before = sorted(base.rglob("*"))
    whole = f"  whole: {{kind: train, model: {MODEL}, tuning: {{kind: full}}}}\n"
    found = foresee_stages(
        pipeline_of(
            PREFERENCES + whole + "  on: {kind: train, model: {kind: stage, name: whole}, tuning: {kind: full}}\n"
        ),
        base,
        cards=CARD,
    )
    assert list(found) == ["sft", "dpo", "whole", "on"]
    assert found["on"][0].parameters == found["whole"][0].parameters == 8864
    assert found["on"][0].lengths.source == "counted"
    adapter = found["sft"][0].trainable_parameters
    assert found["sft"][0].parameters == 8864 + adapter
    assert (
        found["dpo"][0].parameters == 8864 + 2 * adapter
    )  # the adapter that it goes on with, and where that began as its reference
    assert sorted(base.rglob("*")) == before


def test_pairs_to_come_are_as_long_as_they_may_be_and_as_many_as_their_rows_give(base: Path) -> None:
    (found,) = foresee_stages(pipeline_of(PREFERENCES), base, cards=CARD, names=("dpo",))["dpo"]
    assert (found.lengths.longest, found.lengths.num_rows, found.lengths.sides) == (128, 20, 2)
    assert 40 < found.lengths.mean < 80
    assert "stage://pairs/train.jsonl is yet to be made" in found.lengths.source
    assert found.total_steps == 5
    assert found.total_seconds is not None


def test_rows_of_a_script_to_come_are_assumed(base: Path) -> None:
    stages = f"  own: {{kind: python, script: own.py, outputs: [rows.jsonl]}}\n  sft: {{kind: train, model: {MODEL}, data: {{train: [{{path: stage://own/rows.jsonl}}]}}}}\n"
    (found,) = foresee_stages(pipeline_of(stages), base, cards=CARD)["sft"]
    assert (found.lengths.longest, found.lengths.num_rows, found.total_seconds) == (2048, None, None)
    assert found.lengths.source == "assumed from data.max_tokens, since stage://own/rows.jsonl is yet to be made"


def test_what_a_stage_has_made_stands_for_itself(base: Path, tmp_path: Path) -> None:
    whole = f"  whole: {{kind: train, model: {MODEL}, tuning: {{kind: full}}}}\n"
    stages = whole + "  on: {kind: train, model: {kind: stage, name: whole}, tuning: {kind: full}}\n"
    made = make_model_folder(tmp_path / "made")
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(
        json.dumps(config | {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3})
    )
    found = foresee_stages(
        pipeline_of(stages), base, cards=CARD, done=lambda name: made if name == "whole" else None, names=("on",)
    )
    assert found["on"][0].parameters > 8864


def test_a_fault_is_told_with_the_stage_it_is_of(base: Path) -> None:
    with pytest.raises(ModelError, match=r"^stage sft: the model folder .*nowhere does not exist"):
        foresee_stages(pipeline_of("  sft: {kind: train, model: {kind: folder, path: nowhere}}\n"), base, cards=CARD)


def test_a_stage_that_does_not_fit_is_refused_by_name_with_its_way_out() -> None:
    way = Suggestion(
        changes=("stages.dpo.levers.micro_batch=1",),
        saves_bytes=1,
        peak_bytes=5,
        fits=True,
        is_exact=True,
        price="slower",
    )
    small = make_forecast()
    require_fitting({"sft": (small,)})
    with pytest.raises(FindingError) as refused:
        require_fitting({"sft": (small,), "dpo": (replace(small, fits=False, suggestions=(way,)),)})
    assert refused.value.problem.startswith(f"stage dpo needs {small.peak_bytes:,} bytes")
    assert refused.value.remedy == "--set 'stages.dpo.levers.micro_batch=1' (5 bytes; slower)"


def _suggested(*changes: str) -> Suggestion:
    return Suggestion(changes=changes, saves_bytes=1, peak_bytes=1, fits=True, is_exact=False, price="")


def test_a_suggestion_is_written_as_the_pipeline_takes_it() -> None:
    """An adapter that two stages train is changed in both: a narrower one cannot go on from a wider."""
    found = within_pipeline(pipeline_of(PREFERENCES), "dpo", (_suggested("levers.micro_batch=1", "tuning.rank=2"),))
    assert found[0].changes == (
        "stages.dpo.levers.micro_batch=1",
        "stages.sft.tuning.rank=2",
        "stages.dpo.tuning.rank=2",
    )
    assert sharing_adapter(pipeline_of(PREFERENCES), "sft") == ("sft", "dpo")


def test_a_suggestion_that_other_stages_cannot_stand_on_is_not_made() -> None:
    whole = f"  whole: {{kind: train, model: {MODEL}, tuning: {{kind: subset, trainable: [layers.*.mlp]}}}}\n"
    adapter, moments = _suggested("tuning={kind: lora, rank: 64, alpha: 128}"), _suggested("optimizer.kind=adamw_8bit")
    on = "  on: {kind: train, model: {kind: stage, name: whole}, tuning: {kind: full}}\n"
    mix = f"  mix: {{kind: build_moe, base: {MODEL}, experts: {{a: {{kind: stage, name: whole}}, b: {MODEL}}}}}\n"
    for more, kept in ((on, [moments]), (mix, [moments]), ("", [adapter, moments])):
        found = within_pipeline(pipeline_of(whole + more), "whole", (adapter, moments))
        assert [one.changes for one in found] == [(f"stages.whole.{one.changes[0]}",) for one in kept]


def _mixture(rest: str) -> BuildMoe:
    stage = pipeline_of(f"  mix: {{kind: build_moe, base: {MODEL}, {rest}}}\n").stages["mix"]
    assert isinstance(stage, BuildMoe)
    return stage


TWICE = f"experts: {{a: {MODEL}, b: {{kind: folder, path: other}}, c: {MODEL}}}"


@pytest.mark.parametrize(
    ("rest", "experts", "top_k"),
    [
        (TWICE, 3, 2),
        (f"{TWICE}, copies: collapse", 2, 2),
        (f"{TWICE}, routing: weighted_sum", 3, 3),
        (f"{TWICE}, routing: top_1", 3, 1),
        (f"{TWICE}, router: {{kind: select_one, expert: b}}", 1, 1),
        (f"{TWICE}, merge: average", None, None),
    ],
)
def test_a_mixture_is_outlined_as_it_will_be_built(
    rest: str, experts: int | None, top_k: int | None, base: Path
) -> None:
    stages = f"  mix: {{kind: build_moe, base: {MODEL}, {rest}}}\n"
    folder = Outlines(pipeline=pipeline_of(stages), base=base).at("mix")
    config = json.loads((folder / "config.json").read_text())
    assert (config.get("num_local_experts"), config.get("num_experts_per_tok")) == (experts, top_k)
    assert config["model_type"] == ("mixtral" if experts else "llama")
    assert (folder / "tokenizer.json").is_file()
    assert not list(folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("rest", "notes"),
    [
        (
            f"{TWICE}, merge: average",
            (
                "the mean of 3 experts, as large as the base",
                "3 slots hold 2 distinct models: copies pull the mean their way, so",
            ),
        ),
        (
            f"{TWICE}, merge: average, copies: collapse",
            ("the mean of 2 experts, as large as the base", "3 slots hold 2 distinct models, and copies are"),
        ),
        (
            f"{TWICE}, copies: collapse",
            (
                "2 experts, 2 of them for each token",
                "3 slots hold 2 distinct models, and copies are collapsed: they take no",
            ),
        ),
        (f"{TWICE}, router: {{kind: select_one, expert: b}}", ("1 experts, 1 of them for each token",)),
    ],
)
def test_it_is_foretold_of_copies_what_the_build_will_do(
    rest: str, notes: tuple[str, ...], stored_in_bf16: Path
) -> None:
    found = look_ahead(pipeline_of(f"  mix: {{kind: build_moe, base: {MODEL}, {rest}}}\n"), stored_in_bf16, cards=CARD)[
        "mix"
    ].notes
    assert len(found) == len(notes)
    assert all(note.startswith(start) for note, start in zip(found, notes, strict=True))


def test_copies_are_known_by_the_models_that_are_named() -> None:
    assert copies_in(_mixture(TWICE)) == {"c": "a"}


def test_every_stage_has_its_outlook(base: Path) -> None:
    rest = f"""\
  merged: {{kind: merge_adapter, model: {{kind: stage, name: dpo}}}}
  mix: {{kind: build_moe, base: {MODEL}, experts: {{a: {{kind: stage, name: merged}}, b: {MODEL}, c: {MODEL}}}}}
  scores:
    kind: evaluate
    models: {{base: {MODEL}, dpo: {{kind: stage, name: dpo}}, mix: {{kind: stage, name: mix}}}}
    data: {{test: {{path: test.jsonl}}}}
    evaluate: [{{task: json_match, max_new_tokens: 8, limit: 3}}]
  table: {{kind: compare, of: [scores]}}
"""
    whole = HEAD.replace("alpha: 8", "alpha: 8, targets: [gate_proj, up_proj, down_proj]") + PREFERENCES + rest
    pipeline = parse_any(whole, where="spec.yaml")
    assert isinstance(pipeline, Pipeline)
    found = look_ahead(pipeline, base, cards=CARD)
    assert list(found) == ["sft", "pairs", "dpo", "merged", "mix", "scores", "table"]
    assert found["merged"].parameters == 8864
    assert found["merged"].disk_bytes == 4 * 8864
    mlp, router = 3 * 16 * 32, 3 * 16
    assert found["mix"].parameters == 8864 + 2 * (2 * mlp + router)
    assert found["mix"].disk_bytes == 4 * (8864 + 2 * (2 * mlp + router))
    assert "3 slots hold 2 distinct models" in found["mix"].notes[1]
    assert found["scores"].rooms[0].keys() == {"base", "dpo", "mix"}
    assert found["scores"].seconds is not None
    assert all(one.fits == (True,) for one in found.values())


def test_a_model_that_cannot_answer_on_a_card_is_seen_before_it_is_asked(base: Path) -> None:
    stages = f"""\
  scores:
    kind: evaluate
    models: {{base: {MODEL}}}
    data: {{test: {{path: test.jsonl}}}}
    evaluate: [{{task: json_match, max_new_tokens: 8}}]
"""
    found = look_ahead(pipeline_of(stages), base, cards=(*CARD, "10MiB"))["scores"]
    assert found.fits == (True, False)
    assert found.seconds is not None


MERGED = (
    f"  sft: {{kind: train, model: {MODEL}}}\n  merged: {{kind: merge_adapter, model: {{kind: stage, name: sft}}}}\n"
)
TWO = f"{{a: {MODEL}, b: {{kind: folder, path: other}}}}"
MIX = f"  mix: {{kind: build_moe, base: {MODEL}, experts: {TWO}}}\n"
FROM_ROWS = MIX.replace(
    "}}}\n", "}}, router: {kind: centroids, data: {a: {path: train.jsonl}, b: {path: test.jsonl}}}}\n"
)


@pytest.fixture
def stored_in_bf16(base: Path, tmp_path: Path) -> Path:
    for name in ("model", "other"):
        folder = tmp_path / name
        shutil.copytree(base / "model", folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    for name in ("train.jsonl", "test.jsonl"):
        shutil.copy(base / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(("stages", "name"), [(MERGED, "merged"), (MIX, "mix")])
def test_what_this_machine_cannot_hold_in_memory_does_not_fit_here(
    stages: str, name: str, stored_in_bf16: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another machine nothing but its card is known."""
    outlines = Outlines(pipeline=pipeline_of(stages), base=stored_in_bf16)
    needed = look_at(outlines, name, ("cpu",)).host_bytes
    assert needed is not None
    for memory, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr("finefit.pipeline.outlooks.read_memory_bytes", lambda _, memory=memory: memory)
        assert look_at(outlines, name, ("cpu", "auto", *CARD)).fits == (fits, fits, True)


@pytest.mark.parametrize(
    ("precision", "card", "width"),
    [("auto", "cpu", 4), ("bf16", "cpu", 2), ("auto", "RTX 4090", 0)],
    ids=["fp32 on a CPU", "as the spec says", "on the card"],
)
def test_a_base_that_is_looked_at_is_held_in_the_precision_of_the_run(
    precision: str, card: str, width: int, stored_in_bf16: Path
) -> None:
    def host_bytes(stages: str) -> int:
        pipeline = pipeline_of(stages).model_copy(update={"precision": precision})
        return look_at(Outlines(pipeline=pipeline, base=stored_in_bf16), "mix", (card,)).host_bytes or 0

    assert host_bytes(FROM_ROWS) - host_bytes(MIX) == width * 8864


def test_a_card_that_cannot_hold_the_base_that_is_looked_at_does_not_fit(stored_in_bf16: Path) -> None:
    """40,000 words of 16 numbers in bf16 are more than a MiB."""
    for name in ("model", "other"):
        config = json.loads((stored_in_bf16 / name / "config.json").read_text())
        (stored_in_bf16 / name / "config.json").write_text(json.dumps(config | {"vocab_size": 40000}))
    cards = ("4MiB", "1MiB")
    assert look_at(Outlines(pipeline=pipeline_of(FROM_ROWS), base=stored_in_bf16), "mix", cards).fits == (True, False)
    assert look_at(Outlines(pipeline=pipeline_of(MIX), base=stored_in_bf16), "mix", cards).fits == (True, True)


SAMPLED = """\
  first: {{kind: train, model: {model}, tuning: {{kind: full}}}}
  pairs:
    kind: make_pairs
    method: {{kind: sampled, model: {{kind: stage, name: first}}, task: exact_match, samples: 3, max_new_tokens: 8}}
    train: [{{path: {path}, weight: 0.5}}]
"""


def test_answers_that_are_sampled_have_their_room(base: Path) -> None:
    """One answer to each of ten prompts, three times over."""
    found = look_ahead(pipeline_of(SAMPLED.format(model=MODEL, path="train.jsonl")), base, cards=(*CARD, "10MiB"))[
        "pairs"
    ]
    assert found.fits == (True, False)
    room = found.rooms[0]["model"]["exact_match"]
    assert room.batch_seconds is not None
    assert found.seconds == pytest.approx(math.ceil(30 / room.rows) * room.batch_seconds)
    assert "answers are sampled from a model of 8,864 parameters" in found.notes


def test_answers_to_rows_that_are_to_come_are_said_to_be_unknown(base: Path) -> None:
    own = "  own: {kind: python, script: own.py, outputs: [rows.jsonl]}\n"
    found = look_ahead(pipeline_of(own + SAMPLED.format(model=MODEL, path="stage://own/rows.jsonl")), base, cards=CARD)[
        "pairs"
    ]
    assert found.rooms == ()
    assert found.notes[1] == "what they take is not known before the rows are there"


def _experts(count: int) -> str:
    expert = (
        f"{{kind: train, model: {{kind: shape, config: {SHAPE}}}, tuning: {{kind: subset, trainable: [layers.*.mlp]}}}}"
    )
    slots = ", ".join(
        f"{name}_{at}: {{kind: stage, name: {name}}}" for at in range(count // 2) for name in ("truthful", "meetings")
    )
    return f"""\
  truthful: {expert}
  meetings: {expert}
  mix: {{kind: build_moe, base: {{kind: shape, config: {SHAPE}}}, experts: {{{slots}}}, shared: base}}
  tuned: {{kind: train, model: {{kind: stage, name: mix}}, tuning: {{kind: full}}, data: {{max_tokens: 512}}, global_batch: 1}}
"""


@pytest.mark.parametrize(("count", "billions", "fits"), [(32, 10.54, False), (2, 1.12, True)])
def test_copies_of_two_experts_are_refused_before_anything_is_loaded_and_two_fit(
    count: int, billions: float, fits: bool, base: Path
) -> None:
    """32 slots of Qwen2-0.5B take fp32 weights, gradients and two moments of 10.5 billion parameters: 157 GiB, which no other lever makes less."""
    pipeline = pipeline_of(_experts(count))
    (found,) = foresee_stages(pipeline, base, cards=("A100-80GB",), names=("tuned",))["tuned"]
    assert found.fits is fits
    assert found.parameters / 1e9 == pytest.approx(billions, abs=0.005)
    states = 16 * found.parameters
    assert states / GIB == pytest.approx(157 if count == 32 else 16.7, abs=0.3)
    assert found.peak_bytes > states
    mix = pipeline.stages["mix"]
    assert isinstance(mix, BuildMoe)
    assert len(copies_in(mix)) == count - 2
