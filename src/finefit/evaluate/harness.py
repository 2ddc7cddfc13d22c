"""`python -m finefit.evaluate.harness REQUEST.json`: tasks of lm-evaluation-harness, by its own package in a process of its own, as one record.

Its samples become items, and intervals are computed from those as for every task. A metric that is no mean of its samples keeps the harness's own
figure, with what it calls its standard error, and a warning says so.
"""

import importlib.util
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from finefit import __version__
from finefit.artifacts.evaluations import EvalFailure, EvalItem, EvalRequest, EvalResult, Score
from finefit.artifacts.launcher import on_stop_signals, when_launcher_ends
from finefit.artifacts.records import Failure, read_record, write_record
from finefit.artifacts.rundir import StageDir
from finefit.errors import FinefitError, Interrupted, RunError
from finefit.evaluate.score import score_of
from finefit.facts.machine import read_version
from finefit.model.adapter_files import WEIGHTS as ADAPTER
from finefit.model.load import base_bits, starting_adapter
from finefit.model.locate import locate_start
from finefit.spec.tasks import LmEval
from finefit.stats import cautions
from finefit.stats.metrics import Metric

log = logging.getLogger("finefit")
REMEDY = "pip install 'finefit[lm-eval]'"
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_CLOSE = 1e-6
_NORMAL = 1.96
_TAIL_LINES = 15


def evaluate(where: StageDir, request: EvalRequest, folder: Path) -> EvalResult:
    """`folder`: of the request, where task files of the user's own lie too."""
    assert isinstance(request.evaluation.task, LmEval)
    if importlib.util.find_spec("lm_eval") is None:
        raise RunError(f"{request.evaluation.label} needs lm-eval, which is not installed", REMEDY)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="finefit-lm-eval-") as scratch:
        output, own = Path(scratch) / "output", request.evaluation.task.folder
        _run(command_of(where, request, folder, output), cwd=Path(scratch) if own is None else folder / own)
        told = read_output(output)
    return replace(make_result(request, told), seconds=time.perf_counter() - began)


def command_of(where: StageDir, request: EvalRequest, folder: Path, output: Path) -> list[str]:
    subject, settings, task = request.subject, request.evaluation, request.evaluation.task
    assert isinstance(task, LmEval)
    model = {"tokenizer": str(where.tokenizer), "dtype": _DTYPES[subject.precision]} | _weights(where, request)
    words = [
        sys.executable,
        "-P",
        "-m",
        "finefit.evaluate.harness_child",
        str(os.getpid()),
        "--model",
        "hf",
        "--model_args",
        ",".join(f"{k}={v}" for k, v in model.items()),
    ]
    words += [
        "--tasks",
        ",".join(task.tasks),
        "--device",
        subject.device,
        "--batch_size",
        str(request.room.rows),
        "--seed",
        str(subject.seed),
    ]
    words += ["--output_path", str(output), "--log_samples"]
    words += ["--num_fewshot", str(task.shots)] if task.shots is not None else []
    words += ["--limit", str(settings.limit)] if settings.limit is not None else []
    words += ["--include_path", str(folder / task.folder)] if task.folder is not None else []
    return words + (["--apply_chat_template"] if subject.template == "chat" else [])


def _weights(where: StageDir, request: EvalRequest) -> dict[str, str]:
    """The model, and an adapter over it: a checkpoint's, or the one that training went on from."""
    subject, run = request.subject, where.run
    located = locate_start(subject.model, subject.tuning, run)
    if located.fingerprint != subject.model_fingerprint:
        raise RunError(f"the model {subject.model_name} has changed since this run began")
    path = None if subject.weights is None else (run / subject.weights).resolve()
    adapter = (
        path
        if path is not None and (path / ADAPTER).exists()
        else starting_adapter(subject.tuning, run)
        if path is None
        else None
    )
    bits = base_bits(subject.tuning)
    found = {"pretrained": str((located.folder if path is None or adapter is not None else path).resolve())}
    found |= {"peft": str(adapter.resolve())} if adapter is not None else {}
    return found | ({f"load_in_{bits}bit": "True"} if bits is not None else {})


