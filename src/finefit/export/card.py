"""The README.md of an export: what was trained, on what, how well it does, how the export was proved, how to load it.

Made from the run's records alone. It is published, so it holds no rows, no path of this machine and no host."""

import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import PurePosixPath
from typing import Any

from ruamel.yaml import YAML

from finefit.artifacts.atomic import read_lines
from finefit.artifacts.export_records import ExportedFormat, ExportReport
from finefit.artifacts.forecasts import Plan
from finefit.artifacts.reading import is_there
from finefit.artifacts.records import Facts, Levers, read_if_there, read_or_none, read_record
from finefit.artifacts.rundir import RunDir, StageDir
from finefit.artifacts.stage_records import EvalResult, SourceLedger, Stage, StageResult
from finefit.export.push import redacted
from finefit.export.subject import ExportSubject
from finefit.facts.machine import Machine
from finefit.facts.servers import vllm_rank
from finefit.stats.intervals import Interval
from finefit.stats.metrics import Metric

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PATH = re.compile(r"(?<![\w.:/])(?:~|[A-Za-z]:)?[/\\](?:[^\s/\\\"'`|,<>]+[/\\])+([^\s/\\\"'`|,<>]+)")
"""An absolute path; its last part says enough."""
_SETTINGS = (
    "seed",
    "precision",
    "objective.",
    "tuning.",
    "optimizer.",
    "schedule.",
    "global_batch",
    "engine.",
    "data.",
)
_PRIVATE = re.compile(r"(^|[._])(path|file|config|adapter|train|validation|test|task|root|images_root)($|[._])")
_REPO = "owner/name"
_NAMES = {"sft": "supervised fine-tuning", "dpo": "preference training (DPO)"}


def model_card(report: ExportReport, run: RunDir | None, subject: ExportSubject) -> str:
    """`run`: of one training; None for a model that finefit has not trained."""
    where = subject.where
    stage = None if run is None or where is None else read_record(where.stage, Stage)
    parts = [_title(report, stage, subject)]
    if run is not None and where is not None and stage is not None:
        parts += [_scores(where, report.checkpoint), _data(where), _training(run, where, stage), _settings(run, stage)]
    parts += [_proof(report), _loading(report, subject), _origin(report)]
    body = "\n\n".join(part for part in parts if part)
    return redacted(f"---\n{_front_matter(report, stage, subject)}---\n\n{_without_paths(body)}\n")


def _front_matter(report: ExportReport, stage: Stage | None, subject: ExportSubject) -> str:
    kinds, base = _kinds(report), _hub_id(report.base)
    values: dict[str, Any] = {}
    if base is not None:
        values |= {"base_model": base, "base_model_relation": _relation(report, kinds)}
    if "merged" in kinds:
        values["library_name"] = "transformers"
    else:
        values["library_name"] = "peft" if "adapter" in kinds else "gguf"
    sees = subject.renderer.image_processor is not None
    values["pipeline_tag"] = "image-text-to-text" if sees else "text-generation"
    if report.base_license is not None:
        values["license"] = report.base_license
    trained = [] if stage is None else [stage.tuning.kind, stage.objective.kind]
    gguf = ["gguf"] if kinds & {"gguf", "gguf-lora"} else []
    values["tags"] = list(dict.fromkeys(["finefit", *trained, *gguf]))
    text, yaml = io.StringIO(), YAML()
    yaml.default_flow_style = False
    yaml.dump(values, text)
    return text.getvalue()


def _relation(report: ExportReport, kinds: set[str]) -> str:
    if "merged" in kinds or report.adapter is None:
        return "finetune"
    return "adapter" if kinds & {"adapter", "gguf-lora"} else "quantized"


def _kinds(report: ExportReport) -> set[str]:
    return {one.format.partition(":")[0] for one in report.exports}


def _hub_id(base: str) -> str | None:
    return base if _HUB_ID.fullmatch(base) and ".." not in base else None


def _shown_base(base: str) -> str:
    found = _hub_id(base)
    return f"[{found}](https://huggingface.co/{found})" if found else f"`{PurePosixPath(base).name or 'a local model'}`"


def _title(report: ExportReport, stage: Stage | None, subject: ExportSubject) -> str:
    lines = [f"# {report.name}", "", f"{_what(report)}, {_how(stage)}.".replace(", .", ".")]
    if report.bits is not None:
        lines.append(f"It was trained against weights in {report.bits} bits.")
    if report.template is None:
        lines.append("It is prompted with plain text; it has no chat template.")
    stops = ", ".join(f"`{text}`" for text in subject.stop_texts)
    lines.append(f"An answer ends at {stops}.")
    return "\n".join(lines)


def _what(report: ExportReport) -> str:
    adapter, base = report.adapter, _shown_base(report.base)
    if adapter is None:
        return f"{report.parameters:,} parameters, fine-tuned from {base}"
    kind = "DoRA" if adapter.dora else "LoRA"
    return f"A {kind} adapter of rank {adapter.rank} and alpha {adapter.alpha:g} on {base}"


