"""Relaxed accuracy of ChartQA: a number may be off by a share of the reference, any other answer is the reference but for case.

What is a number is said by the published code (pix2struct's): what Python reads as one, a per cent sign making hundredths of it. So "1,000" is none
and is compared as it is written, nothing is near zero but zero as it is written, and a year is a number as any other.
"""

from finefit.data.tasks.match import stripped
from finefit.data.tasks.task import Task, against_references
from finefit.spec.tasks import RelaxedAccuracy
from finefit.stats.metrics import rate


def relaxed_accuracy(name: str, settings: RelaxedAccuracy) -> Task:
    return against_references(
        name,
        metrics=(rate("relaxed"),),
        extract=stripped,
        compare=lambda found, reference: {"relaxed": float(_is_right(found, reference, settings.tolerance))},
        signature={
            "relaxed": f"numbers within {settings.tolerance:g} of the reference, else equal but for case; thousands separators make no number"
        },
    )


def _is_right(answer: str, reference: str, tolerance: float) -> bool:
    found, wanted = _number(answer), _number(reference)
    if found is None or not wanted:
        return answer.lower() == reference.lower()
    return abs(found - wanted) / abs(wanted) <= tolerance


def _number(text: str) -> float | None:
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None
