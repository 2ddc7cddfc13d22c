"""Tiny vision-language models with random weights, each in a folder laid out as a published one, and a reading task
drawn for them.

The settings keep what tells the families apart: windows, deepstack, tiles, pinpoints, sliding layers, a class token.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Gemma3Processor,
    Idefics3Processor,
    LlavaNextProcessor,
    LlavaProcessor,
    PaliGemmaProcessor,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLProcessor,
    Qwen2VLProcessor,
    Qwen3VLProcessor,
)
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from tests.conftest import write_jsonl

FAMILIES: tuple[str, ...] = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "llava",
    "llava_next",
    "idefics3",
    "smolvlm",
    "gemma3",
    "paligemma",
)
PATCH, SIDE = 8, 32
"""Pixels of a patch's side, and of the square image that the towers of a fixed size see."""

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """A family's tokens beside the bytes, and how it writes a conversation."""

    end: str
    pad: str
    bos: str | None = None
    image: str
    others: tuple[str, ...] = ()
    named: Mapping[str, str]
    """Attributes of the tokenizer that the family's processor reads, by name."""
    template: str | None
    adds_bos: bool = False
    """Whether the tokenizer puts the bos token in front of all it reads, as those of Llama and Gemma do, whatever the
    template has written."""

    def tokens(self) -> list[str]:
        first = [word for word in (self.pad, self.end, self.bos) if word is not None]
        return [*dict.fromkeys([*first, self.image, *self.others])]


_QWEN = _Words(
    end="<|im_end|>",
    pad="<|endoftext|>",
    image="<|image_pad|>",
    others=("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|video_pad|>"),
    named={},
    template=(
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
        "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] }}{% "
        "endfor %}{% endif %}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
)
_IMAGES_FIRST = "{% for part in m['content'] if part['type'] == 'image' %}{{ '<image>\n' }}{% endfor %}"
_TEXTS = "{% for part in m['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
_LLAVA = _Words(
    end="</s>",
    pad="<pad>",
    bos="<s>",
    image="<image>",
    named={},
    template=(
        "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'].upper() + ': ' }}{% endif %}"
        + _IMAGES_FIRST
        + _TEXTS
        + (
            "{{ '</s>' if m['role'] == 'assistant' else ' ' }}{% endfor %}{% if add_generation_prompt %}{{ "
            "'ASSISTANT: ' }}{% endif %}"
        )
    ),
    adds_bos=True,
)
_LLAVA_NEXT = _Words(
    end="</s>",
    pad="<pad>",
    bos="<s>",
    image="<image>",
    named={},
    template=(
        "{% for m in messages %}{{ {'user': '[INST] ', 'assistant': ' '}.get(m['role'], '') }}"
        + _IMAGES_FIRST
        + _TEXTS
        + "{{ {'user': ' [/INST]', 'assistant': '</s>'}.get(m['role'], '\n') }}{% endfor %}"
    ),
    adds_bos=True,
)
_TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))


def _idefics(bos: str, *, adds_bos: bool) -> _Words:
    return _Words(
        end="<end_of_utterance>",
        pad="<pad>",
        bos=bos,
        image="<image>",
        others=("<fake_token_around_image>", "<global-img>", *_TILES),
        named={},
        template=(
            "{{ '"
            + bos
            + "' }}{% for m in messages %}{{ m['role'].capitalize() + (':' if m['content'][0]['type'] == 'image' "
            "else ': ') }}"
            "{% for part in m['content'] %}{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ "
            "part['text'] }}{% endif %}{% endfor %}"
            "{{ '<end_of_utterance>\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
        ),
        adds_bos=adds_bos,
    )


_GEMMA = _Words(
    end="<end_of_turn>",
    pad="<pad>",
    bos="<bos>",
    image="<image_soft_token>",
    others=("<eos>", "<start_of_turn>", "<start_of_image>", "<end_of_image>"),
    named={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    template=(
        "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' "
        "else m['role']) + '\n' }}"
        "{% if m['content'] is string %}{{ m['content'] | trim }}{% else %}{% for part in m['content'] %}"
        "{% if part['type'] == 'image' %}{{ '<start_of_image>' }}{% else %}{{ part['text'] | trim }}{% endif "
        "%}{% endfor %}{% endif %}"
        "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    adds_bos=True,
)
_PALIGEMMA = _Words(
    end="<eos>",
    pad="<pad>",
    bos="<bos>",
    image="<image>",
    others=(
        *(f"<loc{at:04}>" for at in range(1024)),
        *(f"<seg{at:03}>" for at in range(128)),
    ),  # its processor adds them where they are missing
    named={},
    template=None,
    adds_bos=True,
)
_WORDS: dict[str, _Words] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "llava": _LLAVA,
    "llava_next": _LLAVA_NEXT,
    "idefics3": _idefics("<|begin_of_text|>", adds_bos=True),
    "smolvlm": _idefics("<|im_start|>", adds_bos=False),
    "gemma3": _GEMMA,
    "paligemma": _PALIGEMMA,
}


def _alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _id(family: str, token: str | None) -> int | None:
    return None if token is None else _WORDS[family].tokens().index(token)


def _vocabulary_size(family: str) -> int:
    return len(_WORDS[family].tokens()) + len(_alphabet())


def vlm_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """One token per byte, and the family's own."""
    words = _WORDS[family]
    tokens = words.tokens()
    tokenizer = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate([*tokens, *_alphabet()])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if words.bos is not None and words.adds_bos:
        bos = words.bos
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B:1", special_tokens=[(bos, tokens.index(bos))]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=words.end,
        pad_token=words.pad,
        bos_token=words.bos,
        additional_special_tokens=[words.image, *words.others],
        **words.named,
    )
    if words.template is not None:
        fast.chat_template = words.template
    return fast


