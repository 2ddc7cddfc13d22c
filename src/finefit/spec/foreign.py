"""Keys of other fine-tuning tools: finefit's place for the same setting, and the keys that identify a tool's config."""

from collections.abc import Mapping, Sequence
from typing import Any

PLACES: Mapping[str, str] = {
    "base_model": "model",
    "model_name_or_path": "model",
    "learning_rate": "optimizer.lr",
    "lr": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "adam_epsilon": "optimizer.eps",
    "max_grad_norm": "optimizer.clip",
    "optim": "optimizer.kind",
    "lora": "tuning",
    "adapter": "tuning.kind",
    "finetuning_type": "tuning.kind",
    "r": "tuning.rank",
    "lora_r": "tuning.rank",
    "lora_rank": "tuning.rank",
    "lora_alpha": "tuning.alpha",
    "lora_dropout": "tuning.dropout",
    "lora_target": "tuning.targets",
    "lora_target_modules": "tuning.targets",
    "target_modules": "tuning.targets",
    "lora_target_linear": "tuning.targets",
    "use_dora": "tuning.dora",
    "peft_use_dora": "tuning.dora",
    "use_rslora": "tuning.rank_stabilised",
    "load_in_4bit": "tuning.base_bits: 4",
    "load_in_8bit": "tuning.base_bits: 8",
    "quantization_bit": "tuning.base_bits",
    "num_train_epochs": "schedule.epochs",
    "num_epochs": "schedule.epochs",
    "epochs": "schedule.epochs",
    "max_steps": "schedule.steps",
    "max_steps_per_epoch": "schedule.steps",
    "lr_scheduler": "schedule.kind",
    "lr_scheduler_type": "schedule.kind",
    "warmup_ratio": "schedule.warmup",
    "warmup_steps": "schedule.warmup",
    "batch_size": "global_batch",
    "per_device_train_batch_size": "levers.micro_batch",
    "micro_batch_size": "levers.micro_batch",
    "gradient_accumulation_steps": "global_batch (rows per step: per-device batch x accumulation x devices)",
    "gradient_checkpointing": "levers.recompute",
    "enable_activation_checkpointing": "levers.recompute",
    "torch_compile": "levers.compile",
    "dataset": "data.train",
    "datasets": "data.train",
    "dataset_name": "data.train",
    "train_file": "data.train",
    "val_set_size": "data.validation.share",
    "val_size": "data.validation.share",
    "max_length": "data.max_tokens",
    "max_seq_length": "data.max_tokens",
    "max_seq_len": "data.max_tokens",
    "sequence_len": "data.max_tokens",
    "cutoff_len": "data.max_tokens",
    "sample_packing": "data.packing",
    "packing": "data.packing",
    "chat_template": "data.template",
    "stage": "objective",
    "beta": "objective.beta",
    "dpo_beta": "objective.beta",
    "pref_beta": "objective.beta",
    "bf16": "precision: bf16",
    "fp16": "precision: fp16",
    "dtype": "precision",
    "save_steps": "save.every",
    "save_strategy": "save.every",
    "save_total_limit": "save.keep",
    "eval_steps": "validate.every",
    "deepspeed": "engine",
    "fsdp": "engine",
    "wandb_project": "trackers",
    "report_to": "trackers",
    "output_dir": "name (runs are written to runs/<name>-<n>)",
}
"""finefit's place for the setting of a foreign key, with the value or unit if that differs."""

_TOOLS: Mapping[str, frozenset[str]] = {
    "LLaMA-Factory": frozenset(
        ("model_name_or_path", "finetuning_type", "cutoff_len", "lora_target", "dataset_dir", "stage", "do_train")
    )
    | frozenset(  # keys of its second version
        ("model_class", "template", "train_dataset", "peft_config", "kernel_config", "dist_config")
    ),
    "axolotl": frozenset(
        ("base_model", "sequence_len", "micro_batch_size", "datasets", "val_set_size", "sample_packing", "lora_r")
    ),
    "TRL": frozenset(
        ("model_name_or_path", "dataset_name", "use_peft", "lora_r", "per_device_train_batch_size", "max_length")
    ),
}
_ENOUGH = 2
"""Number of a tool's keys that identify its config: one alone may be a slip."""
_OWN = ("model", "data", "stages", "base")
_MAX_SHOWN = 8


def place_of(path: Sequence[str | int]) -> str | None:
    """Returns finefit's place for the setting of an unknown key: at the top of a spec or stage any setting, in a
    section only the section's own, so that `evaluate.0.epochs` is not referred to the schedule."""
    place = PLACES.get(str(path[-1]))
    section = [str(key) for key in path[:-1]]
    if section[:1] == ["stages"]:
        section = section[2:]
    return place if place is not None and (not section or place.startswith(f"{section[0]}.")) else None


def tool_of(values: Mapping[str, Any]) -> str | None:
    """Returns the tool whose config these values are; None for a spec, with any number of foreign keys."""
    if any(str(part.get("_component_", "")) for part in values.values() if isinstance(part, dict)):
        return "torchtune"
    if sum(key in values for key in _OWN) > 1:
        return None
    found = {tool: len(keys & values.keys()) for tool, keys in _TOOLS.items()}
    tool = max(found, key=lambda name: found[name])
    return tool if found[tool] >= _ENOUGH else None


def remedy(values: Mapping[str, Any]) -> str:
    """Returns the finefit keys of the settings in the config."""
    places = [f"{key} -> {PLACES[key]}" for key in values if key in PLACES][:_MAX_SHOWN]
    named = f" ({', '.join(places)})" if places else ""
    return f"write its settings as a spec{named}; `finefit recipes` lists specs to start from"
