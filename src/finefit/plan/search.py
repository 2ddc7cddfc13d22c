"""Which exact levers to pull: the fastest of what fits, since the card is a budget to spend; the most frugal where nothing does.

Candidates are compared by quick rehearsals of a few layers; the chosen one is rehearsed in full, and gives way to the next if that says more."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from finefit.artifacts.records import Levers
from finefit.plan.look import Look, Looker
from finefit.rehearse.splice import REHEARSED
from finefit.spec.schema import Levers as AskedLevers

_CHUNK, _SMALL_CHUNK = 1024, 256
_MOST_CHUNKS = 256
_TILES = 8
ASKED = "asked for"
_WORTH = 0.995
"""A candidate replaces a simpler one when it takes at most this share of its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Freedom:
    """The values that each lever may take, the plainest first; one value where the user has fixed it."""

    micro_batch: tuple[int, ...]
    recompute: tuple[int, ...]
    keep_attention: tuple[bool, ...]
    loss_chunk: tuple[int | None, ...]
    offload: tuple[bool, ...]
    mlp_tiles: tuple[int, ...]
    adapter_inputs: str
    kernels: Literal["torch", "fused"]
    kernels_reason: str
    update: Literal["after", "inside"] = "after"
    compile: bool = False
    packing: bool = False
    packing_reason: str = "not asked for"
    fixed: frozenset[str] = frozenset()
    """Names of the levers that the user has fixed."""

    def most_frugal(self) -> Levers:
        return self.levers(self.micro_batch[0], self.recompute[-1], is_frugal=True)

    def levers(self, micro_batch: int, recompute: int, *, is_frugal: bool = False) -> Levers:
        """With the loss in chunks where that is free to choose; `is_frugal` pulls whatever saves memory."""
        return Levers(
            micro_batch=micro_batch,
            recompute=recompute,
            keep_attention=self.keep_attention[0],
            loss_chunk=self.loss_chunk[-1] if is_frugal else self.loss_chunk[len(self.loss_chunk) // 2],
            offload=self.offload[-1] and recompute > 0 if is_frugal else self.offload[0],
            mlp_tiles=self.mlp_tiles[-1] if is_frugal else self.mlp_tiles[0],
            adapter_inputs="bf16" if self.adapter_inputs == "bf16" else "fp32",
            packing=self.packing,
            kernels=self.kernels,
            update=self.update,
            compile=self.compile,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    look: Look
    fits: bool
    reasons: dict[str, str]


def freedom_of(
    asked: AskedLevers,
    *,
    rows: int,
    supervised: int,
    num_layers: int,
    precision: str,
    device: str,
    has_experts: bool = False,
) -> Freedom:
    """`rows` of one optimizer step on one card, each with at most `supervised` tokens that have logits. `has_experts`: MLPs that are left whole."""
    return Freedom(
        micro_batch=_sizes(asked, rows),
        recompute=_depths(num_layers)
        if asked.recompute == "auto"
        else ({"none": 0, "all": num_layers}.get(str(asked.recompute), asked.recompute),),  # type: ignore[arg-type]
        keep_attention=(False, True) if asked.keep_attention == "auto" else (asked.keep_attention,),
        loss_chunk=_chunks(supervised)
        if asked.loss_chunk == "auto"
        else (None if asked.loss_chunk == "none" else asked.loss_chunk,),
        offload=((False, True) if device == "cuda" else (False,))
        if asked.offload == "auto"
        else (asked.offload == "inputs",),
        mlp_tiles=((1,) if has_experts else (1, _TILES)) if asked.mlp_tiles == "auto" else (asked.mlp_tiles,),
        adapter_inputs=("fp32" if precision == "fp32" else "bf16")
        if asked.adapter_inputs == "auto"
        else asked.adapter_inputs,
        kernels="fused" if asked.kernels == "auto" else asked.kernels,
        kernels_reason="the same numbers with fewer and larger operations",
        update="after" if asked.update == "auto" else asked.update,
        compile=asked.compile,
        fixed=frozenset(
            name for name, field in AskedLevers.model_fields.items() if getattr(asked, name) != field.default
        ),
    )


def _chunks(supervised: int) -> tuple[int | None, ...]:
    """Of very many tokens larger ones: each chunk reads the whole head."""
    least = 1 << max(0, (supervised // _MOST_CHUNKS).bit_length())
    return (None, max(_CHUNK, least), max(_SMALL_CHUNK, least))


def _sizes(asked: AskedLevers, rows: int) -> tuple[int, ...]:
    """An update inside backward needs the whole step at once."""
    if asked.micro_batch != "auto":
        return (min(asked.micro_batch, rows),)
    return (rows,) if asked.update == "inside" else _micro_batches(rows)


def _micro_batches(rows: int) -> tuple[int, ...]:
    """Doubling, and the whole step; beyond 64 rows a card is busy anyway."""
    doubled = [1 << n for n in range(7) if 1 << n < rows]
    return (*doubled, rows) if rows <= 64 else tuple(doubled)


def _depths(num_layers: int) -> tuple[int, ...]:
    """Numbers of recomputed layers whose runs are long enough to be rehearsed by a few of them."""
    return tuple(
        k for k in range(num_layers + 1) if k in (0, num_layers) or (k >= REHEARSED and num_layers - k >= REHEARSED)
    )


def choose(looker: Looker, freedom: Freedom) -> Choice:
    """Candidates in the order of their speed; the first whose full rehearsal fits."""
    for levers in _candidates(looker, freedom):
        verified = looker.look(levers, is_quick=False)
        if looker.fits(verified):
            return Choice(look=verified, fits=True, reasons=_reasons(looker, freedom, verified))
    last = looker.look(freedom.most_frugal(), is_quick=False)
    return Choice(look=last, fits=looker.fits(last), reasons=_reasons(looker, freedom, last))


def _candidates(looker: Looker, freedom: Freedom) -> Iterator[Levers]:
    """The fastest first, refined; then what needs a little less, again the fastest first; last the dearer levers."""
    plain = sorted(_by_micro_batch(looker, freedom), key=lambda look: look.step_seconds)
    if plain:
        best = _refined(looker, freedom, plain[0])
        yield best.levers
        others = [*_a_little_less(looker, freedom, best), *(_refined(looker, freedom, look) for look in plain[1:3])]
        yield from (look.levers for look in sorted(others, key=lambda look: look.step_seconds))
        yield from (
            replace(look.levers, recompute=freedom.recompute[-1], loss_chunk=freedom.loss_chunk[-1]) for look in plain
        )
    yield _frugal(looker, freedom)


def _by_micro_batch(looker: Looker, freedom: Freedom) -> Iterator[Look]:
    """Each with as few recomputed layers as fit, up to the first that does not fit at all."""
    best = float("inf")
    for micro_batch in freedom.micro_batch:
        found = _fewest_recomputed(looker, freedom, micro_batch)
        if found is None:
            return
        if found.step_seconds < _WORTH * best:  # a larger micro-batch has to be worth its memory
            yield found
        best = min(best, found.step_seconds)


def _a_little_less(looker: Looker, freedom: Freedom, best: Look) -> Iterator[Look]:
    deeper = [k for k in freedom.recompute if k > best.levers.recompute]
    yield from (looker.look(replace(best.levers, recompute=k)) for k in deeper[:3])


def _fewest_recomputed(looker: Looker, freedom: Freedom, micro_batch: int) -> Look | None:
    """Memory falls with every layer that is recomputed, so the border is found by halving."""
    depths = freedom.recompute
    if (all_kept := looker.look(freedom.levers(micro_batch, depths[0]))) and looker.fits(all_kept):
        return all_kept
    chunks = dict.fromkeys((freedom.levers(1, 0).loss_chunk, freedom.loss_chunk[-1]))
    for chunk in chunks:
        plain = replace(freedom.levers(micro_batch, depths[-1]), loss_chunk=chunk)
        if looker.fits(looker.look(plain)):
            return _border(looker, plain, depths)
    return None


def _border(looker: Looker, levers: Levers, depths: Sequence[int]) -> Look:
    """With the last of `depths` it fits, with the first it does not."""
    low, high = 0, len(depths) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if looker.fits(looker.look(replace(levers, recompute=depths[middle]))):
            high = middle
        else:
            low = middle
    return looker.look(replace(levers, recompute=depths[high]))


def _refined(looker: Looker, freedom: Freedom, found: Look) -> Look:
    """Whole logits where there is room for them, or fewer at once where that spares a layer; attention kept where that is cheaper than
    doing it again."""
    levers = found.levers
    others = [replace(levers, loss_chunk=freedom.loss_chunk[0])]
    if levers.recompute:
        others.append(_border(looker, replace(levers, loss_chunk=freedom.loss_chunk[-1]), freedom.recompute).levers)
    for other in map(looker.look, others):
        if looker.fits(other) and other.step_seconds < _WORTH * found.step_seconds:
            found = other
    kept = (
        looker.look(replace(found.levers, keep_attention=freedom.keep_attention[-1]))
        if found.levers.recompute
        else found
    )
    return kept if looker.fits(kept) and kept.step_seconds < _WORTH * found.step_seconds else found


def _frugal(looker: Looker, freedom: Freedom) -> Levers:
    """The dearer levers one after the other, until it fits or there are no more."""
    plain = replace(freedom.levers(freedom.micro_batch[0], freedom.recompute[-1]), loss_chunk=freedom.loss_chunk[-1])
    offloaded = replace(plain, offload=freedom.offload[-1] and plain.recompute > 0)
    tiled = replace(plain, mlp_tiles=freedom.mlp_tiles[-1])
    for levers in (offloaded, tiled):
        if looker.fits(looker.look(levers)):
            return levers
    return freedom.most_frugal()


def _reasons(looker: Looker, freedom: Freedom, look: Look) -> dict[str, str]:
    levers, searched = look.levers, "searched: "
    reasons = {
        "micro_batch": _micro_batch_reason(looker, freedom, look),
        "recompute": "no layer need be"
        if not levers.recompute
        else "the fewest that fit"
        if levers.recompute < looker.num_layers
        else "all are needed",
        "keep_attention": "saves more time than it costs memory"
        if levers.keep_attention
        else "not worth its memory here",
        "loss_chunk": "all logits at once fit"
        if levers.loss_chunk is None
        else "the room serves better elsewhere than for logits",
        "offload": "needed to fit" if levers.offload else "not needed",
        "mlp_tiles": "needed to fit" if levers.mlp_tiles > 1 else "not needed",
    }
    found = {name: searched + reason for name, reason in reasons.items()}
    found["adapter_inputs"] = f"the products are taken in {look.scene.precision}"
    found["packing"] = freedom.packing_reason
    found["kernels"] = freedom.kernels_reason
    found["update"] = found["compile"] = "not asked for"
    return found | dict.fromkeys(freedom.fixed, ASKED)


def _micro_batch_reason(looker: Looker, freedom: Freedom, look: Look) -> str:
    if not looker.fits(look):
        return "the smallest, since nothing fits"
    return (
        "the whole step at once fits"
        if look.levers.micro_batch == freedom.micro_batch[-1]
        else "the fastest of those that fit"
    )
