"""The report of a run: its first lines answer what people ask, its plots lose no spike, and nothing in a run's rows,
answers or settings becomes a part of the page."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from finefit.artifacts.atomic import Journal
from finefit.artifacts.records import PipelineState, Run, StageState, read_record, write_record
from finefit.artifacts.rundir import RunDir, stage_of
from finefit.cli import main
from finefit.errors import RunError, UserError
from finefit.report.run_page import markdown_report, page, write_report
from finefit.report.run_plots import smoothed, thinned
from finefit.results import OpenRun
from tests.evals import make_item
from tests.runs import make_bare, make_run

EVIL = '<script>alert("x")</script> | $a_b$ \x1b[31m \x00 `x` &amp; <img src=http://x/y onerror=alert(1)>\n# title'
GiB = 2**30


def _write_steps(run: RunDir, count: int) -> None:
    where = stage_of(run)
    where.metrics.unlink()
    with Journal(where.metrics) as metrics, Journal(where.memory) as memory:
        metrics.write(event="started", step=0)
        for step in range(1, count + 1):
            speed = {"tokens": 100, "seconds": 2.0, "wait_seconds": 0.5, "tokens_per_second": 50.0}
            measures = {"grad_norm": 1.5, "margin": step / 10}
            metrics.write(step=step, loss=4.0 - step / count, learning_rate=1e-4, **speed, **measures)
            memory.write(instant="step", step=step, peak_bytes=2 * GiB, resident_bytes=GiB)
        metrics.write(event="spike", step=2, found=9.0, usual=3.0)
        for step, loss in ((count // 2, 3.5), (count, 3.25)):
            metrics.write(event="validated", step=step, validation_loss=loss)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    evil = replace(make_item(0, hit=0.0), prompt=EVIL, answer=EVIL, reference=EVIL, place=EVIL, failure=EVIL)
    results = {"base": (evil, 0.0, 1.0), "checkpoint-6": (evil, 1.0, 1.0)}
    made = make_run(tmp_path_factory.mktemp("report") / "tiny-1", results=results)
    made.spec_yaml.write_text(f"name: tiny  # {EVIL}\n", encoding="utf-8")
    _write_steps(made, 6)
    return made


@pytest.fixture(scope="module")
def shown(run: RunDir) -> str:
    return page(run)


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.values: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        self.values += [value or "" for _, value in attrs]


def test_the_first_lines_answer_what_people_ask_of_a_run(shown: str) -> None:
    answers = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", shown))
    assert answers["Is it done?"].startswith("finished: step 6 of 6; 600 tokens in 15.0 s")
    assert answers["Does it learn?"].startswith("training loss 3.8333 at first, 3.0000 at last; validation loss 3.5000")
    assert answers["Does it fit?"].startswith("peak memory 2.50 GiB, planned for")
    assert answers["Is it as fast as planned?"].startswith("50 tokens per second at the median, planned 50; 25.0%")
    assert answers["Which checkpoint is best?"].endswith("lowest validation loss 3.2500 at step 6")


def test_every_quantity_has_a_plot_in_the_ink_of_the_page(shown: str) -> None:
    plots = re.findall(r"<svg.*?</svg>", shown, re.DOTALL)
    captions = re.findall(r"<div><h4>(.*?)</h4><figure", shown)
    speed = ["tokens per second", "learning rate", "norm of the gradient", "seconds per step"]
    assert captions == ["loss by step", "memory, measured and planned", *speed, "margin"]
    assert len(plots) == len(captions)
    for svg in plots:
        ElementTree.fromstring(svg)
        assert "currentColor" in svg
    assert {"training, each step", "validation", "spike"} <= set(re.findall(r">([^<>]+)</text>", plots[0]))
    assert "planned" in plots[1]


def test_nothing_in_a_run_becomes_a_part_of_its_page(shown: str) -> None:
    parsed = _Page()
    parsed.feed(shown)
    assert not set(parsed.tags) & {"script", "img", "iframe", "link", "object", "base", "form"}
    assert not [name for name in parsed.attributes if name.startswith("on")]
    assert shown.count("&lt;script&gt;") >= 4  # prompt, answer, reference, place
    assert "\x1b" not in shown
    assert "\x00" not in shown


def test_the_page_asks_for_nothing_from_elsewhere(shown: str) -> None:
    parsed = _Page()
    parsed.feed(shown)
    addresses = {value for value in parsed.values if "//" in value}
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "url(http" not in shown
    assert "@import" not in shown
    assert "default-src 'none'" in shown


def test_markdown_has_the_same_tables_and_no_markup_of_an_answer(run: RunDir) -> None:
    text = markdown_report(run)
    outside = "\n".join(line for line in text.splitlines() if not line.startswith("    "))
    assert "**Does it learn?** training loss 3.8333" in outside
    assert "| checkpoint | n | coverage | hit |" in outside
    assert "\\<script\\>" in outside
    assert "<script>" not in outside
    assert "\n# title" not in text
    for table in re.findall(r"(?:^\|.*\n)+", outside, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_a_notebook_gets_the_page_in_a_frame_that_runs_nothing(run: RunDir) -> None:
    parsed = _Page()
    parsed.feed(OpenRun(run.path)._repr_html_())
    assert parsed.tags == ["iframe"]
    assert parsed.attributes == ["sandbox", "title", "srcdoc", "style"]


def test_the_tables_have_a_row_for_each_step_and_a_column_for_each_quantity(run: RunDir) -> None:
    opened = OpenRun(run.path)
    metrics = opened.metrics()
    assert metrics.column("step").to_pylist() == [1, 2, 3, 4, 5, 6]
    assert metrics.column("margin").to_pylist()[-1] == pytest.approx(0.6)
    assert opened.validations().column("validation_loss").to_pylist() == [3.5, 3.25]
    assert opened.memory().column("peak_bytes").to_pylist() == [2 * GiB] * 6
    assert len(opened.evaluations) == 2


def test_a_run_that_has_not_begun_is_reported_without_plots(tmp_path: Path) -> None:
    run = make_run(tmp_path / "tiny-1", status="prepared")
    where = stage_of(run)
    where.metrics.unlink()
    where.result.unlink()
    text = page(run)
    assert "prepared: step 0 of 6" in text
    assert "no step has been taken yet" in text
    assert "<svg" not in text
    assert OpenRun(run.path).metrics().num_rows == 0


def test_a_run_that_only_evaluates_shows_its_scores_and_items(tmp_path: Path) -> None:
    text = page(make_bare(tmp_path / "eval-m-1", (1.0, 0.0), name="theirs"))
    assert "theirs" in text
    assert text.count('<div class="item">') == 2


def test_a_pipeline_is_reported_stage_by_stage(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "chain-1")
    training = make_run(run.path / "stages" / "1-sft")
    training.spec_yaml.write_text("name: sft\n", encoding="utf-8")
    run.spec_yaml.write_text("name: chain\n", encoding="utf-8")
    record = read_record(training.run, Run)
    write_record(run.run, replace(record, name="chain", kind="pipeline", status="running"))
    waiting = StageState(name="scores", kind="evaluate", place="stages/2-scores", status="waiting")
    first = StageState(name="sft", kind="train", place="stages/1-sft", status="running")
    write_record(run.state, PipelineState(stages=(first, waiting)))
    text = page(run)
    assert "<h2>Stage sft (train)</h2>" in text
    assert text.index("Does it learn?") < text.index("<h2>Stage scores (evaluate)</h2>")
    assert list(OpenRun(run.path).stages) == ["sft"]
    assert OpenRun(run.path).status == "stopped"  # no process holds its lock


def test_without_matplotlib_the_report_names_the_extra(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finefit.report.plots.find_spec", lambda _: None)
    text = page(run)
    assert "finefit[plots]" in text
    assert "<svg" not in text
    assert "Does it learn?" in text


@pytest.mark.parametrize(("name", "problem"), [("report.pdf", "neither a page nor Markdown"), ("no/x.md", "no folder")])
def test_a_file_that_cannot_be_written_is_refused(name: str, problem: str, run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=problem):
        write_report(run, tmp_path / name)


def test_a_damaged_record_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    run = make_run(tmp_path / "tiny-1")
    stage_of(run).stage.write_text("{", encoding="utf-8")
    with pytest.raises(RunError, match=re.escape("stage.json")):
        page(run)


def test_the_command_writes_the_page_beside_the_user(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["finefit", "report", str(run.path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert capsys.readouterr().out == "report   tiny-1.html\n"
    assert (tmp_path / "tiny-1.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_long_curve_is_thinned_without_losing_a_spike() -> None:
    points = [(float(step), 1.0) for step in range(100_000)]
    points[31_415] = (31_415.0, 9.0)
    points[27_182] = (27_182.0, -9.0)
    kept = thinned(points, 1000)
    assert len(kept) <= 1000
    assert {(31_415.0, 9.0), (27_182.0, -9.0)} <= set(kept)
    assert kept == sorted(kept)


def test_a_smoothed_curve_does_not_lag_behind_a_straight_one() -> None:
    line = [(float(step), 2.0 * step) for step in range(200)]
    for (_, value), (_, found) in zip(line, smoothed(line), strict=True):
        assert found == pytest.approx(value)
