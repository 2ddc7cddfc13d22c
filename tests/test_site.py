"""The site is built from what the repository holds, without a warning, and what is written from the source is in it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from finefit.cli import app
from tools.make_message_index import index
from tools.site_pages import new_target

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` does; a broken link, a page outside the navigation or a missing anchor ends it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    variables = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_document_is_a_page(site: Path) -> None:
    documents = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"README"}
    written = {"index", "tasks", "examples", "contributing", "changelog", "cli", "messages"}
    assert {path.stem for path in site.glob("*.html")} == documents | written | {"404"}


def test_the_reference_of_the_command_line_has_every_verb(site: Path) -> None:
    page = (site / "cli.html").read_text(encoding="utf-8")
    verbs = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]
    assert len(verbs) > 10
    assert [verb for verb in verbs if f'id="finefit-{verb}"' not in page] == []


def test_a_message_is_found_by_searching_for_it(site: Path) -> None:
    found = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    places = {entry["location"].partition("#")[0] for entry in found if "there is no such file" in entry["text"]}
    assert "messages.html" in places
    pasted = {
        entry["location"].partition("#")[0] for entry in found if "CUDA out of memory" in entry["title"] + entry["text"]
    }
    assert "troubleshooting.html" in pasted


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    page = (site / "index.html").read_text(encoding="utf-8")
    assert 'src="http' not in page
    assert '<link rel="stylesheet" href="http' not in page


def test_messages_stand_with_their_remedies() -> None:
    page = index()
    assert page.count("\n| ") > 500
    assert "| … is in …, so … cannot be written here | change it in that file |" in page
    (missing,) = (line for line in page.splitlines() if "deepspeed needs deepspeed" in line)
    assert "pip install 'finefit\\[deepspeed\\]'" in missing


@pytest.mark.parametrize(
    ("target", "source", "page"),
    [
        ("docs/memory.md", "README.md", "memory.md"),
        ("../README.md#try-it", "docs/README.md", "index.md#try-it"),
        ("chat/spec.yaml", "examples/README.md", "examples.md#chat"),
        ("../CONTRIBUTING.md", "docs/README.md", "contributing.md"),
        ("#here", "docs/data.md", "#here"),
        ("../LICENSE", "docs/data.md", None),
    ],
)
def test_a_link_of_the_repository_is_turned_to_its_page(target: str, source: str, page: str | None) -> None:
    assert new_target(target, source) == page
