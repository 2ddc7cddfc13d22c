import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from finefit.artifacts.forecasts import EvalBatchLimit
from finefit.data.rows import ImageRef, Message, Row
from finefit.errors import DataError, Resumable
from finefit.evaluate.batches import Answer, ImagePrefetch, answers, in_batches, limit_for, require_images
from finefit.evaluate.decoding import decode
from finefit.vision.family import ImageInput
from tests.conftest import make_model
from tests.evaluate.conftest import LIMIT, MESSAGES, RENDERER, never
from tests.tiny_types import tiny_config
from tests.vision_models import digit_image

PROMPTS = [RENDERER.prompt_tokens(messages[:-1]) for messages in MESSAGES]
WIDE = EvalBatchLimit(rows=64, tokens=1 << 20)


def _answers(model: nn.Module, *, batch_limit: EvalBatchLimit = WIDE, max_new_tokens: int = 40) -> dict[int, Answer]:
    return dict(
        answers(
            model, RENDERER, PROMPTS, max_new_tokens=max_new_tokens, batch_limit=batch_limit, device="cpu", warn=never
        )
    )


def test_batched_answers_are_those_given_one_by_one(talker: nn.Module) -> None:
    single = _answers(talker, batch_limit=replace(WIDE, rows=1))
    assert len({answer.text for answer in single.values()}) > 3
    assert len({answer.new_tokens for answer in single.values()}) > 2
    for batch_limit in (replace(WIDE, rows=3), replace(WIDE, rows=8), WIDE, replace(WIDE, tokens=300)):
        assert _answers(talker, batch_limit=batch_limit) == single


