"""torchtune: YAML with a `_component_` in every section."""

import re
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

_NAMES = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_MLP = ["gate_proj", "up_proj", "down_proj"]
_ATTENTION = ["q_proj", "k_proj", "v_proj", "output_proj"]
_DATASETS = {
    "alpaca_dataset": "tatsu-lab/alpaca",
    "alpaca_cleaned_dataset": "yahma/alpaca-cleaned",
    "samsum_dataset": "Samsung/samsum",
    "slimorca_dataset": "Open-Orca/SlimOrca-Dedup",
    "stack_exchange_paired_dataset": "lvwerra/stack-exchange-paired",
    "hh_rlhf_helpful_dataset": "RLHFlow/HH-RLHF-Helpful-standard",
    "cnn_dailymail_articles_dataset": "ccdv/cnn_dailymail",
    "wikitext_dataset": "EleutherAI/wikitext_document_level",
    "grammar_dataset": "liweili/c4_200m",
}
"""The rows of torchtune's named datasets."""
_TEXTS = ("text_completion_dataset", "cnn_dailymail_articles_dataset", "wikitext_dataset")
_PAIRS = ("preference_dataset", "stack_exchange_paired_dataset", "hh_rlhf_helpful_dataset")
_KNOWN_DATASET = frozenset(
    (
        *("_component_", "source", "data_files", "split", "column_map", "conversation_column", "conversation_style"),
        *("column", "packed", "train_on_input", "split_across_pack"),
    )
)
_INTERPOLATION = re.compile(r"\$\{([\w.]+)\}")


def _component(config: Config, section: str) -> str:
    return str(config.get(f"{section}._component_") or "").rpartition(".")[2]


def _model(value: Any, config: Config) -> Outcome:
    """The architecture is that of the checkpoint; its builder's name says what is trained."""
    name = _component(config, "model")
    if not name.startswith(("lora_", "qlora_", "dora_", "qdora_")):
        return translated({"tuning.kind": "full"}, "all weights are trained")
    settings: dict[str, Any] = {"tuning.kind": "lora"}
    if name.startswith(("qlora_", "qdora_")):
        settings["tuning.base_bits"] = 4
    if name.startswith(("dora_", "qdora_")):
        settings["tuning.dora"] = True
    return translated(settings)


def _of_adapter(key: Key) -> Key:
    """A key of the builders with an adapter alone."""

    def read(value: Any, config: Config) -> Outcome:
        has_adapter = "lora_" in (name := _component(config, "model")) or "dora_" in name
        return key.read(value, config) if has_adapter else equal("all weights are trained")

    return by(key.place, read, key.note, default=key.default)


def _folder(value: Any, config: Config) -> Outcome:
    return shared.model(_filled(str(value), config).rstrip("/"), config)


def _filled(text: str, config: Config) -> str:
    """Fills in `${key}`."""
    return _INTERPOLATION.sub(lambda found: str(config.get(found[1]) or found[0]), text)


def _layers(value: Any, config: Config) -> Outcome:
    names = [_NAMES.get(str(name), str(name)) for name in as_list(value)]
    names += _MLP if config.is_on("model.apply_lora_to_mlp") else []
    return translated({"tuning.targets": names}, "with those of the MLP if apply_lora_to_mlp is true")


def _dataset(value: Any, config: Config) -> Outcome:
    sections = _sections(config)
    problems: list[str] = []
    sources = [source for section in sections for source in _sources_of(section, config, problems)]
    settings: dict[str, Any] = {"data.train": sources}
    kinds = [str(section.get("_component_", "")).rpartition(".")[2] for section in sections]
    if all(kind in _TEXTS for kind in kinds):
        settings["data.template"] = "plain"
    if any(kind in _PAIRS for kind in kinds):
        settings["objective.kind"] = "dpo"
    if _trains_on_prompts(_sections(config)):
        problems.append("train_on_input: " + shared.ALL_TOKENS)
    if any(as_flag(section.get("packed")) not in OFF for section in sections):
        problems.append(_note_of_packs(config, settings))
    return dropped("; ".join(filter(None, problems)), settings=settings) if any(problems) else translated(settings)


def _note_of_packs(config: Config, settings: dict[str, Any]) -> str:
    packs = _rows(config)
    if config.packed is not None:
        settings["global_batch"] = max(1, round(config.packed.rows_of(packs)))
        return ""
    return (
        f"{packs} packs in a step: multiply global_batch by the rows of a pack, which depend on data that is not here"
    )


