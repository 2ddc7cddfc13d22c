"""A conversation with a model, answered piece by piece: prompted as it was trained, decoded as evaluations decode it.

What the model has read stays in its cache, so that a turn costs only its own tokens. Models whose layers cannot be
cropped read the whole conversation each turn."""

import queue
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, Protocol

import peft
import torch
from torch import Tensor, nn

from finefit.artifacts.reading import is_there
from finefit.artifacts.records import read_record
from finefit.artifacts.stage_records import Stage
from finefit.data.render import Renderer
from finefit.data.rows import Message
from finefit.errors import DataError, ModelError, Resumable, is_out_of_memory
from finefit.evaluate.decoding import (
    ChooseTokens,
    DecodeState,
    causal_of,
    decode,
    decode_step,
    likeliest,
    prefill,
    sample_by,
    uniform_draws,
)
from finefit.export.subject import ExportSubject
from finefit.model.attention import attention_here, can_pack, for_answers
from finefit.model.load import load_for_answers, weight_dtype
from finefit.plan.resolve import precision_on

Device = Literal["cpu", "cuda"]
_Tokens = Generator[int, None, None]
_SHORTER = "/reset begins a new conversation, /undo takes back the last turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    max_new_tokens: int
    temperature: float = 0.0
    """0: the likeliest token each time."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The next part of an answer. The last one has the counts, if the program that runs the model gives them."""

    text: str
    new_tokens: int | None = None
    """Of the whole answer, its end included."""
    reused_tokens: int | None = None
    """Of the prompt, those that the model had read before."""
    cut_tokens: int = 0
    """Of the prompt, those that were cut out of its middle as in training."""
    is_cut: bool = False
    """It had not ended after max_new_tokens."""


Pieces = Generator[Piece, None, None]


class Speaker(Protocol):
    @property
    def remembers(self) -> bool:
        """Whether a prompt holds the turns before; a model without a chat template is given one text at a time."""

    @property
    def has_base(self) -> bool:
        """Whether `base` may be asked for: the same weights without their adapter."""

    def stream(self, messages: Sequence[Message], sampling: Sampling, *, base: bool = False) -> Pieces: ...


@dataclass(slots=True)
class ChatHistory:
    system: str = ""
    turns: list[tuple[str, str]] = field(default_factory=list)
    """What the user said, and the answer."""

    def prompt(self, said: str, *, remembers: bool = True) -> list[Message]:
        messages = [Message("system", self.system)] if self.system else []
        for user, answer in self.turns if remembers else ():
            messages += [Message("user", user), Message("assistant", answer)]
        return [*messages, Message("user", said)]

    def before_last(self) -> "ChatHistory":
        return ChatHistory(self.system, self.turns[:-1])

    def row(self, *, whole: bool = False) -> dict[str, Any]:
        """The last exchange, or the whole conversation, as a row to train on."""
        kept = self if whole else ChatHistory(self.system, self.turns[-1:])
        user, answer = kept.turns[-1]
        messages = [*kept.before_last().prompt(user), Message("assistant", answer)]
        return {"messages": [{"role": message.role, "content": message.content} for message in messages]}


@dataclass(slots=True)
class _Read:
    """What a cache holds."""

    state: DecodeState
    tokens: list[int]


