"""TRL: the YAML of its command line (`trl sft --config`, `trl dpo --config`), on transformers' arguments."""

from collections.abc import Mapping
from typing import Any

from finefit.importers import training as shared
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
    as_list,
    as_number,
    by,
    cut_at_the_end,
    dropped,
    equal,
    left,
    number,
    refused,
    same,
    switch,
    translated,
    whole,
)

_OF_DPO = frozenset(("beta", "ref_model_name_or_path", "max_prompt_length", "precompute_ref_log_probs"))
_DPO_LR = 1e-6
_NO_PEFT = "use_peft is off, so all weights are trained and the key has no effect"
_LORA_ONLY = ("tuning.kind", "tuning.trainable")


def is_dpo(config: Config) -> bool:
    """The config does not name the command; keys that only `trl dpo` has do."""
    return any(config.values.get(key) is not None for key in _OF_DPO) or config.values.get("loss_type") == "sigmoid"


def _rows(config: Config, entry: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    problems = []
    name = str(entry.get("path") or entry.get("name") or "")
    files = [str(file) for file in as_list(entry.get("data_files") or [])]
    path = shared.source(config, files[0])[0] if files and name in ("json", "csv", "parquet") else None
    path = path or (shared.hub_source(name, file=files[0]) if files else shared.source(config, name)[0])
    if len(files) > 1:
        problems.append("of several data_files the first is taken")
    split = str(entry.get("split") or "train")
    if split != "train":
        problems.append(f"split {split}: name its files in the path")
    if entry.get("subset"):
        problems.append(f"subset {entry['subset']}: name its files in the path")
    if entry.get("columns"):
        problems.append("columns: finefit reads all of them; name those that are meant in `fields`")
    return {"path": path}, problems


def dataset(value: Any, config: Config) -> Outcome:
    entry = {
        "path": value,
        "split": config.get("dataset_train_split") or config.get("load_dataset.split"),
        "subset": config.get("dataset_config"),
        "data_files": config.get("load_dataset.data_files"),
    }
    return _read(config, [entry])


def _mixture(value: Any, config: Config) -> Outcome:
    """A list of datasets, or the whole section of a mixture."""
    entries = value.get("datasets") if isinstance(value, Mapping) else value
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries) or not entries:
        raise NotTrainedHere(f"{config.where}: datasets is {value!r}", "TRL's datasets are a list with path")
    return _read(config, entries)


def _read(config: Config, entries: list[Mapping[str, Any]]) -> Outcome:
    found = [_rows(config, entry) for entry in entries]
    settings: dict[str, Any] = {"data.train": [source | fields_of(config) for source, _ in found]}
    problems = [problem for _, lost in found for problem in lost]
    return dropped("; ".join(dict.fromkeys(problems)), settings=settings) if problems else translated(settings)


def fields_of(config: Config) -> dict[str, Any]:
    column = config.values.get("dataset_text_field")
    return {"fields": {"text": str(column)}} if column and column != "text" else {}


def _rate(value: Any, config: Config) -> Outcome:
    """`trl dpo` has a default of its own."""
    if config.values.get("learning_rate") is None and is_dpo(config):
        return translated({"optimizer.lr": _DPO_LR}, "the default of `trl dpo`")
    return translated({"optimizer.lr": as_number(value, "learning_rate", config.where)})


def _peft(value: Any, config: Config) -> Outcome:
    return translated({"tuning.kind": "lora" if as_flag(value) not in OFF else "full"})


def _no_peft(value: Any, config: Config) -> Outcome:
    return translated({"tuning.kind": "full"}, "without use_peft all weights are trained")


def of_adapter(key: Key) -> Key:
    """A key that has an effect with use_peft alone."""

    def read(value: Any, config: Config) -> Outcome:
        return key.read(value, config) if config.is_on("use_peft") else equal(_NO_PEFT)

    return by(key.place, read, key.note, default=key.default)


def targets(value: Any, config: Config) -> Outcome:
    if value == "peft":
        note = "without it peft takes the query and value projections of most architectures"
        return translated({"tuning.targets": ["q_proj", "v_proj"]}, note)
    return shared.layers(value, config)


def _answers(value: Any, config: Config) -> Outcome:
    """`default` stands for a config without the key."""
    if value != "default" and as_flag(value) not in OFF:
        return equal("answers alone are trained on in both")
    if is_dpo(config):
        return equal("only `trl sft` has it")
    note = "rows of messages: TRL trains on every token, prompts included, finefit on answers; rows of prompt and "
    return dropped(note + "completion: on completions alone in both")


def _completions(value: Any, config: Config) -> Outcome:
    if as_flag(value) not in OFF:
        return equal("completions alone are trained on in both")
    return dropped(shared.ALL_TOKENS)


def length(value: Any, config: Config) -> Outcome:
    count = round(as_number(value, "max_length", config.where))
    return dropped(shared.CUT_AT_THE_END, settings={"data.max_tokens": count, "data.too_long": "drop"})


