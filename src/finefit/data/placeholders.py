"""Placeholders for images: `<image>` in the messages of a row, the template's own placeholder in what it writes, and
what replaces that, in text and in tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from finefit.data.conversations import IMAGE_PLACEHOLDER
from finefit.data.rows import ImageRef, Message
from finefit.errors import DataError
from finefit.vision.family import ImageProcessor


def num_placeholders(messages: Iterable[Message]) -> int:
    return sum(message.content.count(IMAGE_PLACEHOLDER) for message in messages)


def with_placeholders(messages: Sequence[Message], num_images: int) -> tuple[Message, ...]:
    """The messages with a placeholder for each image. Where they have none, the images come before the text of the
    first user message."""
    if not num_images:
        return tuple(messages)
    if any(message.role == "assistant" and IMAGE_PLACEHOLDER in message.content for message in messages):
        problem = "an image is in an answer, and vision-language models write text alone"
        raise DataError(problem, f"move {IMAGE_PLACEHOLDER} into the prompt")
    found = num_placeholders(messages)
    if found == num_images:
        return tuple(messages)
    if found:
        problem = f"the messages have {found} {IMAGE_PLACEHOLDER} placeholders, and the row has {num_images} images"
        raise DataError(problem, "give as many placeholders as images, or none")
    first = next((at for at, message in enumerate(messages) if message.role == "user"), None)
    if first is None:
        problem = f"the row has {num_images} images, and no user message that they could belong to"
        raise DataError(problem, "give the row a prompt")
    asked = replace(messages[first], content=IMAGE_PLACEHOLDER * num_images + messages[first].content)
    return (*messages[:first], asked, *messages[first + 1 :])


def require_no_image_text(messages: Iterable[Message], image_texts: Iterable[str], *, has_images: bool) -> None:
    """Text that the model would read as an image is an error. In a row with images, its own placeholders are not
    text."""
    for message in messages:
        texts = [message.reasoning, *(message.content.split(IMAGE_PLACEHOLDER) if has_images else [message.content])]
        for image_text in filter(None, image_texts):
            if any(image_text in text for text in texts):
                raise DataError(
                    f"the text holds {image_text!r}, which the model reads as an image, and no image belongs there",
                    f"give an image beside the text, with {IMAGE_PLACEHOLDER} in its place, or rephrase the text",
                )


def inline_images(
    messages: Sequence[Message], image_processor: ImageProcessor, image_refs: Sequence[ImageRef]
) -> tuple[Message, ...]:
    """For a model without a placeholder of its own: the messages with the text of each image in its place."""
    texts = _fill([message.content for message in messages], IMAGE_PLACEHOLDER, image_processor, image_refs)
    return tuple(replace(message, content=text) for message, text in zip(messages, texts, strict=True))


def fill_placeholders(
    texts: Sequence[str], image_processor: ImageProcessor, image_refs: Sequence[ImageRef]
) -> list[str]:
    """What a template has written, with the text of each image in place of the template's placeholders."""
    placeholder = image_processor.placeholder
    if not placeholder:
        return list(texts)
    found = sum(text.count(placeholder) for text in texts)
    if found != len(image_refs):
        raise DataError(
            f"the template writes {found} places for images ({placeholder}), and {len(image_refs)} belong there",
            "change the messages to what the template takes: some write only the images of user messages",
        )
    return _fill(texts, placeholder, image_processor, image_refs)


def num_image_tokens(image_processor: ImageProcessor | None, image_refs: Sequence[ImageRef]) -> int:
    return sum(image_processor.geometry.num_tokens(ref.grid) for ref in image_refs) if image_processor else 0


def require_image_tokens(
    tokens: Sequence[int], image_processor: ImageProcessor | None, image_refs: Sequence[ImageRef]
) -> None:
    """There must be as many as features: the model replaces each by one."""
    if image_processor is None:
        return
    found, expected = tokens.count(image_processor.geometry.image_token), num_image_tokens(image_processor, image_refs)
    if found != expected:
        raise DataError(
            f"the prompt has {found} image tokens, and its {len(image_refs)} images are {expected} features",
            "look for the model's own placeholders in the text of the row",
        )


def _fill(
    texts: Sequence[str], placeholder: str, image_processor: ImageProcessor, image_refs: Sequence[ImageRef]
) -> list[str]:
    refs, split = iter(image_refs), (text.split(placeholder) for text in texts)
    return [
        "".join([first, *(image_processor.text(next(refs).size) + rest for rest in others)]) for first, *others in split
    ]
