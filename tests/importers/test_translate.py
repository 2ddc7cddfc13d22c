"""Every key of another tool's config is translated, declared equal, or listed as not carried over."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from finefit.drafts.from_config import num_packs
from finefit.errors import SpecError
from finefit.importers import TOOLS, tool_of, what_is
from finefit.importers.documents import arguments_of, read_document
from finefit.importers.keys import Config, NotTrainedHere, SeenRow, Tool
from finefit.importers.training import names_of_pattern
from finefit.importers.translate import Translation, grouped, translate
from finefit.spec import reader
from finefit.spec.load import parse_spec
from finefit.spec.schema import Spec
from tests.importers.configs import AXOLOTL, CASES, FACTORY, LORA, TRL, Case


def translated(folder: Path, text: str, *, devices: int = 1, **known: Any) -> Translation:
    path = folder / ("config.json" if text.startswith("{") else "config.yaml")
    path.write_text(text)
    document = read_document(path)
    tool = tool_of(document)
    assert tool is not None
    config = Config(where=path.name, values={}, defaults={}, folder=folder, target=folder, devices=devices, **known)
    return translate(tool, config, document)


def spec_of(found: Translation) -> Spec:
    return parse_spec(json.dumps(found.values), where="spec.yaml")


def value_at(spec: Spec, path: str) -> Any:
    value: Any = spec.model_dump(mode="json", by_alias=True)
    for key in path.split("."):
        value = value[int(key)] if isinstance(value, list) else value[key]
    return tuple(value) if isinstance(value, list) else value


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_config_becomes_a_spec_that_means_the_same(case: Case, tmp_path: Path) -> None:
    found = translated(tmp_path, case.text, devices=case.devices)
    assert found.tool.slug == case.tool
    spec = spec_of(found)
    assert {path: value_at(spec, path) for path in case.settings} == case.settings
    lost = {line.key for line in found.of("not carried over") if line.outcome.matters}
    assert lost >= set(case.lost)
    for path in case.others:
        section, _, key = path.partition(".")
        assert key not in found.values.get(section, {})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_key_is_dropped_silently(case: Case, tmp_path: Path) -> None:
    found = translated(tmp_path, case.text + ("" if case.text.startswith("{") else "key_of_tomorrow: 1\n"))
    assert {line.key for line in found.lines if not line.is_default} >= found.config.values.keys() - {"config"}
    for line in found.lines:
        assert line.outcome.settings or line.outcome.note, line.key
    unknown = [line.key for line in found.of("not carried over") if "does not know" in line.outcome.note]
    assert unknown == ([] if case.text.startswith("{") else ["key_of_tomorrow"])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (AXOLOTL + "rl: kto\n", "kto"),
        (AXOLOTL + "rl: grpo\n", "grpo"),
        (AXOLOTL + "relora: true\n", "ReLoRA"),
        (AXOLOTL + "reward_model: true\n", "reward models"),
        (AXOLOTL + "plugins: [axolotl.integrations.diffusion.DiffusionPlugin]\n", "diffusion"),
        (AXOLOTL.replace("datasets", "other"), "no datasets"),
        (FACTORY.replace("stage: sft", "stage: kto"), "kto"),
        (FACTORY.replace("stage: sft", "stage: dpo") + "pref_loss: orpo\n", "orpo"),
        (FACTORY.replace("do_train: true", "do_predict: true"), "trains nothing"),
        (FACTORY.replace("do_train: true", "export_dir: out"), "exports a model"),
        (TRL + "loss_type: ipo\n", "ipo"),
        (TRL + "reward_funcs: [accuracy]\n", "rewards"),
    ],
)
def test_a_training_that_finefit_does_not_offer_is_refused_by_name(text: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(NotTrainedHere, match=named) as caught:
        translated(tmp_path, text)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (AXOLOTL.replace("learning_rate: 2e-5", "learning_rate: fast"), "learning_rate is 'fast', not a number"),
        (AXOLOTL + "sequence_len: 10\n", "line"),
        ("base_model: [\n", "line"),
        ("- 1\n", "no settings by name"),
        ("", "no settings by name"),
        (
            "a: &a [1,1,1,1,1,1,1,1,1]\n"
            + "".join(f"{k}: &{k} [{', '.join([f'*{p}'] * 9)}]\n" for p, k in zip("abcdefg", "bcdefgh", strict=True)),
            "values",
        ),
        ("{" * 2000, "line|YAML"),
        ("a: !!python/object/apply:os.system [ls]\n", "line|YAML"),
    ],
)
def test_a_config_that_cannot_be_read_is_a_mistake_of_the_user(text: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match=named):
        translated(tmp_path, text)


def test_a_number_without_a_dot_is_a_number_as_in_the_tools_of_yaml_1_1(tmp_path: Path) -> None:
    assert spec_of(translated(tmp_path, AXOLOTL)).optimizer.lr == 2e-5


def test_a_count_of_rows_to_validate_on_becomes_a_share_of_the_rows_that_are_here(tmp_path: Path) -> None:
    found = translated(tmp_path, AXOLOTL + "val_set_size: 50\n", count_rows=lambda _: 1000)
    held = spec_of(found).data.validation
    assert held is not None
    assert held.share == 0.05
    (line,) = (
        line for line in translated(tmp_path, AXOLOTL + "val_set_size: 50\n").lines if line.key == "val_set_size"
    )
    assert line.outcome.matters


def test_datasets_are_looked_up_in_dataset_info(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/rows.json").write_text("[]")
    info = {
        "rows": {"file_name": "rows.json", "columns": {"prompt": "question", "query": "facts", "response": "reply"}},
        "pairs": {
            "hf_hub_url": "owner/pairs",
            "ranking": True,
            "columns": {"prompt": "ask", "chosen": "good", "rejected": "bad"},
        },
        "talks": {"file_name": "rows.json", "formatting": "sharegpt", "columns": {"messages": "talk"}},
    }
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    spec = spec_of(translated(tmp_path, FACTORY.replace("dataset: rows", "dataset: rows,talks\nmax_samples: 7")))
    first, second = spec.data.train
    assert (first.path, first.limit) == ("data/rows.json", 7)
    assert (first.fields.prompt, first.fields.answer) == ("{question}\n{facts}", "reply")
    assert second.fields.messages == "talk"
    pairs = spec_of(translated(tmp_path, FACTORY.replace("dataset: rows", "dataset: pairs").replace("sft", "dpo")))
    assert pairs.data.train[0].path == "hf://datasets/owner/pairs"
    assert pairs.data.train[0].fields.chosen == "good"


def test_a_date_and_a_key_that_is_a_list_are_read_as_text(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("base_model: 2026-01-01\ndatasets: [{path: !!binary YQ==, ? [a, 1] : 2026-01-01}]\n")
    read = {"base_model": "2026-01-01", "datasets": [{"path": "b'a'", "('a', 1)": "2026-01-01"}]}
    assert json.loads(json.dumps(read_document(path))) == read


@pytest.mark.parametrize("cells", [None, 3, [None, 1], [{"cell_type": "code"}], [{"cell_type": "code", "source": [1]}]])
def test_a_notebook_with_cells_of_another_form_has_no_code(cells: object, tmp_path: Path) -> None:
    path = tmp_path / "train.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    with pytest.raises(SpecError, match="calls none of"):
        read_document(path)


def test_an_argument_that_no_config_could_hold_is_shown_as_code(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("SFTConfig(seed=1j, max_steps=b'x', max_length={1, 2}, lr=(1, [2]))\n")
    read = {"seed": "<1j>", "max_steps": "<b'x'>", "max_length": "<{1, 2}>", "lr": [1, [2]]}
    assert read_document(path) == read


def test_a_notebook_is_parsed_and_not_run(tmp_path: Path) -> None:
    code = """
