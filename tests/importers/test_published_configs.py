"""The example configs that axolotl and LLaMA-Factory publish, where they lie beside the repository: every one is
translated into a spec that can be planned, or refused by name."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from finefit.drafts.from_config import Imported, import_config
from finefit.errors import FinefitError
from finefit.importers.documents import read_document
from finefit.plan.client import forecast
from finefit.plan.stage_costs import training_costs
from finefit.plan.stage_forecasts import row_lengths
from finefit.spec.load import parse_spec
from finefit.spec.models import ShapeModel
from finefit.spec.schema import Spec
from tests.importers.published_models import PLAIN, shape_of

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
CONFIGS = DATA / "configs"
INFO = DATA / "llamafactory" / "dataset_info.json"
pytestmark = pytest.mark.skipif(not CONFIGS.is_dir(), reason="the published configs are not here")

_MODEL = re.compile(r"^(base_model|model_name_or_path|model):[ \t]*([^\s#]+)", re.MULTILINE)
_NO_TRAINING = ("trains nothing", "launcher", "a config of DeepSpeed", "is no config of")
"""What the refusal of a document says that is no config of a training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    name: str
    model: str
    found: Imported | FinefitError

    @property
    def is_training(self) -> bool:
        return not (isinstance(self.found, FinefitError) and any(word in self.found.problem for word in _NO_TRAINING))


def published(folder: Path) -> Iterator[Published]:
    """Each config in a folder of its own, with the shape of its model beside it in the place of the hub's."""
    for at, path in enumerate(sorted(CONFIGS.rglob("*.*"))):
        if path.suffix not in (".yaml", ".yml", ".json"):
            continue
        text, place = path.read_text(encoding="utf-8"), folder / str(at)
        (place / "model").mkdir(parents=True)
        model = named[2] if (named := _MODEL.search(text)) else ""
        (place / "model" / "config.json").write_text(json.dumps(shape_of(model) or PLAIN))
        (place / path.name).write_text(_MODEL.sub(r"\1: model", text, count=1))
        info = INFO if "llamafactory" in path.parts else None
        try:
            found: Imported | FinefitError = import_config(place / path.name, place / "spec.yaml", dataset_info=info)
        except FinefitError as error:
            found = error
        yield Published(name=path.relative_to(CONFIGS).as_posix(), model=model, found=found)


@cache
def all_published(folder: Path) -> tuple[Published, ...]:
    return tuple(published(folder))


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Published, ...]:
    return all_published(tmp_path_factory.mktemp("published"))


def test_every_published_training_becomes_a_spec_or_is_refused_by_name(
    configs: tuple[Published, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    trainings = [one for one in configs if one.is_training]
    refused = {one.name: one.found for one in trainings if isinstance(one.found, FinefitError)}
    for error in (one.found for one in configs if isinstance(one.found, FinefitError)):
        assert error.problem
        assert error.remedy
    with capsys.disabled():
        print(
            f"\n{len(configs)} files, {len(trainings)} trainings, {len(trainings) - len(refused)} translated; refused:"
        )
        for name, error in refused.items():
            print(f"  {name}: {error.problem.partition(' ')[2]}")
    assert len(configs) > 250
    assert len(refused) <= 0.12 * len(trainings)
    objectives = ("ebft", "eaft", "EAFT", "1-bit", "classification", "ReLoRA", "diffusion", "gdpo", "kto", "orpo")
    others = ("stage rm", "loss of its own", "mixture of depths", "experts that are stored")
    assert all(any(word in error.problem for word in (*objectives, *others)) for error in refused.values())


def test_no_key_of_a_published_config_is_dropped_silently_and_the_text_is_the_spec(
    configs: tuple[Published, ...],
) -> None:
    for one in configs:
        if isinstance(one.found, FinefitError):
            continue
        assert parse_spec(one.found.text, where="spec.yaml") == one.found.spec
        lines = one.found.translation.lines
        said = {line.key.partition(".")[0] for line in lines}
        assert said >= read_document(Path(one.found.translation.config.where)).keys(), one.name
        assert all(line.outcome.settings or line.outcome.note for line in lines), one.name
        unknown = [line.key for line in lines if "does not know" in line.outcome.note]
        assert unknown == [], one.name


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nearly_every_published_training_can_be_planned(
    configs: tuple[Published, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the plan refuses the model itself, which transformers or finefit lacks, whose weights are packed, or whose
    layers have other names, a plain shape shows that the rest of the spec can be planned."""
    trainings = [one for one in configs if one.is_training]
    fates: Counter[str] = Counter()
    by_model: dict[str, str] = {}
    by_spec: dict[str, str] = {}
    for one in trainings:
        if isinstance(one.found, FinefitError):
            fates["refused by init"] += 1
            continue
        base = Path(one.found.translation.config.where).parent
        problem = problem_of(one.found.spec, base)
        if problem is None:
            fates["planned"] += 1
            continue
        plain = one.found.spec.model_copy(update={"model": ShapeModel(kind="shape", config=PLAIN)})
        is_model = problem_of(plain, base) is None
        fates["planned with a plain shape, the model refused" if is_model else "refused by the plan"] += 1
        (by_model if is_model else by_spec)[f"{one.name} ({one.model})"] = problem
    with capsys.disabled():
        print("", dict(fates), *(f"{name}: {why}" for name, why in {**by_model, **by_spec}.items()), sep="\n  ")
    offered = len(trainings) - fates["refused by init"]
    assert "no remedy is named" not in {**by_model, **by_spec}.values()
    assert fates["planned"] + len(by_model) >= 0.9 * offered
    assert fates["planned"] >= 0.75 * offered


def problem_of(spec: Spec, base: Path) -> str | None:
    """Returns why the plan refuses the spec; None if it fits."""
    try:
        (found,) = forecast(spec, base, ("H200",), row_lengths(spec, base))
    except FinefitError as error:
        return f"{error.problem}; {error.remedy}" if error.remedy else "no remedy is named"
    return None if training_costs((found,)).fits[0] else f"does not fit: {found.gradients}"