def _run(command: list[str], *, cwd: Path) -> None:
    """Its words go to the log as they come; it ends with us. `cwd`: where task files name data by relative paths, these start there."""
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    tail: list[str] = []
    pipe, none = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(
        command,
        stdin=none,
        stdout=pipe,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        cwd=cwd,
    ) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                print(line, end="", flush=True)
                tail = [*tail[1 - _TAIL_LINES :], line.rstrip()]
        except BaseException:
            child.terminate()
            raise
    if child.returncode != 0:
        raise RunError(
            "lm-eval ended with code {}. Its last words:\n{}".format(child.returncode, "\n".join(tail)),
            "see logs/run.log",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What lm-eval has written."""

    results: Mapping[str, Mapping[str, Any]]
    """By task: `metric,filter` and `metric_stderr,filter`."""
    samples: Mapping[str, list[dict[str, Any]]]
    available: int
    better: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)


def read_output(folder: Path) -> Told:
    found = sorted(folder.rglob("results_*.json"))
    if not found:
        raise RunError("lm-eval left no results", "see logs/run.log")
    document = json.loads(found[-1].read_bytes())
    samples = {task: _lines(path) for task in document["results"] for path in _files_of(folder, task)[-1:]}
    counts = document.get("n-samples", {})
    return Told(
        results=document["results"],
        samples=samples,
        available=sum(
            int(counts.get(task, {}).get("original", len({line["doc_id"] for line in lines})))
            for task, lines in samples.items()
        ),
        better=document.get("higher_is_better", {}),
        versions=document.get("versions", {}),
    )


def _files_of(folder: Path, task: str) -> list[Path]:
    """The time behind its name tells a task from one whose name goes on. A group of tasks has none: its tasks have."""
    name = re.compile(rf"samples_{re.escape(task)}_\d{{4}}-\d\d-\d\dT.*\.jsonl")
    return sorted(path for path in folder.rglob("samples_*.jsonl") if name.fullmatch(path.name))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figure:
    """One metric of one task as it was reported."""

    name: str
    task: str
    metric: str
    filter: str
    value: float
    error: float | None

    def of(self, line: Mapping[str, Any]) -> float | None:
        """A sample's own, where it is a number."""
        value = line.get(self.metric) if line.get("filter", "none") == self.filter else None
        return float(value) if isinstance(value, (int, float)) else None


def _figures(told: Told) -> Iterator[_Figure]:
    for task, values in told.results.items():
        for key, value in values.items():
            metric, comma, how = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = values.get(f"{metric}_stderr,{how}")
            name = metric if how == "none" else f"{metric}_{how}"
            known = error if isinstance(error, (int, float)) and math.isfinite(error) else None
            yield _Figure(
                name=name if len(told.results) == 1 else f"{task}.{name}",
                task=task,
                metric=metric,
                filter=how,
                value=value,
                error=known,
            )


def make_result(request: EvalRequest, told: Told) -> EvalResult:
    """Of a sample every metric has a count, and how many of it there are: items of one task say nothing of another's."""
    figures = list(_figures(told))
    if not figures:
        raise RunError("lm-eval reported no figure", "see logs/run.log")
    items = _items(told, figures)
    means = [figure for figure in figures if _is_mean(figure, items)]
    definitions = tuple(_metric(figure, told, items) for figure in means)
    metrics = {metric.name: score_of(metric, items) for metric in definitions}
    others = [figure for figure in figures if figure.name not in metrics]
    return EvalResult(
        task=request.evaluation.label,
        checkpoint=request.checkpoint,
        n=len(items),
        available=told.available,
        coverage=1.0 if items else 0.0,
        metrics=metrics | {figure.name: _as_reported(figure) for figure in others},
        definitions=definitions,
        signature=_signature(request, told),
        warnings=(*_sample_words(request, told, len(items)), *_few_words(told), *map(_reported_words, others)),
        seconds=0.0,
        items=tuple(items),
    )


def _count_of(figure: _Figure) -> str:
    return f"{figure.name} items"


def _items(told: Told, figures: list[_Figure]) -> list[EvalItem]:
    found: dict[tuple[str, Any], EvalItem] = {}
    zeros = {name: 0.0 for figure in figures for name in (figure.name, _count_of(figure))}
    for task, lines in told.samples.items():
        own = [figure for figure in figures if figure.task == task]
        for line in lines:
            key = (task, line["doc_id"])
            before = found.get(key) or _item(len(found), task, line, zeros)
            scores = {figure.name: value for figure in own if (value := figure.of(line)) is not None}
            counted = {_count_of(figure): 1.0 for figure in own if figure.name in scores}
            found[key] = replace(before, counts=before.counts | scores | counted, scores=before.scores | scores)
    return list(found.values())


def _item(at: int, task: str, line: Mapping[str, Any], counts: dict[str, float]) -> EvalItem:
    return EvalItem(
        item=at,
        key=str(line.get("doc_hash", f"{task} {line['doc_id']}"))[:16],
        place=f"{task}:{line['doc_id']}",
        prompt=_prompt(line.get("arguments")),
        reference=str(line.get("target", "")),
        answer=_plain(line.get("filtered_resps", line.get("resps"))),
        extracted=None,
        counts=dict(counts),
        scores={},
        failure=None,
    )


def _prompt(arguments: Any) -> str:
    """The first text of the first request, however this version nests them."""
    while isinstance(arguments, (dict, list)):
        if not arguments:
            return ""
        arguments = next(iter(arguments.values())) if isinstance(arguments, dict) else arguments[0]
    return str(arguments)


def _plain(value: Any) -> str:
    if isinstance(value, list) and len(value) == 1:
        return _plain(value[0])
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _values(figure: _Figure, items: list[EvalItem]) -> list[float]:
    return [item.counts[figure.name] for item in items if item.counts[_count_of(figure)]]


def _is_mean(figure: _Figure, items: list[EvalItem]) -> bool:
    values = _values(figure, items)
    return bool(values) and abs(sum(values) / len(values) - figure.value) < _CLOSE


def _metric(figure: _Figure, told: Told, items: list[EvalItem]) -> Metric:
    values, is_up = _values(figure, items), told.better.get(figure.task, {}).get(figure.metric, True)
    unit, better = "share" if all(0 <= value <= 1 for value in values) else "number", "higher" if is_up else "lower"
    about: dict[str, Any] = {"name": figure.name, "unit": unit, "better": better}
    if len(values) == len(items) and set(values) <= {0.0, 1.0}:
        return Metric(aggregate="rate", counts=(figure.name,), **about)
    return Metric(aggregate="ratio", counts=(figure.name, _count_of(figure)), **about)


def _as_reported(figure: _Figure) -> Score:
    """Where no standard error is known, its interval has no ends."""
    error = math.inf if figure.error is None else _NORMAL * figure.error
    return Score(value=figure.value, low=figure.value - error, high=figure.value + error)


def _sample_words(request: EvalRequest, told: Told, n: int) -> Iterator[str]:
    if (limit := request.evaluation.limit) is not None and n < told.available:
        yield f"{n} of {told.available} items: lm-eval takes the first {limit} of each task, which is no random sample"


def _few_words(told: Told) -> Iterator[str]:
    """Of each task with its own samples."""
    counts = {task: len({line["doc_id"] for line in lines}) for task, lines in told.samples.items()}
    for task, n in counts.items():
        yield from (words if len(counts) == 1 else f"{task}: {words}" for words in (cautions(n) if n else ()))


def _reported_words(figure: _Figure) -> str:
    known = (
        f"its interval is {_NORMAL} x the standard error that lm-eval reports"
        if figure.error is not None
        else "it has no interval"
    )
    return f"{figure.name} is no mean of samples and stands as lm-eval reports it; {known}"


def _signature(request: EvalRequest, told: Told) -> dict[str, str]:
    task = request.evaluation.task
    assert isinstance(task, LmEval)
    packages = {name: str(read_version(name)) for name in ("lm-eval", "torch", "transformers", "peft")}
    shots = "as the task says" if task.shots is None else str(task.shots)
    tasks = ", ".join(f"{name} v{told.versions[name]}" if name in told.versions else name for name in task.tasks)
    template = "applied" if request.subject.template == "chat" else "not applied"
    about = {"tasks": tasks, "shots": shots, "chat template": template, "precision": request.subject.precision}
    return {"finefit": __version__} | packages | about


def _stop(number: int, _: FrameType | None) -> None:
    raise Interrupted(f"stopped by {signal.Signals(number).name}")


def work(path: Path) -> int:
    """The exit code; the reason of a failure is in a record of its own."""
    where, request = StageDir(path.parents[2]), read_record(path, EvalRequest)
    paths = where.evaluation(request.evaluation.label, request.checkpoint, request.evaluation.limit)
    paths.failure.unlink(missing_ok=True)
    heeded = on_stop_signals(_stop)
    try:
        when_launcher_ends(lambda: os.kill(os.getpid(), signal.SIGTERM))
        write_record(paths.result, evaluate(where, request, path.parent))
    except FinefitError as error:
        for number in heeded:  # one stop is enough
            signal.signal(number, signal.SIG_IGN)
        log.error("%s", error)
        write_record(paths.failure, EvalFailure(failure=Failure.of(error)))
        return error.exit_code
    return 0


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
    sys.exit(work(Path(sys.argv[1]).resolve()))


if __name__ == "__main__":
    main()
