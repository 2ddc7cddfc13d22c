"""Published configs on small rows: what finefit trains on is what their tool trains on, or the comparison of
`init --from` says that it differs.

The tokenizer has one token per byte and writes a turn as `<|role|>content<|end|>` and a line feed, so that every figure
follows from the text: an answer of n letters is n + 1 supervised tokens in every tool, its letters and `<|end|>`.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from finefit.data.examples import ExamplePairs, Examples
from finefit.drafts.from_config import Imported, import_config
from finefit.model.resolve_model import read_stub
from finefit.plan.prepared_data import prepare_data
from finefit.spec.load import parse_spec
from finefit.spec.models import Lora
from finefit.spec.schema import Dpo
from tests.conftest import make_tokenizer, write_jsonl
from tests.importers.published_models import PLAIN

CONFIGS = Path(__file__).resolve().parents[3] / "shared" / "data" / "configs"

Rows = list[dict[str, Any]]
_PAIRED = len(
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n\n\n### Input:\n\n\n### Response:\n"
)
_ALONE = len(
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n\n\n### Response:\n"
)
"""Letters of Alpaca's two wordings around a row."""


def alpaca(count: int, *, answer: int, more: str = "twice") -> Rows:
    """Instructions of 10 letters."""
    return [{"instruction": f"Repeat {at:03}", "input": more, "output": "y" * answer} for at in range(count)]


def talks(count: int, *, role: str = "role", text: str = "content", column: str = "messages") -> Rows:
    """Two questions of 3 letters, with answers of 4 and 2."""
    said = [("user", "q{:02}"), ("assistant", "four"), ("user", "and"), ("assistant", "ok")]
    names = {"user": "human", "assistant": "gpt"} if role == "from" else {}
    return [{column: [{role: names.get(who, who), text: what.format(at)} for who, what in said]} for at in range(count)]


