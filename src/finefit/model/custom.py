"""Models of a user's own: one Python file with a function that builds a module from a config.

`OwnModel` says what that module has. It is built on the meta device, where tensors have shapes and no values, for plans and for making inputs, and on
the CPU with the run's seed for training and answers. What goes wrong in the file is told with its name and line.
"""

import hashlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol, TypeVar

import peft
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from finefit.errors import FinefitError, ModelError, SpecError
from finefit.facts.model import WEIGHTS
from finefit.model.custom_files import Written, weight_files
from finefit.objective.custom import CustomRow
from finefit.spec.models import Layers, Lora, Tower

Inputs = dict[str, Tensor]
"""What the model is given of a batch, by names of its own."""
T = TypeVar("T")
_WRITTEN = "finefit_written"
"""Where a module that was built here keeps what it was built from."""
_MEND = "mend the file; docs/custom.md describes what it must hold"
_VALUELESS = (
    "a rehearsal has shapes but no values: in build, and in loss while the model trains, read no tensor on the host "
    "(`.item()`, `if tensor`, boolean masks, `nonzero`); what has to be known there belongs into inputs"
)


class OwnModel(Protocol):
    """What `build(config)` returns: an nn.Module that has these.

    Optional besides: `towers`, a mapping of `language`, `vision`, `projector` to names of modules; `layers`, names of modules that may be computed
    again in backward, the first ones first; `image_text`, what stands in a prompt in the place of an image; `views`, the number of images that every
    row must have; `generate(inputs, *, max_new_tokens, stops) -> list[list[int]]`, new tokens for every row."""

    adaptable: tuple[str, ...]
    """Dotted names of linear layers that may carry adapters; `tuning.targets` chooses among them, `all-linear` means all."""

    def inputs(self, rows: Sequence[CustomRow]) -> Inputs:
        """On the CPU, by a twin of the model that has no weights, in a process that has no card."""
        ...

    def count(self, inputs: Inputs) -> int:
        """What the loss is a sum over, at least one: called with what `inputs` made, before it goes to the device. The step divides by the sum of
        it over the global batch."""
        ...

    def loss(self, inputs: Inputs) -> Any:
        """A sum over what `count` counts, as a scalar: of several rows the sum of what each has alone. A tuple's first entry, or `loss` of a mapping
        or an object, is taken for it; whatever else there is goes no further. Never read on the host."""
        ...


