"""axolotl: one flat YAML file."""

import re
from collections.abc import Mapping
from typing import Any

from finefit.importers import axolotl_batches as batches
from finefit.importers import axolotl_datasets as datasets
from finefit.importers import training as shared
from finefit.importers.keys import (
    OFF,
    Config,
    Key,
    NotTrainedHere,
    Outcome,
    Settings,
    Tool,
    as_list,
    as_number,
    by,
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

_DIGITS = re.compile(r"\[([0-9])-([0-9])\]\+?")


def _adapter(value: Any, config: Config) -> Outcome:
    match str(value):
        case "lora":
            return translated({"tuning.kind": "lora"})
        case "qlora":
            return translated({"tuning.kind": "lora", "tuning.base_bits": 4})
        case "":
            return translated({"tuning.kind": "full"}, "no adapter: all weights are trained")
    raise NotTrainedHere(f"{config.where} asks for the adapter {value}", "finefit's adapters are LoRA and DoRA")


def _unfrozen(value: Any, config: Config) -> Outcome:
    if config.is_on("adapter"):
        return equal("an adapter freezes all weights of the model")
    names = [_glob(one) for pattern in as_list(value) for one in _expanded(str(pattern))]
    if any(name is None for name in names):
        raise NotTrainedHere(
            f"{config.where} trains {', '.join(map(str, as_list(value)))}, which has no form as names of modules",
            "name whole modules, as in tuning: {kind: subset, trainable: [layers.*.mlp]}",
        )
    return translated({"tuning.kind": "subset", "tuning.trainable": names}, "module names, with * for a part")


def _expanded(pattern: str) -> list[str]:
    """Writes out a range of digits: `layers.5[0-5]+` is `layers.50` to `layers.55`."""
    if "[0-9]" in pattern or (found := _DIGITS.search(pattern)) is None:
        return [pattern]
    before, after = pattern[: found.start()], pattern[found.end() :]
    return [f"{before}{digit}{after}" for digit in range(int(found[1]), int(found[2]) + 1)]


def _glob(pattern: str) -> str | None:
    """Returns the module names that a pattern of parameters means; None if only a part of a tensor is meant."""
    bare = pattern.removeprefix("^").removesuffix("$")
    bare = re.sub(r"\[0-9\]\+|\[\\d\]\+|\\d\+|\[0-9\]\*", "*", bare).replace("\\.", ".")
    bare = re.sub(r"\.\*$", "", bare).removesuffix(".weight").removesuffix(".")
    return bare if bare and re.fullmatch(r"[\w.*]+", bare) else None


def _linear(value: Any, config: Config) -> Outcome:
    if value in OFF:
        return equal("off in both")
    if config.is_on("lora_target_modules"):
        note = "all linear layers, which includes lora_target_modules"
        return translated({"tuning.targets": "all-linear"}, note)
    return translated({"tuning.targets": "all-linear"})


def _targets(value: Any, config: Config) -> Outcome:
    if value in ([], ()):
        return equal("not set")
    return equal("lora_target_linear decides") if config.is_on("lora_target_linear") else shared.layers(value, config)


def _validation_share(value: Any, config: Config) -> Outcome:
    if config.is_on("test_datasets"):
        return equal("test_datasets decide")
    return shared.held_out(
        lambda config: [one for entry in datasets.entries(config) for one in datasets.source(entry, config)[0]]
    )(value, config)


def _saves(value: Any, config: Config) -> Outcome:
    count = round(as_number(value, "saves_per_epoch", config.where))
    if config.get("save_steps") is not None:
        return equal("save_steps decides")
    if count == 1:
        return translated({"save.every": "epoch"})
    return dropped(f"{count} saves per epoch: write save.every in steps", matters=False)


def _validations(value: Any, config: Config) -> Outcome:
    count = as_number(value, "evals_per_epoch", config.where)
    if count == 0 or not (config.is_on("val_set_size") or config.is_on("test_datasets")):
        return equal("nothing is validated in both" if count else "every save validates, if rows are held out")
    if count == 1:
        return translated({"validate.every": "epoch"})
    return dropped("every save validates: write validate.every in steps for more", matters=False)


def _validation_steps(value: Any, config: Config) -> Outcome:
    if not (config.is_on("val_set_size") or config.is_on("test_datasets")):
        return equal("nothing is validated in both")
    return shared.validate_every(value, config)


def _loss(value: Any, config: Config) -> Outcome:
    if str(value) != "dpo":
        problem = f"{config.where} trains with {value}, which finefit does not offer"
        raise NotTrainedHere(problem, "finefit trains with sft and dpo; make preference pairs for dpo")
    return translated({"objective.kind": "dpo"})


def _longer(value: Any, config: Config) -> Outcome:
    match str(value):
        case "truncate":
            return dropped(shared.CUT_AT_THE_END, settings={"data.too_long": "drop"})
        case "raise":
            return translated({"data.too_long": "error"})
    return translated({"data.too_long": "drop"}, "more than data.drop_at_most (0.1) of dropped rows stops the run")


def _template(value: Any, config: Config) -> Outcome:
    if str(value) in ("tokenizer_default",):
        return equal(shared.TEMPLATE)
    return dropped(f"{shared.TEMPLATE}, not axolotl's copy {value}: compare them if the model is a base model")


def _special_tokens(value: Any, config: Config) -> Outcome:
    changed = [name for name in value if name != "pad_token"] if isinstance(value, Mapping) else []
    if changed:
        return dropped(f"the tokenizer is used as it is, {', '.join(changed)} included")
    return equal("padding is never trained on")


def _plugins(value: Any, config: Config) -> Outcome:
    lost = []
    for name in as_list(value):
        word = str(name).rpartition(".")[2]
        if "diffusion" in word.lower():
            raise NotTrainedHere(f"{config.where} trains a diffusion model", "finefit trains causal language models")
        known = ("Liger", "CutCrossEntropy", "Spectrum", "Kernels", "ExpertParallel", "Grokfast", "SwanLab", "Llm")
        if not word.startswith(known[:2]) and not word.startswith(("Kernels", "ExpertParallel")):
            lost.append(word)
    if lost:
        return dropped(f"finefit has no {', '.join(lost)}")
    return equal(shared.KERNELS)


def _tracker(kind: str) -> Key:
    def read(value: Any, config: Config) -> Outcome:
        given = {"kind": kind} | ({"project": str(value)} if isinstance(value, str) else {})
        return translated({"trackers": [given]}) if value not in OFF else equal("no tracker in both")

    return by("trackers", read, f"kind `{kind}`, with the project")


def _require(config: Config) -> None:
    if not any(config.values.get(key) for key in ("datasets", "pretraining_dataset")):
        raise NotTrainedHere(f"{config.where} names no datasets, so it trains nothing", "add datasets to it")


def _finish(config: Config, settings: Settings) -> Settings:
    """Settings of an adapter belong to a training with one; plain text has no chat template."""
    kept = dict(settings)
    if settings.get("tuning.kind") != "lora":
        kept = {key: value for key, value in kept.items() if not key.startswith("tuning.") or key in _OF_TUNINGS}
    template = datasets.template(config)
    return kept | ({"data.template": template} if template else {})


_OF_TUNINGS = ("tuning.kind", "tuning.trainable")


_SWANLAB = left("finefit has no SwanLab tracker", matters=False)
_NO_GPTQ = left("weights that are stored in GPTQ are loaded as the model's config says", matters=False)
_PARALLEL = left(
    "one row is never divided over devices, nor is a matrix: the planner chooses the engine", matters=False
)
_EXPERTS = same(shared.KERNELS)
_RL = refused("reinforcement learning with rewards", "finefit trains with sft and dpo")
_RELORA = refused("ReLoRA", "finefit trains LoRA, DoRA, or all weights")
_REWARD = refused("reward models", "finefit trains causal language models")

KEYS: dict[str, Key] = {
    "base_model": by("model", shared.model, "a hub id or a folder"),
    "revision_of_model": shared.revision("base_model"),
    "base_model_config": same("the config comes with the model"),
    "tokenizer_config": left("the tokenizer comes with the model"),
    "model_type": same("the class is that of the model's config"),
    "cls_model_config": same("the class is that of the model's config"),
    "tokenizer_type": same("the tokenizer comes with the model"),
    "processor_type": same("the processor comes with the model"),
    "tokenizer_use_fast": same("the tokenizer comes with the model"),
    "tokenizer_legacy": same("the tokenizer comes with the model"),
    "tokenizer_use_mistral_common": left("transformers' tokenizer of the model is used"),
    "trust_remote_code": left("code that comes with a model is not run; `model: {kind: custom}` runs your own file"),
    "model_config": left("the model's config is used as it is"),
    "overrides_of_model_config": left("the model's config is used as it is"),
    "overrides_of_model_kwargs": left("the model is loaded in finefit's own way"),
    "model_quantization_config": left("weights are loaded as the model's config says"),
    "model_quantization_config_kwargs": left("weights are loaded as the model's config says", matters=False),
    "adapter": by("tuning.kind", _adapter, "`lora`; `qlora` is `lora` with 4-bit weights; none is `full`", default=""),
    "lora_r": whole("tuning.rank"),
    "lora_alpha": number("tuning.alpha"),
    "lora_dropout": number("tuning.dropout"),
    "lora_target_modules": by("tuning.targets", _targets, "a pattern gives the layer names that it ends with"),
    "lora_target_linear": by("tuning.targets", _linear, "`true` is `all-linear`"),
    "lora_target_parameters": left("adapters on the stacked weights of experts are not asked for by name"),
    "lora_modules_to_save": left("embeddings and head are not trained in full beside an adapter"),
    "lora_layers_to_transform": left("adapters are on every layer"),
    "lora_model_dir": by(
        "tuning.adapter", lambda value, config: translated({"tuning.adapter": str(value)}), "training continues from it"
    ),
    "lora_fan_in_fan_out": same("peft finds it out"),
    "lora_mlp_kernel": same(shared.KERNELS),
    "lora_qkv_kernel": same(shared.KERNELS),
    "lora_o_kernel": same(shared.KERNELS),
    "peft_use_dora": switch("tuning.dora", True),
    "peft_use_rslora": switch("tuning.rank_stabilised", True),
    "peft": left("LoftQ: adapters start at zero, from weights in plain NF4"),
    "peft_init_lora_weights": left("adapters start at zero"),
    "loraplus_lr_ratio": left("both halves of an adapter have one learning rate"),
    "relora": _RELORA,
    "relora_steps": _RELORA,
    "load_in_4bit": by("tuning.base_bits", shared.base_bits(4), "NF4, with an adapter"),
    "load_in_8bit": by("tuning.base_bits", shared.base_bits(8), "8 bits, with an adapter"),
    "bnb_config_kwargs": left("NF4 with finefit's own settings", matters=False),
    "quantize_moe_experts": same("`tuning.base_bits` is for experts too"),
    "unfrozen_parameters": by("tuning", _unfrozen, "`subset`, with names of modules"),
    "gptq": _NO_GPTQ,
    "gptq_groupsize": _NO_GPTQ,
    "gptq_model_v1": _NO_GPTQ,
    "gptq_disable_exllama": _NO_GPTQ,
    "sequence_len": whole("data.max_tokens", default=512),
    "excess_length_strategy": by("data.too_long", _longer, "axolotl drops longer rows by default", default="drop"),
    "micro_batch_size": by(
        "global_batch", batches.batch, f"{shared.BATCH_NOTE}; with sample_packing a row is a pack", default=1
    ),
    "gradient_accumulation_steps": by("global_batch", batches.batch, shared.BATCH_NOTE),
    "batch_size": by("global_batch", batches.batch, "micro_batch_size x accumulation of one device"),
    "sample_packing": by(
        "data.packing",
        lambda value, config: equal("rows of a step are packed, each attends only to itself: the gradient is the same"),
        "rows of a step are packed if attention allows it; a step has rows, not packs",
    ),
    "eval_sample_packing": same("packing changes no loss"),
    "pad_to_sequence_len": same("padding changes no loss"),
    "max_packed_sequence_len": same("packing changes no loss"),
    "multipack_real_batches": same("part of sample_packing: the packs of a step"),
    "group_by_length": same("padded rows are grouped by length, packed ones are not padded"),
    "datasets": by(
        "data.train", datasets.datasets, "path, data_files, type, split and columns of each; hub ids become hf://"
    ),
    "pretraining_dataset": by("data.train", datasets.datasets, "plain text, of which every token is trained on"),
    "test_datasets": by("data.validation", datasets.tested, "the first of them"),
    "val_set_size": by("data.validation.share", _validation_share, "a share; a count becomes a share of the rows"),
    "dataset_exact_deduplication": left("`check` names rows that occur twice; they stay", matters=True),
    "shuffle_merged_datasets": same("rows are shuffled in every epoch"),
    "curriculum_sampling": left("rows are shuffled in every epoch"),
    "sample_packing_sequentially": left("rows are shuffled in every epoch"),
    "min_sample_len": left("short rows are not dropped"),
    "train_on_inputs": left(shared.ALL_TOKENS),
    "chat_template": by("data.template", _template, shared.TEMPLATE),
    "chat_template_jinja": left(shared.TEMPLATE),
    "default_system_message": left("rows are trained with the system message that they hold"),
    "special_tokens": by("", _special_tokens, "the tokenizer is used as it is"),
    "tokens": left("the tokenizer is used as it is"),
    "added_tokens_overrides": left("the tokenizer is used as it is"),
    "eot_tokens": same("the end of an answer is what the chat template writes there"),
    "resize_token_embeddings_to_32x": same("no token is added"),
    "learning_rate": number("optimizer.lr"),
    "optimizer": shared.optimizer(),
    "optim_args": left("arguments of one optimizer"),
    "weight_decay": number("optimizer.weight_decay"),
    "adam_beta1": by("optimizer.betas", shared.beta(0, "adam_beta2"), "the first of the two"),
    "adam_beta2": by("optimizer.betas", shared.beta(1, "adam_beta1"), "the second of the two"),
    "adam_epsilon": number("optimizer.eps"),
    "adam_eps": number("optimizer.eps"),
    "max_grad_norm": by("optimizer.clip", shared.clip, "0 is `null`"),
    "lr_scheduler": shared.schedule(),
    "lr_scheduler_kwargs": left("finefit's schedules have no further arguments"),
    "cosine_min_lr_ratio": left("the cosine ends at 0"),
    "cosine_constant_lr_ratio": left("the cosine falls over the whole run"),
    "eta_min": left("the cosine ends at 0"),
    "lr_quadratic_warmup": left("the warmup is linear"),
    "lr_groups": left("all weights have one learning rate"),
    "embedding_lr": left("all weights have one learning rate"),
    "num_epochs": by("schedule.epochs", shared.epochs(), "max_steps decides if both are given", default=1.0),
    "max_steps": by("schedule.steps", shared.steps, ""),
    "warmup_ratio": by("schedule.warmup", shared.warmup_ratio, "without both: 0.03, as in finefit"),
    "warmup_steps": by("schedule.warmup", shared.warmup_steps, "a number below 1 is a share"),
    "seed": shared.seed(),
    "bf16": by("precision", shared.precision("bf16"), "`auto` is `auto`"),
    "fp16": by("precision", shared.precision("fp16"), ""),
    "float16": by("precision", shared.precision("fp16"), ""),
    "bfloat16": by("precision", shared.precision("bf16"), ""),
    "torch_dtype": same("`precision` decides"),
    "tf32": same("the speed of fp32 products; finefit leaves torch's setting"),
    "fp8": left("products are computed in bf16, fp16 or fp32"),
    "fp8_enable_fsdp_float8_all_gather": left("weights are gathered in their own type", matters=False),
    "qat": left("weights are not rounded in training"),
    "saves_per_epoch": by("save.every", _saves, "1 is `epoch`"),
    "save_steps": by("save.every", shared.save_every("steps"), ""),
    "save_strategy": by("save.every", shared.save_strategy, "`epoch` is `epoch`"),
    "save_total_limit": whole("save.keep", "the best and the newest are kept besides"),
    "evals_per_epoch": by("validate.every", _validations, "1 is `epoch`; every save validates too"),
    "eval_steps": by("validate.every", _validation_steps, "every save validates too"),
    "early_stopping_patience": shared.EARLY_STOP,
    "eval_table_size": left("`evaluate` writes every answer", matters=False, place="evaluate"),
    "eval_max_new_tokens": left("`evaluate` has max_new_tokens", matters=False, place="evaluate"),
    "eval_causal_lm_metrics": left("`evaluate` has tasks such as perplexity", matters=False, place="evaluate"),
    "do_causal_lm_eval": left("`evaluate` has tasks such as perplexity", matters=False, place="evaluate"),
    "loss_watchdog_threshold": left("`on_nan` decides about losses that are not finite", matters=False, place="on_nan"),
    "loss_watchdog_patience": left("`on_nan` decides about losses that are not finite", matters=False, place="on_nan"),
    "rl": by("objective.kind", _loss, "`dpo`; every other is refused"),
    "rl_beta": number("objective.beta"),
    "dpo_beta": number("objective.beta"),
    "dpo_label_smoothing": shared.LABEL_SMOOTHING,
    "dpo_use_weighting": left("pairs are not weighted"),
    "dpo_norm_loss": left("log-probabilities are summed, not averaged"),
    "rpo_alpha": left("no loss on the chosen answer is added"),
    "trl": _RL,
    "ebft": refused("energy-based fine-tuning", "finefit trains with sft and dpo"),
    "reward_model": _REWARD,
    "process_reward_model": _REWARD,
    "num_labels": refused("classification heads", "finefit trains causal language models"),
    "center_rewards_coefficient": _REWARD,
    "diffusion": refused("diffusion models", "finefit trains causal language models"),
    "use_eaft": refused("the loss of EAFT", "finefit trains with sft and dpo"),
    "llama4_linearized_experts": refused(
        "experts that are stored as single layers, in a layout of axolotl's own",
        "name the model that they were made from",
    ),
    "use_onebitllms": refused("1-bit models", "finefit trains in fp32, bf16 or fp16"),
    "llmcompressor": left("the pruned weights of a compressed model are trained like all others"),
    "neftune_noise_alpha": shared.NEFTUNE,
    "noisy_embedding_alpha": shared.NEFTUNE,
    "label_smoothing_factor": shared.LABEL_SMOOTHING,
    "s2_attention": left("every token attends to all before it: shifted sparse attention (LongLoRA) is not offered"),
    "freeze_mm_modules": same("LoRA is on the language tower; towers are named by `tuning.targets`"),
    "reinit_weights": left("training starts from the model's weights"),
    "plugins": by("", _plugins, "Liger and cut cross entropy are chosen by the planner; others are named"),
    "deepspeed": by("engine", shared.engine, "the stage is read from the name of the file; with `--devices N`"),
    "fsdp": by("engine", shared.fully_sharded, "`fsdp2` over `--devices N`"),
    "fsdp_config": by("engine", shared.fully_sharded, "`fsdp2` over `--devices N`; every layer is wrapped"),
    "fsdp_version": same("`fsdp2` is the second version"),
    "dp_shard_size": by("engine", shared.fully_sharded, "`fsdp2` over `--devices N`"),
    "dp_replicate_size": _PARALLEL,
    "context_parallel_size": _PARALLEL,
    "context_parapllel_size": _PARALLEL,
    "tensor_parallel_size": _PARALLEL,
    "sequence_parallel_degree": _PARALLEL,
    "expert_parallel_size": _PARALLEL,
    "use_ray": left("processes are started by finefit, torchrun or SLURM", matters=False, place="launcher"),
    "ray_num_workers": left("processes are started by finefit, torchrun or SLURM", matters=False, place="launcher"),
    "device_map": same("the engine places the model"),
    "ddp": same("the engine is chosen by the planner"),
    "wandb_project": _tracker("wandb"),
    "mlflow_experiment_name": _tracker("mlflow"),
    "mlflow_tracking_uri": left("set MLFLOW_TRACKING_URI", matters=False, place="trackers"),
    "trackio_project_name": _tracker("trackio"),
    "use_tensorboard": _tracker("tensorboard"),
    "use_wandb": _tracker("wandb"),
    "use_mlflow": _tracker("mlflow"),
    "hub_model_id": left("`finefit export --push` uploads a model", matters=False),
    "push_dataset_to_hub": left("prepared rows are not uploaded", matters=False),
    "use_swanlab": _SWANLAB,
    "full_finetune": switch("tuning.kind", "full"),
    "kto_desirable_weight": left("KTO is not offered"),
    "kto_undesirable_weight": left("KTO is not offered"),
    "orpo_alpha": left("ORPO is not offered"),
    "vllm": _RL,
    **{
        name: same(shared.PLANNED)
        for name in (
            *("gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_offloading", "tiled_mlp"),
            *("torch_compile", "torch_compile_mode", "torch_compile_backend", "eval_batch_size", "low_cpu_mem_usage"),
            *("flex_attn_compile_kwargs", "chunked_cross_entropy", "chunked_cross_entropy_num_chunks"),
        )
    },
    **{
        name: same(shared.KERNELS)
        for name in (
            *("attn_implementation", "flash_attention", "xformers_attention", "sdp_attention", "flex_attention"),
            *("flash_optimum", "eager_attention", "cut_cross_entropy", "pretrain_multipack_attn"),
            *("use_kernels", "use_scattermoe", "use_sonicmoe", "experts_implementation", "fused_attn_kernel"),
            *("gemma4_hybrid_attn_impl", "use_glm_dsa_kernels"),
        )
    },
    **{
        name: same(shared.LOADING)
        for name in (
            *("dataset_prepared_path", "dataset_processes", "dataset_num_proc", "skip_prepare_dataset"),
            *("remove_unused_columns", "streaming", "streaming_multipack_buffer_size", "dataloader_num_workers"),
            *("dataloader_pin_memory", "dataloader_prefetch_factor", "total_num_tokens"),
        )
    },
    **{
        name: same("concerns how axolotl itself runs")
        for name in (
            *("output_dir", "logging_steps", "resume_from_checkpoint", "auto_resume_from_checkpoints", "strict"),
            *("debug", "test_value", "local_rank", "torchdistx_path", "hf_use_auth_token", "save_safetensors"),
            *("save_only_model", "ddp_find_unused_parameters", "ddp_timeout", "experimental_skip_move_to_device"),
            *("evaluation_strategy", "eval_strategy", "include_tokens_per_second", "profiler_steps"),
            *("accelerator_config", "nvfp4_merge_aware", "dsv4_fp4_grouped_mode", "is_llama_derived_model"),
            *("provider", "project_name", "secrets", "gpu", "gpu_count", "node_count"),
        )
    },
}

AXOLOTL = Tool(
    name="axolotl",
    slug="axolotl",
    keys=KEYS,
    marks=frozenset(
        ("base_model", "sequence_len", "micro_batch_size", "datasets", "val_set_size", "sample_packing", "lora_r")
    ),
    seen=batches.seen,
    per_step=batches.per_step,
    packs=batches.packs,
    wording=datasets.wording,
    require=_require,
    finish=_finish,
    ignored=(
        *("wandb_", "mlflow_", "trackio_", "comet_", "swanlab_", "flash_attn_", "liger_", "unsloth_", "fsdp_config."),
        *("sample_packing_", "relora_", "jagged_restart_", "expert_parallel_", "lisa_"),
    ),
    differences=(
        (
            "With `sample_packing: true` and an attention that keeps rows apart (flash, flex, xformers), a micro-batch "
            "is one pack of `micro_batch_size` x `sequence_len` tokens, so a step has as many rows as fit into its "
            "packs. finefit counts rows: where the data is at hand, `init` measures the rows of a pack."
        ),
        (
            "Rows longer than `sequence_len` are dropped by axolotl, whatever their number; finefit drops them too, "
            "but stops if they are more than `data.drop_at_most` of a source."
        ),
        "Answers alone are trained on (`train_on_inputs: false`), with the end of the turn; so does finefit.",
        (
            "Rows of `type: alpaca` have Alpaca's wording (`### Instruction:` ...) and no chat template; the spec has "
            "it as `fields` and `template: plain`. Rows without an input keep an empty `### Input:`, which axolotl "
            "leaves out."
        ),
    ),
)
