"""Writes docs/coming-from-*.md from the tables of keys that `finefit init --from` translates by.

python tools/make_importer_pages.py docs
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from finefit.importers import TOOLS
from finefit.importers.keys import Key, Tool

PAGES = {
    "axolotl": ("axolotl",),
    "llama-factory": ("llama-factory", "llama-factory-v1"),
    "trl": ("trl",),
    "unsloth": ("unsloth",),
    "torchtune": ("torchtune",),
}
"""The tools of a page, by its name."""
HEAD = """# Coming from {name}
Written by `python tools/make_importer_pages.py docs` from the tables that `finefit init --from` translates by; a test holds the two together.

```console
finefit init --from {example}
```
writes `spec.yaml` and shows what became of every key: translated, the same in both, or not carried over, with the reason. Nothing is
dropped silently; a key that is not in the tables is listed too. A training that finefit does not offer is refused by name. Where
the rows and the tokenizer are on this machine, a table compares rows, tokens, supervised tokens, rows per step and steps of both tools.
"""  # noqa: E501
EXAMPLES = {
    "axolotl": "qlora.yml --devices 4",
    "llama-factory": "train.yaml --dataset-info data/dataset_info.json",
    "trl": "sft.yaml",
    "unsloth": "notebook.ipynb",
    "torchtune": "lora.yaml",
}
TITLES = {
    "llama-factory": "Keys",
    "llama-factory-v1": "Keys of the second version (`model`, `train_dataset`, sections)",
}
GROUPS = (
    ("translated", "{title}: translated", "| key | in a spec | |\n|---|---|---|\n"),
    ("equal", "{title}: the same in both", "| key | |\n|---|---|\n"),
    ("not carried over", "{title}: not carried over", "| key | reason |\n|---|---|\n"),
)


def page(name: str) -> str:
    tools = [tool for tool in TOOLS if tool.slug in PAGES[name]]
    text = HEAD.format(name=tools[0].name, example=EXAMPLES[name])
    return text + "".join("".join(_sections(tool)) for tool in tools)


def _sections(tool: Tool) -> Iterator[str]:
    title = TITLES.get(tool.slug, "Keys")
    yield f"\n## {title}: what differs in every training\n"
    yield from (f"- {difference}\n" for difference in tool.differences)
    for fate, heading, columns in GROUPS:
        keys = {name: key for name, key in sorted(tool.keys.items()) if key.fate == fate}
        yield f"\n## {heading.format(title=title)}\n{columns}"
        yield from (_line(name, key, fate) for name, key in keys.items())
        if fate == "equal" and tool.ignored:
            started = ", ".join(f"`{start}*`" for start in tool.ignored)
            yield f"| {started} | concern only how {tool.name} itself runs |\n"


def _line(name: str, key: Key, fate: str) -> str:
    if fate != "translated":
        return f"| `{name}` | {_cell(key.note)} |\n"
    shown = isinstance(key.default, int | float) and not isinstance(key.default, bool)
    default = f"without it: `{key.default}`" if shown and "default" not in key.note else ""
    words = "; ".join(filter(None, [key.note, default]))
    return f"| `{name}` | {f'`{key.place}`' if key.place else ''} | {_cell(words)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    for name in PAGES:
        (Path(sys.argv[1]) / f"coming-from-{name}.md").write_text(page(name), encoding="utf-8")