from unsloth import FastLanguageModel
max_seq_length = 1024
raise SystemExit("must not run")
model, tokenizer = FastLanguageModel.from_pretrained(model_name="unsloth/m", max_seq_length=max_seq_length)
model = FastLanguageModel.get_peft_model(model, r=8, lora_alpha=8, target_modules=["q_proj"], random_state=1)
rows = load_dataset("owner/rows", split="train")
trainer = SFTTrainer(model=model, train_dataset=rows, args=SFTConfig(max_steps=5, learning_rate=2e-4, seed=pick()))
trainer = train_on_responses_only(trainer, instruction_part="<u>", response_part="<a>")
"""
    cells = [{"cell_type": "code", "source": ["!pip install unsloth\n", *code.splitlines(keepends=True)]}]
    path = tmp_path / "train.ipynb"
    path.write_text(json.dumps({"cells": [*cells, {"cell_type": "markdown", "source": "text"}]}))
    values = read_document(path)
    assert values["max_seq_length"] == 1024
    assert values["dataset_name"] == "owner/rows"
    assert values["train_on_responses_only"] is True
    assert values["seed"] == "<pick()>"
    tool = tool_of(values)
    assert tool is not None
    assert tool.slug == "unsloth"
    with pytest.raises(SpecError, match="calls none of"):
        arguments_of("print(1)", Path("a.py"))


def test_no_secret_of_a_config_is_shown(tmp_path: Path) -> None:
    secrets = "hub_token: hf_S1\nwandb_api_key: S2\npad_token: <pad>\nmodel_kwargs: {token: S3}\npassword: S4\n"
    found = translated(tmp_path, AXOLOTL + secrets)
    shown = {line.key: line.value for line in found.lines}
    assert not re.search("S[1-4]", str(shown))
    assert shown["pad_token"] == "<pad>"


_SCRIPT = """
model = FastLanguageModel.from_pretrained("owner/model", load_in_4bit=True)
{before}
trainer = SFTTrainer(model=model, args=SFTConfig(learning_rate=lr))
{after}
"""


def test_what_a_script_loads_after_its_training_or_never_is_not_its_model() -> None:
    after = """
if False:
    model = FastLanguageModel.from_pretrained("lora_model", load_in_4bit=False)
