"""Several stages, each standing on data or on what other stages have made. Frozen; a graph that cannot be walked is refused when it is read.

`model: {kind: stage, name: sft}` is the model that a stage has made, and `stage://NAME/file` stands wherever a path does for a file of its output.
"""

from typing import Any

from pydantic import Field, model_validator

from finefit.spec.models import Model, Tuning
from finefit.spec.schema import Common, Spec, Training
from finefit.spec.stage_graph import needs, require_fitting_models, require_inputs, require_names
from finefit.spec.stage_kinds import (
    STAGE_PATH,
    AnyStage,
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
    Questions,
    Rules,
    Sampled,
    StageModel,
    StageName,
    TrainStage,
    Verdicts,
)

__all__ = [
    "STAGE_PATH",
    "AnyStage",
    "BuildMoe",
    "CentroidRouter",
    "CompareStage",
    "EvaluateStage",
    "ForcedRouter",
    "Gate",
    "Input",
    "MakePairs",
    "MergeAdapter",
    "Pipeline",
    "PythonStage",
    "Questions",
    "Rules",
    "Sampled",
    "StageModel",
    "TrainStage",
    "Verdicts",
    "needs",
]


class Pipeline(Common):
    defaults: dict[str, Any] = Field(default_factory=dict)
    """What every stage of kind train has unless it says otherwise: the keys of a spec."""
    stages: dict[StageName, AnyStage] = Field(min_length=1)

    @model_validator(mode="after")
    def _can_be_walked(self) -> "Pipeline":
        require_names(list(self.stages))
        for name, stage in self.stages.items():
            require_inputs(name, stage, self.stages)
        self.order()
        for name, stage in self.stages.items():
            require_fitting_models(name, stage, self.stages)
        return self

    def order(self) -> tuple[str, ...]:
        """Every stage behind those that it stands on, else as written."""
        done: dict[str, None] = {}
        for name in self.stages:
            self._visit(name, done, ())
        return tuple(done)

    def _visit(self, name: str, done: dict[str, None], above: tuple[str, ...]) -> None:
        if name in above:
            circle = " -> ".join((*above[above.index(name) :], name))
            raise ValueError(f"stages stand on each other in a circle: {circle}; let one of them stand on data alone")
        if name not in done:
            for needed in needs(self.stages[name]):
                self._visit(needed, done, (*above, name))
            done[name] = None

    def spec_of(self, name: str, *, model: Model, tuning: Tuning) -> Spec:
        """A training as a spec of its own, where it is known what stands for the stages that it names."""
        stage = self.stages[name]
        assert isinstance(stage, TrainStage)
        common = {key: getattr(self, key) for key in Common.model_fields} | {"name": f"{self.name}-{name}"[:64]}
        own = {key: getattr(stage, key) for key in Training.model_fields} | {"tuning": tuning}
        written = {key for key in own if key in stage.model_fields_set} | {
            key for key in common if key in self.model_fields_set
        }
        return Spec.model_construct(_fields_set=written | {"name", "model"}, **common, **own, model=model)
