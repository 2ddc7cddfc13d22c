"""LLaMA-Factory: flat YAML or JSON on transformers' arguments, with datasets named in dataset_info.json."""

from collections.abc import Sequence
from typing import Any

from finefit import bounded
from finefit.errors import SpecError, first_line
from finefit.importers import llama_factory_datasets as datasets
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
    dropped,
    equal,
    left,
    number,
    refused,
    same,
    switch,
    translated,
)

_PLAIN_TEMPLATES = ("empty",)
_OWN_TEMPLATES = ("default", "alpaca", "vicuna", "fewshot", "belle", "ziya", "xverse")
_LINE_FEED = ("qwen", "gemma", "chatml", "smollm", "yi", "intern2")
"""Templates that train on the line feed after the end of an answer."""
_THINKING = ("qwen3", "qwen3_5", "qwen3_vl", "glm4_moe", "hunyuan_small", "granite4")


def stage(value: Any, config: Config) -> Outcome:
    match str(value):
        case "sft":
            return equal("objective sft is the default in both")
        case "pt":
            return translated({"data.template": "plain"}, "plain text, of which every token is trained on")
        case "dpo":
            shared.require_loss(config, "pref_loss", {"sigmoid": ""}, "dpo with the sigmoid loss")
            return translated({"objective.kind": "dpo"})
    problem = f"{config.where} asks for stage {value}, which finefit does not offer"
    raise NotTrainedHere(problem, "finefit trains with sft and dpo")


def _pref_loss(value: Any, config: Config) -> Outcome:
    if str(config.get("stage")) != "dpo":
        return equal("only stage dpo has it")
    return equal("the sigmoid loss is finefit's")


def _beta(value: Any, config: Config) -> Outcome:
    if str(config.get("stage")) != "dpo":
        return equal("only stage dpo has it")
    return translated({"objective.beta": as_number(value, "pref_beta", config.where)})


def _tuning(value: Any, config: Config) -> Outcome:
    match str(value):
        case "lora":
            return translated({"tuning.kind": "lora"})
        case "full" if _has_images(config):
            note = "the towers of images are frozen by default"
            return translated({"tuning.kind": "subset", "tuning.trainable": ["language"]}, note)
        case "full":
            return translated({"tuning.kind": "full"})
        case "freeze":
            return translated({"tuning.kind": "subset", "tuning.trainable": last_layers(config, "")})
        case "oft":
            note = "finefit has no OFT; LoRA on the same layers takes its place"
            return dropped(note, settings={"tuning.kind": "lora", "tuning.targets": "all-linear"})
    raise NotTrainedHere(f"{config.where} asks for finetuning_type {value}", "finefit has lora, full and subset")


def last_layers(config: Config, section: str) -> list[str]:
    """Names the last layers of a model whose config is here."""
    count = config.whole(f"{section}freeze_trainable_layers", 2)
    layers = _num_layers(config)
    if layers is None:
        problem = f"{config.where} trains the last {count} layers of a model whose config.json is not here"
        raise NotTrainedHere(problem, "name a local folder as the model, or write tuning.trainable by hand")
    chosen = range(layers - count, layers) if count > 0 else range(-count)
    modules = as_list(config.get(f"{section}freeze_trainable_modules") or "all")
    inside = [""] if "all" in modules else [f".{name}" for name in modules]
    return [f"layers.{at}{name}" for at in chosen for name in inside]


def _num_layers(config: Config) -> int | None:
    name = config.get("model_name_or_path") or config.get("model")
    place = config.find(f"{name}/config.json")
    if place is None:
        return None
    try:
        values = bounded.read_json(place)
    except (OSError, ValueError) as error:
        raise SpecError(f"{place} cannot be read: {first_line(error)}", "name another model") from None
    found = values.get("num_hidden_layers") if isinstance(values, dict) else None
    return found if isinstance(found, int) else None


def _alpha(value: Any, config: Config) -> Outcome:
    return translated({"tuning.alpha": as_number(value, "lora_alpha", config.where)})


