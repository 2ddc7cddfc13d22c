"""Rehearses an evaluation on fake tensors, with the two calls that an evaluation makes: a prefill of all prompts, and
then one token after another. Every prompt has as many images of the config as fit into it.

The cache grows by a copy with every token: old and new keys of one layer exist at the same time, and freed blocks are
slightly too small for the next copy. So the peak is where the cache is longest, and what the allocator holds depends on
the path: the cache is grown in several steps."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache

from finefit.artifacts.records import Levers
from finefit.evaluate.decoding import decode_step, prefill, vision_prefill
from finefit.evaluate.generate import LOGITS_AT_ONCE
from finefit.model.attention import can_pack
from finefit.objective.batch import Batch, Extra
from finefit.rehearse import layer_kinds
from finefit.rehearse.allocator import replay
from finefit.rehearse.cost_model import Rates, instant_seconds
from finefit.rehearse.fake_kernels import device_kernels
from finefit.rehearse.fake_layers import fake_dense_weight
from finefit.rehearse.fake_model import (
    StepConfig,
    build_on_meta,
    fake_images,
    fitting,
    materialise_fakes,
    read_config,
    stored_dtypes,
)
from finefit.rehearse.recorder import Recorder
from finefit.rehearse.rehearsal import untraceable
from finefit.rehearse.trace import Trace
from finefit.step.forward import bind
from finefit.step.levers import apply_levers

PROMPTS = "prompts"
GENERATION = "generation"
_GROWTHS = 12
"""Steps in which a cache is grown to its length; a real run takes one per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRehearsal:
    reserved_bytes: int
    """On a CPU, allocated bytes."""
    allocated_bytes: int
    trace: Trace
    new_tokens: int
    """New tokens of each row; only the last decode step was executed."""

    def seconds(self, rates: Rates) -> float:
        token = instant_seconds(self.trace, GENERATION, rates)
        return instant_seconds(self.trace, PROMPTS, rates) + self.new_tokens * token


def rehearse_answers(
    cfg: StepConfig, *, rows: int, prompt_tokens: int, new_tokens: int, mlp_tiles: int = 1, expandable: bool = True
) -> GenerationRehearsal:
    extra = _extra(cfg, rows, prompt_tokens)

    def act(model: nn.Module, recorder: Recorder) -> None:
        if extra is None and can_pack(read_config(cfg.config), prompt_tokens + new_tokens) is not None:
            _answer_padded_left(model, recorder, rows, prompt_tokens, new_tokens)
            return
        # prompts with images are prefilled whole; otherwise the last token is the first one decoded. Prompts of several
        # rows differ in length, so the cache of the padding is masked
        width, least = (prompt_tokens, 1) if extra is not None else (prompt_tokens - 1, 0)
        ids_BT, lengths = torch.ones(rows, width, dtype=torch.long), [width, *[max(least, width - 1)] * (rows - 1)]
        if extra is None:
            context = prefill(model, ids_BT, lengths, max_new_tokens=new_tokens)
        else:  # the images are freed after they are read
            context = vision_prefill(model, ids_BT, lengths, _faked(extra), max_new_tokens=new_tokens)
        tokens_B = torch.ones(rows, dtype=torch.long)
        recorder.phase = GENERATION
        decode_step(model, context, tokens_B)
        _grow(context.cache, new_tokens - 2)
        context.slots += max(0, new_tokens - 2)
        _clear_costs(recorder)
        if new_tokens > 1:
            decode_step(model, context, tokens_B)

    return _rehearsed(cfg, act, new_tokens, mlp_tiles=mlp_tiles, expandable=expandable)


def _extra(cfg: StepConfig, rows: int, tokens: int) -> Extra | None:
    """Must not be called under a fake tensor mode."""
    return fake_images(cfg.config, rows=rows, tokens=tokens, grids=fitting(cfg.config, cfg.grids, tokens))


def _faked(extra: Extra) -> Extra:
    return extra.moved(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))


def rehearse_likelihood(
    cfg: StepConfig, *, rows: int, tokens: int, counted: int, mlp_tiles: int = 1, expandable: bool = True
) -> GenerationRehearsal:
    """Passes rows of `tokens` once, and computes the likelihood of `counted` tokens of each."""
    extra = _extra(cfg, rows, tokens)

    def act(model: nn.Module, _: Recorder) -> None:
        zeros_N = torch.zeros(rows * counted, dtype=torch.long)
        ids_BT = torch.ones(rows, tokens, dtype=torch.long)
        batch = Batch(
            input_ids_BT=ids_BT,
            positions_N=zeros_N,
            targets_N=zeros_N,
            num_supervised=rows * counted,
            num_tokens=rows * tokens,
            extra=None if extra is None else _faked(extra),
        )
        bind(model, loss_chunk=LOGITS_AT_ONCE)(batch)

    return _rehearsed(cfg, act, 0, mlp_tiles=mlp_tiles, expandable=expandable)


