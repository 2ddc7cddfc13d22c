"""Which types of causal language models of transformers finefit trains, and how: each type, tiny and with random
weights, goes the way of a real one, in a process of its own.

    python bench/census.py bench/results/census.json                 # all types: on one free core, minutes
    python bench/census.py bench/results/census.json llama mamba     # these again, in the same file

LoRA: a plan for a card in bf16 that finds a gradient for every adapter, the proof that a worker can load the model, two
steps on the CPU in fp32 whose loss falls, rows that do not depend on the rows beside them, an adapter that plain
transformers and peft load to the same probabilities, and answers in a batch that are those of each prompt alone. Full:
a plan, two steps, and a saved model that plain transformers loads to the same probabilities. 4-bit: a plan, and two
steps on packed weights. Packing: packed rows have the probabilities of the same rows alone. Kernels: those that replace
the model's own operations, the fused adapters with the same gradients. All rows are text.
"""

import json
import multiprocessing
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import peft
import torch
import transformers
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from finefit.artifacts.forecasts import EvalBatchLimit
from finefit.artifacts.records import Levers
from finefit.data.collate import collate, pack
from finefit.data.examples import Example
from finefit.errors import FinefitError, ModelError
from finefit.evaluate.batches import limit_for
from finefit.evaluate.decoding import decode, likeliest
from finefit.facts.files import first_words, read_config, reading_model
from finefit.model.attention import attention_here, can_pack
from finefit.model.family import save_weights
from finefit.model.load import base_bits, load_base, make_trainable
from finefit.model.loadable import prove_loadable, require_causal
from finefit.objective.losses import sft_loss
from finefit.rehearse.fake_kernels import FakeFusedKernels
from finefit.rehearse.fake_model import StepConfig
from finefit.rehearse.fake_model import read_config as accepted_config
from finefit.rehearse.rehearsal import rehearse
from finefit.spec.models import Full, Lora, Tuning
from finefit.spec.schema import AdamW
from finefit.step.forward import bind
from finefit.step.fused import LeverForward
from finefit.step.levers import apply_levers
from finefit.step.optimize import optimizer_step
from finefit.step.state import make_optimizer, trainable_of
from finefit.vision import auto_class
from tests.tiny_types import CAUSAL, tiny_config
from tests.vision_models import FAMILIES as SEEING
from tests.vision_models import vlm_config