def packing(value: Any, config: Config) -> Outcome:
    if as_flag(value) in OFF:
        return equal("a step has rows, not packs, in both")
    count = shared.per_step("per_device_train_batch_size")(config)
    return shared.packed_batch(count, config.whole("max_length"), config)


def loss(value: Any, config: Config) -> Outcome:
    names = [str(name) for name in as_list(value)]
    if names in (["nll"], ["chunked_nll"]):
        return equal("the language-model loss in both")
    if names == ["sigmoid"]:
        return translated({"objective.kind": "dpo"})
    problem = f"{config.where} asks for the loss {', '.join(names)}, which finefit does not offer"
    raise NotTrainedHere(problem, "finefit trains with sft, and dpo with the sigmoid loss")


def beta(value: Any, config: Config) -> Outcome:
    rate = as_number(value, "beta", config.where)
    return translated({"objective.kind": "dpo", "objective.beta": rate}, "only `trl dpo` has it")


def _to_dpo(value: Any, config: Config) -> Outcome:
    return translated({"objective.kind": "dpo"}, "only `trl dpo` has it; prompts are never cut apart from their row")


def _evaluation(value: Any, config: Config) -> Outcome:
    if str(value) in ("no", "False", "none"):
        return equal("nothing is validated in both")
    return dropped("write the rows to validate on as data.validation", matters=False)


def _seen(row: SeenRow, config: Config) -> tuple[int, int]:
    is_whole = (row.is_conversation and config.get("assistant_only_loss") in ("default", *OFF)) or _is_off(
        config, "completion_only_loss"
    )
    limit = config.whole("max_seq_length") or config.whole("max_length")
    return cut_at_the_end(row, limit, answers_only=not is_whole)


def _is_off(config: Config, key: str) -> bool:
    return config.values.get(key) is not None and as_flag(config.values[key]) in OFF


def packs(config: Config) -> int | None:
    return config.whole("max_length") if config.is_on("packing") else None


def _require(config: Config) -> None:
    if not any(config.values.get(key) for key in ("dataset_name", "datasets", "dataset_mixture")):
        raise NotTrainedHere(f"{config.where} names no dataset", "add dataset_name to it")
    for key in ("reward_funcs", "reward_model_path", "num_generations", "reward_model_name_or_path"):
        if config.is_on(key):
            problem = f"{config.where} trains with rewards ({key}), which finefit does not offer"
            raise NotTrainedHere(problem, "finefit trains with sft and dpo")


def finish(config: Config, settings: Settings) -> Settings:
    if settings.get("tuning.kind") == "lora":
        return settings
    return {key: value for key, value in settings.items() if not key.startswith("tuning.") or key in _LORA_ONLY}


_NO_PARAMETERS = left("adapters on the stacked weights of experts are not asked for by name")

