"""A pipeline: stages that depend on data or on the output of other stages. Whatever is bound to fail is refused, with
the name of the stage, when the spec is read.

`model: {kind: stage, name: sft}` is the model that a stage makes, and `stage://NAME/file` is a path to a file of its
output."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, Field, PrivateAttr, model_validator

from finefit.spec import stages as kinds
from finefit.spec.data import TEMPLATE_OPTIONS
from finefit.spec.models import CustomModel, Full, Lora, Model, Subset, Tuning
from finefit.spec.schema import Common, Spec, Training
from finefit.spec.tasks import CustomTask, LmEval

EVERY = "all"
"""The name that means all stages in options that take stage names."""
_MAKERS = {
    "model": ("train", "merge_adapter", "build_moe"),
    "file": ("make_pairs", "python", "train", "merge_adapter", "build_moe", "export"),
    "scores": ("train", "evaluate"),
}
_WORDS = {"model": "the model", "file": "a file", "scores": "the scores"}
_CHECKPOINT = re.compile(r"base|final|best|(checkpoint-)?[0-9]+")
_MLP_LAYERS = ("gate_proj", "up_proj", "down_proj")

Stages = dict[str, Any]
Problems = Iterator[str]
"""Each problem continues a sentence that starts with the name of the stage: `needs a file ...; name another`."""


class Pipeline(Common):
    defaults: dict[str, Any] = Field(default_factory=dict)
    """Keys of a spec that every stage of kind train has unless it sets them itself."""
    stages: dict[kinds.StageName, kinds.AnyStage] = Field(min_length=1)
    _flat: dict[str, Any] | None = PrivateAttr(None)
    """For a flat spec: the keys that it has in addition to those of its stage."""

    @model_validator(mode="after")
    def _can_run(self) -> "Pipeline":
        if EVERY in self.stages:
            problem = f"a stage cannot be called {EVERY}, which means every stage in --force {EVERY}"
            raise ValueError(f"{problem}; give it another name")
        first: dict[str, str] = {}
        for name in self.stages:  # each stage has a folder, and some file systems ignore case
            if (other := first.setdefault(name.lower(), name)) != name:
                problem = f"stages {other} and {name} would write into one folder"
                raise ValueError(f"{problem}; give one of them another name")
        for find_problems in (_input_problems, _model_problems):
            for name, stage in self.stages.items():
                for problem in find_problems(stage, self.stages):
                    raise ValueError(f"stage {name} {problem}")
            self.order()  # refuses cycles last: they need existing stages, and models cannot be followed through them
        return self

    def order(self) -> tuple[str, ...]:
        """Returns every stage after those that it depends on, otherwise in the written order."""
        done: dict[str, None] = {}

        def visit(name: str, above: tuple[str, ...]) -> None:
            if name in above:
                circle = " -> ".join((*above[above.index(name) :], name))
                remedy = "let one of them depend on data alone"
                raise ValueError(f"stages depend on each other in a circle: {circle}; {remedy}")
            if name not in done:
                for needed in needs(self.stages[name]):
                    visit(needed, (*above, name))
                done[name] = None

        for name in self.stages:
            visit(name, ())
        return tuple(done)

    @classmethod
    def of(cls, spec: "Spec | Pipeline") -> "Pipeline":
        """A flat spec becomes a pipeline with one stage, which is named after its objective."""
        if isinstance(spec, Pipeline):
            return spec
        given = spec.model_fields_set
        stage = kinds.TrainStage.model_construct(
            _fields_set={key for key in Training.model_fields if key in given} | {"kind", "model"},
            kind="train",
            model=spec.model,
            **{key: getattr(spec, key) for key in Training.model_fields},
        )
        found = cls.model_construct(
            _fields_set={key for key in Common.model_fields if key in given} | {"stages"},
            stages={spec.objective.kind: stage},
            **{key: getattr(spec, key) for key in Common.model_fields},
        )
        found._flat = {"launcher": spec.launcher} if "launcher" in given else {}
        return found

    def models(self) -> list[kinds.Input]:
        return [model for stage in self.stages.values() for _, model in kinds.models_of(stage)]

    @property
    def is_flat(self) -> bool:
        """Whether the user wrote a spec without `stages`; its keys have no prefix `stages.NAME.`."""
        return self._flat is not None

    @property
    def flat_spec(self) -> Spec:
        """The spec with which `of` was called, with later changes."""
        ((name, stage),) = self.stages.items()
        assert isinstance(stage, kinds.TrainStage)
        assert not isinstance(stage.model, kinds.StageModel)
        return self.spec_of(name, model=stage.model, tuning=stage.tuning)

    def spec_of(self, name: str, *, model: Model, tuning: Tuning) -> Spec:
        """Returns a training as a spec of its own. `model` and `tuning` replace references to other stages."""
        stage = self.stages[name]
        assert isinstance(stage, kinds.TrainStage)
        common = {key: getattr(self, key) for key in Common.model_fields}
        if not self.is_flat:
            common["name"] = f"{self.name}-{name}"[:64]
        own = {key: getattr(stage, key) for key in Training.model_fields} | {"tuning": tuning}
        given = (stage.model_fields_set & own.keys()) | (self.model_fields_set & common.keys()) | {"model"}
        more = self._flat or {}
        return Spec.model_construct(_fields_set=given | more.keys(), **common, **own, **more, model=model)


def needs(stage: BaseModel) -> tuple[str, ...]:
    """Returns the stages that a stage depends on, in the order of its keys."""
    return tuple(dict.fromkeys(name for name, _, _ in _wanted(stage)))


def _wanted(stage: BaseModel) -> Iterator[tuple[str, Literal["model", "file", "scores"], str]]:
    """Yields names of other stages, what is needed from them, and which file, model or checkpoint."""
    if isinstance(stage, kinds.CompareStage):
        yield from ((source, "scores", which) for source, _, which in (part.partition(":") for part in stage.of))
    for _, value, holder in kinds.leaves(stage):
        if isinstance(value, kinds.StageModel):
            yield value.name, "model", ""
        elif holder is not None and (found := kinds.STAGE_PATH.fullmatch(value)):
            yield found[1], "file", found[2] or ""


def _input_problems(stage: BaseModel, stages: Stages) -> Problems:
    for key, value, holder in kinds.leaves(stage):
        if isinstance(value, str) and value.startswith(kinds.STAGE):
            if holder is None:
                yield f"has {value} at {key}, which is not a path; name files of other stages only in paths"
            if not kinds.STAGE_PATH.fullmatch(value):
                yield f"has {value} at {key}, which names no stage; write {kinds.STAGE}NAME/file"
    for needed, what, which in _wanted(stage):
        if needed not in stages:
            yield f"depends on stage {needed}, which does not exist; the stages are {', '.join(stages)}"
        kind, makers = stages[needed].kind, _MAKERS[what]
        if isinstance(stage, kinds.EvaluateStage) and what == "model":
            makers = (*makers, "gate")
        if kind not in makers:
            problem = f"needs {_WORDS[what]} of stage {needed}, but a {kind} stage makes none"
            yield f"{problem}; name a stage of kind {', '.join(makers)}"
        if what == "file":
            yield from _file_problems(needed, stages[needed], which)
        if what == "scores":
            yield from _score_problems(needed, stages[needed], which)
    if isinstance(stage, kinds.CompareStage):
        yield from _side_problems(stage, stages)


def _file_problems(needed: str, stage: BaseModel, path: str) -> Problems:
    asked, more = PurePosixPath(path).parts, ""
    if path.startswith("/") or ".." in asked:
        yield f"needs {kinds.STAGE}{needed}/{path}, which is outside of that stage's folder; name a file below it"
    match stage:
        case kinds.PythonStage():
            made, more = stage.outputs, "; declare it in its outputs"
        case kinds.MakePairs():
            splits = ("train", *(split for split in ("validation", "test") if getattr(stage, split)))
            made = (*(f"{split}.jsonl" for split in splits), "report.json")
        case _:  # the spec alone does not say
            return
    for one in made:  # equal to it, or one is a folder that contains the other; the request may be a pattern
        pairs = zip(asked, PurePosixPath(one).parts, strict=False)
        if "**" in asked or all(wanted == there or fnmatchcase(there, wanted) for wanted, there in pairs):
            return
    yield f"needs {path} of stage {needed}, which that stage does not produce; it produces {', '.join(made)}{more}"


def _score_problems(needed: str, stage: BaseModel, which: str) -> Problems:
    match stage:
        case kinds.EvaluateStage(models=models) if which and which not in models:
            yield f"needs {needed}:{which}, but {which} is not a model of stage {needed}; it has {', '.join(models)}"
        case kinds.TrainStage(evaluate=()):
            problem = f"needs the scores of stage {needed}, which has no evaluation"
            yield f"{problem}; give it `evaluate`, or name a stage of kind evaluate that has its model"
        case kinds.TrainStage(evaluate=tasks) if which == "base" and not any(task.base for task in tasks):
            problem = f"needs {needed}:base, but no task of stage {needed} scores the starting model"
            yield f"{problem}; set base: true in one"
        case kinds.TrainStage() if which and not _CHECKPOINT.fullmatch(which):
            problem = f"needs {needed}:{which}, which is not a checkpoint"
            yield f"{problem}; write {needed}:base, :best, :final or :checkpoint-40"


def _side_problems(stage: kinds.CompareStage, stages: Stages) -> Problems:
    """Requires at least two sides with a common task; a training alone is compared with its starting model."""
    sides = dict(side for part in stage.of for side in _sides(part, stages))
    source, _, _ = stage.of[0].partition(":")
    if len(set(stage.of)) == 1 and isinstance(stages[source], kinds.TrainStage):
        sides |= dict(_sides(f"{source}:base", stages))
    if len(sides) == 1:
        yield f"compares {next(iter(sides))} with nothing; name another beside it"
    counts = Counter(label for labels in sides.values() for label in labels)
    if not [label for label, count in counts.items() if count > 1 and stage.task in (None, label)]:
        each = ", ".join(f"{side} on {' and '.join(labels) or 'nothing'}" for side, labels in sides.items())
        problem = f"compares models of which no two are scored on {stage.task or 'one task'} ({each})"
        yield f"{problem}; give their stages one to share"


def _sides(part: str, stages: Stages) -> Iterator[tuple[str, list[str]]]:
    """Yields the names that a comparison would use, and the tasks on which each is scored."""
    source, _, which = part.partition(":")
    match stages[source]:
        case kinds.EvaluateStage(models=models, evaluate=tasks):
            labels = [task.label for task in tasks]
            yield from ((f"{source}:{model}", labels) for model in models if which in ("", model))
        case kinds.TrainStage(evaluate=tasks):
            role = f"checkpoint-{which}" if which.isdecimal() else which or "final"
            yield f"{source}:{role}", [task.label for task in tasks if task.base or role != "base"]


def _model_problems(stage: BaseModel, stages: Stages) -> Problems:
    if isinstance(stage, kinds.MergeAdapter | kinds.Export | kinds.BuildMoe | kinds.Gate | kinds.MakePairs):
        # a custom model is trained and evaluated; stages that take models apart or sample from them need transformers
        for key, asked in kinds.models_of(stage):
            if _is_custom(asked, stages):
                of = f"the model of stage {asked.name}" if isinstance(asked, kinds.StageModel) else f"its {key}"
                yield f"needs models of transformers, but {of} is one of your own (kind: custom)"
    match stage:
        case kinds.TrainStage(model=kinds.StageModel(name=before)):
            yield from _continued_adapter_problems(stage, before, stages[before])
        case kinds.BuildMoe():
            yield from _expert_problems(stage, stages)
        case kinds.MergeAdapter(adapter=None) if not _trains_adapter(stage.model, stages):
            problem = "merges an adapter, but its model has none"
            yield f"{problem}; name a stage that trains one, or a folder with adapter:"
        case kinds.MergeAdapter(adapter=str()) if _trains_adapter(stage.model, stages):
            problem = f"merges {stage.adapter}, but its model already has an adapter"
            yield f"{problem}; leave adapter out, or name the base as model"
        case kinds.Export() if not _trains_adapter(stage.model, stages) and isinstance(stage.model, kinds.StageModel):
            needing = [form for form in stage.to if form in ("adapter", "gguf-lora")]
            if needing:
                yield f"exports {', '.join(needing)}, and its model has no adapter; name a stage that trains one"
        case kinds.EvaluateStage():
            yield from _gate_problems(stage, stages)


def _is_custom(asked: kinds.Input | None, stages: Stages) -> bool:
    if isinstance(asked, kinds.StageModel):
        return _is_custom(getattr(stages[asked.name], "model", None), stages)
    return isinstance(asked, CustomModel)


def _trains_adapter(asked: kinds.Input, stages: Stages) -> bool:
    stage = stages[asked.name] if isinstance(asked, kinds.StageModel) else None
    return isinstance(stage, kinds.TrainStage) and isinstance(stage.tuning, Lora)


def _gate_problems(stage: kinds.EvaluateStage, stages: Stages) -> Problems:
    """A gate answers with the experts that it was trained for, which must be the models of those names here."""
    for model, asked in stage.models.items():
        if not isinstance(asked, kinds.StageModel) or not isinstance(gate := stages[asked.name], kinds.Gate):
            continue
        if odd := [expert for expert, wanted in gate.experts.items() if stage.models.get(expert) != wanted]:
            among = ", ".join(gate.experts)
            problem = f"has models.{model}, which chooses among {among} and generates no answers itself"
            remedy = f"add each to models, as in stage {asked.name}"
            yield f"{problem}; {', '.join(odd)} is missing among the models here, or is a different model; {remedy}"
        if own := [one.label for one in stage.evaluate if isinstance(one.task, LmEval)]:
            problem = f"evaluates {', '.join(own)}, which brings items whose prompts models.{model} cannot see"
            yield f"{problem}; evaluate the gate in another stage"
        for key in ("task", "template", "template_options"):
            here, there = getattr(stage.data, key), getattr(gate, key)
            if isinstance(here, dict) and isinstance(there, dict):  # an option may be written with its default
                is_alike = {**TEMPLATE_OPTIONS, **here} == {**TEMPLATE_OPTIONS, **there}
            else:  # two files may have equal content
                is_alike = here == there or (isinstance(here, CustomTask) and isinstance(there, CustomTask))
            if not is_alike:
                learns = f"the gate models.{model} learns in stage {asked.name} from rows with {key} {_shown(there)}"
                yield f"builds its rows with data.{key} {_shown(here)}, but {learns}; make them equal"


def _shown(value: object) -> str:
    return value.model_dump_json(exclude_defaults=True) if isinstance(value, BaseModel) else json.dumps(value)


def _expert_problems(stage: kinds.BuildMoe, stages: Stages) -> Problems:
    """These problems are known before an expert is trained."""
    layers = f"[{', '.join(_MLP_LAYERS)}]"
    for asked in (stage.base, *stage.experts.values()):
        if isinstance(asked, kinds.StageModel) and _trains_adapter(asked, stages):
            problem = f"is built from whole models, but stage {asked.name} trains an adapter"
            remedy = "put a stage of kind merge_adapter between, and restrict the adapter's targets to the MLPs"
            yield f"{problem}; {remedy}: {layers}"
    forced = stage.router.expert if isinstance(stage.router, kinds.ForcedRouter) else None  # others are left out
    for expert in stage.experts if forced is None else (forced,):
        for trained in _trained_apart(stage.base, stage.experts[expert], stages):
            if elsewhere := _outside_mlps(stages[trained].tuning):
                by = f"stage {trained}, by which expert {expert} and the base differ, trains {elsewhere}"
                remedy = "give it tuning: {kind: subset, trainable: [layers.*.mlp]}, or an adapter with targets: "
                more = f"{layers} followed by a stage of kind merge_adapter"
                yield f"is built from models that differ only in their MLPs, but {by}; {remedy}{more}"
    if not isinstance(stage.router, kinds.CentroidRouter) or stage.router.task is not None:
        return
    for expert, asked in stage.experts.items():  # the router learns nothing from rows in a form that no expert has seen
        for trained in _trained_apart(stage.base, asked, stages):
            if (form := stages[trained].data.task) is not None:
                by = f"stage {trained}, where expert {expert} learns, builds its rows with data.task {_shown(form)}"
                yield f"starts its router from unchanged rows, but {by}; give the router this task"


def _trained_apart(base: kinds.Input, expert: kinds.Input, stages: Stages) -> list[str]:
    """Returns the trainings that only one of the two has been through. Nothing is known of models with different
    origins."""
    (ours, first), (theirs, other) = _history(expert, stages), _history(base, stages)
    if first != other:
        return []
    apart = (name for name in (*ours, *theirs) if (name in ours) != (name in theirs))
    return [name for name in apart if isinstance(stages[name], kinds.TrainStage)]


def _history(asked: kinds.Input, stages: Stages) -> tuple[list[str], kinds.Input]:
    """Returns a model's stages, the last one first, and its origin. A mixture or average has everything but its MLPs
    from its base."""
    passed = []
    while isinstance(asked, kinds.StageModel):
        passed.append(asked.name)
        stage = stages[asked.name]
        asked = stage.base if isinstance(stage, kinds.BuildMoe) else stage.model
    return passed, asked


def _outside_mlps(tuning: Tuning) -> str:
    """Returns the part that certainly changes other weights, in every family from which a mixture can be built."""
    match tuning:
        case Full():
            return "all weights (tuning.kind: full)"
        case Lora(targets=targets):
            several = targets.values() if isinstance(targets, dict) else (targets,)
            key = "targets"
            names = [name for layers in several for name in ((layers,) if isinstance(layers, str) else layers)]
        case Subset(trainable=patterns):
            key, names = "trainable", list(patterns)
    odd = [name for name in names if "mlp" not in (parts := name.split(".")) and parts[-1] not in _MLP_LAYERS]
    return f"tuning.{key}: {', '.join(odd)}" if odd else ""


def _continued_adapter_problems(stage: kinds.TrainStage, before: str, other: BaseModel) -> Problems:
    """An adapter is continued as it is; for anything else it must be merged into its base first."""
    if not isinstance(other, kinds.TrainStage) or not isinstance(other.tuning, Lora):
        return
    if not isinstance(stage.tuning, Lora):
        problem = f"trains weights of a model to which stage {before} has only added an adapter"
        yield f"{problem}; put a stage of kind merge_adapter between"
        return
    continues = f"continues the adapter of stage {before}"
    if stage.tuning.adapter is not None:
        remedy = "leave it out (null removes a default), or name the base as model"
        yield f"{continues}, but tuning.adapter names another, {stage.tuning.adapter}; {remedy}"
    for key in ("rank", "alpha", "targets", "base_bits", "rank_stabilised", "dora"):
        here, there = getattr(stage.tuning, key), getattr(other.tuning, key)
        if here != there:
            yield f"{continues}, whose tuning.{key} is {there}, not {here}; make them equal"
