"""Faults that are planted in the files of a tiny project's model, each of which a run cannot begin with."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Fault = Callable[[Path], object]
"""Spoils the project in a folder."""
WEIGHTS = "model.safetensors"


def without(*names: str) -> Fault:
    def plant(project: Path) -> None:
        for name in names:
            (project / "model" / name).unlink()

    return plant


def written(name: str, content: bytes | str) -> Fault:
    raw = content if isinstance(content, bytes) else content.encode()
    return lambda project: (project / "model" / name).write_bytes(raw)


def changed(name: str, **values: Any) -> Fault:
    def plant(project: Path) -> None:
        file = project / "model" / name
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return plant


def header(change: Callable[[dict[str, Any]], object]) -> Fault:
    """The header of the weights with other values; the data stay."""

    def plant(project: Path) -> None:
        file = project / "model" / WEIGHTS
        raw = file.read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        entries = json.loads(raw[8:end])
        change(entries)
        new = json.dumps(entries).encode()
        file.write_bytes(len(new).to_bytes(8, "little") + new + raw[end:])

    return plant


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Fault:
    def plant(project: Path) -> None:
        file = project / "model" / WEIGHTS
        found = load_file(file)
        change(found)
        save_file(found, file, metadata={"format": "pt"})

    return plant


def resized(change: Callable[[int], int]) -> Fault:
    def plant(project: Path) -> None:
        file = project / "model" / WEIGHTS
        raw = file.read_bytes()
        file.write_bytes((raw + bytes(64))[: change(len(raw))])

    return plant


def missing_shard(project: Path) -> None:
    model = project / "model"
    (model / WEIGHTS).rename(model / "model-00001-of-00002.safetensors")
    places = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def header_bomb(project: Path) -> None:
    """Sparse: it takes no space on the disk."""
    with (project / "model" / WEIGHTS).open("r+b") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(8 + 200_000_000)


def huge(name: str) -> Fault:
    def plant(project: Path) -> None:
        with (project / "model" / name).open("r+b") as file:
            file.truncate(300 << 20)

    return plant


def one_letter(project: Path) -> None:
    file = project / "model" / "tokenizer.json"
    file.write_text(file.read_text().replace('"BPE"', '"BPF"'))


def _first(entries: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(entry for name, entry in entries.items() if name != "__metadata__")
    return found


_UP = "model.layers.0.mlp.up_proj.weight"
_ODD_VALUES: tuple[Any, ...] = (None, [], {}, "text", -1, 0, 1e99, True, [[]], {"a": 1})
_DEEP = "[" * 100_000 + "]" * 100_000

WEIGHT_FAULTS: dict[str, Fault] = {
    "weights missing": without(WEIGHTS),
    "a shard missing": missing_shard,
    "a cut file": resized(lambda size: size - 100),
    "a longer file": resized(lambda size: size + 8),
    "an empty file": resized(lambda _: 0),
    "a header bomb": header_bomb,
    "a header that is not JSON": written(WEIGHTS, (4).to_bytes(8, "little") + b"{]}{"),
    "a header nested deeply": written(WEIGHTS, len(_DEEP).to_bytes(8, "little") + _DEEP.encode()),
    "negative offsets": header(lambda entries: _first(entries).update(data_offsets=[-8, 0])),
    "overlapping offsets": header(lambda entries: entries[_UP].update(data_offsets=_first(entries)["data_offsets"])),
    "another dtype": header(lambda entries: _first(entries).update(dtype="F16")),
    "an unknown dtype": header(lambda entries: _first(entries).update(dtype="F99")),
    "integers as weights": header(lambda entries: entries[_UP].update(dtype="I32")),
    "a negative shape": header(lambda entries: _first(entries).update(shape=[-1, -16])),
    "a tensor missing": tensors(lambda found: found.pop(_UP)),
    "a tensor of another shape": tensors(lambda found: found.update({_UP: torch.zeros(3, 16)})),
    "another model's config": changed("config.json", hidden_size=32),
}
CONFIG_FAULTS: dict[str, Fault] = {
    "config missing": without("config.json"),
    "config not UTF-8": written("config.json", b"\xff\xfe\xfa"),
    "config a list": written("config.json", "[]"),
    "config nested deeply": written("config.json", '{"a":' + _DEEP + "}"),
    "config huge": huge("config.json"),
    "heads that do not divide": changed("config.json", num_attention_heads=3),
    "key heads that do not divide": changed("config.json", num_key_value_heads=3),
    "no heads": changed("config.json", num_attention_heads=0),
    "a number as text": changed("config.json", hidden_size="sixteen"),
    "a negative number": changed("config.json", vocab_size=-1),
    "an unknown dtype in the config": changed("config.json", dtype="float99"),
    "an unknown model type": changed("config.json", model_type="unheard_of"),
    "a list as model type": changed("config.json", model_type=["llama"]),
    "an image classifier": changed("config.json", model_type="vit"),
    "an unknown activation": changed("config.json", hidden_act="unheard_of"),
}
TOKENIZER_FAULTS: dict[str, Fault] = {
    "tokenizer missing": without("tokenizer.json", "tokenizer_config.json"),
    "one letter in tokenizer.json": one_letter,
    "tokenizer.json cut": written("tokenizer.json", '{"version": "1.0", "mod'),
    "tokenizer.json huge": huge("tokenizer.json"),
    "tokenizer_config null": written("tokenizer_config.json", "null"),
    "tokenizer_config a list": written("tokenizer_config.json", "[1]"),
    "tokenizer_config nested deeply": written("tokenizer_config.json", '{"a":' + _DEEP + "}"),
    "tokenizer_config not UTF-8": written("tokenizer_config.json", b"\xff\xff"),
    "a list as tokenizer class": changed("tokenizer_config.json", tokenizer_class=["a"]),
    "a dict as token": changed("tokenizer_config.json", eos_token={"a": 1}),
    "text as eos": changed("generation_config.json", eos_token_id="end"),
    "a list of text as eos": changed("generation_config.json", eos_token_id=["end"]),
    "generation_config a list": written("generation_config.json", "[]"),
    "generation_config not JSON": written("generation_config.json", "{"),
}


def shards(project: Path) -> None:
    """The same tensors in two files with their index."""
    model = project / "model"
    found = sorted(load_file(model / WEIGHTS).items())
    names = [f"model-0000{at}-of-00002.safetensors" for at in (1, 2)]
    halves = (found[: len(found) // 2], found[len(found) // 2 :])
    for name, half in zip(names, halves, strict=True):
        save_file(dict(half), model / name, metadata={"format": "pt"})
    places = {key: name for name, half in zip(names, halves, strict=True) for key, _ in half}
    size = sum(tensor.nbytes for _, tensor in found)
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / WEIGHTS).unlink()


def index_without_metadata(project: Path) -> None:
    """Which transformers reads, and finefit does not."""
    shards(project)
    file = project / "model" / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": json.loads(file.read_text())["weight_map"]}))


def _halved(found: dict[str, torch.Tensor]) -> None:
    found.update({name: tensor.to(torch.bfloat16) for name, tensor in found.items()})


def _word_pieces(project: Path) -> None:
    """A vocabulary of whole words and letters in vocab.txt, as BERT's family has it."""
    model = project / "model"
    (model / "tokenizer.json").unlink()
    letters = [chr(code) for code in range(33, 127)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    (model / "vocab.txt").write_text("\n".join(words) + "\n")
    settings = {"tokenizer_class": "BertTokenizer", "eos_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + '[SEP]' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
    )


NO_FAULTS: dict[str, Fault] = {
    "weights in half precision": tensors(_halved),
    "weights in two files": shards,
    "pickled weights beside the others": written("pytorch_model.bin", b"\x80\x02"),
    "a config with keys of other tools": changed("config.json", unsloth={"version": 1}, _commit=[None]),
    "a config without its library": changed("config.json", transformers_version=None),
    "no generation_config": without("generation_config.json"),
    "a README": written("README.md", "# caf\xe9"),
    "a tokenizer with settings of other tools": changed("tokenizer_config.json", chat_tool=[1, 2]),
    "a vocabulary in vocab.txt": _word_pieces,
}
"""What a folder of a model may hold: `check` must not refuse it, and a step can be taken."""


WEIGHT_FAULTS["an index without metadata"] = index_without_metadata


def image(change: Callable[[Path], object]) -> Fault:
    """Spoils the first image that a row names."""
    return lambda project: change(project / "images" / "train-0.png")


def _as_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


IMAGE_FAULTS: dict[str, Fault] = {
    "an image missing": image(Path.unlink),
    "an image cut": image(lambda file: file.write_bytes(file.read_bytes()[:60])),
    "an image without bytes": image(lambda file: file.write_bytes(b"")),
    "an image that is text": image(lambda file: file.write_text("not an image")),
    "a folder as image": image(_as_folder),
    "the processor's settings missing": without("preprocessor_config.json"),
    "the processor's settings cut": written("preprocessor_config.json", '{"min_pix'),
    "the processor's settings a list": written("preprocessor_config.json", "[1]"),
    "a patch size as text": changed("preprocessor_config.json", patch_size="fourteen"),
}
TEMPLATE = "chat_template.jinja"
TEMPLATE_FAULTS: dict[str, Fault] = {
    "a template that cannot be read": written(TEMPLATE, "{% for"),
    "a template of endless loops": written(
        TEMPLATE, "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "a template of endless recursion": written(
        TEMPLATE, "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a template that multiplies a text": written(TEMPLATE, "{{ 'a' * 10**10 }}"),
    "a template that pads a text": written(TEMPLATE, "{{ 'x' | center(10**10) }}"),
    "a template that writes too much": written(TEMPLATE, "{{ 'a' * 10**7 }}"),
    "a template with loops in loops": written(TEMPLATE, "{% for i in [1] %}" * 30 + "{% endfor %}" * 30),
}


def copied(project: Path, place: Path) -> Path:
    shutil.copytree(project, place)
    return place


def damage(project: Path, seed: int) -> str:
    """One file of the model with random damage; says which."""
    chance = random.Random(seed)
    file = chance.choice(sorted(path for path in (project / "model").iterdir() if path.is_file()))
    raw = bytearray(file.read_bytes())
    kind = chance.choice(("bits", "cut", "value", "value", "insert"))
    if kind == "value" and file.suffix == ".json" and file.name != "tokenizer.json":
        found = json.loads(raw)
        key = chance.choice(sorted(found) or ["a"])
        found[key] = chance.choice(_ODD_VALUES)
        file.write_text(json.dumps(found))
        return f"{file.name}: {key} = {found[key]!r}"
    if kind == "cut":
        raw = raw[: chance.randrange(len(raw))]
    elif kind == "insert":
        at = chance.randrange(len(raw))
        raw[at:at] = chance.randbytes(chance.randrange(1, 9))
    else:
        for _ in range(chance.randrange(1, 5)):
            raw[chance.randrange(min(len(raw), 4000))] ^= 1 << chance.randrange(8)
    file.write_bytes(raw)
    return f"{file.name}: {kind}"
