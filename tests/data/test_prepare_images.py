"""Rows with images prepared: each image found and decoded once, kept by content, and a fault of its row where it cannot
be shown."""

import hashlib
import io
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finefit.artifacts.stage_records import Preparation, SourceLedger
from finefit.data import image_check, tokenizer_pool
from finefit.data.collate import Collator, collate, largest_row
from finefit.data.examples import Example, ExamplePairs, Examples, Pair
from finefit.data.image_check import ModelProcessor, image_input, load_image
from finefit.data.images import are_unchanged, decode
from finefit.data.rows import IMAGE_ARCHIVE, Image, ImageRef, key_of, read_items
from finefit.errors import DataError
from finefit.spec.data import ImageLimits
from finefit.train.batches import batches_digest
from finefit.vision.family import ImageInput
from tests.conftest import write_jsonl
from tests.data.image_rows import asked, draw, prepared, processor_in
from tests.vision_models import digit_image, make_vlm, vlm_processor

SHARED = Path(__file__).parents[3] / "shared" / "data"
TRAIN = {"train": [{"path": "a.jsonl"}]}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vlm("qwen2_5_vl", tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vlm("llava", tmp_path_factory.mktemp("llava"))


def source(found: Preparation, split: str = "train") -> SourceLedger:
    return next(s for s in found.sources if s.split == split)


def faults(found: Preparation, kind: str) -> list[str]:
    return [line for fault in found.problems if fault.kind == kind for line in fault.lines]


def test_rows_keep_their_images_beside_their_tokens(tmp_path: Path, qwen: Path) -> None:
    draw(tmp_path, "a.png", 1), draw(tmp_path, "b.png", 2, size=(90, 60))
    rows = [asked(0, "a.png", "b.png"), asked(1, "b.png"), {"messages": asked(2)["messages"]}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    found, out = prepared(tmp_path, qwen, TRAIN)
    examples = Examples(out / "train.safetensors")
    shown = [[Path(picture.path).name for picture in example.images] for example in examples]
    assert shown == [["a.png", "b.png"], ["b.png"], []]
    assert (source(found).used, source(found).images) == (3, 3)
    first = examples[0].images[0]
    assert first.sha256 == hashlib.sha256((tmp_path / "a.png").read_bytes()).hexdigest()
    assert first.grid == processor_in(qwen).grid(first.size)
    assert load_image(first).size == first.size == (48, 40)


def test_a_weight_repeats_rows_with_their_images(tmp_path: Path, qwen: Path) -> None:
    draw(tmp_path, "a.png", 1), draw(tmp_path, "b.png", 2)
    write_jsonl(tmp_path / "a.jsonl", [asked(0, "a.png"), asked(1, "b.png", question="And this one?")])
    found, out = prepared(tmp_path, qwen, {"train": [{"path": "a.jsonl", "weight": 2}]})
    examples = Examples(out / "train.safetensors")
    assert [Path(example.images[0].path).name for example in examples] == ["a.png", "b.png"] * 2
    assert (source(found).repeated, source(found).images) == (2, 2)


def test_an_image_is_decoded_once_however_many_questions_there_are(
    tmp_path: Path, qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(tmp_path, "a.png", 1), draw(tmp_path, "b.png", 2)
    (tmp_path / "copy.png").write_bytes((tmp_path / "a.png").read_bytes())
    write_jsonl(
        tmp_path / "a.jsonl",
        [asked(n, name, question=f"{n}?") for n, name in enumerate(["a.png", "b.png", "a.png", "copy.png", "a.png"])],
    )
    decoded: list[str] = []

    def noted(image: Image, **rest: Any) -> PIL.Image.Image:
        decoded.append(image.path)
        return decode(image, **rest)

    monkeypatch.setattr(image_check, "decode", noted)
    found, _ = prepared(tmp_path, qwen, TRAIN)
    assert (source(found).used, decoded) == (5, ["a.png", "b.png"])


def test_images_that_came_as_bytes_are_kept_once_by_content(tmp_path: Path, qwen: Path) -> None:
    encoded = [_png(1), _png(2)]
    table = pa.table(
        {
            "question": ["which?", "which one?", "what?"],
            "answer": ["1", "1", "2"],
            "image": [{"bytes": encoded[at], "path": None} for at in (0, 0, 1)],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    found, out = prepared(tmp_path, qwen, {"train": [{"path": "a.parquet"}]})
    with zipfile.ZipFile(out / IMAGE_ARCHIVE) as kept:
        assert {name: kept.read(name) for name in kept.namelist()} == {
            hashlib.sha256(content).hexdigest(): content for content in encoded
        }
    assert IMAGE_ARCHIVE in found.files
    moved = out.rename(tmp_path / "elsewhere")  # the prepared files are copied into the run
    images = [example.images[0] for example in Examples(moved / "train.safetensors")]
    assert [np.asarray(load_image(picture)).tolist() for picture in images] == [
        np.asarray(digit_image(d, size=(48, 40), seed=0)).tolist() for d in (1, 1, 2)
    ]


def _png(digit: int) -> bytes:
    content = io.BytesIO()
    digit_image(digit, size=(48, 40), seed=0).save(content, "PNG")
    return content.getvalue()


def _broken(folder: Path) -> list[dict[str, Any]]:
    draw(folder, "good.png", 1)
    draw(folder.parent, "outside.png", 2)
    whole = (folder / "good.png").read_bytes()
    (folder / "half.png").write_bytes(whole[: len(whole) // 2])
    (folder / "text.png").write_text("no image")
    (folder / "empty.png").write_bytes(b"")
    names = ["good.png", "gone.png", "half.png", "text.png", "empty.png", "../outside.png"]
    return [asked(n, name, question=f"{n}?") for n, name in enumerate(names)]


def test_an_image_that_cannot_be_shown_is_a_fault_by_file_and_row_and_never_something_else(
    tmp_path: Path, qwen: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", _broken(folder))
    found, out = prepared(folder, qwen, TRAIN)
    told = faults(found, "unusable")
    assert [line.split(" ")[0] for line in told] == [f"a.jsonl:{n}" for n in (2, 3, 4, 5, 6)]
    reasons = ("gone.png does not exist", "cannot be decoded", "not an image", "not an image", "is outside of")
    assert all(reason in line for reason, line in zip(reasons, told, strict=True))
    ledger = source(found)
    assert (ledger.read, ledger.used, ledger.dropped, ledger.images) == (6, 1, {"unusable": 5}, 1)
    assert [len(example.images) for example in Examples(out / "train.safetensors")] == [1]


def test_a_shape_that_the_processor_does_not_take_is_a_fault_of_the_row(tmp_path: Path, qwen: Path) -> None:
    digit_image(1, size=(1000, 2), seed=0).save(tmp_path / "thin.png")
    write_jsonl(tmp_path / "a.jsonl", [asked(0, "thin.png")])
    found, _ = prepared(tmp_path, qwen, TRAIN)
    (line,) = faults(found, "unusable")
    assert line.startswith("a.jsonl:1 thin.png cannot be processed for the model: it has 1,000 x 2 pixels")


def test_an_image_that_changed_or_went_since_is_an_error_by_file_and_row_when_it_is_shown(
    tmp_path: Path, qwen: Path
) -> None:
    draw(tmp_path, "a.png", 1), draw(tmp_path, "b.png", 2)
    rows = [asked(0, "a.png"), asked(1, "b.png"), asked(2, "a.png", question="Once more?")]
    write_jsonl(tmp_path / "a.jsonl", rows)
    write_jsonl(tmp_path / "t.jsonl", [asked(3, "b.png", question="And here?")])
    _, out = prepared(tmp_path, qwen, TRAIN | {"test": {"path": "t.jsonl"}})
    first, second, third = Examples(out / "train.safetensors")
    (item,) = read_items(out / "test.jsonl")
    draw(tmp_path, "a.png", 3)
    (tmp_path / "b.png").unlink()
    for example in (first, third):  # told of the first row that shows it
        with pytest.raises(
            DataError, match=r"\Aa\.jsonl:1: its image .*a\.png has changed since .*\nrestore the image"
        ):
            image_input(processor_in(qwen), example.images[0])
    for place, picture in (("a.jsonl:2", second.images[0]), ("t.jsonl:1", item.image_refs[0])):
        with pytest.raises(DataError, match=rf"\A{place}: its image .*b\.png cannot be read.*it was there when"):
            image_input(processor_in(qwen), picture)
    with pytest.raises(DataError, match=r"\Athe image .*a\.png has changed"):
        load_image(replace(first.images[0], row=""))


def test_what_was_prepared_is_known_to_be_out_of_date_when_an_image_is_changed_mended_or_taken_away(
    tmp_path: Path, qwen: Path
) -> None:
    draw(tmp_path, "a.png", 1)
    with zipfile.ZipFile(tmp_path / "more.zip", "w") as archive:
        archive.writestr("b.png", _png(2))
    write_jsonl(
        tmp_path / "a.jsonl",
        [asked(0, "a.png"), asked(1, "b.png", question="b?"), asked(2, "gone.png", question="gone?")],
    )
    _, out = prepared(tmp_path, qwen, TRAIN)
    assert are_unchanged(out)
    content = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(content)  # written anew, and the same
    assert are_unchanged(out)
    draw(tmp_path, "a.png", 5)
    assert not are_unchanged(out)
    (tmp_path / "a.png").unlink()
    assert not are_unchanged(out)
    (tmp_path / "a.png").write_bytes(content)
    assert are_unchanged(out)
    draw(tmp_path, "gone.png", 7)
    assert not are_unchanged(out)
    (tmp_path / "gone.png").unlink()
    assert are_unchanged(out)
    with zipfile.ZipFile(tmp_path / "more.zip", "w") as archive:
        archive.writestr("b.png", _png(3))
    assert not are_unchanged(out)


def test_what_all_rows_show_is_named_by_content_and_order_not_by_place(tmp_path: Path, qwen: Path) -> None:
    names = {}
    for folder, first, second in (("one", 1, 2), ("moved", 1, 2), ("swapped", 2, 1)):
        (tmp_path / folder).mkdir()
        draw(tmp_path / folder, "a.png", first), draw(tmp_path / folder, "b.png", second)
        write_jsonl(tmp_path / folder / "a.jsonl", [asked(0, "a.png"), asked(1, "b.png")])
        names[folder] = prepared(tmp_path / folder, qwen, TRAIN)[0].images_sha256
    assert names["one"] == names["moved"] != names["swapped"]


def test_the_same_question_is_found_about_the_same_image_alone_wherever_it_lies(tmp_path: Path, qwen: Path) -> None:
    draw(tmp_path, "a.png", 1), draw(tmp_path, "b.png", 2)
    (tmp_path / "copy.png").write_bytes((tmp_path / "a.png").read_bytes())
    write_jsonl(tmp_path / "a.jsonl", [asked(0, "a.png", question="<image>Which digit is it"), asked(0, "b.png")])
    write_jsonl(tmp_path / "t.jsonl", [asked(0, "copy.png")])
    found, _ = prepared(tmp_path, qwen, TRAIN | {"test": {"path": "t.jsonl"}})
    assert faults(found, "overlap") == ["a.jsonl:1 (train) is t.jsonl:1 (test): the same but for case and punctuation"]


def test_a_form_leaves_an_item_with_an_image_the_item_that_it_was(tmp_path: Path, qwen: Path) -> None:
    (tmp_path / "form.py").write_text(
        "def build(prompt, answer):\n    return prompt.upper(), f'= {answer}'\n", encoding="utf-8"
    )
    for name, digit in (("a.png", 1), ("b.png", 2)):
        draw(tmp_path, name, digit)
    write_jsonl(tmp_path / "a.jsonl", [asked(3, "b.png", question="train?")])
    write_jsonl(tmp_path / "t.jsonl", [asked(0, "a.png"), asked(0, "b.png")])
    form = {"kind": "python", "path": "form.py"}
    plain, built = (
        read_items(prepared(tmp_path, qwen, TRAIN | {"test": {"path": "t.jsonl"}} | more, out=out)[1] / "test.jsonl")
        for out, more in (("plain", {}), ("built", {"task": form}))
    )
    assert built[0].answer == "= 0"
    assert [key_of(item) for item in built] == [key_of(item) for item in plain]
    assert len({key_of(item) for item in built}) == 2


def test_test_items_bring_their_pictures_and_have_one_key_wherever_those_lie(tmp_path: Path, qwen: Path) -> None:
    draw(tmp_path, "a.png", 1), draw(tmp_path, "b.png", 2, size=(90, 60))
    (tmp_path / "copy.png").write_bytes((tmp_path / "a.png").read_bytes())
    write_jsonl(tmp_path / "a.jsonl", [asked(3, "b.png", question="train?")])
    write_jsonl(
        tmp_path / "t.jsonl",
        [asked(0, "a.png"), asked(0, "copy.png"), asked(1, "b.png", "gone.png"), asked(0, "b.png")],
    )
    found, out = prepared(tmp_path, qwen, TRAIN | {"test": {"path": "t.jsonl"}})
    items = read_items(out / "test.jsonl")
    assert [[Path(picture.path).name for picture in item.image_refs] for item in items] == [
        ["a.png"],
        ["copy.png"],
        ["b.png"],
    ]
    assert key_of(items[0]) == key_of(items[1]) != key_of(items[2])
    assert [line.split(": ")[0] for line in faults(found, "unusable")] == ["t.jsonl:3 image 2 of 2"]
    assert found.prompt_grids == (processor_in(qwen).grid((90, 60)),)
    assert found.lengths is not None
    assert found.lengths.prompt_grids == found.prompt_grids
    assert source(found, "test").images == 3


def test_the_row_that_shows_most_is_told_whether_it_is_the_longest_or_not(tmp_path: Path, qwen: Path) -> None:
    draw(tmp_path, "small.png", 1, size=(32, 32)), draw(tmp_path, "large.png", 2, size=(96, 96))
    rows = [
        asked(0, "small.png", question="a long question " * 20),
        asked(1, "small.png", "large.png"),
        asked(2, "large.png"),
    ]
    write_jsonl(tmp_path / "a.jsonl", rows)
    found, out = prepared(tmp_path, qwen, TRAIN)
    image_processor, examples = processor_in(qwen), Examples(out / "train.safetensors")
    assert found.lengths is not None
    assert found.lengths.grids == (image_processor.grid((32, 32)), image_processor.grid((96, 96)))
    worst = largest_row(examples)
    assert isinstance(worst, Example)
    assert (len(worst.tokens), worst.images) == (found.lengths.longest, examples[1].images)
    assert sum(worst.supervised) == found.lengths.supervised
    assert worst.tokens.count(image_processor.geometry.image_token) == sum(
        map(image_processor.geometry.num_tokens, found.lengths.grids)
    )


def test_a_validation_row_that_shows_more_than_any_training_row_counts(tmp_path: Path, qwen: Path) -> None:
    draw(tmp_path, "small.png", 1, size=(32, 32)), draw(tmp_path, "large.png", 2, size=(96, 96))
    write_jsonl(tmp_path / "a.jsonl", [asked(0, "small.png")])
    write_jsonl(tmp_path / "v.jsonl", [asked(1, "large.png")])
    found, _ = prepared(tmp_path, qwen, TRAIN | {"validation": {"path": "v.jsonl"}})
    assert found.lengths is not None
    assert found.lengths.grids == (processor_in(qwen).grid((96, 96)),)


@pytest.mark.slow
def test_several_processes_prepare_the_same_bytes(tmp_path: Path, qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(6):
        draw(tmp_path, f"{n}.png", n, size=(40 + 10 * n, 60))
    write_jsonl(tmp_path / "a.jsonl", [asked(n, f"{n % 6}.png", question=f"{n}?") for n in range(20)])
    write_jsonl(tmp_path / "t.jsonl", [asked(n, f"{n}.png", question=f"test {n}?") for n in range(6)])
    data = TRAIN | {"test": {"path": "t.jsonl"}}
    alone, _ = prepared(tmp_path, qwen, data)
    monkeypatch.setattr(tokenizer_pool, "_IMAGES_FOR_ALL", 5)
    monkeypatch.setattr(tokenizer_pool, "_CHUNK_ROWS", 4)
    monkeypatch.setattr(tokenizer_pool, "count_cores", lambda: 2)
    several, _ = prepared(tmp_path, qwen, data, out="several")
    assert several == alone


def test_a_pair_has_its_images_on_both_sides_and_they_are_decoded_once_for_a_batch(tmp_path: Path, llava: Path) -> None:
    draw(tmp_path, "a.png", 1)
    chat = [{"role": "user", "content": "<image>which?"}]
    sides = {"chosen": [{"role": "assistant", "content": "1"}], "rejected": [{"role": "assistant", "content": "2"}]}
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": chat, "images": ["a.png"]} | sides])
    _, out = prepared(tmp_path, llava, TRAIN, pairs=True)
    pairs = ExamplePairs(out / "train.safetensors")
    (pair,) = pairs
    assert pair.chosen.images == pair.rejected.images != ()
    image_processor, shown = processor_in(llava), list[str]()

    def noted(picture: ImageRef) -> ImageInput:
        shown.append(picture.path)
        return image_input(image_processor, picture)

    batch = collate(list(pairs), pad=0, geometry=image_processor.geometry, load=noted)
    assert len(shown) == 1
    assert batch.extra is not None
    assert batch.extra.tensors["pixel_values"].shape[0] == 2
    assert isinstance(largest_row(pairs), Pair)


def test_the_digest_of_a_step_tells_two_images_of_one_size_apart(tmp_path: Path, qwen: Path) -> None:
    draw(tmp_path, "a.png", 1), draw(tmp_path, "b.png", 2)
    write_jsonl(tmp_path / "a.jsonl", [asked(0, "a.png"), asked(0, "b.png")])
    _, out = prepared(tmp_path, qwen, TRAIN)
    collator = Collator(pad=0, processor_factory=ModelProcessor(qwen, qwen / "config.json", ImageLimits()))
    first, second = (collator([example]) for example in Examples(out / "train.safetensors"))
    assert first.input_ids_BT.equal(second.input_ids_BT)
    assert batches_digest([first]) != batches_digest([second])
    assert batches_digest([first]) == batches_digest([collator([Examples(out / "train.safetensors")[0]])])


def test_limits_on_pixels_make_rows_shorter(tmp_path: Path, qwen: Path) -> None:
    draw(tmp_path, "a.png", 1, size=(96, 96))
    write_jsonl(tmp_path / "a.jsonl", [asked(0, "a.png")])
    lengths = [
        prepared(tmp_path, qwen, TRAIN | {"images": limits}, out=name)[0].lengths
        for name, limits in (("whole", {}), ("less", {"max_pixels": 48 * 48}))
    ]
    assert [found.longest for found in lengths if found] == sorted(
        (found.longest for found in lengths if found), reverse=True
    )
    assert lengths[0] != lengths[1]


@pytest.mark.skipif(not (SHARED / "chartqa").is_dir(), reason="the sample of ChartQA is not here")
@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_a_batch_of_chartqa_is_what_the_models_own_processor_makes_of_it(
    tmp_path: Path, qwen: Path, llava: Path, family: str
) -> None:
    folder = {"qwen2_5_vl": qwen, "llava": llava}[family]
    (tmp_path / "chartqa").symlink_to(SHARED / "chartqa")
    found, out = prepared(tmp_path, folder, {"train": [{"path": "chartqa/val/*.json"}], "max_tokens": 4096})
    assert (source(found).used, source(found).images, found.problems) == (22, 22, ())
    chosen = Examples(out / "train.safetensors")[:3]
    batch = Collator(pad=0, processor_factory=ModelProcessor(folder, folder / "config.json", ImageLimits()))(chosen)
    processor = vlm_processor(folder)
    prompts = [example.tokens[: example.supervised.index(True)] for example in chosen]
    images = [load_image(picture) for example in chosen for picture in example.images]
    own = processor(text=["<image>" if family == "llava" else "<|image_pad|>"] * 3, images=images, return_tensors="pt")
    assert batch.extra is not None
    assert batch.extra.tensors["pixel_values"].reshape(own["pixel_values"].shape).equal(own["pixel_values"])
    token = processor_in(folder).geometry.image_token
    assert [prompt.count(token) for prompt in prompts] == [ids.tolist().count(token) for ids in own["input_ids"]]
    assert (
        batch.extra.tensors["places_I"].tolist() == (batch.input_ids_BT.flatten() == token).nonzero().flatten().tolist()
    )
    assert replace(chosen[0], images=()) != chosen[0]
