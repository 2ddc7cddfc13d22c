"""Examples on disk: what was added is what is read, whatever an epoch sees of it."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from finefit.data.examples import Example, Examples, ExampleWriter

EXAMPLES = st.lists(
    st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1, max_size=9), min_size=1, max_size=12
)


def write(path: Path, chunks: list[list[Example]], table: list[int]) -> None:
    with ExampleWriter(path) as writer:
        for chunk in chunks:
            tokens = np.array([t for e in chunk for t in e.tokens], np.int32)
            supervised = np.array([s for e in chunk for s in e.supervised], np.uint8)
            writer.add(tokens, supervised, np.array([len(e.tokens) for e in chunk], np.int32))
        writer.close(np.array(table, np.int64))


def as_lists(example: Example) -> tuple[list[int], list[bool]]:
    return [int(t) for t in example.tokens], [bool(s) for s in example.supervised]


@settings(max_examples=50)
@given(rows=EXAMPLES, data=st.data())
def test_every_example_of_the_table_comes_back(
    rows: list[list[tuple[int, bool]]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    examples = [Example(tuple(t for t, _ in row), tuple(s for _, s in row)) for row in rows]
    table = data.draw(st.lists(st.integers(0, len(examples) - 1), min_size=1, max_size=20))
    cut = data.draw(st.integers(0, len(examples)))
    path = tmp_path_factory.mktemp("store") / "train.safetensors"
    write(path, [part for part in (examples[:cut], examples[cut:]) if part], table)
    read = Examples(path)
    assert [as_lists(e) for e in read] == [as_lists(examples[at]) for at in table]
    assert read.lengths.tolist() == [len(examples[at].tokens) for at in table]
    assert read.supervised_counts.tolist() == [sum(examples[at].supervised[1:]) for at in table]
    assert [path.name for path in path.parent.iterdir()] == ["train.safetensors"]


def test_the_file_is_one_that_safetensors_reads(tmp_path: Path) -> None:
    path = tmp_path / "train.safetensors"
    write(path, [[Example((1, 2, 3), (False, True, True)), Example((4,), (True,))]], [1, 0, 1])
    arrays = load_file(path)
    assert arrays["tokens"].tolist() == [1, 2, 3, 4]
    assert arrays["starts"].tolist() == [3, 0, 3]


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with ExampleWriter(tmp_path / "train.safetensors") as writer:
            writer.add(np.array([1], np.int32), np.array([1], np.uint8), np.array([1], np.int32))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []
