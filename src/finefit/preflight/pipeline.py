"""Checks of a whole run before its first stage begins: one function per check, yielding findings with their stage."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from finefit.artifacts.forecasts import StageForecast
from finefit.artifacts.records import Finding
from finefit.data.files import near_names
from finefit.plan.stage_forecasts import expert_copies
from finefit.preflight import LEVELS, StageFinding, error, note, warning
from finefit.preflight.training import TrainingFacts, check_training
from finefit.spec.pipeline import Pipeline
from finefit.spec.schema import Training
from finefit.spec.stages import BuildMoe, ForcedRouter

_TIGHT = 0.9
"""Share of the host's memory above which other programs push a run into swapping."""
_SET = re.compile(r"--set ('?)([a-z_]+)")
_TRAINING_KEYS = {*Training.model_fields, "validate", "model"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFacts:
    pipeline: Pipeline
    costs: Mapping[str, StageForecast]
    """Costs of the stages that will run."""
    free_disk_bytes: int
    host_memory_bytes: int
    trainings: Mapping[str, TrainingFacts] = field(default_factory=dict)
    missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Files that stages name and that do not exist, by stage."""
    base: Path = Path()
    """The folder that these files are relative to."""
    not_made_yet: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Outputs that other stages have yet to make, by stage."""


def trainings_are_sound(facts: PipelineFacts) -> Iterator[StageFinding]:
    for name, training in facts.trainings.items():
        for finding in check_training(training):
            yield name, with_stage_keys(facts.pipeline, name, finding)


def files_exist(facts: PipelineFacts) -> Iterator[StageFinding]:
    for name, paths in facts.missing.items():
        for path in paths:
            near = near_names(facts.base / path)
            hint = f"did you mean {near}? " if near else ""
            yield name, error(f"{path} does not exist", f"{hint}paths are relative to the spec file")
    for name, paths in facts.not_made_yet.items():
        problem = f"{', '.join(paths)} {'is' if len(paths) == 1 else 'are'} not made yet, so the rows cannot be checked"
        yield name, note(problem, "they are checked when the stage begins")


def disk_holds_everything(facts: PipelineFacts) -> Iterator[StageFinding]:
    sizes = {name: one.disk_bytes for name, one in facts.costs.items() if one.disk_bytes}
    needed, free = sum(sizes.values()), facts.free_disk_bytes
    if needed > free:
        each = ", ".join(f"{name} {size:,}" for name, size in sorted(sizes.items(), key=lambda item: -item[1]))
        stages = f" ({each})" if len(sizes) > 1 else ""
        kept = ", ".join(f"{one.spec.save.keep}" for one in facts.trainings.values() if one.spec.save.keep > 1)
        lower = f", or lower save.keep (now {kept})" if kept else ""
        problem = f"the run takes up to {needed:,} bytes of disk{stages}, but {free:,} are free"
        yield None, error(problem, f"free {needed - free:,} bytes or work on another disk{lower}")


def host_memory_suffices(facts: PipelineFacts) -> Iterator[StageFinding]:
    there = facts.host_memory_bytes
    for name, one in facts.costs.items():
        needed = one.host_bytes or 0
        if needed > _TIGHT * there:
            problem = f"it needs {needed:,} bytes of host memory, but the machine has {there:,}"
            offloads = bool(one.forecasts and one.forecasts[0].levers.offload)
            offload = "`--set levers.offload=none` keeps the layers' inputs on the card"
            remedy = offload if offloads else "use a smaller model"
            tight = warning(problem, f"{remedy}, or close other programs first")
            finding = error(problem, f"{remedy}, or use a machine with more memory") if needed > there else tight
            yield name, with_stage_keys(facts.pipeline, name, finding)


def card_holds_the_base_of_a_mixture(facts: PipelineFacts) -> Iterator[StageFinding]:
    """Checks mixtures whose router starts from hidden states; trainings and answers have checks of their own."""
    for name, one in facts.costs.items():
        fits_host = (one.host_bytes or 0) <= facts.host_memory_bytes
        if not one.fits[0] and not one.forecasts and not one.eval_limits and fits_host:
            problem = "its base, which computes the router's hidden states, is larger than the card's memory"
            yield name, error(problem, "use a larger card, or set device: cpu")


def answers_fit(facts: PipelineFacts) -> Iterator[StageFinding]:
    for name, one in facts.costs.items():
        for model, limits in (one.eval_limits[0] if one.eval_limits else {}).items():
            for label, limit in limits.items():
                if not limit.fits:
                    needed = f"{model} needs {limit.held_bytes:,} bytes to answer {label} one by one"
                    problem = f"{needed}, but the device has {limit.budget_bytes:,} available"
                    remedy = "use a larger card, or shorter prompts and answers (data.max_tokens, max_new_tokens)"
                    yield name, error(problem, remedy)


def experts_are_distinct(facts: PipelineFacts) -> Iterator[StageFinding]:
    """A forced router leaves out all experts but one."""
    for name, stage in facts.pipeline.stages.items():
        if not isinstance(stage, BuildMoe) or stage.copies != "refuse" or isinstance(stage.router, ForcedRouter):
            continue
        if copies := expert_copies(stage):
            adds_nothing, leans = (
                "copies take memory and add nothing",
                "the average would be biased towards the copied expert",
            )
            why = adds_nothing if stage.merge == "mixture" else leans
            slots = f"{len(stage.experts)} slots hold {len(stage.experts) - len(copies)} distinct models"
            remedy = f"leave the copies out, or --set stages.{name}.copies=collapse"
            yield name, error(f"{slots}, so the build will refuse them: {why}", remedy)


CHECKS: tuple[Callable[[PipelineFacts], Iterator[StageFinding]], ...] = (
    trainings_are_sound,
    files_exist,
    disk_holds_everything,
    host_memory_suffices,
    card_holds_the_base_of_a_mixture,
    answers_fit,
    experts_are_distinct,
)


def check_facts(facts: PipelineFacts) -> list[StageFinding]:
    return [finding for check in CHECKS for finding in check(facts)]


def sorted_findings(findings: list[StageFinding], pipeline: Pipeline) -> tuple[StageFinding, ...]:
    """Sorts errors first, then by stage."""
    places = {name: at for at, name in enumerate(pipeline.order())}

    def place(found: StageFinding) -> tuple[int, int]:
        name, finding = found
        return LEVELS.index(finding.level), -1 if name is None else places[name]

    return tuple(sorted(findings, key=place))


def with_stage_keys(pipeline: Pipeline, name: str, finding: Finding) -> Finding:
    """Adapts a training's keys to the user's spec: they are below the stage's name, unless the spec is flat."""
    if pipeline.is_flat:
        return finding

    def prefixed(match: re.Match[str]) -> str:
        return f"--set {match[1]}stages.{name}.{match[2]}" if match[2] in _TRAINING_KEYS else match[0]

    return replace(finding, remedy=_SET.sub(prefixed, finding.remedy))