def pairs(count: int) -> Rows:
    ask = [{"role": "user", "content": "which {}"}]
    answers = {side: {"role": "assistant", "content": side} for side in ("chosen", "rejected")}
    return [{"conversation": [{**ask[0], "content": f"which {at:02}"}], **answers} for at in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    config: str
    """Its path among the published ones."""
    rows: Rows
    trained: dict[int, int]
    """How many rows the tool trains on, by the tokens of a row that it trains on: without rows held out or dropped; of
    a pair both sides."""
    per_step: float
    """Rows of an optimizer step, the mean where packs hold them."""
    because: str
    """How the figures follow from the config."""
    differs: tuple[str, ...] = ()
    """Lines of the comparison where finefit trains on something else."""
    changes: str = ""
    """Lines that are added to the config."""
    devices: int = 1

    def __str__(self) -> str:
        return self.config.rpartition("examples/")[2]


AXOLOTL = (
    Case(
        config="llama-3/lora-1b.yml",
        rows=alpaca(20, answer=500 - _PAIRED - 15 - 1),
        trained={500 - _PAIRED - 15: 18},
        per_step=2 * 20 / 3,
        because="A row has 500 tokens: wording, 10 + 5 letters, answer, end. A pack has 2 micro x 2048 = 4096 tokens, "
        "so 8 rows; 20 rows are 3 packs, and 2 accumulated are 2 packs. 0.1 of 20 rows is held out.",
        differs=("rows per step",),  # 13 instead of 13.3
    ),
    Case(
        config="llama-3/instruct-lora-8b.yml",
        rows=talks(20),
        trained={5 + 3: 19},
        per_step=8,
        because="2 micro x 4 accumulated; no packing; 0.05 of 20 rows is held out; roles_to_train is assistant.",
    ),
    Case(
        config="llama-2/lora.yml",
        rows=alpaca(20, answer=9, more=""),
        trained={10: 19},
        per_step=19,
        because="All rows fit into the first of 4 packs of 2 x 4096 tokens; 0.05 of 20 is held out. Without an input "
        "axolotl has another wording.",
        differs=("tokens",),
    ),
    Case(
        config="gemma2/qlora.yml",
        rows=talks(20, role="from", text="value", column="conversations"),
        trained={8: 20},
        per_step=20,
        because="All rows fit into the first of 4 packs; nothing is held out.",
    ),
    Case(
        config="mistral/config.yml",
        rows=alpaca(40, answer=1000),
        trained={1001: 38},
        per_step=38,
        because="A row has the wording, 15 + 1000 letters and an end: 1221 tokens, so a pack of 2 x 8192 holds 13, and "
        "40 rows are 4 packs; a step is 4 packs, of which 0.05 of 40 rows is held out.",
    ),
    Case(
        config="archived/openllama-3b/config.yml",
        rows=[*alpaca(50, answer=100), {"instruction": "Long", "input": "x", "output": "y" * 1024}],
        trained={101: 49},
        per_step=50 / 17,
        because="The row of more than 1024 tokens is dropped. The others have the wording, 15 + 100 letters, an end: "
        "321 tokens; a pack of 1 x 1024 holds 3, 50 rows are 17 packs, a step is 1 pack. 0.02 of 50 is held out.",
        differs=("rows per step",),  # 3 instead of 2.9
    ),
    Case(
        config="archived/pythia/lora.yml",
        rows=[*alpaca(20, answer=3), {"instruction": "Long", "input": "x", "output": "y" * 512}],
        trained={4: 19},
        per_step=4,
        because="4 micro x 1 accumulated; no packing. The row of more than 512 tokens is dropped, 0.05 of 20 held out.",
    ),
    Case(
        config="distributed-parallel/qwen3-8b-fsdp-tp-cp.yaml",
        rows=alpaca(33, answer=8192 // 4 - _PAIRED - 15 - 1),
        trained={8192 // 4 - _PAIRED - 15: 33},
        per_step=2 * 33 / 9,
        because="8 devices, of which 2 x 2 share a row: 2 ranks x 1 accumulated = 2 packs of 1 x 8192 tokens. 4 rows "
        "fill a pack, 33 rows are 9 packs.",
        differs=("rows per step",),  # 7 instead of 7.3
        devices=8,
    ),
    Case(
        config="archived/cerebras/qlora.yml",
        rows=alpaca(20, answer=7),
        trained={8: 19},
        per_step=4,
        because="batch_size 4 is that of a device over all accumulated steps: 4 micro x 1.",
    ),
    Case(
        config="archived/replit-3b/config-lora.yml",
        rows=alpaca(20, answer=7),
        trained={8: 19},
        per_step=8,
        because="batch_size 8 = 1 micro x 8 accumulated.",
    ),
    Case(
        config="archived/cerebras/btlm-ft.yml",
        rows=alpaca(20, answer=7),
        trained={_PAIRED + 15 + 8: 19},
        per_step=1,
        because="train_on_inputs: true: every token of a row is trained on, in axolotl.",
        differs=("supervised tokens",),
    ),
    Case(
        config="falcon-h1/falcon-h1-1b-qlora.yaml",
        rows=talks(12, role="from", text="value", column="conversations"),
        trained={8: 12},
        per_step=8,
        because="1 micro x 4 accumulated x 2 ranks.",
        devices=2,
    ),
    Case(
        config="llama-3/instruct-dpo-lora-8b.yml",
        rows=pairs(20),
        trained={len("chosen") + 1: 19, len("rejected") + 1: 19},
        per_step=8,
        because="2 micro x 4 accumulated pairs; 0.05 of 20 is held out; both answers of a pair are scored.",
    ),
    Case(
        config="qwen3/32b-qlora.yaml",
        rows=talks(20, role="from", text="value", column="conversations"),
        trained={8: 4},
        per_step=4,
        because="train[:20%] of 20 rows, which fit into the first of 2 packs.",
    ),
)
FACTORY = (
    Case(
        config="train_lora/qwen3_lora_sft.yaml",
        rows=alpaca(10, answer=6),
        trained={8: 20},
        per_step=8,
        because="1 row x 8 accumulated, of two datasets with 10 rows each; nothing is held out. The template trains on "
        "the line feed after the end too.",
        differs=("tokens", "supervised tokens"),
    ),
    Case(
        config="train_full/qwen3_full_sft.yaml",
        rows=alpaca(10, answer=6, more=""),
        trained={8: 20},
        per_step=8,
        because="1 row x 2 accumulated x 4 devices. The template trains on the line feed after the end too.",
        differs=("tokens", "supervised tokens"),
        devices=4,
    ),
    Case(
        config="extras/galore/llama3_full_sft.yaml",
        rows=alpaca(10, answer=6),
        trained={7: 14},
        per_step=1,
        because="The first 7 rows of each dataset by max_samples.",
        changes="max_samples: 7",
    ),
    Case(
        config="train_lora/qwen3_lora_dpo.yaml",
        rows=[
            {"conversations": [{"from": "human", "value": f"which {at}"}]}
            | {side: {"from": "gpt", "value": side} for side in ("chosen", "rejected")}
            for at in range(10)
        ],
        trained={len("chosen") + 1: 10, len("rejected") + 1: 10},
        per_step=8,
        because="1 pair x 8 accumulated; both answers of a pair are scored.",
    ),
    Case(
        config="extras/fsdp_qlora/llama3_lora_sft.yaml",
        rows=[{"instruction": f"and {at}", "input": "", "output": "no", "history": [["q", "long"]]} for at in range(5)],
        trained={3: 10},
        per_step=8,
        because="mask_history: the answers in `history` are not trained on.",
        changes="mask_history: true",
    ),
    Case(
        config="extras/pissa/llama3_lora_sft.yaml",
        rows=alpaca(10, answer=1003),
        trained={1004: 20},
        per_step=16,
        because="A row has 1024 tokens: mark, 10 + 1 + 5 letters, end, line feed; mark, 1003 letters, end. 2 rows fill "
        "a pack of 2048; a step has 8 accumulated packs.",
        changes="packing: true",
    ),
    Case(
        config="ascend/qwen3_full_sft_fsdp2.yaml",
        rows=alpaca(10, answer=2),
        trained={24: 9},
        per_step=32,
        because="8 rows x 1 accumulated x 4 devices; 0.1 of 10 rows is held out. train_on_prompt: mark, 10 + 1 + 5 "
        "letters, end, line feed; mark, 2 letters, end, line feed.",
        changes="train_on_prompt: true\nval_size: 0.1",
        devices=4,
        differs=("tokens", "supervised tokens"),
    ),
    Case(
        config="extras/muon/qwen2_full_sft.yaml",
        rows=[*alpaca(19, answer=6), {"instruction": "x" * 1996, "input": "", "output": "y" * 2100}],
        trained={8: 38, 1049: 2},
        per_step=8,
        because="A prompt of 2000 and an answer of 2102 tokens are cut in proportion, this to 2048 x 2102 / 4102; "
        "finefit cuts no answer, so it drops the row. The template trains on the line feed after the end too.",
        differs=("rows", "tokens", "supervised tokens"),
    ),
    Case(
        config="v1/train_full/train_full_fsdp2.yaml",
        rows=talks(6),
        trained={8: 6},
        per_step=2,
        because="1 micro x 2 devices.",
        devices=2,
    ),
    Case(
        config="v1/train_batching_strategy/train_full_fsdp2_dynamic_batching.yaml",
        rows=talks(6),
        trained={8: 6},
        per_step=2,
        because="2 micro x 1 device.",
    ),
)


def place(folder: Path, rows: Rows) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(PLAIN))
    make_tokenizer().save_pretrained(folder / "model")
    (folder / "data").mkdir()
    write_jsonl(folder / "data" / "rows.jsonl", rows)


def imported(case: Case, folder: Path, *, tool: str) -> Imported:
    """The published config, with a folder in the place of its model and a file in the place of its rows."""
    place(folder, case.rows)
    (folder / "data" / "v1_sft_demo.yaml").write_text("demo: {path: data/rows.jsonl}\n")
    pair_columns = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}
    info = {name: {"file_name": "rows.jsonl"} for name in ("identity", "alpaca_en_demo")}
    ranked = {"file_name": "rows.jsonl", "ranking": True, "formatting": "sharegpt", "columns": pair_columns}
    (folder / "data" / "dataset_info.json").write_text(json.dumps(info | {"dpo_en_demo": ranked}))
    text = (CONFIGS / tool / "examples" / case.config).read_text(encoding="utf-8")
    text = re.sub(r"^(base_model|model_name_or_path|model): *\S+", r"\1: model", text, count=1, flags=re.MULTILINE)
    if tool == "axolotl":
        text = re.sub(r"^( *-? *path): *\S+", r"\1: data/rows.jsonl", text, flags=re.MULTILINE)
    for change in filter(None, case.changes.split("\n")):
        text = re.sub(rf"^{change.partition(':')[0]}:.*$", "", text, flags=re.MULTILINE) + f"\n{change}\n"
    path = folder / "config.yaml"
    path.write_text(text)
    return import_config(path, folder / "spec.yaml", devices=case.devices)


def supervised_of(found: Imported, folder: Path) -> Counter[int]:
    """Counts the rows that finefit trains on, by their supervised tokens; those of a pair by each side."""
    tokenizer = read_stub(found.spec.model, folder).tokenizer
    assert tokenizer is not None
    path = prepare_data(found.spec, folder, tokenizer).path("train.safetensors")
    if isinstance(found.spec.objective, Dpo):
        return Counter(count for row in ExamplePairs(path).supervised_counts.tolist() for count in row)
    return Counter(Examples(path).supervised_counts.tolist())


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="the published configs are not here")
@pytest.mark.parametrize(
    ("tool", "case"),
    [("axolotl", case) for case in AXOLOTL] + [("llamafactory", case) for case in FACTORY],
    ids=str,
)
def test_what_is_trained_is_the_same_or_shown_to_differ(tool: str, case: Case, tmp_path: Path) -> None:
    found = imported(case, tmp_path, tool=tool)
    assert parse_spec(found.text, where="spec.yaml") == found.spec
    assert abs(found.spec.global_batch - case.per_step) <= 0.5
    if found.compared is None:
        assert isinstance(found.spec.objective, Dpo)
        assert supervised_of(found, tmp_path) == case.trained
        return
    lines = found.compared.lines()
    assert {name for name, (theirs, ours) in lines.items() if theirs != ours} == set(case.differs)
    theirs = found.compared.theirs
    assert theirs.rows_per_step == pytest.approx(case.per_step)
    held_out = theirs.rows - sum(case.trained.values())
    assert theirs.supervised == sum(size * count for size, count in case.trained.items()) + held_out * min(case.trained)
    if not {"rows", "supervised tokens"} & set(case.differs):
        assert supervised_of(found, tmp_path) == case.trained