def _rehearsed(
    cfg: StepConfig, act: Callable[[nn.Module, Recorder], None], new_tokens: int, *, mlp_tiles: int, expandable: bool
) -> GenerationRehearsal:
    """`act`: called with the loaded model."""
    kernels = device_kernels(cfg.device, cfg.capability, cfg.precision)
    model = build_on_meta(cfg, kernels, answers=True).eval()
    recorder = Recorder(kernels)
    with FakeTensorMode(allow_non_fake_inputs=True), recorder, torch.no_grad():
        materialise_fakes(model, recorder, is_loaded=cfg.device == "cuda", stored=stored_dtypes(cfg, answers=True))
        apply_levers(model, Levers(micro_batch=1, mlp_tiles=mlp_tiles), dense=fake_dense_weight)
        recorder.phase = PROMPTS
        try:
            act(model, recorder)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise untraceable(model, recorder, error) from error
    trace = recorder.finish()
    found = replay(trace.stream(), expandable=expandable)
    allocated = found.allocated_bytes
    reserved = found.reserved_bytes if cfg.device == "cuda" else allocated
    return GenerationRehearsal(reserved_bytes=reserved, allocated_bytes=allocated, trace=trace, new_tokens=new_tokens)


def _answer_padded_left(model: nn.Module, recorder: Recorder, rows: int, prompt_tokens: int, new_tokens: int) -> None:
    """Follows transformers' own loop: all prompts under a mask, and the logits of the last position copied to fp32."""
    ids_BT = torch.ones(rows, prompt_tokens, dtype=torch.long)
    mask_BT = torch.ones_like(ids_BT) if rows > 1 else None
    output = model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=True, logits_to_keep=1)
    output.logits[:, -1].to(torch.float32, copy=True).argmax(-1)
    cache, output = output.past_key_values, None
    recorder.phase = GENERATION
    _grow(cache, new_tokens - 2)
    longer = None if mask_BT is None else torch.ones(rows, prompt_tokens + max(0, new_tokens - 2) + 1, dtype=torch.long)
    _clear_costs(recorder)
    output = model(
        input_ids=ids_BT[:, :1], attention_mask=longer, past_key_values=cache, use_cache=True, logits_to_keep=1
    )
    output.logits[:, -1].to(torch.float32, copy=True).argmax(-1)


def _clear_costs(recorder: Recorder) -> None:
    """Clears the costs of growing the cache, so that the cost of a decode step is that of the last one."""
    for table in (recorder.trace.costs, recorder.trace.operations):
        for key in [key for key in table if key[0] == GENERATION]:
            del table[key]


def _grow(cache: DynamicCache, tokens: int) -> None:
    """Grows the cache layer after layer, like a decode step."""
    for begin, end in pairwise(max(0, tokens) * at // _GROWTHS for at in range(_GROWTHS + 1)):
        for layer in cache.layers if end > begin else ():
            if isinstance(getattr(layer, "keys", None), Tensor):  # other layers keep a state of fixed size
                layer.update(_empty(layer.keys, end - begin), _empty(layer.values, end - begin))


def _empty(like: Tensor, tokens: int) -> Tensor:
    rows, heads, _, width = like.shape
    return like.new_empty(rows, heads, tokens, width)


def extrapolated_bytes(cfg: StepConfig, rehearse: Callable[[StepConfig], GenerationRehearsal]) -> int:
    """Extrapolates the peak of allocated bytes from a few layers: each further layer takes the same amount, and a layer
    of a vision tower only its weights. This is accurate enough for a search; the chosen batch is rehearsed in full."""
    config = read_config(cfg.config)
    kinds, all_tower = layer_kinds.layer_kinds(config), layer_kinds.tower_kinds(config)
    period = layer_kinds.period_of(kinds)
    tower = all_tower if layer_kinds.names_layers(cfg) else next(layer_kinds.tower_cuts(all_tower))[1]
    missing = len(all_tower) - len(tower)

    def allocated(num_layers: int) -> int:
        values = layer_kinds.with_layers(cfg.config, kinds[:num_layers]) if num_layers < len(kinds) else cfg.config
        values = layer_kinds.with_tower_layers(values, config, tower) if missing else values
        found = rehearse(replace(cfg, config=values))
        return found.allocated_bytes + missing * found.trace.loaded(num_layers)

    first = kinds[: 3 * period]
    values = layer_kinds.with_layers(cfg.config, first)
    is_repeated = layer_kinds.stands_for(values, cfg.config, kinds, range(len(first)))
    if len(kinds) <= 3 * period or not is_repeated:
        return allocated(len(kinds))
    few, more = allocated(2 * period), allocated(3 * period)
    return few + (more - few) * (len(kinds) - 2 * period) // period
