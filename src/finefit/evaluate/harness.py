"""Runs tasks of lm-evaluation-harness with its own package, in a process of its own, and writes one record. Entry
point: `python -m finefit.evaluate.harness REQUEST.json`. Intervals are computed from its samples as for every task. A
metric that is not a mean of its samples keeps the figure and the standard error that lm-eval reports, and a warning
says so."""

import importlib.util
import json
import logging
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from finefit import __version__
from finefit.artifacts.atomic import read_lines
from finefit.artifacts.reading import read_document
from finefit.artifacts.records import write_record
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.stage_records import EvalItem, EvalRequest, EvalResult, Score
from finefit.data.render import open_renderer
from finefit.data.rows import Message
from finefit.errors import DataError, RunError
from finefit.evaluate.score import score_of
from finefit.evaluate.worker import exit_code_of, read_job
from finefit.facts.machine import read_version
from finefit.model.load import base_bits, starting_adapter
from finefit.model.resolve_model import ADAPTER_WEIGHTS, resolve_start
from finefit.spec.tasks import LmEval
from finefit.stats.metrics import Metric, cautions

_SEE_LOG = "see logs/run.log"
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_CLOSE, _NORMAL, _TAIL_LINES = 1e-6, 1.96, 15


def evaluate(where: StageDir, request: EvalRequest, folder: Path) -> EvalResult:
    """`folder` is that of the request, which also holds a user's own task files."""
    if importlib.util.find_spec("lm_eval") is None:
        problem = f"{request.evaluation.label} needs lm-eval, which is not installed"
        raise RunError(problem, "pip install 'finefit[lm-eval]'")
    if request.subject.template == "chat":
        require_bounded_template(where.tokenizer)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="finefit-lm-eval-") as scratch:
        output = Path(scratch) / "output"
        own = _task_of(request).folder
        _run(command_of(where, request, folder, output), cwd=Path(scratch) if own is None else folder / own)
        found = read_output(output)
    return replace(make_result(request, found), seconds=time.perf_counter() - began)


def _task_of(request: EvalRequest) -> LmEval:
    assert isinstance(request.evaluation.task, LmEval)
    return request.evaluation.task


def require_bounded_template(tokenizer: Path) -> None:
    """lm-eval renders the chat template in its own process, without limits. One that loops or fills the memory is found
    before, on conversations such as lm-eval's: a question, with a system message, and after another turn."""
    asked, answered = Message("user", "What is 2 + 2?"), Message("assistant", "4")
    renderer = open_renderer(tokenizer, "chat")
    renderer.prompt_tokens([asked])
    for messages in ([Message("system", "Answer."), asked], [asked, answered, asked]):
        with suppress(DataError):  # a template may refuse such a conversation, and lm-eval says so
            renderer.prompt_tokens(messages)


def command_of(where: StageDir, request: EvalRequest, folder: Path, output: Path) -> list[str]:
    subject, task, run = request.subject, _task_of(request), where.run
    resolved = resolve_start(subject.model, subject.tuning, run)
    if resolved.fingerprint != subject.model_fingerprint:
        raise RunError(f"the model {subject.model_name} has changed since this run began")
    # an adapter over the model: a checkpoint's, or the one that training went on from
    pretrained, adapter = resolved.folder, starting_adapter(subject.tuning, run)
    if subject.weights is not None:
        path = run / subject.weights
        pretrained, adapter = (pretrained, path) if (path / ADAPTER_WEIGHTS).exists() else (path, None)
    model: dict[str, object] = {"tokenizer": where.tokenizer, "dtype": _DTYPES[subject.precision]}
    model["pretrained"] = pretrained.resolve()
    if adapter is not None:
        model["peft"] = adapter.resolve()
    if (bits := base_bits(subject.tuning)) is not None:
        model[f"load_in_{bits}bit"] = "True"
    options: dict[str, object] = {
        "model": "hf",
        "model_args": ",".join(f"{key}={value}" for key, value in model.items()),
        "tasks": ",".join(task.tasks),
        "device": subject.device,
        "batch_size": request.batch_limit.rows,
        "seed": subject.seed,
        "output_path": output,
        "num_fewshot": task.shots,
        "limit": request.evaluation.limit,
        "include_path": None if task.folder is None else folder / task.folder,
    }
    command = [sys.executable, "-P", "-m", "finefit.artifacts.processes", str(os.getpid()), "lm_eval"]
    for name, value in options.items():
        command += [] if value is None else [f"--{name}", str(value)]
    return [*command, "--log_samples", *(["--apply_chat_template"] if subject.template == "chat" else [])]