def _how(stage: Stage | None) -> str:
    return "" if stage is None else f"made by {_NAMES.get(stage.objective.kind, stage.objective.kind)}"


def _scores(where: StageDir, checkpoint: str | None) -> str:
    """Of the exported checkpoint beside the base, on the same items."""
    found: dict[str, dict[str, EvalResult]] = {}
    for paths in where.evaluations():
        result = read_or_none(paths.result, EvalResult) if is_there(paths.result) else None
        if result is not None and result.checkpoint in ("base", checkpoint):
            found.setdefault(result.task, {})[result.checkpoint] = result
    rows = [row for task, results in found.items() for row in _score_rows(task, results, checkpoint)]
    if not rows:
        return ""
    table = _table(("task", "metric", "items", "base", "this model"), rows)
    return f"## Scores\nOn held-out items, with 95 % intervals. Every item counts.\n\n{table}"


def _score_rows(task: str, results: dict[str, EvalResult], checkpoint: str | None) -> Iterator[tuple[str, ...]]:
    own, base = results.get(checkpoint or ""), results.get("base")
    if own is None:
        return
    units: dict[str, Metric] = {metric.name: metric for metric in own.definitions}
    for name, score in own.metrics.items():
        other = None if base is None or base.n != own.n else base.metrics.get(name)
        unit = units[name].unit if name in units else "number"
        values = [_value(one.value, one.low, one.high, unit) if one is not None else "" for one in (other, score)]
        yield task, name, f"{own.n:,}", *values


def _value(value: float, low: float, high: float, unit: str) -> str:
    form = {"share": "{:.1%}", "points": "{:.1f}"}.get(unit, "{:.4g}").format
    return f"{form(value)} ({form(low)} to {form(high)})"


def _data(where: StageDir) -> str:
    sources = read_lines(where.ledger, SourceLedger, where=lambda entry: "read" in entry)
    rows = [
        (one.split, _source(one.source), f"{one.used:,}", f"{one.tokens:,}", f"{one.supervised_tokens:,}")
        for one in sources
    ]
    return f"## Data\n{_table(('split', 'source', 'rows', 'tokens', 'supervised tokens'), rows)}" if rows else ""


def _source(name: str) -> str:
    """A data set of the hub in full, a file by its name."""
    return name if name.startswith("hf://") else PurePosixPath(name).name


def _training(run: RunDir, where: StageDir, stage: Stage) -> str:
    lines, result = [f"{stage.total_steps:,} steps of {stage.global_batch:,} rows"], None
    if is_there(where.result):
        result = read_record(where.result, StageResult)
        share = result.trainable_parameters / max(1, result.parameters)
        lines = [f"{result.step:,} of {stage.total_steps:,} steps of {stage.global_batch:,} rows"]
        lines.append(f"{result.trainable_parameters:,} of {result.parameters:,} parameters trained ({share:.2%})")
        lines.append(f"{result.tokens:,} tokens in {_duration(result.seconds)}")
        lines.append(f"peak memory {result.peak_bytes / 2**30:.2f} GiB")
    facts = read_if_there(run.facts, Facts)
    if facts is not None:
        lines.append(f"on {_hardware(facts.machine, stage.device)}, in {stage.precision}")
    return "## Training\n" + "\n".join(f"- {line}" for line in lines)


def _hardware(machine: Machine, device: str) -> str:
    if device == "cpu" or not machine.cards:
        return f"{machine.cpu_model} with {machine.num_cores} cores"
    return ", ".join(dict.fromkeys(card.name for card in machine.cards))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _settings(run: RunDir, stage: Stage) -> str:
    """Those that were chosen; all others have finefit's defaults."""
    plan = read_if_there(run.plan, Plan)
    values = {} if plan is None else plan.stages.get(stage.name, {})
    chosen = {
        key: resolved.value
        for key, resolved in values.items()
        if resolved.source == "spec" and key.startswith(_SETTINGS) and not _PRIVATE.search(key)
    }
    usual = Levers(micro_batch=0)
    levers = {field.name: getattr(stage.levers, field.name) for field in fields(Levers)}
    pulled = {f"levers.{name}": value for name, value in levers.items() if value != getattr(usual, name)}
    rows = [(f"`{key}`", f"`{_written(value)}`") for key, value in {**chosen, **pulled}.items()]
    note = "Those that differ from the defaults. Levers change memory and speed, not the gradient."
    return f"## Settings\n{note}\n\n{_table(('setting', 'value'), rows)}" if rows else ""


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _proof(report: ExportReport) -> str:
    origin = {"test": "held-out prompts of the run", "validation": "validation prompts of the run"}
    prompts = origin.get(report.prompts_from, "neutral prompts")
    rows = [_proof_row(one) for one in report.exports]
    compared = f"({report.answer_tokens:,} answer tokens, {report.computed_in}), with 95 % intervals."
    how = [
        "Each file was loaded by another program and compared with the trained model on",
        f"{report.prompts} {prompts} {compared}",
    ]
    if report.computed_in is None:
        how = [
            "The files were compared with those of the training. No program has loaded them:",
            "there was too little memory.",
        ]
    head = ("format", "loaded by", "KL per token, nats", "same top token", "template", "stop tokens")
    lines = [
        "## Proof",
        *how,
        "",
        _table(head, rows),
    ]
    for one in report.exports:
        lines += [f"\n`{one.format}` was published although {problem}" for problem in one.problems]
    if scores := [_task_row(one) for one in report.exports if one.score is not None]:
        lines += ["", _table(("format", "task", "trained model", "this file"), scores)]
    return "\n".join(lines)