def _sources_of(section: Mapping[str, Any], config: Config, problems: list[str]) -> list[dict[str, Any]]:
    kind = str(section.get("_component_", "")).rpartition(".")[2]
    name = str(section.get("source") or _DATASETS.get(kind) or kind)
    files = [_filled(str(file), config) for file in as_list(section.get("data_files") or [])]
    split = str(section.get("split") or "train")
    if split != "train":
        problems.append(f"split {split}: name its files in the path")
    if kind not in _DATASETS and not kind.endswith(("instruct_dataset", "chat_dataset", *_TEXTS, *_PAIRS)):
        problems.append(f"{kind} builds its rows in Python: finefit reads the columns as they are")
    is_known = _KNOWN_DATASET.__contains__
    problems += [f"dataset.{key} is not carried over" for key in section if section[key] and not is_known(key)]
    if files and name in ("json", "csv", "parquet", "text"):
        paths = [shared.source(config, file)[0] for file in files]
    elif files:
        paths = [shared.hub_source(name, file=file) for file in files]
    else:
        paths = [shared.source(config, name)[0]]
    return [{"path": path} | _fields(section) for path in paths]


def _fields(section: Mapping[str, Any]) -> dict[str, Any]:
    columns = section.get("column_map")
    if isinstance(columns, Mapping) and {"input", "output"} <= columns.keys():
        return {"fields": {"prompt": str(columns["input"]), "answer": str(columns["output"])}}
    if section.get("conversation_column"):
        return {"fields": {"messages": str(section["conversation_column"])}}
    if section.get("column") and str(section.get("_component_", "")).endswith(_TEXTS):
        return {"fields": {"text": str(section["column"])}}
    return {}


def _rows(config: Config) -> int:
    return config.whole("batch_size", 1) * config.whole("gradient_accumulation_steps", 1) * config.devices


def _batch(value: Any, config: Config) -> Outcome:
    product = f"{config.whole('batch_size', 1)} rows x {config.whole('gradient_accumulation_steps', 1)} accumulated"
    note = f"= {product} x {config.devices} device{'s' * (config.devices > 1)}"
    return translated({"global_batch": max(1, _rows(config))}, note)


def _optimizer(value: Any, config: Config) -> Outcome:
    name = str(value).rpartition(".")[2]
    kinds = {
        "AdamW": "adamw",
        "AdamW8bit": "adamw_8bit",
        "PagedAdamW": "paged_adamw",
        "PagedAdamW8bit": "paged_adamw_8bit",
    }
    if name in kinds:
        return translated({"optimizer.kind": kinds[name]})
    return dropped(f"optimizer {name}: {shared.ADAMW_ONLY}", settings={"optimizer.kind": "adamw"})


def _decay(value: Any, config: Config) -> Outcome:
    """torch's AdamW has a weight decay of 0.01 where the config gives none."""
    return translated({"optimizer.weight_decay": as_number(value, "optimizer.weight_decay", config.where)})


def _schedule(value: Any, config: Config) -> Outcome:
    name = str(value)
    if "cosine" in name:
        return translated({"schedule.kind": "cosine"})
    if name == "none":
        return translated({"schedule.kind": "constant", "schedule.warmup": 0.0}, "without lr_scheduler it is constant")
    kind = next((kind for kind in ("linear", "constant") if kind in name), "cosine")
    return dropped(f"schedule {name}; {kind} takes its place", settings={"schedule.kind": kind})


def _warmup(value: Any, config: Config) -> Outcome:
    return translated({"schedule.warmup": round(as_number(value, "num_warmup_steps", config.where)) or 0.0})


def _steps(value: Any, config: Config) -> Outcome:
    """Steps of an epoch, of which there may be several."""
    steps = round(as_number(value, "max_steps_per_epoch", config.where))
    return translated({"schedule.steps": max(1, steps * config.whole("epochs", 1))}, "times epochs")


def _epochs(value: Any, config: Config) -> Outcome:
    if config.whole("max_steps_per_epoch") > 0:
        return equal("max_steps_per_epoch times epochs decide")
    return translated({"schedule.epochs": round(as_number(value, "epochs", config.where))})


def _loss(value: Any, config: Config) -> Outcome:
    name = str(value).rpartition(".")[2]
    if name == "DPOLoss":
        return translated({"objective.kind": "dpo"})
    if "CrossEntropy" in name or "CEWith" in name:
        return equal("the language-model loss in both")
    raise NotTrainedHere(f"{config.where} asks for the loss {name}", "finefit trains with sft and dpo")


def _precision(value: Any, config: Config) -> Outcome:
    word = str(value)
    return translated({"precision": word}) if word in ("bf16", "fp16", "fp32") else dropped(f"precision {word}")


def _device(value: Any, config: Config) -> Outcome:
    return translated({"device": str(value)}) if value in ("cpu", "cuda") else dropped(f"device {value}", matters=False)


