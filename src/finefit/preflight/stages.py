"""What a pipeline and its outlook mean before any of its stages begins: one function per check, each yielding findings with the stage they are of."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from finefit.artifacts.forecasts import StageOutlook
from finefit.artifacts.records import Finding
from finefit.preflight.run import TIGHT
from finefit.spec.schema import Training
from finefit.spec.stages import BuildMoe, ForcedRouter, Pipeline

Named = tuple[str | None, Finding]
"""With the stage's name; None for the whole."""
_SET = re.compile(r"--set ('?)([a-z_]+)")
_KEYS = {*Training.model_fields, "validate", "model"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    pipeline: Pipeline
    outlooks: Mapping[str, StageOutlook]
    free_disk_bytes: int
    host_memory_bytes: int
    missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Files that stages name and that are not there, by stage; of trainings none, whose own checks tell."""
    to_come: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What other stages have yet to make, by stage."""
    copies: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Experts that name the same model as another one, by stage."""


def files_are_there(whole: Whole) -> Iterator[Named]:
    for name, paths in whole.missing.items():
        for path in paths:
            yield (
                name,
                Finding(level="error", problem=f"{path} is not there", remedy="paths are relative to the spec file"),
            )


def what_is_to_come_is_told(whole: Whole) -> Iterator[Named]:
    for name, paths in whole.to_come.items():
        problem = (
            f"{', '.join(paths)} {'is' if len(paths) == 1 else 'are'} yet to be made: nothing is known of the rows"
        )
        yield name, Finding(level="note", problem=problem, remedy="they are checked when the stage begins")


def disk_holds_everything(whole: Whole) -> Iterator[Named]:
    sizes = {name: one.disk_bytes for name, one in whole.outlooks.items() if one.disk_bytes}
    needed, free = sum(sizes.values()), whole.free_disk_bytes
    if needed > free:
        told = ", ".join(f"{name} {size:,}" for name, size in sorted(sizes.items(), key=lambda item: -item[1]))
        problem = f"the stages leave up to {needed:,} bytes on the disk ({told}), {free:,} are free"
        yield (
            None,
            Finding(
                level="error",
                problem=problem,
                remedy=f"free {needed - free:,} bytes, work on another disk, or lower save.keep",
            ),
        )


def host_memory_holds_what_is_made(whole: Whole) -> Iterator[Named]:
    """A training has a check of its own."""
    there = whole.host_memory_bytes
    for name, one in whole.outlooks.items():
        needed = 0 if one.forecasts else one.host_bytes or 0
        problem = f"it needs {needed:,} bytes of host memory, the machine has {there:,}"
        if needed > there:
            yield (
                name,
                Finding(level="error", problem=problem, remedy="take a smaller model, or a machine with more memory"),
            )
        elif needed > TIGHT * there:
            yield name, Finding(level="warning", problem=problem, remedy="close other programs before the run")


def the_card_holds_what_is_looked_at(whole: Whole) -> Iterator[Named]:
    """A mixture whose router starts from rows; trainings and answers have checks of their own."""
    for name, one in whole.outlooks.items():
        if not one.fits[0] and not one.forecasts and not one.rooms and (one.host_bytes or 0) <= whole.host_memory_bytes:
            problem = "its base, whose hidden states are looked at, has more bytes than the card"
            yield name, Finding(level="error", problem=problem, remedy="take a larger card, or set device: cpu")


def answers_fit(whole: Whole) -> Iterator[Named]:
    for name, one in whole.outlooks.items():
        for model, rooms in (one.rooms[0] if one.rooms else {}).items():
            for label, room in rooms.items():
                if not room.fits:
                    problem = f"{model} needs {room.held_bytes:,} bytes to answer {label} one by one, the device has {room.budget_bytes:,} to give"
                    remedy = "take a larger card, or shorter prompts and answers (data.max_tokens, max_new_tokens)"
                    yield name, Finding(level="error", problem=problem, remedy=remedy)


def experts_are_no_copies(whole: Whole) -> Iterator[Named]:
    for name, copies in whole.copies.items():
        stage = whole.pipeline.stages[name]
        assert isinstance(stage, BuildMoe)
        if (
            copies and stage.copies == "refuse" and not isinstance(stage.router, ForcedRouter)
        ):  # which leaves all but one out
            distinct = len(stage.experts) - len(copies)
            why = (
                "copies take memory and add nothing"
                if stage.merge == "mixture"
                else "the mean would lean to what copies have learnt"
            )
            problem = (
                f"{len(stage.experts)} slots hold {distinct} distinct models, so the build will refuse them: {why}"
            )
            yield (
                name,
                Finding(
                    level="error",
                    problem=problem,
                    remedy=f"leave the copies out, or --set stages.{name}.copies=collapse",
                ),
            )


CHECKS: tuple[Callable[[Whole], Iterator[Named]], ...] = (
    files_are_there,
    what_is_to_come_is_told,
    disk_holds_everything,
    host_memory_holds_what_is_made,
    the_card_holds_what_is_looked_at,
    answers_fit,
    experts_are_no_copies,
)


def examine_stages(whole: Whole) -> list[Named]:
    return [found for check in CHECKS for found in check(whole)]


def of_stage(name: str, finding: Finding) -> Finding:
    """Of a training that is a stage: its keys stand under the stage's name."""

    def prefixed(match: re.Match[str]) -> str:
        return f"--set {match[1]}stages.{name}.{match[2]}" if match[2] in _KEYS else match[0]

    return replace(finding, remedy=_SET.sub(prefixed, finding.remedy))
