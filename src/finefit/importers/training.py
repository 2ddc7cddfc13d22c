"""What several tools share: batches, schedules, optimizers, models, data sources and engines, as most of them build on
transformers' TrainingArguments."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from finefit.importers.keys import (
    OFF,
    Config,
    Key,
    NotTrainedHere,
    Outcome,
    Read,
    as_flag,
    as_list,
    as_number,
    by,
    choice,
    dropped,
    equal,
    left,
    number,
    same,
    translated,
    whole,
)

PLANNED = "the planner chooses it; it does not change the gradient"
KERNELS = "finefit chooses its kernels and attention itself; it does not change the gradient"
OWN_RUNS = "runs are written to runs/<name>-<n>"
LOGGING = "every step is written to metrics.jsonl"
LOADING = "rows are prepared and loaded by finefit's own processes"
ADAMW_ONLY = "finefit trains with AdamW, which takes its place"
TEMPLATE = "the model's own chat template is used in training and evaluation"
CUT_AT_THE_END = "the tool cuts the end of longer rows, so that their answers lose their end; finefit drops these rows"
ALL_TOKENS = "the tool trains on every token of a conversation, prompts included; finefit on its answers"

_ADAMW = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw"), "adamw"),
    **dict.fromkeys(("adamw_anyprecision", "adamw_torch_xla", "adamw_torch_npu_fused", "adam"), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit"), "adamw_8bit"),
    **dict.fromkeys(("paged_adamw_32bit", "paged_adamw"), "paged_adamw"),
    "paged_adamw_8bit": "paged_adamw_8bit",
}
_SCHEDULES = {
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
_IS_PATTERN = re.compile(r"[\\\[\](){}|*+?^$]")


def optimizer(default: str | None = None) -> Key:
    note = "every form of AdamW; another optimizer is not carried over, and AdamW takes its place"
    return choice("optimizer.kind", _ADAMW, otherwise="adamw", note=note, default=default, what="optimizer")


def schedule(default: str | None = None) -> Key:
    note = "`cosine`, `linear` and `constant`; another schedule is not carried over, and cosine takes its place"
    return choice("schedule.kind", _SCHEDULES, otherwise="cosine", note=note, default=default, what="schedule")


def batch(micro: str, accumulation: str) -> Read:
    """The rows of an optimizer step: those of a device, times accumulation, times devices."""

    def read(value: Any, config: Config) -> Outcome:
        rows, steps = config.whole(micro, 1), config.whole(accumulation, 1)
        product = f"{rows} row{'s' * (rows > 1)} x {steps} accumulated"
        product += f" x {config.devices} device{'s' * (config.devices > 1)}"
        return translated({"global_batch": max(1, rows * steps * config.devices)}, f"= {product}")

    return read


def per_step(micro: str) -> Callable[[Config], int]:
    """The same as a number."""
    return lambda config: max(
        1, config.whole(micro, 1) * config.whole("gradient_accumulation_steps", 1) * config.devices
    )


BATCH_NOTE = "rows per step: rows per device x accumulation x devices (`--devices N`; configs do not hold it)"


def packed_batch(packs: int, tokens: int, config: Config, lead: str = "") -> Outcome:
    """Rows of an optimizer step that is made of packs."""
    step = f"{lead}a step has {packs} pack{'s' * (packs > 1)} of up to {tokens} tokens"
    if config.packed is not None:
        rows = config.packed.rows_of(packs)
        return translated({"global_batch": max(1, round(rows))}, f"{step}, which hold {rows:.1f} rows")
    note = f"{step}; how many rows they hold depends on the data, which is not here: "
    return dropped(note + "multiply global_batch by the rows of a pack", settings={"global_batch": packs})


def epochs(steps: str = "max_steps") -> Read:
    def read(value: Any, config: Config) -> Outcome:
        if config.whole(steps) > 0:
            return equal(f"{steps} decides")
        count = as_number(value, "epochs", config.where)
        return translated({"schedule.epochs": int(count) if float(count).is_integer() else count})

    return read


def steps(value: Any, config: Config) -> Outcome:
    count = round(as_number(value, "max_steps", config.where))
    if count <= 0:
        return equal("epochs decide")
    return translated({"schedule.steps": count})


def warmup_ratio(value: Any, config: Config) -> Outcome:
    if config.number("warmup_steps") > 0:
        return equal("warmup_steps decides")
    return translated({"schedule.warmup": float(as_number(value, "warmup_ratio", config.where))})


def warmup_steps(value: Any, config: Config) -> Outcome:
    """transformers reads a number below 1 as a share."""
    count = as_number(value, "warmup_steps", config.where)
    if count == 0 and config.number("warmup_ratio") > 0:
        return equal("warmup_ratio decides")
    return translated({"schedule.warmup": float(count) if count < 1 else round(count)})


def clip(value: Any, config: Config) -> Outcome:
    norm = as_number(value, "max_grad_norm", config.where)
    return translated({"optimizer.clip": float(norm) if norm > 0 else None})


def beta(at: int, other: str) -> Read:
    """Both betas are one list in the spec."""

    def read(value: Any, config: Config) -> Outcome:
        own = as_number(value, "adam_beta", config.where)
        given = config.number(other, 0.999 if at == 0 else 0.9)
        return translated({"optimizer.betas": [own, given] if at == 0 else [given, own]})

    return read


def precision(kind: str) -> Read:
    def read(value: Any, config: Config) -> Outcome:
        value = as_flag(value)
        if value == "auto":
            return equal("precision: auto is bf16 on a card that has it")
        return translated({"precision": kind}) if value not in OFF else equal("off in both")

    return read


def model(value: Any, config: Config) -> Outcome:
    name = str(value)
    if (place := config.find(name)) is not None and place.is_dir():
        return translated({"model.kind": "folder", "model.path": config.written(place)})
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        return translated({"model.kind": "folder", "model.path": name}, "this folder is not here")
    return translated({"model.kind": "hub", "model.id": name})


def revision(key: str) -> Key:
    """`key`: the one that names the model."""

    def read(value: Any, config: Config) -> Outcome:
        if "model.id" not in model(config.get(key), config).settings:
            return equal("a folder has no revisions")
        return equal("main in both") if value == "main" else translated({"model.revision": str(value)})

    return by("model.revision", read, "branch, tag or commit")


def base_bits(bits: int) -> Read:
    def read(value: Any, config: Config) -> Outcome:
        return translated({"tuning.base_bits": bits}) if as_flag(value) not in OFF else equal("off in both")

    return read


def layers(value: Any, config: Config) -> Outcome:
    """Names of linear layers; a regular expression gives the names that it ends with."""
    if isinstance(value, str) and value.strip() in ("all", "all-linear"):
        return translated({"tuning.targets": "all-linear"})
    if isinstance(value, str) and _IS_PATTERN.search(value):
        names = names_of_pattern(value)
        if not names:
            note = "this pattern of layers has no plain names; all linear layers take its place"
            return dropped(note, settings={"tuning.targets": "all-linear"})
        return translated({"tuning.targets": names}, "the layer names at the end of the pattern, in every layer")
    names = [name for name in as_list(value) if name]
    if any(_IS_PATTERN.search(str(name)) for name in names):
        last = [str(name).rpartition(".")[2] for name in names]
        return dropped("a pattern in a list of layers: their last names are taken", settings={"tuning.targets": last})
    if any(name in ("all", "all-linear") for name in names):
        return translated({"tuning.targets": "all-linear"})
    return translated({"tuning.targets": [str(name) for name in names]}) if names else equal("not set")


def names_of_pattern(pattern: str) -> list[str]:
    """Returns the names that a pattern such as `layers.[0-9]+.(mlp|self_attn).(up|down)_proj` ends with."""
    last = pattern.removesuffix("$").removesuffix("\\b")
    found = re.search(r"(?:^|[.)*+])(?:\(([\w|]+)\))?(\w*)$", last.replace("\\.", "."))
    if found is None or not (found[1] or found[2]):
        return []
    return [f"{first}{found[2]}" for first in (found[1].split("|") if found[1] else [""])]


def hub_source(name: str, *, file: str | None = None, revision: str | None = None) -> str:
    at = f"@{revision}" if revision else ""
    return f"hf://datasets/{name}{at}" + (f"/{file}" if file else "")


def source(config: Config, name: str) -> tuple[str, bool]:
    """Returns the path of rows as the spec has it, and whether they are here."""
    if (place := config.find(name)) is not None:
        return config.written(place), True
    is_file = name.startswith((".", "/", "~")) or PurePosixPath(name).suffix in (".json", ".jsonl", ".csv", ".parquet")
    if name.startswith("hf://") or is_file or name.count("/") != 1:
        return name, False
    return hub_source(name), False


def held_out(sources: Callable[[Config], Sequence[Mapping[str, Any]]]) -> Read:
    """A share of the training rows, or their number."""

    def read(value: Any, config: Config) -> Outcome:
        size = as_number(value, "the number of rows to validate on", config.where)
        if size <= 0:
            return equal("no rows are held out in both")
        if size < 1:
            note = "a seeded share, with equal prompts on one side"
            return translated({"data.validation.share": float(size)}, note)
        return _share_of_count(round(size), [config.count_rows(one) for one in sources(config)])

    return read


def _share_of_count(count: int, rows: Sequence[int | None]) -> Outcome:
    known = [number for number in rows if number is not None]
    if not rows or len(known) < len(rows) or sum(known) <= count:
        note = f"{count} rows are a share of rows that are not here: correct data.validation: {{share: 0.05}}"
        return dropped(note, settings={"data.validation.share": 0.05})
    share = round(count / sum(known), 6)
    return translated({"data.validation.share": share}, f"{count} of {sum(known)} rows")


def save_every(unit: str) -> Read:
    def read(value: Any, config: Config) -> Outcome:
        count = as_number(value, "save_steps", config.where)
        if count < 1:
            return dropped(f"{value} is a share of all steps: write save.every in {unit}", matters=False)
        strategy = str(config.get("save_strategy") or "steps")
        return equal(f"save_strategy is {strategy}") if strategy != "steps" else every("save.every", round(count))

    return read


def every(place: str, count: int) -> Outcome:
    return translated({place: f"{count} step{'s' * (count != 1)}"})


def save_strategy(value: Any, config: Config) -> Outcome:
    match str(value):
        case "epoch":
            return translated({"save.every": "epoch"})
        case "steps":
            return equal("save_steps decides")
        case "best":
            return dropped("finefit saves at intervals, and always keeps the best", matters=False)
    return dropped("finefit saves at its own interval and at the end", matters=False)


def validate_every(value: Any, config: Config) -> Outcome:
    count = as_number(value, "eval_steps", config.where)
    if count < 1:
        return dropped("a share of all steps: every save validates", matters=False)
    return every("validate.every", round(count))


def trackers(value: Any, config: Config) -> Outcome:
    names = [name for name in as_list(value) if name not in ("none", "all", "")]
    known = [name for name in names if name in ("tensorboard", "wandb", "mlflow", "trackio")]
    if lost := [name for name in names if name not in known]:
        kept = {"trackers": [{"kind": name} for name in known]} if known else {}
        return dropped(f"finefit has no tracker {', '.join(lost)}", matters=False, settings=kept)
    return translated({"trackers": [{"kind": name} for name in known]}) if known else equal("no tracker in both")


def engine(value: Any, config: Config) -> Outcome:
    """DeepSpeed's stage is in the name of its file, as in zero3_bf16.json or ds_z3_config.json."""
    text = str(value).lower()
    if config.devices == 1:
        note = "with one device nothing is sharded; give --devices N for several"
        return translated({"engine.kind": "auto"}, note)
    if found := re.search(r"(?:zero|_z|stage)[_-]?([0-3])", text):
        stage = int(found[1])
        if stage < 2:
            return translated({"engine.kind": "ddp", "engine.devices": config.devices}, f"ZeRO {stage} as DDP")
        return translated({"engine.kind": "deepspeed", "engine.stage": stage, "engine.devices": config.devices})
    note = "its JSON is not read: the planner chooses the engine"
    return dropped(note, matters=False, settings={"engine.kind": "auto", "engine.devices": config.devices})