def _run(command: list[str], *, cwd: Path) -> None:
    """Writes its output to the log as it comes; the child ends with this process. `cwd` is the folder that relative
    data paths in task files start from."""
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    tail: list[str] = []
    with subprocess.Popen(command, text=True, errors="replace", env=environment, cwd=cwd, **streams) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                print(line, end="", flush=True)
                tail = [*tail[1 - _TAIL_LINES :], line.rstrip()]
        except BaseException:
            child.terminate()
            raise
    if child.returncode != 0:
        lines = "\n".join(tail)
        raise RunError(f"lm-eval ended with code {child.returncode}. Its last lines:\n{lines}", _SEE_LOG)


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessOutput:
    results: Mapping[str, Mapping[str, Any]]
    """Values of `metric,filter` and `metric_stderr,filter`, by task."""
    samples: Mapping[str, list[dict[str, Any]]]
    available: int
    better: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)


def read_output(folder: Path) -> HarnessOutput:
    if not (written := sorted(folder.rglob("results_*.json"))):
        raise RunError("lm-eval left no results", _SEE_LOG)
    document, samples = read_document(written[-1]), dict[str, list[dict[str, Any]]]()
    for task in document["results"]:
        # the time after its name tells a task from one with a longer name; a group of tasks has no file of its own
        name = re.compile(rf"samples_{re.escape(task)}_\d{{4}}-\d\d-\d\dT.*\.jsonl")
        for path in sorted(path for path in folder.rglob("samples_*.jsonl") if name.fullmatch(path.name))[-1:]:
            samples[task] = list(read_lines(path))
    counts = document.get("n-samples", {})
    available = [int(counts.get(task, {}).get("original", _num_items(lines))) for task, lines in samples.items()]
    return HarnessOutput(
        results=document["results"],
        samples=samples,
        available=sum(available),
        better=document.get("higher_is_better", {}),
        versions=document.get("versions", {}),
    )


def _num_items(lines: list[dict[str, Any]]) -> int:
    return len({line["doc_id"] for line in lines})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figure:
    name: str
    task: str
    metric: str
    filter: str
    value: float
    error: float | None

    @property
    def count(self) -> str:
        """The name of its item count. Every task has its own, because tasks have different items."""
        return f"{self.name} items"

    def of(self, line: Mapping[str, Any]) -> float | None:
        """The metric's value of one sample, if it is a number."""
        value = line.get(self.metric) if line.get("filter", "none") == self.filter else None
        return float(value) if isinstance(value, (int, float)) else None

    def values(self, items: list[EvalItem]) -> list[float]:
        return [item.counts[self.name] for item in items if item.counts[self.count]]

    def is_mean(self, items: list[EvalItem]) -> bool:
        values = self.values(items)
        return bool(values) and abs(sum(values) / len(values) - self.value) < _CLOSE


def _figures(found: HarnessOutput) -> Iterator[_Figure]:
    for task, values in found.results.items():
        for key, value in values.items():
            metric, comma, how = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = values.get(f"{metric}_stderr,{how}")
            known = error if isinstance(error, (int, float)) and math.isfinite(error) else None
            name = metric if how == "none" else f"{metric}_{how}"
            name = name if len(found.results) == 1 else f"{task}.{name}"
            yield _Figure(name=name, task=task, metric=metric, filter=how, value=value, error=known)


def make_result(request: EvalRequest, found: HarnessOutput) -> EvalResult:
    if not (figures := list(_figures(found))):
        raise RunError("lm-eval reported no figure", _SEE_LOG)
    items = _items(found, figures)
    means = [figure for figure in figures if figure.is_mean(items)]
    others = [figure for figure in figures if figure not in means]
    definitions = [_metric(figure, found, items) for figure in means]
    metrics = {metric.name: score_of(metric, items) for metric in definitions}
    for figure in others:  # as reported; without a standard error its interval is infinite
        error = math.inf if figure.error is None else _NORMAL * figure.error
        metrics[figure.name] = Score(value=figure.value, low=figure.value - error, high=figure.value + error)
    return EvalResult(
        task=request.evaluation.label,
        checkpoint=request.checkpoint,
        n=len(items),
        available=found.available,
        coverage=1.0 if items else 0.0,
        metrics=metrics,
        definitions=tuple(definitions),
        signature=_signature(request, found),
        warnings=tuple(_warnings(request, found, len(items), others)),
        seconds=0.0,
        items=tuple(items),
    )


