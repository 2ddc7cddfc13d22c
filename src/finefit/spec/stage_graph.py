"""What stages want of each other, and whether those will have it: all that can be known before anything runs is refused by name."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel

from finefit.spec.models import CustomModel, Full, Lora, Subset, Tuning
from finefit.spec.rows import TEMPLATE_OPTIONS
from finefit.spec.stage_kinds import (
    PATHS,
    STAGE,
    STAGE_PATH,
    BuildMoe,
    CentroidRouter,
    CompareStage,
    EvaluateStage,
    ForcedRouter,
    Gate,
    Input,
    MakePairs,
    MergeAdapter,
    PythonStage,
    StageModel,
    TrainStage,
)
from finefit.spec.tasks import LmEval, OwnTask

_MAKERS_OF_MODELS = ("train", "merge_adapter", "build_moe")
_MAKERS_OF_FILES = ("make_pairs", "python", "train", "merge_adapter", "build_moe")
EVERY = "all"
"""Means all stages, where a command names those to make again."""
_CHECKPOINT = re.compile(r"base|final|best|(checkpoint-)?[0-9]+")
_MLP_LAYERS = ("gate_proj", "up_proj", "down_proj")
_WORDS = {"model": "the model", "file": "a file", "scores": "the scores"}


def needs(stage: BaseModel) -> tuple[str, ...]:
    """The stages that one stands on, in the order of its keys."""
    return tuple(dict.fromkeys(name for name, _, _ in _wanted(stage)))


def _wanted(stage: BaseModel) -> Iterator[tuple[str, Literal["model", "file", "scores"], str]]:
    """Names of other stages, what is wanted of them, and which: a file of its output, a model or checkpoint that was scored."""
    if isinstance(stage, CompareStage):
        yield from ((source, "scores", which) for source, _, which in (part.partition(":") for part in stage.of))
    for _, value, is_path in _leaves(stage):
        if isinstance(value, StageModel):
            yield value.name, "model", ""
        elif is_path and (found := STAGE_PATH.fullmatch(value)):
            yield found[1], "file", found[2] or ""


def _leaves(value: Any, key: str = "", *, is_path: bool = False) -> Iterator[tuple[str, Any, bool]]:
    """Every text and every model of a stage, with its key and whether a path stands there."""
    match value:
        case StageModel() | str():
            yield key, value, is_path
        case BaseModel():
            for name in type(value).model_fields:
                yield from _leaves(
                    getattr(value, name), f"{key}.{name}" if key else name, is_path=name in PATHS.get(type(value), ())
                )
        case dict():
            for name, inner in value.items():
                yield from _leaves(inner, f"{key}.{name}", is_path=is_path)
        case tuple() | list():
            for at, inner in enumerate(value):
                yield from _leaves(inner, f"{key}.{at}", is_path=is_path)


def require_inputs(name: str, stage: BaseModel, stages: dict[str, Any]) -> None:
    _require_addresses(name, stage)
    for needed, what, which in _wanted(stage):
        if needed not in stages:
            raise ValueError(
                f"stage {name} stands on stage {needed}, which is not there; the stages are {', '.join(stages)}"
            )
        kind = stages[needed].kind
        makers: tuple[str, ...] = {
            "model": _MAKERS_OF_MODELS,
            "file": _MAKERS_OF_FILES,
            "scores": ("train", "evaluate"),
        }[what]
        if isinstance(stage, EvaluateStage) and what == "model":
            makers = (*makers, "gate")
        if kind not in makers:
            raise ValueError(
                f"stage {name} wants {_WORDS[what]} of stage {needed}, and {kind} makes none; name a stage of kind {', '.join(makers)}"
            )
        if what == "file":
            _require_file(name, needed, stages[needed], which)
        if what == "scores":
            _require_scores(name, needed, stages[needed], which)
    if isinstance(stage, CompareStage):
        _require_sides(name, stage, stages)


def _require_addresses(name: str, stage: BaseModel) -> None:
    for key, value, is_path in _leaves(stage):
        if isinstance(value, str) and value.startswith(STAGE):
            if not is_path:
                raise ValueError(
                    f"stage {name} has {value} at {key}, where no path stands; name files of other stages where a path is asked for"
                )
            if not STAGE_PATH.fullmatch(value):
                raise ValueError(f"stage {name} has {value} at {key}, which names no stage; write {STAGE}NAME/file")


def _require_file(name: str, needed: str, stage: BaseModel, path: str) -> None:
    parts = PurePosixPath(path).parts
    if path.startswith("/") or ".." in parts:
        raise ValueError(
            f"stage {name}: {STAGE}{needed}/{path} leads out of the stage's own folder; name what lies below it"
        )
    made = _files_of(stage)
    if made is not None and not any(_is_or_holds(parts, PurePosixPath(one).parts) for one in made):
        more = "; declare it in its outputs" if isinstance(stage, PythonStage) else ""
        raise ValueError(
            f"stage {name} wants {path} of stage {needed}, which will not be there: it makes {', '.join(made)}{more}"
        )


def _files_of(stage: BaseModel) -> tuple[str, ...] | None:
    """What a stage will leave in its output; None where the spec alone does not say."""
    match stage:
        case PythonStage():
            return stage.outputs
        case MakePairs():
            return (
                "train.jsonl",
                *(f"{split}.jsonl" for split in ("validation", "test") if getattr(stage, split)),
                "report.json",
            )
    return None


def _is_or_holds(asked: tuple[str, ...], made: tuple[str, ...]) -> bool:
    """One of the two is the other, or a folder that holds it. What is asked for may be a pattern."""
    return "**" in asked or all(
        one == other or fnmatchcase(other, one) for one, other in zip(asked, made, strict=False)
    )


def _require_scores(name: str, needed: str, stage: BaseModel, which: str) -> None:
    match stage:
        case EvaluateStage(models=models) if which and which not in models:
            raise ValueError(
                f"stage {name} wants {needed}:{which}, and {which} is no model of stage {needed}; it has {', '.join(models)}"
            )
        case TrainStage(evaluate=()):
            raise ValueError(
                f"stage {name} wants the scores of stage {needed}, which is scored on nothing; "
                "give it `evaluate`, or name a stage of kind evaluate that has its model"
            )
        case TrainStage(evaluate=tasks) if which == "base" and not any(task.base for task in tasks):
            raise ValueError(
                f"stage {name} wants {needed}:base, and no task of stage {needed} scores the starting model; set base: true in one"
            )
        case TrainStage() if which and not _CHECKPOINT.fullmatch(which):
            raise ValueError(
                f"stage {name} wants {needed}:{which}, which is no checkpoint; write {needed}:base, :best, :final or :checkpoint-40"
            )


def _require_sides(name: str, stage: CompareStage, stages: dict[str, Any]) -> None:
    """Two at least, with one task that both have; a training alone is where it started and where it ended."""
    sides = dict(side for part in stage.of for side in _sides(part, stages))
    source, _, _ = stage.of[0].partition(":")
    if len(set(stage.of)) == 1 and isinstance(stages[source], TrainStage):
        sides |= dict(_sides(f"{source}:base", stages))
    if len(sides) == 1:
        raise ValueError(f"stage {name} compares {next(iter(sides))} with nothing; name another beside it")
    counts = Counter(label for labels in sides.values() for label in labels)
    if not [label for label, count in counts.items() if count > 1 and stage.task in (None, label)]:
        each = ", ".join(f"{side} on {' and '.join(labels) or 'nothing'}" for side, labels in sides.items())
        raise ValueError(
            f"no two of what stage {name} compares are scored on {stage.task or 'one task'} ({each}); give their stages one to share"
        )


def _sides(part: str, stages: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """By the names that a comparison would take, and what each may be scored on."""
    source, _, which = part.partition(":")
    match stages[source]:
        case EvaluateStage(models=models, evaluate=tasks):
            yield from (
                (f"{source}:{model}", [task.label for task in tasks]) for model in models if which in ("", model)
            )
        case TrainStage(evaluate=tasks):
            role = f"checkpoint-{which}" if which.isdecimal() else which or "final"
            yield f"{source}:{role}", [task.label for task in tasks if task.base or role != "base"]


def require_fitting_models(name: str, stage: BaseModel, stages: dict[str, Any]) -> None:
    if isinstance(stage, MergeAdapter | BuildMoe | Gate | MakePairs):
        _require_published(name, stage, stages)
    match stage:
        case TrainStage(model=StageModel(name=before)):
            _require_same_adapter(name, stage, before, stages[before])
        case BuildMoe():
            _require_whole_models(name, stage, stages)
            _require_rows_of_experts(name, stage, stages)
        case MergeAdapter():
            _require_one_adapter(name, stage, stages)
        case EvaluateStage():
            _require_experts(name, stage, stages)


def _require_published(name: str, stage: BaseModel, stages: dict[str, Any]) -> None:
    """A model of the user's own is trained and evaluated; what takes models apart or samples from them knows those of transformers."""
    for wanted, what, _ in _wanted(stage):
        if what == "model" and _is_own(stages[wanted], stages):
            raise ValueError(
                f"stage {name} takes models of transformers, and the model of stage {wanted} is one of your own (kind: custom)"
            )
    if any(isinstance(value, CustomModel) for value in _models_in(stage)):
        raise ValueError(f"stage {name} takes models of transformers, and not one of your own (kind: custom)")