TRL = "model_name_or_path: model\ndataset_name: data/rows.jsonl\nper_device_train_batch_size: 4\nmax_length: 64\n"
UNSLOTH = (
    "model_name: model\ndataset_name: data/rows.jsonl\nmax_seq_length: 64\nr: 8\n"
    "per_device_train_batch_size: 2\ngradient_accumulation_steps: 4\n"
)
_TALK = 1 + 3 + 2 + 1 + 4 + 2 + 1 + 3 + 2 + 1 + 2 + 1
"""Tokens of one of `talks`: marks, letters, ends and line feeds of four turns, but for the last line feed."""


@pytest.mark.parametrize(
    ("text", "supervised", "per_step", "differs"),
    [
        (TRL, 10 * _TALK, 4, {"supervised tokens"}),
        (TRL + "assistant_only_loss: true\n", 10 * 8, 4, set()),
        (TRL + "packing: true\n", 10 * _TALK, 4 * (64 // _TALK), {"supervised tokens"}),
        (UNSLOTH, 10 * _TALK, 2 * 4, {"supervised tokens"}),
        (UNSLOTH + "train_on_responses_only: true\n", 10 * 8, 2 * 4, set()),
    ],
    ids=["trl", "trl answers", "trl packs", "unsloth", "unsloth answers"],
)
def test_trl_and_unsloth_train_on_whole_conversations_unless_told_otherwise(
    text: str, supervised: int, per_step: int, differs: set[str], tmp_path: Path
) -> None:
    place(tmp_path, talks(10))
    (tmp_path / "config.yaml").write_text(text)
    found = import_config(tmp_path / "config.yaml", tmp_path / "spec.yaml")
    assert found.compared is not None
    lines = found.compared.lines()
    assert lines["supervised tokens"] == (supervised, 10 * 8)
    assert {name for name, (theirs, ours) in lines.items() if theirs != ours} == differs
    assert found.compared.theirs.rows_per_step == per_step
    tuning = found.spec.tuning
    assert (isinstance(tuning, Lora) and tuning.base_bits == 4) is text.startswith(UNSLOTH)


def test_trl_cuts_the_end_of_a_row_that_finefit_drops(tmp_path: Path) -> None:
    long = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "y" * 100}]
    place(tmp_path, [*talks(10), {"messages": long}])
    (tmp_path / "config.yaml").write_text(TRL + "assistant_only_loss: true\n")
    found = import_config(tmp_path / "config.yaml", tmp_path / "spec.yaml")
    assert found.compared is not None
    lines = found.compared.lines()
    assert lines["rows"] == (11, 10)
    assert lines["supervised tokens"] == (
        10 * 8 + 64 - len("^q$\n^"),
        10 * 8,
    )  # what follows mark, letter, end and feed
