"""A forecast as a user reads it, and as a document."""

import io
import re
from dataclasses import fields, replace
from datetime import datetime
from typing import Any

import pytest
from rich.console import Console

from finefit.artifacts.forecasts import EvalBatchLimit, Forecast, GradientMap, Suggestion
from finefit.plan.stage_costs import training_costs
from finefit.report.forecast import ordered_suggestions, show_forecast
from finefit.report.layout import apportion, duration, three_digits
from finefit.report.plan import RunPlan, plan_document, show_plan
from finefit.spec.schema import Ddp, DeepSpeed, Engine, Fsdp2
from tests.forecasts import COMPONENTS, GIB, make_forecast

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


def line_with(text: str, part: str) -> str:
    (line,) = [line for line in text.splitlines() if part in line]
    return line


EVERY_KIND = [
    make_forecast(),
    too_large(),
    make_forecast(gradients=unreached(), uncertainty=None, notes=()),
    make_forecast(
        card="24GiB", step_seconds=None, tokens_per_second=None, total_seconds=None, cost=None, price_per_hour=None
    ),
]


def test_the_verdict_says_both_numbers_and_what_is_left() -> None:
    assert shown(make_forecast()).splitlines()[0] == "sft fits: 21.3 of 23.5 GiB on RTX 4090, 2.2 GiB to spare"


def test_the_verdict_says_both_numbers_and_what_is_too_much() -> None:
    assert (
        shown(too_large()).splitlines()[0] == "sft does not fit: needs 33.9 GiB, RTX 4090 has 23.5 (10.4 GiB too much)"
    )


