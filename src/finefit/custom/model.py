"""Custom models: one Python file of the user's with a function that builds a module from a config.

docs/custom.md describes what that module provides. It is built on the meta device, where tensors have shapes but no
values, for plans and for making inputs, and on the CPU with the run's seed for training and answers. Errors in the file
are reported with its name and line.
"""

import hashlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from finefit import bounded
from finefit.artifacts.forecasts import LoadProof
from finefit.artifacts.records import Levers
from finefit.errors import FinefitError, ModelError, SpecError, is_out_of_memory
from finefit.facts.files import WEIGHTS, first_words, read_weight_file, reading_model
from finefit.model.adapter import load_adapter, require_fitting_adapter
from finefit.model.family import FAMILY, Watch, family_of, match_targets
from finefit.model.load import adapter_to_load, device_here, make_trainable
from finefit.model.resolve_model import CustomSource, custom_source, weight_files
from finefit.model.saved_weights import FrozenWeights
from finefit.objective.batch import Batch, CustomRow, Forward, Objective
from finefit.objective.losses import custom_loss
from finefit.spec.models import CustomModel, Lora, Tower, Tuning
from finefit.vision import is_inside

Inputs = dict[str, Tensor]
"""What the model gets from a batch, under the model's own names."""
T = TypeVar("T")
_FIX = "fix the file; docs/custom.md describes what it must hold"
_NO_VALUES = (
    "a rehearsal has shapes but no values: in build, and in loss while the model trains, read no tensor on the host "
    "(`.item()`, `if tensor`, boolean masks, `nonzero`); compute such values in inputs"
)
_NO_GPU = "build and inputs run without a GPU: leave the device to torch, and finefit moves what has to be moved"
_LANGUAGE_MODEL_LEVERS = ("keep_attention", "loss_chunk", "offload", "mlp_tiles", "packing", "kernels", "compile")
"""Levers that act on parts of a language model, which another model need not have."""


