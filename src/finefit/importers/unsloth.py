"""Unsloth: the arguments of `FastLanguageModel` and of TRL's trainer, from a notebook, a script, or YAML."""

from typing import Any

from finefit.importers import training as shared
from finefit.importers import trl
from finefit.importers.keys import (
    OFF,
    Config,
    Key,
    NotTrainedHere,
    Outcome,
    SeenRow,
    Settings,
    Tool,
    as_flag,
    by,
    cut_at_the_end,
    dropped,
    equal,
    left,
    number,
    same,
    switch,
    translated,
    whole,
)

_QUANTISED = ("-unsloth-bnb-4bit", "-bnb-4bit")
_SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def _model(value: Any, config: Config) -> Outcome:
    """Unsloth's quantised copies stand for the model that they were made from."""
    name = str(value)
    for ending in _QUANTISED:
        if name.endswith(ending):
            found = shared.model(name.removesuffix(ending), config)
            return translated(found.settings, "the model itself, with base_bits: 4, not the packed copy")
    return shared.model(name, config)


def _four_bits(value: Any, config: Config) -> Outcome:
    if config.is_on("full_finetuning") or config.is_on("load_in_8bit"):
        return equal("another key decides")
    return shared.base_bits(4)(value, config)


def _full(value: Any, config: Config) -> Outcome:
    return translated({"tuning.kind": "full"}) if as_flag(value) not in OFF else equal("an adapter in both")


def _answers(value: Any, config: Config) -> Outcome:
    if value != "default" and as_flag(value) not in OFF:
        return equal("answers alone are trained on in both")
    return dropped(shared.ALL_TOKENS)


def _dataset(value: Any, config: Config) -> Outcome:
    return trl.dataset(value, config)


def _seen(row: SeenRow, config: Config) -> tuple[int, int]:
    is_whole = config.get("train_on_responses_only") in ("default", *OFF)
    limit = config.whole("max_length") or config.whole("max_seq_length")
    return cut_at_the_end(row, limit, answers_only=not is_whole)


def _require(config: Config) -> None:
    if not config.is_on("dataset_name"):
        problem = f"{config.where} names no dataset in load_dataset"
        raise NotTrainedHere(problem, "give its file as dataset_name in a YAML file of these arguments")


def _finish(config: Config, settings: Settings) -> Settings:
    kind = settings.get("tuning.kind", "lora")
    kept = {key: value for key, value in settings.items() if kind == "lora" or not key.startswith("tuning.")}
    return kept | {"tuning.kind": kind}


KEYS: dict[str, Key] = {
    **{
        name: key for name, key in trl.KEYS.items() if not name.startswith(("lora_", "use_peft", "dataset_", "load_in"))
    },
    "dataset_name": by("data.train", _dataset, "of load_dataset: a hub id becomes hf://"),
    "dataset_text_field": same("`text` is recognised; another column is `fields.text`"),
    "dataset_num_proc": same(shared.LOADING),
    "load_dataset.split": same("part of dataset_name"),
    "load_dataset.data_files": same("part of dataset_name"),
    "load_dataset.name": left("name the files of a subset in the path"),
    "model_name": by("model", _model, "a hub id or a folder; a `-bnb-4bit` copy is the model itself with base_bits: 4"),
    "model_name_or_path": by("model", _model, "a hub id or a folder"),
    "max_seq_length": by(
        "data.max_tokens", trl.length, "longer rows are cut at the end; finefit drops them", default=2048
    ),
    "max_length": by("data.max_tokens", trl.length, "longer rows are cut at the end; finefit drops them"),
    "load_in_4bit": by("tuning.base_bits", _four_bits, "on by default", default="true"),
    "load_in_8bit": by("tuning.base_bits", shared.base_bits(8), ""),
    "load_in_16bit": same("without base_bits the frozen weights are in 16 bits"),
    "load_in_fp8": left("frozen weights are in 16, 8 or 4 bits"),
    "full_finetuning": by("tuning.kind", _full, "`full`"),
    "r": whole("tuning.rank", default=16),
    "lora_r": whole("tuning.rank"),
    "lora_alpha": number("tuning.alpha", default=16),
    "lora_dropout": number("tuning.dropout"),
    "target_modules": by("tuning.targets", shared.layers, "the seven projections by default", default=_SEVEN),
    "bias": left("biases are not trained"),
    "use_gradient_checkpointing": same(shared.PLANNED),
    "random_state": whole("seed"),
    "use_rslora": switch("tuning.rank_stabilised", True),
    "use_dora": switch("tuning.dora", True),
    "loftq_config": left("adapters start at zero"),
    "init_lora_weights": left("adapters start at zero"),
    "modules_to_save": left("embeddings and head are not trained in full beside an adapter"),
    "embedding_learning_rate": left("all weights have one learning rate"),
    "finetune_vision_layers": left("name towers in tuning.targets", place="tuning.targets"),
    "finetune_language_layers": same("LoRA is on the language tower"),
    "finetune_attention_modules": same("part of the target modules"),
    "finetune_mlp_modules": same("part of the target modules"),
    "fast_inference": same("answers are generated by finefit"),
    "max_lora_rank": same("answers are generated by finefit"),
    "gpu_memory_utilization": same(shared.PLANNED),
    "token": same("log in with `hf auth login`"),
    "train_on_responses_only": by("data.turns", _answers, "without it every token is trained on", default="default"),
    "instruction_part": same("part of train_on_responses_only: finefit knows the answers by their roles"),
    "response_part": same("part of train_on_responses_only: finefit knows the answers by their roles"),
    "assistant_only_loss": same("train_on_responses_only decides"),
    "learning_rate": number("optimizer.lr", default=5e-5),
    "data_collator": left("rows are padded and packed by finefit", matters=False),
    "formatting_func": left("rows are written with the model's chat template; `data.task` takes your own Python file"),
    "callbacks": left("runs have no callbacks", matters=False),
    "compute_metrics": left("`evaluate` has tasks", matters=False, place="evaluate"),
    "eval_dataset": left("write the rows to validate on as data.validation", matters=False, place="data.validation"),
    "dtype": same("`precision` decides"),
    "device_map": same("the engine places the model"),
    "num_proc": same(shared.LOADING),
}

UNSLOTH = Tool(
    name="Unsloth",
    slug="unsloth",
    keys=KEYS,
    marks=frozenset(
        ("max_seq_length", "load_in_4bit", "use_gradient_checkpointing", "r", "random_state", "model_name")
    ),
    seen=_seen,
    per_step=shared.per_step("per_device_train_batch_size"),
    packs=trl.packs,
    require=_require,
    finish=_finish,
    ignored=("logging_", "eval_", "hub_", "dataloader_"),
    differences=(
        "`load_in_4bit` is on by default: the frozen weights are packed in NF4 (`tuning.base_bits: 4`).",
        "Without `train_on_responses_only` Unsloth trains on every token. finefit trains on the answers alone.",
        (
            "A script or notebook is parsed, never run: values that only running would give are named, and not "
            "carried over."
        ),
        "Rows that a notebook rewrites with its own function are read by finefit as they are in the file.",
    ),
)