@dataclass(frozen=True, slots=True)
class Own:
    """A module that a user's file built, with what it says of itself. Its calls are told of by file and line where they fail."""

    module: nn.Module
    written: Written

    @property
    def file(self) -> Path:
        return self.written.file

    @property
    def adaptable(self) -> tuple[str, ...]:
        return tuple(self.module.adaptable)  # type: ignore[arg-type]

    @property
    def towers(self) -> Mapping[Tower, tuple[str, ...]]:
        return getattr(self.module, "towers", None) or {}

    @property
    def layers(self) -> list[nn.Module]:
        """That may be computed again, the first ones first."""
        return [self.module.get_submodule(name) for name in getattr(self.module, "layers", None) or ()]

    @property
    def image_text(self) -> str:
        return getattr(self.module, "image_text", None) or ""

    @property
    def views(self) -> int | None:
        return getattr(self.module, "views", None)

    @property
    def sees(self) -> bool:
        """Whether it says anything of images."""
        return self.views is not None or getattr(self.module, "image_text", None) is not None

    @property
    def generates(self) -> bool:
        return callable(getattr(self.module, "generate", None))

    def inputs(self, rows: Sequence[CustomRow]) -> Inputs:
        found: Inputs = self._called("inputs", rows)
        self._require_inputs(found)
        return found

    def count(self, inputs: Inputs) -> int:
        count = self._called("count", inputs)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise self.fault(
                f"has a count that gave {_shown(count)} for a batch of rows; give a whole number of at least 1, and no tensor"
            )
        return count

    def loss(self, inputs: Inputs) -> Tensor:
        """The sum alone. Errors come as they are: whoever calls knows which of them are a lack of memory."""
        given = self.module.loss(inputs)  # type: ignore[operator]
        total = _sum_in(given)
        if not isinstance(total, Tensor):
            raise self.fault(
                f"has a loss that gave {_shown(given)}; give a tensor, a tuple that begins with it, or a mapping with `loss`"
            )
        if total.ndim or not total.is_floating_point():
            raise self.fault(
                f"has a loss of shape {tuple(total.shape)} in {total.dtype}; give a scalar: the sum over what count counts"
            )
        return total

    def generate(self, inputs: Inputs, *, rows: int, max_new_tokens: int, stops: frozenset[int]) -> list[list[int]]:
        found = self._called("generate", inputs, max_new_tokens=max_new_tokens, stops=stops)
        is_plain = isinstance(found, list | tuple) and all(
            isinstance(row, list | tuple) and all(type(t) is int for t in row) for row in found
        )
        if not is_plain or len(found) != rows:
            raise self.fault(
                f"has a generate that gave {_shown(found)} for {rows} rows; give a list of token numbers for each of them"
            )
        return [list(row)[:max_new_tokens] for row in found]

    def fault(self, problem: str) -> ModelError:
        return ModelError(f"the model file {self.file.name} {problem}", _MEND)

    def told(self, doing: str, error: BaseException) -> ModelError:
        return _told(self.file, doing, error)

    def _called(self, name: str, *arguments: Any, **settings: Any) -> Any:
        return _guarded(self.file, name, lambda: getattr(self.module, name)(*arguments, **settings))

    def _require_inputs(self, found: Any) -> None:
        if (
            not isinstance(found, dict)
            or not found
            or not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in found.items())
        ):
            raise self.fault(f"has an inputs that gave {_shown(found)}; give a dict of tensors by name")
        for name, value in found.items():
            if value.device.type != "cpu":
                raise self.fault(
                    f"has an inputs whose {name} lies on {value.device}: it is made on the CPU, without a card, and moved later"
                )
            if value.requires_grad:
                raise self.fault(
                    f"has an inputs whose {name} requires a gradient: it is made by a twin without weights, so nothing of it is trained"
                )


def own_of(model: nn.Module) -> Own | None:
    """Of a model of the user's own, whatever adapts it; None for any other."""
    bare = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    written = vars(bare).get(_WRITTEN)
    return None if written is None else Own(bare, written)


def _sum_in(given: Any) -> Any:
    if isinstance(given, Mapping):
        return given.get("loss")
    if isinstance(given, tuple | list):
        return given[0] if given else None
    return given if isinstance(given, Tensor) else getattr(given, "loss", None)


# building


def build(found: Written, *, device: Literal["meta", "cpu"], seed: int = 0) -> nn.Module:
    """On the CPU by `seed`; on the meta device there is nothing to draw."""
    entry = _entry(found)
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        module = _guarded(found.file, f"{found.entry}(config)", lambda: entry(dict(found.config)))
    if not isinstance(module, nn.Module):
        raise _fault(found.file, f"has a {found.entry} that gave {_shown(module)}; give an nn.Module")
    _require_members(found, module)
    setattr(module, _WRITTEN, found)
    _require_here(found, module, device)
    return module


def load_own(found: Written, weights: Path | None, *, device: str, dtype: torch.dtype, seed: int) -> nn.Module:
    """Parameters in `dtype`; buffers stay as the file makes them."""
    module = build(found, device="cpu", seed=seed)
    if weights is not None:
        put_weights(module, weights)
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return module.to(torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device))


def _entry(found: Written) -> Callable[[dict[str, Any]], Any]:
    source = found.file.read_bytes()
    if hashlib.sha256(source).hexdigest() != found.sha256:
        raise ModelError(
            f"model.file: {found.file.name} has changed while it was being used",
            "give the command again when nothing writes to it",
        )
    module = ModuleType(f"finefit_model_{found.sha256[:16]}")
    module.__file__ = str(found.file)
    sys.modules[module.__name__] = module  # a dataclass in it looks itself up
    _guarded(found.file, "import", lambda: exec(compile(source, str(found.file), "exec"), module.__dict__))
    entry: Callable[[dict[str, Any]], Any] | None = getattr(module, found.entry, None)
    if not callable(entry):
        there = ", ".join(
            name
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        )
        raise SpecError(
            f"model.entry: {found.file.name} has no function {found.entry}; it has {there or 'none'}",
            "name the one that builds the model",
        )
    try:
        inspect.signature(entry).bind({})
    except TypeError as error:
        raise _fault(
            found.file,
            f"has {found.entry}{inspect.signature(entry)}, which is called with one argument, the config: {error}",
        ) from None
    return entry