def fully_sharded(value: Any, config: Config) -> Outcome:
    if value in OFF:
        return equal("off in both")
    if config.devices == 1:
        return translated({"engine.kind": "auto"}, "with one device nothing is sharded; give --devices N for several")
    return translated({"engine.kind": "fsdp2", "engine.devices": config.devices})


def seed(default: int | None = None) -> Key:
    return whole("seed", "the order of rows and the starting adapters are finefit's own", default=default)


def require_loss(config: Config, key: str, known: Mapping[str, str], objective: str) -> None:
    """Refuses a preference loss that finefit does not have."""
    value = config.get(key)
    for name in as_list(value) if value is not None else ():
        if str(name).lower() not in known:
            problem = f"{config.where} asks for the preference loss {name}, which finefit does not offer"
            raise NotTrainedHere(problem, f"finefit's preference loss is {objective}")


NEFTUNE = left("noise on embeddings (NEFTune) is not offered")
LABEL_SMOOTHING = left("label smoothing is not offered")
EARLY_STOP = left(
    "a run goes to its end and keeps its best checkpoint; no early stop is offered", matters=False, place="save.keep"
)

TRAINING_ARGUMENTS: dict[str, Key] = {
    "per_device_train_batch_size": by(
        "global_batch", batch("per_device_train_batch_size", "gradient_accumulation_steps"), BATCH_NOTE, default=8
    ),
    "gradient_accumulation_steps": by(
        "global_batch", batch("per_device_train_batch_size", "gradient_accumulation_steps"), BATCH_NOTE
    ),
    "learning_rate": number("optimizer.lr", default=5e-5),
    "weight_decay": number("optimizer.weight_decay"),
    "adam_beta1": by("optimizer.betas", beta(0, "adam_beta2"), "the first of the two"),
    "adam_beta2": by("optimizer.betas", beta(1, "adam_beta1"), "the second of the two"),
    "adam_epsilon": number("optimizer.eps"),
    "max_grad_norm": by("optimizer.clip", clip, "0 is `null`"),
    "optim": optimizer(),
    "optim_args": left("arguments of one optimizer of transformers"),
    "lr_scheduler_type": schedule(default="linear"),
    "lr_scheduler_kwargs": left("finefit's schedules have no further arguments"),
    "num_train_epochs": by("schedule.epochs", epochs(), "max_steps above 0 decides instead", default=3.0),
    "max_steps": by("schedule.steps", steps, "-1 means that epochs decide"),
    "warmup_ratio": by("schedule.warmup", warmup_ratio, "warmup_steps decides if both are given"),
    "warmup_steps": by("schedule.warmup", warmup_steps, "finefit's own is 0.03 of all steps", default=0),
    "bf16": by("precision", precision("bf16"), "`true` is `bf16`"),
    "fp16": by("precision", precision("fp16"), "`true` is `fp16`"),
    "tf32": same("the speed of fp32 products; finefit leaves torch's setting"),
    "seed": seed(),
    "data_seed": left("finefit has one seed", matters=False, place="seed"),
    "gradient_checkpointing": same(PLANNED),
    "gradient_checkpointing_kwargs": same(PLANNED),
    "activation_offloading": same(PLANNED),
    "torch_compile": same(PLANNED + "; `levers.compile: true` compiles the layers"),
    "torch_compile_backend": same(PLANNED),
    "torch_compile_mode": same(PLANNED),
    "use_liger_kernel": same(KERNELS),
    "liger_kernel_config": same(KERNELS),
    "auto_find_batch_size": same(PLANNED),
    "group_by_length": same("padded rows are grouped by length, packed ones are not padded"),
    "train_sampling_strategy": same("padded rows are grouped by length, packed ones are not padded"),
    "neftune_noise_alpha": NEFTUNE,
    "label_smoothing_factor": LABEL_SMOOTHING,
    "save_steps": by("save.every", save_every("steps"), "if save_strategy is `steps`", default=500),
    "save_strategy": by("save.every", save_strategy, "`epoch` is `epoch`"),
    "save_total_limit": whole("save.keep", "the best and the newest are kept besides"),
    "save_only_model": same("a checkpoint always holds what a resume needs"),
    "save_safetensors": same("weights are always safetensors"),
    "save_on_each_node": same(OWN_RUNS),
    "eval_steps": by("validate.every", validate_every, "every save validates too"),
    "eval_strategy": same("every save validates, if rows are held out"),
    "evaluation_strategy": same("every save validates, if rows are held out"),
    "do_eval": same("every save validates, if rows are held out"),
    "do_train": same("`finefit run` trains"),
    "do_predict": left("write the tasks to score under `evaluate`", matters=False, place="evaluate"),
    "per_device_eval_batch_size": same(PLANNED),
    "eval_accumulation_steps": same(PLANNED),
    "load_best_model_at_end": same("the best checkpoint by validation loss is always kept"),
    "metric_for_best_model": left("the best checkpoint is that of the least validation loss", matters=False),
    "greater_is_better": left("the best checkpoint is that of the least validation loss", matters=False),
    "report_to": by("trackers", trackers, "tensorboard, wandb, mlflow and trackio"),
    "run_name": same(OWN_RUNS),
    "output_dir": same(OWN_RUNS),
    "overwrite_output_dir": same(OWN_RUNS),
    "logging_dir": same(OWN_RUNS),
    "logging_steps": same(LOGGING),
    "logging_strategy": same(LOGGING),
    "logging_first_step": same(LOGGING),
    "log_level": same(LOGGING),
    "disable_tqdm": same(LOGGING),
    "resume_from_checkpoint": same("the same command resumes the run"),
    "dataloader_num_workers": same(LOADING),
    "dataloader_pin_memory": same(LOADING),
    "dataloader_persistent_workers": same(LOADING),
    "dataloader_prefetch_factor": same(LOADING),
    "dataloader_drop_last": left("the last step of an epoch keeps its rows", matters=False),
    "remove_unused_columns": same(LOADING),
    "ddp_timeout": same("ranks that stall are noticed by finefit's own watch"),
    "ddp_find_unused_parameters": same("every trained tensor is proved to get a gradient before step 1"),
    "ddp_backend": same("finefit chooses it by the device"),
    "local_rank": same("set by the launcher"),
    "deepspeed": by("engine", engine, "the stage is read from the name of the file; with `--devices N`"),
    "fsdp": by("engine", fully_sharded, "`fsdp2` over `--devices N`"),
    "fsdp_config": same("fully_shard wraps every layer, and checkpoints are whole"),
    "fsdp_transformer_layer_cls_to_wrap": same("fully_shard wraps every layer"),
    "accelerator_config": same("losses are summed over all tokens of a step, on every device"),
    "average_tokens_across_devices": same("losses are summed over all tokens of a step, on every device"),
    "push_to_hub": left("`finefit export --push` uploads a model", matters=False),
    "hub_model_id": left("`finefit export --push` uploads a model", matters=False),
    "hub_strategy": left("`finefit export --push` uploads a model", matters=False),
    "hub_token": left("`finefit export --push` uploads a model", matters=False),
    "use_cpu": by("device", lambda value, config: translated({"device": "cpu"}) if value else equal("off in both"), ""),
    "full_determinism": by(
        "deterministic",
        lambda value, config: translated({"deterministic": True}) if value else equal("off in both"),
        "",
    ),
}
"""The arguments of transformers' trainer, with its defaults where they are not finefit's."""