def _text(family: str, **own: Any) -> Settings:
    """The language model's settings that the families share."""
    words = _WORDS[family]
    return {
        "vocab_size": _vocabulary_size(family),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": _id(family, words.bos),
        "eos_token_id": _id(family, words.end),
        "pad_token_id": _id(family, words.pad),
    } | own


def _tower(**own: Any) -> Settings:
    """The settings of a tower that sees images of one size."""
    return {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": PATCH,
    } | own


def _qwen(family: str, *, rope: Settings | None = None, text: Settings | None = None, **vision: Any) -> Settings:
    tower = {"depth": 2, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2}
    rope_parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]} | (rope or {})
    return {
        "text_config": _text(family, rope_parameters=rope_parameters, **(text or {})),
        "vision_config": tower | vision,
        "image_token_id": _id(family, "<|image_pad|>"),
        "video_token_id": _id(family, "<|video_pad|>"),
        "vision_start_token_id": _id(family, "<|vision_start|>"),
        "vision_end_token_id": _id(family, "<|vision_end|>"),
    }


def _llava(family: str, model_type: str, **own: Any) -> Settings:
    return {
        "text_config": _text(family, model_type=model_type, head_dim=16),
        "vision_config": _tower(model_type="clip_vision_model"),
        "image_token_index": _id(family, "<image>"),
        "image_seq_length": (SIDE // PATCH) ** 2,
    } | own


def _tiled(family: str) -> Settings:
    return {
        "text_config": _text(family, model_type="llama", head_dim=16),
        "vision_config": _tower(),
        "image_token_id": _id(family, "<image>"),
        "pad_token_id": _id(family, "<pad>"),
        "scale_factor": 2,
    }


def _gemma3() -> Settings:
    text = _text(
        "gemma3",
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    )
    return {
        "text_config": text,
        "vision_config": _tower(vision_use_head=False),
        "mm_tokens_per_image": (SIDE // PATCH // 2) ** 2,
        "boi_token_index": _id("gemma3", "<start_of_image>"),
        "eoi_token_index": _id("gemma3", "<end_of_image>"),
        "image_token_index": _id("gemma3", "<image_soft_token>"),
    }


def _paligemma() -> Settings:
    text = _text("paligemma", model_type="gemma", head_dim=16)
    return {
        "text_config": text,
        "vision_config": _tower(model_type="siglip_vision_model", vision_use_head=False),
        "image_token_index": _id("paligemma", "<image>"),
        "vocab_size": text["vocab_size"],
        "projection_dim": text["hidden_size"],
        "hidden_size": text["hidden_size"],
    }


_CONFIGS: dict[str, Callable[[], Settings]] = {
    "qwen2_vl": lambda: _qwen("qwen2_vl", embed_dim=32, hidden_size=64, mlp_ratio=2),
    "qwen2_5_vl": lambda: _qwen(
        "qwen2_5_vl",
        hidden_size=32,
        intermediate_size=64,
        out_hidden_size=64,
        window_size=4 * PATCH,
        fullatt_block_indexes=[1],
    ),
    "qwen3_vl": lambda: _qwen(
        "qwen3_vl",
        rope={"mrope_interleaved": True},
        text={"head_dim": 16},
        hidden_size=32,
        intermediate_size=64,
        out_hidden_size=64,
        num_position_embeddings=36,
        deepstack_visual_indexes=[0],
    ),
    "llava": lambda: _llava("llava", "llama"),
    "llava_next": lambda: _llava(
        "llava_next", "mistral", image_grid_pinpoints=[[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
    ),
    "idefics3": lambda: _tiled("idefics3"),
    "smolvlm": lambda: _tiled("smolvlm"),
    "gemma3": _gemma3,
    "paligemma": _paligemma,
}


def _merged(settings: Settings, changes: Settings) -> Settings:
    """A change of `text_config` or `vision_config` changes the keys that it names."""
    deep = {
        key: settings[key] | value if isinstance(value, dict) and isinstance(settings.get(key), dict) else value
        for key, value in changes.items()
    }
    return settings | deep


def vlm_config(family: str, **changes: Any) -> PretrainedConfig:
    """`changes` are keys of config.json: `vlm_config("llava", text_config={"num_hidden_layers": 4})`."""
    config: PretrainedConfig = AutoConfig.for_model(family, **_merged(_CONFIGS[family](), changes))
    return config


_HALF = {"do_normalize": True, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}


def _qwen_files(config: PretrainedConfig, kind: str) -> dict[str, Settings]:
    vision = config.vision_config
    tile = vision.patch_size * vision.spatial_merge_size
    image = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": kind,
        "size": {"shortest_edge": 4 * tile**2, "longest_edge": 36 * tile**2},
        "patch_size": vision.patch_size,
        "merge_size": vision.spatial_merge_size,
        "temporal_patch_size": vision.temporal_patch_size,
    }
    return {"preprocessor_config.json": image | _HALF}


def _llava_files(config: PretrainedConfig, kind: str, image_kind: str, **own: Any) -> dict[str, Settings]:
    side = config.vision_config.image_size
    whole = {
        "processor_class": kind,
        "image_token": "<image>",
        "num_additional_image_tokens": 1,
        "patch_size": config.vision_config.patch_size,
        "vision_feature_select_strategy": config.vision_feature_select_strategy,
    }
    image = {
        "image_processor_type": image_kind,
        "size": {"shortest_edge": side},
        "crop_size": {"height": side, "width": side},
    }
    return {"processor_config.json": whole, "preprocessor_config.json": image | own | _HALF}


def _tiled_files(config: PretrainedConfig, kind: str, image_kind: str) -> dict[str, Settings]:
    vision = config.vision_config
    length = (vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2
    image = {
        "image_processor_type": image_kind,
        "do_image_splitting": True,
        "size": {"longest_edge": 2 * vision.image_size},
        "max_image_size": {"longest_edge": vision.image_size},
    }
    return {
        "processor_config.json": {"processor_class": kind, "image_seq_len": length},
        "preprocessor_config.json": image | _HALF,
    }


def _square(config: PretrainedConfig, image_kind: str) -> Settings:
    side = config.vision_config.image_size
    return {"image_processor_type": image_kind, "size": {"height": side, "width": side}} | _HALF


def _gemma3_files(config: PretrainedConfig) -> dict[str, Settings]:
    whole = {"processor_class": "Gemma3Processor", "image_seq_length": config.mm_tokens_per_image}
    return {"processor_config.json": whole, "preprocessor_config.json": _square(config, "Gemma3ImageProcessor")}


def _paligemma_files(config: PretrainedConfig) -> dict[str, Settings]:
    length = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
    image = {"processor_class": "PaliGemmaProcessor", "image_seq_length": length}
    return {"preprocessor_config.json": _square(config, "SiglipImageProcessor") | image}


_FILES: dict[str, Callable[[PretrainedConfig], dict[str, Settings]]] = {
    "qwen2_vl": lambda config: _qwen_files(config, "Qwen2VLProcessor"),
    "qwen2_5_vl": lambda config: _qwen_files(config, "Qwen2_5_VLProcessor"),
    "qwen3_vl": lambda config: _qwen_files(config, "Qwen3VLProcessor"),
    "llava": lambda config: _llava_files(config, "LlavaProcessor", "CLIPImageProcessor"),
    "llava_next": lambda config: _llava_files(
        config, "LlavaNextProcessor", "LlavaNextImageProcessor", image_grid_pinpoints=config.image_grid_pinpoints
    ),
    "idefics3": lambda config: _tiled_files(config, "Idefics3Processor", "Idefics3ImageProcessor"),
    "smolvlm": lambda config: _tiled_files(config, "SmolVLMProcessor", "SmolVLMImageProcessor"),
    "gemma3": _gemma3_files,
    "paligemma": _paligemma_files,
}


def _random_model(config: PretrainedConfig, *, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
        if (
            config.model_type == "gemma3"
        ):  # its projector begins as zeros, through which no image is seen and no gradient comes
            torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.02)
    return model


def make_vlm(family: str, folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """The whole folder of a model; what the processor is told follows the configuration, so that `changes` to it hold
    everywhere."""
    config = vlm_config(family, **changes)
    _random_model(config, seed=seed).save_pretrained(folder)
    vlm_tokenizer(family).save_pretrained(folder)
    for name, content in _FILES[family](config).items():
        (folder / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
    return folder


def _without_video(kind: type[ProcessorMixin]) -> type[ProcessorMixin]:
    """The processor's own class less its part for videos, which asks for torchvision."""

    def begin(
        self: Any, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **others: Any
    ) -> None:
        kind.__init__(self, image_processor, tokenizer, None, chat_template=chat_template, **others)

    return type(kind.__name__, (kind,), {"__init__": begin, "__module__": kind.__module__})


_PROCESSORS: dict[str, type[ProcessorMixin]] = {
    "qwen2_vl": _without_video(Qwen2VLProcessor),
    "qwen2_5_vl": _without_video(Qwen2_5_VLProcessor),
    "qwen3_vl": _without_video(Qwen3VLProcessor),
    "llava": LlavaProcessor,
    "llava_next": LlavaNextProcessor,
    "idefics3": Idefics3Processor,
    # writes the same prompts; SmolVLM's own wants torchvision and num2words, both for videos alone
    "smolvlm": Idefics3Processor,
    "gemma3": Gemma3Processor,
    "paligemma": PaliGemmaProcessor,
}
# transformers 5.17 takes a file that has the word TorchvisionBackend in it, if only in a docstring, for one that needs
# torchvision, and hides what it
# defines: these two, and AutoImageProcessor. Imported from their own modules they work.
_HIDDEN: dict[str, type[Any]] = {"idefics3": Idefics3ImageProcessorPil, "smolvlm": SmolVLMImageProcessorPil}


def vlm_processor(folder: Path) -> ProcessorMixin:
    """What AutoProcessor would load, of PIL's image processor, whether torchvision is installed or not."""
    family = AutoConfig.from_pretrained(folder).model_type
    image = (
        _HIDDEN[family].from_pretrained(folder)
        if family in _HIDDEN
        else AutoImageProcessor.from_pretrained(folder, backend="pil")
    )
    kind = _PROCESSORS[family]
    settings, _ = kind.get_processor_dict(folder)
    processor: ProcessorMixin = kind.from_args_and_dict([image, AutoTokenizer.from_pretrained(folder)], settings)
    return processor


def ask(processor: ProcessorMixin, question: str, *, images: int) -> str:
    """A prompt with marks for its images, as the family's processor wants it."""
    if processor.chat_template is None:
        return "<image>" * images + question
    content = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": question}]
    text: str = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return text


def vlm_inputs(processor: ProcessorMixin, question: str, images: Sequence[PIL.Image.Image]) -> dict[str, torch.Tensor]:
    """What the model's forward takes; one bos token, though template and tokenizer may each write one."""
    text = ask(processor, question, images=len(images))
    bos = processor.tokenizer.bos_token
    adds = bos is None or not text.startswith(bos)
    prepared = processor(
        text=[text], images=[list(images)], add_special_tokens=adds, return_tensors="np"
    )  # PaliGemma's warns of torch tensors
    return {name: torch.as_tensor(value) for name, value in prepared.items() if name != "labels"}


def digit_image(digit: int, *, size: tuple[int, int], seed: int) -> PIL.Image.Image:
    """A dark digit on a light ground, whole within the image; `size` is width and height."""
    chance = random.Random(f"{seed}/{digit}")
    image = PIL.Image.new("RGB", size, tuple(chance.randrange(190, 256) for _ in range(3)))
    draw = PIL.ImageDraw.Draw(image)
    font = PIL.ImageFont.load_default(size=min(size) * chance.uniform(0.8, 1.1))
    left, top, right, bottom = draw.textbbox((0, 0), str(digit), font=font)
    x, y = chance.uniform(0, size[0] - (right - left)), chance.uniform(0, size[1] - (bottom - top))
    draw.text((int(x - left), int(y - top)), str(digit), font=font, fill=tuple(chance.randrange(110) for _ in range(3)))
    return image


QUESTIONS = ("Which digit?", "What is drawn?", "Read the digit.", "Which number is it?")


def write_reading_task(folder: Path, *, rows: int, seed: int, name: str, size: tuple[int, int] | None = None) -> Path:
    """`name`.jsonl and its images; every digit equally often; images of one size, or of many."""
    chance = random.Random(f"{seed}/{name}")
    (folder / "images").mkdir(parents=True, exist_ok=True)
    digits = [at % 10 for at in range(rows)]
    chance.shuffle(digits)
    written = []
    for at, digit in enumerate(digits):
        path = f"images/{name}-{at}.png"
        sides = size or (chance.randrange(32, 65), chance.randrange(32, 65))
        digit_image(digit, size=sides, seed=chance.randrange(2**32)).save(folder / path)
        written.append({"image": path, "question": chance.choice(QUESTIONS), "answer": str(digit)})
    return write_jsonl(folder / f"{name}.jsonl", written)
