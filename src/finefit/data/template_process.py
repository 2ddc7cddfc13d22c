"""Chat templates are programs that come with a model, so they run in a separate process with limits on CPU time, memory
and output length: a template that loops forever or exhausts memory ends only that process.

The process renders with transformers' own function. It starts on first use, serves all templates of its parent process,
and ends when the pipe from the parent is closed, which also happens when the parent ends. The operating system enforces
the limits, since no Python code runs while, say, a power of two large numbers is computed: a timer of CPU time, which a
busy machine does not shorten, and a limit of the address space (if there is /proc; macOS has no such limit)."""

import importlib
import importlib.util
import os
import pickle
import resource
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple

from finefit.errors import DataError, FinefitError, ModelError, WorkerDied

Json = dict[str, Any]
Tools = list[Json] | None

SECONDS, SECONDS_EACH = 10.0, 0.1
"""CPU seconds for a request, plus seconds for each of its conversations, which take below 1 ms."""
MEMORY_BYTES, MEMORY_FACTOR = 256 << 20, 32
"""Bytes beyond the memory of the process at its start, plus bytes for each byte of the conversations: a long
conversation is in memory several times, with up to four bytes per character."""
CHARACTERS_EACH, CHARACTERS_FACTOR = 64 << 10, 16
"""Characters that may be written per conversation, and per byte of the template and the conversations, because the
reader of the output has no such limits."""

