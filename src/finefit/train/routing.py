"""Where the tokens of each data set go once the routers are trained: measured on held-out rows, or, without any, on rows that were trained on."""

import logging
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from finefit.artifacts.journal import read_lines
from finefit.artifacts.records import write_record
from finefit.artifacts.rundir import StageDir
from finefit.data.examples import Example
from finefit.data.pairs import Trained
from finefit.evaluate.routing import measure_routing, routing_map
from finefit.model.centroids import num_shared
from finefit.spec.schema import Router
from finefit.step.engines.choose import divides_weights
from finefit.step.forward import autocast_for
from finefit.train.live import Live

log = logging.getLogger("finefit")
_ROWS = 32
"""Looked at of each source."""


def note_routing(live: Live, where: StageDir, step: int) -> None:
    """Leaves routing.json and routing.svg in the stage's folder, where routers are what is trained. Training is over and saved by then, so what fails
    here is told and costs nothing else."""
    if not isinstance(live.stage.objective, Router) or not live.ranks.is_first:
        return
    if live.ranks.size > 1 and divides_weights(live.stage.engine):
        log.info("routing is not measured: the model is divided over %s ranks", live.ranks.size)
        return
    try:
        _note(live, where, step)
    except Exception:  # a measurement, whatever it fails of, takes no training with it
        log.exception("routing is not measured; the training is whole, and its last checkpoint too")


def _note(live: Live, where: StageDir, step: int) -> None:
    """Without the tokens before every row: a template's own words are of no data set."""
    held = bool(live.validation)
    rows = _by_source(where, live.validation, "validation") if held else _by_source(where, live.examples, "train")
    with autocast_for(live.stage.device, live.stage.precision):
        found = measure_routing(
            live.model, rows, skipped=num_shared([row for several in rows.values() for row in several])
        )
    write_record(where.routing, found)
    where.routing_map.write_text(routing_map(found), encoding="utf-8")
    first = {name: _means(source.first) for name, source in found.sources.items()}
    live.metrics.write(event="routed", step=step, held_out=held, first=first, experts=found.experts)


def _means(layers: Sequence[Sequence[float]]) -> list[float]:
    return [round(sum(column) / len(layers), 4) for column in zip(*layers, strict=True)]


def _by_source(where: StageDir, examples: Sequence[Trained], split: str) -> Mapping[str, list[tuple[int, ...]]]:
    """The first rows of each: they lie behind one another as the ledger counts them, what is seen several times as often."""
    entries = [entry for entry in read_lines(where.ledger) if "read" in entry and entry["split"] == split]
    ends = list(accumulate(_num_examples(entry) for entry in entries))
    found: dict[str, list[tuple[int, ...]]] = {}
    for entry, begin, end in zip(entries, [0, *ends], ends, strict=False):
        rows = (examples[at] for at in range(begin, min(end, begin + _ROWS)))
        found.setdefault(entry["source"], []).extend(row.tokens for row in rows if isinstance(row, Example))
    return found


def _num_examples(entry: Mapping[str, Any]) -> int:
    return int(entry["examples"]) + int(entry["repeated"])
