"""The second version of LLaMA-Factory: a config with sections, and a YAML file of datasets."""

from collections.abc import Mapping
from typing import Any

from finefit.importers import training as shared
from finefit.importers.documents import read_document
from finefit.importers.keys import (
    Config,
    Key,
    NotTrainedHere,
    Outcome,
    Settings,
    Tool,
    as_number,
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
from finefit.importers.llama_factory import GENERATION, last_layers, stage, template
from finefit.importers.llama_factory import KEYS as FIRST


def _peft(value: Any, config: Config) -> Outcome:
    match str(value):
        case "lora":
            return translated({"tuning.kind": "lora"})
        case "freeze":
            names = last_layers(config, "peft_config.")
            return translated({"tuning.kind": "subset", "tuning.trainable": names}, "the last layers of the model")
    raise NotTrainedHere(f"{config.where} asks for peft_config {value}", "finefit has lora, full and subset")


def _whole_model(value: Any, config: Config) -> Outcome:
    if config.is_on("peft_config.name"):
        return equal("a language model in both")
    return translated({"tuning.kind": "full"}, "no peft_config: all weights are trained")


def _datasets(value: Any, config: Config) -> Outcome:
    place = config.find(str(value))
    if place is None:
        problem = f"{value} is not here, so its rows are not known: correct data.train"
        return dropped(problem, settings={"data.train": [{"path": str(value)}]})
    if place.suffix not in (".yaml", ".yml"):
        return translated({"data.train": [{"path": config.written(place)}]})
    sources = []
    for name, entry in read_document(place).items():
        if not isinstance(entry, Mapping) or not isinstance(entry.get("path"), str):
            raise NotTrainedHere(f"{place}: dataset {name} has no path", "correct it")
        sources.append({"path": shared.source(config, entry["path"])[0]})
    return translated({"data.train": sources}, f"the datasets of {value}")


def _batch(value: Any, config: Config) -> Outcome:
    return translated({"global_batch": _per_step(config)}, "global_batch_size, else micro_batch_size x devices")


def _per_step(config: Config) -> int:
    return max(1, config.whole("global_batch_size") or config.whole("micro_batch_size", 1) * config.devices)


def _optimizer(value: Any, config: Config) -> Outcome:
    return dropped(f"optimizer {value}: {shared.ADAMW_ONLY}")


def _longer(value: Any, config: Config) -> Outcome:
    length = round(as_number(value, "cutoff_len", config.where))
    return translated({"data.max_tokens": length, "data.too_long": "drop"}, shared.CUT_AT_THE_END)


def _engine(value: Any, config: Config) -> Outcome:
    name = str(value)
    if name == "deepspeed":
        return shared.engine(config.get("dist_config.config_file") or "", config)
    return shared.fully_sharded(name, config)


def _require(config: Config) -> None:
    if not config.is_on("train_dataset"):
        problem = f"{config.where} has no train_dataset, so it trains nothing"
        raise NotTrainedHere(problem, "`finefit export` merges and exports a run, `finefit chat` talks to it")


def _finish(config: Config, settings: Settings) -> Settings:
    if settings.get("tuning.kind") == "lora":
        return settings
    kept = ("tuning.kind", "tuning.trainable")
    return {key: value for key, value in settings.items() if not key.startswith("tuning.") or key in kept}


def _decay(value: Any, config: Config) -> Outcome:
    return translated({"optimizer.weight_decay": as_number(value, "weight_decay", config.where)})


KEYS: dict[str, Key] = {
    "model": by("model", shared.model, "a hub id or a folder"),
    "model_class": by("tuning.kind", _whole_model, "without peft_config all weights are trained", default="llm"),
    "template": by("data.template", template, shared.TEMPLATE),
    "trust_remote_code": left("code that comes with a model is not run", matters=False),
    "train_dataset": by("data.train", _datasets, "a file of rows, or a YAML file that lists them"),
    "eval_dataset": left("write it as data.validation", place="data.validation"),
    "peft_config.name": by("tuning.kind", _peft, "`freeze` is `subset`"),
    "peft_config.r": whole("tuning.rank"),
    "peft_config.lora_alpha": number("tuning.alpha"),
    "peft_config.lora_dropout": number("tuning.dropout"),
    "peft_config.target_modules": by("tuning.targets", shared.layers, "`all` is `all-linear`"),
    "peft_config.use_dora": switch("tuning.dora", True),
    "peft_config.use_rslora": switch("tuning.rank_stabilised", True),
    "peft_config.freeze_trainable_layers": same("part of `name: freeze`"),
    "peft_config.freeze_trainable_modules": same("part of `name: freeze`"),
    "peft_config.freeze_extra_modules": left("name them in tuning.trainable", place="tuning.trainable"),
    "quant_config.name": same("bitsandbytes quantises the frozen weights"),
    "quant_config.quantization_bit": FIRST["quantization_bit"],
    "kernel_config": same(shared.KERNELS),
    "init_config": same("the model is loaded by finefit"),
    "dist_config.name": by("engine", _engine, "`fsdp2` over `--devices N`"),
    "optim_config": by("optimizer.kind", _optimizer, "AdamW takes the place of others"),
    "lr_scheduler_config": left("write it as schedule", place="schedule.kind"),
    "global_batch_size": by("global_batch", _batch, "rows per step on all devices"),
    "micro_batch_size": by("global_batch", _batch, "times devices, if global_batch_size is not given", default=1),
    "cutoff_len": by("data.max_tokens", _longer, "longer rows are dropped, not cut", default=2048),
    "learning_rate": number("optimizer.lr", default=1e-4),
    "weight_decay": by("optimizer.weight_decay", _decay, "0.01, torch's own default for AdamW", default=0.01),
    "lr_scheduler": by(
        "schedule.kind",
        lambda value, config: translated({"schedule.kind": "constant"}),
        "constant without lr_scheduler_config",
        default="constant",
    ),
    "warmup": by(
        "schedule.warmup",
        lambda value, config: translated({"schedule.warmup": 0.0}),
        "none without lr_scheduler_config",
        default=0.0,
    ),
    "max_grad_norm": by("optimizer.clip", shared.clip, ""),
    "num_train_epochs": by("schedule.epochs", shared.epochs(), "max_steps decides if both are given", default=3),
    "max_steps": by("schedule.steps", shared.steps, ""),
    "bf16": by("precision", shared.precision("bf16"), ""),
    "seed": shared.seed(),
    "save_steps": by("save.every", shared.save_every("steps"), ""),
    "save_epochs": left("write save.every", matters=False, place="save.every"),
    "batching_strategy": same("padding and packing change no loss; a step has its rows"),
    "batching_workers": same(shared.LOADING),
    "cp_mode": same("part of cp_size"),
    "cp_size": left("one row is never divided over devices", matters=False),
    "flash_attn": same(shared.KERNELS),
    "enable_activation_checkpointing": same(shared.PLANNED),
    "logging_steps": same(shared.LOGGING),
    "output_dir": same(shared.OWN_RUNS),
    "resume_from_checkpoint": same("the same command resumes the run"),
    "save_ckpt_as_hf": same("weights are always safetensors of the model's own names"),
    "sample_backend": GENERATION,
    **dict.fromkeys(("max_new_tokens", "temperature", "top_p", "top_k"), GENERATION),
    "stage": by("objective", stage, "`sft` and `dpo`"),
    "pref_beta": FIRST["pref_beta"],
    "pref_loss": FIRST["pref_loss"],
}

LLAMA_FACTORY_V1 = Tool(
    name="LLaMA-Factory",
    slug="llama-factory-v1",
    keys=KEYS,
    marks=frozenset(
        ("model", "model_class", "train_dataset", "peft_config", "kernel_config", "dist_config", "sample_backend")
    ),
    seen=lambda row, config: cut_at_the_end(row, config.whole("cutoff_len"), answers_only=True),
    per_step=_per_step,
    packs=lambda config: None,
    require=_require,
    finish=_finish,
    ignored=("dist_config.", "quant_config."),
    differences=(
        "Without lr_scheduler_config the learning rate is constant, and AdamW has torch's weight decay of 0.01.",
        "The number of epochs is 3 if neither epochs nor steps are given.",
    ),
)
