"""A template that loops without end, fills the memory or writes without end ends the process that renders it, and
nothing else; any other template writes what transformers writes."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import trl
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from finefit.data import template_process
from finefit.data.template_process import TemplateProcess, TemplateRequest
from finefit.errors import DataError, ModelError, WorkerDied
from tests.conftest import TEMPLATE

TEMPLATES = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
HI = TemplateRequest([{"role": "user", "content": "Hi."}], True, None)
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS = {
    "nested loops": LOOP,
    "a recursion with two branches": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "a division of large numbers, which no signal handler of Python interrupts": "{{ (10**(10**7)) % (7**(10**6)) }}",
    "a long source": "{% if x %}a{% endif %}" * 100_000,
}
GREEDY = {
    "a text times a number": "{{ 'a' * 10**10 }}",
    "a list times a number": "{{ ([0] * 10**10) | length }}",
    "a filter": "{{ 'x' | center(10**10) }}",
    "a format": "{{ '%99999999999d' % 1 }}",
    "doubling": "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "an indent": "{{ messages | tojson(indent=10**10) }}",
}
WORDY = {"a text": "{{ 'a' * 10**7 }}", "a refusal": "{{ raise_exception('a' * 10**7) }}"}


@pytest.fixture
def process() -> Iterator[TemplateProcess]:
    yield (made := TemplateProcess())
    made._end()


def _render(process: TemplateProcess, source: str, *conversations: TemplateRequest) -> list[str | DataError]:
    return process.render("the chat template of tiny", source, {"eos_token": "</s>"}, conversations or (HI,))


def _pids(parent: int | None = None) -> set[int]:
    children = psutil.Process(parent).children(recursive=True)
    return {child.pid for child in children if "finefit.data.template_process" in " ".join(_line(child))}


def _line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def _until_gone(pid: int) -> None:
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _refused(process: TemplateProcess, source: str) -> ModelError:
    before = _pids()
    with pytest.raises(ModelError) as refused:
        _render(process, source)
    assert refused.value.exit_code == 2
    assert "the chat template of tiny" in refused.value.problem
    assert "chat_template.jinja" in refused.value.remedy
    assert _pids() <= before
    assert _render(process, TEMPLATE) == ["<|user|>Hi.<|end|>\n<|assistant|>"]
    return refused.value


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_template_without_end_is_refused_with_the_limit_of_its_time(
    kind: str, process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "SECONDS", 0.5)
    assert "takes more than 0.6 s of CPU time for 1 conversation" in _refused(process, ENDLESS[kind]).problem


@pytest.mark.skipif(sys.platform != "linux", reason="the address space can be limited on Linux alone")
@pytest.mark.parametrize("kind", GREEDY)
def test_a_template_that_fills_the_memory_is_refused_with_the_limit_of_its_memory(
    kind: str, process: TemplateProcess
) -> None:
    assert "takes more than 256 MiB of memory for 1 conversation" in _refused(process, GREEDY[kind]).problem


@pytest.mark.parametrize("kind", WORDY)
def test_a_template_that_writes_without_end_is_refused_with_the_limit_of_its_text(
    kind: str, process: TemplateProcess
) -> None:
    assert "characters for 1 conversation" in _refused(process, WORDY[kind]).problem


def test_a_template_that_python_cannot_compile_is_refused(process: TemplateProcess) -> None:
    deep = "{% for i in [1] %}" * 30 + "{% endfor %}" * 30
    assert "cannot be rendered: SyntaxError: too many" in _refused(process, deep).problem


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
        ("{{ range(10**9) | list }}", "Range too big"),
        ("{{ raise_exception('No user.') }}", "No user."),
        ("{{ messages[7].content }}", "has no element 7"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_what_a_template_raises_refuses_the_conversation(source: str, reason: str, process: TemplateProcess) -> None:
    (refused,) = _render(process, source)
    assert isinstance(refused, DataError)
    assert refused.problem.startswith("the chat template refuses this conversation: ")
    assert reason in refused.problem


def test_a_refusal_costs_one_conversation_of_many(process: TemplateProcess) -> None:
    deep: Any = []
    for _ in range(2000):
        deep = [deep]
    others = [HI._replace(messages=[{"role": role, "content": "x"}]) for role in ("user", "tool", "user")]
    source = "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ messages[0].content }}"
    found = _render(process, source, *others, HI._replace(messages=[{"role": "user", "content": deep}]))
    assert [found[0], found[2]] == ["x", "x"]
    assert [type(found[1]), type(found[3])] == [DataError, DataError]


def _conversations() -> list[TemplateRequest]:
    user, answer = {"role": "user", "content": "Ünïcode \u4f60 \U0001f600"}, {"role": "assistant", "content": "4"}
    tool = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
    turns = [user, answer, user]
    return [TemplateRequest(turns[:size], opening, None) for size in (1, 2, 3) for opening in (True, False)] + [
        TemplateRequest([user], True, [tool])
    ]


def _by_transformers(source: str, variables: dict[str, Any], conversation: TemplateRequest) -> object:
    messages, opening, tools = conversation
    variables = {**variables, "tools": tools, "add_generation_prompt": opening}
    try:
        return render_jinja_template([messages], chat_template=source, **variables)[0][0]
    except (TemplateError, TypeError) as error:
        return DataError, f"the chat template refuses this conversation: {error}"


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_what_is_written_is_what_transformers_writes(path: Path) -> None:
    source, variables = path.read_text(encoding="utf-8"), {"eos_token": "</s>", "bos_token": "<s>", "now": len}
    found = template_process.shared_process().render("it", source, variables, _conversations())
    expected = [_by_transformers(source, variables, conversation) for conversation in _conversations()]
    assert [written if isinstance(written, str) else (DataError, written.problem) for written in found] == expected
    assert any(isinstance(written, str) for written in found)


def test_halves_of_characters_come_back_as_they_were(process: TemplateProcess) -> None:
    text = "\ud83d\ude00 \ud800 \U0001f600 \x00\r\n"
    message = {"role": "user", "content": text}
    assert _render(process, "{{ messages[0].content }}", TemplateRequest([message], True, None)) == [text]


def test_a_row_may_be_a_book(process: TemplateProcess) -> None:
    text = "A whole book. \U0001f600" + "A whole book. " * 1_000_000
    messages = [{"role": role, "content": text} for role in ("user", "assistant")]
    (written,) = _render(process, TEMPLATE, TemplateRequest(messages, False, None))
    assert isinstance(written, str)
    assert written.count(text) == 2


def test_the_process_ends_with_the_last_reference_to_it() -> None:
    before = _pids()
    process = TemplateProcess()
    _render(process, TEMPLATE)
    (pid,) = _pids() - before
    del process
    assert not psutil.pid_exists(pid)


def test_a_process_killed_while_it_waits_is_started_again(process: TemplateProcess) -> None:
    before = _pids()
    _render(process, TEMPLATE)
    (pid,) = _pids() - before
    os.kill(pid, signal.SIGKILL)
    _until_gone(pid)
    assert _render(process, TEMPLATE) == ["<|user|>Hi.<|end|>\n<|assistant|>"]


def test_a_process_killed_at_work_is_no_fault_of_the_template(process: TemplateProcess) -> None:
    before = _pids()
    _render(process, TEMPLATE)
    (pid,) = _pids() - before
    threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(WorkerDied, match="was ended by SIGKILL"):
        _render(process, LOOP)


def test_after_an_interrupt_the_next_text_is_that_of_its_own_conversation(process: TemplateProcess) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    _render(process, TEMPLATE)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            _render(process, LOOP)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert _render(process, TEMPLATE) == ["<|user|>Hi.<|end|>\n<|assistant|>"]


SCRIPT = """
import os, resource, signal, sys, time
from finefit.data.template_process import TemplateRequest, shared_process
from finefit.errors import ModelError

