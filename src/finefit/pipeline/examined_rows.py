"""What a stage reads that trains nothing, read before any stage has begun: by the functions that it will read it with, and without weights."""

from pathlib import Path

from finefit.data.render import Renderer, open_renderer
from finefit.model.adapter_files import adapter_fingerprint
from finefit.pipeline.making.build_moe import starting_rows
from finefit.pipeline.making.gate import divided
from finefit.pipeline.making.make_pairs import ruled
from finefit.pipeline.making.pair_splits import require_pairs, rows_of_splits
from finefit.pipeline.making.pairs_judged import judged
from finefit.pipeline.making.pairs_sampled import rows_to_ask
from finefit.pipeline.outlines import Outlines, copies_in
from finefit.pipeline.stage_paths import paths_of
from finefit.pipeline.wiring import file_at, with_files
from finefit.spec.stages import BuildMoe, CentroidRouter, Gate, Input, MakePairs, MergeAdapter, Rules, Sampled, Verdicts

_FEW = 64
"""Rows that usually show that rules make pairs of them."""


def read_ahead(outlines: Outlines, name: str) -> None:
    """Raises what the stage would raise when it begins. Where another stage has yet to make some of what it reads, that is left to the stage."""
    asked = outlines.pipeline.stages[name]
    if not all(outlines.is_made(path) for _, _, path in paths_of(asked)):
        return
    stage = with_files(asked, lambda path: str(file_at(path, outlines.at)))
    base, seed = outlines.base, outlines.pipeline.seed
    match stage:
        case Gate():
            if (renderer := _renderer(outlines, stage.base, stage)) is not None:
                divided(stage, renderer, base, seed)
        case BuildMoe(router=CentroidRouter() as router):
            names = _distinct(stage)
            if len(names) > 1 and (renderer := _renderer(outlines, stage.base, router)) is not None:
                starting_rows(router, names, renderer, base, seed)
        case MakePairs():
            _read_for_pairs(stage, base, seed)
        case MergeAdapter(adapter=str() as adapter):
            adapter_fingerprint(base / adapter)


def _renderer(outlines: Outlines, model: Input, how: Gate | CentroidRouter) -> Renderer | None:
    """None where a model has no tokenizer to speak of."""
    tokenizer = outlines.of(model).tokenizer
    return None if tokenizer is None else open_renderer(tokenizer, how.template, template_options=how.template_options)


def _distinct(stage: BuildMoe) -> tuple[str, ...]:
    """Experts whose rows are looked at, as far as the spec shows which will be collapsed."""
    copies = copies_in(stage) if stage.copies == "collapse" else {}
    return tuple(name for name in stage.experts if name not in copies)


def _read_for_pairs(stage: MakePairs, base: Path, seed: int) -> None:
    match stage.method:
        case Rules() as method:
            for name, rows in rows_of_splits(stage, base, seed).items():
                few = ruled(rows[:_FEW], method, base, seed)
                require_pairs({name: few if few.pairs else ruled(rows, method, base, seed)})
        case Verdicts() as method:
            require_pairs({"train": judged(method, base)})
        case Sampled() as method:
            rows_to_ask(stage, method, base, seed)
