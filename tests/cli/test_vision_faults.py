"""What may be wrong where a model sees: each is refused before the first step, by file, row or name, with exit code and
remedy."""

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Finefit, rewrite
from tests.conftest import make_model_folder, write_jsonl
from tests.vision_models import digit_image, make_vlm

SPEC = """\
name: sees
seed: 7
device: cpu
model: {kind: folder, path: model}
tuning: {kind: lora, rank: 2, alpha: 4, targets: {language: all-linear, vision: all-linear, projector: all-linear}}
data:
  train: [{path: train.jsonl}]
  max_tokens: 256
optimizer: {lr: 1e-3}
schedule: {steps: 2}
global_batch: 2
levers: {micro_batch: 2}
"""
ROWS = 4
Spoil = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four rows of one image each, and a model that sees; the working directory."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    make_vlm("qwen2_5_vl", tmp_path / "model")
    for at in range(ROWS):
        digit_image(at, size=(32, 32), seed=at).save(tmp_path / f"{at}.png")
    write_jsonl(tmp_path / "train.jsonl", [_row(at) for at in range(ROWS)])
    (tmp_path / "spec.yaml").write_text(SPEC, encoding="utf-8")
    return tmp_path


def _row(at: int, **changes: Any) -> dict[str, Any]:
    """Of the image `at`; a change to None takes the key away."""
    row = {"image": f"{at}.png", "question": f"Which digit is this, the one of {at}?", "answer": str(at)} | changes
    return {key: value for key, value in row.items() if value is not None}


def _second(**changes: Any) -> Spoil:
    return lambda folder: write_jsonl(
        folder / "train.jsonl", [_row(0), _row(1, **changes), *(_row(at) for at in range(2, ROWS))]
    )


def _image(content: bytes | Callable[[bytes], bytes]) -> Spoil:
    """In place of the second row's."""

    def spoil(folder: Path) -> None:
        path = folder / "1.png"
        path.write_bytes(content if isinstance(content, bytes) else content(path.read_bytes()))

    return spoil


def _outside(folder: Path) -> None:
    """There is an image, and not where images may lie."""
    inner = folder / "inner"
    inner.mkdir()
    for name in ("train.jsonl", "0.png", "2.png", "3.png"):
        (folder / name).rename(inner / name)
    write_jsonl(inner / "train.jsonl", [_row(0), _row(1, image="../1.png"), _row(2), _row(3)])
    rewrite(folder / "spec.yaml", ("path: train.jsonl", "path: inner/train.jsonl"))


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


EMPTY = (
    b"\x89PNG\r\n\x1a\n"
    + _chunk(b"IHDR", struct.pack(">IIBBBBB", 0, 0, 8, 2, 0, 0, 0))
    + _chunk(b"IDAT", zlib.compress(b""))
    + _chunk(b"IEND", b"")
)
"""A whole PNG of 0 x 0 pixels."""
MEND = "or set data.bad_rows: drop to drop and count them"


def _messages(text: str) -> Spoil:
    said = [{"role": "user", "content": text}, {"role": "assistant", "content": "1"}]
    rows = [
        {
            "messages": [{"role": "user", "content": "<image>Which digit?"}, {"role": "assistant", "content": str(at)}],
            "images": [f"{at}.png"],
        }
        for at in range(ROWS)
    ]
    rows[1] = {"messages": said, "images": ["1.png"]}
    return lambda folder: write_jsonl(folder / "train.jsonl", rows)


