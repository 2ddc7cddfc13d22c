"""The pages for people who come from another tool are what the tables of keys say."""

from pathlib import Path

import pytest

from finefit.importers import TOOLS
from tools.make_importer_pages import PAGES, page

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_tables_say(name: str) -> None:
    written = (ROOT / f"docs/coming-from-{name}.md").read_text(encoding="utf-8")
    assert written == page(name), "run `python tools/make_importer_pages.py docs`"


def test_every_tool_has_a_page_with_all_its_keys() -> None:
    assert {slug for slugs in PAGES.values() for slug in slugs} == {tool.slug for tool in TOOLS}
    for name, slugs in PAGES.items():
        shown = page(name)
        assert all(f"| `{key}` |" in shown for tool in TOOLS if tool.slug in slugs for key in tool.keys)
