"""A comparison as one page that needs nothing else: no script, no address, all text escaped, light and dark."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files

from finefit.compare.records import Cell, Comparison, ItemChange, Pairing, ScoredPart, Setting, TaskComparison
from finefit.report.board import shown_value
from finefit.report.compare_plots import colour, difference_plot, item_plot, loss_plot, score_plot
from finefit.report.compare_words import (
    FORETOLD,
    MISSING,
    against,
    chance,
    change,
    counts_words,
    foretold_words,
    interval,
    is_better,
    own_metric,
    parts_of,
    setting_value,
    shortened,
    spread_words,
    visible,
)
from finefit.stats.metrics import Metric

_MOST_CHARACTERS = 4000
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_STYLE = files("finefit.report").joinpath("compare.css").read_text(encoding="utf-8")


def page(comparison: Comparison) -> str:
    title = " and ".join(side.name for side in comparison.sides)
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
            f'<p class="soft">finefit compare</p>\n<h1>{_text(title)}</h1>',
            *_settings(comparison),
            *(part for task in comparison.tasks for part in _task(comparison, task)),
            *_training(comparison),
            *_notes(comparison),
            "</body>\n</html>\n",
        )
    )


def _text(text: str) -> str:
    return escape(visible(text))


def _settings(comparison: Comparison) -> Iterator[str]:
    yield "<h2>Settings that differ</h2>"
    yield f'<p class="verdict{"" if comparison.is_one_variable else " mixed"}">{_text(comparison.verdict[0].upper() + comparison.verdict[1:])}.</p>'
    names = [_dot(at) + _text(side.name) for at, side in enumerate(comparison.sides)]
    if comparison.differing:
        yield _table(["setting", *names], ([_key(row.key), *_values(row, len(names))] for row in comparison.differing))
    if comparison.apart:
        yield f"<details><summary>{len(comparison.apart)} more, without effect on a score</summary>"
        yield _table(["setting", *names], ([_key(row.key), *_values(row, len(names))] for row in comparison.apart))
        yield "</details>"


def _values(row: Setting, count: int) -> list[str]:
    return [f'<td class="wrap">{_text(shortened(setting_value(row, at), 400))}</td>' for at in range(count)]


def _key(key: str) -> str:
    return f'<td class="key">{_text(key)}</td>'


def _dot(at: int) -> str:
    return f'<span class="dot" style="background:{colour(at)}"></span>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 0, classes: Sequence[str] = ()) -> str:
    """Cells come as HTML, with or without their own `td`; the last `numbers` columns stand to the right."""
    first = len(head) - numbers
    top = "".join(f"<th{' class=n' if at >= first else ''}>{name}</th>" for at, name in enumerate(head))
    lines = []
    for number_of_row, row in enumerate(rows):
        cells = "".join(
            cell if cell.startswith("<td") else f"<td{' class=n' if at >= first else ''}>{cell}</td>"
            for at, cell in enumerate(row)
        )
        kind = classes[number_of_row] if number_of_row < len(classes) else ""
        lines.append(f"<tr{f' class={kind}' if kind else ''}>{cells}</tr>")
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _task(comparison: Comparison, task: TaskComparison) -> Iterator[str]:
    yield f"<h2>Task {_text(task.task)}</h2>"
    rows, classes = _scores(comparison, task)
    yield _table(
        ["model", "n", "coverage", *(_text(metric.name) for metric in task.metrics)],
        rows,
        2 + len(task.metrics),
        classes,
    )
    for metric in task.metrics:
        yield from _figure(score_plot(comparison, task, metric), f"{metric.name} with its 95 % interval")
    if task.pairings:
        yield "<h3>Differences on the same items</h3>"
        head = ["second less first", "metric", "n", "first", "second", "difference", "95 % interval", "p", "p (Holm)"]
        yield _table(head, _differences(comparison, task), 7)
        yield '<p class="soft">p: how often chance alone makes so large a difference; p (Holm): as it counts among all differences of this page.</p>'
        yield from _figure(difference_plot(comparison, task), "differences with their 95 % intervals")
    for pairing in task.pairings:
        yield from _items(comparison, task, pairing)


def _scores(comparison: Comparison, task: TaskComparison) -> tuple[list[list[str]], list[str]]:
    rows, classes = [], []
    for group, spreads in zip(comparison.groups, task.spreads, strict=True):
        for at in group.sides:
            rows.append([_dot(at) + _text(comparison.sides[at].name), *_cells(task, at)])
            parts = [_part(task.metrics, name, part) for name, part in parts_of(task, at)]
            rows += parts
            classes += ["", *["soft"] * len(parts)]
        if len(group.sides) > 1:
            rows.append(
                [
                    "mean over seeds",
                    "",
                    "",
                    *(_text(spread_words(metric, spreads[metric.name])) for metric in task.metrics),
                ]
            )
            classes.append("mean")
    return rows, classes


def _cells(task: TaskComparison, at: int) -> list[str]:
    scored = task.scored[at]
    if scored is None:
        return [f'<span class="warn">{MISSING}</span>'] * (2 + len(task.metrics))
    n = f"{scored.n:,}" if scored.n == scored.available else f"{scored.n:,} of {scored.available:,}"
    return [n, f"{scored.coverage:.0%}", *(_cell(metric, scored.metrics.get(metric.name)) for metric in task.metrics)]


def _part(metrics: Sequence[Metric], name: str, part: ScoredPart) -> list[str]:
    cells = (_cell(metric, part.metrics.get(metric.name)) for metric in metrics)
    return [f"&emsp;{_text(name)}", f"{part.n:,}", f"{part.coverage:.0%}", *cells]


def _cell(metric: Metric, cell: Cell | None) -> str:
    if cell is None:
        return f'<span class="warn">{MISSING}</span>'
    return f'<strong>{shown_value(metric, cell.value)}</strong> <span class="soft">{interval(metric, cell)}</span>'


def _differences(comparison: Comparison, task: TaskComparison) -> Iterator[list[str]]:
    metrics = {metric.name: metric for metric in task.metrics}
    for pairing in task.pairings:
        for row, found in enumerate(pairing.changes):
            metric = metrics[found.metric]
            kind = {True: "good", False: "bad", None: ""}[is_better(metric, found)]
            yield [
                _text(against(comparison, pairing)) if row == 0 else "",
                _text(metric.name),
                f"{pairing.n:,}",
                shown_value(metric, found.first),
                shown_value(metric, found.second),
                f'<span class="{kind}">{change(metric, found.value)}</span>',
                interval(metric, found),
                escape(chance(found.p)),
                escape(chance(found.corrected_p)),
            ]


def _items(comparison: Comparison, task: TaskComparison, pairing: Pairing) -> Iterator[str]:
    if not pairing.changes:
        return
    metric = own_metric(task, pairing)
    yield f"<h3>Item by item: {_text(against(comparison, pairing))}</h3>"
    unpaired = f" {pairing.only_first:,} items only the first has, {pairing.only_second:,} only the other."
    yield f"<p>{_text(counts_words(pairing, metric))}.{unpaired if pairing.only_first or pairing.only_second else ''}</p>"
    yield from _figure(item_plot(comparison, task, pairing), "each item's change, the largest gain first")
    names = [comparison.groups[at].name for at in (pairing.first, pairing.second)]
    for title, items in (
        ("most gained", pairing.gained),
        ("most lost", pairing.lost),
        ("most reworded", pairing.reworded),
    ):
        for item in items:
            yield _item(title, item, names, metric)


def _item(title: str, item: ItemChange, names: Sequence[str], metric: Metric) -> str:
    answers = [
        f"<div><h4>{_text(name)}{_score(metric, scores)}</h4>{_pre(answer)}{_failure(failure)}</div>"
        for name, answer, failure, scores in zip(names, item.answers, item.failures, item.scores, strict=True)
    ]
    asked = f'<div class="both"><h4>asked</h4>{_pre(item.prompt)}</div><div class="both"><h4>right</h4>{_pre(item.reference)}</div>'
    shown = f"{title}: {change(metric, item.change)} at {item.place}"
    return f'<details><summary>{_text(shown)}</summary><div class="item">{asked}{"".join(answers)}</div></details>'


def _score(metric: Metric, scores: dict[str, float]) -> str:
    return f" ({shown_value(metric, scores[metric.name])})" if metric.name in scores else ""


def _failure(failure: str | None) -> str:
    return "" if failure is None else f'<p class="warn">{_text(failure)}</p>'


def _pre(text: str) -> str:
    return f'<pre dir="auto">{_text(shortened(text.strip(), _MOST_CHARACTERS))}</pre>'


def _training(comparison: Comparison) -> Iterator[str]:
    plot = loss_plot(comparison)
    if plot is not None:
        yield "<h2>Training</h2>"
        yield from _figure(plot, "loss by step; dots are validation")
    if comparison.foretold:
        yield "<h2>Foretold and measured</h2>"
        names = [_dot(at) + _text(side.name) for at, side in enumerate(comparison.sides)]
        rows = (
            [row.what, *(_text(foretold_words(row, at)) for at in range(len(names)))] for row in comparison.foretold
        )
        yield _table([escape(FORETOLD), *names], rows)


def _notes(comparison: Comparison) -> Iterator[str]:
    if comparison.warnings:
        yield "<h2>Notes</h2><ul>"
        yield from (f"<li>{_text(warning)}</li>" for warning in comparison.warnings)
        yield "</ul>"


def _figure(svg: str | None, caption: str) -> Iterator[str]:
    if svg is not None:
        yield f'<figure role="img" aria-label="{_text(caption)}">{svg}</figure>'
