"""What vLLM and SGLang take as an adapter, as their documents and sources say: ranks, kinds of layers, architectures.

vLLM: `MaxLoRARanks` and the LoRA column of its supported models. SGLang: `SUPPORTED_LORA_TARGET_MODULES`, and the keys
of adapter_config.json that its LoRAConfig reads."""

from collections.abc import Mapping
from typing import Final

VLLM_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of --max-lora-rank; an adapter of any rank up to it is taken."""
_USUAL = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
_JOINED = frozenset({"qkv_proj", "gate_up_proj"})
_LATENT = frozenset({"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"})
_USUAL_IN_VLLM = """
ApertusForCausalLM ArceeForCausalLM CohereForCausalLM Cohere2ForCausalLM CwmForCausalLM Ernie4_5ForCausalLM
Exaone4ForCausalLM GemmaForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM GlmForCausalLM Glm4ForCausalLM
GraniteForCausalLM LlamaForCausalLM MistralForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM OlmoForCausalLM
Qwen2ForCausalLM Qwen3ForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM
Ernie4_5_MoeForCausalLM Glm4MoeForCausalLM GraniteMoeForCausalLM MixtralForCausalLM Qwen2MoeForCausalLM
Qwen3MoeForCausalLM
"""
VLLM_MODULES: Final[Mapping[str, frozenset[str]]] = {
    **dict.fromkeys(_USUAL_IN_VLLM.split(), _USUAL),
    **dict.fromkeys(("GlmForCausalLM", "Glm4ForCausalLM", "Phi3ForCausalLM"), _USUAL | _JOINED),
    **dict.fromkeys(("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"), _USUAL | _LATENT),
    "OPTForCausalLM": frozenset({"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"}),
    "PhiForCausalLM": frozenset({"q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"}),
    "Starcoder2ForCausalLM": frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"}),
}
"""Linear layers by architecture. Of a mixture those of its attention and its dense layers."""
_SGLANG = ("GemmaForCausalLM", "Gemma2ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM")
SGLANG_MODULES: Final[Mapping[str, frozenset[str]]] = dict.fromkeys(
    (*_SGLANG, "Qwen2ForCausalLM", "Qwen3ForCausalLM"), _USUAL | _JOINED
)


def vllm_rank(rank: int) -> int | None:
    """The least --max-lora-rank for an adapter; None: vLLM takes none of this rank."""
    return next((listed for listed in VLLM_RANKS if listed >= rank), None)
