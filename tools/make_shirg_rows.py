"""Writes the rows of the recipe shirg/twin: digits to be read, and a tokenizer of single bytes for them.

Ink is dark on light, chalk is light on dark. The twin learns to read ink first, and chalk by its adapters. No image
stands twice.

    python tools/make_shirg_rows.py src/finefit/recipes/shirg
"""

import io
import json
import random
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont

NUM_ROWS = {"ink-train": 300, "ink-test": 50, "chalk-train": 300, "chalk-test": 100}
SIDE = 28
QUESTION = "Which digit?"
SPECIAL = ("<|end|>", "<|pad|>", "<|mask|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_LEVELS = 8


def digit_image(digit: int, chance: random.Random, *, is_chalk: bool) -> PIL.Image.Image:
    """About as high as the image, a little turned and out of the middle."""
    light, dark = chance.randrange(190, 256), chance.randrange(70)
    ground, stroke = (dark, light) if is_chalk else (light, dark)
    image = PIL.Image.new("L", (SIDE, SIDE), ground)
    draw = PIL.ImageDraw.Draw(image)
    font = PIL.ImageFont.load_default(size=SIDE * chance.uniform(0.95, 1.05))
    left, top, right, bottom = draw.textbbox((0, 0), str(digit), font=font)
    x, y = ((SIDE - far - near) / 2 + chance.uniform(-1, 1) for near, far in ((left, right), (top, bottom)))
    draw.text((x, y), str(digit), font=font, fill=stroke)
    return image.rotate(chance.uniform(-5, 5), PIL.Image.Resampling.BILINEAR, fillcolor=ground).quantize(_LEVELS)


def png(image: PIL.Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def rows(name: str, seen: set[bytes]) -> Iterator[tuple[dict[str, str], bytes]]:
    """Every digit equally often."""
    chance = random.Random(name)
    digits = [at % 10 for at in range(NUM_ROWS[name])]
    chance.shuffle(digits)
    for at, digit in enumerate(digits):
        while (image := png(digit_image(digit, chance, is_chalk=name.startswith("chalk")))) in seen:
            pass
        seen.add(image)
        yield {"image": f"{name}-{at:03}.png", "question": QUESTION, "answer": str(digit)}, image


def write_tokenizer(folder: Path) -> None:
    """One token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end, pad, *others = SPECIAL
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, pad_token=pad, additional_special_tokens=others
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    seen: set[bytes] = set()
    with zipfile.ZipFile(folder / "digits.zip", "w") as archive:
        for name in NUM_ROWS:
            made = list(rows(name, seen))
            for row, image in made:
                archive.writestr(zipfile.ZipInfo(row["image"]), image)
            lines = "".join(json.dumps(row) + "\n" for row, _ in made)
            (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    write_tokenizer(folder / "tokenizer")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