_CALLS: dict[str, int] = {"inputs": 1, "count": 1, "loss": 1}


def _require_members(found: Written, module: nn.Module) -> None:
    """All that is missing or odd, at once."""
    odd = [
        *_odd_calls(module),
        *_odd_names(module, "adaptable", needed=True),
        *_odd_names(module, "layers", needed=False),
    ]
    odd += _odd_adaptable(module) if not odd else []
    views, text = getattr(module, "views", None), getattr(module, "image_text", None)
    if views is not None and (type(views) is not int or views < 0):
        odd.append(f"views is {_shown(views)}: a number of images, or nothing")
    if text is not None and not isinstance(text, str):
        odd.append(f"image_text is {_shown(text)}: a text, or nothing")
    if odd:
        raise _fault(found.file, f"builds a {type(module).__name__} that cannot be trained: " + "; ".join(odd))


def _odd_calls(module: nn.Module) -> list[str]:
    odd = []
    for name, number in _CALLS.items():
        call = getattr(module, name, None)
        if not callable(call):
            odd.append(f"it has no {name}")
            continue
        try:
            inspect.signature(call).bind(*range(number))
        except TypeError as error:
            odd.append(f"{name}{inspect.signature(call)} is called with one argument: {error}")
    return odd


def _odd_names(module: nn.Module, member: str, *, needed: bool) -> list[str]:
    names = getattr(module, member, None)
    if names is None:
        return [f"it has no {member}"] if needed else []
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        return [f"{member} is {_shown(names)}: a tuple of names of modules"]
    known = {name for name, _ in module.named_modules()}
    if lost := [name for name in names if name not in known]:
        return [f"{member} names {', '.join(lost[:3])}, and there is no such module"]
    return []


def _odd_adaptable(module: nn.Module) -> list[str]:
    names: Sequence[str] = module.adaptable  # type: ignore[assignment]
    kinds = {name: module.get_submodule(name) for name in names}
    odd = [
        f"adaptable names {name}, a {type(kind).__name__} and no linear layer"
        for name, kind in kinds.items()
        if not _is_linear(kind)
    ]
    return odd[:3] + _odd_towers(module)


def _odd_towers(module: nn.Module) -> list[str]:
    towers = getattr(module, "towers", None) or {}
    if not isinstance(towers, Mapping) or not all(isinstance(names, tuple | list) for names in towers.values()):
        return [f"towers is {_shown(towers)}: a mapping of towers to names of modules"]
    known = {name for name, _ in module.named_modules()}
    lost = [str(name) for names in towers.values() for name in names if name not in known]
    return [f"towers names {', '.join(lost[:3])}, and there is no such module"] if lost else []


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


def _require_here(found: Written, module: nn.Module, device: str) -> None:
    away = [
        name
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if tensor.device.type not in (device, "meta", "cpu")
    ]
    if away:
        raise _fault(
            found.file,
            f"builds {away[0]} on a card; build on the device that torch is set to, and finefit moves the model",
        )
    if device == "cpu" and (empty := [name for name, p in module.named_parameters() if p.is_meta]):
        raise _fault(found.file, f"builds {empty[0]} without values, on the meta device; leave the device to torch")


# adapters


def adaptable_layers(own: Own, tuning: Lora) -> set[str]:
    """Names of the layers that get an adapter, of those that the model allows."""
    if not own.adaptable:
        raise ModelError(
            f"{own.file.name} names no layer as adaptable, so none can carry an adapter",
            "train it in full: `tuning: {kind: full}`",
        )
    if not isinstance(tuning.targets, dict):
        return _matched(own, tuning.targets, set(own.adaptable), "tuning.targets")
    chosen: set[str] = set()
    for tower, targets in tuning.targets.items():
        prefixes = own.towers.get(tower)
        if prefixes is None:
            there = ", ".join(own.towers) or "no towers"
            raise ModelError(
                f"tuning.targets names the tower {tower}; {own.file.name} has {there}",
                "name layers instead of towers, or `towers` in it",
            )
        inside = {name for name in own.adaptable if any(f"{name}.".startswith(f"{prefix}.") for prefix in prefixes)}
        chosen |= _matched(own, targets, inside, f"tuning.targets.{tower}")
    return chosen


