"""A pipeline is planned before any of its stages has run."""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from finefit.artifacts.forecasts import RehearsalRequest, StageForecast, Suggestion
from finefit.artifacts.records import WiredModel
from finefit.errors import ModelError
from finefit.facts.files import read_model_folder
from finefit.moe.build import average_experts, build_moe
from finefit.plan import client
from finefit.plan.stage_costs import forecast_stage, forecast_stages, prepared_eval_rows
from finefit.plan.stage_forecasts import (
    ModelStubs,
    expert_copies,
    forecast_trainings,
    on_cards,
    stages_sharing_adapter,
    suggestions_of,
)
from finefit.run import evaluate_stage
from finefit.run.check_stages import check_pipeline
from finefit.spec.load import parse_any
from finefit.spec.models import FolderModel
from finefit.spec.pipeline import Pipeline
from finefit.spec.stages import BuildMoe, EvaluateStage
from finefit.vision import geometry_of
from tests.conftest import make_model_folder, make_rows, make_tokenizer, write_jsonl
from tests.custom_models import CODE, SPEC, make_custom_project
from tests.data.image_rows import asked, draw
from tests.forecasts import GIB
from tests.here import ask_here, rehearse_here
from tests.mixtures import DENSE, make_mixture_folder
from tests.moe.test_build import make_expert
from tests.run.test_evaluate_stage import make_job
from tests.vision_models import make_vlm, vlm_config

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
    "{model_type: qwen2, hidden_size: 896, intermediate_size: 4864, num_hidden_layers: 24, "
    "num_attention_heads: 14, num_key_value_heads: 2, "
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