def _rank(value: Any, config: Config) -> Outcome:
    """Without lora_alpha, alpha is twice the rank."""
    rank = round(as_number(value, "lora_rank", config.where))
    if config.get("lora_alpha") is not None:
        return translated({"tuning.rank": rank})
    return translated({"tuning.rank": rank, "tuning.alpha": 2 * rank}, "alpha is twice the rank by default")


def _target(value: Any, config: Config) -> Outcome:
    if config.is_on("lora_target") and config.values.get("lora_target") is None:
        return translated({"tuning.targets": "all-linear"})
    return shared.layers(value, config)


def template(value: Any, config: Config) -> Outcome:
    name = str(value)
    if name in _PLAIN_TEMPLATES:
        return translated({"data.template": "plain"})
    if name in _OWN_TEMPLATES:
        return dropped(f"{name} is a wording of LLaMA-Factory's own; {shared.TEMPLATE}")
    if name in _THINKING:
        note = "thoughts in rows stay; LLaMA-Factory writes empty thoughts into the other rows of this template"
        return translated({"data.template_options": {"enable_thinking": True}}, note)
    return dropped(f"{shared.TEMPLATE}, of which {name} is LLaMA-Factory's copy", matters=False)


def _thinking(value: Any, config: Config) -> Outcome:
    return translated({"data.template_options": {"enable_thinking": bool(as_flag(value))}})


def _too_long(value: Any, config: Config) -> Outcome:
    length = round(as_number(value, "cutoff_len", config.where))
    note = "LLaMA-Factory cuts prompt and answer of longer rows; finefit cuts prompts alone, and never an answer"
    cut = {"data.max_tokens": length, "data.too_long": "cut_prompt"}
    if str(config.get("stage")) == "dpo":
        cut["data.too_long"] = "drop"
    if str(config.get("stage")) == "pt":
        return translated({"data.max_tokens": length}, "plain text continues in the next row")
    return translated(cut, note)


def _masked(value: Any, config: Config) -> Outcome:
    return translated({"data.turns": "last"}) if as_flag(value) not in OFF else equal("all answers in both")


def _packing(value: Any, config: Config) -> Outcome:
    if as_flag(value) in OFF:
        return equal("a step has rows, not packs, in both")
    count = shared.per_step("per_device_train_batch_size")(config)
    return shared.packed_batch(count, config.whole("cutoff_len"), config)


def _limit(value: Any, config: Config) -> Outcome:
    count = round(as_number(value, "max_samples", config.where))
    return dropped(
        f"the first {count} rows of each dataset; a seeded sample of as many takes their place", matters=False
    )


def _adapter(value: Any, config: Config) -> Outcome:
    names = as_list(value)
    if str(config.get("finetuning_type")) != "lora" or len(names) != 1:
        return dropped("one adapter is continued from, and only by LoRA")
    place = config.find(str(names[0]))
    path = str(names[0]) if place is None else config.written(place)
    return translated({"tuning.adapter": path}, "training continues from it")


def _tower(name: str, default: bool) -> Key:
    def read(value: Any, config: Config) -> Outcome:
        if bool(as_flag(value)) == default:
            return equal("the default in both: LoRA is on the language tower alone, a full training see `tuning`")
        return dropped(f"name the towers in tuning: {name} is {str(value).lower()}")

    note = f"by default {'frozen' if default else 'trained'}; other towers are named in `tuning.targets` or `trainable`"
    return by("tuning", read, note)


def _pixels(place: str) -> Key:
    def read(value: Any, config: Config) -> Outcome:
        if not _has_images(config):
            return equal("there are no images")
        return translated({place: round(as_number(value, place, config.where))})

    return by(place, read, "for vision-language models")


def _has_images(config: Config) -> bool:
    """LLaMA-Factory's templates of vision-language models have it in their names."""
    name = str(config.get("template") or "").lower()
    return any(part in name for part in ("vl", "llava", "pixtral", "vision", "gemma3", "mossvl", "internvl"))


def _seen(row: SeenRow, config: Config) -> tuple[int, int]:
    """A longer row is cut turn by turn, until the limit is reached."""
    limit, prompts, answers = config.whole("cutoff_len"), 0, 0
    for prompt, answer in _with_line_feeds(row.turns) if _ends_in_line_feed(config) else row.turns:
        prompt, answer = _cut(prompt, answer, limit - prompts - answers)
        prompts, answers = prompts + prompt, answers + answer
    return prompts + answers, prompts + answers if config.is_on("train_on_prompt") else answers


