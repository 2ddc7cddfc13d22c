"""A Modelfile for ollama, with the chat template that was trained.

ollama's templates are in Go's language, so a Jinja template cannot go there as it is. What it writes around messages is
learned by rendering marked conversations, put into Go, and accepted only if it writes probe conversations equally.
Otherwise TEMPLATE is left out, and ollama guesses: of the templates that it knows, it takes the one whose Jinja text is
nearest to the one in the GGUF."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from finefit.artifacts.atomic import write_text
from finefit.data.template_process import Json, TemplateRequest, shared_process
from finefit.errors import DataError, ModelError
from finefit.facts.files import reading_model
from finefit.spec.data import TEMPLATE_OPTIONS

MODELFILE = "Modelfile"
_GUESSED = """\
# Ollama's language has no equal of this model's chat template, so there is no TEMPLATE here, and ollama takes the
# nearest that it knows. Compare its prompts with the trained ones before you rely on it.
"""
_TODAY = "strftime_now"
"""A function that templates write the day with, which would stay the day of the export."""
_SYSTEM, _ASKED, _ANSWER, _AGAIN = "Zq0System0qZ", "Zq0Asked0qZ", "Zq0Answer0qZ", "Zq0Again0qZ"
_PROBES: tuple[tuple[str, ...], ...] = (
    ("Hello.",),
    ("Wie geht's?\n\nSag: {gut}.", "Gut \u2014 danke!", "Und jetzt?"),
    ("one", "two", "three", "four", "five"),
)
"""Turns of user and assistant by turns, each with and without a system message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """What a template writes around the messages of a conversation that the user begins and ends."""

    opening: str
    """Before the first user's turn, without a system message; a default one is a part of it."""
    system: tuple[str, str] | None
    """Around a system message, in the place of `opening`; None if the template has no place for one."""
    user: tuple[str, str]
    assistant: tuple[str, str]
    first_user: str | None
    """Before the first question, in the place of `user[0]`, if it differs: as where a system message goes into the
    first user's turn."""
    closing: str
    """After the last user's turn: it opens the answer."""

    def write(self, system: str | None, said: Sequence[str]) -> str:
        """What `as_go` means."""
        text = self.opening if system is None or self.system is None else system.join(self.system)
        for at, content in enumerate(said):
            before, after = self.assistant if at % 2 else self.user
            before = self.first_user if at == 0 and self.first_user is not None else before
            text += before + content + after
        return text + self.closing

    def as_go(self) -> str:
        start = self.opening
        if self.system is not None:
            before, after = self.system
            start = f"{{{{ if .System }}}}{before}{{{{ .System }}}}{after}"
            start += f"{{{{ else }}}}{self.opening}{{{{ end }}}}" if self.opening else "{{ end }}"
        first = self.user[0]
        if self.first_user is not None:
            start += "{{ $first := true }}"
            first = f"{{{{ if $first }}}}{{{{ $first = false }}}}{self.first_user}{{{{ else }}}}{first}{{{{ end }}}}"
        user = f"{first}{{{{ .Content }}}}{self.user[1]}"
        assistant = "{{ .Content }}".join(self.assistant)
        roles = f'{{{{ if eq .Role "user" }}}}{user}{{{{ else if eq .Role "assistant" }}}}{assistant}{{{{ end }}}}'
        return f"{start}{{{{ range .Messages }}}}{roles}{{{{ end }}}}{self.closing}"

    @property
    def pieces(self) -> tuple[str, ...]:
        others = (self.opening, self.closing, self.first_user or "", *(self.system or ()))
        return (*others, *self.user, *self.assistant)


def go_template(template: str, variables: Mapping[str, Any], *, adds_bos: bool = False) -> str | None:
    """In Go's language; None if it has no equal there. `variables`: of the template, such as `bos_token`. `adds_bos`:
    ollama writes that token itself, before what the template writes."""
    bos = str(variables.get("bos_token") or "")
    turns = None if _TODAY in template else _learn(template, variables, bos)
    if turns is None or any("{{" in piece or '"""' in piece for piece in turns.pieces):
        return None
    without = _without_bos(turns, bos) if adds_bos and bos else turns
    return None if without is None else without.as_go()


