"""Every record of a run directory: plain frozen data with a version, one writer, one reader."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from finefit.artifacts.atomic import write_text
from finefit.errors import FinefitError, RunError
from finefit.facts.files import FileFact
from finefit.facts.machine import Machine

STRICT = ConfigDict(extra="forbid")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a run stands on, by content. Equal inputs and an equal spec are the same run."""

    __pydantic_config__ = STRICT
    data: dict[str, tuple[tuple[FileFact, ...], ...]]
    """Files by split and source; paths relative to the run directory."""
    model: str
    """The model's name as the user knows it."""
    model_fingerprint: str
    template_sha256: str
    """Of chat template, special tokens and template kind: equal hashes render equal prompts."""
    engine_sha256: str | None = None
    """Of a DeepSpeed JSON of the user's own."""
    tasks_sha256: tuple[str | None, ...] = ()
    """Of task files of the user's own, for each evaluation; empty where there are none."""
    code_sha256: str | None = None
    """Of the file that builds a model of the user's own; None for any other model."""
    pictures_sha256: str | None = None
    """Of all images that rows show; None where there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    machine: Machine
    inputs: Inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    __pydantic_config__ = STRICT
    level: Literal["error", "warning", "note"]
    """Only an error keeps from going on."""
    problem: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What was found before the run, errors first."""

    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Levers:
    """The exact levers in force: plan and step share this one description. None of them changes the gradient."""

    __pydantic_config__ = STRICT
    micro_batch: int
    recompute: int = 0
    """Layers computed again in backward, counted from the first: those are reached last, when the kept ones are gone."""
    keep_attention: bool = False
    loss_chunk: int | None = None
    offload: bool = False
    mlp_tiles: int = 1
    adapter_inputs: Literal["bf16", "fp32"] = "fp32"
    packing: bool = False
    """Rows of a step stand behind one another without padding, each seeing only itself."""
    kernels: Literal["torch", "fused"] = "torch"
    update: Literal["after", "inside"] = "after"
    """Of each tensor when its gradient is there, which is then given back, or of all of them after backward."""
    compile: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    __pydantic_config__ = STRICT
    kind: str
    problem: str
    remedy: str
    exit_code: int

    @classmethod
    def of(cls, error: FinefitError) -> "Failure":
        return cls(kind=type(error).__name__, problem=error.problem, remedy=error.remedy, exit_code=error.exit_code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Amendment:
    """A change that a run went on with."""

    __pydantic_config__ = STRICT
    after_step: int
    changes: tuple[str, ...]
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    __pydantic_config__ = STRICT
    version: Literal[1] = 1
    name: str
    digest: str
    finefit: str
    created: str
    kind: Literal["train", "eval", "pipeline"] = "train"
    """`eval`: nothing was trained here; a model or answers made elsewhere are scored. `pipeline`: its stages are runs, or folders with an output."""
    status: Literal["prepared", "running", "finished", "stopped", "failed"]
    overrides: tuple[str, ...] = ()
    amendments: tuple[Amendment, ...] = ()
    failure: Failure | None = None


_ADAPTERS: dict[type, TypeAdapter[Any]] = {}
"""Made once for each kind of record; a view reads several of them many times a second."""


def _adapter(kind: type[R]) -> TypeAdapter[R]:
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def write_record(path: Path, record: object) -> None:
    write_text(path, _adapter(type(record)).dump_json(record, indent=1, by_alias=True).decode() + "\n")


def read_record(path: Path, kind: type[R]) -> R:
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise RunError(f"{path} is missing", "the run directory is incomplete; start again with --new") from None
    try:
        return _adapter(kind).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise RunError(f"{path} is no {kind.__name__} record of this version: {place}: {first['msg']}") from None
