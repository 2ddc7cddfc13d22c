"""The sections of a run's report, from its records: the answers that people look for first, then how it trained, what
it scores, what it was trained on, how it was set up, and where it ran."""

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from finefit.artifacts.atomic import read_lines, read_steps, read_validations
from finefit.artifacts.forecasts import Forecast, Plan
from finefit.artifacts.reading import is_there, read_text
from finefit.artifacts.records import Check, Facts, read_if_there, read_record
from finefit.artifacts.rundir import RunDir, StageDir, is_pipeline, is_run, models_of, stage_of
from finefit.artifacts.stage_records import EvalItem, EvalResult, SourceLedger, Stage, StageResult
from finefit.report.blocks import Block, Folded, Heading, Lines, Listing, Pairs, Plots
from finefit.report.forecast import card_name
from finefit.report.layout import clock, duration, gib, without_markup
from finefit.report.live import describe_event
from finefit.report.run import done_of, evals_of, states_of, status_of
from finefit.report.run_plots import TrainingLines, loss_plot, small_plots
from finefit.report.scores import best_of, format_n, format_value, main_metric
from finefit.report.stage_summary import summary_lines
from finefit.report.tables import ItemView, TableCell, TableData, TableRow

_NUM_ITEMS = 12
_MOST_EVENTS = 200
_FEW_ROWS, _MOST_ROWS = 5, 30
_USUAL = ("spec", "default")


def run_blocks(run: RunDir) -> Iterator[Block]:
    if is_pipeline(run.path):
        yield from _pipeline_blocks(run)
        return
    where = stage_of(run)
    if is_there(where.eval_stage):
        yield from _evaluation_blocks(where)
    else:
        yield from _training_blocks(run, where)
    yield from _setup_blocks(run)


def _pipeline_blocks(run: RunDir) -> Iterator[Block]:
    rows = []
    for state in states_of(run):
        done = done_of(run, state)
        held = None if done is None or done.memory is None else done.memory.peak_bytes
        taken = ("-" if done is None else clock(done.seconds), "-" if held is None else gib(held))
        rows.append((state.name, state.kind, state.status, *taken, state.reason))
    yield _table("", ("stage", "kind", "status", "time", "peak memory", "why"), rows, holds_text=True)
    for state in states_of(run):
        place, done = run.path / state.place, done_of(run, state)
        yield Heading(text=f"Stage {state.name} ({state.kind})")
        if done is not None and (lines := summary_lines(state.kind, done.summary)):
            yield Lines(lines=tuple(lines))
        if is_run(place):
            yield from _training_blocks(RunDir(place), stage_of(RunDir(place)))
        for model in models_of(place):
            yield Heading(text=model.name, level=3)
            yield from _evaluation_blocks(stage_of(RunDir(model)))
    yield Listing(title="spec.yaml", text=read_text(run.spec_yaml))


def _training_blocks(run: RunDir, where: StageDir) -> Iterator[Block]:
    training = _read_training(run, where)
    yield _answers(training)
    if training.lines.steps:
        plots = [*small_plots(training.lines)]
        yield Plots(plots=((_LOSS_CAPTION, partial(loss_plot, training.lines)),))
        yield Plots(plots=tuple(plots))
        yield _curve_table(training.lines)
    if (forecast := training.forecast) is not None:
        rows = [(phase, _size(held)) for phase, held in forecast.instants.items()]
        rows += [(f"at the peak: {purpose}", _size(held)) for purpose, held in forecast.components.items()]
        yield Folded(title="planned memory by phase", table=_table("", ("allocated", "planned"), rows))
    if told := [words for line in training.lines.events if (words := describe_event(dict(line)))]:
        rows = [(str(number), words) for number, words in enumerate(told[-_MOST_EVENTS:], start=1)]
        yield Folded(title=f"{len(told)} events", table=_table("", ("", "event"), rows, holds_text=True))
    yield from _evaluation_blocks(where)
    yield from _data_blocks(where)


