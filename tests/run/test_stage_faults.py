"""What the second stage of a pipeline could not begin with, and weights that a custom model does not have, are refused
by `check` and by `run` before anything exists."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import RunDir, stage_of
from finefit.artifacts.stage_records import StageResult
from finefit.errors import FinefitError, MissingPackage, ModelError, UserError
from finefit.model.load import make_trainable
from finefit.preflight import require_no_errors
from finefit.run.check_stages import check_pipeline
from finefit.run.create import create_run, read_request
from finefit.run.run_stages import train_run
from finefit.spec.load import load_pipeline
from finefit.spec.models import Full
from tests.conftest import make_model_folder, make_project, write_jsonl
from tests.custom.test_model import loaded
from tests.custom_models import SPEC as CUSTOM
from tests.custom_models import make_custom_project
from tests.run.model_faults import CONFIG_FAULTS, TOKENIZER_FAULTS, WEIGHT_FAULTS, copied
from tests.run.test_model_faults import TARGETS
from tests.stages.test_merge_adapter import make_adapter
from tests.vision_models import make_vlm, write_reading_task

STAGED = """\
name: two
device: cpu
defaults:
  tuning: {kind: lora, rank: 4, alpha: 8}
  optimizer: {lr: 1e-2}
  schedule: {steps: 1}
  global_batch: 4
  levers: {micro_batch: 2}
stages:
  first: {kind: train, model: {kind: folder, path: sound}, data: {train: [{path: train.jsonl}]}}
  second:
    kind: train
    model: {kind: folder, path: model}
    data: {train: [{path: train.jsonl}], validation: {path: validation.jsonl}}
