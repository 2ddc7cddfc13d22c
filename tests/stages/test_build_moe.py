"""The build_moe stage: what it makes, what it says, what it refuses."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from finefit.artifacts.records import FinishedStage, Routing, StageJob, WiredModel, read_record, write_record
from finefit.errors import DataError, ModelError, SpecError
from finefit.facts.files import read_model_folder
from finefit.report.stage_summary import summary_lines
from finefit.spec.models import FolderModel
from finefit.spec.pipeline import Pipeline
from finefit.spec.stages import BuildMoe
from finefit.stages.build_moe import make
from tests.conftest import TEMPLATE, make_model_folder, make_tokenizer
from tests.pipelines import carry_out, open_pipeline

torch.set_num_threads(1)
INPUTS = torch.randint(0, 261, (2, 20), generator=torch.Generator().manual_seed(5))


def make_expert(base: Path, folder: Path, seed: int) -> Path:
    model = LlamaForCausalLM.from_pretrained(base)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mlp." in name:
                parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A base, two experts and rows for each: letters and digits."""
    base = make_model_folder(tmp_path / "base")
    make_expert(base, tmp_path / "letters", 2)
    make_expert(base, tmp_path / "digits", 3)
    for name, alphabet in (("letters", "abcdefgh"), ("digits", "12345678")):
        rows = [
            {"prompt": "say", "completion": "".join(alphabet[(at * 5 + k * (1 + at % 3)) % 8] for k in range(12))}
            for at in range(24)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def job_of(here: Path, **asked: Any) -> StageJob:
    experts = {name: {"kind": "folder", "path": name} for name in asked.pop("experts", ("letters", "digits"))}
    document = {"kind": "build_moe", "base": {"kind": "folder", "path": "base"}, "experts": experts} | asked
    stage = TypeAdapter(BuildMoe).validate_python(document)
    models = {"base": _folder(here / "base")} | {f"experts.{name}": _folder(here / name) for name in experts}
    return StageJob(
        name="mix", pipeline="rmoe", seed=3, device="cpu", precision="fp32", base=str(here), stage=stage, models=models
    )


def _folder(path: Path) -> WiredModel:
    return WiredModel(model=FolderModel(kind="folder", path=str(path)))


def made(here: Path, **asked: Any) -> tuple[Path, dict[str, Any]]:
    out = here / "output"
    out.mkdir()
    summary: dict[str, Any] = json.loads(json.dumps(make(job_of(here, **asked), out)))
    return out, summary


def logits(folder: Path) -> torch.Tensor:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        found: torch.Tensor = model(INPUTS).logits
    return found


CENTROIDS = {"kind": "centroids", "data": {"letters": {"path": "letters.jsonl"}, "digits": {"path": "digits.jsonl"}}}


def test_a_mixture_is_a_model_folder_with_its_tokenizer_and_a_proof(here: Path) -> None:
    out, summary = made(here)
    assert (out / "tokenizer.json").read_bytes() == (here / "base" / "tokenizer.json").read_bytes()
    assert summary["experts"] == ["letters", "digits"]
    assert summary["top_k"] == 2
    assert summary["parameters"] == read_model_folder(out).num_parameters
    assert set(summary["proof"]) == {"letters", "digits"}
    assert max(summary["proof"].values()) < 1e-5
    assert logits(out).shape == (2, 20, 261)
    told = summary_lines("build_moe", summary)
    assert "2 experts (letters, digits), 2 answer each token" in told[0]
    assert any("starts at random" in line for line in told)
    assert any("answers as that expert" in line for line in told)


def test_a_router_from_centroids_sends_held_out_tokens_to_their_own_expert(here: Path) -> None:
    out, summary = made(here, router=CENTROIDS)
    found = read_record(out / "routing.json", Routing)
    assert found.experts == ("letters", "digits")
    assert found.top_k == 2
    assert min(summary["own_in_base"].values()) > 0.6
    assert min(summary["own"].values()) > 0.6
    assert set(found.sources) == {"letters", "digits"}
    assert found.sources["letters"].rows == 6
    assert all(
        abs(sum(layer) - 1) < 1e-4 for source in found.sources.values() for layer in (*source.first, *source.weight)
    )
    assert all(
        0.5 < max(layer) < 0.99 for source in found.sources.values() for layer in source.weight
    )  # decided, not final
    svg = (out / "routing.svg").read_text()
    assert svg.startswith("<svg")
    assert "digits, layer 1, letters:" in svg
    assert any("first choice is their own expert: letters" in line for line in summary_lines("build_moe", summary))


@pytest.mark.slow
def test_what_was_held_with_a_model_loaded_is_recorded_where_one_is_loaded(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The random router needs none; the proof of both is in host memory, whatever the device."""
    monkeypatch.setattr("finefit.run.launch._command", lambda: None)
    experts = "experts: {letters: {kind: folder, path: letters}, digits: {kind: folder, path: digits}}"
    kinds = {"chance": "{kind: random}", "rows": json.dumps(CENTROIDS)}
    stages = "".join(
        f"  {name}:\n    kind: build_moe\n    base: {{kind: folder, path: base}}\n    {experts}\n    router: {router}\n"
        for name, router in kinds.items()
    )
    (here / "spec.yaml").write_text(f"name: mixed\ndevice: cpu\nstages:\n{stages}")
    run = open_pipeline(here / "spec.yaml")
    carry_out(run)
    chance, rows = (read_record(run.stage(at, name).done, FinishedStage).memory for at, name in enumerate(kinds, 1))
    assert chance is not None
    assert chance.loaded_bytes is None
    assert rows is not None
    assert rows.loaded_bytes is not None
    assert rows.peak_bytes is not None
    assert 50 * 2**20 < rows.loaded_bytes <= rows.peak_bytes


@pytest.mark.parametrize("held", [2**20 - 4096, 2**21])
def test_a_container_without_room_for_a_model_leaves_proof_and_routing_out_with_a_word(
    here: Path, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "memory.max").write_text(f"{2**20}\n")
    (here / "memory.current").write_text(f"{held}\n")
    monkeypatch.setattr("finefit.stages.build_moe.MEMORY_LIMITS", (here / "memory.max",))
    out, summary = made(here, router=CENTROIDS)
    assert re.fullmatch(r"left out: it needs \d+\.\d GiB of host memory, and 0\.0 are free", summary["proof"])
    assert re.fullmatch(r"not measured: the mixture needs \d+\.\d GiB, and 0\.0 are free", summary["routing"])
    assert not (out / "routing.json").exists()
    told = summary_lines("build_moe", summary)
    assert any("the proof that each expert alone answers as before was left out: it needs" in line for line in told)
    assert any("not measured: the mixture needs" in line for line in told)


def test_a_container_that_is_full_of_pages_of_files_has_room(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "memory.max").write_text(f"{2**30}\n")
    (here / "memory.current").write_text(f"{2**30}\n")
    (here / "memory.stat").write_text(f"anon {2**20}\nactive_file {2**28}\ninactive_file {2**28}\n")
    monkeypatch.setattr("finefit.stages.build_moe.MEMORY_LIMITS", (here / "memory.max",))
    _, summary = made(here, router=CENTROIDS)
    assert set(summary["proof"]) == {"letters", "digits"} == set(summary["own"])


def test_the_same_order_makes_the_same_files(here: Path) -> None:
    out, _ = made(here, router=CENTROIDS)
    first = {path.name: path.read_bytes() for path in out.iterdir()}
    out.rename(here / "before")
    again, _ = made(here, router=CENTROIDS)
    assert {path.name: path.read_bytes() for path in again.iterdir()} == first


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            {"router": CENTROIDS | {"data": {"letters": {"path": "a"}}}},
            r"router\.data: digits is an expert without rows",
        ),
        ({"router": CENTROIDS | {"rows": 1}}, "greater than or equal to 2"),
        ({"top_k": 3}, "top_k: 3 of 2 experts"),
        ({"router": {"kind": "select_one", "expert": "maths"}}, "router.expert: maths is not one of the experts"),
        ({"merge": "average", "router": CENTROIDS}, "an average has no router"),
    ],
)
def test_an_order_that_contradicts_itself_is_refused(here: Path, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        job_of(here, **asked)


@pytest.mark.parametrize(
    ("digits", "router", "words"),
    [
        ('{"prompt": "say", "completion": "1"}\n' * 5, {}, "expert digits has 1 different rows"),
        (
            None,
            {"max_tokens": 8},
            r"no row of expert letters can start its router; the first: letters.jsonl:\d+ .*token",
        ),
        (
            None,
            {"data": {name: {"path": "letters.jsonl"} for name in ("letters", "digits")}},
            "letters and digits have the same rows",
        ),
    ],
)
def test_rows_that_cannot_start_a_router_are_refused(
    here: Path, digits: str | None, router: dict[str, Any], words: str
) -> None:
    if digits is not None:
        (here / "digits.jsonl").write_text(digits)
    with pytest.raises(DataError, match=words):
        made(here, router=CENTROIDS | router)


def test_where_too_few_rows_are_looked_at_the_remedy_names_how_many(here: Path) -> None:
    rows = [{"prompt": "say", "completion": answer} for answer in ["1"] * 30 + ["2"]]
    (here / "digits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"the 2 rows of expert digits \(router\.rows\) are all the same") as refused:
        made(here, router=CENTROIDS | {"rows": 2})
    assert refused.value.remedy == "raise router.rows, or give it other rows"
    (here / "output").rmdir()
    made(here, router=CENTROIDS | {"rows": 64})


def test_rows_that_do_not_fit_or_cannot_be_read_are_left_out_with_a_word_and_others_stand_in(here: Path) -> None:
    path = here / "digits.jsonl"
    rows = path.read_text().splitlines()
    rows[:12] = [json.dumps({"prompt": "say"}), *[json.dumps({"prompt": "say", "completion": "12345678" * 90})] * 11]
    path.write_text("".join(row + "\n" for row in rows))
    out, summary = made(here, router=CENTROIDS | {"rows": 12})
    assert {name: source.rows for name, source in read_record(out / "routing.json", Routing).sources.items()} == {
        "letters": 3,
        "digits": 3,
    }
    assert list(summary["left_out"]) == ["digits"]
    (told,) = [line for line in summary_lines("build_moe", summary) if "without" in line]
    assert re.match(r"the router starts without \d+ rows of digits; the first: digits.jsonl:1 ", told)


def test_a_weight_below_one_is_that_share_of_the_rows_and_one_above_is_refused(here: Path) -> None:
    def weighted(weight: float) -> dict[str, Any]:
        return CENTROIDS | {
            "data": {"letters": {"path": "letters.jsonl", "weight": weight}, "digits": {"path": "digits.jsonl"}}
        }

    out, _ = made(here, router=weighted(0.5))
    assert {name: source.rows for name, source in read_record(out / "routing.json", Routing).sources.items()} == {
        "letters": 3,
        "digits": 6,
    }
    with pytest.raises(ValidationError, match=r"data\.letters\.weight: equal rows count once"):
        job_of(here, router=weighted(2))


def test_rows_are_rendered_with_the_options_of_the_training(here: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% if not brief %}" + "many words " * 60 + "{% endif %}" + TEMPLATE
    tokenizer.save_pretrained(here / "base")
    _, summary = made(here, router=CENTROIDS | {"template_options": {"brief": True}})
    assert summary["left_out"] == {}
    with pytest.raises(DataError, match="no row of expert letters"):
        make(job_of(here, router=CENTROIDS), here / "output")


def test_rows_are_built_before_a_router_starts_from_them_as_trainings_build_them(here: Path) -> None:
    (here / "form.py").write_text(
        'def build(prompt, answer): return f"{prompt} it backwards: {answer[:2]}", answer[::-1]\n'
    )
    task = {"kind": "python", "path": "form.py"}
    routers = {}
    for name, more in {"bare": {}, "task": {"task": task}, "built": {}}.items():
        if name == "built":
            for path in (here / "letters.jsonl", here / "digits.jsonl"):
                rows = [json.loads(line) for line in path.read_text().splitlines()]
                built = [
                    {"prompt": f"say it backwards: {row['completion'][:2]}", "completion": row["completion"][::-1]}
                    for row in rows
                ]
                path.write_text("".join(json.dumps(row) + "\n" for row in built))
        out, _ = made(here, router=CENTROIDS | more)
        routers[name] = AutoModelForCausalLM.from_pretrained(out).model.layers[1].mlp.gate.weight.detach()
        out.rename(here / f"output-{name}")
    assert torch.equal(routers["task"], routers["built"])
    assert not torch.equal(routers["task"], routers["bare"])


def test_rows_that_cannot_be_built_are_left_out_with_a_word(here: Path) -> None:
    graphs = {
        "letters": [*(f"(a / {letter})" for letter in "bcdefgh"), "no graph"],
        "digits": [f"(n / number :quant {digit})" for digit in range(8)],
    }
    for name, answers in graphs.items():
        rows = [{"prompt": f"sentence {at}", "completion": answer} for at, answer in enumerate(answers)]
        (here / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, summary = made(here, router=CENTROIDS | {"task": "amr"})
    assert {name: found["rows"] for name, found in summary["left_out"].items()} == {"letters": 1}
    assert summary["left_out"]["letters"]["first"].startswith("letters.jsonl:8 ")


@pytest.mark.parametrize(("routing", "top_k"), [("weighted_sum", 2), ("top_1", 1)])
def test_routing_says_how_many_experts_answer(here: Path, routing: str, top_k: int) -> None:
    out, summary = made(here, routing=routing)
    assert json.loads((out / "config.json").read_text())["num_experts_per_tok"] == top_k == summary["top_k"]
    assert any("no gradient" in line for line in summary_lines("build_moe", summary)) is (routing == "top_1")


def test_select_one_answers_as_that_expert_alone(here: Path) -> None:
    out, summary = made(here, router={"kind": "select_one", "expert": "digits"})
    torch.testing.assert_close(logits(out), logits(here / "digits"), atol=1e-5, rtol=1e-5)
    assert summary["experts"] == ["digits"]
    assert any("left out" in line for line in summary_lines("build_moe", summary))


def test_an_average_is_dense_and_has_no_router(here: Path) -> None:
    out, summary = made(here, merge="average")
    models = [LlamaForCausalLM.from_pretrained(here / name) for name in ("letters", "digits")]
    found = LlamaForCausalLM.from_pretrained(out)
    wanted = (models[0].model.layers[1].mlp.up_proj.weight + models[1].model.layers[1].mlp.up_proj.weight) / 2
    torch.testing.assert_close(found.model.layers[1].mlp.up_proj.weight, wanted)
    assert "the mean of letters, digits" in summary_lines("build_moe", summary)[0]


def test_an_expert_with_an_adapter_is_sent_to_merge_adapter(here: Path) -> None:
    order = job_of(here)
    order.models["experts.digits"] = WiredModel(model=order.models["base"].model, adapter=str(here / "adapter"))
    with pytest.raises(SpecError, match="expert digits is an adapter") as refused:
        make(order, here / "output")
    assert "merge_adapter" in refused.value.remedy


def test_an_expert_that_will_be_an_adapter_is_refused_before_it_is_trained() -> None:
    model = {"kind": "embedded", "name": "smollm2-135m"}
    subset = {"kind": "subset", "trainable": ["layers.*.mlp"]}
    expert = {
        "kind": "train",
        "model": model,
        "tuning": subset,
        "data": {"train": [{"path": "a.jsonl"}]},
        "optimizer": {"lr": 1e-3},
    }
    mix = {
        "kind": "build_moe",
        "base": model,
        "experts": {"a": {"kind": "stage", "name": "a"}, "b": {"kind": "stage", "name": "b"}},
    }
    stages: dict[str, Any] = {"a": expert, "b": expert, "mix": mix}
    Pipeline.model_validate_json(json.dumps({"name": "x", "stages": stages}))
    stages["b"] = expert | {"tuning": {"kind": "lora"}}
    with pytest.raises(
        ValidationError,
        match="stage mix is built from whole models, but stage b trains an adapter; put a stage of kind merge_adapter",
    ):
        Pipeline.model_validate_json(json.dumps({"name": "x", "stages": stages}))


def test_an_order_of_one_expert_can_be_read_again(here: Path) -> None:
    order = job_of(here, experts=("digits",))
    write_record(here / "job.json", order)
    assert read_record(here / "job.json", StageJob) == order


def test_copies_collapse_with_a_word_and_leave_their_rows(here: Path) -> None:
    make_expert(here / "base", here / "numbers", 3)
    (here / "numbers.jsonl").write_text((here / "digits.jsonl").read_text())
    names = ("letters", "digits", "numbers")
    data = {name: {"path": f"{name}.jsonl"} for name in names}
    _, summary = made(here, experts=names, copies="collapse", router={"kind": "centroids", "data": data})
    assert summary["experts"] == ["letters", "digits"]
    assert summary["collapsed"] == {"numbers": "digits"}
    assert "numbers is a copy of digits and was left out" in summary_lines("build_moe", summary)


def test_experts_trained_in_fp32_over_a_base_in_bf16_are_not_rounded(here: Path) -> None:
    for name in ("base", "letters", "digits"):
        model = LlamaForCausalLM.from_pretrained(here / name, dtype=torch.float32)
        for key, parameter in model.named_parameters():
            parameter.data = (
                parameter.data.to(torch.bfloat16).float() if ".mlp." not in key or name == "base" else parameter.data
            )
        (model.to(torch.bfloat16) if name == "base" else model).save_pretrained(here / name)
    out, summary = made(here)
    assert summary["dtype"] == "float32" == json.loads((out / "config.json").read_text())["dtype"]
    expert, mixture = LlamaForCausalLM.from_pretrained(here / "digits"), AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(mixture.model.layers[0].mlp.experts.down_proj[1], expert.model.layers[0].mlp.down_proj.weight)


def test_a_build_that_is_killed_in_mid_write_leaves_no_model_and_the_next_one_is_whole(here: Path) -> None:
    job_file, out = here / "job.json", here / "output"
    write_record(job_file, job_of(here))
    killed = textwrap.dedent("""
        import os, signal, sys
        from pathlib import Path
        from finefit.artifacts.records import StageJob, read_record
        from finefit.moe import build as moe
        from finefit.stages.build_moe import make
        whole = moe.save_file
        def torn(tensors, path, **rest):
            if path.name == "model-00001.safetensors":
                whole(tensors, path, **rest)
                with open(path, "r+b") as file:
                    file.truncate(path.stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            whole(tensors, path, **rest)
        moe.save_file = torn
        make(read_record(Path(sys.argv[1]), StageJob), Path(sys.argv[2]))
    """)
    out.mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", killed, str(job_file), str(out)],
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == -signal.SIGKILL
    assert (out / "model-00000.safetensors").exists()
    with pytest.raises(ModelError):
        read_model_folder(out)
    for path in out.iterdir():
        path.unlink()
    out.rmdir()
    whole, _ = made(here)
    other, out = here / "other", here / "output"
    other.mkdir()
    make(job_of(here), other)
    assert torch.equal(logits(whole), logits(other))