def _is_own(stage: BaseModel, stages: dict[str, Any]) -> bool:
    asked = getattr(stage, "model", None)
    return isinstance(asked, CustomModel) or (isinstance(asked, StageModel) and _is_own(stages[asked.name], stages))


def _models_in(part: object) -> Iterator[object]:
    match part:
        case CustomModel():
            yield part
        case BaseModel():
            for key in type(part).model_fields:
                yield from _models_in(getattr(part, key))
        case dict():
            for value in part.values():
                yield from _models_in(value)


def _trains_adapter(asked: Input, stages: dict[str, Any]) -> bool:
    match stages[asked.name] if isinstance(asked, StageModel) else None:
        case TrainStage(tuning=Lora()):
            return True
    return False


def _require_one_adapter(name: str, stage: MergeAdapter, stages: dict[str, Any]) -> None:
    is_trained = _trains_adapter(stage.model, stages)
    if stage.adapter is None and not is_trained:
        raise ValueError(
            f"stage {name} merges an adapter, and its model has none; name a stage that trains one, or a folder with adapter:"
        )
    if stage.adapter is not None and is_trained:
        raise ValueError(
            f"stage {name} merges {stage.adapter}, and its model has an adapter already; leave adapter out, or name the base as model"
        )


def _require_experts(name: str, stage: EvaluateStage, stages: dict[str, Any]) -> None:
    """A gate answers by the experts that it was trained for, which must be the models of those names here."""
    for model, asked in stage.models.items():
        if not isinstance(asked, StageModel) or not isinstance(gate := stages[asked.name], Gate):
            continue
        if odd := [expert for expert, wanted in gate.experts.items() if stage.models.get(expert) != wanted]:
            raise ValueError(
                f"stage {name}: models.{model} chooses among {', '.join(gate.experts)} and answers nothing itself; {', '.join(odd)} is not among "
                f"the models here, or another one; name each under models as it stands in stage {asked.name}"
            )
        if own := [one.label for one in stage.evaluate if isinstance(one.task, LmEval)]:
            raise ValueError(
                f"stage {name}: {', '.join(own)} brings items of its own, whose prompts models.{model} cannot see; evaluate the gate in another stage"
            )
        for key in ("task", "template", "template_options"):
            here, there = getattr(stage.data, key), getattr(gate, key)
            if not _are_alike(here, there):
                raise ValueError(
                    f"stage {name} builds its rows with data.{key} {_shown(here)}, and stage {asked.name}, whose gate models.{model} is, learns from "
                    f"rows that are built with {key} {_shown(there)}; make them equal"
                )