def _proof_row(one: ExportedFormat) -> tuple[str, ...]:
    if one.distance is None:
        return one.format, one.loaded_by, "not loaded", "", "", ""
    kl, agreement = one.distance.kl, one.distance.agreement
    divergence = f"{kl.value:.2g} ({kl.low:.2g} to {kl.high:.2g})"
    same = [_equal(one.template_is_equal), _equal(one.stops_are_equal)]
    return one.format, one.loaded_by, divergence, _percent(agreement), *same


def _task_row(one: ExportedFormat) -> tuple[str, ...]:
    assert one.score is not None
    name = f"{one.score.task}, {one.score.metric}"
    return one.format, name, _percent(one.score.trained), _percent(one.score.exported)


def _percent(interval: Interval) -> str:
    return _value(interval.value, interval.low, interval.high, "share")


def _equal(is_equal: bool | None) -> str:
    return "" if is_equal is None else "equal" if is_equal else "differs"


def _loading(report: ExportReport, subject: ExportSubject) -> str:
    blocks: dict[str, str] = {}
    for one in report.exports:
        match one.format.partition(":")[0]:
            case "adapter":
                blocks |= _load_adapter(report, one.path)
            case "merged":
                blocks |= _load_merged(one.path, sees=subject.renderer.image_processor is not None)
            case "gguf":
                blocks |= _load_gguf(one.path)
            case "gguf-lora":
                blocks |= {"llama.cpp, as an adapter": f"llama-cli -m BASE.gguf --lora {PurePosixPath(one.path).name}"}
    written = (f"{name}:\n\n{_indented(code)}" for name, code in blocks.items())
    intro = f"Write the name of this repository for `{_REPO}`."
    return "\n\n".join([f"## Use\n{intro}", *written]) if blocks else ""


def _load_adapter(report: ExportReport, path: str) -> dict[str, str]:
    base, inside = _hub_id(report.base) or "BASE", _subfolder(path)
    lines = [
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{_REPO}"{inside})',
        f'model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "{_REPO}"{inside})',
    ]
    blocks = {"transformers and peft": "\n".join(lines)}
    if report.adapter is not None and report.serving.get("vLLM", "").startswith("vllm serve"):
        rank = vllm_rank(report.adapter.rank)
        command = f"vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules {report.name}={_REPO}"
        blocks["vLLM"] = command
    return blocks


def _load_merged(path: str, *, sees: bool) -> dict[str, str]:
    auto = "AutoModelForImageTextToText" if sees else "AutoModelForCausalLM"
    reader = "AutoProcessor" if sees else "AutoTokenizer"
    lines = [
        f"from transformers import {auto}, {reader}",
        "",
        f'{"processor" if sees else "tokenizer"} = {reader}.from_pretrained("{_REPO}"{_subfolder(path)})',
        f'model = {auto}.from_pretrained("{_REPO}"{_subfolder(path)})',
    ]
    served = {"vLLM, without an adapter": f"vllm serve {_REPO}"} if path == "." else {}
    return {"transformers": "\n".join(lines), **served}


def _load_gguf(path: str) -> dict[str, str]:
    file = PurePosixPath(path).name
    kind = file.removesuffix(".gguf").rpartition("-")[2].upper()
    return {
        f"llama.cpp, {file}": f"llama-cli --hf-repo {_REPO} --hf-file {path} -cnv",
        f"ollama, {file}": f"ollama run hf.co/{_REPO}:{kind}",
    }


def _subfolder(path: str) -> str:
    return "" if path == "." else f', subfolder="{path}"'


def _origin(report: ExportReport) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items() if name != "finefit")
    return f"Trained and exported with finefit {report.finefit}" + (f"; {versions}." if versions else ".")


def _indented(code: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in code.splitlines())


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    return "\n".join([line(head), f"|{'---|' * len(head)}", *map(line, rows)])


def _without_paths(text: str) -> str:
    return _PATH.sub(lambda found: found[1], text)
