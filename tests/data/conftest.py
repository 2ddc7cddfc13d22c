from itertools import groupby

from hypothesis import settings

from finefit.data.render import Example, Renderer

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


def supervised_texts(renderer: Renderer, example: Example) -> list[str]:
    """One for each run of supervised tokens."""
    runs = groupby(zip(example.tokens, example.supervised, strict=True), key=lambda pair: pair[1])
    return [renderer.tokenizer.decode([token for token, _ in run]) for flag, run in runs if flag]
