"""Whatever a run would refuse before its first step, `check` refuses, as an error of the user's and without a
traceback."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import RunDir, stage_of
from finefit.artifacts.stage_records import StageResult
from finefit.errors import MissingPackage, UserError
from finefit.model import load
from finefit.run.check_stages import check_pipeline
from finefit.run.create import create_run, read_request
from finefit.run.run_stages import train_run
from finefit.spec.load import load_pipeline
from tests.conftest import SPEC, make_project
from tests.run.model_faults import (
    CONFIG_FAULTS,
    IMAGE_FAULTS,
    NO_FAULTS,
    TEMPLATE_FAULTS,
    TOKENIZER_FAULTS,
    WEIGHT_FAULTS,
    copied,
    damage,
)
from tests.stages.test_merge_adapter import make_adapter
from tests.vision_models import make_vlm, write_reading_task

FAULTS = WEIGHT_FAULTS | CONFIG_FAULTS | TOKENIZER_FAULTS | TEMPLATE_FAULTS
ALONE = re.sub(r"evaluate: .*\n", "", SPEC)
TARGETS = ("q_proj", "v_proj")
_SAMPLE, _ALL = range(20), range(20, 220)
_TRAINED = 2
"""Of the sample, so many of those that `check` passes are trained for a step."""
_ONE_STEP = ("schedule={steps: 1}", "save.every=1000 steps")


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("clean") / "project", spec=ALONE).parent


def _check(project: Path) -> None:
    found = check_pipeline(load_pipeline(project / "spec.yaml", _ONE_STEP), project, project / "runs")
    errors = [finding for _, finding in found.findings if finding.level == "error"]
    if errors:
        raise UserError(errors[0].problem, errors[0].remedy)


def _create(project: Path) -> RunDir:
    """All that `run` does before a worker starts."""
    spec = project / "spec.yaml"
    request = read_request(load_pipeline(spec, _ONE_STEP), project, spec_text=spec.read_text(), overrides=_ONE_STEP)
    return create_run(request, runs=project / "runs")


def _load(project: Path) -> None:
    """What the worker does before its first step."""
    load.load_base(project / "model", device="cpu", dtype=torch.float32)


def _take_a_step(project: Path) -> None:
    run = _create(project)
    assert train_run(run).status == "finished"
    assert read_record(stage_of(run).result, StageResult).step == 1


def _refusal(command: Callable[[Path], object], project: Path) -> UserError | None:
    """Anything but an error of the user's is raised."""
    try:
        command(project)
    except UserError as refused:
        return refused
    return None