COLUMNS = ("lora", "full", "four_bit", "packing", "kernels")
LORA, FULL = Lora(kind="lora", rank=8, alpha=16), Full(kind="full")
FOUR_BIT = Lora(kind="lora", rank=8, alpha=16, base_bits=4)
LENGTHS = (7, 19, 3, 11, 2, 14)
PROMPTS = ([5, 9, 17, 40, 31, 8, 77], [6, 12], [90, 4, 3, 60, 33])
NEW_TOKENS = 4
_SECONDS, _BYTES = 120, 6 << 30
_PLAIN = Levers(micro_batch=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Of one column. `refused`: finefit's own words; `fault`: whatever else went wrong."""

    works: bool
    refused: str | None = None
    fault: str | None = None
    note: str | None = None


class Differs(Exception):
    """Two ways that have to give the same did not."""


def probe(kind: str, folder: Path) -> dict[str, Verdict]:
    found: dict[str, Verdict] = {}
    try:
        make_folder(kind, folder)
    except Exception as error:  # noqa: BLE001 of a hundred authors
        return dict.fromkeys(COLUMNS, _failed(error))
    steps: dict[str, Callable[[Path], str | None]] = {
        "lora": trains_adapters,
        "full": trains_fully,
        "four_bit": trains_in_four_bits,
        "packing": packs,
        "kernels": fuses,
    }
    for name, step in steps.items():
        if name != "lora" and found["lora"].refused and "LoRA" not in found["lora"].refused:
            found[name] = found["lora"]
            continue
        try:
            found[name] = Verdict(works=True, note=step(folder))
        except Exception as error:  # noqa: BLE001 of a hundred authors
            found[name] = _failed(error)
    return found


def _failed(error: Exception) -> Verdict:
    words = " ".join(str(error).split())[:400]
    if isinstance(error, FinefitError) and (
        error.__cause__ is None or first_words(error.__cause__) not in error.problem
    ):
        return Verdict(works=False, refused=error.problem)
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    place = "" if frame is None else f" ({Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno})"
    return Verdict(works=False, fault=f"{type(error).__name__}: {words}{place}")


def make_folder(kind: str, folder: Path) -> None:
    """Weights so far from zero that every row makes a difference to every other that sees it."""
    config = vlm_config(kind) if kind in SEEING else tiny_config(kind)
    folder.mkdir()
    config.save_pretrained(folder)
    require_causal(accepted_config(dict(read_config(folder))))
    torch.manual_seed(0)
    # weights of a model that also takes images are published as a whole
    auto = AutoModelForImageTextToText if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES else AutoModelForCausalLM
    with reading_model(f"the config of this {kind} model"):
        model = auto.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data.mul_(5)
    model.save_pretrained(folder)


def trains_adapters(folder: Path) -> None:
    plan(folder, LORA)
    prove_loadable(folder, LORA, folder.name, folder)
    model = _loaded(folder, LORA)
    take_two_steps(model)
    _require_near(
        _alone(model), bind(model)(collate(_examples(), pad=1)), "a row beside others differs from the row alone"
    )
    adapter = folder / "adapter"
    save_weights(model, adapter)
    plain = peft.PeftModel.from_pretrained(_by_transformers(folder), adapter).eval()
    _require_near(_alone(model), _plainly(plain), "the adapter that plain transformers and peft load differs")
    _generates(model)


def _by_transformers(folder: Path) -> Any:
    return auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder)


def _generates(model: nn.Module) -> None:
    def answers(*prompts: list[int]) -> list[list[int]]:
        given = {"max_new_tokens": NEW_TOKENS, "stops": (), "pad": 1, "device": "cpu", "choose": likeliest}
        return decode(model, prompts, **given)  # type: ignore[arg-type]

    alone = [answers(prompt)[0] for prompt in PROMPTS]
    has_batches = limit_for(model, list(map(len, PROMPTS)), EvalBatchLimit(rows=3, tokens=99)).rows > 1
    if has_batches and (together := answers(*PROMPTS)) != alone:
        raise Differs(f"the answers of a batch, {together}, differ from those of each prompt, {alone}")
    for prompt, answer in zip(PROMPTS, alone, strict=True):
        with torch.no_grad():
            logits_TV = model(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0]
        wanted = logits_TV[len(prompt) - 1 : -1].argmax(-1).tolist()
        if answer != wanted:
            raise Differs(f"the answer, {answer}, differs from the likeliest tokens without a cache, {wanted}")


def trains_fully(folder: Path) -> None:
    plan(folder, FULL)
    model = _loaded(folder, FULL)
    take_two_steps(model)
    whole = folder / "whole"
    save_weights(model, whole)
    plain = _by_transformers(whole).eval()
    _require_near(_alone(model), _plainly(plain), "the whole model that plain transformers loads differs")


def trains_in_four_bits(folder: Path) -> None:
    plan(folder, FOUR_BIT, is_quick=True)
    take_two_steps(_loaded(folder, FOUR_BIT))


