"""SHIRG on a masked-diffusion language model, after LaViDa: the second view of an image keeps its best patches.

The global view is the whole image, with patches pooled 2 x 2. The foveal view keeps the single patches that score best,
in raster order. Both together have the same number of tokens for every image, so image and question are read once and
all steps of an answer reuse them.

Image and question attend to one another; the answer attends to them and to itself, in both directions. In training the
answer follows them twice, under a random mask and under its inverse, and neither copy attends to the other. This equals
a batch of twice the rows, with image and question computed once.

B rows, P patches of a view, C channels of the tower, H hidden, S image tokens, T text tokens, L = S + T, A answer
tokens of both copies, D of a head.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from transformers import SiglipVisionConfig, SiglipVisionModel

from finefit.objective.batch import CustomRow

READ, FIRST, SECOND, UNSEEN = range(4)
"""The parts of a row: image and question, the two copies of the answer, and what is unseen (padding, dropped
tokens)."""
_LEAST = 1e-3
"""LLaDA's smallest probability that a token is masked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """The defaults are those of LLaDA-8B."""

    vocabulary: int = 126464
    hidden: int = 4096
    mlp: int = 12288
    layers: int = 32
    heads: int = 32
    theta: float = 500000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The `config` of the spec."""

    vision: Mapping[str, Any] = field(default_factory=dict)
    """Settings of transformers' SiglipVisionConfig."""
    language: Language = Language()
    side: int = 448
    """The side length of a view in pixels."""
    keep: int = 724
    """The number of patches that the foveal view keeps."""
    fovea: Literal["centre", "whole"] = "centre"
    """The largest square in the middle of the image, or all of it squeezed into a square, as in the global view."""
    score: Literal["base", "entropy", "edge", "full", "random"] = "base"
    merge: float | None = None
    """A patch that is left out is averaged into a kept one if their cosine is at least this."""
    token_dropout: float = 0.0
    """The share of image tokens that nothing attends to, drawn anew for every row; in training only."""
    lead: int = 0
    """The number of text tokens before the image: those that open the chat template."""
    answer_tokens: int = 32
    """Shorter answers are filled up with the end token, so that the number of masks does not reveal an answer's
    length."""
    mask_token: int = 126336
    end_token: int = 126081
    unmask: int = 1
    """The number of answer tokens that are decided at a time."""

    def __post_init__(self) -> None:
        for name, choices in (("score", tuple(SCORES)), ("fovea", ("centre", "whole"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} {getattr(self, name)} is not one of {', '.join(choices)}")
        if not 0 <= self.token_dropout < 1:
            raise ValueError(f"token_dropout {self.token_dropout} is not a share below 1")
        if self.side % (2 * self.patch):
            two = f"two patches of {self.patch} pixels"
            raise ValueError(f"side {self.side} is not a multiple of {two}, so patches cannot be pooled 2 x 2")
        if not 0 < self.keep <= self.num_patches:
            there = f"the {self.num_patches} patches that a view of {self.side} pixels has"
            raise ValueError(f"keep {self.keep} of {there}")

    @property
    def patch(self) -> int:
        return int(self.vision.get("patch_size", 16))  # what SiglipVisionConfig takes

    @property
    def num_patches(self) -> int:
        return (self.side // self.patch) ** 2

    @property
    def num_seen(self) -> int:
        """The number of image tokens of every row; 980 in LaViDa."""
        return self.num_patches // 4 + self.keep


def build(config: Mapping[str, Any]) -> "Shirg":
    return Shirg(Settings(**{**config, "language": Language(**config.get("language", {}))}))


def views(image: PIL.Image.Image, side: int, fovea: str) -> NDArray[np.uint8]:
    """2 x 3 x side x side: global, foveal."""
    width, height = image.size
    square = min(width, height)
    left, top = (width - square) // 2, (height - square) // 2
    middle = image.crop((left, top, left + square, top + square)) if fovea == "centre" else image
    both = [np.asarray(view.resize((side, side), PIL.Image.Resampling.BICUBIC)) for view in (image, middle)]
    return np.stack(both).transpose(0, 3, 1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchFeatures:
    """The features that patches of the foveal view are scored by."""

    attention_BPP: Tensor
    """Attention of the tower's last layer, averaged over its heads; each row is a query."""
    features_BPC: Tensor
    similarity_BP: Tensor
    """Cosine of the projected patch with the mean of the question's embeddings."""
    noise_BP: Tensor

    def received(self) -> Tensor:
        """The attention that a patch gets from all others. SigLIP has no class token whose attention could be used."""
        return scaled(self.attention_BPP.mean(dim=1))

    def entropy(self) -> Tensor:
        """The entropy of a patch's attention: highest if it attends evenly to everything."""
        spread_BPP: Tensor = torch.special.entr(self.attention_BPP)
        return spread_BPP.sum(dim=2)

    def edge(self) -> Tensor:
        """A Sobel filter over the grid of mean features. The border is continued, so that it does not count as an
        edge."""
        side = round(self.similarity_BP.shape[1] ** 0.5)
        plane = functional.pad(self.features_BPC.mean(dim=2).view(-1, 1, side, side), (1, 1, 1, 1), mode="replicate")
        sobel = plane.new_tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]])
        across, down = (functional.conv2d(plane, kernel.view(1, 1, 3, 3)) for kernel in (sobel, sobel.T))
        return scaled(torch.hypot(across, down).flatten(1))

    def redundancy(self) -> Tensor:
        """The mean cosine with all patches."""
        direction_BPC = functional.normalize(self.features_BPC, dim=2)
        return scaled((direction_BPC * direction_BPC.mean(dim=1, keepdim=True)).sum(dim=2))

    def centre(self) -> Tensor:
        """1 in the middle, falling to one half in the corners."""
        side = round(self.similarity_BP.shape[1] ** 0.5)
        line = torch.linspace(-1, 1, side, device=self.similarity_BP.device)
        return (1 - torch.hypot(line[:, None], line[None, :]) / (2 * 2**0.5)).flatten()[None]


def scaled(scores_BP: Tensor) -> Tensor:
    """Scaled to 0..1 within each row, so that weights mean what they say. Rounding differences of equal values are not
    amplified."""
    lowest, highest = scores_BP.amin(dim=1, keepdim=True), scores_BP.amax(dim=1, keepdim=True)
    return (scores_BP - lowest) / torch.maximum(highest - lowest, 1e-3 * highest.abs()).clamp_min(1e-12)


def base(patches: PatchFeatures) -> Tensor:
    return 0.7 * patches.received() + 0.3 * scaled(patches.similarity_BP)


def entropy(patches: PatchFeatures) -> Tensor:
    """Like base, but the tenth of the patches that attend most evenly to everything comes last."""
    spread_BP = patches.entropy()
    limit_B1 = spread_BP.sort(dim=1).values[:, [int(0.9 * spread_BP.shape[1])]]
    return base(patches) - 2.0 * (spread_BP > limit_B1)


def edge(patches: PatchFeatures) -> Tensor:
    return base(patches) + 0.25 * patches.edge()


def full(patches: PatchFeatures) -> Tensor:
    """No term is below zero, so that less weight far from the middle never raises a patch."""
    novelty_BP = 1 - patches.redundancy()
    sum_BP = 0.4 * patches.received() + 0.25 * scaled(patches.similarity_BP) + 0.1 * novelty_BP + 0.25 * patches.edge()
    return sum_BP * patches.centre()


def random(patches: PatchFeatures) -> Tensor:
    return patches.noise_BP


SCORES: Mapping[str, Callable[[PatchFeatures], Tensor]] = {f.__name__: f for f in (base, entropy, edge, full, random)}


def best(scores_BP: Tensor, keep: int) -> Tensor:
    """Indices of the best patches in raster order; among equals the first."""
    return scores_BP.argsort(dim=1, descending=True, stable=True)[:, :keep].sort(dim=1).values


def taken(features_BPC: Tensor, kept_BK: Tensor) -> Tensor:
    return features_BPC.gather(1, kept_BK[:, :, None].expand(-1, -1, features_BPC.shape[2]))


def merged(features_BPC: Tensor, kept_BK: Tensor, least: float) -> Tensor:
    """The kept patches, each averaged with the left-out patches that are most similar to it, if they are similar
    enough."""
    kept_BKC = taken(features_BPC, kept_BK)
    with torch.no_grad():
        direction_BPC, kept_direction_BKC = (functional.normalize(one, dim=2) for one in (features_BPC, kept_BKC))
        cosine_BPK, nearest_BP = (direction_BPC @ kept_direction_BKC.mT).max(dim=2)
        is_left_BP = torch.ones_like(cosine_BPK).scatter(1, kept_BK, 0.0)
        joins_BP = is_left_BP * (cosine_BPK >= least)
        share_BKP = functional.one_hot(nearest_BP, kept_BK.shape[1]).mT * joins_BP[:, None, :]
    dtype = features_BPC.dtype
    return (kept_BKC + share_BKP.to(dtype) @ features_BPC) / (1 + share_BKP.sum(dim=2, keepdim=True)).to(dtype)


class TransformerBlock(nn.Module):
    """A layer of LLaDA, with its names: a Llama layer that attends in both directions."""

    def __init__(self, made: Language) -> None:
        super().__init__()
        self.heads = made.heads
        self.attn_norm, self.ff_norm = (nn.RMSNorm(made.hidden, eps=1e-5) for _ in range(2))
        self.q_proj, self.k_proj, self.v_proj, self.attn_out = (
            nn.Linear(made.hidden, made.hidden, bias=False) for _ in range(4)
        )
        self.ff_proj, self.up_proj = (nn.Linear(made.hidden, made.mlp, bias=False) for _ in range(2))
        self.ff_out = nn.Linear(made.mlp, made.hidden, bias=False)

    def forward(
        self, hidden_BLH: Tensor, turn: Tensor, sees_B1LL: Tensor, before: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """`before` are the keys and values of what was read already, which precede those computed here."""
        normed_BLH = self.attn_norm(hidden_BLH)
        query, (key, value) = turned(self._heads(self.q_proj(normed_BLH)), turn), self.remembered(normed_BLH, turn)
        if before is not None:
            key, value = torch.cat([before[0], key], dim=2), torch.cat([before[1], value], dim=2)
        found = functional.scaled_dot_product_attention(query, key, value, attn_mask=sees_B1LL)
        hidden_BLH = hidden_BLH + self.attn_out(found.transpose(1, 2).flatten(2))
        normed_BLH = self.ff_norm(hidden_BLH)
        changed_BLH: Tensor = self.ff_out(functional.silu(self.ff_proj(normed_BLH)) * self.up_proj(normed_BLH))
        return hidden_BLH + changed_BLH

    def remembered(self, normed_BLH: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values from the normalised input of a layer."""
        return turned(self._heads(self.k_proj(normed_BLH)), turn), self._heads(self.v_proj(normed_BLH))

    def _heads(self, flat_BLH: Tensor) -> Tensor:
        return flat_BLH.view(*flat_BLH.shape[:2], self.heads, -1).transpose(1, 2)


def turned(heads: Tensor, turn: Tensor) -> Tensor:
    low, high = heads.float().chunk(2, dim=-1)
    return (heads.float() * turn[0] + torch.cat([-high, low], dim=-1) * turn[1]).to(heads.dtype)


class Transformer(nn.Module):
    def __init__(self, made: Language) -> None:
        super().__init__()
        self.made = made
        self.wte = nn.Embedding(made.vocabulary, made.hidden)
        self.blocks = nn.ModuleList(TransformerBlock(made) for _ in range(made.layers))
        self.ln_f = nn.RMSNorm(made.hidden, eps=1e-5)
        self.ff_out = nn.Linear(made.hidden, made.vocabulary, bias=False)
        nn.init.normal_(self.wte.weight, std=0.02)

    def turn(self, positions_BL: Tensor) -> Tensor:
        """Cosines and sines of the rotary embedding, 2 x B x 1 x L x D."""
        width = self.made.hidden // self.made.heads
        pace = self.made.theta ** -(torch.arange(0, width, 2, device=positions_BL.device, dtype=torch.float32) / width)
        angle = (positions_BL[:, None, :, None] * pace).repeat(1, 1, 1, 2)
        return torch.stack([angle.cos(), angle.sin()])

    def forward(self, hidden_BLH: Tensor, positions_BL: Tensor, parts_BL: Tensor) -> Tensor:
        turn, sees_B1LL = self.turn(positions_BL), sees(parts_BL, parts_BL)
        for block in self.blocks:
            hidden_BLH = block(hidden_BLH, turn, sees_B1LL)
        return hidden_BLH

    def logits(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.ff_out(self.ln_f(hidden))
        return found


def sees(looking_BL: Tensor, seen_BL: Tensor) -> Tensor:
    """Every token attends to what is read and to its own part. So no row of the mask is empty; unseen tokens attend but
    are never attended to."""
    looking_BL1, seen_B1L = looking_BL[:, :, None], seen_BL[:, None, :]
    return ((seen_B1L == READ) | (seen_B1L == looking_BL1))[:, None]


def laid(row: CustomRow, made: Settings, chance: np.random.Generator) -> dict[str, NDArray[Any]]:
    """The text of a row as the model gets it: `ids` and `parts` of its T tokens; `positions` of all L tokens; `places`
    of the answer's A copied tokens among them, with their `targets` and `weights`, 0 where nothing is to be predicted.
    The answer reaches from the first supervised token to the last, and is filled up; a prompt has none.

    A token's weight is one over its probability to be masked, as in LLaDA's loss, and rows weigh the same however long
    their answers are; a row is the mean of its copies, as far as they are masked."""
    supervised = np.flatnonzero(row.supervised)
    first, last = (supervised[0], supervised[-1] + 1) if len(supervised) else (len(row.tokens), len(row.tokens))
    fill = 0 if row.is_prompt else max(0, made.answer_tokens - (last - first))
    answer_A = np.concatenate([row.tokens[first:last], np.full(fill, made.end_token)])
    is_told_A = np.concatenate([row.supervised[first:last], np.full(fill, True)])
    is_masked_A, probability = np.zeros_like(is_told_A), 1.0
    if is_told_A.any():
        is_masked_A[is_told_A], probability = drawn(int(is_told_A.sum()), chance)
    copies = ((is_masked_A, probability), (is_told_A & ~is_masked_A, 1 - probability))
    whole = is_told_A.sum() * sum(bool(is_masked.any()) for is_masked, _ in copies)
    weights = [is_masked / (whole * p) if is_masked.any() else np.zeros(len(answer_A)) for is_masked, p in copies]
    masked = [np.where(is_masked, made.mask_token, answer_A) for is_masked, _ in copies]
    # The image comes first in memory and stands behind `lead` tokens: attention knows the order by positions alone.
    # Both copies of an answer stand in the same place.
    lead, seen, behind = min(made.lead, first), made.num_seen, made.num_seen + first + np.arange(len(answer_A))
    positions = [lead + np.arange(seen), np.arange(lead), seen + np.arange(lead, first), behind, behind]
    return {
        "ids": np.concatenate([row.tokens[:first], *masked]),
        "positions": np.concatenate(positions),
        "parts": np.repeat([READ, FIRST, SECOND], [first, len(answer_A), len(answer_A)]),
        "places": seen + first + np.arange(2 * len(answer_A)),
        "targets": np.tile(answer_A, 2),
        "weights": np.concatenate(weights).astype(np.float32),
    }


def drawn(num: int, chance: np.random.Generator) -> tuple[NDArray[np.bool_], float]:
    """Which of this many tokens the first copy masks, and the probability that it masks a given one.

    That probability is LLaDA's p(t), with the correction needed for each copy to mask at least one token if there are
    two."""
    share = _LEAST + (1 - _LEAST) * chance.random()
    is_masked = chance.random(num) < share
    one = chance.integers(num)
    if not is_masked.any():
        is_masked[one] = True
    elif is_masked.all() and num > 1:
        is_masked[one] = False
    return is_masked, 1.0 if num == 1 else share + ((1 - share) ** num - share**num) / num


def padded(rows: Sequence[NDArray[Any]], value: float) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.from_numpy(np.stack([np.pad(row, (0, width - len(row)), constant_values=value) for row in rows]))


class Shirg(nn.Module):
    views = 1
    """The number of images per row; both views are made from that image."""
    towers: Mapping[str, tuple[str, ...]] = {
        "vision": ("vision",),
        "projector": ("projector",),
        "language": ("transformer",),
    }

    def __init__(self, made: Settings) -> None:
        super().__init__()
        self.made = made
        config = SiglipVisionConfig(**made.vision, vision_use_head=False)
        self.vision = SiglipVisionModel(config)
        self.vision.post_layernorm = nn.Identity()  # the language model is given what the last layer gives
        hidden = made.language.hidden
        self.projector = nn.Sequential(nn.Linear(config.hidden_size, hidden), nn.GELU(), nn.Linear(hidden, hidden))
        self.transformer = Transformer(made.language)
        linear = [name for name, module in self.named_modules() if isinstance(module, nn.Linear)]
        self.adaptable = tuple(name for name in linear if name != "transformer.ff_out")
        towers = {"vision.encoder.layers": config.num_hidden_layers, "transformer.blocks": made.language.layers}
        self.layers = tuple(f"{tower}.{n}" for tower, count in towers.items() for n in range(count))

    def inputs(self, rows: Sequence[CustomRow]) -> dict[str, Tensor]:
        made = self.made
        chances = [np.random.default_rng(row.seed) for row in rows]
        texts = [laid(row, made, chance) for row, chance in zip(rows, chances, strict=True)]
        fills = {"ids": made.end_token, "parts": UNSEEN}
        noise_BP = np.stack([chance.random(made.num_patches, dtype=np.float32) for chance in chances])
        is_dropped_BS = np.stack([chance.random(made.num_seen) < made.token_dropout for chance in chances])
        pixels = np.stack([views(row.images[0], made.side, made.fovea) for row in rows])
        return {
            "pixels": torch.from_numpy(pixels),
            "noise": torch.from_numpy(noise_BP),
            "image_parts": torch.from_numpy(np.where(is_dropped_BS, UNSEEN, READ)),
            **{name: padded([text[name] for text in texts], fills.get(name, 0)) for name in texts[0]},
        }

    def count(self, inputs: Mapping[str, Tensor]) -> int:
        return len(inputs["ids"])

    def loss(self, inputs: Mapping[str, Tensor]) -> Tensor:
        hidden_BLH = self.transformer(*self._read(inputs))
        places_BAH = inputs["places"][:, :, None].expand(-1, -1, hidden_BLH.shape[2])
        logits_BAV = self.transformer.logits(hidden_BLH.gather(1, places_BAH))
        surprise = functional.cross_entropy(
            logits_BAV.flatten(0, 1).float(), inputs["targets"].flatten(), reduction="none"
        )
        return (surprise * inputs["weights"].flatten()).sum()

    def _read(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Embeddings, positions and parts of whole rows: image, then text."""
        text_BTH, image_BSH = self.transformer.wte(inputs["ids"]), self.seen(inputs)
        image_parts_BS = inputs["image_parts"] if self.training else torch.full_like(inputs["image_parts"], READ)
        hidden_BLH = torch.cat([image_BSH.to(text_BTH.dtype), text_BTH], dim=1)
        return hidden_BLH, inputs["positions"], torch.cat([image_parts_BS, inputs["parts"]], dim=1)

    def seen(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The image tokens of both views, projected: B x S x H."""
        before_BVPC, features_BVPC = self._looked_at(inputs["pixels"])
        grid = self.made.side // self.made.patch
        whole_BPC = features_BVPC[:, 0]
        plane = whole_BPC.mT.reshape(len(whole_BPC), -1, grid, grid)
        pooled = functional.avg_pool2d(plane, 2).flatten(2).mT
        foveal_BPC = features_BVPC[:, 1]
        kept_BK = self.kept(before_BVPC[:, 1], foveal_BPC, inputs)
        foveal = taken(foveal_BPC, kept_BK) if self.made.merge is None else merged(foveal_BPC, kept_BK, self.made.merge)
        found: Tensor = self.projector(torch.cat([pooled, foveal], dim=1))
        return found

    def _looked_at(self, pixels_BVCXY: Tensor) -> tuple[Tensor, Tensor]:
        """The input and the output of the tower's last layer, for both views. Positions are stretched to the grid."""
        num_rows = len(pixels_BVCXY)
        values = pixels_BVCXY.flatten(0, 1).float() / 127.5 - 1
        hidden = self.vision.embeddings(values, interpolate_pos_encoding=True)
        before = hidden
        for layer in self.vision.encoder.layers:
            before, hidden = hidden, layer(hidden, attention_mask=None)
        return before.unflatten(0, (num_rows, 2)), hidden.unflatten(0, (num_rows, 2))

    @torch.no_grad()
    def kept(self, before_BPC: Tensor, features_BPC: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Which patches the foveal view keeps. A choice has no gradient; the features that are chosen have."""
        patches = PatchFeatures(
            attention_BPP=self._attention(before_BPC),
            features_BPC=features_BPC.float(),
            similarity_BP=self._similarity(features_BPC, inputs),
            noise_BP=inputs["noise"],
        )
        return best(SCORES[self.made.score](patches), self.made.keep)

    def _attention(self, before_BPC: Tensor) -> Tensor:
        """Computed head by head, because all heads at once would need one P x P matrix each."""
        layer = self.vision.encoder.layers[-1]
        attention = layer.self_attn
        normed_BPC = layer.layer_norm1(before_BPC)
        queries, keys = (
            project(normed_BPC).float().chunk(attention.num_heads, dim=2)
            for project in (attention.q_proj, attention.k_proj)
        )
        total = torch.zeros(len(before_BPC), before_BPC.shape[1], before_BPC.shape[1], device=before_BPC.device)
        for query, key in zip(queries, keys, strict=True):
            total += (query @ key.mT * attention.scale).softmax(dim=2)
        return total / int(attention.num_heads)

    def _similarity(self, features_BPC: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """The similarity to the question alone, because the answer does not exist yet at generation."""
        is_question_BT1 = (inputs["parts"] == READ)[:, :, None]
        words_BTH = self.transformer.wte(inputs["ids"]).float() * is_question_BT1
        question_B1H = words_BTH.sum(dim=1, keepdim=True) / is_question_BT1.sum(dim=1, keepdim=True).clamp_min(1)
        return functional.cosine_similarity(self.projector(features_BPC).float(), question_B1H, dim=2)

    def generate(self, inputs: Mapping[str, Tensor], *, max_new_tokens: int, stops: frozenset[int]) -> list[list[int]]:
        """All tokens of an answer start masked; each step settles the most certain ones. Image and question are read
        once."""
        hidden_BLH, positions_BL, parts_BL = self._read(inputs)
        past = self._remembered(hidden_BLH, positions_BL, parts_BL)
        num_rows, made = len(hidden_BLH), self.made
        ids_BA = torch.full((num_rows, max_new_tokens), made.mask_token, device=hidden_BLH.device)
        is_read_BL = parts_BL == READ
        behind_B1 = is_read_BL.sum(dim=1, keepdim=True)
        turn = self.transformer.turn(behind_B1 + torch.arange(max_new_tokens, device=behind_B1.device))
        sees_B11L = functional.pad(is_read_BL, (0, max_new_tokens), value=True)[:, None, None]
        is_open_BA = torch.ones_like(ids_BA, dtype=torch.bool)
        for _ in range(0, max_new_tokens, made.unmask):
            sure_BA, found_BA = self._told(ids_BA, turn, sees_B11L, past)
            surest = sure_BA.masked_fill(~is_open_BA, -1.0).topk(min(made.unmask, max_new_tokens), dim=1).indices
            settles_BA = torch.zeros_like(is_open_BA).scatter(1, surest, True) & is_open_BA
            ids_BA, is_open_BA = torch.where(settles_BA, found_BA, ids_BA), is_open_BA & ~settles_BA
        return [until(row, stops | {made.end_token}) for row in ids_BA.tolist()]

    def _remembered(self, hidden_BLH: Tensor, positions_BL: Tensor, parts_BL: Tensor) -> list[tuple[Tensor, Tensor]]:
        turn, sees_B1LL = self.transformer.turn(positions_BL), sees(parts_BL, parts_BL)
        found = []
        for block in self.transformer.blocks:
            assert isinstance(block, TransformerBlock)
            found.append(block.remembered(block.attn_norm(hidden_BLH), turn))
            hidden_BLH = block(hidden_BLH, turn, sees_B1LL)
        return found

    def _told(
        self, ids_BA: Tensor, turn: Tensor, sees_B11L: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """The likeliest token of each place and its probability. A mask token is never chosen."""
        hidden_BAH = self.transformer.wte(ids_BA)
        for block, before in zip(self.transformer.blocks, past, strict=True):
            hidden_BAH = block(hidden_BAH, turn, sees_B11L, before)
        logits_BAV = self.transformer.logits(hidden_BAH).float()
        logits_BAV[:, :, self.made.mask_token] = -torch.inf
        sure_BA, found_BA = logits_BAV.softmax(dim=2).max(dim=2)
        return sure_BA, found_BA


def until(tokens: list[int], stops: frozenset[int]) -> list[int]:
    return tokens[: next((at for at, token in enumerate(tokens) if token in stops), len(tokens))]
