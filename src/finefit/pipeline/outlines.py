"""What a stage will leave behind, before it has run: a folder with the config and the tokenizer of its model and no weights, so that whatever stands
on it is planned as if it were there. Kept by content."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import finefit
from finefit.facts.files import finefit_cache
from finefit.facts.model import TEMPLATES
from finefit.model.locate import Outline, outline
from finefit.pipeline.wiring import wired_model
from finefit.spec.models import Lora
from finefit.spec.stages import STAGE_PATH, AnyStage, BuildMoe, ForcedRouter, Input, MergeAdapter, Pipeline, TrainStage

Done = Callable[[str], Path | None]
"""The output folder of a stage that has run, by its name."""
_TEXTS = (".json", ".jinja", ".model", ".txt")
_LEFT_OUT = ("config.json", "model.safetensors.index.json", "adapter_config.json", "trainer_state.json")
_MAKERS = ("moe.py", "alike.py", "same_tokenizer.py")
"""What decides the config and the tokenizer of a mixture, beside transformers."""


def nothing_done(_: str) -> Path | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """What the config of a mixture of experts adds to that of its base."""

    num_experts: int
    top_k: int
    shared: Literal["none", "base"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlines:
    pipeline: Pipeline
    base: Path
    """Where relative paths of the spec start; absolute."""
    done: Done = nothing_done
    known: dict[str, Path] = field(default_factory=dict)

    def at(self, name: str) -> Path:
        """The output of a stage: as it is, else its outline, else a folder that is not there."""
        if name not in self.known:
            self.known[name] = (
                self.done(name) or self._outlined(self.pipeline.stages[name]) or _root() / "to-come" / name
            )
        return self.known[name]

    def of(self, asked: Input) -> Outline:
        """Without an adapter that may lie over it."""
        return outline(wired_model(self.pipeline, asked, self.at).model, self.base)

    def is_made(self, path: str) -> bool:
        """Whether a path that names a stage leads to something already."""
        found = STAGE_PATH.fullmatch(path)
        return found is None or (self.at(found[1]) / (found[2] or "")).exists()

    def _outlined(self, stage: AnyStage) -> Path | None:
        match stage:
            case TrainStage(tuning=Lora()):
                return None  # only an adapter
            case TrainStage() | MergeAdapter():
                return _kept(self.of(stage.model), None)
            case BuildMoe():
                return _kept(self.of(stage.base), mixture_of(stage))
        return None


def mixture_of(stage: BuildMoe) -> Mixture | None:
    """None for an average, which is a model like its base. Copies that will be collapsed are counted once, as far as the spec shows them; where
    every token is sent to one expert, the others are left out."""
    if stage.merge == "average":
        return None
    if isinstance(stage.router, ForcedRouter):
        return Mixture(num_experts=1, top_k=1, shared=stage.shared)
    count = len(stage.experts) - (len(copies_in(stage)) if stage.copies == "collapse" else 0)
    top_k = {"top_k": min(stage.top_k, count), "weighted_sum": count, "top_1": 1}[stage.routing]
    return Mixture(num_experts=count, top_k=top_k, shared=stage.shared)


def copies_in(stage: BuildMoe) -> dict[str, str]:
    """Experts that the spec itself shows to be another one's copy, and whose: they name the same model."""
    first: dict[str, str] = {}
    found = {name: first.setdefault(asked.model_dump_json(), name) for name, asked in stage.experts.items()}
    return {name: other for name, other in found.items() if other != name}


def _root() -> Path:
    return finefit_cache() / "outlines"


def _kept(known: Outline, mixture: Mixture | None) -> Path:
    texts = dict(_texts(known.tokenizer)) if known.tokenizer is not None else {}
    folder = _root() / _key(known, mixture, texts)
    if not (folder / "config.json").is_file():
        _write(folder, known, mixture, texts)
    return folder


def _texts(folder: Path) -> Iterator[tuple[str, Path]]:
    """The files of a tokenizer and what goes with it, by their names in the folder."""
    for path in sorted((*folder.iterdir(), *(folder / TEMPLATES).glob("*"))):
        if path.is_file() and path.suffix in _TEXTS and path.name not in _LEFT_OUT:
            yield path.relative_to(folder).as_posix(), path


def _key(known: Outline, mixture: Mixture | None, texts: dict[str, Path]) -> str:
    """Of what an outline is made from, so that one which is kept costs no import of torch."""
    digests = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in texts.items()}
    content = [known.config, [asdict(mixture), _makers()] if mixture else None, digests]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _makers() -> list[str]:
    rooms = Path(finefit.__file__).parent / "model"
    return [version("transformers"), *(hashlib.sha256((rooms / name).read_bytes()).hexdigest() for name in _MAKERS)]


def _write(folder: Path, known: Outline, mixture: Mixture | None, texts: dict[str, Path]) -> None:
    """Under a hidden name until it is whole; another process may write the same, and either will do."""
    config = known.config
    if mixture is not None:
        from finefit.model.moe import moe_config  # torch comes with it

        config = moe_config(config, num_experts=mixture.num_experts, top_k=mixture.top_k, shared=mixture.shared)
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=folder.parent))
    try:
        for name, path in texts.items():
            (staging / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, staging / name)
        (staging / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if mixture is not None and known.tokenizer is not None:
            from finefit.model.same_tokenizer import keep_tokenizer  # torch comes with it

            keep_tokenizer(known.tokenizer, staging)
        staging.chmod(0o755)
        try:
            staging.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