def packs(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    if (reason := can_pack(config, max(LENGTHS))) is not None:
        raise ModelError(reason, "")
    model = _loaded(folder, LORA, packing=True)
    _spread(model)
    plan(folder, LORA, levers=replace(_PLAIN, packing=True), is_quick=True)
    with torch.no_grad():
        packed_N = bind(model)(pack(_examples()))
    _require_near(_alone(model), packed_N, "packed rows differ from the same rows alone")


def fuses(folder: Path) -> str:
    """Returns the names of the kernels."""
    levers = replace(_PLAIN, kernels="fused")
    plan(folder, LORA, levers=levers, is_quick=True)
    model = _loaded(folder, LORA)
    _spread(model)
    batch = collate(_examples(), pad=1)
    wanted = _gradients(model, partial(bind(model), batch))
    apply_levers(model, levers)
    fused = _gradients(model, partial(bind(model, is_fused=True), batch))
    for name, gradient in wanted.items():
        _require_near(gradient, fused[name], f"the fused gradient of {name} differs")
    noted = NotedKernels()
    apply_levers(model, levers, kernels=noted)
    with torch.no_grad():
        bind(model, is_fused=True, kernels=noted)(batch)
    forwards = [vars(module).get("forward") for module in model.modules() if isinstance(module, LoraLayer)]
    adapters = {"adapters"} if any(isinstance(forward, LeverForward) for forward in forwards) else set()
    return ", ".join(name for name in ("adapters", "norm", "rotary", "mlp", "loss") if name in noted.seen | adapters)


class NotedKernels(FakeFusedKernels):
    """Shapes without values, and the names of those that were called."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def norm(self, *given: Any, **named: Any) -> Any:
        self.seen.add("norm")
        return super().norm(*given, **named)

    def gate(self, *given: Any) -> Any:
        self.seen.add("mlp")
        return super().gate(*given)

    def rotate(self, *given: Any) -> Any:
        self.seen.add("rotary")
        return super().rotate(*given)

    def cross_entropy(self, *given: Any) -> Any:
        self.seen.add("loss")
        return super().cross_entropy(*given)


def plan(folder: Path, tuning: Tuning, levers: Levers = _PLAIN, *, is_quick: bool = False) -> None:
    """For a card, where every trained tensor has to get a gradient; a quick one does not look for them."""
    found = rehearse(
        StepConfig(
            config=dict(read_config(folder)),
            tuning=tuning,
            optimizer=AdamW(lr=1e-4),
            device="cuda",
            capability=(9, 0),
            precision="bf16",
            levers=levers,
            tokens=32,
            supervised=16,
            accumulates=False,
            is_quick=is_quick,
        )
    )
    if found.unreached:
        raise ModelError(f"no gradient reaches {'; '.join(found.causes) or ', '.join(found.unreached[:3])}", "")


def _loaded(folder: Path, tuning: Tuning, *, packing: bool = False) -> nn.Module:
    attention = attention_here("cpu", "fp32", folder, packing=packing)
    base = load_base(folder, device="cpu", dtype=torch.float32, attention=attention, bits=base_bits(tuning))
    model: nn.Module = make_trainable(base, tuning, name=folder.name)
    return model


def _spread(model: nn.Module) -> None:
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    model.eval()


def take_two_steps(model: nn.Module) -> None:
    optimizer, batches = make_optimizer(model, AdamW(lr=1e-3)), [collate(_examples(), pad=1)]
    missing: list[str] = []

    def decide(finite: Tensor) -> bool:
        missing[:] = [name for name, parameter in trainable_of(model).items() if parameter.grad is None]
        return bool(finite)

    losses = []
    for _ in range(2):
        outcome = optimizer_step(
            batches, forward=bind(model), objective=sft_loss, optimizer=optimizer, clip=1.0, decide=decide
        )
        if not outcome.applied:
            raise Differs(
                f"the loss, {float(outcome.loss)}, or its gradient, {float(outcome.grad_norm)}, is not finite"
            )
        if missing:
            raise Differs(f"{len(missing)} trained tensors got no gradient, among them {missing[0]}")
        losses.append(float(outcome.loss))
    if not losses[1] < losses[0]:
        raise Differs(f"the loss rose from {losses[0]} to {losses[1]}")
    model.eval()


def _gradients(model: nn.Module, forward: Callable[[], Tensor]) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    forward().sum().backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in trainable_of(model).items() if p.grad is not None}


def _examples(lengths: Sequence[int] = LENGTHS) -> list[Example]:
    chance = torch.Generator().manual_seed(0)

    def example(length: int) -> Example:
        tokens = torch.randint(4, 250, (length,), generator=chance).tolist()
        return Example(tuple(tokens), (False, *[True] * (length - 1)))

    return [example(length) for length in lengths]


def _alone(model: nn.Module) -> Tensor:
    """The probabilities of each row's tokens, one row at a time."""
    forward = bind(model)
    with torch.no_grad():
        return torch.cat([forward(collate([example], pad=1)) for example in _examples()])


def _plainly(model: nn.Module) -> Tensor:
    """The same from the logits of a model that transformers loaded."""
    found = []
    for example in _examples():
        ids_1T = torch.tensor([example.tokens])
        with torch.no_grad():
            logits_TV = model(input_ids=ids_1T, use_cache=False).logits[0, :-1].float()
        found.append(logits_TV.log_softmax(-1).gather(1, ids_1T[0, 1:, None]).squeeze(1))
    return torch.cat(found)


def _require_near(wanted: Tensor, found: Tensor, words: str) -> None:
    scale = max(float(wanted.detach().abs().max()), 1e-6)
    off = float((wanted - found).detach().abs().max())
    if not off <= 1e-3 * scale:
        raise Differs(f"{words} by {off:.2g} of {scale:.2g}")


def _child(kind: str, answer: Connection) -> None:
    torch.set_num_threads(1)
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _BYTES, used + _BYTES))
    with TemporaryDirectory(dir="/dev/shm") as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answer.send(probe(kind, Path(place) / kind))


