"""Every command that a document shows is one that finefit has: its verb, its options and their values are parsed.
Blocks of shell commands are run by the tutorial's tool, hold finefit's commands alone, or say why they are not run."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.make_cli_reference import commands, context
from tools.make_tutorial import steps

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
FENCE = re.compile(r"^(?:<!-- (?P<mark>[^\n]*?) -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
GENERAL = ("--version", "--help", "--install-completion", "--show-completion")
ENDS = {"|", "||", "&&", ";", "&", ">", ">>", "2>"}
"""Where a command ends on a line of the shell."""


def _code(page: Path) -> str:
    """Blocks of code, fenced or indented, that are not what a command printed."""
    text = page.read_text(encoding="utf-8")
    blocks = [found for found in FENCE.finditer(text) if not (found["mark"] or "").startswith("finefit ")]
    fenced = [found["text"] for found in blocks if found["kind"] in ("", "sh")]
    indented = re.findall(r"^    (.*)$", FENCE.sub("", text), re.MULTILINE)
    return re.sub(r"\\\n\s*", " ", "\n".join([*fenced, *indented]))


def _mentions(page: Path) -> list[str]:
    """Commands within a sentence, which may leave out what does not matter there."""
    return re.findall(r"`finefit ([^`]+)`", FENCE.sub("", page.read_text(encoding="utf-8")))


def _commands(line: str) -> Iterator[tuple[str, ...]]:
    """Each call of finefit on a line of the shell, without the word itself."""
    try:
        words = shlex.split(line.strip().removeprefix("$ "), comments=True)
    except ValueError:  # a sentence with an apostrophe
        return
    for start, word in enumerate(words):
        if word == "finefit" and (start == 0 or words[start - 1] in ENDS):
            rest = words[start + 1 :]
            end = next((at for at, one in enumerate(rest) if one in ENDS), len(rest))
            yield tuple(rest[:end])


def _problem(words: tuple[str, ...]) -> str | None:
    """What the parser would say."""
    verb, *rest = words or ("--help",)
    if verb in GENERAL or "--help" in rest:
        return None
    if verb not in commands():
        return f"no verb {verb}"
    try:
        context(verb, tuple(rest))
    except Exception as error:  # noqa: BLE001 typer's errors of usage have no public type
        return f"{type(error).__name__}: {error}"
    return None


def _unknown(mention: str) -> list[str]:
    """Of a verb that is there, the options that are not."""
    verb, *rest = mention.split()
    if verb in GENERAL or verb not in commands():
        return [] if verb in {*GENERAL, "VERB"} else [verb]
    known = {name for parameter in context(verb).command.params for name in parameter.opts} | {"--help"}
    return [word for word in rest if word.startswith("--") and word.partition("=")[0] not in known]


def test_every_command_that_a_document_shows_is_parsed() -> None:
    shown = {(page.name, words) for page in PAGES for line in _code(page).splitlines() for words in _commands(line)}
    assert len(shown) > 60
    assert [(*one, problem) for one in sorted(shown) if (problem := _problem(one[1]))] == []


def test_every_command_that_a_document_mentions_has_its_verb_and_options() -> None:
    mentioned = {(page.name, mention) for page in PAGES for mention in _mentions(page)}
    assert len(mentioned) > 60
    assert [(*one, unknown) for one in sorted(mentioned) if (unknown := _unknown(one[1]))] == []


def test_a_command_that_finefit_does_not_have_would_be_noticed() -> None:
    assert _problem(("fit", "spec.yaml")) == "no verb fit"
    assert "--cards" in str(_problem(("plan", "spec.yaml", "--cards", "2")))
    assert "target" in str(_problem(("plan",)))
    assert _unknown("plan --cards 2") == ["--cards"]


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TARGETS = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_every_extra_and_every_target_of_make_that_a_document_names_is_there() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = {one for extras in re.findall(r"finefit\[([\w,-]+)\]", text) for one in extras.split(",")}
    assert named
    assert named <= set(EXTRAS)
    assert set(re.findall(r"(?:^    |`)make (\w[\w-]*)", text, re.MULTILINE)) <= set(TARGETS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_block_of_other_commands_is_run_or_says_why_not(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    run = {commands for commands, _ in steps(text)}
    blocks = [found for found in FENCE.finditer(text) if found["kind"] == "sh" and found["text"] not in run]
    unmarked = [found["text"] for found in blocks if not (found["mark"] or "").startswith("not run: ")]
    others = [line for text in unmarked for line in text.splitlines() if line and not line.startswith("finefit ")]
    assert others == []
