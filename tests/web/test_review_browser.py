"""The page in a real browser: judged with the keyboard, killed in the middle, and whatever an answer holds stays
text."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright

from finefit.stats.comparisons import preference

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


@dataclass
class Watched:
    """A page, and all that it asked for or complained about."""

    page: Page
    requests: list[Request]
    complaints: list[str]


@contextmanager
def _opened(browser: Browser, width: int = 1280) -> Iterator[Watched]:
    context = browser.new_context(viewport={"width": width, "height": 800})
    watched = Watched(context.new_page(), [], [])
    watched.page.on("request", lambda request: watched.requests.append(request))  # a function, for playwright marks it
    watched.page.on("pageerror", lambda error: watched.complaints.append(str(error)))
    watched.page.on(
        "console", lambda message: watched.complaints.append(message.text) if message.type == "error" else None
    )
    yield watched
    context.close()


@contextmanager
def _served(folder: Path, *arguments: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    command = [sys.executable, "-m", "finefit", "review", "--answers", "answers.jsonl", *arguments, "--json"]
    child = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"NO_COLOR": "1"},
    )
    try:
        assert child.stdout is not None
        yield json.loads(child.stdout.readline())["url"], child
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate()


def _results(folder: Path) -> Any:
    command = [sys.executable, "-m", "finefit", "review", "--answers", "answers.jsonl", "--results", "--json"]
    return json.loads(subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout)


def _write(folder: Path, rows: list[dict[str, str]]) -> Path:
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [
        {"prompt": f"question {at}", "answer_a": f"alpha {at}", "answer_b": f"beta {at}", "reference": f"right {at}"}
        for at in range(24)
    ]
    return _write(tmp_path, rows)


def _begin(page: Page, url: str, rater: str) -> None:
    page.goto(url)
    page.locator("#rater").fill(rater)
    page.keyboard.press("Enter")
    expect(page.locator("#item")).to_be_visible()


def _key(page: Page, wish: str) -> str:
    """On which side the wished answer stands; ties and skips have keys of their own."""
    if wish in ("t", "0", "s"):
        return wish
    return "1" if page.locator(".answer .text").first.inner_text().startswith(wish) else "2"


def _judge(page: Page, wish: str, done: int) -> None:
    page.keyboard.press(_key(page, wish))
    expect(page.locator("#count")).to_contain_text(f"{done} of 24")


WISHES = ["alpha"] * 5 + ["beta"] * 2 + ["t", "0", "s"] + ["alpha"] * 4 + ["beta"] * 4 + ["t", "s"]
"""Nine times alpha, six times beta, three ties, two skipped."""


def test_twenty_verdicts_by_keyboard_survive_a_kill_in_the_middle(browser: Browser, folder: Path) -> None:
    with _opened(browser) as watched:
        page = watched.page
        with _served(folder) as (url, child):
            _begin(page, url, "ann")
            for done, wish in enumerate(WISHES[:10], start=1):
                _judge(page, wish, done)
            child.kill()
            child.wait()
            page.keyboard.press("t")
            expect(page.locator("#message")).to_contain_text("nothing was saved")
        with _served(folder, "--port", url.rstrip("/").rsplit(":", 1)[1]):
            asked = page.locator("#prompt").inner_text()
            _judge(page, WISHES[10], 11)
            expect(page.locator("#message")).to_be_hidden()
            page.keyboard.press("u")
            expect(page.locator("#count")).to_contain_text("10 of 24")
            assert page.locator("#prompt").inner_text() == asked
            for done, wish in enumerate(WISHES[10:], start=11):
                _judge(page, wish, done)
            page.keyboard.press("r")
            page.locator("#sure-yes").click()
            expect(page.locator("#tables")).to_contain_text("18 of 24 judged, 2 only skipped")
            rows = [row.inner_text().split("\t") for row in page.locator("#tables table").first.locator("tr").all()[1:]]
    found = _results(folder)
    assert rows == [["answers.jsonl:answer_a", "9"], ["answers.jsonl:answer_b", "6"], ["neither", "3"]]
    expected = preference(9, 6, 3)
    assert (found["judged"], found["skipped"]) == (18, 2)
    assert found["preference"]["share"]["value"] == pytest.approx(expected.share.value)
    assert found["preference"]["p"] == pytest.approx(expected.p)
    assert found["raters"][0]["undone"] == 1
    assert [text for text in watched.complaints if "ERR_CONNECTION_REFUSED" not in text] == []


def test_a_page_that_is_opened_anew_goes_on_with_the_next_item(browser: Browser, folder: Path) -> None:
    with _served(folder) as (url, _), _opened(browser) as first, _opened(browser) as second:
        _begin(first.page, url, "ann")
        _judge(first.page, "alpha", 1)
        asked = first.page.locator("#prompt").inner_text()
        _begin(second.page, url, "ann")
        assert second.page.locator("#prompt").inner_text() == asked
        _judge(second.page, "beta", 2)
        first.page.keyboard.press("1")
        expect(first.page.locator("#message")).to_contain_text("already judged")
        expect(first.page.locator("#count")).to_contain_text("2 of 24")
    assert _results(folder)["judged"] == 2


def test_reasons_and_notes_are_marked_by_keys_and_come_back_with_undo(browser: Browser, folder: Path) -> None:
    with _served(folder, "--rater", "ann") as (url, _), _opened(browser) as watched:
        page = watched.page
        page.goto(url)
        expect(page.locator("#item")).to_be_visible()
        page.keyboard.press("f")
        page.keyboard.press("w")
        page.keyboard.press("f")
        page.keyboard.press("Shift+P")
        page.keyboard.press("n")
        page.keyboard.type("1 s u")
        page.keyboard.press("Enter")
        _judge(page, "t", 1)
        expect(page.locator("[aria-pressed=true]")).to_have_count(0)
        page.keyboard.press("u")
        expect(page.locator("[aria-pressed=true]")).to_have_text(["wwrong inference", "⇧Punsupported"])
        expect(page.locator("#note")).to_have_value("1 s u")
        side = "alpha" if _key(page, "alpha") == "1" else "beta"
        _judge(page, "t", 1)
    by_model = {
        fault["model"][-1]: {reason for reason, count in fault["reasons"].items() if count}
        for fault in _results(folder)["faults"]
    }
    first, second = ("a", "b") if side == "alpha" else ("b", "a")
    assert by_model == {first: {"wrong inference"}, second: {"unsupported"}}


HOSTILE = (
    "<script>window.hacked = 1</script><img src='http://evil.example/x.png' onerror='window.hacked = "
    "2'><b>bold</b> & &amp; </textarea>"
)


def test_html_in_an_answer_stays_text_and_no_request_leaves(browser: Browser, tmp_path: Path) -> None:
    rows = [
        {
            "prompt": HOSTILE,
            "answer_a": HOSTILE,
            "answer_b": f"{HOSTILE} other",
            "reference": HOSTILE,
            "source": HOSTILE,
            "id": HOSTILE,
        }
    ]
    with _served(_write(tmp_path, rows)) as (url, _), _opened(browser) as watched:
        page = watched.page
        _begin(page, url, "<img src=x onerror=window.hacked=3>")
        page.keyboard.press("d")
        for box in ("#prompt", "#reference", "#place"):
            assert page.locator(box).inner_text() == HOSTILE
        texts = sorted(box.inner_text() for box in page.locator(".answer .text").all())
        assert texts == sorted([HOSTILE, f"{HOSTILE} other"])
        assert page.locator("#who").inner_text() == "<img src=x onerror=window.hacked=3>"
        page.keyboard.press("1")
        expect(page.locator("#end")).to_be_visible()
        page.keyboard.press("r")
        page.locator("#sure-yes").click()
        expect(page.locator("#tables")).to_contain_text("onerror=window.hacked=3")
        assert page.evaluate("() => window.hacked") is None
        assert page.locator("img").count() == 0
        assert all(request.url.startswith(url) for request in watched.requests)
    assert watched.complaints == []


def test_the_page_and_its_addresses_name_no_model(browser: Browser, folder: Path) -> None:
    (folder / "answers.jsonl").rename(folder / "secret-model.jsonl")
    with _served(folder, "--answers", "secret-model.jsonl") as (url, _), _opened(browser) as watched:
        _begin(watched.page, url, "ann")
        bodies = [response.text() for request in watched.requests if (response := request.response()) is not None]
        assert len(bodies) >= 5
        assert not any(
            "secret" in text or "answer_a" in text
            for text in [*bodies, watched.page.content(), *(r.url for r in watched.requests)]
        )


@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_is_wider_than_the_page(browser: Browser, tmp_path: Path, width: int) -> None:
    long = "word" * 200 + "\n" + "many words " * 2000
    with (
        _served(_write(tmp_path, [{"prompt": long, "answer_a": long, "answer_b": long}])) as (url, _),
        _opened(browser, width) as watched,
    ):
        _begin(watched.page, url, "ann")
        assert watched.page.evaluate("() => document.documentElement.scrollWidth") <= width
        for button in watched.page.locator("#legend button").all():
            expect(button).to_be_in_viewport()


def test_a_token_opens_the_page_and_leaves_the_address(browser: Browser, folder: Path) -> None:
    with _served(folder, "--token") as (url, child), _opened(browser) as watched:
        page = watched.page
        page.goto(url.partition("#")[0])
        expect(page.locator("#message")).to_contain_text("token")
        page.goto("about:blank")
        _begin(page, url, "ann")
        assert "token" not in page.url
        _judge(page, "alpha", 1)
        assert page.evaluate("() => document.cookie") == ""
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == 0