"""
ADAPTED = STAGED.replace(
    "path: model}",
    f"path: model}}\n    tuning: {{kind: lora, rank: 4, alpha: 8, targets: [{', '.join(TARGETS)}], adapter: adapter}}",
)
Fault = Callable[[Path], object]


def _rows_without_answers(project: Path) -> None:
    write_jsonl(project / "validation.jsonl", [{"messages": [{"role": "user", "content": "and?"}]}])


FAULTS: dict[str, Fault] = {
    "a tensor of another shape": WEIGHT_FAULTS["a tensor of another shape"],
    "weights missing": WEIGHT_FAULTS["weights missing"],
    "heads that do not divide": CONFIG_FAULTS["heads that do not divide"],
    "tokenizer missing": TOKENIZER_FAULTS["tokenizer missing"],
    "rows without answers": _rows_without_answers,
    "rows missing": lambda project: (project / "validation.jsonl").unlink(),
}


def _checked(project: Path) -> FinefitError | None:
    found = check_pipeline(load_pipeline(project / "spec.yaml", ()), project, project / "runs")
    return _raised(lambda: require_no_errors(found.findings, found.refusal))


def _created(project: Path) -> FinefitError | None:
    return _raised(lambda: _create(project))


def _create(project: Path) -> RunDir:
    spec = project / "spec.yaml"
    request = read_request(load_pipeline(spec, ()), project, spec_text=spec.read_text())
    return create_run(request, runs=project / "runs")


def _raised(act: Callable[[], object]) -> FinefitError | None:
    try:
        act()
    except FinefitError as refused:
        return refused
    return None


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = make_project(tmp_path_factory.mktemp("staged") / "project", spec=STAGED).parent
    make_model_folder(project / "sound", seed=1)
    return project


@pytest.fixture(scope="module")
def adapted(staged: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = copied(staged, tmp_path_factory.mktemp("adapted") / "project")
    (project / "spec.yaml").write_text(ADAPTED)
    make_adapter(project / "adapter", project / "model", targets=TARGETS)
    return project


def _require_refused(project: Path) -> None:
    """Both name the stage and the same mistake."""
    checked, run = _checked(project), _created(project)
    assert checked is not None
    assert run is not None
    assert checked.problem.startswith("stage second: ")
    assert run.problem.startswith(checked.problem)
    assert {checked.exit_code, run.exit_code} <= {1, 2}
    assert checked.remedy
    assert not (project / "runs").exists()


def test_sound_stages_are_refused_by_neither(staged: Path, adapted: Path, tmp_path: Path) -> None:
    for name, project in (("staged", staged), ("adapted", adapted)):
        here = copied(project, tmp_path / name)
        assert (_checked(here), _created(here)) == (None, None)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_second_stage_is_refused_before_the_first_begins(
    fault: str, staged: Path, tmp_path: Path
) -> None:
    project = copied(staged, tmp_path / "project")
    FAULTS[fault](project)
    _require_refused(project)


@pytest.mark.parametrize(
    "content", [b"\x02" + bytes(7) + b"{}", b"", b"nothing"], ids=["other layers", "empty", "short"]
)
def test_an_adapter_of_the_second_stage_is_refused_before_the_first_begins(
    content: bytes, adapted: Path, tmp_path: Path
) -> None:
    project = copied(adapted, tmp_path / "project")
    (project / "adapter/adapter_model.safetensors").write_bytes(content)
    _require_refused(project)


def test_a_package_that_the_second_stage_needs_is_refused_with_exit_code_2(
    staged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = copied(staged, tmp_path / "project")
    bits = "path: model}\n    tuning: {kind: lora, rank: 4, base_bits: 4}"
    (project / "spec.yaml").write_text(STAGED.replace("path: model}", bits))
    monkeypatch.setattr("finefit.preflight.training.read_version", lambda _: None)
    _require_refused(project)
    refused = _checked(project)
    assert isinstance(refused, MissingPackage)
    assert refused.exit_code == 2
    assert "pip install" in refused.remedy


def test_an_image_of_the_second_stage_is_refused_before_the_first_begins(staged: Path, tmp_path: Path) -> None:
    project = copied(staged, tmp_path / "project")
    (project / "validation.jsonl").unlink()
    make_vlm("qwen2_5_vl", project / "seeing")
    write_reading_task(project, rows=4, seed=1, name="seen")
    spec = STAGED.replace("path: model", "path: seeing")
    (project / "spec.yaml").write_text(
        re.sub(
            r"data: \{train: \[\{path: train.jsonl\}\], validation.*",
            "data: {train: [{path: seen.jsonl}], overlap: warn}",
            spec,
        )
    )
    image = project / "images/seen-0.png"
    image.write_bytes(image.read_bytes()[:60])
    _require_refused(project)


# custom models


def _custom(folder: Path) -> Path:
    """With weights that it was saved with."""
    model = CUSTOM["model"] | {"weights": "weights.safetensors"}
    project = make_custom_project(folder, model=model, schedule={"steps": 1}, evaluate=None).parent
    module = make_trainable(loaded(project), Full(kind="full"), name="own")
    tensors = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
    save_file(tensors, project / "weights.safetensors")
    return project


@pytest.fixture(scope="module")
def custom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _custom(tmp_path_factory.mktemp("custom") / "project")


def test_weights_of_a_custom_model_are_loaded(custom: Path, tmp_path: Path) -> None:
    project = copied(custom, tmp_path / "project")
    assert _checked(project) is None
    run = _create(project)
    assert train_run(run).status == "finished"
    assert read_record(stage_of(run).result, StageResult).step == 1


CUSTOM_FAULTS: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], object]]] = {
    "another shape": ("head.bias", lambda found: found.update({"head.bias": torch.ones(3)})),
    "one too few": ("head.bias", lambda found: found.pop("head.bias")),
    "one too many": ("more", lambda found: found.update(more=torch.ones(1))),
}


@pytest.mark.parametrize("fault", CUSTOM_FAULTS)
def test_weights_that_a_custom_model_does_not_have_are_refused_before_a_worker_starts(
    fault: str, custom: Path, tmp_path: Path
) -> None:
    project = copied(custom, tmp_path / "project")
    name, change = CUSTOM_FAULTS[fault]
    tensors = load_file(project / "weights.safetensors")
    change(tensors)
    save_file(tensors, project / "weights.safetensors")
    for command in (_checked, _created):
        try:
            refused: FinefitError | None = command(project)
        except UserError as error:
            refused = error
        assert isinstance(refused, ModelError)
        assert name in refused.problem
        assert refused.remedy
    assert not (project / "runs").exists()
