"""A forecast as a user reads it (reviewed in `tests/snapshots/forecast.txt`), and as a document."""

import io
import re
from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from finefit.artifacts.forecasts import EvalBatchLimit, Forecast, GradientMap, PlanningProgress, Suggestion
from finefit.plan.stage_costs import training_costs
from finefit.report.forecast import show_forecast
from finefit.report.layout import apportion, duration, three_digits
from finefit.report.plan import PlanningLine, RunPlan, plan_document, show_plan
from finefit.spec.schema import Ddp, DeepSpeed, Fsdp2
from tests.forecasts import COMPONENTS, GIB, make_forecast
from tests.snapshots import Transcript

NOW = datetime(2025, 7, 1, 9, 0)


def make_suggestion(
    *changes: str, fits: bool = True, is_exact: bool = True, peak_gib: float = 22.8, **others: Any
) -> Suggestion:
    values: dict[str, Any] = {"saves_bytes": 11 * GIB, "price": "9 % slower", "step_seconds": 0.47} | others
    return Suggestion(changes=changes, peak_bytes=int(peak_gib * GIB), fits=fits, is_exact=is_exact, **values)


LOSSY = make_suggestion(
    "tuning.base_bits=4", is_exact=False, peak_gib=12.4, price="weights in 4 bits: scores may fall", step_seconds=0.61
)
RECOMPUTE = make_suggestion(
    "levers.recompute=all", "levers.loss_chunk=512", price="9 % slower: 16 more layers are computed twice"
)
OFFLOAD = make_suggestion(
    "levers.offload=inputs",
    fits=False,
    peak_gib=24.1,
    price="21 % slower: inputs wait in host memory",
    step_seconds=0.52,
)


def too_large(**changes: Any) -> Forecast:
    components = COMPONENTS | {"activations": 16 * GIB}
    return make_forecast(**({"components": components, "suggestions": (LOSSY, RECOMPUTE, OFFLOAD)} | changes))


def unreached() -> GradientMap:
    names = [f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_A.default.weight" for layer in range(28)]
    others = [f"base_model.model.model.layers.{layer}.self_attn.k_proj.lora_B.default.weight" for layer in (0, 2, 3, 9)]
    causes = ("their layers ran without gradients",)
    return GradientMap(trainable=392, reached=359, unreached=(*names, *others, "lm_head.weight"), causes=causes)


def shown(forecast: Forecast, width: int = 100, **options: Any) -> str:
    out = io.StringIO()
    show_forecast(forecast, Console(file=out, width=width, markup=False, highlight=False, **options), stage="sft")
    return out.getvalue()


def plan_of(**forecasts: tuple[Forecast, ...]) -> RunPlan:
    """By stage, on each card."""
    costs = {name: training_costs(found) for name, found in forecasts.items()}
    return RunPlan(name="tiny", is_flat=len(costs) == 1, costs=costs)


def cards_shown(*forecasts: Forecast, width: int = 100) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, markup=False, highlight=False)
    show_plan(plan_of(sft=forecasts if len(forecasts) > 1 else forecasts * 2), console, now=NOW)
    return out.getvalue()


EVERY_KIND = [
    make_forecast(),
    too_large(),
    make_forecast(gradients=unreached(), uncertainty=None, notes=()),
    make_forecast(
        card="24GiB", step_seconds=None, tokens_per_second=None, total_seconds=None, cost=None, price_per_hour=None
    ),
]


def _fused() -> Forecast:
    levers = replace(make_forecast().levers, kernels="fused", update="inside", compile=True)
    return make_forecast(levers=levers, reasons={"kernels": "faster", "update": "requested"})


def _packed() -> Forecast:
    return make_forecast(levers=replace(make_forecast().levers, packing=True))


def _pairs() -> Forecast:
    lengths = replace(make_forecast().lengths, sides=2)
    return make_forecast(lengths=lengths, instants=make_forecast().instants | {"reference": int(15 * GIB)})


def _unreached(*names: str) -> Forecast:
    return make_forecast(gradients=GradientMap(trainable=99, reached=99 - len(names), unreached=names))


