"""Whether vLLM and SGLang accept an adapter as it is, and the command that serves it. Judged by its config and the
names of its tensors; no server is needed."""

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from finefit.errors import ModelError
from finefit.facts.files import read_config, read_object, read_weight_file
from finefit.facts.servers import SGLANG_MODULES, VLLM_MODULES, VLLM_RANKS, vllm_rank
from finefit.model.resolve_model import ADAPTER_CONFIG, ADAPTER_WEIGHTS

Server = Literal["vLLM", "SGLang"]
MERGE: Final = "`finefit export --to merged` makes a model that it serves without an adapter"
_LOW_RANK = (".lora_A.", ".lora_B.")
_EMBEDDINGS = ("embed_tokens", "lm_head", "wte", "embed_out")
_NUM_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeNote:
    server: Server
    accepted: bool
    reason: str
    """Why not; where it is accepted, what is known of it."""
    command: str
    """Empty where it is not accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _AdapterFolder:
    config: Mapping[str, Any]
    tensors: tuple[str, ...]
    architecture: str

    @property
    def rank(self) -> int:
        return int(self.config.get("r") or 0)

    @property
    def modules(self) -> set[str]:
        """The last names of the layers that carry low-rank matrices."""
        before = (name.partition(mark)[0] for name in self.tensors for mark in _LOW_RANK if mark in name)
        return {name.rpartition(".")[2] for name in before}


def servable(adapter: Path, base: Path, *, name: str, named: str = "", place: Path | None = None) -> list[ServeNote]:
    """`name`: by which requests ask for the adapter. `named`: what the command calls the base, such as its id on the
    hub; by default its folder. `place`: where the adapter will lie."""
    found = _read(adapter, base)
    # `=` would end the name
    model, lora = shlex.quote(named or str(base)), shlex.quote(f"{name.replace('=', '-')}={place or adapter}")
    vllm = f"vllm serve {model} --enable-lora --max-lora-rank {vllm_rank(found.rank)} --lora-modules {lora}"
    sglang = f"python -m sglang.launch_server --model-path {model} --enable-lora --lora-paths {lora}"
    return [
        _note("vLLM", [*_in_both(found), *_in_vllm(found)], vllm, found),
        _note("SGLang", [*_in_both(found), *_in_sglang(found)], sglang, found),
    ]


def _read(adapter: Path, base: Path) -> _AdapterFolder:
    config = read_object(adapter / ADAPTER_CONFIG)
    if config.get("peft_type") != "LORA":
        problem = f"{adapter} holds an adapter of kind {config.get('peft_type')}, and servers take LoRA"
        raise ModelError(problem, "export it with --to merged")
    weights = adapter / ADAPTER_WEIGHTS
    if not weights.is_file():
        raise ModelError(f"{adapter} has no {ADAPTER_WEIGHTS}", f"name a folder with {ADAPTER_CONFIG} and its weights")
    architectures = read_config(base).get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else "unknown"
    return _AdapterFolder(config=config, tensors=tuple(read_weight_file(weights).tensors), architecture=architecture)


def _note(server: Server, hindrances: list[str], command: str, found: _AdapterFolder) -> ServeNote:
    if hindrances:
        return ServeNote(server=server, accepted=False, reason="; ".join(hindrances), command="")
    known = f"rank {found.rank} on {', '.join(sorted(found.modules))} of a {found.architecture}"
    return ServeNote(server=server, accepted=True, reason=known, command=command)


def _in_both(found: _AdapterFolder) -> Iterator[str]:
    config = found.config
    if config.get("use_dora"):
        yield "it is a DoRA adapter"
    if whole := config.get("modules_to_save"):
        yield f"it holds weights that were trained whole ({_few(map(str, whole))})"
    elif odd := [name for name in found.tensors if not _is_low_rank(name) and not _is_embedding(name)]:
        yield f"it holds tensors other than low-rank matrices ({_few(odd)})"
    if embeddings := sorted({_last_module(name) for name in found.tensors if _is_embedding(name)}):
        yield f"it adapts embeddings or the head ({_few(embeddings)})"
    if config.get("target_parameters") or any(".experts." in name for name in found.tensors):
        yield "it adapts weights of experts"
    if config.get("bias", "none") != "none":
        yield f"it holds biases ({config['bias']})"
    if patterns := [key for key in ("rank_pattern", "alpha_pattern") if config.get(key)]:
        yield f"its layers differ in {' and '.join(pattern.removesuffix('_pattern') for pattern in patterns)}"


def _in_vllm(found: _AdapterFolder) -> Iterator[str]:
    if vllm_rank(found.rank) is None:
        yield f"its rank is {found.rank}, and --max-lora-rank is at most {VLLM_RANKS[-1]}"
    yield from _unknown_modules("vLLM", found, VLLM_MODULES)


def _in_sglang(found: _AdapterFolder) -> Iterator[str]:
    if found.config.get("use_rslora"):
        yield "it is rank-stabilised, and SGLang scales by alpha / rank"
    yield from _unknown_modules("SGLang", found, SGLANG_MODULES)


def _unknown_modules(server: Server, found: _AdapterFolder, known: Mapping[str, Collection[str]]) -> Iterator[str]:
    modules = known.get(found.architecture)
    if modules is None:
        yield f"{server} is not known to take adapters on a {found.architecture}"
    elif unknown := sorted(found.modules.difference(modules, _EMBEDDINGS)):
        yield f"{server} is not known to take adapters on {_few(unknown)} of a {found.architecture}"


def _is_low_rank(tensor: str) -> bool:
    return any(mark in tensor for mark in _LOW_RANK) or "lora_magnitude_vector" in tensor


def _is_embedding(tensor: str) -> bool:
    return "lora_embedding_" in tensor or any(f".{name}." in tensor for name in _EMBEDDINGS)


def _last_module(tensor: str) -> str:
    return next((name for name in _EMBEDDINGS if f".{name}." in tensor), "embeddings")


def _few(names: Iterable[str]) -> str:
    listed = list(names)
    more = [f"and {len(listed) - _NUM_SHOWN} more"] if len(listed) > _NUM_SHOWN else []
    return ", ".join([*listed[:_NUM_SHOWN], *more])
