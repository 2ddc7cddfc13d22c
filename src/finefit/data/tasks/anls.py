"""ANLS, average normalised Levenshtein similarity: one less the edits that lead to the nearest reference, by length; nothing below a threshold.

As the evaluator of the DocVQA challenge has it: case and the width of spaces make no edit, lengths are those of the texts as they are written, and
a similarity of just the threshold counts.
"""

from nltk.metrics.distance import edit_distance

from finefit.data.tasks.match import stripped
from finefit.data.tasks.task import Task, against_references
from finefit.spec.tasks import Anls
from finefit.stats.metrics import mean


def anls(name: str, settings: Anls) -> Task:
    return against_references(
        name,
        metrics=(mean("anls"),),
        extract=stripped,
        compare=lambda found, reference: {"anls": _similarity(found, reference, settings.threshold)},
        signature={
            "anls": f"similarity below {settings.threshold:g} is 0; case and the width of spaces ignored; the nearest reference"
        },
    )


def _similarity(answer: str, reference: str, threshold: float) -> float:
    left, right = (" ".join(text.lower().split()) for text in (answer, reference))
    length = max(len(answer), len(reference))
    if (
        1 - abs(len(left) - len(right)) / length < threshold
    ):  # so many edits at least: a long answer is not compared letter by letter
        return 0.0
    found = 1 - edit_distance(left, right) / length
    return found if found >= threshold else 0.0
