"""The page of a run in a real browser: a run that is being written, killed and resumed, two runs over each other, and
whatever a name or an answer holds stays text."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from finefit.artifacts.processes import run_lock
from tests.evals import make_item
from tests.runs import make_run
from tests.watched import Watched, make_watched, make_watched_pipeline

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium here; apt-get install -y --no-install-recommends chromium"
)
expect.set_options(timeout=30_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, one of which goes on while it is watched, and one that is hostile."""
    runs = tmp_path_factory.mktemp("watched") / "runs"
    make_watched(runs / "orders-1").steps(45)
    answers: list[Any] = [make_item(0, hit=1.0), _hostile_item(1)]
    other = make_watched(runs / "orders-2", rate=2.0, results={"base": [0, 1], "checkpoint-120": answers})
    other.steps(120)
    other.end()
    hostile = make_watched(runs / _HOSTILE)
    hostile.steps(20)
    hostile.event("rejected", step=20, note=_MARKUP)
    return runs


_MARKUP = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
_HOSTILE = "<img src=x onerror=document.title='owned'>-1"


def _hostile_item(at: int) -> Any:
    from dataclasses import replace

    return replace(make_item(at, hit=0.0), prompt=_MARKUP, answer=_MARKUP, reference=_MARKUP)


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "finefit", "watch", str(folder), "--web", "--json"]
    environment = os.environ | {"NO_COLOR": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        yield json.loads(child.stdout.readline())["url"]
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=30) == 0
        assert "Traceback" not in child.stderr.read()


@dataclass
class Opened:
    page: Page
    complaints: list[str]


@contextmanager
def _opened(browser: Browser, address: str, **more: Any) -> Iterator[Opened]:
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"} | more)
    opened = Opened(context.new_page(), [])
    opened.page.on("pageerror", lambda error: opened.complaints.append(str(error)))
    opened.page.on(
        "console", lambda message: opened.complaints.append(message.text) if message.type == "error" else None
    )
    opened.page.goto(address)
    yield opened
    assert opened.complaints == []
    context.close()


def _answer(page: Page, number: int) -> Any:
    return page.locator(".answer").nth(number)


def _legend(page: Page, chart: int = 0) -> str:
    return page.locator(".chart").nth(chart).locator(".u-legend").inner_text()


def test_a_live_run_grows_is_killed_and_goes_on(browser: Browser, url: str, folder: Path) -> None:
    watched = Watched(_run(folder, "orders-1"), step=45)
    with _opened(browser, f"{url}run/orders-1") as opened:
        page = opened.page
        expect(page.locator("#status")).to_have_text("interrupted")
        expect(page.locator("#facts")).to_contain_text("It goes on where it saved with: finefit run")
        with run_lock(watched.run.lock):
            expect(page.locator("#status")).to_have_text("running")
            expect(_answer(page, 0)).to_contain_text("Yes: validation is at its lowest")
            expect(_answer(page, 1)).to_contain_text("20.18 GiB of 23.53 GiB")
            expect(_answer(page, 2)).to_contain_text("step 45 of 120")
            expect(_answer(page, 3)).to_contain_text("checkpoint-40")
            watched.event("spike", step=45, found=4.0, usual=1.5)
            watched.event("oom_recovered", step=46, before={"micro_batch": 4}, after={"micro_batch": 2})
            watched.steps(62)
            expect(_answer(page, 2)).to_contain_text("step 62 of 120")
            expect(_answer(page, 3)).to_contain_text("checkpoint-60")
            expect(_answer(page, 1)).to_contain_text("It ran out and went on")
            expect(page.locator(".marks").first).to_contain_text("spike")
            expect(page.locator(".marks").first).to_contain_text("ran out of memory, went on")
            expect(page.locator("#events li").first).to_contain_text("saved checkpoint-60")
            expect(page.locator(".u-legend").first).to_contain_text("62")
        expect(page.locator("#status")).to_have_text("interrupted")
        with run_lock(watched.run.lock):
            watched.event("resumed", step=60, checkpoint="checkpoint-60")
            watched.step = 60
            watched.steps(65)
            expect(page.locator("#status")).to_have_text("running")
            expect(page.locator(".marks").first).to_contain_text("resumed")
            expect(page.locator(".u-legend").first).to_contain_text("65")


