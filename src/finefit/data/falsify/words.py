"""The words that the rules go by: a file of ours, or one of the user's in its place."""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from finefit.errors import DataError


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


class KindOfTerm(_Strict):
    words: tuple[str, ...] = ()
    endings: tuple[str, ...] = ()


class Negation(_Strict):
    auxiliaries: tuple[str, ...] = ()
    perfect: tuple[str, ...] = ()
    participles: tuple[str, ...] = ()
    verbs: tuple[str, ...] = ()
    subjects: tuple[str, ...] = ()
    finite: tuple[str, ...] = ()
    past: Mapping[str, str] = Field(default_factory=dict)
    existing: tuple[str, ...] = ()
    uncountable: tuple[str, ...] = ()
    opposites: tuple[tuple[str, str], ...] = ()
    bound: tuple[str, ...] = ()
    negative: tuple[str, ...] = ()


class Sentences(_Strict):
    abbreviations: tuple[str, ...] = ()


class Numbers(_Strict):
    units: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()


class Words(_Strict):
    """What each list is for stands in words.yaml. Compared and hashed by identity, so that what is derived from it can be kept."""

    kinds: Mapping[str, KindOfTerm] = Field(default_factory=dict)
    no_terms: tuple[str, ...] = ()
    negation: Negation = Negation()
    sentences: Sentences = Sentences()
    numbers: Numbers = Numbers()

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


@cache
def shipped_words() -> Words:
    return _parse(files("finefit.data.falsify").joinpath("words.yaml").read_text("utf-8"), "words.yaml")


def read_words(path: Path) -> Words:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"the word lists {path} cannot be read: {error}",
            "name a YAML file in UTF-8, or leave it out for the shipped lists",
        ) from None
    return _parse(text, str(path))


def _parse(text: str, name: str) -> Words:
    try:
        return Words.model_validate(YAML(typ="safe", pure=True).load(text))
    except YAMLError as error:
        raise DataError(
            f"{name} is no YAML: {' '.join(str(error).split())}", "mend it; the shipped words.yaml shows the form"
        ) from None
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc'])) or 'the file'}: {fault['msg']}" for fault in error.errors()
        )
        raise DataError(
            f"{name} holds other than lists of words: {faults}", "mend it; the shipped words.yaml shows the form"
        ) from None
