"""`python -m finefit.export.transformers_outputs FOLDER PROBE_DIR`: what plain transformers computes for an export.

A process of its own, which loads a merged model without peft and without any of finefit's model code, as a user's own
program would. With `--base` FOLDER is an adapter, which peft lays over the base.
"""

import argparse
import inspect
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    GenerationConfig,
    utils,
)

from finefit.export.outputs import Outputs, Probe, read_probe, write_outputs

MODULE = "finefit.export.transformers_outputs"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def outputs_of(model: Any, probe: Probe, *, device: str, stops: Sequence[int]) -> Outputs:
    """`stops`: what ends a greedy answer."""
    logits, greedy = [], []
    with torch.inference_mode():
        for prompt, answer in zip(probe.prompts, probe.answers, strict=True):
            logits.append(_answer_logits(model, prompt, answer, device))
            greedy.append(_greedy(model, prompt, probe.max_new_tokens, stops, device))
    return Outputs(logits=tuple(logits), greedy=tuple(greedy))


def _answer_logits(model: Any, prompt: Sequence[int], answer: Sequence[int], device: str) -> np.ndarray[Any, Any]:
    """The logits from which each token of the answer is predicted."""
    tokens = torch.tensor([[*prompt, *answer[:-1]]], device=device)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    can_keep = "logits_to_keep" in inspect.signature(base.forward).parameters
    more = {"logits_to_keep": len(answer)} if can_keep else {}
    found = model(input_ids=tokens, use_cache=False, **more).logits[0, -len(answer) :]
    return np.asarray(found.float().cpu().numpy())


def _greedy(model: Any, prompt: Sequence[int], limit: int, stops: Sequence[int], device: str) -> tuple[int, ...]:
    tokens = torch.tensor([list(prompt)], device=device)
    settings = GenerationConfig(do_sample=False, max_new_tokens=limit, eos_token_id=list(stops), pad_token_id=stops[0])
    found = model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), generation_config=settings)
    written = found[0, len(prompt) :].tolist()
    end = next((at for at, token in enumerate(written) if token in stops), len(written))
    return tuple(written[:end])


def load(folder: Path, *, device: str, dtype: str, base: Path | None, bits: int | None) -> Any:
    config = AutoConfig.from_pretrained(base or folder)
    auto = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText
    more: dict[str, Any] = {}
    if bits is not None and not hasattr(config, "quantization_config"):
        more["quantization_config"] = (
            BitsAndBytesConfig(load_in_8bit=True)
            if bits == 8
            else BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=_DTYPES[dtype],
            )
        )
    if bits is not None or device != "cpu":
        more["device_map"] = {"": device}
    model = auto.from_pretrained(base or folder, dtype=_DTYPES[dtype], **more)
    if base is not None:
        import peft

        model = peft.PeftModel.from_pretrained(model, folder)
    return model.eval()


def stops_of(model: Any, folder: Path) -> list[int]:
    """As `generate` finds them in the folder's own settings."""
    path = folder / "generation_config.json"
    found = GenerationConfig.from_pretrained(folder).eos_token_id if path.is_file() else None
    found = model.config.get_text_config().eos_token_id if found is None else found
    return [] if found is None else list(found) if isinstance(found, list | tuple) else [found]


def main() -> None:
    parser = argparse.ArgumentParser(prog=MODULE)
    parser.add_argument("folder", type=Path)
    parser.add_argument("probe_dir", type=Path)
    parser.add_argument("--base", type=Path)
    parser.add_argument("--bits", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32", choices=_DTYPES)
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    utils.logging.disable_progress_bar()
    if given.base is None:
        sys.modules["peft"] = None  # type: ignore[assignment]  # a merged model must not need it
    probe = read_probe(given.probe_dir)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load(given.folder, device=given.device, dtype=given.dtype, base=given.base, bits=given.bits)
        stops = stops_of(model, given.folder) or list(probe.stop_tokens)
        write_outputs(given.probe_dir, outputs_of(model, probe, device=given.device, stops=stops))


if __name__ == "__main__":
    main()
