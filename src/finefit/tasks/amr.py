"""AMR parsing: a sentence becomes prompt and answer by a method, and answers are scored by Smatch over all pairs.

An answer without a graph matches nothing and adds no triples of its own, but the gold's triples still count.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from finefit.data.files import find_files
from finefit.data.records import read_records
from finefit.data.rows import BadRow, Message, Row
from finefit.errors import DataError
from finefit.spec.tasks import Amr, AmrForm
from finefit.stats.metrics import Metric, rate
from finefit.tasks import NoResult, Reply, ScoredReply, Task
from finefit.tasks import amr_graphs as graphs
from finefit.tasks.amr_graphs import Node, nodes, triples

Method = Literal["baseline", "mtup2", "mtup3a", "mtup3b", "mtup4"]
_METRICS = (
    Metric(name="smatch", aggregate="f1", counts=("matched", "predicted", "gold")),
    Metric(name="precision", aggregate="ratio", counts=("matched", "predicted")),
    Metric(name="recall", aggregate="ratio", counts=("matched", "gold")),
    rate("parsable"),
    rate("root"),
)
_MENDED_METRICS = (
    Metric(name="smatch_mended", aggregate="f1", counts=("matched_mended", "predicted_mended", "gold")),
    rate("parsable_mended"),
)


# MTUP: one answer holds the results of several sub-tasks, one after another, and the last is the graph. What is asked,
# what is answered, and how the last result is found stand here together, for training and evaluation alike.


def skeleton(root: Node) -> str:
    """The graph without variables: a node is its concept, and a repeated node is its concept once more."""
    named = {node.variable: node.concept for node in nodes(root)}

    def written(target: Node | str) -> str:
        if isinstance(target, str):
            return f"({named[target]})" if target in named else target
        return f"({target.concept}{''.join(f' :{edge.role} {written(edge.target)}' for edge in target.edges)})"

    return written(root)


def concepts(root: Node) -> str:
    """One line for each node, in the order in which nodes are written."""
    return "\n".join(f"concept_{number} | {node.concept}" for number, node in enumerate(nodes(root), start=1))


def relations(root: Node) -> str:
    """Lines of concept, role with its colon, concept or constant, in the order in which they are written."""
    named = {node.variable: node.concept for node in nodes(root)}

    def target(found: Node | str) -> str:
        return found.concept if isinstance(found, Node) else named.get(found, found)

    edges = ((node, edge) for node in nodes(root) for edge in node.edges)
    return "\n".join(f"{node.concept} | :{edge.role} | {target(edge.target)}" for node, edge in edges)


@dataclass(frozen=True, slots=True)
class _SubTask:
    name: str
    description: str
    write: Callable[[Node], str]


_CONCEPTS = _SubTask("CONCEPTS", "the concepts, one in each line", concepts)
_RELATIONS = _SubTask("RELATIONS", "the relations, one in each line as `concept | :role | concept`", relations)
_NO_VARIABLES = _SubTask("AMR_NO_VAR", "the graph without variables", skeleton)
_GRAPH = _SubTask("AMR_WITH_VAR", "the graph with variables in PENMAN notation", graphs.write)
_SUB_TASKS: dict[Method, tuple[_SubTask, ...]] = {
    "baseline": (_GRAPH,),
    "mtup2": (_NO_VARIABLES, _GRAPH),
    "mtup3a": (_CONCEPTS, _NO_VARIABLES, _GRAPH),
    "mtup3b": (_CONCEPTS, _RELATIONS, _GRAPH),
    "mtup4": (_CONCEPTS, _RELATIONS, _NO_VARIABLES, _GRAPH),
}


def _label(method: Method, number: int) -> str:
    """The text before the result of a sub-task; the only result of the baseline needs none."""
    if method == "baseline":
        return ""
    return f"Task {number}: " if method == "mtup2" else f"[STEP {number}: {_SUB_TASKS[method][number - 1].name}]\n"


def prompt_of(sentence: str, method: Method) -> str:
    parts, begin = _SUB_TASKS[method], "Write the AMR (Abstract Meaning Representation) of the sentence"
    if len(parts) == 1:
        return f"{begin}: {parts[0].description}.\nSentence: {sentence}"
    lines = [f"{_label(method, number).strip()} {part.description}" for number, part in enumerate(parts, start=1)]
    return "\n".join([f"{begin} in {len(parts)} parts.", *lines, f"Sentence: {sentence}"])


def target_of(root: Node, method: Method) -> str:
    parts = enumerate(_SUB_TASKS[method], start=1)
    return "\n".join(_label(method, number) + part.write(root) for number, part in parts)


def last_result(answer: str, method: Method) -> str:
    """The text after the first label of the last sub-task, because a model that does not stop continues with another
    sentence."""
    label = _label(method, len(_SUB_TASKS[method])).strip()
    if not label:
        return answer
    found = re.search(rf"^[\s*#]*{re.escape(label)}[ \t*]*", answer, re.MULTILINE | re.IGNORECASE)
    if found is None:
        raise NoResult(f"the answer has no `{label}`" if answer.strip() else "the answer is empty")
    return answer[found.end() :]


def build_row(form: AmrForm, row: Row) -> Row:
    """A sentence and its graph become prompt and answer by the form's method. The row records the repairs of its
    graph."""
    if len(row.messages) < 2 or row.messages[-2].role != "user" or row.kind != "chat":
        raise NoResult("is not a sentence with a graph, which data.task amr builds its rows from")
    prompt = replace(row.messages[-2], content=prompt_of(row.messages[-2].content.strip(), form.method))
    targets, repairs = list[str](), list[str]()
    for text in (row.answer, *row.references):
        gold, found = read_gold(text, repair=form.repair_gold)
        targets.append(target_of(graphs.joined_concepts(gold, form.concepts), form.method))
        repairs += found
    messages = (*row.messages[:-2], prompt, Message("assistant", targets[0]))
    return replace(row, messages=messages, references=tuple(targets[1:]), repairs=tuple(dict.fromkeys(repairs)))


def read_gold(text: str, *, repair: bool) -> tuple[Node, tuple[str, ...]]:
    root = graphs.parse_loosely(text)
    if not repair and (twice := graphs.defined_twice(root)):
        problem = f"has a graph that defines {', '.join(twice)} twice"
        raise NoResult(f"{problem}; give the second another name, or set repair_gold: true")
    return graphs.renamed(root)


@dataclass(frozen=True, slots=True)
class _Scorer:
    settings: Amr
    method: Method

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return _METRICS + _MENDED_METRICS if self.settings.mend_answers else _METRICS

    def nothing(self, row: Row) -> Mapping[str, float]:
        names = dict.fromkeys(name for metric in self.metrics for name in metric.counts)
        return dict.fromkeys(names, 0.0) | {"gold": float(len(triples(self.golds(row)[0][0])))}

    def read(self, reply: Reply, row: Row) -> ScoredReply:
        """Never raises NoResult: an answer without a graph is still compared with a gold."""
        golds = self.golds(row)
        # where the gold had to be repaired, the answer is too: the gold itself must score as right
        is_repaired = bool(row.repairs) or any(repairs for _, repairs in golds)
        as_written, _, failure = self._found(
            reply.text,
            lambda text: (graphs.renamed(graphs.parse_loosely(text))[0] if is_repaired else graphs.parse(text), ()),
        )
        mends_answers = self.settings.mend_answers
        mended, mends, _ = self._found(reply.text, graphs.mended) if mends_answers else (None, (), None)
        scored = [(self._match(as_written, gold), self._match(mended, gold), gold, repairs) for gold, repairs in golds]
        before, after, gold, repairs = max(scored, key=lambda found: (found[0].f1, found[1].f1))
        has_root = as_written is not None and triples(as_written).concepts[0] == triples(gold).concepts[0]
        counts = _counts(before) | {"parsable": float(as_written is not None), "root": float(has_root)}
        extracted: dict[str, object] = {"graph": _written(as_written)}
        if mends_answers:
            counts |= {f"{name}_mended": count for name, count in _counts(after).items() if name != "gold"}
            counts |= {"parsable_mended": float(mended is not None)}
            extracted |= {"mended": _written(mended), "mends": list(mends)}
        if repaired := repairs or row.repairs:  # now, or when the row was built
            extracted |= {"gold_repairs": list(repaired)}
        return ScoredReply(extracted=extracted, counts=counts, reference=graphs.write(gold), failure=failure)

    def golds(self, row: Row) -> list[tuple[Node, tuple[str, ...]]]:
        """All graphs that count as right, with their repairs; the one trained on comes first."""
        texts = dict.fromkeys((row.answer, *row.references))
        found = [read_gold(last_result(text, self.method), repair=self.settings.repair_gold) for text in texts]
        return [(graphs.joined_concepts(root, self.settings.concepts), repairs) for root, repairs in found]

    def _found(
        self, answer: str, read: Callable[[str], tuple[Node, tuple[str, ...]]]
    ) -> tuple[Node | None, tuple[str, ...], str | None]:
        """The graph if there is one, what was repaired in it, and otherwise why there is none."""
        try:
            root, mends = read(graphs.find_graph(last_result(answer, self.method)))
        except NoResult as reason:
            return None, (), str(reason)
        return graphs.joined_concepts(root, self.settings.concepts), mends, None

    def _match(self, root: Node | None, gold: Node) -> graphs.Match:
        wanted = triples(gold)
        if root is None:
            return graphs.Match(0, 0, len(wanted))
        return graphs.match(triples(root), wanted, restarts=self.settings.restarts)


def _counts(found: graphs.Match) -> dict[str, float]:
    return {"matched": float(found.matched), "predicted": float(found.predicted), "gold": float(found.gold)}


def _written(root: Node | None) -> str | None:
    return None if root is None else graphs.write(root)


def amr_task(name: str, settings: Amr, *, form: AmrForm | None) -> Task:
    """`form` is how the answers were built; None if they are plain graphs."""
    scorer = _Scorer(settings, form.method if form else "baseline")
    return Task(
        name=name,
        metrics=scorer.metrics,
        read=scorer.read,
        nothing=scorer.nothing,
        require=scorer.golds,
        signature={
            "smatch": "finefit.1",
            "restarts": str(settings.restarts),
            "concepts": settings.concepts,
            "repair_gold": str(settings.repair_gold).lower(),
            "mend_answers": str(settings.mend_answers).lower(),
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBlock:
    source: str
    number: int
    sentence: str
    graph: str

    @property
    def place(self) -> str:
        return f"{self.source}:{self.number}"


def read_graphs(path: Path) -> list[GraphBlock]:
    """Every block of the file; one without its sentence or its graph is an error."""
    blocks: list[GraphBlock] = []
    for file in find_files(path.name, path.parent, split="graphs"):
        for record in read_records(file):
            if isinstance(record, BadRow):
                remedy = "fix the file: a missing graph would align all others with the wrong sentence"
                raise DataError(f"{record.place} {record.reason}", remedy)
            sentence, graph = (str(record.value.get(key, "")) for key in ("snt", "amr"))
            blocks.append(GraphBlock(source=record.source, number=record.number, sentence=sentence, graph=graph))
    return blocks
