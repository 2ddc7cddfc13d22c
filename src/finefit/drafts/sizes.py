"""Models to propose, with the numbers of their published config.json: a plan needs no more, so that sizes can be
compared on a card before anything is downloaded."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedSize:
    id: str
    """On the hub."""
    config: dict[str, Any]

    @property
    def parameters(self) -> int:
        """Matrices alone, which are all but a thousandth."""
        c = self.config
        heads, kept = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
        attention = c["hidden_size"] * (2 * heads + 2 * kept)
        layer = attention + 3 * c["hidden_size"] * c["intermediate_size"]
        ends = c["vocab_size"] * c["hidden_size"] * (1 if c["tie_word_embeddings"] else 2)
        return int(c["num_hidden_layers"] * layer + ends)


def _qwen3(size: str, hidden: int, mlp: int, layers: int, heads: int, *, tied: bool) -> ProposedSize:
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
    }
    return ProposedSize(id=f"Qwen/Qwen3-{size}", config=config)


SIZES = (
    _qwen3("0.6B", 1024, 3072, 28, 16, tied=True),
    _qwen3("1.7B", 2048, 6144, 28, 16, tied=True),
    _qwen3("4B", 2560, 9728, 36, 32, tied=True),
    _qwen3("8B", 4096, 12288, 36, 32, tied=False),
    _qwen3("14B", 5120, 17408, 40, 40, tied=False),
    _qwen3("32B", 5120, 25600, 64, 64, tied=False),
)
"""One family in all sizes, the smallest first."""
EMBEDDED = "smollm2-135m"


def size_named(name: str) -> ProposedSize | None:
    return next((size for size in SIZES if size.id.lower() == name.lower()), None)