def _run(folder: Path, name: str) -> Any:
    from finefit.artifacts.rundir import RunDir

    return RunDir(folder / name)


def test_a_drag_and_the_keyboard_zoom_all_curves(browser: Browser, url: str) -> None:
    with _opened(browser, f"{url}run/orders-2") as opened:
        page = opened.page
        expect(page.locator(".u-legend").first).to_contain_text("120")
        plot = page.locator(".chart").first.locator(".u-over").bounding_box()
        assert plot is not None
        middle = plot["y"] + plot["height"] / 2
        page.mouse.move(plot["x"] + plot["width"] * 0.25, middle)
        page.mouse.down()
        page.mouse.move(plot["x"] + plot["width"] * 0.5, middle, steps=4)
        page.mouse.up()
        page.mouse.move(0, 0)
        window = page.locator("#window")
        expect(window).to_have_text(re.compile(r"steps 3\d to 6\d"))
        first, last = _window(page)
        page.keyboard.press("+")
        expect(window).not_to_have_text(f"steps {first} to {last}")
        inner_first, inner_last = _window(page)
        assert first < inner_first < inner_last < last
        page.keyboard.press("ArrowRight")
        expect(window).not_to_have_text(f"steps {inner_first} to {inner_last}")
        for legend in page.locator(".u-legend").all():
            expect(legend).to_contain_text(str(_window(page)[1]))
        page.keyboard.press("0")
        expect(page.locator("#window")).to_have_text("")


def _window(page: Page) -> tuple[int, int]:
    words = page.locator("#window").inner_text().split()
    return int(words[1]), int(words[3])


def test_two_runs_are_chosen_in_the_list_and_laid_over_each_other(browser: Browser, url: str) -> None:
    with _opened(browser, url) as opened:
        page = opened.page
        expect(page.get_by_role("row")).to_have_count(4)
        expect(page.get_by_role("progressbar", name="steps of orders-2")).to_have_attribute("value", "120")
        page.get_by_role("checkbox", name="choose orders-1").check()
        page.get_by_role("checkbox", name="choose orders-2").check()
        expect(page.locator("#commands")).to_contain_text("finefit compare")
        page.get_by_role("link", name="Overlay their curves").click()
        expect(page.locator(".chart").first).to_contain_text("smoothed (orders-2)")
        assert page.url.endswith("/run/orders-1?with=orders-2")
        page.reload()  # the address is stable
        expect(page.locator(".chart").first).to_contain_text("smoothed (orders-2)")


def test_with_the_keyboard_alone_runs_are_overlaid_settings_compared_and_the_log_is_read(
    browser: Browser, url: str, folder: Path
) -> None:
    spec = folder / "orders-1" / "spec.json"
    spec.write_text(spec.read_text().replace('"rank": 4', '"rank": 8'))
    with _opened(browser, f"{url}run/orders-1") as opened:
        page = opened.page
        expect(page.locator("#overlay")).to_be_visible()
        _tab_to(page, "summary", "Overlay runs")
        page.keyboard.press("Enter")
        for name in ("orders-2", _HOSTILE):
            _tab_to(page, "input", name)
            page.keyboard.press("Space")
            expect(page.locator(".chart").first).to_contain_text(f"smoothed ({name})")
        _tab_to(page, "summary", "Settings and their sources")
        page.keyboard.press("Enter")
        _tab_to(page, "select", "")
        page.keyboard.type("orders-2")
        expect(page.locator("#differences")).to_contain_text("tuning.rank")
        _tab_to(page, "summary", "Log")
        page.keyboard.press("Enter")
        expect(page.locator("#lines")).to_contain_text("loading the model")


def _tab_to(page: Page, tag: str, text: str) -> None:
    """The next element of this kind that begins with this text."""
    focused = "[document.activeElement.localName, (document.activeElement.parentElement?.localName === 'label' ?"
    focused += " document.activeElement.parentElement : document.activeElement).textContent.trim()]"
    for _ in range(200):
        page.keyboard.press("Tab")
        found, words = page.evaluate(focused)
        if found == tag and words.startswith(text):
            return
    raise AssertionError(f"{tag} {text} cannot be reached")