_LOSS_CAPTION = "loss by step"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Training:
    status: str
    stage: Stage
    result: StageResult | None
    forecast: Forecast | None
    lines: TrainingLines
    evaluations: Sequence[EvalResult]


def _read_training(run: RunDir, where: StageDir) -> _Training:
    stage, plan = read_record(where.stage, Stage), read_if_there(run.plan, Plan)
    forecast = None if plan is None else plan.forecasts.get(stage.name)
    on_card = stage.device == "cuda" and forecast is not None
    lines = TrainingLines(
        steps=read_steps(where.metrics),
        validations=list({line["step"]: line for line in read_validations(where.metrics)}.values()),
        events=[line for line in read_lines(where.metrics) if "event" in line],
        memory=list(read_lines(where.memory)),
        planned_bytes=stage.predicted_bytes,
        budget_bytes=forecast.budget_bytes if on_card and forecast is not None else None,
        planned_tokens_per_second=None if forecast is None else forecast.tokens_per_second,
    )
    return _Training(
        status=status_of(run),
        stage=stage,
        result=read_if_there(where.result, StageResult),
        forecast=forecast,
        lines=lines,
        evaluations=evals_of(where),
    )


def _answers(training: _Training) -> Pairs:
    """What people ask of a run, with the answers."""
    questions: dict[str, Callable[[_Training], str]] = {
        "Is it done?": _progress,
        "Does it learn?": _learning,
        "Does it fit?": _memory,
        "Is it as fast as planned?": _speed,
        "Which checkpoint is best?": _best,
    }
    return Pairs(pairs=tuple((words, answer(training)) for words, answer in questions.items()))


def _size(num_bytes: int) -> str:
    return gib(num_bytes) if num_bytes >= 2**30 / 20 else f"{num_bytes / 2**20:.1f} MiB"


def _progress(training: _Training) -> str:
    steps, total = training.lines.steps, training.stage.total_steps
    done, result = (steps[-1]["step"] if steps else 0), training.result
    words = f"{training.status}: step {done:,} of {total:,}"
    if result is not None and done >= total:
        return f"{words}; {result.tokens:,} tokens in {duration(result.seconds)} since its last start"
    if steps and (seconds := statistics.fmean(line.get("seconds", 0.0) for line in steps[-20:])):
        return f"{words}; about {duration(seconds * (total - done))} of training left"
    return words