def _learn(template: str, variables: Mapping[str, Any], bos: str) -> Turns | None:
    questions = (_ASKED, _ANSWER, _AGAIN)
    plain, with_system = _render(template, variables, [(None, questions), (_SYSTEM, questions)])
    if plain is None or (found := _cut(plain, questions)) is None:
        return None
    start, question_to_answer, answer_to_question, end = found
    after_bos = start.removeprefix(bos)
    user_before = after_bos[len(after_bos) - _common(after_bos[::-1], answer_to_question[::-1]) :]
    assistant_after = answer_to_question.removesuffix(user_before)
    shared = question_to_answer[: _common(question_to_answer, end)]
    user_after = assistant_after if assistant_after and shared.startswith(assistant_after) else shared
    system = None
    if with_system is not None and (pieces := _cut(with_system, (_SYSTEM, *questions))) is not None:
        system = (pieces[0], pieces[1])
    is_first_alike = system is None or system[1].endswith(user_before)
    turns = Turns(
        opening=start.removesuffix(user_before) if is_first_alike else start,
        system=(system[0], system[1].removesuffix(user_before) if is_first_alike else system[1]) if system else None,
        user=(user_before, user_after),
        assistant=(question_to_answer.removeprefix(user_after), assistant_after),
        first_user=None if is_first_alike else "",
        closing=end.removeprefix(user_after),
    )
    return turns if _is_equal(turns, template, variables) else None


def _is_equal(turns: Turns, template: str, variables: Mapping[str, Any]) -> bool:
    systems = (None,) if turns.system is None else (None, "Be brief.\nBe kind.")
    probes = [(system, said) for system in systems for said in _PROBES]
    written = _render(template, variables, probes)
    return all(turns.write(*probe) == text for probe, text in zip(probes, written, strict=True))


def _render(
    template: str, variables: Mapping[str, Any], conversations: Sequence[tuple[str | None, Sequence[str]]]
) -> list[str | None]:
    """None for a conversation that the template refuses, and for all if it is not Jinja."""
    asked = [TemplateRequest(_messages(system, said), True, None) for system, said in conversations]
    try:
        written = shared_process().render("the chat template", template, {**TEMPLATE_OPTIONS, **variables}, asked)
    except ModelError:
        return [None] * len(asked)
    return [None if isinstance(text, DataError) else text for text in written]


def _messages(system: str | None, said: Sequence[str]) -> list[Json]:
    turns = [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(said)]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


def _cut(text: str, marks: Sequence[str]) -> list[str] | None:
    """What is before, between and after the marks; None if one is missing, or there twice."""
    pieces = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found or mark in text:
            return None
        pieces.append(before)
    return [*pieces, text]


def _common(left: str, right: str) -> int:
    """Length of the common beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def _without_bos(turns: Turns, bos: str) -> Turns | None:
    starts = (turns.opening, turns.system[0] if turns.system else bos)
    if not all(start.startswith(bos) for start in starts):
        return None
    system = (turns.system[0].removeprefix(bos), turns.system[1]) if turns.system else None
    return replace(turns, opening=turns.opening.removeprefix(bos), system=system)


def write_modelfile(
    gguf: Path, out: Path, template: str | None, stop_texts: tuple[str, ...], system: str | None = None
) -> Path:
    """`Modelfile` in the folder `out`, for `ollama create NAME -f`. `template`: in Jinja; None for a model of plain
    text, whose prompts go to it as they are."""
    lines = [f"FROM ./{Path(os.path.relpath(gguf, out)).as_posix()}"]
    if template is None:
        lines.append(f"TEMPLATE {_quoted('{{ .Prompt }}')}")
    elif (written := _template_for(gguf, template)) is not None:
        lines.append(f"TEMPLATE {_quoted(written)}")
    else:
        lines.insert(0, _GUESSED.rstrip())
    if system is not None:
        lines.append(f"SYSTEM {_quoted(system)}")
    lines += [f"PARAMETER stop {_quoted(text)}" for text in stop_texts]
    path = out / MODELFILE
    write_text(path, "\n".join(lines) + "\n")
    return path


def _template_for(gguf: Path, template: str) -> str | None:
    from gguf import GGUFReader

    with reading_model(gguf):
        fields: Any = GGUFReader(gguf).fields
        variables = {}
        for name in ("bos", "eos"):
            if (key := f"tokenizer.ggml.{name}_token_id") in fields:
                variables[f"{name}_token"] = fields["tokenizer.ggml.tokens"].contents(fields[key].contents())
        adds_bos = "tokenizer.ggml.add_bos_token" in fields and fields["tokenizer.ggml.add_bos_token"].contents()
    return go_template(template, variables, adds_bos=bool(adds_bos))


def _quoted(text: str) -> str:
    if '"""' in text:
        raise ModelError(f'{text!r} has """ in it, which a Modelfile cannot hold', "leave --ollama out")
    return f'"""{text}"""' if "\n" in text or '"' in text else f'"{text}"'