def _are_alike(here: object, there: object) -> bool:
    """Two files may hold the same; an option may be written as it is anyway."""
    match here, there:
        case OwnTask(), OwnTask():
            return True
        case dict(), dict():
            return {**TEMPLATE_OPTIONS, **here} == {**TEMPLATE_OPTIONS, **there}
    return here == there


def _shown(value: object) -> str:
    return value.model_dump_json(exclude_defaults=True) if isinstance(value, BaseModel) else json.dumps(value)


def _require_whole_models(name: str, stage: BuildMoe, stages: dict[str, Any]) -> None:
    """Known before an expert is trained, not after."""
    for asked in (stage.base, *stage.experts.values()):
        if isinstance(asked, StageModel) and _trains_adapter(asked, stages):
            raise ValueError(
                f"stage {name} is built of whole models, and stage {asked.name} trains an adapter; put a stage of kind merge_adapter between, "
                f"and let the adapter have targets in the MLPs alone: [{', '.join(_MLP_LAYERS)}]"
            )
    built = (
        {stage.router.expert} if isinstance(stage.router, ForcedRouter) else stage.experts
    )  # the others are left out
    for expert in built:
        for trained in _trained_apart(stage.base, stage.experts[expert], stages):
            if elsewhere := _outside_mlps(stages[trained].tuning):
                raise ValueError(
                    f"stage {name} is built of models that differ in their MLPs alone, and stage {trained}, by which expert {expert} and the base "
                    f"differ, trains {elsewhere}; give it tuning: {{kind: subset, trainable: [layers.*.mlp]}}, or an adapter with targets: "
                    f"[{', '.join(_MLP_LAYERS)}] and a stage of kind merge_adapter behind it"
                )