KEYS: dict[str, Key] = {
    **shared.TRAINING_ARGUMENTS,
    "model_name_or_path": by("model", shared.model, "a hub id or a folder"),
    "model_revision": shared.revision("model_name_or_path"),
    "trust_remote_code": left(
        "code that comes with a model is not run; `model: {kind: custom}` runs your own", matters=False
    ),
    "dtype": same("`precision` decides"),
    "torch_dtype": same("`precision` decides"),
    "model_init_kwargs": left("the model is loaded in finefit's own way"),
    "attn_implementation": same(shared.KERNELS),
    "dataset_name": by("data.train", dataset, "a hub id becomes hf://, a folder or file is a path"),
    "dataset_config": same("part of dataset_name: its files are named in the path"),
    "dataset_train_split": same("part of dataset_name"),
    "dataset_test_split": left(
        "write the rows to validate on as data.validation", matters=False, place="data.validation"
    ),
    "dataset_streaming": same(shared.LOADING),
    "datasets": by("data.train", _mixture, "a source for each"),
    "dataset_mixture": by("data.train", _mixture, "a source for each"),
    "mixture_name": same("concerns how TRL itself runs"),
    "dataset_text_field": same("`text` is recognised; another column is `fields.text`"),
    "dataset_num_proc": same(shared.LOADING),
    "dataset_kwargs": left("rows are prepared in finefit's own way"),
    "test_split_size": left("write data.validation: {share: ...}", place="data.validation.share"),
    "learning_rate": by("optimizer.lr", _rate, "2e-5; 1e-6 of `trl dpo`", default=2e-5),
    "use_peft": by("tuning.kind", _peft, "`lora`; without it `full`", default="false"),
    "lora_r": of_adapter(whole("tuning.rank")),
    "lora_alpha": of_adapter(number("tuning.alpha")),
    "lora_dropout": of_adapter(number("tuning.dropout", "0.05 by default", default=0.05)),
    "lora_target_modules": of_adapter(
        by("tuning.targets", targets, "without it query and value projections", default="peft")
    ),
    "lora_target_parameters": _NO_PARAMETERS,
    "lora_modules_to_save": left("embeddings and head are not trained in full beside an adapter"),
    "lora_task_type": same("a causal language model in both"),
    "use_rslora": of_adapter(switch("tuning.rank_stabilised", True)),
    "use_dora": of_adapter(switch("tuning.dora", True)),
    "load_in_4bit": of_adapter(by("tuning.base_bits", shared.base_bits(4), "NF4, with use_peft")),
    "load_in_8bit": of_adapter(by("tuning.base_bits", shared.base_bits(8), "8 bits, with use_peft")),
    "bnb_4bit_quant_type": same("NF4"),
    "use_bnb_nested_quant": left("NF4 with finefit's own settings", matters=False),
    "bnb_4bit_quant_storage": same("the storage of packed weights is finefit's own"),
    "max_length": by("data.max_tokens", length, "TRL cuts the end of longer rows; finefit drops them", default=1024),
    "max_seq_length": by("data.max_tokens", length, "the older name of max_length"),
    "truncation_mode": same("longer rows are dropped, whichever end TRL keeps"),
    "max_prompt_length": by("objective.kind", _to_dpo, "a key of `trl dpo`"),
    "max_completion_length": left("rows are limited as a whole"),
    "assistant_only_loss": by("data.turns", _answers, "finefit trains on answers alone", default="default"),
    "completion_only_loss": by("data.turns", _completions, "finefit trains on answers alone"),
    "packing": by("data.packing", packing, "a step has rows; where the data is here, the rows of a pack are measured"),
    "packing_strategy": same("packing changes no loss"),
    "eval_packing": same("packing changes no loss"),
    "padding_free": same("packing changes no loss"),
    "pad_to_multiple_of": same("padding changes no loss"),
    "shuffle_dataset": same("rows are shuffled in every epoch"),
    "eos_token": left("the tokenizer is used as it is"),
    "pad_token": same("padding is never trained on"),
    "chat_template_path": left(shared.TEMPLATE),
    "loss_type": by("objective", loss, "`nll` is sft, `sigmoid` is dpo; others are refused"),
    "beta": by("objective.beta", beta, "0.1 in both by default"),
    "label_smoothing": shared.LABEL_SMOOTHING,
    "precompute_ref_log_probs": by("objective.kind", _to_dpo, "the source of the reference is chosen by finefit"),
    "precompute_ref_batch_size": same(shared.PLANNED),
    "ref_model_name_or_path": left("the reference is the starting model"),
    "sync_ref_model": left("the reference stays the starting model"),
    "ref_model_mixup_alpha": left("the reference stays the starting model", matters=False),
    "ref_model_sync_steps": left("the reference stays the starting model", matters=False),
    "disable_dropout": same("only adapters have dropout, as the spec says"),
    "ld_alpha": left("log-probabilities are summed"),
    "use_weighting": left("pairs are not weighted"),
    "rpo_alpha": left("no loss on the chosen answer is added"),
    "f_divergence_type": left("the divergence is reverse KL", matters=False),
    "f_alpha_divergence_coef": left("the divergence is reverse KL", matters=False),
    "discopop_tau": left("part of another loss", matters=False),
    "loss_weights": left("there is one loss"),
    "router_aux_loss_coef": left("objective router balances experts", place="objective.balance"),
    "eval_strategy": by("validate", _evaluation, "rows to validate on are named in data.validation"),
    "ignore_bias_buffers": same("concerns how TRL itself runs"),
    "use_vllm": refused("training on sampled answers", "finefit trains with sft and dpo"),
    "project": same(shared.OWN_RUNS),
}

TRL = Tool(
    name="TRL",
    slug="trl",
    keys=KEYS,
    marks=frozenset(
        ("model_name_or_path", "dataset_name", "use_peft", "lora_r", "per_device_train_batch_size", "max_length")
    ),
    seen=_seen,
    per_step=shared.per_step("per_device_train_batch_size"),
    packs=packs,
    require=_require,
    finish=finish,
    ignored=("trackio_", "log_", "logging_", "hub_", "torch_empty_", "include_", "eval_", "ddp_", "dataloader_"),
    differences=(
        (
            "`assistant_only_loss` is false by default: TRL trains on every token of rows with messages. finefit "
            "trains on the answers alone; rows of prompt and completion are treated alike."
        ),
        (
            "TRL cuts the end of rows longer than `max_length` (1024 by default), so that an answer loses its end. "
            "finefit drops these rows, and stops if they are more than `data.drop_at_most` of a source."
        ),
        (
            "Without `use_peft: true` all weights are trained. With it and without `lora_target_modules`, peft adapts "
            "the query and value projections of most architectures alone."
        ),
        "The defaults of transformers apply: 8 rows per device, 3 epochs, a linear schedule.",
    ),
)
