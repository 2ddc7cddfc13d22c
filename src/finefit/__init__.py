"""Fine-tuning of language models that fits your card, first time."""

__version__ = "0.1.0"
