"""What the records of a published data set leave to its documentation: the file that an image's id means, and the split that a number means."""

from collections.abc import Collection
from typing import Final

from finefit.data.columns import Column, Sample

_IMAGES: Final = {
    frozenset({"image_id", "flickr_original_url"}): "{image_id}.jpg",  # TextVQA
    frozenset(
        {"id", "imageURL", "questions"}
    ): "{id}",  # OCR-VQA: the extension is that of the address, and many save all as .jpg
    frozenset({"image_id", "data_subtype"}): "COCO_{data_subtype}_{image_id:012}.jpg",  # VQAv2, on images of COCO
}
"""By the columns that tell the data set."""
_SPLITS: Final = {"train": "1", "validation": "2", "test": "3"}
_NUMBERED: Final = frozenset({"imageURL", "questions", "split"})
"""OCR-VQA keeps its splits in one file."""


def image_column(seen: Sample) -> Column | None:
    """Where records give no path of an image, but its id."""
    given = {name for name, values in seen.values.items() if values}
    return next((seen.column(name, "images") for told_by, name in _IMAGES.items() if told_by <= given), None)


def numbered_split(columns: Collection[str], split: str) -> dict[str, tuple[str, ...]]:
    """What a record of this split has, and in which column; empty where the data set numbers none."""
    return {"split": (_SPLITS[split],)} if frozenset(columns) >= _NUMBERED and split in _SPLITS else {}