def test_a_clean_project_passes_check_and_run(clean: Path, tmp_path: Path) -> None:
    project = copied(clean, tmp_path / "project")
    for command in (_check, _create, _load):
        assert _refusal(command, project) is None


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_model_is_refused_by_check_and_by_run_in_the_same_words(
    fault: str, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finefit.data.template_process.SECONDS", 0.5)
    project = copied(clean, tmp_path / "project")
    FAULTS[fault](project)
    checked, run = _refusal(_check, project), _refusal(_create, project)
    assert checked is not None
    assert run is not None
    assert (checked.problem, checked.exit_code) == (run.problem, 2)
    assert checked.remedy
    assert len(checked.problem) < 800


VISION = """\
name: seeing
device: cpu
model: {kind: folder, path: model}
data: {train: [{path: train.jsonl}], overlap: warn}
schedule: {steps: 2}
global_batch: 2
levers: {micro_batch: 1}
"""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = tmp_path_factory.mktemp("seeing") / "project"
    make_vlm("qwen2_5_vl", project / "model")
    write_reading_task(project, rows=4, seed=1, name="train")
    (project / "spec.yaml").write_text(VISION)
    return project


def test_a_clean_project_with_images_passes_check_and_run(seeing: Path, tmp_path: Path) -> None:
    project = copied(seeing, tmp_path / "project")
    assert (_refusal(_check, project), _refusal(_create, project)) == (None, None)


@pytest.mark.parametrize("fault", IMAGE_FAULTS)
def test_an_image_or_a_processor_that_cannot_be_read_is_refused_by_check_and_by_run_in_the_same_words(
    fault: str, seeing: Path, tmp_path: Path
) -> None:
    project = copied(seeing, tmp_path / "project")
    IMAGE_FAULTS[fault](project)
    checked, run = _refusal(_check, project), _refusal(_create, project)
    assert checked is not None
    assert run is not None
    assert checked.problem == run.problem
    assert checked.remedy


def _with_adapter(project: Path, place: Path) -> None:
    spec = (project / "spec.yaml").read_text()
    (project / "spec.yaml").write_text(
        spec.replace("dropout: 0.1", f"dropout: 0.1, targets: [{', '.join(TARGETS)}], adapter: {place.name}")
    )


def _of_other_layers(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")


def _of_another_model(adapter: Path) -> None:
    text = (adapter / "adapter_config.json").read_text()
    (adapter / "adapter_config.json").write_text(re.sub(r'("base_model_name_or_path": )"[^"]*"', r'\1"other"', text))


def _nested_deeply(adapter: Path) -> None:
    (adapter / "adapter_config.json").write_text("[" * 100_000 + "]" * 100_000)


@pytest.mark.parametrize("fault", [_of_other_layers, _of_another_model, _nested_deeply])
def test_an_adapter_of_another_model_is_refused_before_a_worker_starts(
    fault: Callable[[Path], None], clean: Path, tmp_path: Path
) -> None:
    project = copied(clean, tmp_path / "project")
    adapter = make_adapter(project / "adapter", project / "model", targets=TARGETS)
    _with_adapter(project, adapter)
    assert _refusal(_check, project) is None
    fault(adapter)
    checked, run = _refusal(_check, project), _refusal(_create, project)
    assert checked is not None
    assert run is not None
    assert checked.problem == run.problem


@pytest.mark.parametrize(
    "engine", ["engine: {kind: deepspeed, devices: 2}", "tuning: {kind: lora, rank: 4, base_bits: 4}"]
)
def test_a_missing_package_is_refused_by_check_and_by_run(
    engine: str, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = copied(clean, tmp_path / "project")
    key = engine.partition(":")[0]
    spec = re.sub(rf"(?m)^{key}: .*\n", "", (project / "spec.yaml").read_text())
    (project / "spec.yaml").write_text(f"{spec}{engine}\n")
    monkeypatch.setattr("finefit.preflight.training.read_version", lambda _: None)
    with pytest.raises(MissingPackage, match="which is not installed") as checked:
        _check(project)
    assert "pip install" in checked.value.remedy
    with pytest.raises(MissingPackage, match="which is not installed"):
        _create(project)


def test_levers_that_the_precision_rules_out_are_refused_by_check_and_by_run(clean: Path, tmp_path: Path) -> None:
    """They are known once the spec is resolved on this machine."""
    project = copied(clean, tmp_path / "project")
    spec = (project / "spec.yaml").read_text().replace("{lr: 1e-2}", "{lr: 1e-2, clip: null}")
    spec = spec.replace("{micro_batch: 2}", "{micro_batch: 4, update: inside}") + "precision: fp16\n"
    (project / "spec.yaml").write_text(spec)
    checked, run = _refusal(_check, project), _refusal(_create, project)
    assert checked is not None
    assert run is not None
    assert checked.problem == run.problem
    assert "levers.update" in checked.problem


def _fuzz(clean: Path, place: Path, seed: int, *, trains: bool = False) -> bool:
    """Whether `check` passes it: then the weights can be loaded, and, if asked for, a step be taken."""
    project = copied(clean, place)
    done = damage(project, seed)
    checked, run = _refusal(_check, project), _refusal(_create, project)
    assert (checked is None) == (run is None), done
    if checked is None:
        assert _refusal(_take_a_step if trains else _load, project) is None, done
    shutil.rmtree(project)
    return checked is None


def test_a_damaged_model_folder_is_refused_or_works_but_is_never_a_fault_of_ours(clean: Path, tmp_path: Path) -> None:
    passed = 0
    for seed in _SAMPLE:
        passed += _fuzz(clean, tmp_path / "project", seed, trains=passed < _TRAINED)
    assert 0 < passed < len(_SAMPLE)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_damaged_model_folders_are_refused_or_train(clean: Path, tmp_path: Path) -> None:
    passed = sum(_fuzz(clean, tmp_path / "project", seed, trains=True) for seed in _ALL)
    assert 20 < passed < 200


def _passes(harmless: str, clean: Path, project: Path, *, trains: bool) -> None:
    NO_FAULTS[harmless](copied(clean, project))
    assert _refusal(_check, project) is None
    assert _refusal(_take_a_step if trains else _load, project) is None


@pytest.mark.parametrize("harmless", NO_FAULTS)
def test_what_is_no_fault_is_not_refused(harmless: str, clean: Path, tmp_path: Path) -> None:
    _passes(harmless, clean, tmp_path / "project", trains=harmless == "a vocabulary in vocab.txt")


@pytest.mark.slow
@pytest.mark.parametrize("harmless", NO_FAULTS)
def test_with_what_is_no_fault_a_step_is_taken(harmless: str, clean: Path, tmp_path: Path) -> None:
    _passes(harmless, clean, tmp_path / "project", trains=True)
