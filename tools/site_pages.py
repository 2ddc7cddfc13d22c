"""Hook of mkdocs: adds to the site what does not lie in docs/, and lists every page.

Pages written from the source (the command line, the messages) are made at each build, so that they cannot lag behind
it. Pages of other folders (README, examples, contributing, changes) are taken as they are, with their links turned. A
link to a file that is no page becomes its name."""

import logging
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # mkdocs loads a hook by its path

from tools import make_cli_reference, make_message_index  # noqa: E402

TAKEN = {
    "index.md": "README.md",
    "tasks.md": "docs/README.md",
    "examples.md": "examples/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
"""Page of the site: the file that it is, from the repository's root."""
WRITTEN = {"cli.md": make_cli_reference.reference, "messages.md": make_message_index.index}
SPECS = sorted((ROOT / "examples").glob("*/spec.yaml"))
_LOG = logging.getLogger("mkdocs.hooks.site_pages")
_PAGES = {source: page for page, source in TAKEN.items()} | {
    path.relative_to(ROOT).as_posix(): f"examples.md#{path.parent.name}" for path in SPECS
}
_LINK = re.compile(r"\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^()\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Pages that the navigation does not name are added to it."""
    nav: list[dict[str, Any]] = list(config.nav or [])
    named = set(re.findall(r"[\w-]+\.md", str(nav)))
    new = sorted(path.name for path in Path(config.docs_dir).glob("*.md") if path.name not in {*named, "README.md"})
    coming = [name for name in new if name.startswith("coming-from-")]
    others = [name for name in new if name not in coming]
    nav += [{"Coming from": coming}] if coming else []
    nav += [{"More": others}] if others else []
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, source in TAKEN.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text + specs() if page == "examples.md" else text))
    for page, write in WRITTEN.items():
        files.append(File.generated(config, page, content=write()))
    return files


def specs() -> str:
    """Each example under its name."""
    return "".join(
        f"\n## {path.parent.name}\n```yaml\n{path.read_text(encoding='utf-8').rstrip()}\n```\n" for path in SPECS
    )


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    source = TAKEN.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def turned(found: re.Match[str]) -> str:
        target = new_target(found["target"], source)
        return f"[{found['text']}]({target})" if target else f"`{found['text'].strip('`')}`"

    return _LINK.sub(turned, markdown)


def new_target(target: str, source: str) -> str | None:
    """Of a link in a file of the repository, on the site; None if it leads to a file that is no page."""
    path, _, anchor = target.partition("#")
    if not path or "://" in target:
        return target
    file = _normal(PurePosixPath(source).parent / path)
    if file in _PAGES:
        page = _PAGES[file]
    elif file.startswith("docs/"):
        page = file.removeprefix("docs/")
    else:
        if not (ROOT / file).exists():
            _LOG.warning("%s links to %s, which is not there", source, target)
        return None
    return f"{page}#{anchor}" if anchor else page


def _normal(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts = parts[:-1]
        else:
            parts.append(part)
    return "/".join(parts)