def _tracker(value: Any, config: Config) -> Outcome:
    name = str(value).rpartition(".")[2]
    kind = {"WandBLogger": "wandb", "TensorBoardLogger": "tensorboard", "MLFlowLogger": "mlflow"}.get(name)
    if kind is None:
        return equal("every step is written to metrics.jsonl")
    project = config.get("metric_logger.project")
    return translated({"trackers": [{"kind": kind} | ({"project": str(project)} if project else {})]})


def _clip(value: Any, config: Config) -> Outcome:
    """torchtune does not clip by default."""
    if value == "none":
        return translated({"optimizer.clip": None}, "no clipping without the key")
    return shared.clip(value, config)


def _betas(value: Any, config: Config) -> Outcome:
    numbers = [as_number(one, "optimizer.betas", config.where) for one in as_list(value)]
    return translated({"optimizer.betas": numbers})


def _length(value: Any, config: Config) -> Outcome:
    count = round(as_number(value, "tokenizer.max_seq_len", config.where))
    return dropped(shared.CUT_AT_THE_END, settings={"data.max_tokens": count, "data.too_long": "drop"})


def _seed(value: Any, config: Config) -> Outcome:
    return translated({"seed": round(as_number(value, "seed", config.where))})


def _seen(row: SeenRow, config: Config) -> tuple[int, int]:
    limit = config.whole("tokenizer.max_seq_len") or row.length
    return cut_at_the_end(row, limit, answers_only=not _trains_on_prompts(_sections(config)))


def _sections(config: Config) -> list[Mapping[str, Any]]:
    value = config.get("dataset")
    return [section for section in (value if isinstance(value, list) else [value]) if isinstance(section, Mapping)]


def _trains_on_prompts(sections: list[Mapping[str, Any]]) -> bool:
    """torchtune's Alpaca datasets train on prompts unless they say otherwise."""
    return any(
        as_flag(section.get("train_on_input", "alpaca" in str(section.get("_component_")))) not in OFF
        for section in sections
    )


def _packs(config: Config) -> int | None:
    is_packed = any(as_flag(section.get("packed")) not in OFF for section in _sections(config))
    return config.whole("tokenizer.max_seq_len") or None if is_packed else None


def _require(config: Config) -> None:
    if not config.is_on("dataset"):
        raise NotTrainedHere(f"{config.where} has no dataset, so it trains nothing", "add a dataset to it")
    if any(key.startswith(("teacher_", "kd_")) for key in config.values):
        problem = f"{config.where} distils a teacher, which finefit does not offer"
        raise NotTrainedHere(problem, "finefit trains with sft and dpo")


def _finish(config: Config, settings: Settings) -> Settings:
    if settings.get("tuning.kind") == "lora":
        return settings
    return {key: value for key, value in settings.items() if not key.startswith("tuning.") or key == "tuning.kind"}


_SAVED = same("runs are written to runs/<name>-<n>, with verified checkpoints")