def _require_rows_of_experts(name: str, stage: BuildMoe, stages: dict[str, Any]) -> None:
    """Centroids of rows that no expert has seen in that form would start the router from nothing that it will meet."""
    if not isinstance(stage.router, CentroidRouter) or stage.router.task is not None:
        return
    for expert, asked in stage.experts.items():
        for trained in _trained_apart(stage.base, asked, stages):
            if (form := stages[trained].data.task) is not None:
                raise ValueError(
                    f"stage {name} starts its router from rows as they are, and stage {trained}, where expert {expert} learns, builds its rows with "
                    f"data.task {_shown(form)}; give the router that as task"
                )


def _trained_apart(base: Input, expert: Input, stages: dict[str, Any]) -> list[str]:
    """The trainings that one of the two has come through and the other has not. Nothing is known of models that do not start from the same one."""
    (ours, first), (theirs, other) = _way_of(expert, stages), _way_of(base, stages)
    if first != other:
        return []
    return [
        name for name in (*ours, *theirs) if (name in ours) != (name in theirs) and isinstance(stages[name], TrainStage)
    ]


def _way_of(asked: Input, stages: dict[str, Any]) -> tuple[list[str], Input]:
    """The stages that a model has come through, the last one first, and what it was before. An average has all but its MLPs from its base."""
    way = []
    while isinstance(asked, StageModel):
        way.append(asked.name)
        stage = stages[asked.name]
        asked = stage.base if isinstance(stage, BuildMoe) else stage.model
    return way, asked


def _outside_mlps(tuning: Tuning) -> str:
    """What of it certainly moves other weights: in every family that a mixture is built of, what lies in no MLP and is none of its layers."""
    match tuning:
        case Full():
            return "all weights (tuning.kind: full)"
        case Lora(targets=targets):
            several = targets.values() if isinstance(targets, dict) else (targets,)
            key, names = (
                "targets",
                [name for layers in several for name in ((layers,) if isinstance(layers, str) else layers)],
            )
        case Subset(trainable=patterns):
            key, names = "trainable", list(patterns)
    odd = [name for name in names if "mlp" not in (parts := name.split(".")) and parts[-1] not in _MLP_LAYERS]
    return f"tuning.{key}: {', '.join(odd)}" if odd else ""


def _require_same_adapter(name: str, stage: TrainStage, before: str, other: BaseModel) -> None:
    """An adapter is trained on as it is; anything else needs it merged into its base first."""
    if not isinstance(other, TrainStage) or not isinstance(other.tuning, Lora):
        return
    if not isinstance(stage.tuning, Lora):
        raise ValueError(
            f"stage {name} trains weights of a model that stage {before} has only laid an adapter over; put a stage of kind merge_adapter between"
        )
    if stage.tuning.adapter is not None:
        raise ValueError(
            f"stage {name} goes on with the adapter of stage {before}, and tuning.adapter names another, {stage.tuning.adapter}; "
            "leave it out (null takes a default away), or name the base as model"
        )
    for key in ("rank", "alpha", "targets", "base_bits", "rank_stabilised", "dora"):
        here, there = getattr(stage.tuning, key), getattr(other.tuning, key)
        if here != there:
            raise ValueError(
                f"stage {name} goes on with the adapter of stage {before}, whose tuning.{key} is {there}, not {here}; make them equal"
            )


def require_names(names: list[str]) -> None:
    """A folder for each: those of some systems do not tell capitals from small letters."""
    if EVERY in names:
        raise ValueError(
            f"a stage cannot be called {EVERY}, which means every stage in --force {EVERY}; give it another name"
        )
    for at, name in enumerate(names):
        for other in names[:at]:
            if name.lower() == other.lower():
                raise ValueError(
                    f"stages {other} and {name} would write into one folder; give one of them another name"
                )
