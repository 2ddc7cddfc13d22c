"""Rows as users have them: wrong in every way. A file becomes books that balance or an error with a remedy, never a
traceback."""

import csv
import io
import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finefit.artifacts.atomic import read_lines
from finefit.artifacts.stage_records import Preparation
from finefit.data.examples import Examples
from finefit.data.prepare import prepare
from finefit.errors import DataError
from finefit.spec.data import Data
from tests.conftest import make_tokenizer

NUM_MUTANTS = 40
"""In each file; with two files for every shape in every format more than 10,000."""

TEMPLATE = (
    "{% macro said(x) %}{% if x is mapping %}{% for k, v in x.items() %}{{ k }}={{ said(v) }};{% endfor %}{% "
    "else %}{{ x }}{% endif %}{% endmacro %}"
    "{% if tools %}{{ '<|system|>' + tools | tojson + '<|end|>' }}{% endif %}"
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% if m['thinking'] %}{{ '<think>' + m['thinking'] + "
    "'</think>' }}{% endif %}"
    "{{ m['content'] }}{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] }}({{ "
    "said(c['function']['arguments']) }}){% endfor %}"
    "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""One that has a place for tools, calls and reasoning."""

Value = dict[str, Any]


def _said(text: str, n: int) -> list[Value]:
    return [{"role": "user", "content": f"{text} {n}?"}, {"role": "assistant", "content": f"It is {n}."}]


def _shared(n: int, *, answer: str = "It is so.") -> list[Value]:
    return [{"from": "human", "value": f"Is {n} odd?"}, {"from": "gpt", "value": answer}]


def _called(n: int) -> list[Value]:
    call = {"id": f"c{n}", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": n})}}
    asked, answered = _said("Add", n)
    return [
        {"role": "system", "content": "Be brief."},
        asked,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"c{n}", "content": str(n)},
        answered | {"reasoning_content": "I add."},
    ]


def _function_called(n: int) -> list[Value]:
    first, last = _shared(n)
    call = {"from": "function_call", "value": json.dumps({"name": "add", "arguments": {"a": n}})}
    return [first, call, {"from": "observation", "value": str(n)}, last]


def _meeting(n: int) -> Value:
    return {
        "topic_list": [{"topic": "tea", "relevant_text_span": [["0", "1"]]}],
        "general_query_list": [{"query": f"Sum up meeting {n}.", "answer": "They had tea."}],
        "specific_query_list": [{"query": "Who spoke?", "answer": "A and B", "relevant_text_span": [["0", "1"]]}],
        "meeting_transcripts": [{"speaker": "A", "content": f"Tea {n}?"}, {"speaker": "B", "content": "Yes."}],
    }


def _truth(n: int) -> Value:
    return {
        "Type": "Adversarial",
        "Question": f"What happens at {n}?",
        "Best Answer": "Nothing",
        "Correct Answers": "Nothing; Not a thing",
        "Incorrect Answers": "Rain; Snow",
    }


TOOLS = json.dumps([{"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}])
PAIR = {"prompt": "prompt", "answer": "chosen"}
SHAPES: tuple[tuple[Callable[[int], Value], dict[str, str]], ...] = (
    (lambda n: {"messages": _said("What is", n)}, {"messages": "messages"}),
    (
        lambda n: {"messages": [*_said("What is", n), *_said("And", n + 1)], "system": "Be brief."},
        {"messages": "messages", "system": "system"},
    ),
    (lambda n: {"messages": _called(n), "tools": TOOLS}, {"messages": "messages", "tools": "tools"}),
    (
        lambda n: {"conversations": _shared(n), "system": "Be brief.", "id": n},
        {"messages": "conversations", "system": "system"},
    ),
    (lambda n: {"conversations": _function_called(n), "tools": TOOLS}, {"messages": "conversations", "tools": "tools"}),
    (
        lambda n: {
            "messages": [{"role": "user", "content": [{"type": "text", "text": f"What is {n}?"}]}, _said("", n)[1]]
        },
        {"messages": "messages"},
    ),
    (
        lambda n: {"instruction": f"Double {n}.", "input": "quickly", "output": str(2 * n)},
        {"prompt": "{instruction}: {input}", "answer": "output"},
    ),
    (
        lambda n: {"instruction": f"{n}?", "input": "", "output": "odd", "history": [["2?", "even"]]},
        {"prompt": "instruction", "answer": "output"},
    ),
    (lambda n: {"prompt": f"{n} + {n} =", "completion": f" {2 * n}"}, {"prompt": "prompt", "answer": "completion"}),
    (
        lambda n: {"prompt": _said("What is", n)[:1], "completion": _said("What is", n)[1:]},
        {"prompt": "prompt", "answer": "completion"},
    ),
    (
        lambda n: {"question": f"Which is {n}?", "answer": "that", "id": n},
        {"prompt": "{id}. {question}", "answer": "answer"},
    ),
    (lambda n: {"query": f"Which is {n}?", "label": "that"}, {"prompt": "query", "answer": "label"}),
    (lambda n: {"problem": f"Which is {n}?", "response": n / 3}, {"prompt": "problem", "answer": "response"}),
    (
        lambda n: {
            "context": "A river.",
            "question": f"What {n}?",
            "answers": {"text": ["A river", "river", "river"], "answer_start": [0, 2, 2]},
        },
        {"prompt": "{context}\n\n{question}", "answer": "answers.text"},
    ),
    (
        lambda n: {"contexts": ["A river.", "A lake."], "question": f"{n}?", "long_answer": "Both."},
        {"prompt": "{contexts} {question}", "answer": "long_answer"},
    ),
    (
        lambda n: {"article": f"It rained {n} days.", "highlights": "Rain."},
        {"prompt": "article", "answer": "highlights"},
    ),
    (
        lambda n: {"questions": [f"What is {n}?", "And then?"], "answers": ["This", "That"]},
        {"prompt": "{questions}", "answer": "answers"},
    ),
    (_meeting, {}),
    (_truth, {"prompt": "question", "answer": "Best Answer"}),
    (lambda n: {"prompt": f"Is {n} odd?", "chosen": "Yes, it is.", "rejected": "No."}, PAIR),
    (
        lambda n: {
            "prompt": _said("Is it", n)[:1],
            "chosen": _said("", n)[1:],
            "rejected": [{"role": "assistant", "content": "no"}],
        },
        PAIR,
    ),
    (
        lambda n: {
            "chosen": _said("Is it", n),
            "rejected": [_said("Is it", n)[0], {"role": "assistant", "content": "no"}],
        },
        {"messages": "chosen"},
    ),
    (
        lambda n: {"conversations": _shared(n)[:1], "chosen": _shared(n)[1], "rejected": _shared(n, answer="no")[1]},
        PAIR | {"prompt": "conversations"},
    ),
    (
        lambda n: {"prompt": f"Is {n} odd?", "completion": "Yes.", "label": n % 2 == 0},
        {"prompt": "prompt", "answer": "completion"},
    ),
    (lambda n: {"messages": _said("Is it", n), "kto_tag": n % 2 == 0}, {"messages": "messages"}),
    (lambda n: {"text": f"There were {n} of them. " * (1 + n % 5)}, {"text": "text"}),
    (lambda n: {"snt": f"dog {n}", "amr": "(d / dog)", "id": f"s.{n}"}, {"prompt": "Parse: {snt}", "answer": "amr"}),
    (
        lambda n: {"image": f"{n}.png", "question": f"What {n}?", "answers": ["red", "red", "blue"]},
        {"prompt": "question", "answer": "answers"},
    ),
)
"""Rows, and what a user may write of their columns."""
NAMES = sorted(
    {name for shape, _ in SHAPES for name in shape(1)}
    | {"solution", "document", "content", "images", "dialogue", "role", "from", "Answer", "A b"}
)
ODD: list[Any] = [None, "", " ", "\n", 0, -1, 1.5, True, [], {}, [None], [[]], {"text": []}, [""], {"role": "user"}]
ODD += [[{"from": "gpt"}], [[["deep"]]], float("nan"), float("inf"), 10**30, "nan", "true", "null", "{", "[1", "]", '"']
ODD += ["a,b;c\td", "\r\n", "'", "{question}", "{{", "%s\\", "<|end|>", "<|user|>x<|end|>", "<image>", "</think>"]
ODD += ["<think>hm</think>so", "{% raw %}", "{{ messages }}", "x" * 3000, "word " * 200, "\x00", "\ufeff", "\u2028"]
ODD += ["\x85", "\u200b", "e\u0301", "\U0001f600", "سلام", "\ud83d", "x\udc00", "http://x/y.png"]
ODD += ["data:image/png;base64,!!", "@40", "@300", "@950"]
"""Values that a column may hold; the last stand for objects of that depth."""


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a value with each of its keys."""
    if isinstance(value, dict):
        return [place for key, inner in value.items() for place in [(value, key), *_places(inner)]]
    return (
        [place for at, inner in enumerate(value) for place in [(value, at), *_places(inner)]]
        if isinstance(value, list)
        else []
    )


def _mutate(row: Value, rng: random.Random, names: Sequence[str]) -> None:
    holder, key = rng.choice(_places(row) or [(row, "note")])
    match rng.randrange(9) if key in holder or isinstance(holder, list) else 9:
        case 0 | 1 | 2:
            holder[key] = _fresh(rng.choice(ODD))
        case 3:
            del holder[key]
        case 4:
            holder[key] = [holder[key]]
        case 5:
            holder[key] = {rng.choice(NAMES): holder[key]}
        case 6:
            holder[key] = _fresh(rng.choice(_places(row))[0])
        case 7 if isinstance(holder, dict):
            holder[rng.choice(names if holder is row else NAMES)] = holder.pop(key)
        case 8 if isinstance(holder[key], str):
            at = rng.randrange(len(holder[key]) + 1)
            holder[key] = holder[key][:at] + str(rng.choice(ODD)) + holder[key][at:]
        case _:
            row[rng.choice(names)] = _fresh(rng.choice(ODD))


def _fresh(value: Any) -> Any:
    """A copy, so that no later mutation reaches it."""
    return json.loads(json.dumps(value))


def _rows(shape: Callable[[int], Value], rng: random.Random) -> list[Value]:
    """Whole rows, then mutants; behind a hundred a file is recognised by the whole ones alone."""
    num_whole, names = rng.choice([0, 10, 100]), rng.choice([NAMES, ("note", "more"), ("note", "more")])
    rows = [_fresh(shape(n)) for n in range(num_whole + NUM_MUTANTS)]
    for row in rows[num_whole:]:
        for _ in range(rng.choice([1, 1, 2, 5])):
            _mutate(row, rng, names if num_whole < 100 else NAMES)
    return rows


def _whole(text: str) -> str:
    return text.encode(errors="replace").decode()


def _cell(value: Any) -> str:
    return "" if value is None else _whole(value if isinstance(value, str) else json.dumps(value))


def _nested(text: str) -> bytes:
    """Where a mark stands for depth, so many objects in its place."""
    return re.sub(r'"@(40|300|950)"', lambda mark: '{"a":' * int(mark[1]) + "1" + "}" * int(mark[1]), text).encode()


def _jsonl(rows: list[Value]) -> bytes:
    return _nested("".join(json.dumps(row) + "\n" for row in rows))


def _json(rows: list[Value]) -> bytes:
    return _nested(json.dumps(rows, indent=1))


def _by_id(rows: list[Value]) -> bytes:
    return _nested(json.dumps({f"id{at}": row for at, row in enumerate(rows)}))


def _csv(rows: list[Value]) -> bytes:
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO(newline="")
    written = csv.writer(out, quoting=csv.QUOTE_ALL)
    written.writerow([_whole(name) for name in names])
    written.writerows([_cell(row.get(name)) for name in names] for row in rows)
    return out.getvalue().encode()


def _parquet(rows: list[Value]) -> bytes:
    names = dict.fromkeys(name for row in rows for name in row)
    out = io.BytesIO()
    pq.write_table(pa.table({_whole(name): _column([row.get(name) for row in rows]) for name in names}), out)
    return out.getvalue()


def _column(values: list[Any]) -> Any:
    """As text where the values have no type in common."""
    try:
        array = pa.array(values)
        pq.write_table(pa.table({"x": array}), io.BytesIO())
    except (pa.ArrowException, UnicodeEncodeError, OverflowError):
        return pa.array([None if value is None else _cell(value) for value in values], pa.string())
    return array


FORMS = {"rows.jsonl": _jsonl, "rows.json": _json, "ids.json": _by_id, "rows.csv": _csv, "rows.parquet": _parquet}


def _broken(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content))
    return rng.choice(
        [content[:at], content[:at] + rng.choice([b"\xff", b'"', b"\n", b"{", b"]", b"\x00"]) + content[at + 1 :]]
    )


def _settings(name: str, fields: dict[str, str], rng: random.Random) -> Value:
    source: Value = {"path": name, "weight": rng.choice([1, 1, 1, 0.5, 2.5]), "limit": rng.choice([None, None, 7])}
    source["fields"] = rng.choice(
        [{}, {}, fields, fields, dict(zip(fields, rng.sample(NAMES, len(fields)), strict=True))]
    )
    data: Value = {
        "train": [source],
        "max_tokens": rng.choice([2048, 40]),
        "too_long": rng.choice(["error", "drop", "cut_prompt"]),
    }
    data |= {
        "turns": rng.choice(["all", "last"]),
        "template": rng.choice(["chat", "chat", "plain"]),
        "overlap": rng.choice(["error", "drop"]),
    }
    held = {"path": name, "fields": source["fields"]}
    return data | rng.choice([{}, {}, {"validation": {"share": 0.2}}, {"validation": held}, {"test": held}])


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One with the usual template, one with a place for everything."""
    usual, roomy = tmp_path_factory.mktemp("usual"), tmp_path_factory.mktemp("roomy")
    make_tokenizer().save_pretrained(usual)
    made = make_tokenizer()
    made.chat_template = TEMPLATE
    made.save_pretrained(roomy)
    return usual, roomy


def _outcome(data: Value, base: Path, tokenizer: Path) -> Preparation | DataError:
    (base / "out").mkdir()
    try:
        return prepare(
            Data.model_validate(data, strict=False), base=base, tokenizer=tokenizer, seed=0, folder=base / "out"
        )
    except DataError as error:
        return error


@pytest.mark.parametrize("at", range(len(SHAPES)))
def test_without_a_mutation_every_row_is_used(tmp_path: Path, tokenizers: tuple[Path, Path], at: int) -> None:
    shape, fields = SHAPES[at]
    (tmp_path / "rows.jsonl").write_bytes(_jsonl([shape(n) for n in range(5)]))
    found = _outcome({"train": [{"path": "rows.jsonl", "fields": fields}]}, tmp_path, tokenizers[1])
    assert isinstance(found, Preparation)
    assert (found.sources[0].records, found.sources[0].used) == (5, found.sources[0].read)


@pytest.mark.parametrize("at", range(len(SHAPES)))
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_mutated_file_balances_its_books_or_is_an_error_with_a_remedy(
    tmp_path: Path, tokenizers: tuple[Path, Path], seed: int, name: str, at: int
) -> None:
    rng = random.Random(f"{seed} {name} {at}")
    shape, fields = SHAPES[at]
    rows = _rows(shape, rng)
    content, is_broken = FORMS[name](rows), rng.random() < 0.15
    (tmp_path / name).write_bytes(_broken(content, rng) if is_broken else content)
    data = _settings(name, fields, rng)
    found = _outcome(data, tmp_path, rng.choice(tokenizers))
    if isinstance(found, DataError):
        assert name in found.problem or "a share of" in found.problem
        assert found.remedy
    else:
        _check_books(found, data, tmp_path / "out", len(rows), is_broken=is_broken)


def _check_books(found: Preparation, data: Value, out: Path, num_rows: int, *, is_broken: bool) -> None:
    for ledger in found.sources:
        assert ledger.used + sum(ledger.dropped.values()) == ledger.read
        if ledger.split == "train" or "share" not in data.get(
            "validation", {}
        ):  # a share's records are counted in train
            assert 0 < ledger.records <= num_rows + 1 if is_broken else ledger.records == num_rows
    unusable = sum(
        count
        for ledger in found.sources
        for reason, count in ledger.dropped.items()
        if not reason.startswith("left out")
    )
    assert sum(line.get("what") == "dropped" for line in read_lines(out / "ledger.jsonl")) == unusable
    if found.lengths is not None:
        examples = Examples(out / "train.safetensors")
        assert len(examples) == found.lengths.num_rows
        assert max(examples.lengths) <= data["max_tokens"]


@pytest.mark.parametrize(
    ("mutant", "reason"),
    [
        (
            {
                "messages": [
                    *_called(0)[:2],
                    {"role": "assistant", "tool_calls": [{"name": "add", "arguments": "@300"}]},
                ]
            },
            "refuses this conversation",
        ),
        ({"messages": _called(0), "tools": [{"name": "@300"}]}, "the name of a tool is not text"),
    ],
)
def test_a_row_that_is_nested_deeper_than_a_template_follows_costs_only_itself(
    tmp_path: Path, tokenizers: tuple[Path, Path], mutant: Value, reason: str
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(_jsonl([{"messages": _called(1), "tools": TOOLS}, {"tools": TOOLS} | mutant]))
    found = _outcome({"train": [{"path": "rows.jsonl"}]}, tmp_path, tokenizers[1])
    assert isinstance(found, Preparation)
    assert (found.sources[0].used, found.sources[0].dropped) == (1, {"unusable": 1})
    assert reason in found.problems[0].lines[0]
    assert found.problems[0].remedy