def test_a_stage_is_planned_before_its_inputs_exist(base: Path) -> None:
    before = sorted(base.rglob("*"))
    whole = f"  whole: {{kind: train, model: {MODEL}, tuning: {{kind: full}}}}\n"
    found = forecast_trainings(
        pipeline_of(
            PREFERENCES + whole + "  on: {kind: train, model: {kind: stage, name: whole}, tuning: {kind: full}}\n"
        ),
        base,
        on_cards(CARD),
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
    (found,) = forecast_trainings(pipeline_of(PREFERENCES), base, on_cards(CARD), names=("dpo",))["dpo"]
    assert (found.lengths.longest, found.lengths.num_rows, found.lengths.sides) == (128, 20, 2)
    assert 40 < found.lengths.mean < 80
    assert "stage://pairs/train.jsonl is not made yet" in found.lengths.source
    assert found.total_steps == 5
    assert found.total_seconds is not None


def test_rows_of_a_script_to_come_are_assumed(base: Path) -> None:
    stages = (
        f"  own: {{kind: python, script: own.py, outputs: [rows.jsonl]}}\n  sft: {{kind: train, model: {MODEL}, "
        f"data: {{train: [{{path: stage://own/rows.jsonl}}]}}}}\n"
    )
    (found,) = forecast_trainings(pipeline_of(stages), base, on_cards(CARD))["sft"]
    assert (found.lengths.longest, found.lengths.num_rows, found.total_seconds) == (2048, None, None)
    assert found.lengths.source == "assumed from data.max_tokens, since stage://own/rows.jsonl is not made yet"


def test_what_a_stage_has_made_stands_for_itself(base: Path, tmp_path: Path) -> None:
    whole = f"  whole: {{kind: train, model: {MODEL}, tuning: {{kind: full}}}}\n"
    stages = whole + "  on: {kind: train, model: {kind: stage, name: whole}, tuning: {kind: full}}\n"
    made = make_model_folder(tmp_path / "made")
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(
        json.dumps(config | {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3})
    )
    found = forecast_trainings(
        pipeline_of(stages), base, on_cards(CARD), done=lambda name: made if name == "whole" else None, names=("on",)
    )
    assert found["on"][0].parameters > 8864


def test_a_fault_is_told_with_the_stage_it_is_of(base: Path) -> None:
    with pytest.raises(ModelError, match=r"^stage sft: the model folder .*nowhere does not exist"):
        forecast_trainings(
            pipeline_of("  sft: {kind: train, model: {kind: folder, path: nowhere}}\n"), base, on_cards(CARD)
        )


def _suggested(*changes: str) -> Suggestion:
    return Suggestion(changes=changes, saves_bytes=1, peak_bytes=1, fits=True, is_exact=False, price="")


def test_a_suggestion_is_written_as_the_pipeline_takes_it() -> None:
    """An adapter that two stages train is changed in both: a narrower one cannot go on from a wider."""
    found = suggestions_of(pipeline_of(PREFERENCES), "dpo", (_suggested("levers.micro_batch=1", "tuning.rank=2"),))
    assert found[0].changes == (
        "stages.dpo.levers.micro_batch=1",
        "stages.sft.tuning.rank=2",
        "stages.dpo.tuning.rank=2",
    )
    assert stages_sharing_adapter(pipeline_of(PREFERENCES), "sft") == ("sft", "dpo")


def test_a_suggestion_that_other_stages_cannot_stand_on_is_not_made() -> None:
    whole = f"  whole: {{kind: train, model: {MODEL}, tuning: {{kind: subset, trainable: [layers.*.mlp]}}}}\n"
    adapter, moments = _suggested("tuning={kind: lora, rank: 64, alpha: 128}"), _suggested("optimizer.kind=adamw_8bit")
    on = "  on: {kind: train, model: {kind: stage, name: whole}, tuning: {kind: full}}\n"
    mix = f"  mix: {{kind: build_moe, base: {MODEL}, experts: {{a: {{kind: stage, name: whole}}, b: {MODEL}}}}}\n"
    for more, kept in ((on, [moments]), (mix, [moments]), ("", [adapter, moments])):
        found = suggestions_of(pipeline_of(whole + more), "whole", (adapter, moments))
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
    folder = ModelStubs(pipeline=pipeline_of(stages), base=base).at("mix")
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
                "3 slots hold 2 distinct models: copies bias the mean, so",
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
def test_copies_are_planned_as_the_build_makes_them(rest: str, notes: tuple[str, ...], stored_in_bf16: Path) -> None:
    found = forecast_stages(
        pipeline_of(f"  mix: {{kind: build_moe, base: {MODEL}, {rest}}}\n"), stored_in_bf16, cards=CARD
    )["mix"].notes
    assert len(found) == len(notes)
    assert all(note.startswith(start) for note, start in zip(found, notes, strict=True))


def test_copies_are_known_by_the_models_that_are_named() -> None:
    assert expert_copies(_mixture(TWICE)) == {"c": "a"}


def test_every_stage_has_a_forecast(base: Path) -> None:
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
    found = forecast_stages(pipeline, base, cards=CARD)
    assert list(found) == ["sft", "pairs", "dpo", "merged", "mix", "scores", "table"]
    assert found["merged"].parameters == 8864
    assert found["merged"].disk_bytes == 4 * 8864
    mlp, router = 3 * 16 * 32, 3 * 16
    assert found["mix"].parameters == 8864 + 2 * (2 * mlp + router)
    assert found["mix"].disk_bytes == 4 * (8864 + 2 * (2 * mlp + router))
    assert "3 slots hold 2 distinct models" in found["mix"].notes[1]
    assert found["scores"].eval_limits[0].keys() == {"base", "dpo", "mix"}
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
    found = forecast_stages(pipeline_of(stages), base, cards=(*CARD, "10MiB"))["scores"]
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
    stubs = ModelStubs(pipeline=pipeline_of(stages), base=stored_in_bf16)
    needed = forecast_stage(stubs, name, ("cpu",)).host_bytes
    assert needed is not None
    for memory, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr("finefit.plan.stage_costs.read_memory_bytes", lambda _, memory=memory: memory)
        assert forecast_stage(stubs, name, ("cpu", "auto", *CARD)).fits == (fits, fits, True)


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
        return forecast_stage(ModelStubs(pipeline=pipeline, base=stored_in_bf16), "mix", (card,)).host_bytes or 0

    assert host_bytes(FROM_ROWS) - host_bytes(MIX) == width * 8864


def test_a_card_that_cannot_hold_the_base_that_is_looked_at_does_not_fit(stored_in_bf16: Path) -> None:
    """40,000 words of 16 numbers in bf16 are more than a MiB."""
    for name in ("model", "other"):
        config = json.loads((stored_in_bf16 / name / "config.json").read_text())
        (stored_in_bf16 / name / "config.json").write_text(json.dumps(config | {"vocab_size": 40000}))
    cards = ("4MiB", "1MiB")
    assert forecast_stage(ModelStubs(pipeline=pipeline_of(FROM_ROWS), base=stored_in_bf16), "mix", cards).fits == (
        True,
        False,
    )
    assert forecast_stage(ModelStubs(pipeline=pipeline_of(MIX), base=stored_in_bf16), "mix", cards).fits == (True, True)


SAMPLED = """\
  first: {{kind: train, model: {model}, tuning: {{kind: full}}}}
  pairs:
    kind: make_pairs
    method: {{kind: sampled, model: {{kind: stage, name: first}}, task: exact_match, samples: 3, max_new_tokens: 8}}
    train: [{{path: {path}, weight: 0.5}}]
"""


def test_answers_that_are_sampled_have_their_room(base: Path) -> None:
    """One answer to each of ten prompts, three times over."""
    found = forecast_stages(pipeline_of(SAMPLED.format(model=MODEL, path="train.jsonl")), base, cards=(*CARD, "10MiB"))[
        "pairs"
    ]
    assert found.fits == (True, False)
    batch_limit = found.eval_limits[0]["model"]["exact_match"]
    assert batch_limit.batch_seconds is not None
    assert found.seconds == pytest.approx(math.ceil(30 / batch_limit.rows) * batch_limit.batch_seconds)
    assert "answers are sampled from a model of 8,864 parameters" in found.notes


def test_answers_to_rows_that_are_to_come_are_said_to_be_unknown(base: Path) -> None:
    own = "  own: {kind: python, script: own.py, outputs: [rows.jsonl]}\n"
    found = forecast_stages(
        pipeline_of(own + SAMPLED.format(model=MODEL, path="stage://own/rows.jsonl")), base, cards=CARD
    )["pairs"]
    assert found.eval_limits == ()
    assert found.notes[1] == "their cost is not known before the rows exist"


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
"""  # noqa: E501


@pytest.mark.parametrize(("count", "billions", "fits"), [(32, 10.54, False), (2, 1.12, True)])
def test_copies_of_two_experts_are_refused_before_anything_is_loaded_and_two_fit(
    count: int, billions: float, fits: bool, base: Path
) -> None:
    """32 slots of Qwen2-0.5B take fp32 weights, gradients and two moments of 10.5 billion parameters: 157 GiB, which no
    other lever makes less."""
    pipeline = pipeline_of(_experts(count))
    (found,) = forecast_trainings(pipeline, base, on_cards(("A100-80GB",)), names=("tuned",))["tuned"]
    assert found.fits is fits
    assert found.parameters / 1e9 == pytest.approx(billions, abs=0.005)
    states = 16 * found.parameters
    assert states / GIB == pytest.approx(157 if count == 32 else 16.7, abs=0.3)
    assert found.peak_bytes > states
    mix = pipeline.stages["mix"]
    assert isinstance(mix, BuildMoe)
    assert len(expert_copies(mix)) == count - 2


# Stages with models that see are planned with what their rows show; of rows that are yet to be made, with images that
# are assumed and told.

MADE = "stage://drawn/test.jsonl"
DRAWN = {"kind": "python", "script": "draw.py", "outputs": ["test.jsonl", "shown"]}
QWEN, LLAVA = ({"kind": "folder", "path": name} for name in ("qwen", "llava"))


def seeing(views: int | None) -> str:
    return CODE.replace("self.layers = ", f"self.views, self.image_text = {views}, '(seen) '\n        self.layers = ")


@pytest.fixture(autouse=True)
def requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RehearsalRequest]:
    """That rehearsals were asked, all of them answered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rehearse_here(monkeypatch)
    found: list[RehearsalRequest] = []

    def ask(job: client.Job, *arguments: object) -> Any:
        found.extend(one for one in arguments if isinstance(one, RehearsalRequest))
        return ask_here(job, *arguments)

    monkeypatch.setattr(client, "ask", ask)
    return found


@pytest.fixture
def image_base(tmp_path: Path) -> Path:
    make_vlm("qwen2_5_vl", tmp_path / "qwen")
    make_vlm("llava", tmp_path / "llava")
    make_custom_project(tmp_path, code=seeing(1))
    draw(tmp_path, "a.png", 1, size=(96, 64))
    write_jsonl(tmp_path / "test.jsonl", [asked(1, "a.png")])
    return tmp_path


def scores(models: dict[str, Any], path: str = "test.jsonl", **data: Any) -> dict[str, Any]:
    source = {"path": path} | ({"images_root": data.pop("images_root")} if "images_root" in data else {})
    return {
        "kind": "evaluate",
        "models": models,
        "data": {"test": source, **data},
        "evaluate": [{"task": "exact_match", "max_new_tokens": 8}],
    }


def image_pipeline(**stages: Any) -> Pipeline:
    return Pipeline.model_validate_json(json.dumps({"name": "seeing", "device": "cpu", "stages": stages}))


def scores_costs(image_base: Path, **stages: Any) -> StageForecast:
    return forecast_stages(image_pipeline(**stages), image_base, cards=CARD)["scores"]


def test_a_model_of_ones_own_that_sees_is_asked_as_itself(image_base: Path, requests: list[RehearsalRequest]) -> None:
    found = scores_costs(image_base, scores=scores({"own": SPEC["model"]}))
    assert found.notes == ()
    (question,) = requests
    text = len("(seen) Which digit is it?")
    assert text < (question.lengths.prompt or 0) < 2 * text  # of the rows, and not of max_tokens
    assert question.lengths.prompt_grids == ((96, 64),)


def test_rows_that_a_model_of_ones_own_cannot_take_are_told_by_check(image_base: Path) -> None:
    (image_base / "my_model.py").write_text(seeing(2), encoding="utf-8")
    found = check_pipeline(image_pipeline(scores=scores({"qwen": QWEN, "own": SPEC["model"]})), image_base, image_base)
    (problem,) = [finding.problem for name, finding in found.findings if name == "scores" and finding.level == "error"]
    assert "test.jsonl:1 has 1 images, and the model takes 2 with every row" in problem


def test_every_model_is_planned_with_the_images_as_it_sees_them(
    image_base: Path, requests: list[RehearsalRequest]
) -> None:
    scores_costs(image_base, scores=scores({"qwen": QWEN, "llava": LLAVA}))
    qwen, llava = (question.lengths.prompt_grids for question in requests)
    assert (qwen, llava) == (((1, 8, 12),), ((1,),))  # patches of 8 pixels; one image of LLaVA's one size


def test_limits_of_a_stage_hold_for_its_plan_and_for_its_answers(
    image_base: Path, requests: list[RehearsalRequest]
) -> None:
    limits = {"max_pixels": 48 * 32, "min_pixels": 16 * 16}
    stages = {"scores": scores({"qwen": QWEN}, images=limits)}
    scores_costs(image_base, **stages)
    assert [question.lengths.prompt_grids for question in requests] == [((1, 4, 6),)]
    wired = {"qwen": WiredModel(model=FolderModel(kind="folder", path=str(image_base / "qwen")))}
    job = make_job(image_base, wired, asked=({"task": "exact_match"},), images=limits)
    assert isinstance(job.stage, EvaluateStage)
    _, prepared = evaluate_stage.models_on_rows(job, job.stage.data, wired, job.stage.evaluate)["qwen"]
    assert prepared.record.prompt_grids == ((1, 4, 6),)


def test_prompts_that_are_yet_to_be_made_are_planned_with_images_and_that_is_told(
    image_base: Path, requests: list[RehearsalRequest]
) -> None:
    models = {
        "qwen": QWEN,
        "own": SPEC["model"],
        "shape": {"kind": "shape", "config": json.loads(vlm_config("qwen2_5_vl").to_json_string())},
    }
    found = scores_costs(image_base, drawn=DRAWN, scores=scores(models, MADE, max_tokens=136))
    qwen, own, shape = requests
    geometry = geometry_of(qwen.config)
    assert geometry is not None
    (grid,) = qwen.lengths.prompt_grids
    assert (qwen.lengths.prompt, geometry.num_tokens(grid), shape.lengths.prompt_grids) == (
        128,
        36,
        ((1, 16, 16),),
    )  # its processor shows none larger
    assert own.lengths.prompt_grids == ((512, 512),)
    assumed = f"prompts assumed from data.max_tokens, since {MADE} is not made yet, each with an image of"
    assert found.notes == (
        f"qwen: {assumed} 36 tokens",
        f"own: {assumed} 512 x 512 pixels",
        f"shape: {assumed} 64 tokens",
    )
    assert scores_costs(
        image_base, drawn=DRAWN, scores=scores({"one": QWEN, "other": QWEN}, MADE, max_tokens=136)
    ).notes == (f"{assumed} 36 tokens",)


def test_rows_whose_images_are_yet_to_be_made_are_planned_as_rows_to_come(image_base: Path) -> None:
    train = {
        "kind": "train",
        "model": QWEN,
        "tuning": {"kind": "full"},
        "optimizer": {"lr": 1e-3},
        "levers": {"micro_batch": 1},
    }
    rows = {"path": "test.jsonl", "images_root": "stage://drawn/shown"}
    trained = train | {"data": {"train": [rows], "validation": rows, "max_tokens": 128}}
    pipeline = image_pipeline(
        drawn=DRAWN, trained=trained, scores=scores({"qwen": QWEN}, images_root=rows["images_root"])
    )
    since = "assumed from data.max_tokens, since stage://drawn/shown is not made yet, each with an image of"
    (forecast,) = forecast_trainings(pipeline, image_base, on_cards(CARD))["trained"]
    assert forecast.lengths.source == f"{since} 36 tokens"
    assert forecast_stages(pipeline, image_base, cards=CARD)["scores"].notes[0].startswith(f"prompts {since}")
    (image_base / "draw.py").write_text("", encoding="utf-8")
    told = [
        (name, finding.level, finding.problem)
        for name, finding in check_pipeline(pipeline, image_base, image_base).findings
    ]
    assert [one for one in told if one[1] == "error"] == []
    assert {name for name, _, problem in told if "stage://drawn/shown is not made yet" in problem} == {
        "trained",
        "scores",
    }


@pytest.mark.parametrize(("views", "count"), [(2, 2), (None, 1)], ids=["as many as it asks for", "or one"])
def test_a_training_of_ones_own_on_rows_to_come_is_rehearsed_with_images(
    views: int | None, count: int, image_base: Path
) -> None:
    (image_base / "my_model.py").write_text(seeing(views), encoding="utf-8")
    train = {
        "kind": "train",
        "model": SPEC["model"],
        "tuning": SPEC["tuning"],
        "optimizer": {"lr": 1e-3},
        "levers": {"micro_batch": 1},
    }
    pipeline = image_pipeline(drawn=DRAWN, trained=train | {"data": {"train": [{"path": MADE}], "max_tokens": 64}})
    (found,) = forecast_trainings(pipeline, image_base, on_cards(CARD))["trained"]
    assert found.lengths.grids == ((512, 512),) * count
    images = "an image" if count == 1 else f"{count} images"
    assert (
        found.lengths.source
        == f"assumed from data.max_tokens, since {MADE} is not made yet, each with {images} of 512 x 512 pixels"
    )


def test_a_model_that_sees_nothing_is_planned_without_images(image_base: Path) -> None:
    (image_base / "my_model.py").write_text(CODE, encoding="utf-8")
    pipeline = image_pipeline(drawn=DRAWN, scores=scores({"own": SPEC["model"]}, MADE))
    found = forecast_stages(pipeline, image_base, cards=CARD)["scores"]
    assert found.notes == (f"prompts assumed from data.max_tokens, since {MADE} is not made yet",)
    stage = pipeline.stages["scores"]
    assert isinstance(stage, EvaluateStage)
    assert prepared_eval_rows(ModelStubs(pipeline=pipeline, base=image_base), stage, "own") is None


# What a mixture or an average will refuse is told before its experts are trained, and its size is that of what will be
# built.

MLPS = "tuning: {kind: subset, trainable: [layers.*.mlp]}"
BASE = "{kind: folder, path: base}"
FOLDERS = "{letters: {kind: folder, path: letters}, digits: {kind: folder, path: digits}}"
TRAINED = f"""\
  letters: {{kind: train, model: {BASE}, {MLPS}}}
  digits: {{kind: train, model: {{kind: folder, path: other}}, {MLPS}}}
"""
TWO_EXPERTS = "{letters: {kind: stage, name: letters}, digits: {kind: stage, name: digits}}"


def mixture_costs(folder: Path, experts: str, *, more: str = "", before: str = "", base: str = BASE) -> StageForecast:
    stages = f"{before}  mix: {{kind: build_moe, base: {base}, experts: {experts}{more}}}\n"
    return forecast_stage(ModelStubs(pipeline=pipeline_of(stages), base=folder), "mix", CARD)


def make_other(folder: Path, kind: str, **changes: Any) -> Path:
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(DENSE | changes))).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("merge", ["mixture", "average"])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda at: make_other(at, "llama", hidden_size=32, num_hidden_layers=3),
            "hidden_size 32 where the base has 16, .*num_hidden_layers 3 where",
        ),
        (lambda at: make_mixture_folder(at, "llama"), "model_type 'mixtral' where the base has 'llama'$"),
    ],
    ids=["another shape", "a mixture"],
)
def test_an_expert_of_another_model_than_the_base_is_told_before_it_is_trained(
    make: Callable[[Path], Path], words: str, merge: str, tmp_path: Path
) -> None:
    make_model_folder(tmp_path / "base")
    make(tmp_path / "other")
    problem = f"(?m)^stage mix: expert digits computes differently from the base: its config.json has {words}"
    with pytest.raises(ModelError, match=problem) as caught:
        mixture_costs(tmp_path, TWO_EXPERTS, before=TRAINED, more=f", merge: {merge}")
    assert caught.value.remedy == "train it from this base"


def test_an_expert_that_is_left_out_may_be_of_another_model(tmp_path: Path) -> None:
    make_model_folder(tmp_path / "base")
    make_other(tmp_path / "other", "llama", hidden_size=32)
    found = mixture_costs(tmp_path, TWO_EXPERTS, before=TRAINED, more=", router: {kind: select_one, expert: letters}")
    assert found.parameters == 8864 + 2 * 16  # and a router of one in each of two layers


@pytest.mark.parametrize(
    "base",
    [BASE, "{kind: stage, name: warm}", f"{{kind: shape, config: {json.dumps({'model_type': 'phi3', **DENSE})}}}"],
)
def test_a_mean_of_mlps_that_are_not_known_is_told_before_its_experts_are_trained(base: str, tmp_path: Path) -> None:
    """Phi-3 has two parts of its MLP in one tensor."""
    make_other(tmp_path / "base", "phi3")
    trained = (
        f"  warm: {{kind: train, model: {BASE}, {MLPS}}}\n  a: {{kind: train, model: {{kind: stage, name: warm}}, "
        f"{MLPS}}}\n"
    )
    with pytest.raises(
        ModelError,
        match=r"^stage mix: the base's model\.layers\.0\.mlp\.gate_up_proj\.weight is not part of a known MLP",
    ):
        mixture_costs(
            tmp_path, f"{{a: {{kind: stage, name: a}}, b: {base}}}", base=base, before=trained, more=", merge: average"
        )