def test_a_review_is_opened_after_confirmation_and_a_comparison_by_a_link(
    browser: Browser, url: str, folder: Path
) -> None:
    make_run(folder / "done-1", results={"base": [0, 1], "checkpoint-6": [1, 1]})
    with _opened(browser, f"{url}run/done-1") as opened:
        page = opened.page
        page.get_by_role("button", name="Judge answers blind").click()
        page.get_by_role("button", name="Yes").click()
        review = page.get_by_role("dialog").get_by_role("link")
        expect(review).to_be_visible()
        assert review.inner_text() != url
        page.get_by_role("button", name="Close").click()
        page.get_by_role("link", name="Compare with base").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("done-1:base and done-1:final")
        assert page.locator("script").count() == 0


def test_the_stages_of_a_pipeline_are_a_graph_and_each_has_its_page(browser: Browser, url: str, folder: Path) -> None:
    make_watched_pipeline(folder / "medical-1")
    with _opened(browser, f"{url}run/medical-1") as opened:
        page = opened.page
        places = {
            name: page.locator(".stage", has_text=name).first.bounding_box() for name in ("sft", "pairs", "scores")
        }
        lefts = {name: place["x"] for name, place in places.items() if place is not None}
        assert lefts["sft"] == lefts["pairs"] < lefts["scores"]
        expect(page.locator(".stage[aria-current]")).to_contain_text("from")
        page.locator(".stage", has_text="45 min 13 s").click()
        expect(_answer(page, 2)).to_contain_text("step 120 of 120")


def test_items_are_shown_and_only_the_wrong_ones_with_markup_as_text(browser: Browser, url: str) -> None:
    with _opened(browser, f"{url}run/orders-2") as opened:
        page = opened.page
        page.get_by_role("button", name="items of checkpoint-120 on exact_match").click()
        expect(page.locator(".item")).to_have_count(2)
        page.get_by_role("button", name="only wrong ones").click()
        expect(page.locator(".item")).to_have_count(1)
        expect(page.locator(".item")).to_contain_text("<script>document.title='owned'</script>")
        assert page.title() != "owned"


def test_a_run_whose_name_and_events_hold_markup_is_text(browser: Browser, url: str) -> None:
    with _opened(browser, url) as opened:
        opened.page.get_by_role("link", name=_HOSTILE).click()
        expect(opened.page.locator("#name")).to_have_text(_HOSTILE)
        expect(opened.page.locator("#events")).to_contain_text(_MARKUP)
        time.sleep(0.5)
        assert opened.page.title() != "owned"
        assert opened.page.locator("#events img, #name img").count() == 0


def test_an_action_is_confirmed_recorded_and_asked_of_the_training(browser: Browser, url: str, folder: Path) -> None:
    run = _run(folder, "orders-1")
    requests = run.stages()[0].requests
    with run_lock(run.lock), _opened(browser, f"{url}run/orders-1") as opened:
        page = opened.page
        page.get_by_role("button", name="Save now").click()
        page.get_by_role("button", name="Cancel").click()
        assert not requests.exists()
        page.get_by_role("button", name="Save now").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog")).to_be_visible()
        page.keyboard.press("Enter")
        expect(page.locator("#message")).to_contain_text("Requested")
    assert [path.name for path in requests.iterdir()] == ["save"]
    assert '"action": "save"' in (run.path / "logs" / "actions.jsonl").read_text()


@pytest.mark.parametrize("more", [{"color_scheme": "dark"}, {"viewport": {"width": 390, "height": 844}}])
def test_dark_and_on_a_phone_all_is_there_and_nothing_is_cut(browser: Browser, url: str, more: dict[str, Any]) -> None:
    with _opened(browser, f"{url}run/orders-2", **more) as opened:
        page = opened.page
        expect(page.locator(".chart").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(21, 24, 27)") == ("color_scheme" in more)
