"""The model of the recipe shirg does what SHIRG and LLaDA say: views, choice of patches, masks, loss and answers, each
against a reference."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaModel

from finefit.objective.batch import CustomRow
from finefit.recipes.shirg import shirg
from finefit.recipes.shirg.shirg import FIRST, READ, SECOND, UNSEEN, PatchFeatures, Settings, Shirg

MASK, END = 2, 0
CONFIG: dict[str, Any] = {
    "vision": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    },
    "language": {"vocabulary": 40, "hidden": 16, "mlp": 24, "layers": 2, "heads": 2, "theta": 10000.0},
    "side": 24,
    "keep": 25,
    "lead": 1,
    "answer_tokens": 4,
    "mask_token": MASK,
    "end_token": END,
}
SCORES = ("base", "entropy", "edge", "full", "random")


def make(**changes: Any) -> Shirg:
    """Weights are larger than at the start of a training, so that attention and similarity differ from patch to
    patch."""
    torch.manual_seed(3)
    model = shirg.build(CONFIG | changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def image(seed: int, size: tuple[int, int] = (30, 20)) -> PIL.Image.Image:
    chance = np.random.default_rng(seed)
    return PIL.Image.fromarray(chance.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def row(seed: int, *, question: int = 5, answer: int = 3, is_prompt: bool = False) -> CustomRow:
    chance = np.random.default_rng(1000 + seed)
    asked, told = chance.integers(5, 40, question), chance.integers(5, 40, answer)
    tokens = asked if is_prompt else np.concatenate([asked, told])
    return CustomRow(
        tokens=tokens,
        supervised=np.arange(len(tokens)) >= question,
        images=(image(seed),),
        seed=seed,
        is_prompt=is_prompt,
    )


def kept(model: Shirg, rows: list[CustomRow]) -> Tensor:
    inputs = model.inputs(rows)
    before, features = model._looked_at(inputs["pixels"])
    return model.kept(before[:, 1], features[:, 1], inputs)


# views


def test_an_image_is_980_tokens_256_pooled_ones_of_it_all_and_724_of_its_middle() -> None:
    made = Settings(vision={"patch_size": 14})
    assert (made.num_patches, made.num_patches // 4, made.keep, made.num_seen) == (1024, 256, 724, 980)


def test_the_global_view_is_the_whole_image_and_the_fovea_its_largest_square_or_all_of_it() -> None:
    wide = PIL.Image.new("RGB", (30, 10), (255, 0, 0))
    wide.paste((0, 0, 255), (10, 0, 20, 10))  # blue in the middle
    whole, fovea = shirg.views(wide, 24, "centre")
    assert (whole[0, 12, 2], whole[2, 12, 12]) == (255, 255)
    assert (fovea[2] == 255).all()
    assert not fovea[0].any()
    assert np.array_equal(*shirg.views(wide, 24, "whole"))


def test_both_views_go_through_the_tower_as_transformers_runs_it_with_positions_stretched_to_their_grid() -> None:
    model = make()
    inputs = model.inputs([row(1), row(2)])
    _, features = model._looked_at(inputs["pixels"])
    values = inputs["pixels"].flatten(0, 1) / 127.5 - 1
    expected = model.vision(values, interpolate_pos_encoding=True).last_hidden_state
    torch.testing.assert_close(features.flatten(0, 1), expected)
    assert model.vision.embeddings.position_embedding.weight.shape[0] == 16
    assert features.shape == (2, 2, 36, 16)


def test_the_first_image_tokens_are_means_of_two_by_two_patches_and_the_rest_are_patches() -> None:
    model = make()
    inputs = model.inputs([row(1)])
    _, features = model._looked_at(inputs["pixels"])
    chosen = kept(model, [row(1)])[0]
    corner = features[0, 0, [0, 1, 6, 7]].mean(dim=0)  # of a grid of 6 x 6
    seen = model.seen(inputs)[0]
    torch.testing.assert_close(seen[0], model.projector(corner))
    torch.testing.assert_close(seen[9:], model.projector(features[0, 1, chosen]))
    assert len(seen) == model.made.num_seen == 9 + 25


# the choice of patches


@pytest.mark.parametrize("score", SCORES)
def test_a_row_keeps_the_same_patches_in_any_batch_in_raster_order(score: str) -> None:
    model = make(score=score)
    rows = [row(seed, question=3 + seed) for seed in range(4)]
    together = kept(model, rows)
    for at, one in enumerate(rows):
        assert torch.equal(kept(model, [one])[0], together[at])
    assert (together.diff(dim=1) > 0).all()
    assert together.shape == (4, 25)


def test_every_score_is_used_in_a_batch_of_several_rows() -> None:
    rows = [row(seed) for seed in range(3)]
    found = {score: tuple(kept(make(score=score), rows).flatten().tolist()) for score in SCORES}
    assert len(set(found.values())) == len(SCORES)


def test_attention_is_that_of_the_last_layer_given_by_all_patches_over_all_heads() -> None:
    model = make()
    before, _ = model._looked_at(model.inputs([row(1)])["pixels"])
    layer = model.vision.encoder.layers[-1]
    layer.self_attn.config._attn_implementation = "eager"
    _, weights = layer.self_attn(layer.layer_norm1(before[:, 1]))
    torch.testing.assert_close(model._attention(before[:, 1]), weights.mean(dim=1))
    received = weights.mean(dim=(1, 2))
    torch.testing.assert_close(looked(attention_BPP=weights.mean(dim=1)).received(), shirg.scaled(received))


def looked(**changes: Any) -> PatchFeatures:
    flat = torch.full((1, 36, 36), 1 / 36)
    blank = PatchFeatures(
        attention_BPP=flat,
        features_BPC=torch.ones(1, 36, 4),
        similarity_BP=torch.zeros(1, 36),
        noise_BP=torch.zeros(1, 36),
    )
    return replace(blank, **changes)


def test_base_is_attention_to_seven_tenths_and_similarity_to_three() -> None:
    attention = torch.zeros(1, 36, 36)
    attention[:, :, 4] = 0.25
    attention[:, :, 7] = 0.5
    similarity = torch.zeros(1, 36)
    similarity[:, 4], similarity[:, 9] = 0.02, 0.04
    score = shirg.base(looked(attention_BPP=attention, similarity_BP=similarity))[0]
    torch.testing.assert_close(score[[4, 7, 9, 0]], torch.tensor([0.5, 0.7, 0.3, 0.0]))


def test_an_edge_lies_where_features_change_and_the_border_is_none() -> None:
    features = torch.zeros(1, 6, 6, 4)
    features[:, :, 3:] = 1.0
    score = looked(features_BPC=features.flatten(1, 2)).edge().view(6, 6)
    assert (score[:, 2:4] == 1).all()
    assert not score[:, [0, 1, 4, 5]].any()
    torch.testing.assert_close(
        shirg.edge(looked(features_BPC=features.flatten(1, 2))).view(6, 6), 0.25 * score, atol=1e-3, rtol=0
    )


def test_patches_that_look_at_everything_alike_are_the_first_to_go() -> None:
    attention = torch.eye(36)[None].clone()
    attention[0, [5, 17]] = 1 / 36
    similarity = torch.zeros(1, 36)
    similarity[0, [5, 17]] = 1.0  # best by base
    score = shirg.entropy(looked(attention_BPP=attention, similarity_BP=similarity))[0]
    assert set(score.argsort()[:2].tolist()) == {5, 17}


def test_full_prefers_the_middle_and_what_is_unlike_the_rest() -> None:
    features = torch.ones(1, 36, 4)
    features[0, 14] = torch.tensor([3.0, -1.0, 3.0, -1.0])  # of the same mean: no edge
    assert shirg.full(looked(features_BPC=features))[0].argmax() == 14
    flat = shirg.full(looked(similarity_BP=torch.linspace(0, 1, 36)[None]))
    weights = looked().centre()[0]
    torch.testing.assert_close(weights[[0, 35]], torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(flat[0, 35], torch.tensor(0.35 * 0.5))


def test_a_random_choice_is_the_rows_own() -> None:
    model = make(score="random")
    again, other = row(1), replace(row(1), seed=2)
    assert torch.equal(kept(model, [row(1)]), kept(model, [again]))
    assert not torch.equal(kept(model, [row(1)]), kept(model, [other]))


def test_of_equal_patches_the_first_are_kept() -> None:
    assert shirg.best(torch.zeros(2, 9), 4).tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("score", ["base", "entropy", "edge", "full"])
def test_the_answer_has_no_say_in_what_is_seen_so_training_and_asking_see_the_same(score: str) -> None:
    model = make(score=score)
    training, other, asking = row(1), row(1, answer=2), row(1, is_prompt=True)
    assert torch.equal(kept(model, [training]), kept(model, [asking]))
    assert torch.equal(kept(model, [training]), kept(model, [other]))


def test_patches_left_out_are_averaged_into_kept_ones_that_are_like_them() -> None:
    features = torch.tensor([[[1.0, 0.0], [3.0, 0.0], [0.0, 1.0], [0.6, 0.8]]], requires_grad=True)
    kept_BK = torch.tensor([[0, 2]])
    torch.testing.assert_close(shirg.merged(features, kept_BK, 0.9), torch.tensor([[[2.0, 0.0], [0.0, 1.0]]]))
    torch.testing.assert_close(shirg.merged(features, kept_BK, 0.7), torch.tensor([[[2.0, 0.0], [0.3, 0.9]]]))
    shirg.merged(features, kept_BK, 0.9).sum().backward()  # type: ignore[no-untyped-call]
    assert features.grad is not None
    assert features.grad[0, 1].abs().sum() > 0
    assert make(merge=0.5).seen(make().inputs([row(1)])).shape == (1, 34, 16)


# rows and masks


def test_an_answer_stands_twice_behind_image_and_question_and_is_filled_up_with_ends() -> None:
    model = make()
    inputs = model.inputs([row(1, question=5, answer=3)])
    answer = [*row(1).tokens[5:].tolist(), END]
    assert inputs["parts"].tolist() == [[READ] * 5 + [FIRST] * 4 + [SECOND] * 4]
    assert inputs["targets"].tolist() == [answer * 2]
    first, second = inputs["ids"][0, 5:9], inputs["ids"][0, 9:]
    assert ((first == MASK) != (second == MASK)).all()
    assert torch.where(first == MASK, second, first).tolist() == answer
    assert inputs["ids"][0, :5].tolist() == row(1).tokens[:5].tolist()


def test_the_image_stands_behind_the_tokens_that_open_a_prompt() -> None:
    positions = make(lead=2).inputs([row(1)])["positions"][0].tolist()
    assert positions[:34] == list(range(2, 36))
    assert positions[34:39] == [0, 1, 36, 37, 38]
    assert positions[39:43] == positions[43:] == [39, 40, 41, 42]


@pytest.mark.parametrize("num", [1, 2, 3, 8])
def test_a_token_is_masked_as_often_as_its_weight_says_and_each_copy_masks_one_at_least(num: int) -> None:
    chance, expected, found = np.random.default_rng(0), 0.0, np.zeros(num)
    for _ in range(20_000):
        is_masked, probability = shirg.drawn(num, chance)
        assert is_masked.any()
        assert num == 1 or not is_masked.all()
        found, expected = found + is_masked, expected + probability
    assert np.abs(found / 20_000 - expected / 20_000).max() < 0.015


def test_told_again_by_its_weight_the_loss_is_on_average_that_of_every_token() -> None:
    """Horvitz and Thompson: a sum over drawn places, each divided by its probability, has the sum over all places as
    its mean."""
    made, one, chance, total = make().made, row(1), np.random.default_rng(0), np.zeros(4)
    for _ in range(4_000):
        total += shirg.laid(one, made, chance)["weights"].reshape(2, 4).sum(axis=0)
    assert np.abs(total / 4_000 - 0.25).max() < 0.01


def test_an_answer_of_one_token_weighs_as_much_as_any_other() -> None:
    made = replace(make().made, answer_tokens=1)
    found = shirg.laid(row(1, answer=1), made, np.random.default_rng(1))
    assert found["weights"].tolist() == [1.0, 0.0]


def test_masks_are_the_rows_own_whatever_the_batch() -> None:
    model = make()
    alone, together = model.inputs([row(2)]), model.inputs([row(1, answer=7), row(2)])
    for name, one in alone.items():
        both = together[name][1]
        assert torch.equal(one[0], both[tuple(slice(0, size) for size in one.shape[1:])]), name


# the language model


def test_the_language_model_is_a_llama_that_sees_in_both_directions() -> None:
    model = make().transformer
    made = model.made
    sizes = {
        "hidden_size": made.hidden,
        "intermediate_size": made.mlp,
        "num_hidden_layers": made.layers,
        "num_attention_heads": made.heads,
    }
    llama = LlamaModel(
        LlamaConfig(
            vocab_size=made.vocabulary,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_theta": made.theta, "rope_type": "default"},
            **sizes,
        )
    )
    names = {
        "attn_norm": "input_layernorm",
        "ff_norm": "post_attention_layernorm",
        "attn_out": "self_attn.o_proj",
        "ff_proj": "mlp.gate_proj",
    }
    names |= {"up_proj": "mlp.up_proj", "ff_out": "mlp.down_proj"} | {
        f"{part}_proj": f"self_attn.{part}_proj" for part in "qkv"
    }
    theirs = {"embed_tokens.weight": model.wte.weight, "norm.weight": model.ln_f.weight}
    for at, block in enumerate(model.blocks):
        theirs |= {
            f"layers.{at}.{names[name.removesuffix('.weight')]}.weight": value
            for name, value in block.state_dict().items()
        }
    llama.load_state_dict(theirs)
    ids = torch.randint(0, 40, (2, 7))
    positions = torch.arange(7).expand(2, -1)
    expected = llama(ids, attention_mask=torch.zeros(2, 1, 7, 7), position_ids=positions).last_hidden_state
    found = model.ln_f(model(model.wte(ids), positions, torch.full((2, 7), READ)))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def by_hand(model: Shirg, one: CustomRow) -> Tensor:
    """The loss of a row as it is written down: two rows of image, question and one copy of the answer, each by
    itself."""
    inputs = model.inputs([one])
    question = int((inputs["parts"] == READ).sum())
    length = (inputs["ids"].shape[1] - question) // 2
    total = torch.zeros(())
    for copy in range(2):
        at = slice(question + copy * length, question + (copy + 1) * length)
        ids = torch.cat([inputs["ids"][:, :question], inputs["ids"][:, at]], dim=1)
        hidden = torch.cat([model.seen(inputs), model.transformer.wte(ids)], dim=1)
        positions = inputs["positions"][:, : model.made.num_seen + question + length]
        parts = torch.tensor([[READ] * (model.made.num_seen + question) + [FIRST] * length])
        logits = model.transformer.logits(model.transformer(hidden, positions, parts))[0, -length:]
        told = slice(copy * length, (copy + 1) * length)
        total = (
            total
            + (
                functional.cross_entropy(logits, inputs["targets"][0, told], reduction="none")
                * inputs["weights"][0, told]
            ).sum()
        )
    return total


def test_both_copies_behind_one_prefix_are_two_rows_in_loss_and_gradients() -> None:
    model = make()
    together, apart = model.loss(model.inputs([row(1)])), by_hand(model, row(1))
    torch.testing.assert_close(together, apart)
    both = [torch.autograd.grad(loss, list(model.parameters())) for loss in (together, apart)]
    for mine, theirs in zip(*both, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_the_loss_of_a_batch_is_the_sum_of_its_rows_whatever_is_padded() -> None:
    model = make()
    rows = [row(1, question=3, answer=2), row(2, question=9, answer=6), row(3)]
    inputs = model.inputs(rows)
    assert model.count(inputs) == 3
    torch.testing.assert_close(model.loss(inputs), torch.stack([model.loss(model.inputs([one])) for one in rows]).sum())


def test_an_answer_sees_the_image_and_the_image_does_not_see_the_answer() -> None:
    model = make()
    inputs = model.inputs([row(1)])
    changed = inputs | {"ids": inputs["ids"].clone()}
    changed["ids"][0, -1] = 7 if int(inputs["ids"][0, -1]) != 7 else 8
    mine, theirs = (model.transformer(*model._read(given)) for given in (inputs, changed))
    prefix = model.made.num_seen + 5
    assert torch.equal(mine[:, : prefix + 4], theirs[:, : prefix + 4])  # image, question and the other copy
    assert not torch.equal(mine[:, prefix + 4 :], theirs[:, prefix + 4 :])
    dark = inputs | {"pixels": torch.zeros_like(inputs["pixels"])}
    assert model.loss(dark) != model.loss(inputs)


def test_image_tokens_are_dropped_in_training_when_that_is_asked_and_never_otherwise() -> None:
    plain, dropping = make(), make(token_dropout=0.5)
    inputs = dropping.inputs([row(1)])
    assert 5 < int((inputs["image_parts"] == UNSEEN).sum()) < 30
    assert not bool((plain.inputs([row(1)])["image_parts"] == UNSEEN).any())
    assert dropping.loss(inputs) == plain.loss(plain.inputs([row(1)]))
    assert dropping.train().loss(inputs) != plain.train().loss(plain.inputs([row(1)]))


def test_a_dropped_token_changes_nothing_for_those_that_remain() -> None:
    model = make(token_dropout=0.5).train()
    inputs = model.inputs([row(1)])
    hidden, positions, parts = model._read(inputs)
    noise = torch.where((parts == UNSEEN)[:, :, None], torch.randn_like(hidden), 0.0)
    mine, theirs = (model.transformer(given, positions, parts) for given in (hidden, hidden + noise))
    is_seen = parts[0] != UNSEEN
    assert torch.equal(mine[0, is_seen], theirs[0, is_seen])


# answers


def answers_by_hand(model: Shirg, one: CustomRow, length: int) -> list[int]:
    """Everything is read anew at every step."""
    inputs = model.inputs([one])
    ids, is_open = torch.full((1, length), MASK), torch.ones(length, dtype=torch.bool)
    hidden, positions, parts = model._read(inputs)
    behind = positions.max() + 1
    for _ in range(length):
        whole = torch.cat([hidden, model.transformer.wte(ids)], dim=1)
        at = torch.cat([positions, behind + torch.arange(length)[None]], dim=1)
        logits = model.transformer.logits(
            model.transformer(whole, at, torch.cat([parts, torch.full((1, length), FIRST)], dim=1))
        )[0, -length:]
        logits[:, MASK] = -torch.inf
        sure, found = logits.softmax(dim=1).max(dim=1)
        place = int(torch.where(is_open, sure, -1.0).argmax())
        ids[0, place], is_open[place] = found[place], False
    found_ids: list[int] = ids[0].tolist()
    return found_ids


@torch.inference_mode()
def test_what_is_read_once_gives_the_answer_of_reading_it_at_every_step() -> None:
    model = make()
    rows = [row(1, question=4, is_prompt=True), row(2, question=9, is_prompt=True)]
    found = model.generate(model.inputs(rows), max_new_tokens=5, stops=frozenset())
    for one, answer in zip(rows, found, strict=True):
        expected = answers_by_hand(model, one, 5)
        assert answer == shirg.until(expected, frozenset({END}))
        assert MASK not in expected


@torch.inference_mode()
def test_several_tokens_may_be_settled_at_a_time_and_an_answer_ends_at_its_stop() -> None:
    model = make(unmask=2)
    inputs = model.inputs([row(1, is_prompt=True)])
    (whole,) = model.generate(inputs, max_new_tokens=5, stops=frozenset())
    assert MASK not in whole
    (cut,) = model.generate(inputs, max_new_tokens=5, stops=frozenset({whole[1]}))
    assert cut == whole[: whole.index(whole[1])]


# settings


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"side": 20}, "side 20 is not a multiple of two patches of 4 pixels"),
        ({"keep": 37}, "keep 37 of the 36 patches"),
        ({"token_dropout": 1.0}, "token_dropout 1.0"),
        ({"score": "bset"}, "score bset"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: Mapping[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        shirg.build(CONFIG | dict(changes))


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(TypeError, match="kepe"):
        shirg.build(CONFIG | {"kepe": 3})