@dataclass(frozen=True, slots=True)
class CustomFamily:
    """A `ModelFamily` for a module that a user's file built, from what the module says about itself."""

    module: nn.Module
    source: CustomSource
    peft_task: ClassVar[None] = None

    @property
    def name(self) -> str:
        return self.source.file.name

    @property
    def adaptable(self) -> tuple[str, ...]:
        return tuple(self.module.adaptable)  # type: ignore[arg-type]

    @property
    def towers(self) -> Mapping[Tower, tuple[str, ...]]:
        return getattr(self.module, "towers", None) or {}

    @property
    def image_text(self) -> str:
        return getattr(self.module, "image_text", None) or ""

    @property
    def views(self) -> int | None:
        return getattr(self.module, "views", None)

    @property
    def has_vision(self) -> bool:
        return self.views is not None or getattr(self.module, "image_text", None) is not None

    @property
    def generates(self) -> bool:
        return callable(getattr(self.module, "generate", None))

    def layers(self) -> list[nn.Module]:
        return [self.module.get_submodule(name) for name in getattr(self.module, "layers", None) or ()]

    def refused_levers(self, levers: Levers) -> list[str]:
        default = Levers(micro_batch=levers.micro_batch)
        values = {name: getattr(levers, name) for name in _LANGUAGE_MODEL_LEVERS}
        return [f"levers.{name} {value}" for name, value in values.items() if value != getattr(default, name)]

    def adapter_layers(self, tuning: Lora) -> set[str]:
        if not self.adaptable:
            problem = f"{self.name} names no layer as adaptable, so none can carry an adapter"
            raise ModelError(problem, "train it in full: `tuning: {kind: full}`")
        nothing, known = f"none of the layers that {self.name} calls adaptable", "their names end in"
        if not isinstance(tuning.targets, dict):
            return match_targets(set(self.adaptable), tuning.targets, "tuning.targets", nothing, known)
        chosen: set[str] = set()
        for tower, targets in tuning.targets.items():
            prefixes = self.towers.get(tower)
            if prefixes is None:
                there = ", ".join(self.towers) or "no towers"
                problem = f"tuning.targets names the tower {tower}; {self.name} has {there}"
                raise ModelError(problem, "name layers instead of towers, or `towers` in it")
            inside = {name for name in self.adaptable if is_inside(name, tuple(prefixes))}
            chosen |= match_targets(inside, targets, f"tuning.targets.{tower}", nothing, known)
        return chosen

    def inputs(self, rows: Sequence[CustomRow]) -> Inputs:
        found: Inputs = self._called("inputs", rows)
        named = found.items() if isinstance(found, dict) else ()
        if not named or not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in named):
            raise self.fault(f"has an inputs that returned {_brief(found)}; return a dict of tensors by name")
        for name, value in found.items():
            if value.device.type != "cpu":
                where = f"is on {value.device}: make it on the CPU, without a GPU; finefit moves it"
                raise self.fault(f"has an inputs whose {name} {where}")
            if value.requires_grad:
                why = "a twin without weights makes it, so it is not trained"
                raise self.fault(f"has an inputs whose {name} requires a gradient: {why}")
        return found

    def count(self, inputs: Inputs) -> int:
        count = self._called("count", inputs)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            wanted = "return a whole number of at least 1, not a tensor"
            raise self.fault(f"has a count that returned {_brief(count)} for a batch of rows; {wanted}")
        return count

    def loss(self, inputs: Inputs) -> Tensor:
        """The sum only. Errors are not translated, because the caller knows which of them mean a lack of memory."""
        given = self.module.loss(inputs)  # type: ignore[operator]
        if isinstance(given, Mapping):
            total = given.get("loss")
        elif isinstance(given, tuple | list):
            total = given[0] if given else None
        else:
            total = given if isinstance(given, Tensor) else getattr(given, "loss", None)
        if not isinstance(total, Tensor):
            wanted = "return a tensor, a tuple that begins with it, or a mapping with `loss`"
            raise self.fault(f"has a loss that returned {_brief(given)}; {wanted}")
        if total.ndim or not total.is_floating_point():
            wanted = "return a scalar: the sum over what count counts"
            raise self.fault(f"has a loss of shape {tuple(total.shape)} in {total.dtype}; {wanted}")
        return total

    def own_forward(self, autocast: AbstractContextManager[Any] | None, watch: Watch) -> Forward:
        """Returns the sum of the model's loss, a scalar, and nothing else that the model returns."""
        context, loss = autocast or nullcontext(), watch(self.loss)

        def forward(batch: Batch) -> Tensor:
            if batch.extra is None:
                raise FinefitError("a batch for a custom model lacks the inputs that the model makes")
            try:
                with context:
                    total: Tensor = loss(dict(batch.extra.tensors))
                    return total
            except FinefitError:
                raise
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                raise _error_in_file(self.source.file, "loss", error) from None

        return forward

    def own_objective(self) -> Objective:
        return custom_loss

    def generate(self, inputs: Inputs, *, rows: int, max_new_tokens: int, stops: frozenset[int]) -> list[list[int]]:
        found = self._called("generate", inputs, max_new_tokens=max_new_tokens, stops=stops)
        is_plain = isinstance(found, list | tuple) and all(
            isinstance(row, list | tuple) and all(type(t) is int for t in row) for row in found
        )
        if not is_plain or len(found) != rows:
            wanted = "return a list of token numbers for each of them"
            raise self.fault(f"has a generate that returned {_brief(found)} for {rows} rows; {wanted}")
        return [list(row)[:max_new_tokens] for row in found]

    def save(self, folder: Path, whole: Mapping[str, Tensor] | None, frozen: FrozenWeights | None) -> None:  # noqa: ARG002
        """Writes the model.safetensors that `load_custom_weights` reads."""
        named = self.module.state_dict(keep_vars=True) if whole is None else whole
        first_names: dict[int, str] = {}
        for name, tensor in named.items():
            first_names.setdefault(id(tensor), name)  # a tied tensor has several
        tensors = {name: named[name].detach().cpu().contiguous() for name in first_names.values()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    def fault(self, problem: str) -> ModelError:
        return _fault(self.source.file, problem)

    def _called(self, name: str, *arguments: Any, **settings: Any) -> Any:
        return _guarded(self.source.file, name, lambda: getattr(self.module, name)(*arguments, **settings))


def custom_family_of(model: nn.Module) -> CustomFamily | None:
    """None for a transformers model."""
    family = family_of(model)
    return family if isinstance(family, CustomFamily) else None


def build_custom(source: CustomSource, *, device: Literal["meta", "cpu"], seed: int = 0) -> nn.Module:
    """Builds the model on the CPU from `seed`; on the meta device nothing is drawn."""
    entry = _entry(source)
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        module = _guarded(source.file, f"{source.entry}(config)", lambda: entry(dict(source.config)))
    if not isinstance(module, nn.Module):
        raise _fault(source.file, f"has a {source.entry} that returned {_brief(module)}; return an nn.Module")
    if problems := _problems(module):
        what = f"builds a {type(module).__name__} that cannot be trained: "
        raise _fault(source.file, what + "; ".join(problems))
    tensors = (*module.named_parameters(), *module.named_buffers())
    if away := [name for name, tensor in tensors if tensor.device.type not in (device, "meta", "cpu")]:
        wanted = "build on the device that torch is set to, and finefit moves the model"
        raise _fault(source.file, f"builds {away[0]} on a GPU; {wanted}")
    if device == "cpu" and (empty := [name for name, p in module.named_parameters() if p.is_meta]):
        raise _fault(source.file, f"builds {empty[0]} without values, on the meta device; leave the device to torch")
    setattr(module, FAMILY, partial(CustomFamily, source=source))
    return module


def _entry(source: CustomSource) -> Callable[[dict[str, Any]], Any]:
    try:
        text = bounded.read_bytes(source.file, bounded.MAX_SOURCE_BYTES)
    except OSError as error:
        problem = f"model.file: {source.file.name} cannot be read: {error.strerror}"
        raise ModelError(problem, "name the Python file that builds the model") from None
    if hashlib.sha256(text).hexdigest() != source.sha256:
        problem = f"model.file: {source.file.name} has changed while it was being used"
        raise ModelError(problem, "give the command again when nothing writes to it")
    module = ModuleType(f"finefit_model_{source.sha256[:16]}")
    module.__file__ = str(source.file)
    sys.modules[module.__name__] = module  # a dataclass in it looks itself up
    _guarded(source.file, "import", lambda: exec(compile(text, str(source.file), "exec"), module.__dict__))
    entry: Callable[[dict[str, Any]], Any] | None = getattr(module, source.entry, None)
    if not callable(entry):
        own = (n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__)
        there = ", ".join(own) or "none"
        problem = f"model.entry: {source.file.name} has no function {source.entry}; it has {there}"
        raise SpecError(problem, "name the one that builds the model")
    try:
        inspect.signature(entry).bind({})
    except TypeError as error:
        what = f"has {source.entry}{inspect.signature(entry)}, which is called with one argument, the config: {error}"
        raise _fault(source.file, what) from None
    return entry


def _problems(module: nn.Module) -> list[str]:
    """Everything that is missing or wrong, at once."""
    found = []
    for name in ("inputs", "count", "loss"):
        call = getattr(module, name, None)
        if not callable(call):
            found.append(f"it has no {name}")
            continue
        try:
            inspect.signature(call).bind(None)
        except TypeError as error:
            found.append(f"{name}{inspect.signature(call)} is called with one argument: {error}")
    for member in ("adaptable", "layers"):
        names = getattr(module, member, None)
        if names is None:
            found += ["it has no adaptable"] if member == "adaptable" else []
        elif not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
            found.append(f"{member} is {_brief(names)}: a tuple of names of modules")
        else:
            found += _unknown_names(module, member, names)
    if not found:
        kinds = {name: module.get_submodule(name) for name in module.adaptable}  # type: ignore[union-attr]
        odd = {name: type(kind).__name__ for name, kind in kinds.items() if not isinstance(kind, nn.Linear | Conv1D)}
        found = [f"adaptable names {name}, a {kind}, which is not a linear layer" for name, kind in odd.items()][:3]
        towers = getattr(module, "towers", None) or {}
        if not isinstance(towers, Mapping) or not all(isinstance(names, tuple | list) for names in towers.values()):
            found.append(f"towers is {_brief(towers)}: a mapping of towers to names of modules")
        else:
            found += _unknown_names(module, "towers", [name for names in towers.values() for name in names])
    views, text = getattr(module, "views", None), getattr(module, "image_text", None)
    if views is not None and (type(views) is not int or views < 0):
        found.append(f"views is {_brief(views)}: a number of images, or nothing")
    if text is not None and not isinstance(text, str):
        found.append(f"image_text is {_brief(text)}: a text, or nothing")
    return found


def _unknown_names(module: nn.Module, member: str, names: Sequence[Any]) -> list[str]:
    known = {name for name, _ in module.named_modules()}
    unknown = [str(name) for name in names if name not in known]
    return [f"{member} names {', '.join(unknown[:3])}, and there is no such module"] if unknown else []


def load_custom(
    model: CustomModel, base: Path, *, device: str, dtype: torch.dtype, seed: int, checkpoint: Path | None = None
) -> nn.Module:
    """Loads the weights of a checkpoint in place of the model's starting weights. Parameters are in `dtype`; buffers
    stay as the file makes them. `base` is the folder that the model's paths are relative to."""
    weights = checkpoint if checkpoint is not None else None if model.weights is None else base / model.weights
    module = build_custom(custom_source(model, base), device="cpu", seed=seed)
    if weights is not None:
        load_custom_weights(module, weights)
    return cast_parameters(module, dtype).to(device_here(device))


def prove_custom_loadable(model: CustomModel, tuning: Tuning | None, base: Path) -> LoadProof:
    """Raises what a worker would of the weights and of an adapter that training continues from, by their headers.
    `base`: the folder that their paths are relative to."""
    module, stored = build_custom(custom_source(model, base), device="meta"), {}
    if model.weights is not None:
        files = [read_weight_file(path) for path in weight_files(base / model.weights)]
        stored = {name: tensor.shape for file in files for name, tensor in file.tensors.items()}
        require_same_tensors(module, stored, base / model.weights)
    if isinstance(tuning, Lora) and tuning.adapter is not None:
        with torch.device("meta"):
            adapted = make_trainable(module, tuning, name=model.file)
        require_fitting_adapter(adapted, base / tuning.adapter)
    return LoadProof(num_tensors=len(stored))


def load_custom_for_answers(
    model: CustomModel,
    base: Path,
    checkpoint: Path | None,
    *,
    device: str,
    dtype: torch.dtype,
    seed: int,
    start: Path | None = None,
) -> nn.Module:
    """The counterpart of `model.load.load_for_answers`. `seed` is that of the run that trained the model."""
    adapter = adapter_to_load(checkpoint, start)
    whole = checkpoint if adapter is None else None
    module = load_custom(model, base, device=device, dtype=dtype, seed=seed, checkpoint=whole)
    return (module if adapter is None else load_adapter(module, adapter)).eval()


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return module


def load_custom_weights(module: nn.Module, weights: Path) -> None:
    """Requires every tensor by name and shape; a tied tensor is stored under one of its names."""
    stored: dict[str, Tensor] = {}
    for path in weight_files(weights):
        with reading_model(f"model.weights: {path}", "name a safetensors file or a folder of them"):
            stored |= load_file(path)
    require_same_tensors(module, {name: tuple(value.shape) for name, value in stored.items()}, weights)
    wanted = module.state_dict(keep_vars=True)
    for name, value in stored.items():
        wanted[name].detach().copy_(value)


def require_same_tensors(module: nn.Module, stored: Mapping[str, tuple[int, ...]], weights: Path) -> None:
    """By name and shape, so the module may be on the meta device."""
    wanted = module.state_dict(keep_vars=True)
    if unknown := sorted(name for name in stored if name not in wanted):
        problem = f"model.weights: {weights.name} holds {', '.join(unknown[:3])}, which the model does not have"
        raise ModelError(problem, _FIX)
    for name, shape in stored.items():
        if shape != tuple(wanted[name].shape):
            shapes = f"{shape} there and {tuple(wanted[name].shape)} in the model"
            raise ModelError(f"model.weights: {name} is {shapes}", _FIX)
    taken = {id(wanted[name]) for name in stored}
    if missing := sorted(name for name, tensor in wanted.items() if id(tensor) not in taken):
        problem = f"model.weights: {weights.name} lacks {', '.join(missing[:3])}"
        raise ModelError(problem, "name weights that this model was saved with")


def _guarded(file: Path, doing: str, act: Callable[[], T]) -> T:
    try:
        return act()
    except FinefitError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            raise
        raise _error_in_file(file, doing, error) from None


def _error_in_file(file: Path, doing: str, error: BaseException) -> ModelError:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    if isinstance(error, SyntaxError) and error.filename == str(file):
        lines = [error.lineno]
    place = file.name if not lines or lines[-1] is None else f"{file.name}:{lines[-1]}"
    kind, text = type(error), str(error)
    # what torch raises for a tensor without values has no common type
    if kind.__module__.startswith(("torch._subclasses", "torch.fx")) or "meta tensor" in text.lower():
        remedy = _NO_VALUES
    else:
        remedy = _NO_GPU if any(word in text for word in ("CUDA", "cuda", "NVIDIA")) else _FIX
    reason = f"{kind.__name__}: {first_words(error) or 'no reason given'}"
    return ModelError(f"the model file {place} failed in {doing}: {reason}", remedy)


def _fault(file: Path, problem: str) -> ModelError:
    return ModelError(f"the model file {file.name} {problem}", _FIX)


def _brief(value: Any) -> str:
    text = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