def _learning(training: _Training) -> str:
    losses = [line["loss"] for line in training.lines.steps if line.get("loss") is not None]
    if not losses:
        return "no step has been taken yet"
    tenth = max(1, len(losses) // 10)
    first, last = statistics.fmean(losses[:tenth]), statistics.fmean(losses[-tenth:])
    words = f"training loss {first:.4f} at first, {last:.4f} at last" + (" (means of a tenth)" if tenth > 1 else "")
    found = [line["validation_loss"] for line in training.lines.validations if "validation_loss" in line]
    return f"{words}; validation loss {found[0]:.4f} at first, {found[-1]:.4f} at last" if found else words


def _memory(training: _Training) -> str:
    measured = max((line.get("peak_bytes", 0) for line in training.lines.memory), default=0)
    if training.result is not None:
        measured = max(measured, training.result.peak_bytes)
    planned, forecast = training.stage.predicted_bytes, training.forecast
    words = f"peak memory {gib(measured)}, planned for {gib(planned)}" if measured else f"planned for {gib(planned)}"
    if forecast is None or training.stage.device == "cpu":
        return f"{words}, on the CPU" if training.stage.device == "cpu" else words
    return f"{words}, of {gib(forecast.budget_bytes)} on {card_name(forecast)}"


def _speed(training: _Training) -> str:
    steps, forecast = training.lines.steps, training.forecast
    speeds = [line["tokens_per_second"] for line in steps if line.get("tokens_per_second")]
    if not speeds:
        return "no step has been taken yet"
    words = f"{statistics.median(speeds):,.0f} tokens per second at the median"
    planned = None if forecast is None else forecast.tokens_per_second
    words += ", which was not planned" if planned is None else f", planned {planned:,.0f}"
    waited, total = (sum(line.get(key, 0.0) for line in steps) for key in ("wait_seconds", "seconds"))
    return f"{words}; {waited / total:.1%} of the time was spent waiting for rows" if total else words


def _best(training: _Training) -> str:
    found = []
    for task in dict.fromkeys(result.task for result in training.evaluations):
        results = [result for result in training.evaluations if result.task == task]
        if (best := best_of(results, None)) is not None:
            found.append(f"{best.checkpoint} by {_score(best, main_metric(best, None))} of {task}")
    lines = [line for line in training.lines.validations if "validation_loss" in line]
    if lines:
        lowest = min(lines, key=lambda line: line["validation_loss"])
        found.append(f"lowest validation loss {lowest['validation_loss']:.4f} at step {lowest['step']:,}")
    return "; ".join(found) or "not known: nothing was validated or evaluated"


def _score(result: EvalResult, name: str) -> str:
    metric, score = result.metric(name), result.metrics[name]
    value, low, high = (format_value(metric, end) for end in (score.value, score.low, score.high))
    return f"{name} {value} ({low} to {high}, n {result.n:,})"


def _curve_table(lines: TrainingLines) -> Folded:
    """The loss at the validated steps, or at evenly spaced ones, for a reader without plots."""
    validated = {line["step"]: line.get("validation_loss") for line in lines.validations}
    chosen = [line for line in lines.steps if line["step"] in validated]
    chosen = chosen if len(chosen) >= _FEW_ROWS else list(lines.steps)
    every = max(1, len(chosen) // _MOST_ROWS)
    shown = {line["step"]: line for line in (lines.steps[0], *chosen[::every], lines.steps[-1])}
    rows = []
    for step in sorted(shown):
        line, loss = shown[step], validated.get(step)
        speed, rate = line.get("tokens_per_second"), line.get("learning_rate")
        cells = (line.get("loss"), loss, rate, speed)
        forms = ("{:.4f}", "{:.4f}", "{:.3g}", "{:,.0f}")
        figures = ("" if cell is None else form.format(cell) for form, cell in zip(forms, cells, strict=True))
        rows.append((f"{step:,}", *figures))
    table = _table("", ("step", "loss", "validation loss", "learning rate", "tokens/s"), rows)
    return Folded(title="the curve in figures", table=table)


def _evaluation_blocks(where: StageDir) -> Iterator[Block]:
    evaluations = evals_of(where)
    for task in dict.fromkeys(result.task for result in evaluations):
        results = [result for result in evaluations if result.task == task]
        yield Heading(text=f"Evaluation: {task}", level=3)
        yield _score_table(results)
        if warnings := tuple(dict.fromkeys(warning for result in results for warning in result.warnings)):
            yield Lines(lines=warnings)
        yield Heading(text=f"A sample of the {results[0].n:,} items, evenly spaced", level=4)
        yield from _item_views(results)


def _score_table(results: Sequence[EvalResult]) -> TableData:
    best, names = best_of(results, None), list(results[0].metrics)
    rows = []
    for result in results:
        cells = [TableCell(f"{result.checkpoint}{' (best)' if result is best else ''}"), TableCell(format_n(result))]
        cells.append(TableCell(f"{result.coverage:.0%}"))
        for name in names:
            metric, score = result.metric(name), result.metrics[name]
            low, high = format_value(metric, score.low), format_value(metric, score.high)
            cells.append(TableCell(format_value(metric, score.value), f"{low} .. {high}", "strong"))
        rows.append(TableRow(tuple(cells)))
    columns = tuple(map(TableCell, ("checkpoint", "n", "coverage", *names)))
    return TableData(title="95 % intervals", columns=columns, rows=tuple(rows))


def _item_views(results: Sequence[EvalResult]) -> Iterator[ItemView]:
    """The same items for every checkpoint."""
    items = results[-1].items
    for item in list(items[:: max(1, len(items) // _NUM_ITEMS)])[:_NUM_ITEMS]:
        answers = []
        for result in results:
            answers += [_answer(result, other) for other in result.items if other.item == item.item]
        prompt, summary = without_markup(item.prompt), ", ".join(words for words, _, _ in answers)
        yield ItemView(
            title=item.place, change=summary, prompt=prompt, reference=item.reference, answers=tuple(answers)
        )


def _answer(result: EvalResult, item: EvalItem) -> tuple[str, str, str | None]:
    name = main_metric(result, None)
    score = f": {name} {format_value(result.metric(name), item.scores[name])}" if name in item.scores else ""
    return f"{result.checkpoint}{score}", item.answer, item.failure


def _data_blocks(where: StageDir) -> Iterator[Block]:
    entries = list(read_lines(where.ledger, SourceLedger, where=lambda entry: "read" in entry))
    if not entries:
        return
    yield Heading(text="Data", level=3)
    columns = ("source", "split", "read as", "rows", "used", "cut", "dropped", "tokens", "supervised")
    rows = []
    for one in entries:
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in one.dropped.items()) or "0"
        counts = (f"{one.read:,}", f"{one.used:,}", f"{one.cut:,}", dropped)
        rows.append((one.source, one.split, one.shape, *counts, f"{one.tokens:,}", f"{one.supervised_tokens:,}"))
    yield _table("", columns, rows, holds_text=True)


def _setup_blocks(run: RunDir) -> Iterator[Block]:
    """How it was set up, with the source of every value, and where it ran. The host's name is left out, since reports
    are sent to others."""
    yield Heading(text="Setup", level=3)
    if (check := read_if_there(run.check, Check)) is not None and check.findings:
        yield Lines(lines=tuple(f"{one.level}: {one.problem}" for one in check.findings))
    if (plan := read_if_there(run.plan, Plan)) is not None:
        for name, values in plan.stages.items():
            rows = [(key, _shown(one.value), one.source) for key, one in values.items()]
            decided = sum(one.source not in _USUAL for one in values.values())
            table = _table("", ("setting", "value", "source"), rows, holds_text=True)
            title = f"{len(rows)} settings of {name} with their sources, {decided} of them decided by finefit"
            yield Folded(title=title, table=table)
    if is_there(run.spec_yaml):
        yield Listing(title="spec.yaml", text=read_text(run.spec_yaml))
    if (facts := read_if_there(run.facts, Facts)) is not None:
        yield Pairs(title="environment", pairs=tuple(_environment(facts)))


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _environment(facts: Facts) -> Iterator[tuple[str, str]]:
    machine, inputs = facts.machine, facts.inputs
    yield "platform", f"{machine.platform}, Python {machine.python}"
    yield "processor", f"{machine.cpu_model}, {machine.num_cores} cores, {gib(machine.memory_bytes)}"
    for card in machine.cards:
        yield "card", card.name if card.memory_bytes is None else f"{card.name}, {gib(card.memory_bytes)}"
    for package, version in machine.versions.items():
        yield package, version or "not installed"
    yield "model", f"{inputs.model}, fingerprint {inputs.model_fingerprint}"
    for split, sources in inputs.data.items():
        for file in (file for source in sources for file in source):
            yield f"data, {split}", f"{file.path}, {file.size_bytes:,} bytes, sha256 {file.sha256}"


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, holds_text: bool = False) -> TableData:
    return TableData(
        title=title,
        columns=tuple(map(TableCell, columns)),
        rows=tuple(TableRow(tuple(map(TableCell, row))) for row in rows),
        holds_text=holds_text,
    )