def _items(found: HarnessOutput, figures: list[_Figure]) -> list[EvalItem]:
    items: dict[tuple[str, Any], EvalItem] = {}
    zeros = {name: 0.0 for figure in figures for name in (figure.name, figure.count)}
    for task, lines in found.samples.items():
        own = [figure for figure in figures if figure.task == task]
        for line in lines:
            key = (task, line["doc_id"])
            before = items.get(key) or EvalItem(
                item=len(items),
                key=str(line.get("doc_hash", f"{task} {line['doc_id']}"))[:16],
                place=f"{task}:{line['doc_id']}",
                prompt=_prompt(line.get("arguments")),
                reference=str(line.get("target", "")),
                answer=_plain(line.get("filtered_resps", line.get("resps"))),
                extracted=None,
                counts=zeros,
                scores={},
                failure=None,
            )
            scores = {figure.name: value for figure in own if (value := figure.of(line)) is not None}
            counted = {figure.count: 1.0 for figure in own if figure.name in scores}
            items[key] = replace(before, counts=before.counts | scores | counted, scores=before.scores | scores)
    return list(items.values())


def _prompt(arguments: Any) -> str:
    """The first text of the first request, however this version nests requests."""
    while isinstance(arguments, (dict, list)):
        if not arguments:
            return ""
        arguments = next(iter(arguments.values())) if isinstance(arguments, dict) else arguments[0]
    return str(arguments)


def _plain(value: Any) -> str:
    if isinstance(value, list) and len(value) == 1:
        return _plain(value[0])
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _metric(figure: _Figure, found: HarnessOutput, items: list[EvalItem]) -> Metric:
    values, is_higher = figure.values(items), found.better.get(figure.task, {}).get(figure.metric, True)
    about: dict[str, Any] = {
        "name": figure.name,
        "unit": "share" if all(0 <= value <= 1 for value in values) else "number",
        "better": "higher" if is_higher else "lower",
    }
    if len(values) == len(items) and set(values) <= {0.0, 1.0}:
        return Metric(aggregate="rate", counts=(figure.name,), **about)
    return Metric(aggregate="ratio", counts=(figure.name, figure.count), **about)


def _warnings(request: EvalRequest, found: HarnessOutput, n: int, others: list[_Figure]) -> Iterator[str]:
    if (limit := request.evaluation.limit) is not None and n < found.available:
        yield f"{n} of {found.available} items: lm-eval takes the first {limit} of each task, not a random sample"
    for task, lines in found.samples.items():
        cautious = cautions(_num_items(lines)) if lines else ()
        yield from cautious if len(found.samples) == 1 else (f"{task}: {words}" for words in cautious)
    for figure in others:
        interval = f"its interval is {_NORMAL} x the standard error that lm-eval reports"
        known = interval if figure.error is not None else "it has no interval"
        yield f"{figure.name} is not a mean of samples and is shown as lm-eval reports it; {known}"


def _signature(request: EvalRequest, found: HarnessOutput) -> dict[str, str]:
    task, versions = _task_of(request), found.versions
    packages = {name: str(read_version(name)) for name in ("lm-eval", "torch", "transformers", "peft")}
    return {
        "finefit": __version__,
        **packages,
        "tasks": ", ".join(f"{name} v{versions[name]}" if name in versions else name for name in task.tasks),
        "shots": "as the task says" if task.shots is None else str(task.shots),
        "chat template": "applied" if request.subject.template == "chat" else "not applied",
        "precision": request.subject.precision,
    }


def work(path: Path) -> int:
    job = read_job(path)

    def act() -> None:
        write_record(job.paths.result, evaluate(job.where, job.request, path.parent))

    return exit_code_of(act, job.paths.failure)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
    sys.exit(work(Path(sys.argv[1]).resolve()))


if __name__ == "__main__":
    main()