_REQUEST = struct.Struct("!dQQQQ")
"""Request header: seconds, bytes of memory, characters, and the lengths of the pickled template and conversations,
which follow."""
_ANSWER = struct.Struct("!cQ")
"""Answer header: type tag and byte length."""
_TEXT, _REFUSAL, _SYNTAX, _FAILURE = b"t", b"r", b"s", b"f"
"""Type tags of an answer. The last two report errors of the template itself, and end the answers."""
_TOO_MUCH_MEMORY, _TOO_LONG = 81, 82
"""Exit codes."""
_REFUSALS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Errors, besides jinja's own, that a template's code can raise on messages that it does not expect; the last occurs on
deeply nested tools."""
_BUFFER_BYTES = 1 << 16
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
_OWN_TEMPLATE = "use the template that belongs to the model: chat_template.jinja, or in tokenizer_config.json"


class TemplateRequest(NamedTuple):
    messages: Sequence[Json]
    opening: bool
    """Add the opening of the assistant's turn."""
    tools: Tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one request."""

    conversations: int
    seconds: float
    memory_bytes: int
    characters: int

    @classmethod
    def of(cls, conversations: int, *, template_bytes: int, conversation_bytes: int) -> "Limits":
        return cls(
            conversations=conversations,
            seconds=SECONDS + SECONDS_EACH * conversations,
            memory_bytes=MEMORY_BYTES + MEMORY_FACTOR * conversation_bytes,
            characters=CHARACTERS_EACH * conversations + CHARACTERS_FACTOR * (template_bytes + conversation_bytes),
        )

    def error_of(self, code: int, name: str) -> FinefitError:
        """`code`: the exit code of the process."""
        several = "1 conversation" if self.conversations == 1 else f"{self.conversations:,} conversations"
        remedy = f"{_OWN_TEMPLATE}; it needs far less"
        if code == -signal.SIGPROF:
            problem = f"{name} takes more than {self.seconds:.1f} s of CPU time for {several}"
            return ModelError(problem, remedy)
        if code == _TOO_MUCH_MEMORY:
            problem = f"{name} takes more than {self.memory_bytes >> 20:,} MiB of memory for {several}"
            return ModelError(problem, remedy)
        if code == _TOO_LONG:
            return ModelError(f"{name} writes more than {self.characters:,} characters for {several}", remedy)
        if code >= 0:
            problem = f"the process that renders {name} ended with code {code}, which is a bug in finefit"
            return FinefitError(problem, "please report it with the lines above")
        ended = signal.Signals(-code).name
        if -code in _CRASHES:
            return ModelError(f"{name} crashes the process that renders it ({ended})", remedy)
        problem = f"the process that renders {name} was ended by {ended}"
        return WorkerDied(problem, "look for a lack of host memory (dmesg), and give the same command again")


class TemplateProcess:
    """The process ends when nothing refers to this object any more."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[[Any], TemplateProcess] | None = None
        self._lock = threading.Lock()

    def render(
        self, name: str, source: str, variables: Mapping[str, Any], conversations: Sequence[TemplateRequest]
    ) -> list[str | DataError]:
        """Returns for each conversation the text that the template writes, or its refusal. `name`: the template's name
        in errors."""
        if not conversations:
            return []
        template = pickle.dumps((source, dict(variables)))
        try:
            asked = pickle.dumps([tuple(conversation) for conversation in conversations])
        except RecursionError as error:
            if len(conversations) == 1:
                return [_refusal(str(error))]
            return [self.render(name, source, variables, [one])[0] for one in conversations]
        limits = Limits.of(len(conversations), template_bytes=len(template), conversation_bytes=len(asked))
        sizes = len(template), len(asked)
        head = _REQUEST.pack(limits.seconds, limits.memory_bytes, limits.characters, *sizes)
        with self._lock:
            process = self._started()
            try:
                return _answers(process, b"".join((head, template, asked)), len(conversations), name)
            except EOFError:
                code = process.wait()
                self._end()
                raise limits.error_of(code, name) from None
            except BaseException:  # on Ctrl-C, for example, the next request must not read the answers of this one
                self._end()
                raise

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self._end()
            command = [sys.executable, "-P", "-m", "finefit.data.template_process"]
            # in a session of its own: Ctrl-C in the terminal is for the parent, which may still need this process
            self._process = subprocess.Popen(
                command, bufsize=_BUFFER_BYTES, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
            self._finalizer = weakref.finalize(self, _end, self._process)
        return self._process

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None

    def forget(self) -> None:
        """Detaches from the process in a fork: it belongs to the parent, and ends when nobody else holds its pipe."""
        if self._process is not None and self._finalizer is not None:
            self._finalizer.detach()
            self._process.returncode = 0  # the parent waits for it
            nowhere = os.open(os.devnull, os.O_RDWR)
            for pipe in _pipes(self._process):  # closing them would flush what another thread has yet to send
                os.dup2(nowhere, pipe.fileno(), inheritable=False)
            os.close(nowhere)
        self._process = self._finalizer = None
        self._lock = threading.Lock()  # another thread of the parent may have held the lock


_shared: "weakref.WeakSet[TemplateProcess]" = weakref.WeakSet()


def shared_process() -> TemplateProcess:
    """Returns the shared instance of this Python process, which lives as long as something refers to it."""
    found = next(iter(_shared), None) or TemplateProcess()
    _shared.add(found)
    return found


def _forget_all() -> None:
    for process in _shared:
        process.forget()


os.register_at_fork(after_in_child=_forget_all)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in _pipes(process):
        with suppress(BrokenPipeError):  # unsent data is no longer needed
            pipe.close()


def _pipes(process: "subprocess.Popen[bytes]") -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


def _answers(process: "subprocess.Popen[bytes]", request: bytes, count: int, name: str) -> list[str | DataError]:
    requests, found = _pipes(process)
    with suppress(BrokenPipeError):  # then there is no answer either
        requests.write(request)
        requests.flush()
    answers: list[str | DataError] = []
    for _ in range(count):
        kind, size = _ANSWER.unpack(_read(found, _ANSWER.size))
        text = _read(found, size).decode("utf-8", "surrogatepass")
        if kind == _SYNTAX:
            raise ModelError(f"the chat template of the model cannot be read: {text}", _OWN_TEMPLATE)
        if kind == _FAILURE:
            raise ModelError(f"{name} cannot be rendered: {text}", _OWN_TEMPLATE)
        answers.append(text if kind == _TEXT else _refusal(text))
    return answers


def _read(pipe: IO[bytes], size: int) -> bytes:
    found = pipe.read(size)
    if len(found) < size:
        raise EOFError
    return found


def _refusal(reason: str) -> DataError:
    return DataError(
        f"the chat template refuses this conversation: {reason}",
        "change the messages to what the template accepts: some have no system role, or require user and assistant to "
        "alternate",
    )


def main() -> None:
    """Runs in the template process."""
    answers = os.fdopen(os.dup(1), "wb", _BUFFER_BYTES)
    os.dup2(2, 1)  # output that a library prints must not be read as an answer
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    render, start_bytes = _load_renderer(), _address_space_bytes()
    try:
        while True:
            seconds, memory_bytes, characters, *sizes = _REQUEST.unpack(_read(sys.stdin.buffer, _REQUEST.size))
            if start_bytes is not None:
                _limit_memory(start_bytes + memory_bytes)
            template, asked = (_read(sys.stdin.buffer, size) for size in sizes)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            _answer(render, template, asked, characters, answers)
            signal.setitimer(signal.ITIMER_PROF, 0)
            answers.flush()
    except MemoryError:
        os._exit(_TOO_MUCH_MEMORY)
    except (EOFError, BrokenPipeError):  # the parent is done, or has ended
        os._exit(0)


def _answer(render: Callable[..., Any], template: bytes, asked: bytes, characters: int, answers: IO[bytes]) -> None:
    source, variables = pickle.loads(template)
    for messages, opening, tools in pickle.loads(asked):
        kind, text = _rendered(render, source, {**variables, "add_generation_prompt": opening}, messages, tools)
        characters -= len(text)
        if characters < 0:
            os._exit(_TOO_LONG)
        written = text.encode("utf-8", "surrogatepass")
        answers.write(_ANSWER.pack(kind, len(written)))
        answers.write(written)
        if kind in (_SYNTAX, _FAILURE):
            return


def _rendered(
    render: Callable[..., Any], source: str, variables: Mapping[str, Any], messages: Sequence[Json], tools: Tools
) -> tuple[bytes, str]:
    from jinja2 import TemplateError, TemplateSyntaxError

    try:
        written, _ = render([messages], tools=tools, chat_template=source, **variables)
        return _TEXT, str(written[0])
    except TemplateSyntaxError as error:
        return _SYNTAX, f"line {error.lineno}: {error.message}"
    except (TemplateError, *_REFUSALS) as error:
        return _REFUSAL, str(error)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 a program from outside may raise anything
        return _FAILURE, f"{type(error).__name__}: {error}"


def _load_renderer() -> Callable[..., Any]:
    """Returns transformers' own function, without loading the rest of the package, which takes five times as long."""
    found = importlib.util.find_spec("transformers")
    assert found is not None
    assert found.origin is not None
    root = Path(found.origin).parent
    for name, folder in (("transformers", root), ("transformers.utils", root / "utils")):
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    module = "transformers.utils.chat_template_utils"
    try:
        render: Callable[..., Any] = importlib.import_module(module).render_jinja_template
    except (ImportError, AttributeError):  # a version of the module that needs the rest
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        render = importlib.import_module(module).render_jinja_template
    return render


def _address_space_bytes() -> int | None:
    """Returns the address space of this process; None if it can be neither read nor limited."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        return None


def _limit_memory(size: int) -> None:
    """Never raises the limit that the user has set for all processes."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))


if __name__ == "__main__":
    main()
