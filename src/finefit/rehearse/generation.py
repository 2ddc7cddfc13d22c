"""Answers on fake tensors: the same two calls that an evaluation makes, all prompts at once and then one token after another. Every prompt shows as
many images of the scene as it has room for.

The cache grows by a copy with every token: old and new keys of one layer exist side by side, and what is given back is a little too small for the
next copy. So the peak is found where the cache is longest, and what the allocator keeps depends on how it came there: it is grown in several steps.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache, PretrainedConfig

from finefit.artifacts.records import Levers
from finefit.evaluate.decoding import Context, behold, follow, prefill
from finefit.evaluate.likelihood import LOGITS_AT_ONCE
from finefit.model.attention import can_pack
from finefit.objective.batch import Batch, Extra
from finefit.rehearse.allocator import replay
from finefit.rehearse.clock import Rates, instant_seconds
from finefit.rehearse.depth import cut, layer_kinds, names_layers, period_of
from finefit.rehearse.fake_model import on_meta, put_fakes_in_place, read_config
from finefit.rehearse.fused import dense_shadow
from finefit.rehearse.kernels import kernels_for
from finefit.rehearse.recorder import Recorder
from finefit.rehearse.rehearsal import untraceable
from finefit.rehearse.scene import Scene
from finefit.rehearse.showing import fitting, shown
from finefit.rehearse.tower import cut_tower, tower_cuts, tower_kinds
from finefit.rehearse.trace import Trace
from finefit.step.forward import bind
from finefit.step.levers import pull

PROMPTS = "prompts"
GENERATION = "generation"
_GROWTHS = 12
"""Steps in which a cache is brought to its length; in truth there are as many as tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What a batch takes. `new_tokens` of each row, of which the last step was executed."""

    reserved_bytes: int
    """On a CPU what is allocated."""
    allocated_bytes: int
    trace: Trace
    new_tokens: int

    def seconds(self, rates: Rates) -> float:
        return instant_seconds(self.trace, PROMPTS, rates) + self.new_tokens * instant_seconds(
            self.trace, GENERATION, rates
        )


def rehearse_generation(
    scene: Scene, *, rows: int, prompt_tokens: int, new_tokens: int, mlp_tiles: int = 1, expandable: bool = True
) -> int:
    """Reserved bytes; on a CPU what is allocated."""
    shape = {"rows": rows, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "mlp_tiles": mlp_tiles}
    return generate(scene, **shape, expandable=expandable).reserved_bytes


def generate(
    scene: Scene, *, rows: int, prompt_tokens: int, new_tokens: int, mlp_tiles: int = 1, expandable: bool = True
) -> Generated:
    extra = _extra(scene, rows, prompt_tokens)
    if extra is not None:
        trace = _acted(
            scene,
            lambda model, recorder: _answer_seeing(model, recorder, rows, prompt_tokens, new_tokens, extra),
            mlp_tiles,
        )
        return _weighed(scene, trace, new_tokens, expandable=expandable)
    answer = _answer if can_pack(read_config(scene.config), prompt_tokens + new_tokens) is None else _answer_padded_left
    trace = _acted(scene, lambda model, recorder: answer(model, recorder, rows, prompt_tokens, new_tokens), mlp_tiles)
    return _weighed(scene, trace, new_tokens, expandable=expandable)


def _extra(scene: Scene, rows: int, tokens: int) -> Extra | None:
    """Not to be called among fake tensors."""
    return shown(scene.config, rows=rows, tokens=tokens, grids=fitting(scene.config, scene.grids, tokens))


def _faked(extra: Extra) -> Extra:
    return extra.moved(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))


def read_through(
    scene: Scene, *, rows: int, tokens: int, counted: int, mlp_tiles: int = 1, expandable: bool = True
) -> Generated:
    """Rows of so many tokens pass once, and the likelihood of `counted` tokens of each is asked for."""
    extra = _extra(scene, rows, tokens)
    trace = _acted(scene, lambda model, _: _read(model, rows, tokens, counted, extra), mlp_tiles)
    return _weighed(scene, trace, 0, expandable=expandable)


def _acted(scene: Scene, act: Callable[[nn.Module, Recorder], None], mlp_tiles: int) -> Trace:
    """What is done with a model that was loaded for answers."""
    kernels = kernels_for(scene.device, scene.capability, scene.precision)
    model = on_meta(scene, kernels, answers=True).eval()
    recorder = Recorder(kernels)
    with FakeTensorMode(allow_non_fake_inputs=True), recorder, torch.no_grad():
        put_fakes_in_place(model, recorder, is_loaded=scene.device == "cuda")
        pull(model, Levers(micro_batch=1, mlp_tiles=mlp_tiles), dense=dense_shadow)
        recorder.phase = PROMPTS
        try:
            act(model, recorder)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise untraceable(model, recorder, error) from error
    return recorder.finish()


def _weighed(scene: Scene, trace: Trace, new_tokens: int, *, expandable: bool) -> Generated:
    found = replay(trace.stream(), expandable=expandable)
    reserved = found.reserved_bytes if scene.device == "cuda" else found.allocated_bytes
    return Generated(reserved_bytes=reserved, allocated_bytes=found.allocated_bytes, trace=trace, new_tokens=new_tokens)


def _read(model: nn.Module, rows: int, tokens: int, counted: int, extra: Extra | None) -> None:
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


def _answer(model: nn.Module, recorder: Recorder, rows: int, prompt_tokens: int, new_tokens: int) -> None:
    """Prompts of several rows are of unequal length: what padding leaves in the cache is masked."""
    width = prompt_tokens - 1
    ids_BT, lengths = torch.ones(rows, width, dtype=torch.long), [width, *[max(0, width - 1)] * (rows - 1)]
    _go_on(model, recorder, prefill(model, ids_BT, lengths, max_new_tokens=new_tokens), rows, new_tokens)


def _answer_seeing(
    model: nn.Module, recorder: Recorder, rows: int, prompt_tokens: int, new_tokens: int, extra: Extra
) -> None:
    """Whole prompts pass with what they show, which has gone once they are read."""
    ids_BT, lengths = (
        torch.ones(rows, prompt_tokens, dtype=torch.long),
        [prompt_tokens, *[max(1, prompt_tokens - 1)] * (rows - 1)],
    )
    _go_on(model, recorder, behold(model, ids_BT, lengths, _faked(extra), max_new_tokens=new_tokens), rows, new_tokens)


def _go_on(model: nn.Module, recorder: Recorder, context: Context, rows: int, new_tokens: int) -> None:
    tokens_B = torch.ones(rows, dtype=torch.long)
    recorder.phase = GENERATION
    follow(model, context, tokens_B)
    _grow(context.cache, new_tokens - 2)
    context.slots += max(0, new_tokens - 2)
    _clear_costs(recorder)
    if new_tokens > 1:
        follow(model, context, tokens_B)


def _answer_padded_left(model: nn.Module, recorder: Recorder, rows: int, prompt_tokens: int, new_tokens: int) -> None:
    """As transformers' own loop does it: all prompts under a mask, logits of the last position copied to fp32."""
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
    """Of the growth, which stands for steps that are counted by the last one."""
    for table in (recorder.trace.costs, recorder.trace.operations):
        for key in [key for key in table if key[0] == GENERATION]:
            del table[key]


