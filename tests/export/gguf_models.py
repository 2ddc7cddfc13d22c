"""Tiny models that the converters to GGUF take. A tokenizer that is not sentencepiece's must be a published one, which
the converters recognise by how it splits a text: here, SmolLM2's."""

import io
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from finefit.export.outputs import Outputs, Probe
from finefit.model.resolve_model import embedded_model

_SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {},
    "qwen3 tied": {"tie_word_embeddings": True},
    "gemma3_text": {"tie_word_embeddings": True, "sliding_window": 16, "query_pre_attn_scalar": 16}
    | {"num_hidden_layers": 6},
    "mistral": {"sliding_window": None},
    "olmo2": {},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3_moe": _EXPERTS | {"norm_topk_prob": True},  # as published; llama.cpp does not read it
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {"original_max_position_embeddings": 512, "sliding_window": None},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.9, "logits_scaling": 0.1},
}
PUBLISHED = ("olmo2", "qwen2_moe", "qwen3_moe")
"""Families that the converter takes only with a published tokenizer."""
PROBE = Probe(
    prompts=(tuple(range(20, 60)), (1, 255, 260, 5, 5, 5, 90, 270, 17)),
    answers=((100, 201, 302, 14, 15, 2), (7, 8, 9)),
    max_new_tokens=8,
    stop_tokens=(2,),
)


@cache
def _sentencepiece() -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox jumps over the lazy dog", "pack my box with five dozen jugs"]),
        model_writer=model,
        model_type="bpe",
        vocab_size=320,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return model.getvalue()


def make_tiny(folder: Path, family: str, **more: Any) -> Path:
    """In bf16. The random weights are large, so that the answers depend on them; in mixtures less so, or rounding would
    choose between experts."""
    scale = 2.0 if family.endswith("_moe") else 4.0
    torch.manual_seed(0)
    vocabulary = {"vocab_size": 49152} if family in PUBLISHED else {}
    config = AutoConfig.for_model(family.split()[0], **(_SHAPE | FAMILIES[family] | vocabulary | more))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
    model.to(torch.bfloat16).save_pretrained(folder)
    if family not in PUBLISHED:
        (folder / "tokenizer.model").write_bytes(_sentencepiece())
        tokenizer = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
        return folder
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_model("smollm2-135m").folder / name, folder)
    return folder


def load(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def outputs_of(model: PreTrainedModel, probe: Probe = PROBE) -> Outputs:
    """By transformers."""
    logits, greedy = [], []
    for prompt, answer in zip(probe.prompts, probe.answers, strict=True):
        logits.append(_next(model, [*prompt, *answer[:-1]], len(answer)).numpy())
        tokens = list(prompt)
        while len(tokens) < len(prompt) + probe.max_new_tokens:
            token = int(_next(model, tokens, 1).argmax())
            if token in probe.stop_tokens:
                break
            tokens.append(token)
        greedy.append(tuple(tokens[len(prompt) :]))
    return Outputs(logits=tuple(logits), greedy=tuple(greedy))


@torch.no_grad()
def _next(model: PreTrainedModel, tokens: list[int], last: int) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0, -last:].float()
    return logits


def kl(expected: Outputs, found: Outputs) -> float:
    """Mean divergence per token, in nats."""
    pairs = zip(expected.logits, found.logits, strict=True)
    return float(np.concatenate([_kl(*map(_log_softmax, pair)) for pair in pairs]).mean())


def _kl(left: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = (np.exp(left) * (left - right)).sum(-1)
    return found


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    shifted: NDArray[np.float64] = wide - wide.max(-1, keepdims=True)
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found