def as_they_are(_: Path) -> None:
    pass


def in_bf16(folder: Path) -> None:
    rewrite(folder, torch.bfloat16)


def rewrite(
    folder: Path,
    dtype: torch.dtype,
    *,
    norms: torch.dtype | None = None,
    more: Mapping[str, torch.Tensor] | None = None,
) -> None:
    tensors = load_file(folder / "model.safetensors")
    stored = {name: tensor.to(norms if norms and "norm" in name else dtype) for name, tensor in tensors.items()}
    save_file(stored | dict(more or {}), folder / "model.safetensors", metadata={"format": "pt"})
    say(folder, str(dtype).removeprefix("torch."))


def say(folder: Path, dtype: str | None) -> None:
    config = json.loads((folder / "config.json").read_text())
    said = {} if dtype is None else {"dtype": dtype}
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")} | said)
    )


def silently_in_bf16(folder: Path) -> None:
    rewrite(folder, torch.bfloat16)
    say(folder, None)


def with_norms_in_fp32(folder: Path) -> None:
    rewrite(folder, torch.bfloat16, norms=torch.float32)


def with_what_a_model_computes(folder: Path) -> None:
    rewrite(folder, torch.bfloat16, more={"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})


def digits_in_fp16(folder: Path) -> None:
    """Rounded to what both halves hold, so that the rest of it is the base's in either."""
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: (tensor * 256).round() / 256 for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    rewrite(folder, torch.float16 if folder.name == "digits" else torch.bfloat16)


@pytest.mark.parametrize("merge", ["mixture", "average"])
@pytest.mark.parametrize(
    ("stored", "width"),
    [
        (as_they_are, 4),
        (in_bf16, 2),
        (silently_in_bf16, 2),
        (lambda folder: say(folder, "bfloat16"), 4),
        (with_norms_in_fp32, 4),
        (with_what_a_model_computes, 2),
        (digits_in_fp16, 4),
    ],
    ids=[
        "fp32",
        "bf16",
        "a config that says nothing",
        "a config that says bf16 of fp32",
        "norms in fp32",
        "what is computed in fp32",
        "two halves",
    ],
)
def test_a_mixture_is_planned_as_large_as_it_will_be(
    stored: Callable[[Path], None], width: int, merge: str, tmp_path: Path
) -> None:
    """It is built in what nothing is lost in, whatever configs say."""
    base = make_model_folder(tmp_path / "base")
    experts = {name: make_expert(base, tmp_path / name, seed) for seed, name in enumerate(("letters", "digits"))}
    for folder in (base, *experts.values()):
        stored(folder)
    found = mixture_costs(tmp_path, FOLDERS, more=f", merge: {merge}")
    out = tmp_path / "out"
    out.mkdir()
    build_moe(base, experts, out, top_k=2) if merge == "mixture" else average_experts(base, experts, out)
    built = read_model_folder(out)
    assert (found.parameters, found.disk_bytes) == (built.num_parameters, built.weight_bytes)
    assert built.weight_bytes == width * (built.num_parameters or 0)


@pytest.mark.parametrize(
    ("trained", "width"),
    [
        (f"{{kind: train, model: {BASE}, {MLPS}}}", 4),
        (f"{{kind: merge_adapter, model: {BASE}, adapter: a}}", 2),
        (f"{{kind: merge_adapter, model: {BASE}, adapter: a, precision: bf16}}", 2),
        (f"{{kind: merge_adapter, model: {BASE}, adapter: a, precision: fp16}}", 4),
    ],
    ids=["trained", "merged as the base is", "merged in bf16", "merged in the other half"],
)
def test_future_experts_are_planned_in_the_dtype_that_their_stages_write(
    trained: str, width: int, tmp_path: Path
) -> None:
    in_bf16(make_model_folder(tmp_path / "base"))
    found = mixture_costs(tmp_path, f"{{a: {{kind: stage, name: a}}, b: {BASE}}}", before=f"  a: {trained}\n")
    assert found.disk_bytes == width * (found.parameters or 0)


def test_an_adapter_is_merged_in_what_most_of_its_base_is_stored_in(tmp_path: Path) -> None:
    with_norms_in_fp32(make_model_folder(tmp_path / "base"))
    stages = f"  merged: {{kind: merge_adapter, model: {BASE}, adapter: a}}\n"
    found = forecast_stage(ModelStubs(pipeline=pipeline_of(stages), base=tmp_path), "merged", CARD)
    assert found.disk_bytes == 2 * 8864


def test_an_export_is_planned_with_memory_disk_and_time(tmp_path: Path) -> None:
    make_model_folder(tmp_path / "base")
    found = {}
    for to in ("merged", "merged:bf16", "merged, gguf:q4_0"):
        stages = f"  take: {{kind: export, model: {BASE}, to: [{to}]}}\n"
        found[to] = forecast_stage(ModelStubs(pipeline=pipeline_of(stages), base=tmp_path), "take", CARD)
        assert (found[to].host_bytes or 0) > 4 * 8864
        assert (found[to].seconds or 0) > 0
    assert (found["merged"].disk_bytes, found["merged:bf16"].disk_bytes) == (4 * 8864, 2 * 8864)
    assert found["merged, gguf:q4_0"].disk_bytes > (4 + 2 + 2) * 8864


def test_weights_that_are_to_be_fetched_are_planned_as_their_config_says(tmp_path: Path) -> None:
    """Shards that are named and not there yet."""
    shape = json.dumps({"model_type": "llama", **DENSE, "dtype": "bfloat16"})
    base = make_model_folder(tmp_path / "base")
    say(base, "bfloat16")
    (base / "model.safetensors").unlink()
    (base / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "model-1.safetensors"}})
    )
    for model in (BASE, f"{{kind: shape, config: {shape}}}"):
        found = mixture_costs(tmp_path, f"{{a: {model}, b: {model}}}", base=model)
        assert found.disk_bytes == 2 * (found.parameters or 0)
