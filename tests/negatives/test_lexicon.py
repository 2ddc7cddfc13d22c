import os
from itertools import combinations
from pathlib import Path

import pytest

from finefit.errors import DataError
from finefit.negatives.lexicon import read_words, shipped_words


def test_the_shipped_lists_are_complete_and_their_opposites_differ() -> None:
    words = shipped_words()
    assert all(known.words or known.endings for known in words.kinds.values())
    assert all(getattr(words.negation, name) for name in type(words.negation).model_fields)
    assert all(one.lower() != other.lower() for one, other in words.negation.opposites)


def test_no_two_opposites_of_the_lists_read_the_same_pair_twice() -> None:
    pairs = [frozenset(pair) for pair in shipped_words().negation.opposites]
    assert not [one for one, other in combinations(pairs, 2) if one == other]


def test_a_file_of_the_users_takes_the_place_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "words.yaml"
    path.write_text("kinds: {tool: {words: [saw, no]}}\nnegation: {opposites: [[up, down]]}\n", "utf-8")
    words = read_words(path)
    assert words.kinds["tool"].words == ("saw", "no")
    assert words.negation.opposites == (("up", "down"),)
    assert words.negation.auxiliaries == ()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("kinds: {tool: {word: [saw]}}", r"contains entries other than lists of words: kinds\.tool\.word"),
        ("negation: {opposites: [[up]]}", r"negation\.opposites\.0\.1"),
        ("kinds: [", "is not YAML"),
        ("- a", "the file: "),
        ("", "the file: "),
    ],
)
def test_a_file_that_holds_something_else_is_refused_with_the_place(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "words.yaml"
    path.write_text(text, "utf-8")
    with pytest.raises(DataError, match=problem) as caught:
        read_words(path)
    assert "words.yaml" in caught.value.problem
    assert caught.value.remedy


def test_a_file_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.yaml cannot be read"):
        read_words(tmp_path / "none.yaml")


@pytest.mark.parametrize("place", ["a device", "a deep nesting", "a huge file"])
def test_word_lists_that_would_never_end_are_refused(tmp_path: Path, place: str) -> None:
    path = tmp_path / "words.yaml"
    if place == "a device":
        path.symlink_to("/dev/zero")
    elif place == "a deep nesting":
        path.write_text("no_terms: " + "[" * 10_000)
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    with pytest.raises(DataError, match=r"words\.yaml") as caught:
        read_words(path)
    assert caught.value.remedy
