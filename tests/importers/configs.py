"""Configs, written by hand with the keys that other tools' own examples have: the tool, the text, settings that
the spec must have, and keys that must be listed as not carried over because they change what is trained."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    tool: str
    text: str
    settings: dict[str, Any]
    """By dotted key."""
    lost: tuple[str, ...] = ()
    devices: int = 1
    others: tuple[str, ...] = field(default=())
    """Settings that the spec must not have."""


AXOLOTL = """
base_model: owner/model
datasets: [{path: owner/rows, type: chat_template, field_messages: conversations}]
sequence_len: 4096
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
learning_rate: 2e-5
optimizer: adamw_torch_fused
lr_scheduler: cosine
"""
LORA = "adapter: lora\nlora_r: 16\nlora_alpha: 32\nlora_dropout: 0.05\nlora_target_linear: true\n"
FACTORY = """
model_name_or_path: owner/model
stage: sft
do_train: true
finetuning_type: lora
dataset: rows
template: llama3
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
"""
TRL = """
model_name_or_path: owner/model
dataset_name: owner/rows
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
max_length: 2048
"""
TORCHTUNE = """
output_dir: /tmp/out
model: {_component_: torchtune.models.llama3_2.lora_llama3_2_1b, lora_attn_modules: [q_proj, v_proj, output_proj],
  apply_lora_to_mlp: true, lora_rank: 64, lora_alpha: 128}
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: /tmp/m/tokenizer.model, max_seq_len: 2048}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /tmp/m}
dataset: {_component_: torchtune.datasets.chat_dataset, source: owner/rows, conversation_column: conversations}
batch_size: 4
gradient_accumulation_steps: 8
optimizer: {_component_: torch.optim.AdamW, lr: 3e-4, fused: true}
lr_scheduler: {_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 100}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
epochs: 2
dtype: bf16
"""
UNSLOTH = """
model_name: unsloth/llama-3.2-1b-unsloth-bnb-4bit
max_seq_length: 2048
r: 32
lora_alpha: 64
use_gradient_checkpointing: unsloth
random_state: 3407
dataset_name: owner/rows
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
max_steps: 60
learning_rate: 2e-4
optim: adamw_8bit
"""
V1 = """
model: owner/model
model_class: llm
train_dataset: data/rows.yaml
peft_config: {name: lora, r: 16, lora_alpha: 32, target_modules: all}
dist_config: {name: fsdp2}
micro_batch_size: 2
cutoff_len: 1024
learning_rate: 1.0e-4
max_steps: 10
"""

CASES: tuple[Case, ...] = (
    Case(
        name="axolotl-sparse",
        tool="axolotl",
        text=AXOLOTL + "s2_attention: true\n",
        settings={},
        lost=("s2_attention",),
    ),
    Case(
        name="axolotl-full",
        tool="axolotl",
        text=AXOLOTL,
        settings={
            "model.id": "owner/model",
            "tuning.kind": "full",
            "data.train.0.path": "hf://datasets/owner/rows",
            "data.train.0.fields.messages": "conversations",
            "data.max_tokens": 4096,
            "data.too_long": "drop",
            "global_batch": 8,
            "optimizer.lr": 2e-5,
            "optimizer.kind": "adamw",
            "schedule.epochs": 3,
        },
    ),
    Case(
        name="axolotl-lora",
        tool="axolotl",
        text=AXOLOTL + LORA,
        settings={"tuning.kind": "lora", "tuning.rank": 16, "tuning.alpha": 32, "tuning.targets": "all-linear"},
    ),
    Case(
        name="axolotl-qlora-needs-no-further-key",
        tool="axolotl",
        text=AXOLOTL + "adapter: qlora\nlora_r: 8\nlora_alpha: 16\nlora_target_modules: [q_proj, v_proj]\n",
        settings={"tuning.base_bits": 4, "tuning.targets": ("q_proj", "v_proj")},
    ),
    Case(
        name="axolotl-8-bits",
        tool="axolotl",
        text=AXOLOTL + LORA + "load_in_8bit: true\nload_in_4bit: false\n",
        settings={"tuning.base_bits": 8},
    ),
    Case(
        name="axolotl-ranks",
        tool="axolotl",
        text=AXOLOTL + "fsdp_version: 2\nfsdp_config: {offload_params: false, reshard_after_forward: true}\n",
        devices=4,
        settings={"global_batch": 32, "engine.kind": "fsdp2", "engine.devices": 4},
    ),
    Case(
        name="axolotl-context-parallel-ranks-share-a-row",
        tool="axolotl",
        text=AXOLOTL + "context_parallel_size: 2\n",
        devices=4,
        settings={"global_batch": 16},
    ),
    Case(
        name="axolotl-zero3",
        tool="axolotl",
        text=AXOLOTL + "deepspeed: deepspeed_configs/zero3_bf16.json\n",
        devices=2,
        settings={"engine.kind": "deepspeed", "engine.stage": 3, "engine.devices": 2},
    ),
    Case(
        name="axolotl-packs-are-not-rows",
        tool="axolotl",
        text=AXOLOTL + "sample_packing: true\npad_to_sequence_len: true\n",
        settings={"global_batch": 8},
        lost=("micro_batch_size", "gradient_accumulation_steps"),
    ),
    Case(
        name="axolotl-prompts-too",
        tool="axolotl",
        text=AXOLOTL + "train_on_inputs: true\n",
        settings={},
        lost=("train_on_inputs",),
    ),
    Case(
        name="axolotl-share-and-evals",
        tool="axolotl",
        text=AXOLOTL + "val_set_size: 0.05\nevals_per_epoch: 1\nsaves_per_epoch: 1\nsave_total_limit: 2\n",
        settings={"data.validation.share": 0.05, "validate.every": "epoch", "save.every": "epoch", "save.keep": 2},
    ),
    Case(
        name="axolotl-alpaca-has-a-wording-of-its-own",
        tool="axolotl",
        text=AXOLOTL.replace("chat_template, field_messages: conversations", "alpaca"),
        settings={
            "data.train.0.path": "hf://datasets/owner/rows",
            "data.train.0.fields.answer": "output",
            "data.template": "plain",
        },
        lost=("datasets",),
    ),
    Case(
        name="axolotl-alpaca-beside-conversations",
        tool="axolotl",
        text=AXOLOTL.replace("datasets: [", "datasets: [{path: owner/more, type: alpaca}, "),
        settings={"data.train.1.fields.messages": "conversations", "data.template": "chat"},
        lost=("datasets",),
    ),
    Case(
        name="axolotl-wording-of-the-config",
        tool="axolotl",
        text=AXOLOTL.replace(
            "type: chat_template, field_messages: conversations",
            "type: {field_instruction: ask, field_output: reply, format: '[INST] {instruction} [/INST]'}",
        ),
        settings={
            "data.train.0.fields.prompt": "[INST] {ask} [/INST]",
            "data.train.0.fields.answer": "reply",
            "data.template": "plain",
        },
    ),
    Case(
        name="axolotl-revision",
        tool="axolotl",
        text=AXOLOTL + "revision_of_model: v2\n",
        settings={"model.id": "owner/model", "model.revision": "v2"},
    ),
    Case(
        name="axolotl-a-folder-has-no-revision",
        tool="axolotl",
        text=AXOLOTL.replace("owner/model", "./model") + "revision_of_model: v2\n",
        settings={"model.kind": "folder"},
    ),
    Case(
        name="axolotl-plain-text",
        tool="axolotl",
        text=AXOLOTL.replace("chat_template, field_messages: conversations", "completion, field: chapter"),
        settings={"data.template": "plain", "data.train.0.fields.text": "chapter"},
    ),
    Case(
        name="axolotl-first-rows-of-a-split",
        tool="axolotl",
        text=AXOLOTL.replace("type: chat_template", 'split: "train[:100]", type: chat_template'),
        settings={"data.train.0.limit": 100},
        lost=("datasets",),
    ),
    Case(
        name="axolotl-layers-by-pattern",
        tool="axolotl",
        text=AXOLOTL
        + "adapter: lora\nlora_r: 8\nlora_alpha: 16\n"
        + "lora_target_modules: 'model.language_model.layers.[\\d]+.(mlp|self_attn).(up|down|gate)_proj'\n",
        settings={"tuning.targets": ("up_proj", "down_proj", "gate_proj")},
    ),
    Case(
        name="axolotl-dpo",
        tool="axolotl",
        text=AXOLOTL + "rl: dpo\nrl_beta: 0.2\n",
        settings={"objective.kind": "dpo", "objective.beta": 0.2},
    ),
    Case(
        name="axolotl-steps-win-over-epochs",
        tool="axolotl",
        text=AXOLOTL + "max_steps: 50\nwarmup_steps: 10\nadam_beta2: 0.95\nmax_grad_norm: 0.5\nweight_decay: 0.1\n",
        settings={
            "schedule.steps": 50,
            "schedule.warmup": 10,
            "optimizer.betas": (0.9, 0.95),
            "optimizer.clip": 0.5,
            "optimizer.weight_decay": 0.1,
        },
        others=("schedule.epochs",),
    ),
    Case(
        name="llama-factory-alpha-is-twice-the-rank",
        tool="llama-factory",
        text=FACTORY + "lora_rank: 8\nlora_target: all\n",
        settings={
            "tuning.rank": 8,
            "tuning.alpha": 16,
            "tuning.targets": "all-linear",
            "data.too_long": "cut_prompt",
            "global_batch": 8,
            "schedule.epochs": 3,
            "schedule.warmup": 0.1,
        },
    ),
    Case(
        name="llama-factory-defaults-of-transformers",
        tool="llama-factory",
        text="model_name_or_path: owner/model\nstage: sft\ndo_train: true\ndataset: rows\ncutoff_len: 512\n",
        settings={
            "global_batch": 8,
            "schedule.epochs": 3,
            "optimizer.lr": 5e-5,
            "schedule.kind": "linear",
            "schedule.warmup": 0.0,
            "tuning.rank": 8,
            "tuning.alpha": 16,
        },
    ),
    Case(
        name="llama-factory-last-answer",
        tool="llama-factory",
        text=FACTORY + "mask_history: true\nlora_rank: 8\nlora_alpha: 8\nuse_rslora: true\n",
        settings={"data.turns": "last", "tuning.alpha": 8, "tuning.rank_stabilised": True},
    ),
    Case(
        name="llama-factory-json-dialect",
        tool="llama-factory",
        text='{"model_name_or_path": "owner/model", "stage": "dpo", "do_train": true, "dataset": "rows", '
        '"finetuning_type": "full", "pref_beta": 0.3, "learning_rate": 5e-6, "per_device_train_batch_size": 1, '
        '"cutoff_len": 1024}',
        settings={"objective.kind": "dpo", "objective.beta": 0.3, "tuning.kind": "full", "optimizer.lr": 5e-6},
    ),
    Case(
        name="llama-factory-4-bits-and-another-optimizer",
        tool="llama-factory",
        text=FACTORY + "quantization_bit: 4\nquantization_method: bnb\nuse_galore: true\ngalore_rank: 128\n",
        settings={"tuning.base_bits": 4},
        lost=("use_galore",),
    ),
    Case(
        name="llama-factory-vision-tower-is-frozen",
        tool="llama-factory",
        text=FACTORY.replace("lora", "full").replace("llama3", "qwen3_vl_nothink") + "image_max_pixels: 262144\n",
        settings={"tuning.trainable": ("language",), "data.images.max_pixels": 262144},
    ),
    Case(
        name="llama-factory-second-version",
        tool="llama-factory-v1",
        text=V1,
        devices=2,
        settings={
            "tuning.rank": 16,
            "global_batch": 4,
            "schedule.kind": "constant",
            "optimizer.weight_decay": 0.01,
            "schedule.steps": 10,
            "engine.kind": "fsdp2",
        },
        lost=("train_dataset",),
    ),
    Case(
        name="trl-full-with-every-token",
        tool="trl",
        text=TRL,
        settings={"tuning.kind": "full", "optimizer.lr": 2e-5, "global_batch": 8, "data.too_long": "drop"},
        lost=("assistant_only_loss", "max_length"),
    ),
    Case(
        name="trl-peft-adapts-two-projections",
        tool="trl",
        text=TRL + "use_peft: true\nlora_r: 32\nassistant_only_loss: true\n",
        settings={
            "tuning.kind": "lora",
            "tuning.rank": 32,
            "tuning.dropout": 0.05,
            "tuning.targets": ("q_proj", "v_proj"),
        },
        lost=("max_length",),
    ),
    Case(
        name="trl-dpo",
        tool="trl",
        text=TRL + "beta: 0.05\nmax_prompt_length: 512\n",
        settings={"objective.kind": "dpo", "objective.beta": 0.05, "optimizer.lr": 1e-6},
    ),
    Case(
        name="torchtune-lora",
        tool="torchtune",
        text=TORCHTUNE,
        settings={
            "model.path": "/tmp/m",
            "tuning.targets": ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
            "optimizer.weight_decay": 0.01,
            "optimizer.clip": None,
            "optimizer.lr": 3e-4,
            "global_batch": 32,
            "schedule.warmup": 100,
            "data.train.0.fields.messages": "conversations",
        },
        lost=("tokenizer.max_seq_len",),
    ),
    Case(
        name="torchtune-qlora-steps",
        tool="torchtune",
        text=TORCHTUNE.replace("lora_llama", "qlora_llama") + "max_steps_per_epoch: 25\nclip_grad_norm: 1.0\n",
        settings={"tuning.base_bits": 4, "schedule.steps": 50, "optimizer.clip": 1.0},
    ),
    Case(
        name="torchtune-lora-by-default",
        tool="torchtune",
        text=TORCHTUNE.replace(", lora_rank: 64, lora_alpha: 128", ""),
        settings={"tuning.rank": 8, "tuning.alpha": 16},
    ),
    Case(
        name="torchtune-several-files",
        tool="torchtune",
        text=TORCHTUNE.replace("source: owner/rows,", "source: json, data_files: [a.jsonl, b.jsonl], filter_fn: mine,"),
        settings={"data.train.0.path": "a.jsonl", "data.train.1.path": "b.jsonl"},
        lost=("dataset",),
    ),
    Case(
        name="torchtune-a-file-of-the-hub",
        tool="torchtune",
        text=TORCHTUNE.replace("source: owner/rows,", "source: owner/rows, data_files: a.jsonl,"),
        settings={"data.train.0.path": "hf://datasets/owner/rows/a.jsonl"},
    ),
    Case(
        name="unsloth-4-bits-by-default",
        tool="unsloth",
        text=UNSLOTH,
        settings={
            "model.id": "unsloth/llama-3.2-1b",
            "tuning.base_bits": 4,
            "tuning.rank": 32,
            "global_batch": 8,
            "schedule.steps": 60,
            "seed": 3407,
            "optimizer.kind": "adamw_8bit",
        },
        lost=("train_on_responses_only", "max_seq_length"),
    ),
    Case(
        name="unsloth-all-weights",
        tool="unsloth",
        text=UNSLOTH + "full_finetuning: true\ntrain_on_responses_only: true\n",
        settings={"tuning.kind": "full"},
        lost=("max_seq_length",),
        others=("tuning.rank",),
    ),
)
