"""The AMR task: a sentence becomes prompt and answer by a method, and an answer is scored by Smatch over all pairs.

An answer that is no graph matches nothing and adds no triples of its own; the gold's triples were to be found all the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from finefit.data.rows import Message, Row
from finefit.data.tasks.amr.files import align, read_graphs
from finefit.data.tasks.amr.graph import Node, defined_twice, renamed
from finefit.data.tasks.amr.matching import Match, match
from finefit.data.tasks.amr.notation import find_graph, mended, parse, parse_loosely, spelt, write
from finefit.data.tasks.amr.subtasks import Method, last_result, prompt_of, target_of
from finefit.data.tasks.amr.triples import triples
from finefit.data.tasks.task import NoResult, Reading, Reply, Task
from finefit.errors import DataError
from finefit.spec.tasks import Amr, AmrForm
from finefit.stats.metrics import Metric, rate

_OWN = (
    Metric(name="smatch", aggregate="f1", counts=("matched", "predicted", "gold")),
    Metric(name="precision", aggregate="ratio", counts=("matched", "predicted")),
    Metric(name="recall", aggregate="ratio", counts=("matched", "gold")),
    rate("parsable"),
    rate("root"),
)
_MENDED = (
    Metric(name="smatch_mended", aggregate="f1", counts=("matched_mended", "predicted_mended", "gold")),
    rate("parsable_mended"),
)


def build_row(form: AmrForm, row: Row) -> Row:
    """A sentence and its graph -> what is asked and answered by the form's method. A repair of a graph is told in the row."""
    if len(row.messages) < 2 or row.messages[-2].role != "user" or row.kind != "chat":
        raise NoResult("is no sentence with a graph, which data.task amr builds its rows from")
    asked = replace(row.messages[-2], content=prompt_of(row.messages[-2].content.strip(), form.method))
    built = [_target(text, form) for text in (row.answer, *row.references)]
    (answer, _), *others = built
    repairs = tuple(dict.fromkeys(repair for _, found in built for repair in found))
    told = (*row.messages[:-2], asked, Message("assistant", answer))
    return replace(row, messages=told, references=tuple(text for text, _ in others), repairs=repairs)


def _target(text: str, form: AmrForm) -> tuple[str, tuple[str, ...]]:
    gold, repairs = read_gold(text, repair=form.repair_gold)
    return target_of(spelt(gold, form.concepts), form.method), repairs


def read_gold(text: str, *, repair: bool) -> tuple[Node, tuple[str, ...]]:
    """A graph that is right, and what had to be repaired in it."""
    root = parse_loosely(text)
    if not repair and (twice := defined_twice(root)):
        raise NoResult(
            f"has a graph that defines {', '.join(twice)} twice; give the second another name, or set repair_gold: true"
        )
    return renamed(root)