def _ends_in_line_feed(config: Config) -> bool:
    return str(config.get("template") or "").lower().startswith(_LINE_FEED)


def _with_line_feeds(turns: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The line feed after an answer is the start of the next prompt in finefit."""
    return [(prompt - (at > 0), answer + 1) for at, (prompt, answer) in enumerate(turns)]


def _cut(prompt: int, answer: int, limit: int) -> tuple[int, int]:
    """Both sides are cut in proportion, but a side that has less than half of the limit keeps what it has."""
    if 2 * answer < limit:
        most = limit
    elif 2 * prompt < limit:
        most = limit - prompt
    else:
        most = limit * answer // (prompt + answer)
    answer = min(answer, most)
    return min(prompt, max(limit - answer, 0)), answer


def _packs(config: Config) -> int | None:
    return config.whole("cutoff_len") if config.is_on("packing") or config.is_on("neat_packing") else None


def _require(config: Config) -> None:
    if any(config.is_on(key) for key in ("export_dir", "infer_backend")) and not config.is_on("do_train"):
        what = "exports a model" if config.is_on("export_dir") else "runs a model"
        problem = f"{config.where} {what} and trains nothing"
        raise NotTrainedHere(problem, "`finefit export` merges and exports a run, `finefit chat` talks to it")
    if not config.is_on("do_train"):
        problem = f"{config.where} has no `do_train: true`, so it trains nothing"
        raise NotTrainedHere(problem, "`finefit eval` scores a model; for a training, add do_train: true")


_OF_LORA = ("kind",)
_OF_SUBSET = ("kind", "trainable")


def _finish(config: Config, settings: Settings) -> Settings:
    kind = settings.get("tuning.kind")
    kept = dict(settings)
    if kind != "lora":
        allowed = _OF_SUBSET if kind == "subset" else _OF_LORA
        kept = {
            key: value
            for key, value in kept.items()
            if not key.startswith("tuning.") or key.removeprefix("tuning.") in allowed
        }
    elif "tuning.adapter" in kept:
        kept.pop("tuning.targets", None)
    return kept


_GALORE = left(shared.ADAMW_ONLY)
_KT = left("experts are not computed on the CPU", matters=False)
_LOSS = refused("a loss of its own", "finefit trains with sft and dpo")
_MEDIA = left("finefit trains on text and images", matters=False)
GENERATION = left("sampling is set where answers are generated: `evaluate`, `finefit chat`", matters=False)
_MEGATRON = left("the planner chooses the engine; matrices and layers are not divided", matters=False)

KEYS: dict[str, Key] = {
    **shared.TRAINING_ARGUMENTS,
    "model_name_or_path": by("model", shared.model, "a hub id or a folder"),
    "model_revision": shared.revision("model_name_or_path"),
    "adapter_name_or_path": by("tuning.adapter", _adapter, "training continues from it"),
    "create_new_adapter": left("training continues from the adapter itself"),
    "trust_remote_code": left(
        "code that comes with a model is not run; `model: {kind: custom}` runs your own", matters=False
    ),
    "stage": by("objective", stage, "`sft`, `pt` (plain text) and `dpo`; others are refused", default="sft"),
    "pref_loss": by("objective.kind", _pref_loss, "`sigmoid`; others are refused"),
    "pref_beta": by("objective.beta", _beta, "0.1 in both by default"),
    "pref_ftx": left("no loss on the chosen answer is added"),
    "pref_bco_weight": left("no further loss is added"),
    "dpo_label_smoothing": shared.LABEL_SMOOTHING,
    "finetuning_type": by("tuning.kind", _tuning, "`freeze` is `subset`", default="lora"),
    "lora_rank": by("tuning.rank", _rank, "without lora_alpha, alpha is twice the rank", default=8),
    "lora_alpha": by("tuning.alpha", _alpha, "twice the rank by default"),
    "lora_dropout": number("tuning.dropout"),
    "lora_target": by("tuning.targets", _target, "`all` is `all-linear`", default="all"),
    "use_rslora": switch("tuning.rank_stabilised", True),
    "use_dora": switch("tuning.dora", True),
    "pissa_init": left("adapters start at zero"),
    "pissa_iter": left("adapters start at zero", matters=False),
    "pissa_convert": left("adapters start at zero", matters=False),
    "loraplus_lr_ratio": left("both halves of an adapter have one learning rate"),
    "loraplus_lr_embedding": left("both halves of an adapter have one learning rate", matters=False),
    "additional_target": left("embeddings and head are not trained in full beside an adapter"),
    "freeze_trainable_layers": same("part of `finetuning_type: freeze`"),
    "freeze_trainable_modules": same("part of `finetuning_type: freeze`"),
    "freeze_extra_modules": left("name them in tuning.trainable", place="tuning.trainable"),
    "oft_block_size": left("part of OFT"),
    "oft_rank": left("part of OFT"),
    "oft_target": left("part of OFT", matters=False),
    "module_dropout": left("part of OFT"),
    "quantization_bit": by(
        "tuning.base_bits",
        lambda value, config: shared.base_bits(4 if config.whole("quantization_bit") == 4 else 8)(value, config),
        "4 (NF4) or 8",
    ),
    "quantization_method": left("bitsandbytes quantises the frozen weights", matters=False),
    "quantization_type": same("NF4 in both"),
    "double_quantization": left("NF4 with finefit's own settings", matters=False),
    "freeze_vision_tower": _tower("freeze_vision_tower", True),
    "freeze_multi_modal_projector": _tower("freeze_multi_modal_projector", True),
    "freeze_language_model": _tower("freeze_language_model", False),
    "image_max_pixels": _pixels("data.images.max_pixels"),
    "image_min_pixels": _pixels("data.images.min_pixels"),
    "video_max_pixels": _MEDIA,
    "video_min_pixels": _MEDIA,
    "video_fps": _MEDIA,
    "video_maxlen": _MEDIA,
    "template": by("data.template", template, shared.TEMPLATE),
    "enable_thinking": by("data.template_options", _thinking, "`enable_thinking`"),
    "default_system": left("rows are trained with the system message that they hold"),
    "dataset": by("data.train", datasets.datasets, "names in dataset_info.json, with files, columns and row limits"),
    "eval_dataset": by("data.validation", datasets.tested, "the first of them"),
    "dataset_dir": same("the folder of dataset_info.json"),
    "media_dir": left("name the folder of images in data.train.images_root", place="data.train"),
    "val_size": by(
        "data.validation.share",
        shared.held_out(lambda config: datasets.sources_of(config.get("dataset"), config)[0]),
        "a share; a count becomes a share of the rows",
    ),
    "cutoff_len": by("data.max_tokens", _too_long, "with `too_long: cut_prompt`; answers are never cut", default=2048),
    "max_samples": by("data.train", _limit, "`limit` of each source"),
    "mask_history": by("data.turns", _masked, "`last`"),
    "train_on_prompt": left(shared.ALL_TOKENS),
    "packing": by("data.packing", _packing, "a step has rows; where the data is here, the rows of a pack are measured"),
    "neat_packing": by("data.packing", _packing, "packed rows attend only to themselves"),
    "mix_strategy": left("sources are concatenated; use `weight` for other shares"),
    "interleave_probs": left("sources are concatenated; use `weight` for other shares"),
    "streaming": same(shared.LOADING),
    "buffer_size": same(shared.LOADING),
    "overwrite_cache": same(shared.LOADING),
    "preprocessing_num_workers": same(shared.LOADING),
    "preprocessing_batch_size": same(shared.LOADING),
    "tokenized_path": left("prepared rows have a cache of their own", matters=False),
    "eval_on_each_dataset": left("`evaluate` scores each source of data.test", matters=False, place="evaluate"),
    "ignore_pad_token_for_loss": same("padding is never trained on"),
    "tool_format": left("the model's own chat template writes tools", matters=False),
    "pure_bf16": left("weights that are trained are kept in fp32, as bf16 loses small updates"),
    "upcast_layernorm": same("the dtype of each operation is torch's"),
    "upcast_lmhead_output": same("losses are computed in fp32"),
    "compute_accuracy": left("`evaluate` has tasks", matters=False, place="evaluate"),
    "predict_with_generate": left("`evaluate` has tasks", matters=False, place="evaluate"),
    "early_stopping_steps": shared.EARLY_STOP,
    "plot_loss": same("`finefit watch` shows the losses, and the report draws them"),
    "disable_gradient_checkpointing": same(shared.PLANNED),
    "flash_attn": same(shared.KERNELS),
    "use_unsloth": same(shared.KERNELS),
    "use_unsloth_gc": same(shared.PLANNED),
    "enable_liger_kernel": same(shared.KERNELS),
    "use_v1_kernels": same(shared.KERNELS),
    "shift_attn": left("S2 attention is not offered"),
    "rope_scaling": left("the model's config is used as it is"),
    "mixture_of_depths": refused("mixture of depths", "finefit trains the model as its config says"),
    "resize_vocab": left("the tokenizer is used as it is"),
    "add_tokens": left("the tokenizer is used as it is"),
    "add_special_tokens": left("the tokenizer is used as it is"),
    "new_special_tokens_config": left("the tokenizer is used as it is"),
    "use_galore": _GALORE,
    "use_apollo": _GALORE,
    "use_badam": _GALORE,
    "use_adam_mini": _GALORE,
    "use_muon": _GALORE,
    "use_asft_loss": _LOSS,
    "asft_alpha": _LOSS,
    "use_eaft_loss": _LOSS,
    "use_dft_loss": _LOSS,
    "use_llama_pro": left("no layers are added"),
    "fp8": left("products are computed in bf16, fp16 or fp32"),
    "fp8_backend": left("products are computed in bf16, fp16 or fp32", matters=False),
    "fp8_enable_fsdp_float8_all_gather": left("weights are gathered in their own type", matters=False),
    "use_kt": _KT,
    "tensor_model_parallel_size": _MEGATRON,
    "pipeline_model_parallel_size": _MEGATRON,
    "expert_model_parallel_size": _MEGATRON,
    "ray_num_workers": left("processes are started by finefit, torchrun or SLURM", matters=False, place="launcher"),
    "cache_dir": same("the hub's own cache is used"),
    "hf_hub_token": same("log in with `hf auth login`"),
    "print_param_status": same("the plan shows what is trained"),
    "infer_backend": GENERATION,
    "export_dir": left("`finefit export` merges and exports", matters=False),
    **dict.fromkeys(("max_new_tokens", "temperature", "top_p", "top_k", "do_sample"), GENERATION),
}

LLAMA_FACTORY = Tool(
    name="LLaMA-Factory",
    slug="llama-factory",
    keys=KEYS,
    marks=frozenset(
        (
            *("model_name_or_path", "finetuning_type", "cutoff_len", "lora_target", "dataset_dir", "stage", "do_train"),
            *("template", "infer_backend", "export_dir", "adapter_name_or_path"),
        )
    ),
    seen=_seen,
    per_step=shared.per_step("per_device_train_batch_size"),
    packs=_packs,
    require=_require,
    finish=_finish,
    ignored=(
        "galore_",
        "apollo_",
        "badam_",
        "kt_",
        "swanlab_",
        "ray_",
        "export_",
        "vllm_",
        "sglang_",
        "moe_",
        "sequence_parallel",
        "bias_activation_fusion",
        "apply_rope_fusion",
        "use_distributed_optimizer",
        "overlap_",
        "recompute_granularity",
    ),
    differences=(
        (
            "Rows longer than `cutoff_len` are cut on both sides, prompt and answer in proportion. finefit never cuts "
            "an answer: it cuts the longest message of the prompt (`too_long: cut_prompt`)."
        ),
        "Without `lora_alpha`, alpha is twice the rank.",
        (
            "A `template` is LLaMA-Factory's own copy of a chat template. finefit uses the one that comes with the "
            "model, in training and evaluation. Templates such as `qwen` and `gemma` train on the line feed after an "
            "answer too, finefit on the answer and its end."
        ),
        "`max_samples` takes the first rows of each dataset, finefit's `limit` a seeded sample of as many.",
        "The defaults of transformers apply: 8 rows per device, 3 epochs, learning rate 5e-5, a linear schedule.",
    ),
)
