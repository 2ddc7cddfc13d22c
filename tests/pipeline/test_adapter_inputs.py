"""An adapter that training goes on from is an input like the model: by content, wherever it lies."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from finefit.artifacts.records import Facts, read_record
from finefit.artifacts.rundir import RunDir
from finefit.artifacts.trainings import Stage
from finefit.errors import ModelError, RunError
from finefit.model.load import load_base, make_trainable, save_weights
from finefit.pipeline.create import create_run, stage_of
from finefit.pipeline.inputs import open_inputs
from finefit.pipeline.resume import amend
from finefit.spec.load import load_spec
from finefit.spec.models import Lora
from tests.conftest import SPEC, make_project

GOING_ON = re.sub(r"tuning: .*\n", "tuning: {kind: lora, rank: 4, alpha: 8, adapter: adapters/first}\n", SPEC)


def make_adapter(folder: Path, model: Path, *, seed: int) -> None:
    torch.manual_seed(seed)
    base = load_base(model, device="cpu", dtype=torch.float32)
    save_weights(make_trainable(base, Lora(kind="lora", rank=4, alpha=8), name="model"), folder)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = make_project(tmp_path / "project", spec=GOING_ON)
    make_adapter(path.parent / "adapters" / "first", path.parent / "model", seed=1)
    return path


def digest(spec: Path, *overrides: str) -> str:
    return open_inputs(load_spec(spec, overrides), spec.parent, spec.parent / "runs" / "x").digest


def create(spec: Path) -> RunDir:
    opened = open_inputs(load_spec(spec, ()), spec.parent, spec.parent / "runs" / "x")
    return create_run(opened, spec_text=GOING_ON, overrides=(), base=spec.parent, runs=spec.parent / "runs")


def test_another_adapter_is_another_run_and_the_same_one_elsewhere_is_not(spec: Path) -> None:
    first = digest(spec)
    shutil.copytree(spec.parent / "adapters" / "first", spec.parent / "moved")
    assert digest(spec, "tuning.adapter=moved") == first
    make_adapter(spec.parent / "other", spec.parent / "model", seed=2)
    assert digest(spec, "tuning.adapter=other") != first
    assert digest(spec, "tuning.adapter=null") != first


def test_the_stage_names_it_from_the_run_directory_and_knows_its_content(spec: Path) -> None:
    run = create(spec)
    stage = read_record(stage_of(run).stage, Stage)
    assert isinstance(stage.tuning, Lora)
    assert stage.tuning.adapter == "../../adapters/first"
    assert stage.model_fingerprint == read_record(run.facts, Facts).inputs.model_fingerprint
    bare = open_inputs(load_spec(spec, ("tuning.adapter=null",)), spec.parent, spec.parent / "runs" / "x")
    assert stage.model_fingerprint != bare.inputs.model_fingerprint


def test_a_run_goes_on_when_its_adapter_is_as_it_was(spec: Path) -> None:
    assert amend(create(spec), ()) == []


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_run_whose_adapter_has_changed_is_refused(spec: Path, file: str) -> None:
    run = create(spec)
    changed = spec.parent / "adapters" / "first" / file
    if file == "adapter_config.json":
        changed.write_text(json.dumps(json.loads(changed.read_text()) | {"revision": "x"}))
    else:
        make_adapter(changed.parent, spec.parent / "model", seed=2)
    with pytest.raises(
        RunError, match=r"the inputs of tiny-1 have changed since it began:\n  model model: fingerprint"
    ):
        amend(run, ())


def test_an_adapter_that_is_gone_is_named_with_what_to_do(spec: Path) -> None:
    run = create(spec)
    shutil.rmtree(spec.parent / "adapters")
    with pytest.raises(
        ModelError,
        match=r"adapters/first/adapter_config.json cannot be read: No such file or directory\nname a folder with adapter_config.json",
    ):
        amend(run, ())


def test_a_run_goes_on_from_where_its_adapter_lies_now(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = create(spec)
    (spec.parent / "adapters").rename(spec.parent / "elsewhere")
    monkeypatch.chdir(spec.parent)
    amend(run, ("tuning.adapter=elsewhere/first",))
    stage = read_record(stage_of(run).stage, Stage)
    assert isinstance(stage.tuning, Lora)
    assert stage.tuning.adapter == "../../elsewhere/first"
    assert amend(run, ()) == []


def test_an_adapter_cannot_be_added_to_a_run_or_taken_from_it(spec: Path) -> None:
    run = create(spec)
    with pytest.raises(RunError, match=r"cannot go on with another spec:\n.*tuning.adapter"):
        amend(run, ("tuning.adapter=null",))