class ModelSpeaker:
    """A model in this process. Each side, with the adapter and without, has a cache of its own."""

    def __init__(self, model: nn.Module, renderer: Renderer, *, device: Device, max_prompt_tokens: int | None) -> None:
        self.model, self.renderer, self.device = model, renderer, device
        self.max_prompt_tokens = max_prompt_tokens
        """Longer prompts are cut in the middle, as training rows are."""
        self._read: dict[bool, _Read] = {}
        text = causal_of(model).config.get_text_config(decoder=True)
        self._max_tokens: int | None = getattr(text, "max_position_embeddings", None)

    @property
    def remembers(self) -> bool:
        return self.renderer.template == "chat"

    @property
    def has_base(self) -> bool:
        return isinstance(self.model, peft.PeftModel)

    def stream(self, messages: Sequence[Message], sampling: Sampling, *, base: bool = False) -> Pieces:
        """Holds the model until it is closed or exhausted."""
        prompt = self.renderer.prompt_tokens(messages, max_tokens=self.max_prompt_tokens)
        num_cut = len(self.renderer.prompt_tokens(messages)) - len(prompt) if self.max_prompt_tokens else 0
        room = self._room(prompt, sampling)
        choose = self._choose(messages, sampling)
        can_crop = can_pack(causal_of(self.model).config, len(prompt) + room) is None
        common = self._num_read(prompt, base) if can_crop else 0
        how = self._step_by_step(prompt, room, choose, base, common) if can_crop else self._apart(prompt, room, choose)
        with ExitStack() as stack:
            stack.enter_context(self._side(base))
            tokens = stack.enter_context(closing(how))
            try:
                for piece in self._pieces(tokens):
                    yield replace(piece, reused_tokens=common, cut_tokens=num_cut)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                self._read.clear()
                problem = f"a conversation of {len(prompt):,} tokens does not fit in the free memory: {error}"
                raise Resumable(problem, f"{_SHORTER}; or use --device cpu") from None

    def _room(self, prompt: Sequence[int], sampling: Sampling) -> int:
        """For the answer."""
        if self._max_tokens is None:
            return sampling.max_new_tokens
        if len(prompt) >= self._max_tokens:
            problem = f"the conversation has {len(prompt):,} tokens, and the model has {self._max_tokens:,} positions"
            raise DataError(problem, _SHORTER)
        return min(sampling.max_new_tokens, self._max_tokens - len(prompt))

    def _num_read(self, prompt: Sequence[int], base: bool) -> int:
        """Tokens at the beginning of the prompt that the cache holds; the last one is always read again."""
        read = self._read.get(base)
        pairs = zip(read.tokens, prompt[:-1], strict=False) if read is not None else ()
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _pieces(self, tokens: Iterator[int]) -> Iterator[Piece]:
        """One for each token, so that an answer can be stopped wherever it is. Its text is what no later token can
        change."""
        stops, written, said = frozenset(self.renderer.stop_tokens), list[int](), ""
        for token in tokens:
            written.append(token)
            if token in stops:
                break
            text = self.renderer.decode_so_far(written)
            new = text[len(said) :] if text.startswith(said) else ""
            said += new
            yield Piece(text=new)
        whole = self.renderer.decode_answer(written)
        yield Piece(text=whole[len(said) :], new_tokens=len(written), is_cut=written[-1] not in stops)

    def _choose(self, messages: Sequence[Message], sampling: Sampling) -> ChooseTokens:
        if not sampling.temperature:
            return likeliest
        prompt = self.renderer.prompt_text(messages)
        draws = uniform_draws(sampling.seed, prompt, 0, steps=sampling.max_new_tokens)
        return sample_by([draws], temperature=sampling.temperature, device=self.device)

    def _side(self, base: bool) -> AbstractContextManager[Any]:
        if not base:
            return nullcontext()
        assert isinstance(self.model, peft.PeftModel), "only a model with an adapter has a base"
        side: AbstractContextManager[Any] = self.model.disable_adapter()
        return side

    def _step_by_step(self, prompt: Sequence[int], room: int, choose: ChooseTokens, base: bool, common: int) -> _Tokens:
        """The cache is put back after each token: what follows may be interrupted there, and nowhere else."""
        rows_B = torch.tensor([0], device=self.device)
        read = self._prefilled(prompt, room, self._read.pop(base, None), common)
        tokens_B = torch.tensor([prompt[-1]], device=self.device)
        for step in range(room):
            fed = int(tokens_B)
            with torch.inference_mode():
                tokens_B = decode_step(self.model, read.state, tokens_B, partial(choose, rows_B, step))
            read.tokens.append(fed)
            self._read[base] = read
            yield int(tokens_B)
            self._read.pop(base)
        self._read[base] = read

    def _prefilled(self, prompt: Sequence[int], room: int, read: _Read | None, common: int) -> _Read:
        """The cache with all but the last token of the prompt."""
        before = list(prompt[:-1])
        with torch.inference_mode():
            if read is None or not common:
                state = prefill(self.model, self._ids(before), [len(before)], max_new_tokens=room)
                return _Read(state, before)
            if surplus := len(read.tokens) - common:
                read.state.cache.crop(-surplus)
            if new := before[common:]:
                self.model(input_ids=self._ids(new), past_key_values=read.state.cache, use_cache=True, logits_to_keep=1)
        positions_B1 = torch.tensor([[len(before)]], device=self.device)
        state = DecodeState(cache=read.state.cache, positions_B1=positions_B1, is_own_BS=None, slots=len(before))
        return _Read(state, before)

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([list(tokens)], dtype=torch.long, device=self.device)

    def _apart(self, prompt: Sequence[int], room: int, choose: ChooseTokens) -> _Tokens:
        """The tokens of a model that has to be asked for its whole answer at once, by a thread that hands them out."""
        found: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()
        stopped = threading.Event()

        def watched(rows_B: Tensor, step: int, logits_BV: Tensor) -> Tensor:
            if stopped.is_set():
                raise _Stopped
            tokens_B = choose(rows_B, step, logits_BV)
            found.put(int(tokens_B))
            return tokens_B

        def work() -> None:
            how: dict[str, Any] = {"stops": self.renderer.stop_tokens, "pad": self.renderer.pad, "device": self.device}
            try:
                decode(self.model, [prompt], max_new_tokens=room, choose=watched, **how)
                found.put(None)
            except _Stopped:
                pass
            except Exception as error:  # noqa: BLE001 it is raised again by whoever reads the tokens
                found.put(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            while (token := found.get()) is not None:
                if isinstance(token, BaseException):
                    raise token
                yield token
        finally:
            stopped.set()
            thread.join()


class _Stopped(Exception):
    """Nobody reads the answer any more."""


class GgufSpeaker:
    """A model that llama.cpp runs, with the template in its file."""

    remembers, has_base = True, False

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            problem = f"{path} is not {'a file' if is_there(path) else 'there'}"
            raise ModelError(problem, "`finefit export RUN --to gguf:q8_0` makes such a file")
        from finefit.export.llama_cpp import open_gguf

        self._model = open_gguf(path)

    def stream(self, messages: Sequence[Message], sampling: Sampling, *, base: bool = False) -> Pieces:
        assert not base, "a GGUF file holds one model"
        said = [{"role": message.role, "content": message.content} for message in messages]
        limits: dict[str, Any] = {"max_new_tokens": sampling.max_new_tokens, "temperature": sampling.temperature}
        for text in self._model.stream(said, **limits):
            yield Piece(text=text)


def open_speaker(subject: ExportSubject, *, device: Device | None = None) -> ModelSpeaker:
    """Loads the model as evaluations do. `device`: by default a GPU, if there is one."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    external, precision = subject.external, precision_on(device)
    stage = None if subject.where is None else read_record(subject.where.stage, Stage)
    if stage is not None and stage.device == device:
        precision = stage.precision
    dtype = torch.bfloat16 if precision == "bf16" else weight_dtype(precision, external.tuning)
    try:
        model = load_for_answers(
            subject.base,
            subject.adapter,
            device=device,
            dtype=dtype,
            attention=for_answers(attention_here(device, precision, subject.base)),
            bits=subject.bits,
        )
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        problem = f"{subject.base_name} does not fit in the free memory: {error}"
        raise Resumable(problem, "free the card, or use --device cpu") from None
    limit = external.max_prompt_tokens
    return ModelSpeaker(model, subject.renderer, device=device, max_prompt_tokens=limit)


def require_base(speaker: Speaker) -> None:
    if not speaker.has_base:
        problem = "there is no base to compare with: this is a whole model, not an adapter on one"
        raise ModelError(problem, "chat with the base in a second terminal")
