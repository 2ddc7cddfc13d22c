"""MTUP: one answer holds the results of several sub-tasks, one behind the other, and the last is the graph. What is asked, what is answered, and how
the last result is found again stand here side by side, for training and evaluation alike.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from finefit.data.tasks.amr.graph import Node, nodes
from finefit.data.tasks.amr.notation import write
from finefit.data.tasks.task import NoResult

Method = Literal["baseline", "mtup2", "mtup3a", "mtup3b", "mtup4"]


def skeleton(root: Node) -> str:
    """The graph without variables: a node is its concept, and one that is met again is its concept once more."""
    named = {node.variable: node.concept for node in nodes(root)}

    def written(node: Node) -> str:
        edges = ((edge.role, edge.target) for edge in node.edges)
        told = (
            f" :{role} {written(target) if isinstance(target, Node) else _again(target, named)}"
            for role, target in edges
        )
        return f"({node.concept}{''.join(told)})"

    return written(root)


def _again(target: str, named: dict[str, str]) -> str:
    return f"({named[target]})" if target in named else target


def concepts(root: Node) -> list[str]:
    """One for each node, in the order of their writing."""
    return [node.concept for node in nodes(root)]


def relations(root: Node) -> list[tuple[str, str, str]]:
    """Concept, role with its colon, concept or constant; in the order of their writing."""
    named = {node.variable: node.concept for node in nodes(root)}
    edges = ((node, edge) for node in nodes(root) for edge in node.edges)
    return [
        (
            node.concept,
            f":{edge.role}",
            edge.target.concept if isinstance(edge.target, Node) else named.get(edge.target, edge.target),
        )
        for node, edge in edges
    ]


def _concept_lines(root: Node) -> str:
    return "\n".join(f"concept_{number} | {concept}" for number, concept in enumerate(concepts(root), start=1))


def _relation_lines(root: Node) -> str:
    return "\n".join(" | ".join(relation) for relation in relations(root))


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    asked: str
    """What it is, in the prompt."""
    written: Callable[[Node], str]


_CONCEPTS = _Part("CONCEPTS", "the concepts, one in each line", _concept_lines)
_RELATIONS = _Part("RELATIONS", "the relations, one in each line as `concept | :role | concept`", _relation_lines)
_NO_VARIABLES = _Part("AMR_NO_VAR", "the graph without variables", skeleton)
_GRAPH = _Part("AMR_WITH_VAR", "the graph with variables in PENMAN notation", write)
_PARTS: dict[Method, tuple[_Part, ...]] = {
    "baseline": (_GRAPH,),
    "mtup2": (_NO_VARIABLES, _GRAPH),
    "mtup3a": (_CONCEPTS, _NO_VARIABLES, _GRAPH),
    "mtup3b": (_CONCEPTS, _RELATIONS, _GRAPH),
    "mtup4": (_CONCEPTS, _RELATIONS, _NO_VARIABLES, _GRAPH),
}


def _label(method: Method, number: int) -> str:
    """What stands before the result of a sub-task; the only result of the baseline needs none."""
    match method:
        case "baseline":
            return ""
        case "mtup2":
            return f"Task {number}: "
        case _:
            return f"[STEP {number}: {_PARTS[method][number - 1].name}]\n"


def prompt_of(sentence: str, method: Method) -> str:
    parts = _PARTS[method]
    if len(parts) == 1:
        return (
            f"Write the AMR (Abstract Meaning Representation) of the sentence: {parts[0].asked}.\nSentence: {sentence}"
        )
    asked = "\n".join(f"{_label(method, number).strip()} {part.asked}" for number, part in enumerate(parts, start=1))
    return f"Write the AMR (Abstract Meaning Representation) of the sentence in {len(parts)} parts.\n{asked}\nSentence: {sentence}"


def target_of(root: Node, method: Method) -> str:
    return "\n".join(_label(method, number) + part.written(root) for number, part in enumerate(_PARTS[method], start=1))


def last_result(answer: str, method: Method) -> str:
    """What stands behind the label of the last sub-task, the first time it is written: a model that does not stop begins the next sentence."""
    label = _label(method, len(_PARTS[method])).strip()
    if not label:
        return answer
    found = re.search(rf"^[\s*#]*{re.escape(label)}[ \t*]*", answer, re.MULTILINE | re.IGNORECASE)
    if found is None:
        raise NoResult(f"the answer has no `{label}`" if answer.strip() else "the answer is empty")
    return answer[found.end() :]
