"""How large a model is that need not exist: counted from its config on the meta device, in a process of its own, and kept by content."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from finefit.artifacts.forecasts import ModelSize
from finefit.artifacts.records import read_record, write_record
from finefit.errors import FinefitError, ModelError, RunError
from finefit.facts.files import finefit_cache

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def size_of(config: dict[str, Any]) -> ModelSize:
    content = json.dumps([config, version("transformers")], sort_keys=True)
    place = finefit_cache() / "sizes" / f"{hashlib.sha256(content.encode()).hexdigest()[:32]}.json"
    with suppress(RunError, OSError):  # not there, written by another version, or not to be read
        return read_record(place, ModelSize)
    found = _counted(config)
    with suppress(OSError):  # a cache that cannot be written costs time and nothing else
        place.parent.mkdir(parents=True, exist_ok=True)
        write_record(place, found)
    return found


def _counted(config: dict[str, Any]) -> ModelSize:
    with tempfile.TemporaryDirectory(prefix="finefit-size-") as folder:
        asked, answered = Path(folder) / "config.json", Path(folder) / "size.json"
        asked.write_text(json.dumps(config), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "finefit.pipeline.sizes", str(asked), str(answered)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            check=False,
        )
        if answered.exists():
            return read_record(answered, ModelSize)
    reason = (done.stderr.strip().splitlines() or ["no word"])[-1]
    raise ModelError(
        f"a model of type {config.get('model_type')} cannot be counted: {reason}",
        "`finefit doctor` shows the installed versions",
    )


def count(config: dict[str, Any]) -> ModelSize:
    """Tied tensors once."""
    import torch

    from finefit.model.moe import foreign_part
    from finefit.model.sight import auto_class
    from finefit.rehearse.fake_model import read_config

    known = read_config(config)
    with torch.device("meta"):
        model = auto_class(known).from_config(known)
    sizes: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        match = _LAYER.search(name)
        sizes[match[1] if match else "outside"] += parameter.numel()
    outside = sizes.pop("outside", 0)
    return ModelSize(
        parameters=outside + sizes.total(),
        outside=outside,
        largest_layer=max(sizes.values(), default=0),
        foreign=foreign_part(name for name, _ in model.named_parameters()),
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of transformers, about a config that nobody loads
    try:
        write_record(Path(sys.argv[2]), count(json.loads(Path(sys.argv[1]).read_bytes())))
    except FinefitError as error:
        sys.exit(error.problem)