LIMITS = {
    "qmsum": EvalBatchLimit(rows=1, tokens=200256, mlp_tiles=4, reserved_bytes=40 * GIB, batch_seconds=95.0),
    "rouge": EvalBatchLimit(rows=64, tokens=9, reserved_bytes=3 * GIB, devices=4),
    "amr": EvalBatchLimit(rows=2, tokens=9, devices=2, is_split_over_cards=True),
}
ZERO = DeepSpeed(kind="deepspeed", devices=1, stage=3)
SHOWN: dict[str, tuple[Forecast, int]] = {
    "the place of the peak behind its bar": (make_forecast(), 140),
    "the legend goes down by size": (make_forecast(), 60),
    "what is too much, the edge of the card, and changes with exact ones first": (too_large(), 140),
    "an edge by a hair": (make_forecast(budget_bytes=make_forecast().peak_bytes - GIB // 50), 100),
    "several cards are counted once": (make_forecast(card="8xA100-40GB@9.60/h", devices=8), 100),
    "on a cpu the context is the process": (too_large(card="cpu", suggestions=(LOSSY, OFFLOAD)), 100),
    "components of another name": (make_forecast(components=COMPONENTS | {"kv_cache": GIB, "adapters": GIB}), 100),
    "a peak without a module": (make_forecast(peak_module="", peak_operation="aten::mul.Tensor"), 100),
    "unknown rates": (EVERY_KIND[3], 100),
    "fused kernels": (_fused(), 100),
    "packs hold more rows than micro_batch": (_packed(), 100),
    "pairs are measured by their sides": (_pairs(), 100),
    "evaluations with memory and time": (make_forecast(eval_limits=LIMITS), 160),
    "ddp on a cpu": (make_forecast(card="cpu", devices=2, engine=Ddp(kind="ddp", devices=2)), 100),
    "fsdp2": (make_forecast(engine=Fsdp2(kind="fsdp2", devices=2), devices=2, reasons={"engine": "it fits"}), 100),
    "deepspeed": (make_forecast(engine=ZERO, devices=1, reasons={"engine": "it fits"}), 100),
    "names that differ only in numbers are grouped": (make_forecast(gradients=unreached()), 100),
    "eight groups are named": (_unreached(*(f"part_{letter}.weight" for letter in "abcdefghijk")), 100),
    "a change that does not fit is not to be applied": (too_large(suggestions=(OFFLOAD,)), 100),
}
SLOW = make_forecast(card="RTX 3090", total_seconds=11_520.0, price_per_hour=0.30)
FAST = make_forecast(card="H100 SXM", budget_bytes=79 * GIB, total_seconds=3_100.0, price_per_hour=3.00)
CARDS: dict[str, tuple[tuple[Forecast, ...], int]] = {
    "the cheapest, the fastest and a way to fit": ((SLOW, FAST, too_large(card="RTX 4080", total_seconds=10.0)), 140),
    "both at once, and no way to fit": ((make_forecast(), too_large(card="RTX 4080", suggestions=(OFFLOAD,))), 140),
    "levers under the card": ((make_forecast(), too_large(card="RTX 4080")), 80),
    "levers by short names, and unknown rates": ((_fused(), EVERY_KIND[3]), 200),
}


def test_a_forecast_reads_as_reviewed(tmp_path: Path) -> None:
    """The first in full, of the others the lines that differ."""
    transcript = Transcript(folder=tmp_path)
    transcript.note("# in full", shown(make_forecast()))
    for title, (forecast, width) in SHOWN.items():
        usual = shown(make_forecast(), 100 if forecast == make_forecast() else width).splitlines()
        lines = [line for line in shown(forecast, width).splitlines() if line not in usual]
        transcript.note(f"# {title}", "\n    ".join(lines))
    for title, (forecasts, width) in CARDS.items():
        transcript.note(f"# cards: {title}", cards_shown(*forecasts, width=width))
    transcript.check("forecast")


@pytest.mark.parametrize("width", [60, 80, 100, 140])
@pytest.mark.parametrize("forecast", [make_forecast(), too_large()])
def test_the_legend_sums_to_the_peak(forecast: Forecast, width: int) -> None:
    text = shown(forecast, width)
    legend = text.split("GiB at the peak\n")[1].split("\n\n")[0]
    figures = [float(figure) for figure in re.findall(r"(?<!<)\b\d+\.\d\d\b", legend)]
    assert legend.count("<0.01") == 1
    assert round(sum(figures), 2) == round(forecast.peak_bytes / GIB, 2)


def test_the_bar_is_in_proportion_and_ends_with_free_space() -> None:
    bar = shown(make_forecast()).splitlines()[1]
    assert len(bar) == 100
    assert abs(bar.count("W") - 100 * 14.193 / 23.53) < 1
    assert bar.endswith("M" + "." * bar.count("."))
    assert len(shown(make_forecast(), 140).splitlines()[1]) == 100


def test_colours_take_the_place_of_letters() -> None:
    text = shown(too_large(), force_terminal=True, color_system="truecolor", no_color=False)
    bar = re.sub(r"\x1b\[[0-9;]*m", "", text.splitlines()[1])
    assert re.fullmatch(r"█+┃▒+", bar)
    assert len(bar) == 100


def test_a_group_never_claims_a_name_that_is_reached() -> None:
    names = tuple(f"layers.{layer}.experts.{expert}.w1" for layer in range(4) for expert in range(8) if expert != layer)
    text = shown(make_forecast(gradients=GradientMap(trainable=99, reached=71, unreached=names)))
    assert "layers.{0..3}.experts.{0..7}.w1" not in text
    assert "layers.{0..3}.experts.{4..7}.w1" in text or "layers.{0..3}.experts.7.w1" in text


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("forecast", EVERY_KIND)
def test_no_line_is_wider_than_the_console_and_none_is_padded(forecast: Forecast, width: int) -> None:
    for line in shown(forecast, width).splitlines() + cards_shown(forecast, too_large(), width=width).splitlines():
        assert len(line) <= width
        assert line == line.rstrip()


@pytest.mark.parametrize("forecast", EVERY_KIND)
def test_nothing_is_printed_twice(forecast: Forecast) -> None:
    lines = [line for line in shown(forecast).splitlines() if line]
    assert len(lines) == len(set(lines))
    labels = [line[:12].strip() for line in lines if re.match(r"[a-z]+ {2,}\S", line)]
    assert len(labels) == len(set(labels))


@pytest.mark.parametrize("forecast", EVERY_KIND)
def test_plain_output_has_no_escape_codes_and_only_ascii(forecast: Forecast) -> None:
    text = shown(forecast) + cards_shown(forecast)
    assert "\x1b" not in text
    assert text.isascii()


def test_without_colours_a_terminal_gets_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = shown(make_forecast(), force_terminal=True, color_system="truecolor")
    assert "WWWW" in text
    assert not re.search(r"\x1b\[[0-9;]*(3[0-8]|4[0-8])", text)


def test_the_document_has_every_promised_key() -> None:
    document = plan_document(plan_of(sft=(make_forecast(), too_large(card="24GiB"))))
    own = {field.name for field in fields(Forecast)} | {"stages", "cards"}
    assert document.keys() == own | {"stage", "free_disk_bytes", "does_not_fit"}
    assert document["gradients"] == {"trainable": 392, "reached": 392, "unreached": [], "causes": [], "frozen": []}
    assert [card["card"] for card in document["cards"]] == ["RTX 4090", "24GiB"]
    (first, *_) = document["cards"][1]["suggestions"]
    assert first.keys() == {"changes", "saves_bytes", "peak_bytes", "fits", "is_exact", "price", "step_seconds"}
    assert first["changes"] == ["levers.recompute=all", "levers.loss_chunk=512"]


def test_a_peak_is_in_a_module_and_in_an_operation_that_computes_something() -> None:
    for operation, place in (
        ("aten::empty_strided", "layers.3.mlp"),
        ("aten::empty.memory_format", "layers.3.mlp"),
        ("aten::_log_softmax_backward_data", "layers.3.mlp, log_softmax backward"),
    ):
        text = shown(make_forecast(peak_module="layers.3.mlp", peak_operation=operation), 120)
        assert [line.partition("peak in ")[2] for line in text.splitlines() if "peak in " in line] == [place]


def test_a_table_of_cards_shows_the_change_that_a_card_alone_is_shown_first() -> None:
    """Not a faster one with more changes, of which the second does no good."""
    both = make_suggestion("optimizer.kind=adamw_8bit", *LOSSY.changes, is_exact=False, step_seconds=0.5)
    forecast = too_large(suggestions=(LOSSY, both, OFFLOAD))
    text = cards_shown(make_forecast(), forecast, width=200)
    assert text.splitlines()[2].endswith(" fits with tuning.base_bits=4")


def test_a_long_wait_shows_card_candidate_and_time_and_what_is_left() -> None:
    now = 0.0
    line = PlanningLine("rehearsing", clock=lambda: now)
    assert str(line) == "rehearsing, 0 s"
    for at, card, number in ((0.0, "RTX 4090", 1), (5.0, "RTX 4090", 1), (15.0, "L4", 2), (15.0, "L4", 2)):
        now = at
        line.note(PlanningProgress(card=card, number=number, num_cards=3, doing="micro_batch 4, recompute 12"))
    assert line.overdue() is None
    now = 25.0
    expected = "rehearsing for L4 (card 2 of 3), 25 s, about 20 s left: candidate 2, micro_batch 4, recompute 12"
    assert (line.overdue(), line.overdue()) == (expected, None)
    assert line.__rich__().plain == expected


def test_the_stage_that_fills_its_card_most_stands_at_the_top_of_the_document() -> None:
    small, large = make_forecast(budget_bytes=80 * GIB), make_forecast()
    document = plan_document(plan_of(sft=(small, small), dpo=(large, replace(large, card="24GiB"))))
    assert document["budget_bytes"] == large.budget_bytes
    assert document["stages"]["sft"]["budget_bytes"] == small.budget_bytes
    assert [card["card"] for card in document["cards"]] == ["RTX 4090", "24GiB"]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.043, "43 ms"),
        (0.43, "0.43 s"),
        (12.34, "12.3 s"),
        (59.96, "1 min 0 s"),
        (517, "8 min 37 s"),
        (11520, "3 h 12 min"),
        (187300, "2 d 4 h"),
    ],
)
def test_durations_have_two_units_at_most(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_shares_sum_to_the_whole() -> None:
    assert apportion([1, 1, 1], 100) == [34, 33, 33]
    assert apportion([0, 0], 0) == [0, 0]


def test_three_digits_are_enough() -> None:
    assert [three_digits(value) for value in (0.02134, 18.34, 1234.0)] == ["0.0213", "18.3", "1,230"]
