"""A comparison as people see it: nothing in an answer is markup, nothing is left out in silence, and the page needs
nothing from elsewhere."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from finefit.artifacts.records import write_record
from finefit.compare.comparison import compare
from finefit.compare.records import Comparison, Prediction, ScoreInterval
from finefit.errors import UserError
from finefit.report.compare import (
    document,
    format_difference,
    format_interval,
    format_p,
    format_prediction,
    format_spread,
    markdown,
    terminal_view,
)
from finefit.report.compare_page import page, write_files
from finefit.report.layout import shortened, visible, without_markup
from finefit.report.scores import format_value
from finefit.stats.comparisons import Spread
from finefit.stats.metrics import mean, rate
from tests.evals import make_item
from tests.runs import HIT, make_run, split_by_dataset

HITS = (1, 0, 1, 1, 0, 1, 1, 0, 1, 1)
MISSES = (1, 0, 0, 1, 0, 0, 1, 1, 1, 0)
EVIL = '<script>alert("x")</script> | $a_b$ \x1b[31m \x00 `x` &amp; <img src=http://x/y>'


@pytest.fixture
def compared(tmp_path: Path) -> Comparison:
    one = make_run(tmp_path / "a-1", results={"checkpoint-6": HITS})
    other = make_run(tmp_path / "b-1", results={"checkpoint-6": MISSES}, overrides=["tuning.rank=16", "name=other"])
    return compare([str(one.path), str(other.path)])


@pytest.fixture
def evil(tmp_path: Path) -> Comparison:
    def items(hits: tuple[int, ...]) -> list[object]:
        said = {"prompt": EVIL, "answer": EVIL, "reference": EVIL, "failure": EVIL, "place": EVIL}
        return [replace(make_item(at, hit=float(hit)), **said) for at, hit in enumerate(hits)]  # type: ignore[arg-type]

    one = make_run(tmp_path / "<b>$x$-1", results={"checkpoint-6": items(HITS)}, signature={"a": EVIL})  # type: ignore[dict-item]
    other = make_run(tmp_path / "b|-1", results={"checkpoint-6": items(MISSES)}, signature={"a": "b"})  # type: ignore[dict-item]
    return compare([str(one.path), str(other.path)])


def _shown(comparison: Comparison, width: int = 120) -> str:
    console = Console(width=width, record=True, force_terminal=False, markup=False, emoji=False, highlight=False)
    with console.capture() as captured:
        console.print(terminal_view(comparison))
    return captured.get()


def _without_seeds_of(folder: Path, *, missing: bool) -> Comparison:
    runs = [
        make_run(folder / f"s-{seed}", results={"checkpoint-6": HITS}, overrides=[f"seed={seed}"]) for seed in (1, 2)
    ]
    last = make_run(folder / "s-3", results={} if missing else {"checkpoint-6": MISSES}, overrides=["seed=3"])
    return compare([str(run.path) for run in (*runs, last)])


def test_eighty_columns_are_enough_for_two_runs(compared: Comparison) -> None:
    text = _shown(compared, width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text.split("most gained")[0]


def test_the_losses_of_each_side_are_shown(compared: Comparison) -> None:
    shown = " ".join(_shown(compared).replace("│", " ").split())
    assert "final train 0.5000 (step 6) 0.5000 (step 6)" in shown
    assert "best validation 0.7000 (step 6) 0.7000 (step 6)" in shown
    assert "| final train | 0.5000 (step 6) | 0.5000 (step 6) |" in markdown(compared)
    untrained = replace(compared, curves=())
    assert "final train" not in _shown(untrained) + markdown(untrained)


@pytest.mark.parametrize(
    "prompt",
    [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nadd 1\nand 2<|im_end|>\n<|im_start|>assistant\n",
        (
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nadd 1\nand 2<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
        ),
        "<|system|>Be brief.<|end|>\n<|user|>add 1\nand 2<|end|>\n<|assistant|>",
    ],
    ids=["ChatML", "Llama 3", "Phi"],
)
def test_a_prompt_is_shown_without_the_tokens_of_its_template(prompt: str) -> None:
    lines = [line for line in without_markup(prompt).splitlines() if line]
    assert lines == ["system: Be brief.", "user: add 1", "and 2"]
    assert without_markup("is 1 < 2 | 3 > 2? <b>x</b>") == "is 1 < 2 | 3 > 2? <b>x</b>"


def test_items_are_shown_without_the_tokens_of_a_template(tmp_path: Path) -> None:
    def items(hits: tuple[int, ...]) -> list[object]:
        prompt = "<|im_start|>user\nadd 1 and 2<|im_end|>\n<|im_start|>assistant\n"
        return [replace(make_item(at, hit=float(hit)), prompt=prompt) for at, hit in enumerate(hits)]

    runs = [make_run(tmp_path / n, results={"checkpoint-6": items(h)}) for n, h in (("a-1", HITS), ("b-1", MISSES))]  # type: ignore[dict-item]
    found = compare([str(run.path) for run in runs])
    for text in (_shown(found), page(found)):
        assert "im_start" not in text
        assert "user: add 1 and 2" in text


def test_a_missing_run_is_missing_in_every_view(tmp_path: Path) -> None:
    found = _without_seeds_of(tmp_path, missing=True)
    row = next(line for line in _shown(found).splitlines() if line.startswith("│ s-3"))
    assert row.count("missing") == 3
    assert "70.0% ± 0.0% (2 seeds, 1 missing)" in _shown(found)
    assert "| s-3 | missing | missing | missing |" in markdown(found)
    assert '<span class="warn">missing</span>' in page(found)


def test_items_are_ranked_by_a_metric_that_they_have(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / n, results={"checkpoint-6": hits}, metrics=(rate("acc"), HIT))
        for n, hits in (("a-1", HITS), ("b-1", MISSES))
    ]
    found = compare([str(run.path) for run in runs])
    assert "1 better, 6 equal, 3 worse by hit" in _shown(found)
    assert "1 better, 6 equal, 3 worse by hit" in page(found)


def test_control_characters_do_not_reach_the_terminal(evil: Comparison) -> None:
    text = _shown(evil)
    assert "\x1b" not in text
    assert "\x00" not in text
    assert "\\u001b[31m" in text
    assert visible("a\nb\tc\x07\x9b") == "a\nb\tc\\u0007\\u009b"


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_nothing_in_an_answer_becomes_a_part_of_the_page(evil: Comparison) -> None:
    text = page(evil)
    parsed = _Page()
    parsed.feed(text)
    assert not {tag for tag, _ in parsed.tags} & {"script", "img", "iframe", "link", "object", "b", "base"}
    assert not [name for _, attributes in parsed.tags for name in attributes if name.startswith("on")]
    assert text.count("&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;") >= 8
    assert "\x1b" not in text
    assert "\x00" not in text


def test_the_page_asks_for_nothing_from_elsewhere(compared: Comparison) -> None:
    text = page(compared)
    assert set(re.findall(r"https?://[^\s\"']+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "url(http" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text


def test_a_page_without_matplotlib_names_the_extra_and_a_stage_still_gets_one(
    compared: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finefit.report.plots.find_spec", lambda _: None)
    with pytest.raises(UserError, match=re.escape("pip install 'finefit[plots]'")):
        page(compared)
    write_record(tmp_path / "comparison.json", compared)
    write_files(tmp_path / "comparison.json")
    written = (tmp_path / "comparison.html").read_text(encoding="utf-8")
    assert "finefit[plots]" in written
    assert "<svg" not in written


def test_every_plot_is_whole_in_the_ink_of_the_page(compared: Comparison) -> None:
    image_refs = re.findall(r"<svg.*?</svg>", page(compared), re.DOTALL)
    assert len(image_refs) == 4  # scores, differences, items, losses
    for svg in image_refs:
        ElementTree.fromstring(svg)
        assert "currentColor" in svg
        assert "#010203" not in svg
        assert "#040506" not in svg
        assert "<style" not in svg
    words = " ".join(image_refs)
    assert "a-1" in words
    assert "mathdefault" not in words


def test_a_dollar_in_a_name_is_no_formula(evil: Comparison) -> None:
    words = " ".join(re.findall(r"<svg.*?</svg>", page(evil), re.DOTALL))
    assert words.count("&lt;b&gt;$x$-1") >= 2


def test_the_same_comparison_is_the_same_page(compared: Comparison) -> None:
    assert page(compared) == page(compared)


def test_markdown_has_scores_differences_and_settings_as_tables(compared: Comparison) -> None:
    text = markdown(compared)
    assert "| tuning.rank | 4 | 16 |" in text
    assert "| a-1 | 10 | 100% | 70.0% (39.7% .. 89.2%) |" in text
    assert "| hit | 70.0% | 50.0% | -20.0 pp | -55.5 .. +22.2 | 0.625 | 0.625 |" in text
    rows = [line.count("|") for line in text.splitlines() if line.startswith("|")]
    assert set(rows) <= {4, 5, 8}


def test_markdown_takes_nothing_for_markup(evil: Comparison) -> None:
    text = markdown(evil)
    assert "<script>" not in text
    assert "<b>" not in text.replace("\\<b\\>", "")
    assert "b\\|-1" in text


def test_the_document_is_the_record_and_strict_json(compared: Comparison) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    found = json.loads(document(compared), parse_constant=refuse)
    assert found["verdict"] == "one setting differs: tuning.rank"
    assert found["tasks"][0]["pairings"][0]["changes"][0]["value"] == pytest.approx(-0.2)
    assert found["tasks"][0]["scored"][0].keys() == {"n", "available", "coverage", "metrics", "by_dataset"}


def test_data_sets_stand_below_their_model_with_intervals_everywhere(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"{name}-1", results={"checkpoint-6": hits}) for name, hits in (("a", HITS), ("b", MISSES))
    ]
    split_by_dataset(runs[0], {"charts": 4, "<i>scans</i>": 6})
    found = compare([str(run.path) for run in runs])
    assert re.search(r"a-1, charts\s+│\s+4 │\s+100% │\s+75.0%  30.1% .. 95.4%", _shown(found))
    assert "| a-1, charts | 4 | 100% | 75.0% (30.1% .. 95.4%) |" in markdown(found)
    assert "a-1, charts</td><td class=n>4</td>" in page(found)
    assert "<i>scans" not in page(found)


def test_numbers_are_shown_in_their_unit() -> None:
    share, points, plain = mean("x"), mean("x", unit="points"), mean("x", unit="number")
    assert [format_value(metric, 0.1234) for metric in (share, points, plain)] == ["12.3%", "0.1", "0.123"]
    assert [format_difference(metric, -0.1234) for metric in (share, points, plain)] == ["-12.3 pp", "-0.1", "-0.123"]
    assert format_difference(plain, 12345.0) == "+12,300"
    assert format_interval(share, ScoreInterval(value=0.5, low=0.25, high=0.75)) == "25.0% .. 75.0%"
    assert format_interval(plain, ScoreInterval(value=0.5, low=0.0, high=None)) == "unbounded"
    assert (format_p(0.0004), format_p(0.0421)) == ("< 0.001", "0.042")
    assert format_spread(share, Spread(mean=0.5, deviation=None, n=1, missing=0)) == "50.0% (1 seed)"
    assert format_spread(share, Spread(mean=None, deviation=None, n=0, missing=2)) == "missing"


def test_a_prediction_is_compared_with_the_measurement() -> None:
    row = Prediction(
        quantity="peak memory", unit="bytes", predicted=(2**31, None, 2**30), measured=(2**30, 2**30, None)
    )
    assert [format_prediction(row, at) for at in range(3)] == [
        "2.00 GiB -> 1.00 GiB (+100%)",
        "1.00 GiB measured",
        "1.00 GiB predicted",
    ]


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    assert shortened("a" * 50 + "b" * 50, 20) == "a" * 10 + " [... 80 characters ...] " + "b" * 10
    assert shortened("short", 20) == "short"