BAD_ROWS: dict[str, tuple[Spoil, str]] = {
    "an image that is not there": (
        lambda folder: (folder / "1.png").unlink(),
        "train.jsonl:2 1.png does not exist: looked in",
    ),
    "a file that is no image": (
        _image(b"not an image"),
        "train.jsonl:2 1.png is not an image that can be read: its 12 bytes begin with b'not an i'",
    ),
    "an image that is cut off": (
        _image(lambda content: content[: len(content) // 2]),
        "train.jsonl:2 1.png cannot be decoded: ",
    ),
    "an image of no pixels": (_image(EMPTY), "train.jsonl:2 1.png is"),
    "an image outside of the folder": (_outside, "inner/train.jsonl:2 ../1.png is outside of"),
    "an absolute path": (_second(image="/etc/1.png"), "train.jsonl:2 /etc/1.png is outside of"),
    "a row without its image": (_second(image=None), "train.jsonl:2 "),
    "more marks than images": (
        _messages("<image> and <image>, which digit?"),
        "train.jsonl:2 has 2 <image> placeholders and 1 images",
    ),
}


@pytest.mark.parametrize("fault", BAD_ROWS)
def test_a_row_that_cannot_be_seen_is_refused_by_file_and_row_or_left_out_and_counted(
    folder: Path, finefit: Finefit, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    spoil, problem = BAD_ROWS[fault]
    spoil(folder)
    answer = finefit("run", "spec.yaml")
    assert answer.code == 2, answer.err
    assert problem in answer.err
    assert MEND in answer.err
    assert not list(folder.glob("runs/*"))
    monkeypatch.setattr("finefit.preflight.training.forecast_here", _invented_forecast)
    rewrite(folder / "spec.yaml", ("data:\n", "data:\n  bad_rows: drop\n"))
    told = finefit("check", "spec.yaml", "--json")
    train = told.document["ledger"]["sources"][0]
    assert (train["read"], train["used"]) == (ROWS, ROWS - 1), told.err


def _invented_forecast(_spec: object, _base: object, lengths: Any, _machine: object, **_: object) -> Any:
    from tests.forecasts import make_forecast

    return make_forecast(lengths=lengths, total_steps=2, host_bytes=1, disk_bytes=1)


def _spec(*replaced: tuple[str, str]) -> Spoil:
    return lambda folder: rewrite(folder / "spec.yaml", *replaced)


def _without_images(folder: Path) -> None:
    write_jsonl(folder / "train.jsonl", [_row(at, image=None) for at in range(ROWS)])


def _blind(folder: Path) -> None:
    """A model of text alone in place of the one that sees."""
    for path in (folder / "model").iterdir():
        path.unlink()
    make_model_folder(folder / "model")
    rewrite(folder / "spec.yaml", (", targets: {language: all-linear, vision: all-linear, projector: all-linear}", ""))


def _blind_with_towers(folder: Path) -> None:
    _blind(folder)
    _without_images(folder)
    rewrite(folder / "spec.yaml", ("alpha: 4", "alpha: 4, targets: {vision: all-linear}"))


FOUND = "adapters in a tower that no row shows anything"
"""By the rehearsal: a finding of the check, not a mistake in what was written."""
REFUSED: dict[str, tuple[Spoil, str, str]] = {
    "a field that no row has": (
        _spec(("train.jsonl}", "train.jsonl, fields: {prompt: question, answer: answer, images: picture}}")),
        "train.jsonl has no column picture, which fields.images names",
        "the columns are",
    ),
    "a target that matches nothing in its tower": (
        _spec(("vision: all-linear", "vision: [gate_porj]")),
        "tuning.targets: gate_porj matches no linear layer of the tower vision",
        "its linear layers are",
    ),
    "a layer of one tower asked of another": (
        _spec(("vision: all-linear", "vision: [q_proj]")),
        "tuning.targets: q_proj matches no linear layer of the tower vision",
        "its linear layers are",
    ),
    FOUND: (_without_images, "the tower vision", "no row has an image"),
    "the model's own mark in a text": (
        _messages("<image>Which digit? <|image_pad|>"),
        "train.jsonl:2 the text holds '<|image_pad|>', which the model reads as an image",
        ("with <image> in its place, or rephrase the text, or set data.bad_rows: drop to drop and count them"),
    ),
    "rows with images for a model of text": (
        _blind,
        "train.jsonl holds images, which this text-only model cannot see",
        "",
    ),
    "towers of a model of text": (
        _blind_with_towers,
        "tuning.targets names layers of the tower vision, and LlamaForCausalLM has none",
        "a vision-language model",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_could_never_learn_to_see_is_refused_by_name_before_the_first_step(
    folder: Path, finefit: Finefit, fault: str
) -> None:
    spoil, problem, remedy = REFUSED[fault]
    spoil(folder)
    answer = finefit("run", "spec.yaml")
    assert answer.code == (1 if fault == FOUND else 2), answer.err
    assert problem in answer.err + answer.out
    assert remedy in answer.err + answer.out
    assert not list(folder.glob("runs/*/stages/*/metrics.jsonl"))


def test_an_image_that_went_since_its_row_was_prepared_is_told(
    folder: Path, finefit: Finefit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finefit.preflight.training.forecast_here", _invented_forecast)
    assert finefit("check", "spec.yaml").code == 0
    (folder / "1.png").unlink()
    answer = finefit("check", "spec.yaml", "--json")
    assert answer.code == 1
    assert "train.jsonl:2 1.png does not exist" in json.dumps(answer.document)