model = AutoModelForCausalLM.from_pretrained("outputs")
"""
    before = 'tokenizer = AutoTokenizer.from_pretrained("owner/tokenizer")\nlr = 1e-4'
    values = arguments_of(_SCRIPT.format(before=before, after=after), Path("a.py"))
    assert values == {"model_name": "owner/model", "load_in_4bit": True, "learning_rate": 1e-4}


@pytest.mark.parametrize("bound", ["lr = lr * 2", "lr = 2e-4", "lr *= 2", "for lr in (1e-3, 2e-3): pass"])
def test_a_name_that_is_bound_twice_stands_for_no_value(bound: str) -> None:
    values = arguments_of(_SCRIPT.format(before=f"lr = 1e-4\n{bound}", after=""), Path("a.py"))
    assert values["learning_rate"] == "<lr>"


@pytest.mark.parametrize(
    ("before", "named"),
    [
        (
            'rows = load_dataset("json", data_files="a.jsonl")\ntest = load_dataset("json", data_files="b.jsonl")',
            "b.jsonl",
        ),
        ("first = SFTTrainer(args=SFTConfig(learning_rate=1e-5))", "2 trainings"),
    ],
)
def test_a_script_that_leaves_open_what_it_trains_on_is_refused(before: str, named: str) -> None:
    with pytest.raises(SpecError, match=named):
        arguments_of(_SCRIPT.format(before=before, after=""), Path("a.py"))


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        (
            r"model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj",
            "up_proj down_proj gate_proj q_proj k_proj v_proj o_proj",
        ),
        (r"model\.layers\..*\.mlp\.down_proj", "down_proj"),
        (r".*", ""),
    ],
)
def test_a_pattern_of_layers_gives_the_names_that_it_ends_with(pattern: str, names: str) -> None:
    assert names_of_pattern(pattern) == names.split()


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.slug)
def test_every_key_of_a_table_leads_to_a_setting_that_exists_or_says_why_not(tool: Tool) -> None:
    for name, key in tool.keys.items():
        assert key.place or key.note, name
        if key.place:
            section, _, inner = key.place.partition(".")
            declared = Spec.model_fields["validation" if section == "validate" else section]
            classes = reader.classes_of(declared.annotation)
            assert not inner or any(inner.partition(".")[0] in reader.fields_of(found) for found in classes), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_setting_that_is_shown_is_part_of_the_spec(case: Case, tmp_path: Path) -> None:
    found = translated(tmp_path, case.text, devices=case.devices)
    written = json.dumps(found.values)
    for line in found.of("translated"):
        for place in line.outcome.settings:
            inner: Any = found.values
            for key in place.split("."):
                assert key in inner, f"{line.key} shows {place}, which is not in {written}"
                inner = inner[key]


def test_keys_with_one_outcome_are_one_entry(tmp_path: Path) -> None:
    groups = grouped(translated(tmp_path, AXOLOTL).of("translated"))
    (batch,) = (group for group in groups if "global_batch" in group[0].outcome.settings)
    assert [line.key for line in batch] == ["micro_batch_size", "gradient_accumulation_steps"]


@pytest.mark.parametrize(
    ("more", "packs", "tokens"),
    [
        ("flash_attention: true\n", 8, 2 * 4096),
        ("attn_implementation: flash_attention_2\n", 8, 2 * 4096),
        ("flash_attention: true\nmultipack_real_batches: true\n", 16, 4096),
        ("attn_implementation: sdpa\n", 16, 4096),
    ],
)
def test_a_micro_batch_of_axolotl_is_one_pack_if_attention_keeps_rows_apart(
    more: str, packs: int, tokens: int, tmp_path: Path
) -> None:
    found = translated(tmp_path, AXOLOTL + "sample_packing: true\n" + more, devices=2)
    assert found.tool.per_step(found.config) == packs
    assert found.tool.packs(found.config) == tokens


@pytest.mark.parametrize(
    ("lengths", "packs"), [([], 0), ([500] * 20, 3), ([4096, 1], 2), ([3000, 2000, 1000, 900], 2), ([5000, 10], 2)]
)
def test_rows_are_packed_the_longest_first(lengths: list[int], packs: int) -> None:
    assert num_packs(lengths, 4096) == packs


def test_a_long_conversation_is_cut_turn_by_turn_as_in_llama_factory(tmp_path: Path) -> None:
    """Of 100 tokens the first turn takes 10 + 20. In the 70 left, 2 x 30 are less, so the answer stays whole and the
    prompt of 90 keeps 40; the third turn finds no room."""
    found = translated(tmp_path, FACTORY.replace("cutoff_len: 2048", "cutoff_len: 100"))
    turns = ((10, 20), (90, 30), (5, 5))
    row = SeenRow(length=160, supervised=55, is_conversation=True, turns=turns)
    assert found.tool.seen(row, found.config) == (100, 50)


def test_a_config_of_a_launcher_is_named() -> None:
    assert "cloud launcher" in str(what_is({"provider": "baseten", "gpu": "h100"}))


def test_a_lora_training_of_axolotl_keeps_its_adapter_settings(tmp_path: Path) -> None:
    assert spec_of(translated(tmp_path, AXOLOTL + LORA)).tuning.kind == "lora"
