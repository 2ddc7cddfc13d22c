"""What a family of vision-language models provides: an `ImageGeometry`, which is known from the config alone and
sufficient for shapes; an `ImageProcessor`, which adds the model's own scaling and cutting of pixels; and a
`VisionForward`, which runs the model on a batch.

B rows, T tokens, I image tokens of a whole batch."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import PIL.Image
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import BaseImageProcessor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.utils import ModelOutput

from finefit.facts.files import read_object, reading_model
from finefit.objective.batch import Extra
from finefit.spec.data import ImageLimits
from finefit.spec.models import Tower

Config = Mapping[str, Any]
"""The contents of a config.json."""
Size = tuple[int, int]
"""Width and height in pixels, as decoded."""
Grid = tuple[int, ...]
"""The tower's input for an image, in the family's own units: patches (frames, height, width), or tiles."""
Pixels = Mapping[str, NDArray[Any]]
"""The pixel tensors of one image by name, in the form that the tower takes."""


class ImageInput(NamedTuple):
    """An image of a row, ready for the tower."""

    grid: Grid
    pixels: Pixels


TokenIds = NDArray[np.int64]
Lengths = Sequence[int]
ImageRows = Sequence[Sequence[ImageInput]]
"""The images of each row of a batch, in the order of their placeholders."""


class ImageGeometry(Protocol):
    @property
    def image_token(self) -> int:
        """The token whose embeddings are replaced by the features of the images, in order."""

    def num_tokens(self, grid: Grid) -> int:
        """Returns the image tokens of one image, which equal the features of the tower."""

    def square_grid(self, side: int) -> Grid:
        """Returns the grid of an unscaled square image with `side` pixels, in whole units of the family."""

    def blank_pixels(self, grid: Grid) -> Pixels:
        """Returns zeros in the shapes and dtypes of real pixels."""

    def extra(self, input_ids_BT: TokenIds, lengths: Lengths, rows: ImageRows, prompts: Lengths | None = None) -> Extra:
        """Returns what a batch carries besides its tokens, which are padded on the right beyond their own `lengths`.
        The tensor `places_I` holds the flat positions in B x T of the image tokens, in order; the rest is private to a
        family's geometry and forward. Without images it holds only what rows of text need (positions, masks).
        `prompts`: the number of tokens before each row's first supervised one, for families with bidirectional prompts;
        None: the rows are prompts alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageProcessor:
    """Opened by each process that needs one."""

    geometry: ImageGeometry
    placeholder: str
    """The chat template's text for an image; users may not write it."""
    identity: str
    """Equal if equal images become equal pixels and tokens."""
    grid: Callable[[Size], Grid]
    """Returns the grid of an image of this size. Raises ValueError if the model's processor rejects it."""
    text: Callable[[Size], str]
    """Returns the text that replaces the placeholder in the prompt, with as many image tokens as there will be
    features."""
    pixels: Callable[[PIL.Image.Image], Pixels]
    """Returns the pixels of an RGB image. Called in processes without a GPU."""
    plain_prompt: Callable[[str, str], str] = lambda prompt, start: start + prompt
    """(prompt, start) -> the text of a prompt without a chat template. The prompt has placeholders for its images; the
    start is the tokenizer's start token."""
    views: int | None = None
    """Images that every row must have; None: any number."""


class VisionForward(Protocol):
    """Runs the vision tower, inserts its features at the image tokens and runs the language model. The models' own
    forward would search for image tokens on the device and wait for it."""

    @property
    def towers(self) -> Mapping[Tower, tuple[str, ...]]:
        """Dotted names of modules in the whole model; the longest matching prefix decides the tower of a module."""

    def __call__(self, backbone: nn.Module, input_ids_BT: Tensor, extra: Extra | None, **settings: Any) -> ModelOutput:
        """Returns an output with `last_hidden_state`. `extra` comes from the family's geometry; None: text alone.
        `settings` are passed to the language model (a cache, ...). Reads nothing on the host, so a rehearsal runs the
        same code."""


@dataclass(frozen=True, slots=True)
class VisionFamily:
    geometry: Callable[[Config], ImageGeometry]
    processor: Callable[[Path, Config, ImageLimits], ImageProcessor]
    """Opens the processor from a folder with the model's files."""
    forward: VisionForward


def typed_config(config: Config) -> Any:
    """Returns the family's config class, with its defaults for what config.json omits."""
    with reading_model(f"the config.json of a {config['model_type']}", "use the config.json of the published model"):
        return CONFIG_MAPPING[str(config["model_type"])].from_dict(dict(config))


def load_processor(folder: Path, pil: type[BaseImageProcessor] | None = None) -> Any:
    """Loads the model's own processor, always with PIL: torchvision gives slightly different pixels, so rows would
    depend on the machine that prepared them. `pil`: its class, if transformers does not find it by itself."""
    with reading_model(f"the image processor of {folder}", "put the model's preprocessor_config.json there"):
        return AutoImageProcessor.from_pretrained(folder, backend="pil") if pil is None else pil.from_pretrained(folder)


def special_token(folder: Path, name: str = "image_token", default: str = "<image>") -> str:
    """Returns the token as the tokenizer's settings spell it, or the family's default."""
    path = folder / "tokenizer_config.json"
    settings = read_object(path) if path.is_file() else {}
    extra = settings.get("extra_special_tokens")
    found = settings.get(name) or (extra.get(name) if isinstance(extra, dict) else None) or default
    return str(found["content"] if isinstance(found, dict) else found)


def processor_identity(processor: Any, *others: object) -> str:
    """Returns a digest of everything that turns an image into pixels and tokens: its processor, and what the family
    adds."""
    content = json.dumps([type(processor).__name__, processor.to_dict(), others], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()