def _matched(own: Own, targets: Layers, allowed: set[str], key: str) -> set[str]:
    if targets == "all-linear":
        return allowed
    chosen: set[str] = set()
    for target in targets:
        matched = {name for name in allowed if name == target or name.endswith(f".{target}")}
        if not matched:
            known = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in allowed})) or "none"
            raise ModelError(
                f"{key}: {target} matches none of the layers that {own.file.name} calls adaptable",
                f"their names end in {known}",
            )
        chosen |= matched
    return chosen


# weights


def put_weights(module: nn.Module, weights: Path) -> None:
    """Every tensor by its name and in its shape; one of several names is stored under one of them."""
    stored: dict[str, Tensor] = {}
    for path in weight_files(weights):
        try:
            stored |= load_file(path)
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"model.weights: {path} cannot be read: {error}", "name a safetensors file or a folder of them"
            ) from None
    wanted = module.state_dict(keep_vars=True)
    if foreign := sorted(name for name in stored if name not in wanted):
        raise ModelError(
            f"model.weights: {weights.name} holds {', '.join(foreign[:3])}, which the model does not have", _MEND
        )
    taken: set[int] = set()
    for name, value in stored.items():
        if value.shape != wanted[name].shape:
            raise ModelError(
                f"model.weights: {name} is {tuple(value.shape)} there and {tuple(wanted[name].shape)} in the model",
                _MEND,
            )
        wanted[name].detach().copy_(value)
        taken.add(id(wanted[name]))
    if missing := sorted(name for name, tensor in wanted.items() if id(tensor) not in taken):
        raise ModelError(
            f"model.weights: {weights.name} lacks {', '.join(missing[:3])}",
            "name weights that this model was saved with",
        )


def save_own(module: nn.Module, folder: Path, whole: Mapping[str, Tensor] | None = None) -> None:
    """model.safetensors, which `put_weights` reads. `whole`: the weights by name, where those of the model are divided."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in (module.state_dict(keep_vars=True) if whole is None else whole).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach().cpu().contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


# what goes wrong in it


def _guarded(file: Path, doing: str, act: Callable[[], T]) -> T:
    try:
        return act()
    except FinefitError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            raise
        raise _told(file, doing, error) from None


def _told(file: Path, doing: str, error: BaseException) -> ModelError:
    words = " ".join(str(error).split()) or "no reason given"
    remedy = _VALUELESS if _is_valueless(error) else _NO_CARD if _asks_for_a_card(error) else _MEND
    return ModelError(
        f"the model file {_place(file, error)} failed in {doing}: {type(error).__name__}: {_cut(words)}", remedy
    )


_NO_CARD = "build and inputs run where no card is: leave the device to torch, and finefit moves what has to be moved"


def _place(file: Path, error: BaseException) -> str:
    own = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    is_syntax = isinstance(error, SyntaxError) and error.filename == str(file)
    line = error.lineno if is_syntax and isinstance(error, SyntaxError) else own[-1] if own else None
    return file.name if line is None else f"{file.name}:{line}"


def _is_valueless(error: BaseException) -> bool:
    """Of a tensor that has no values: what torch raises for it has no type in common."""
    kind = type(error)
    return kind.__module__.startswith(("torch._subclasses", "torch.fx")) or "meta tensor" in str(error).lower()


def _asks_for_a_card(error: BaseException) -> bool:
    return any(word in str(error) for word in ("CUDA", "cuda", "NVIDIA"))


def _fault(file: Path, problem: str) -> ModelError:
    return ModelError(f"the model file {file.name} {problem}", _MEND)


def _shown(value: Any) -> str:
    shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _cut(words: str) -> str:
    return words if len(words) <= 300 else words[:300] + " ..."