def test_a_verdict_by_a_hair_shows_the_hair() -> None:
    peak_bytes = make_forecast().peak_bytes
    assert "(0.00 GiB" not in shown(make_forecast(budget_bytes=peak_bytes - GIB // 50))
    assert "needs 21.34 GiB, RTX 4090 has 21.32 (0.02 GiB too much)" in shown(
        make_forecast(budget_bytes=peak_bytes - GIB // 50)
    )


def test_several_cards_are_counted_once_and_judged_each() -> None:
    for card in ("A100-40GB", "8xA100-40GB", "8xA100-40GB@9.60/h"):
        assert "on each of 8xA100-40GB, " in shown(make_forecast(card=card, devices=8))


@pytest.mark.parametrize("width", [60, 80, 100, 140])
@pytest.mark.parametrize("forecast", [make_forecast(), too_large()])
def test_the_legend_sums_to_the_peak(forecast: Forecast, width: int) -> None:
    text = shown(forecast, width)
    legend = text.split("GiB at the peak\n")[1].split("\n\n")[0]
    figures = [float(figure) for figure in re.findall(r"(?<!<)\b\d+\.\d\d\b", legend)]
    assert legend.count("<0.01") == 1
    assert round(sum(figures), 2) == round(forecast.peak_bytes / GIB, 2)


def test_the_legend_goes_down_by_size_and_ends_with_what_comes_on_top() -> None:
    text = shown(make_forecast(), 60)
    places = [
        text.index(f" {name} ")
        for name in ("weights", "activations", "loss", "temporary", "optimizer state", "gradients")
    ]
    assert places == sorted(places)
    assert [name in text for name in ("held by the allocator", "CUDA context", "margin")] == [True] * 3


def test_on_a_cpu_the_context_is_the_process() -> None:
    text = shown(make_forecast(card="cpu"))
    assert "P process" in text
    assert "CUDA" not in text
    assert "the memory ends here" in shown(too_large(card="cpu"))


def test_the_bar_is_in_proportion_and_ends_with_free_space() -> None:
    bar = shown(make_forecast()).splitlines()[1]
    assert len(bar) == 100
    assert abs(bar.count("W") - 100 * 14.193 / 23.53) < 1
    assert bar.endswith("M" + "." * bar.count("."))
    assert len(shown(make_forecast(), 140).splitlines()[1]) == 100


def test_components_of_another_name_get_a_letter_of_their_own() -> None:
    text = shown(make_forecast(components=COMPONENTS | {"kv_cache": GIB, "adapters": GIB}))
    assert "K kv cache" in text
    assert "D adapters" in text


def test_a_plan_that_does_not_fit_marks_the_edge() -> None:
    _, bar, mark, *_ = shown(too_large()).splitlines()
    assert len(bar) == 100
    assert abs(bar.index("|") - 100 * 23.53 / 33.94) < 1
    assert mark == " " * bar.index("|") + "^ the card ends here"
    inside, beyond = bar.split("|")
    assert (inside.isupper(), beyond.islower()) == (True, True)


def test_an_edge_at_the_far_end_is_still_marked() -> None:
    _, bar, mark, *_ = shown(make_forecast(budget_bytes=21 * GIB)).splitlines()
    assert mark.endswith("the card ends here ^")
    assert mark.index("^") == bar.index("|")


def test_colours_take_the_place_of_letters() -> None:
    text = shown(too_large(), force_terminal=True, color_system="truecolor", no_color=False)
    bar = re.sub(r"\x1b\[[0-9;]*m", "", text.splitlines()[1])
    assert re.fullmatch(r"█+┃▒+", bar)
    assert len(bar) == 100


def test_instants_stand_in_the_order_of_a_step_and_the_peak_with_its_place() -> None:
    text = shown(make_forecast())
    rows = text[text.index("allocated") : text.index("time ")]
    assert re.findall(r"([a-z]+) +\d+\.\d\d +#", rows) == [
        "load",
        "batch",
        "forward",
        "loss",
        "backward",
        "update",
        "validation",
        "generation",
    ]
    assert line_with(text, "#  peak").strip().startswith("backward")
    assert "            peak in layers.27.mlp.down_proj.lora_A, log_softmax backward\n" in text
    assert line_with(shown(make_forecast(), 140), "#  peak").endswith(
        "#  peak in layers.27.mlp.down_proj.lora_A, log_softmax backward"
    )


def test_time_and_cost_in_words() -> None:
    text = shown(make_forecast())
    assert "0.43 s a step (4,761 tokens/s), 1,204 steps, 8 min 37 s\n" in text
    assert "costs 0.16 at 1.10 an hour; 62.1 TFLOP and 2,047 tokens a step\n" in text


def test_the_operation_of_the_peak_needs_no_module() -> None:
    text = shown(make_forecast(peak_module="", peak_operation="aten::mul.Tensor"))
    assert line_with(text, "#  peak").endswith("#  peak in mul")
    assert text.count("peak in") == 1


def test_unknown_rates_say_so() -> None:
    unknown = make_forecast(card="24GiB", step_seconds=None, tokens_per_second=None, total_seconds=None, cost=None)
    text = shown(unknown)
    assert "no time: the rates of 24GiB are not known" in text
    assert "1,204 steps, 62.1 TFLOP" in text
    assert "not known" in cards_shown(unknown)


def test_a_lever_stands_with_its_reason_and_neutral_ones_share_a_line() -> None:
    text = shown(make_forecast())
    assert re.search(r"micro_batch 4, accumulated 4 times +the largest that fits; 8 needs 27.9 GiB\n", text)
    assert re.search(r"recompute 12 layers +the fewest layers", text)
    assert re.search(r"loss in chunks of 1,024 tokens +logits", text)
    assert "no attention kept, no offload, no MLP tiles\n" in text


def test_rows_parameters_machine_and_certainty_take_a_line_each() -> None:
    lines = shown(make_forecast()).splitlines()
    for line in (
        "rows        3,211 rows, longest 1,904 tokens, mean 512; supervised at most 880, mean 210 (counted)",
        "parameters  39,976,960 trained of 7,655,593,472 (0.52 %)",
        "machine     15.40 GiB of host memory, 0.93 GiB of disk",
        "gradients   all 392 trained tensors get a gradient",
        "certainty   earlier forecasts on this card were within 0.4 %",
    ):
        assert line in lines


def test_evaluations_stand_with_their_memory_and_a_rough_time() -> None:
    alone = EvalBatchLimit(rows=1, tokens=200256, mlp_tiles=4, reserved_bytes=40 * GIB, batch_seconds=95.0)
    shared, spread = (
        EvalBatchLimit(rows=64, tokens=9, reserved_bytes=3 * GIB, devices=4),
        EvalBatchLimit(rows=2, tokens=9, devices=2, is_spread=True),
    )
    text = shown(make_forecast(eval_limits={"qmsum": alone, "rouge": shared, "amr": spread}), width=160)
    assert (
        "qmsum: one answer at a time, 40.00 GiB, about 1 min 35 s for a batch of the longest, MLPs in 4 pieces" in text
    )
    assert "rouge: 64 answers at a time, 3.00 GiB, items shared over 4 processes" in text
    assert "amr: 2 answers at a time, one model spread over 2 cards" in text
    assert "evaluation" not in shown(make_forecast())


def test_pairs_are_counted_as_pairs_and_measured_by_their_sides() -> None:
    lengths = replace(make_forecast().lengths, sides=2)
    text = shown(make_forecast(lengths=lengths, instants=make_forecast().instants | {"reference": int(15 * GIB)}))
    assert line_with(text, "3,211 pairs, longest 1,904 tokens of a side").startswith("pairs ")
    at = [text.index(f"\n            {name} ") for name in ("reference", "forward", "loss")]
    assert at == sorted(at)


ENGINES: dict[str, tuple[Engine, int, str]] = {
    "ddp": (Ddp(kind="ddp", devices=4), 4, "ddp, 4 processes: it fits"),
    "fsdp2": (Fsdp2(kind="fsdp2", devices=2), 2, "fsdp2, 2 processes: it fits"),
    "deepspeed": (DeepSpeed(kind="deepspeed", devices=1, stage=3), 1, "deepspeed, ZeRO stage 3, 1 process: it fits"),
}


@pytest.mark.parametrize(("engine", "devices", "said"), ENGINES.values(), ids=ENGINES)
def test_an_engine_of_several_processes_stands_with_its_reason(engine: Engine, devices: int, said: str) -> None:
    text = shown(make_forecast(engine=engine, devices=devices, reasons={"engine": "it fits"}))
    assert line_with(text, "engine  ").endswith(said)
    assert "engine  " not in shown(make_forecast())


def test_processes_on_a_cpu_are_still_on_a_cpu() -> None:
    text = shown(make_forecast(card="cpu", devices=2, engine=Ddp(kind="ddp", devices=2)))
    assert "process " in text
    assert "CUDA" not in text


def test_fused_kernels_and_updates_inside_backward_are_said() -> None:
    levers = replace(make_forecast().levers, kernels="fused", update="inside", compile=True)
    text = shown(make_forecast(levers=levers, reasons={"kernels": "faster", "update": "asked for"}))
    assert "faster" in line_with(text, "fused kernels")
    assert "asked for" in line_with(text, "each tensor updated inside backward")
    assert "layers compiled" in text
    assert "fused, update inside, compiled" in cards_shown(make_forecast(levers=levers), make_forecast(), width=200)


def test_names_that_differ_only_in_numbers_are_grouped() -> None:
    text = shown(make_forecast(gradients=unreached()))
    assert "33 of 392 trained tensors get no gradient:" in text
    for name in ("layers.{0..27}.self_attn.q_proj.lora_A", "layers.{0,2..3,9}.self_attn.k_proj.lora_B", "lm_head"):
        assert line_with(text, name).strip() == name
    assert "likely because their layers ran without gradients" in text


def test_a_group_never_claims_a_name_that_is_reached() -> None:
    names = tuple(f"layers.{layer}.experts.{expert}.w1" for layer in range(4) for expert in range(8) if expert != layer)
    text = shown(make_forecast(gradients=GradientMap(trainable=99, reached=71, unreached=names)))
    assert "layers.{0..3}.experts.{0..7}.w1" not in text
    assert "layers.{0..3}.experts.{4..7}.w1" in text or "layers.{0..3}.experts.7.w1" in text


def test_no_more_than_eight_groups_are_named() -> None:
    names = tuple(f"part_{letter}.weight" for letter in "abcdefghijk")
    text = shown(make_forecast(gradients=GradientMap(trainable=99, reached=88, unreached=names)))
    assert "part_h" in text
    assert "part_i" not in text
    assert "and 3 more such names" in text


def test_suggestions_are_numbered_with_exact_ones_first() -> None:
    assert ordered_suggestions((LOSSY, RECOMPUTE, OFFLOAD)) == (RECOMPUTE, OFFLOAD, LOSSY)
    text = shown(too_large(), 140)
    assert line_with(text, "recompute=all").split()[:7] == [
        "1",
        "levers.recompute=all",
        "22.80",
        "yes",
        "0.47",
        "s",
        "exact",
    ]
    assert line_with(text, "offload=inputs").split()[:4] == ["2", "levers.offload=inputs", "24.10", "no"]
    assert line_with(text, "base_bits=4").split()[0] == "3"
    assert text.endswith("finefit plan SPEC --apply 1 writes the first into the spec\n")


def test_the_command_names_the_first_suggestion_that_fits() -> None:
    assert "--apply 2 writes number 2" in shown(too_large(suggestions=(LOSSY, OFFLOAD)))
    assert "--apply" not in shown(too_large(suggestions=(OFFLOAD,)))
    assert "--apply" not in shown(make_forecast(suggestions=(RECOMPUTE,)))


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


def test_the_cheapest_and_the_fastest_are_marked() -> None:
    slow = make_forecast(card="RTX 3090", total_seconds=11_520.0, price_per_hour=0.30)
    fast = make_forecast(card="H100 SXM", budget_bytes=79 * GIB, total_seconds=3_100.0, price_per_hour=3.00)
    over = too_large(card="RTX 4080", total_seconds=10.0)
    text = cards_shown(slow, fast, over, width=140)
    assert line_with(text, "RTX 3090").endswith("cheapest")
    assert line_with(text, "H100 SXM").endswith("fastest")
    assert line_with(text, "RTX 4080").endswith("fits with recompute=all, loss_chunk=512")
    assert re.search(
        r"yes +21.3 of +23.5 +micro 4, recompute 12, chunk 1,024 +3 h 12 min +Tue 12:12 +0.96",
        line_with(text, "RTX 3090"),
    )


def test_one_card_may_be_both_and_one_may_have_no_way_to_fit() -> None:
    text = cards_shown(make_forecast(), too_large(card="RTX 4080", suggestions=(OFFLOAD,)), width=140)
    assert line_with(text, "RTX 4090").endswith("cheapest, fastest")
    assert line_with(text, "RTX 4080").endswith("no change found that fits")


def test_a_narrow_console_gets_the_levers_under_the_card() -> None:
    lines = cards_shown(make_forecast(), too_large(card="RTX 4080"), width=80).splitlines()
    assert lines[1].startswith("RTX 4090  yes")
    assert lines[2] == "          micro 4, recompute 12, chunk 1,024"


def test_the_document_has_every_promised_key() -> None:
    document = plan_document(plan_of(sft=(make_forecast(), too_large(card="24GiB"))))
    own = {field.name for field in fields(Forecast)} | {"stages", "cards"}
    assert document.keys() == own | {"stage", "free_disk_bytes", "does_not_fit"}
    assert document["gradients"] == {"trainable": 392, "reached": 392, "unreached": [], "causes": [], "frozen": []}
    assert [card["card"] for card in document["cards"]] == ["RTX 4090", "24GiB"]
    (first, *_) = document["cards"][1]["suggestions"]
    assert first.keys() == {"changes", "saves_bytes", "peak_bytes", "fits", "is_exact", "price", "step_seconds"}
    assert first["changes"] == ["levers.recompute=all", "levers.loss_chunk=512"]


def test_components_of_the_document_sum_to_what_is_allocated() -> None:
    document = plan_document(plan_of(sft=(make_forecast(),)))
    assert sum(document["components"].values()) == document["allocated_bytes"]


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
