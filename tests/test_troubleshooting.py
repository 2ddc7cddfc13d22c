"""The page that users search by a message quotes finefit's own words as the source has them."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
VALUE = "…"
ENTRIES = re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]


def _written(node: ast.AST) -> str:
    """A text of the source, with … for what is filled in."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_written(part) or VALUE for part in parts)
    return ""


@cache
def _source() -> str:
    """All texts, with a break between them that no quote has."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "src/finefit").rglob("*.py"))
    return "\0".join(filter(None, (_written(node) for tree in trees for node in ast.walk(tree))))


def _quoted() -> list[str]:
    return [line.removeprefix("> ") for line in PAGE.splitlines() if line.startswith("> ")]


def _stands_in(quote: str, source: str) -> bool:
    """Every part between values is in the source; a message may be put together from several texts."""
    return all(part.strip(" ,:;") in source for part in quote.split(VALUE))


def test_every_message_of_ours_on_the_page_is_in_the_source() -> None:
    assert len(_quoted()) >= 30
    assert [quote for quote in _quoted() if not _stands_in(quote, _source())] == []


def test_a_message_that_was_changed_would_be_noticed() -> None:
    assert _stands_in("… does not fit: needs … GiB, … has …", _source())
    assert not _stands_in("… does not fit: wants … GiB, … has …", _source())


def test_every_entry_has_a_cause_what_finefit_does_and_what_to_do() -> None:
    assert len(ENTRIES) >= 30
    for entry in ENTRIES:
        title = entry.splitlines()[0]
        assert "**Cause" in entry, title
        assert "**finefit**" in entry, title
        assert "**Do.**" in entry, title


def test_the_messages_that_users_paste_can_be_found() -> None:
    pasted = (
        "CUDA out of memory",
        "element 0 of tensors does not require grad and does not have a grad_fn",
        "Expected to mark a variable ready only once",
        "Expected all tensors to be on the same device",
        "Cannot copy out of meta tensor",
        "KeyError: 'qwen2moe'",
        "were not initialized from the model checkpoint",
        "0.693",
        "No space left on device",
        "unexpected keyword argument 'dropout'",
        "pred count != gold count",
    )
    titles = "\n".join(entry.splitlines()[0] for entry in ENTRIES)
    assert [message for message in pasted if message not in titles] == []


def test_links_of_the_page_lead_to_pages_that_are_there() -> None:
    links = re.findall(r"\]\(([^)#]+\.md)", PAGE)
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).is_file()] == []