@dataclass(frozen=True, slots=True)
class _Found:
    """A graph in an answer, as it stands or mended; None where there is none."""

    root: Node | None
    failure: str | None = None
    mends: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Scorer:
    settings: Amr
    method: Method

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return _OWN + _MENDED if self.settings.mend_answers else _OWN

    def require(self, row: Row) -> None:
        self._golds(row)

    def nothing(self, row: Row) -> Mapping[str, float]:
        names = dict.fromkeys(name for metric in self.metrics for name in metric.counts)
        return dict.fromkeys(names, 0.0) | {"gold": float(len(triples(self._golds(row)[0][0])))}

    def read(self, reply: Reply, row: Row) -> Reading:
        """Never raises NoResult: an answer without a graph still has the gold that it was held against."""
        golds = self._golds(row)
        own, after = self._found(reply.text, is_repaired=bool(row.repairs) or any(repairs for _, repairs in golds))
        scored = [
            (self._match(own.root, gold), self._match(after.root, gold), gold, repairs) for gold, repairs in golds
        ]
        before, later, gold, repairs = max(scored, key=lambda found: (found[0].f1, found[1].f1))
        counts = _counts(before) | {"parsable": float(own.root is not None), "root": _same_root(own.root, gold)}
        extracted: dict[str, object] = {"graph": _written(own.root)}
        if self.settings.mend_answers:
            counts |= {f"{name}_mended": count for name, count in _counts(later).items() if name != "gold"}
            counts |= {"parsable_mended": float(after.root is not None)}
            extracted |= {"mended": _written(after.root), "mends": list(after.mends)}
        if told := repairs or row.repairs:  # now, or when the row was built
            extracted |= {"gold_repairs": list(told)}
        return Reading(extracted=extracted, counts=counts, reference=write(gold), failure=own.failure)

    def _found(self, answer: str, *, is_repaired: bool) -> tuple[_Found, _Found]:
        """As it stands, and mended where that is asked for. Where the gold had to be repaired, the answer is too: the gold itself must be right."""
        try:
            text = find_graph(last_result(answer, self.method))
        except NoResult as reason:
            return _Found(None, failure=str(reason)), _Found(None)
        return self._as_it_stands(text, is_repaired), self._mended(text) if self.settings.mend_answers else _Found(None)

    def _golds(self, row: Row) -> list[tuple[Node, tuple[str, ...]]]:
        """All that count as right, with their repairs; the one trained on first."""
        texts = dict.fromkeys((row.answer, *row.references))
        found = [read_gold(last_result(text, self.method), repair=self.settings.repair_gold) for text in texts]
        return [(spelt(root, self.settings.concepts), repairs) for root, repairs in found]

    def _as_it_stands(self, text: str, is_repaired: bool) -> _Found:
        try:
            return _Found(
                spelt(renamed(parse_loosely(text))[0] if is_repaired else parse(text), self.settings.concepts)
            )
        except NoResult as reason:
            return _Found(None, failure=str(reason))

    def _mended(self, text: str) -> _Found:
        try:
            root, mends = mended(text)
        except NoResult as reason:
            return _Found(None, failure=str(reason))
        return _Found(spelt(root, self.settings.concepts), mends=mends)

    def _match(self, root: Node | None, gold: Node) -> Match:
        """No graph matches nothing and adds nothing."""
        wanted = triples(gold)
        return (
            Match(0, 0, len(wanted)) if root is None else match(triples(root), wanted, restarts=self.settings.restarts)
        )


def _counts(found: Match) -> dict[str, float]:
    return {"matched": float(found.matched), "predicted": float(found.predicted), "gold": float(found.gold)}


def _same_root(root: Node | None, gold: Node) -> float:
    return float(root is not None and triples(root).concepts[0] == triples(gold).concepts[0])


def _written(root: Node | None) -> str | None:
    return None if root is None else write(root)


def amr_task(name: str, settings: Amr, *, form: AmrForm | None) -> Task:
    """`form`: by which the answers were built; None where they are graphs as they stand."""
    scorer = _Scorer(settings, form.method if form else "baseline")
    return Task(
        name=name,
        metrics=scorer.metrics,
        read=scorer.read,
        nothing=scorer.nothing,
        require=scorer.require,
        signature={
            "smatch": "finefit.1",
            "restarts": str(settings.restarts),
            "concepts": settings.concepts,
            "repair_gold": str(settings.repair_gold).lower(),
            "mend_answers": str(settings.mend_answers).lower(),
        },
    )


def smatch_of_files(predicted: Path, gold: Path, settings: Amr) -> list[tuple[str, Reading]]:
    """What the task finds for every sentence of the gold file, where the answers are graphs in a file of their own."""
    task = amr_task("amr", settings, form=None)
    found: list[tuple[str, Reading]] = []
    for mine, right in align(read_graphs(predicted), read_graphs(gold)):
        row = Row(
            source=right.source,
            number=right.number,
            messages=(Message("user", right.sentence), Message("assistant", right.graph)),
        )
        try:
            task.require(row)
        except NoResult as reason:
            raise DataError(f"{row.place} {reason}") from None
        found.append((right.sentence, task.read(Reply(text=mine.graph), row)))
    return found