def probe_apart(kind: str) -> dict[str, Any]:
    """In a process of its own, which may crash, hang or run out of memory."""
    here, there = FORKS.Pipe(duplex=False)
    began = time.perf_counter()
    process = FORKS.Process(target=_child, args=(kind, there))
    process.start()
    there.close()
    try:
        found = here.recv() if here.poll(_SECONDS) else _lost(f"took more than {_SECONDS} s")
    except EOFError:
        process.join()
        found = _lost(f"its process ended with {process.exitcode}")
    process.kill()
    process.join()
    verdicts = {name: {key: value for key, value in as_dict(one).items() if value} for name, one in found.items()}
    return {"type": kind, "seconds": round(time.perf_counter() - began, 1), **verdicts}


def as_dict(verdict: Verdict) -> dict[str, Any]:
    return {name: getattr(verdict, name) for name in ("works", "refused", "fault", "note")}


def _lost(words: str) -> dict[str, Verdict]:
    return dict.fromkeys(COLUMNS, Verdict(works=False, fault=words))


FORKS = multiprocessing.get_context("fork")


def sweep(kinds: Iterable[str], known: Mapping[str, dict[str, Any]], out: Path) -> None:
    """Writes after each type, so that nothing is lost."""
    found = dict(known)
    for kind in kinds:
        found[kind] = one = probe_apart(kind)
        bad = {
            name: part.get("fault") or part.get("refused") for name in COLUMNS if not (part := one[name]).get("works")
        }
        print(kind, one["seconds"], bad or "ok", flush=True)
        versions = {module.__name__: module.__version__ for module in (torch, transformers, peft)}
        record = {
            "date": datetime.now(UTC).date().isoformat(),
            "versions": versions,
            "types": [found[k] for k in sorted(found)],
        }
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main(path: str, *kinds: str) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    with TemporaryDirectory() as place, warnings.catch_warnings():  # what is imported on the way is imported once
        warnings.simplefilter("ignore")
        probe("llama", Path(place) / "llama")
    out = Path(path)
    known = {one["type"]: one for one in json.loads(out.read_text())["types"]} if kinds and out.exists() else {}
    sweep(kinds or CAUSAL, known, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
