"""Where images stand in text: `<image>` in the messages of a row, the template's own mark in what it writes, and what takes that mark's place,
in text and in tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from finefit.data.conversations import IMAGE_MARK
from finefit.data.eyes.eye import Eye
from finefit.data.pictures import Picture
from finefit.data.rows import Message
from finefit.errors import DataError


def num_marks(messages: Iterable[Message]) -> int:
    return sum(message.content.count(IMAGE_MARK) for message in messages)


def placed(messages: Sequence[Message], num_images: int) -> tuple[Message, ...]:
    """With a mark for each image. Where the messages have none, the images stand before the text of the first user message."""
    if not num_images:
        return tuple(messages)
    if any(message.role == "assistant" and IMAGE_MARK in message.content for message in messages):
        raise DataError(
            "an image stands in an answer, and models that see write text alone",
            f"move {IMAGE_MARK} into what is asked",
        )
    found = num_marks(messages)
    if found == num_images:
        return tuple(messages)
    if found:
        raise DataError(
            f"the messages have {found} {IMAGE_MARK} marks, and the row has {num_images} images",
            "give as many marks as images, or none",
        )
    first = next((at for at, message in enumerate(messages) if message.role == "user"), None)
    if first is None:
        raise DataError(
            f"the row has {num_images} images, and no message of a user that they could belong to",
            "give the row a prompt",
        )
    asked = replace(messages[first], content=IMAGE_MARK * num_images + messages[first].content)
    return (*messages[:first], asked, *messages[first + 1 :])


def require_unwritten(messages: Iterable[Message], marks: Iterable[str], *, has_images: bool) -> None:
    """Text that the model would read as an image has nothing to be shown there. The marks of a row with images are none of its text."""
    for message in messages:
        texts = [message.reasoning, *(message.content.split(IMAGE_MARK) if has_images else [message.content])]
        for mark in filter(None, marks):
            if any(mark in text for text in texts):
                raise DataError(
                    f"the text holds {mark!r}, which the model reads as an image, and no image belongs there",
                    f"an image is given beside the text, which has {IMAGE_MARK} in its place; write such rows differently",
                )


def inlined(messages: Sequence[Message], eye: Eye, pictures: Sequence[Picture]) -> tuple[Message, ...]:
    """For a model that has no mark of its own: the messages with what stands in place of each image."""
    texts = _filled([message.content for message in messages], IMAGE_MARK, eye, pictures)
    return tuple(replace(message, content=text) for message, text in zip(messages, texts, strict=True))


def filled(texts: Sequence[str], eye: Eye, pictures: Sequence[Picture]) -> list[str]:
    """What a template has written, with what stands in place of each of its marks, in their order."""
    if not eye.mark:
        return list(texts)
    found = sum(text.count(eye.mark) for text in texts)
    if found != len(pictures):
        raise DataError(
            f"the template writes {found} places for images ({eye.mark}), and {len(pictures)} belong there",
            "change the messages to what the template takes: some write images of the user's messages alone",
        )
    return _filled(texts, eye.mark, eye, pictures)


def num_image_tokens(eye: Eye | None, pictures: Sequence[Picture]) -> int:
    return 0 if eye is None else sum(eye.lens.num_tokens(picture.grid) for picture in pictures)


def require_image_tokens(tokens: Sequence[int], eye: Eye | None, pictures: Sequence[Picture]) -> None:
    """As many as there will be features: the model puts one in the place of each."""
    if eye is None:
        return
    found, expected = tokens.count(eye.lens.image_token), num_image_tokens(eye, pictures)
    if found != expected:
        raise DataError(
            f"the prompt has {found} image tokens, and its {len(pictures)} images are {expected} features",
            "look for the model's own marks in the text of the row",
        )


def _filled(texts: Sequence[str], mark: str, eye: Eye, pictures: Sequence[Picture]) -> list[str]:
    each = iter(pictures)
    return [
        "".join([first, *(eye.text(next(each).size) + rest for rest in others)])
        for first, *others in (text.split(mark) for text in texts)
    ]