def write(source="{{ messages[0].content }}"):
    try:
        return process.render("it", source, {}, [TemplateRequest([{"role": "user", "content": "Hi."}], True, None)])
    except ModelError:
        return None

def pid():
    return process._process.pid

process = shared_process()
"""


def _script(code: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", SCRIPT + code], stdout=subprocess.PIPE, text=True)


def _numbers(script: "subprocess.Popen[str]") -> list[int]:
    assert script.stdout is not None
    return [int(word) for word in script.stdout.readline().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="the address space can be limited on Linux alone")
def test_the_memory_of_neither_process_grows_beyond_the_limit() -> None:
    code = f"""
for source in {[GREEDY["doubling"], GREEDY["a list times a number"], WORDY["a text"]]!r}:
    assert write(source) is None
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(int(status["VmHWM"].split()[0]) >> 10, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10)
"""
    with _script(code) as script:
        here, there = _numbers(script)
    assert here < 128
    assert 128 < there < 400


def test_a_fork_has_a_process_of_its_own_and_leaves_that_of_its_parent_alone() -> None:
    code = """
assert write() == ["Hi."]
mine = pid()
child = os.fork()
if child == 0:
    os._exit(0 if write() == ["Hi."] and pid() != mine else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(status, int(write() == ["Hi."]), int(pid() == mine))
"""
    with _script(code) as script:
        assert _numbers(script) == [0, 1, 1]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, None], ids=["killed", "terminated", "at its end"])
def test_the_process_ends_with_its_parent_though_a_fork_lives_on(how: signal.Signals | None) -> None:
    code = """
write()
child = os.fork()
if child == 0:
    os.close(1)
    time.sleep(60)
print(child, pid(), flush=True)
sys.stdin.readline()
"""
    command = [sys.executable, "-c", SCRIPT + code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as script:
        fork, pid = _numbers(script)
        try:
            if how is not None:
                script.send_signal(how)
            script.communicate("\n")
            _until_gone(pid)
            assert psutil.pid_exists(fork)
        finally:
            os.kill(fork, signal.SIGKILL)


def test_a_version_of_transformers_that_needs_its_whole_package_is_loaded_whole(tmp_path: Path) -> None:
    utils = tmp_path / "transformers" / "utils"
    utils.mkdir(parents=True)
    (tmp_path / "transformers" / "__init__.py").write_text("")
    (utils / "__init__.py").write_text("def render(*_): return 'rendered'\n")
    (utils / "chat_template_utils.py").write_text("from . import render as render_jinja_template\n")
    code = "from finefit.data.template_process import _load_renderer as load; print(load()())"
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert found.stdout == "rendered\n"


def test_the_process_starts_without_torch_and_without_all_of_transformers() -> None:
    code = (
        "import sys; from finefit.data.template_process import _load_renderer as load; load(); "
        "print('torch' in sys.modules, 'transformers.tokenization_utils_base' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout == "False False\n"
