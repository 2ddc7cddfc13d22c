"""ollama writes the prompts that the model was trained on, or is left to its own templates."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest

from finefit.data.template_process import TemplateRequest, shared_process
from finefit.errors import ModelError
from finefit.export.ollama import go_template, write_modelfile

BOS, EOS = "<s>", "</s>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "ChatML": CHATML,
    "ChatML with a default system message": (
        "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are kind.<|im_end|>\n{% endif %}" + CHATML
    ),
    "Llama 3": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
        "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "Gemma, where a system message goes into the first question": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
        "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}<start_of_turn>"
        "{{ 'model' if m['role'] == 'assistant' else 'user' }}\n{{ first if loop.first else '' }}{{ m['content'] }}"
        "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "Mistral, without a system role": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %} [INST] {{ m['content'] }} [/INST]"
        "{% elif m['role'] == 'assistant' %} {{ m['content'] }}{{ eos_token }}"
        "{% else %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
    ),
    "Zephyr": (
        "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
    "an opening that differs from a past answer's": (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}[end]{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% if not enable_thinking %}<think></think>{% endif %}{% endif %}"
    ),
}
VARIABLES = {"bos_token": BOS, "eos_token": EOS}
SAID = ("Hi there.", "Good day!\n\nHow are {you}?", "Well.", "Fine.", "Bye")


def _messages(said: tuple[str, ...], system: str | None = None) -> list[dict[str, str]]:
    turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


def _jinja(template: str, messages: list[dict[str, str]]) -> str | None:
    variables = {**VARIABLES, "enable_thinking": False}
    (written,) = shared_process().render("it", template, variables, [TemplateRequest(messages, True, None)])
    return written if isinstance(written, str) else None


def _go(template: str, messages: list[dict[str, str]]) -> str:
    """As ollama executes one: `.System` joins the system messages, `.Messages` has all. Only what is needed of Go."""
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    variables: dict[str, bool] = {}
    parts = iter(re.split(r"{{ (.*?) }}", template))
    return _run(_parse(_pairs(parts))[0], {"System": system, "Messages": messages}, variables)


def _pairs(parts: Iterator[str]) -> Iterator[tuple[str, str]]:
    """(kind, text) for texts and actions by turns."""
    for at, part in enumerate(parts):
        yield ("action" if at % 2 else "text"), part


def _parse(parts: Iterator[tuple[str, str]]) -> tuple[list[Any], str]:
    nodes: list[Any] = []
    for kind, text in parts:
        if kind == "action" and (text == "end" or text.startswith("else")):
            return nodes, text
        if kind == "action" and text.startswith(("if ", "range ")):
            nodes.append(_parse_block(text, parts))
        else:
            nodes.append((kind, text))
    return nodes, ""


def _parse_block(text: str, parts: Iterator[tuple[str, str]]) -> tuple[Any, ...]:
    body, ended = _parse(parts)
    other: list[Any] = []
    if ended.startswith("else if "):
        other = [_parse_block(ended.removeprefix("else "), parts)]
    elif ended == "else":
        other, _ = _parse(parts)
    return ("block", text, body, other)


def _run(nodes: list[Any], here: Mapping[str, Any], variables: dict[str, bool]) -> str:
    return "".join(_run_one(node, here, variables) for node in nodes)


def _run_one(node: tuple[Any, ...], here: Mapping[str, Any], variables: dict[str, bool]) -> str:
    match node:
        case ("text", text):
            return str(text)
        case ("action", action) if action.startswith("$"):
            name, value = re.split(r" :?= ", action)
            variables[name] = value == "true"
            return ""
        case ("action", action):
            return str(here[action.removeprefix(".")])
        case ("block", "range .Messages", body, _):
            said = ({"Role": one["role"], "Content": one["content"]} for one in here["Messages"])
            return "".join(_run(body, one, variables) for one in said)
        case ("block", condition, body, other):
            return _run(body if _holds(condition, here, variables) else other, here, variables)
    raise AssertionError(node)


def _holds(condition: str, here: Mapping[str, Any], variables: Mapping[str, bool]) -> bool:
    match condition.split()[1:]:
        case ["eq", ".Role", role]:
            return bool(here["Role"] == role.strip('"'))
        case [name] if name.startswith("$"):
            return variables[name]
        case [name]:
            return bool(here[name.removeprefix(".")])
    raise AssertionError(condition)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_go_template_writes_what_the_trained_one_writes(name: str, adds_bos: bool) -> None:
    template = TEMPLATES[name]
    starts_with_bos = template.startswith("{{ bos_token }}")
    if adds_bos and not starts_with_bos:
        assert go_template(template, VARIABLES, adds_bos=True) is None  # that token was not trained with
        return
    written = go_template(template, VARIABLES, adds_bos=adds_bos)
    assert written is not None
    for system in (None, "Be brief."):
        for count in (1, 3, 5):
            messages = _messages(SAID[:count], system)
            if (expected := _jinja(template, messages)) is not None:
                assert (BOS if adds_bos else "") + _go(written, messages) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ '!' if loop.last else '' }}{{ m['role'] }}{{ m['content'] }}{% endfor %}",
        "{% for m in messages %}{{ loop.index }}{{ m['role'] }}{{ m['content'] }}{% endfor %}",
        "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}",
        "{{ strftime_now('%Y') }}" + CHATML,
        "{% for m in messages %}{{ '{{' }}{{ m['role'] }}{{ m['content'] }}{% endfor %}",
        "{% for m in messages %}",
        "{{ raise_exception('never') }}",
    ],
)
def test_a_template_without_an_equal_is_left_out(template: str) -> None:
    assert go_template(template, VARIABLES) is None


def _make_gguf(path: Path, *, adds_bos: bool) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([b"<unk>", BOS.encode(), EOS.encode()])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(adds_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_the_modelfile_names_model_template_stops_and_system(tmp_path: Path) -> None:
    file = _make_gguf(tmp_path / "model-Q8_0.gguf", adds_bos=True)
    stops = ("<end_of_turn>", 'a "quoted"\nstop')
    template = next(text for name, text in TEMPLATES.items() if name.startswith("Gemma"))
    path = write_modelfile(file, tmp_path, template, stops, system="Be brief.")
    text = path.read_text(encoding="utf-8")
    assert path == tmp_path / "Modelfile"
    assert text.startswith("FROM ./model-Q8_0.gguf\n")
    written = re.search(r'^TEMPLATE """(.*?)"""$', text, re.DOTALL | re.MULTILINE)
    assert written is not None
    assert written[1] == go_template(template, VARIABLES, adds_bos=True)
    assert 'PARAMETER stop "<end_of_turn>"\n' in text
    assert 'PARAMETER stop """a "quoted"\nstop"""\n' in text
    assert 'SYSTEM "Be brief."\n' in text


def test_a_template_without_an_equal_leaves_ollama_to_choose_and_says_so(tmp_path: Path) -> None:
    file = _make_gguf(tmp_path / "model.gguf", adds_bos=False)
    text = write_modelfile(file, tmp_path, "{{ strftime_now('%Y') }}" + CHATML, (EOS,)).read_text()
    assert not re.search("^TEMPLATE", text, re.MULTILINE)
    assert text.startswith("#")
    assert re.search(r"^FROM \./model\.gguf$", text, re.MULTILINE)


def test_a_model_of_plain_text_gets_its_prompts_as_they_are(tmp_path: Path) -> None:
    file = _make_gguf(tmp_path / "model.gguf", adds_bos=False)
    assert 'TEMPLATE "{{ .Prompt }}"\n' in write_modelfile(file, tmp_path, None, ()).read_text()


def test_a_stop_text_that_a_modelfile_cannot_hold_is_refused(tmp_path: Path) -> None:
    file = _make_gguf(tmp_path / "model.gguf", adds_bos=False)
    with pytest.raises(ModelError):
        write_modelfile(file, tmp_path, None, ('"""',))
    assert not (tmp_path / "Modelfile").exists()