def test_an_answer_is_the_most_likely_token_after_every_token(talker: nn.Module) -> None:
    found = _answers(talker, batch_limit=replace(WIDE, rows=5), max_new_tokens=6)
    for at, prompt in enumerate(PROMPTS):
        tokens = list(prompt)
        for _ in range(6):
            with torch.no_grad():
                tokens.append(int(talker(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
            if tokens[-1] == RENDERER.tokenizer.eos_token_id:
                break
        assert found[at].text == RENDERER.tokenizer.decode(tokens[len(prompt) :], skip_special_tokens=True)
        assert found[at].new_tokens == len(tokens) - len(prompt)


def test_an_answer_that_reached_max_new_tokens_is_cut_and_one_that_ended_is_not(talker: nn.Module) -> None:
    short, long = _answers(talker, max_new_tokens=3), _answers(talker, max_new_tokens=60)
    assert {(answer.new_tokens, answer.is_cut) for answer in short.values()} == {(3, True)}
    assert {answer.is_cut for answer in long.values()} == {False}
    for answer in long.values():  # one token for each byte, and the end
        assert answer.new_tokens == len(answer.text.encode()) + 1


def test_the_longest_prompts_are_answered_first_and_each_one_once() -> None:
    model = make_model().eval()
    order = [
        at for at, _ in answers(model, RENDERER, PROMPTS, max_new_tokens=1, batch_limit=LIMIT, device="cpu", warn=never)
    ]
    assert sorted(order) == list(range(len(PROMPTS)))
    lengths = [len(PROMPTS[at]) for at in order]
    assert lengths == sorted(lengths, reverse=True)


def test_no_prompts_have_no_answers() -> None:
    assert (
        list(answers(make_model(), RENDERER, [], max_new_tokens=4, batch_limit=LIMIT, device="cpu", warn=never)) == []
    )


@pytest.mark.parametrize(("max_new_tokens", "most"), [(4, len(PROMPTS)), (64, 1)])
def test_rows_stand_alone_where_the_longest_would_turn_the_positions_of_all(
    max_new_tokens: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dynamic rope stretches once a row is longer than the model's own length, here 64."""
    config = make_model().config.to_dict() | {"max_position_embeddings": 64}
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = LlamaForCausalLM(LlamaConfig(**config)).eval()
    sizes: list[int] = []

    def seen(model: nn.Module, prompts: Sequence[Sequence[int]], **how: Any) -> list[list[int]]:
        sizes.append(len(prompts))
        return decode(model, prompts, **how)

    monkeypatch.setattr("finefit.evaluate.batches.decode", seen)
    list(answers(model, RENDERER, PROMPTS, max_new_tokens=max_new_tokens, batch_limit=WIDE, device="cpu", warn=never))
    assert set(sizes) == {most}


@pytest.mark.parametrize("kind", ["git", "rwkv", "xlstm", "mamba"])
def test_a_model_that_would_read_the_padding_of_others_answers_as_it_does_alone(kind: str) -> None:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(kind)).eval()
    for parameter in model.parameters():
        parameter.data.mul_(5)  # so far from zero that every token counts
    limit = limit_for(model, list(map(len, PROMPTS)), WIDE)
    assert (limit.rows == 1) == (kind != "mamba")
    together, alone = (_answers(model, batch_limit=one, max_new_tokens=4) for one in (WIDE, replace(WIDE, rows=1)))
    assert together == alone


# what is computed together


@pytest.mark.parametrize(
    ("batch_limit", "expected"),
    [
        (EvalBatchLimit(rows=2, tokens=1000), [0, 1]),
        (EvalBatchLimit(rows=9, tokens=299), [0, 1]),
        (EvalBatchLimit(rows=9, tokens=300), [0, 1, 2]),
        (EvalBatchLimit(rows=9, tokens=10), [0]),
        (EvalBatchLimit(rows=9, tokens=1000), [0, 1, 2, 3]),
    ],
)
def test_a_batch_holds_what_fits_when_all_are_padded_to_the_longest(
    batch_limit: EvalBatchLimit, expected: list[int]
) -> None:
    found = dict(in_batches([100, 90, 80, 1], batch_limit, lambda chosen: [chosen] * len(chosen), warn=never))
    assert found[0] == expected


def _short_of_memory(
    most_tokens: int, lengths: Sequence[int], batches: list[list[int]]
) -> Callable[[list[int]], list[int]]:
    def compute(chosen: list[int]) -> list[int]:
        batches.append(chosen)
        if len(chosen) * max(lengths[at] for at in chosen) > most_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return [10 * at for at in chosen]

    return compute


def test_a_batch_that_runs_out_of_memory_is_cut_in_half_and_goes_on_with_the_same_rows() -> None:
    lengths, batches, warned = [50, 100, 100, 70, 100, 100, 60, 10], list[list[int]](), list[str]()
    found = dict(
        in_batches(
            lengths, EvalBatchLimit(rows=4, tokens=400), _short_of_memory(250, lengths, batches), warn=warned.append
        )
    )
    assert found == {at: 10 * at for at in range(8)}
    assert batches == [[1, 2, 4, 5], [1, 2], [4, 5], [3, 6], [0, 7]]
    assert warned == ["out of memory with 4 rows of up to 100 tokens at once; continued with 2"]


def test_shorter_rows_still_get_half_of_the_limit() -> None:
    lengths, batches, warned = [100] * 4 + [20] * 6, list[list[int]](), list[str]()
    found = dict(
        in_batches(
            lengths, EvalBatchLimit(rows=8, tokens=400), _short_of_memory(250, lengths, batches), warn=warned.append
        )
    )
    assert len(found) == 10
    assert batches == [[0, 1, 2, 3], [0, 1], [2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(warned) == 1


def test_a_row_that_does_not_fit_alone_is_told_with_its_length_and_what_to_do() -> None:
    lengths, batches = [100, 90, 10], list[list[int]]()
    with pytest.raises(Resumable, match="a single row of 100 tokens") as caught:
        list(
            in_batches(
                lengths, EvalBatchLimit(rows=2, tokens=200), _short_of_memory(95, lengths, batches), warn=lambda _: None
            )
        )
    assert batches == [[0, 1], [0]]
    assert "Tried to allocate 2.00 GiB" in caught.value.problem
    assert "the answers so far are kept" in caught.value.remedy


def test_any_other_error_is_nobody_elses() -> None:
    def compute(_: list[int]) -> list[int]:
        raise RuntimeError("the size of tensor a must match")

    with pytest.raises(RuntimeError, match="must match"):
        list(in_batches([1, 2], LIMIT, compute, warn=never))


def test_what_ran_out_is_let_go_before_it_is_tried_again() -> None:
    """An error keeps the frames that it came through, and they keep their tensors."""
    alive: list[bool] = []
    held: list[object] = []

    class Tensor:
        def __del__(self) -> None:
            held.clear()

    def compute(chosen: list[int]) -> list[int]:
        alive.append(bool(held))
        if len(chosen) > 1:
            tensor = Tensor()
            held.append(id(tensor))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return chosen

    list(in_batches([3, 2], LIMIT, compute, warn=lambda _: None))
    assert alive == [False, False, False]


# Images ahead of their batch: each decoded once, as many as may wait, none kept that nobody wants; and none of them
# missing before anything is asked.


def _ref(number: int, num_values: int = 10) -> ImageRef:
    return ImageRef(f"{number}.png", "", str(number), (8, 8), (1,), num_values)


class Later:
    """In the place of processes: what was submitted, in order; each is there when it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, call: Callable[..., Any], processor_factory: object, ref: ImageRef) -> "Future[Any]":  # noqa: ARG002
        self.asked.append(ref.sha256)
        future: Future[Any] = Future()
        future.set_result(ImageInput(ref.grid, {"pixel_values": np.array([int(ref.sha256)])}))
        return future


def _prefetch(later: Later, **more: Any) -> ImagePrefetch:
    return ImagePrefetch(lambda: None, later, **more)


def test_all_that_is_shown_now_and_as_much_as_may_wait_is_decoded_in_order() -> None:
    later = Later()
    _prefetch(later, most_ahead=25).ahead([_ref(1, 100), _ref(2, 100)], [_ref(3), _ref(4), _ref(5)])
    assert later.asked == ["1", "2", "3", "4"]


def test_an_image_that_several_rows_use_is_decoded_once_while_it_is_needed() -> None:
    later = Later()
    prefetch = _prefetch(later)
    prefetch.ahead([_ref(1), _ref(1)], [_ref(2), _ref(1)])
    prefetch.ahead([_ref(2)], [_ref(1)])
    assert [int(prefetch.load(_ref(number)).pixels["pixel_values"][0]) for number in (2, 1, 2)] == [2, 1, 2]
    assert later.asked == ["1", "2"]


def test_what_nobody_waits_for_is_let_go_and_decoded_anew_when_it_is_asked_for() -> None:
    later = Later()
    prefetch = _prefetch(later)
    prefetch.ahead([_ref(1)], [])
    prefetch.ahead([_ref(2)], [])
    prefetch.load(_ref(1))
    assert later.asked == ["1", "2", "1"]


def test_what_stands_behind_a_batch_is_told_before_it_is_computed() -> None:
    told: list[tuple[list[int], list[int]]] = []
    computed: list[int] = []

    def compute(chosen: list[int]) -> list[int]:
        assert len(told) == len(computed) + 1
        computed.append(len(chosen))
        return chosen

    def ahead(now: Sequence[int], then: Sequence[int]) -> None:
        told.append((list(now), list(then)))

    list(in_batches([5, 9, 7], EvalBatchLimit(rows=2, tokens=100), compute, warn=never, ahead=ahead))
    assert told == [([1, 2], [0]), ([0], [])]


def _row(folder: Path, number: int) -> Row:
    path = folder / f"{number}.png"
    digit_image(number, size=(32, 32), seed=number).save(path)
    ref = ImageRef(str(path), "", hashlib.sha256(path.read_bytes()).hexdigest(), (32, 32), (1,), 1)
    messages = (Message("user", "Which?"), Message("assistant", str(number)))
    return Row(source="test.jsonl", number=number, messages=messages, image_refs=(ref,))


def test_images_that_are_gone_or_others_now_are_told_all_at_once_by_file_and_row(tmp_path: Path) -> None:
    rows = [_row(tmp_path, number) for number in range(1, 10)]
    require_images(rows)
    (tmp_path / "2.png").unlink()
    (tmp_path / "3.png").write_bytes((tmp_path / "4.png").read_bytes())
    with pytest.raises(DataError) as caught:
        require_images(rows)
    lines = caught.value.problem.splitlines()
    assert lines[0].startswith("test.jsonl:2: its image ")
    assert "2.png" in lines[0]
    assert lines[1] == f"test.jsonl:3: its image {tmp_path / '3.png'} has changed since its rows were prepared"
    assert len(lines) == 2
    for number in range(4, 10):
        (tmp_path / f"{number}.png").unlink()
    with pytest.raises(DataError, match="and 3 more"):
        require_images(rows)