def _grow(cache: DynamicCache, tokens: int) -> None:
    """By so many tokens, layer after layer as a step does it."""
    for begin, end in pairwise(max(0, tokens) * at // _GROWTHS for at in range(_GROWTHS + 1)):
        for layer in cache.layers if end > begin else ():
            if isinstance(getattr(layer, "keys", None), Tensor):  # others keep a state of one size
                layer.update(_empty(layer.keys, end - begin), _empty(layer.values, end - begin))


def _empty(like: Tensor, tokens: int) -> Tensor:
    rows, heads, _, width = like.shape
    return like.new_empty(rows, heads, tokens, width)


def allocated_by_depth(scene: Scene, rehearse: Callable[[Scene], Generated]) -> int:
    """The most that is allocated, at the price of a few layers: those beyond them take as much each, of a vision tower their weights alone. Enough
    to search by; what is chosen is rehearsed whole."""
    config = read_config(scene.config)
    kinds = layer_kinds(config)
    period, tower = period_of(kinds), _few_of_tower(scene, config)
    missing = len(tower_kinds(config)) - len(tower)

    def allocated(num_layers: int) -> int:
        values = cut(scene.config, kinds[:num_layers]) if num_layers < len(kinds) else scene.config
        found = rehearse(replace(scene, config=cut_tower(values, config, tower) if missing else values))
        return found.allocated_bytes + missing * found.trace.loaded(num_layers)

    if len(kinds) <= 3 * period:
        return allocated(len(kinds))
    few, more = allocated(2 * period), allocated(3 * period)
    return few + (more - few) * (len(kinds) - 2 * period) // period


def _few_of_tower(scene: Scene, config: PretrainedConfig) -> list[str]:
    """Kinds of layers of which every other one has a like; all where single ones may carry adapters."""
    kinds = tower_kinds(config)
    return kinds if names_layers(scene.tuning) else next(tower_cuts(kinds))[1]