KEYS: dict[str, Key] = {
    "model._component_": by(
        "tuning.kind", _model, "`lora_`, `qlora_` (base_bits: 4) and `dora_` builders; others train all"
    ),
    "model.lora_attn_modules": by("tuning.targets", _layers, "output_proj is o_proj; with the MLP's if asked for"),
    "model.apply_lora_to_mlp": same("part of lora_attn_modules"),
    "model.apply_lora_to_output": left("the head carries no adapter"),
    "model.lora_rank": _of_adapter(whole("tuning.rank", "8 by default", default=8)),
    "model.lora_alpha": _of_adapter(number("tuning.alpha", "16 by default", default=16)),
    "model.lora_dropout": number("tuning.dropout"),
    "model.use_dora": switch("tuning.dora", True),
    "model.quantize_base": by("tuning.base_bits", shared.base_bits(4), "NF4"),
    "checkpointer._component_": same("weights are safetensors of the model's own names"),
    "checkpointer.checkpoint_dir": by("model", _folder, "the folder of the model"),
    "checkpointer.checkpoint_files": same("all weights of the folder are read"),
    "checkpointer.recipe_checkpoint": same("the same command resumes the run"),
    "checkpointer.adapter_checkpoint": left("write the folder of an adapter as tuning.adapter", place="tuning.adapter"),
    "checkpointer.output_dir": _SAVED,
    "checkpointer.model_type": same("the architecture is that of the model's config"),
    "tokenizer._component_": same("the tokenizer comes with the model"),
    "tokenizer.path": same("the tokenizer comes with the model"),
    "tokenizer.merges_file": same("the tokenizer comes with the model"),
    "tokenizer.max_seq_len": by(
        "data.max_tokens", _length, "torchtune cuts the end of longer rows; finefit drops them"
    ),
    "tokenizer.prompt_template": left(shared.TEMPLATE),
    "tokenizer.special_tokens_path": left("the tokenizer is used as it is"),
    "dataset": by("data.train", _dataset, "source, data_files and columns; named datasets by their hub ids"),
    "dataset_val": left("write the rows to validate on as data.validation", place="data.validation"),
    "run_val_every_n_steps": left("every save validates", matters=False, place="validate.every"),
    "batch_size": by("global_batch", _batch, shared.BATCH_NOTE, default=1),
    "gradient_accumulation_steps": by("global_batch", _batch, shared.BATCH_NOTE),
    "optimizer._component_": by("optimizer.kind", _optimizer, "forms of AdamW; others are replaced by it"),
    "optimizer.lr": number("optimizer.lr"),
    "optimizer.weight_decay": by("optimizer.weight_decay", _decay, "0.01 by default, as in torch", default=0.01),
    "optimizer.betas": by("optimizer.betas", _betas, ""),
    "optimizer.eps": number("optimizer.eps"),
    "optimizer.fused": same("the speed of the update"),
    "optimizer_in_bwd": left(
        "levers.update: inside does it, without clipping and in one micro-batch", matters=False, place="levers.update"
    ),
    "lr_scheduler._component_": by("schedule.kind", _schedule, "cosine; constant without it", default="none"),
    "lr_scheduler.num_warmup_steps": by("schedule.warmup", _warmup, ""),
    "lr_scheduler.num_cycles": left("half a cosine"),
    "loss._component_": by("objective", _loss, "cross entropy is sft, DPOLoss is dpo; others are refused"),
    "loss.beta": number("objective.beta"),
    "loss.label_smoothing": shared.LABEL_SMOOTHING,
    "loss.num_output_chunks": same(shared.PLANNED),
    "epochs": by("schedule.epochs", _epochs, "", default=1),
    "max_steps_per_epoch": by("schedule.steps", _steps, "times epochs"),
    "clip_grad_norm": by("optimizer.clip", _clip, "no clipping by default (`null`)", default="none"),
    "seed": by("seed", _seed, ""),
    "shuffle": by(
        "data.train",
        lambda value, config: (
            equal("rows are shuffled in every epoch")
            if as_flag(value) not in OFF
            else dropped("rows are shuffled in every epoch")
        ),
        "rows are always shuffled",
    ),
    "dtype": by("precision", _precision, ""),
    "device": by("device", _device, ""),
    "metric_logger._component_": by("trackers", _tracker, "wandb, tensorboard and mlflow"),
    "quantizer": refused("training with rounded weights", "finefit quantises frozen weights alone, with base_bits"),
    "fsdp_cpu_offload": left("the planner chooses what is kept in host memory", matters=False, place="levers.offload"),
    "custom_sharded_layers": same("fully_shard wraps every layer"),
    "tensor_parallel_dim": left("matrices are not divided", matters=False),
    "data_parallel_shard_dim": by("engine", shared.fully_sharded, "`fsdp2` over `--devices N`"),
    "data_parallel_replicate_dim": left("the planner chooses the engine", matters=False),
    "reference_checkpointer": left("the reference of dpo is the starting model", matters=False),
    **{
        name: same(shared.PLANNED)
        for name in ("compile", "enable_activation_checkpointing", "enable_activation_offloading")
    },
    **dict.fromkeys(
        (
            *("output_dir", "resume_from_checkpoint", "save_adapter_weights_only", "log_every_n_steps"),
            *("log_peak_memory_stats", "log_level", "enable_async_checkpointing", "epochs_to_save"),
        ),
        _SAVED,
    ),
}

TORCHTUNE = Tool(
    name="torchtune",
    slug="torchtune",
    keys=KEYS,
    marks=frozenset(("checkpointer", "metric_logger", "profiler", "log_every_n_steps")),
    seen=_seen,
    per_step=shared.per_step("batch_size"),
    packs=_packs,
    require=_require,
    finish=_finish,
    ignored=("profiler", "metric_logger.", "tokenizer.", "reference_checkpointer."),
    differences=(
        "torchtune's AdamW decays weights by 0.01 where the config gives nothing, and gradients are not clipped.",
        ("Alpaca's rows are trained on as a whole in torchtune (`train_on_input: true`); finefit trains on answers."),
        "Rows longer than `tokenizer.max_seq_len` lose their end in torchtune; finefit drops them.",
        "Named datasets become their hub ids, whose rows finefit reads in the shape that their columns show.",
    ),
)
