"""Fine-tuning of language models that fits your card, first time."""

import logging

__version__ = "0.1.0"

# bitsandbytes logs, when peft imports it, that optional kernels are missing, and later a line for each product in 8
# bits. Set here because every process of ours imports this first; errors still appear.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
