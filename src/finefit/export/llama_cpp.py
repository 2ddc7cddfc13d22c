"""llama.cpp: a GGUF file loaded by the program that it is for, to prove it and to talk to it.

`cyllama` binds llama.cpp in a wheel and gives logits, so it proves whole models and quantises. It reads adapters but
cannot apply them; the server in `xllamacpp` can, and says every token's log probability, so it proves adapters.

`python -m finefit.export.llama_cpp outputs GGUF FOLDER [LORA]` reads the probe in FOLDER and leaves outputs there;
`... quantise SOURCE TARGET FTYPE` writes a smaller file."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from finefit.data.template_process import TemplateRequest, shared_process
from finefit.errors import FinefitError, ModelError
from finefit.export.child import failure, run_child
from finefit.export.gguf import require_packages
from finefit.export.outputs import Outputs, Probe, read_outputs, read_probe, write_outputs
from finefit.facts.machine import count_cores

_BATCH, _CONTEXT_STEP, _CHAT_CONTEXT = 512, 256, 4096
"""Tokens that are evaluated at once; the unit in which a context grows; the least context of a chat."""
_TOKEN_BYTES = 512
"""More than the text of any token."""
_LOG_ERROR = 4
"""Of ggml_log_level."""
_F32 = 0
"""Of ggml_type."""
_UNFINISHED = "\ufffd"
"""What stands for the first bytes of a character whose other bytes are still to come."""


def _num_threads() -> int:
    """OpenMP's own variable counts, as for torch."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() else count_cores()


def outputs_of_gguf(gguf: Path, probe_dir: Path, *, lora: Path | None = None) -> Outputs:
    """What llama.cpp computes on the probe in `probe_dir`, with the adapter `lora` over the model if one is given."""
    require_packages("cyllama" if lora is None else "xllamacpp")
    arguments: list[str | Path] = ["outputs", gguf, probe_dir, *([] if lora is None else [lora])]
    ended = run_child("finefit.export.llama_cpp", arguments)
    if ended.code != 0:
        problem = f"llama.cpp cannot run {gguf}" + ("" if lora is None else f" with {lora}")
        raise failure(ended, problem, "export it with --to merged, or take another kind of GGUF", path=probe_dir)
    return read_outputs(probe_dir)


def open_gguf(path: Path) -> "GgufModel":
    """For `stream`; logs of llama.cpp go nowhere."""
    require_packages("cyllama")
    from cyllama.llama.llama_cpp import disable_logging

    disable_logging()
    return GgufModel(path)


class GgufModel:
    """A loaded file and its context, which remembers the tokens that it has evaluated: only what follows the common
    beginning is computed."""

    def __init__(self, path: Path, *, precise: bool = False) -> None:
        """`precise`: keys and values in float32, to compare logits."""
        from cyllama.llama import llama_cpp

        class Model(llama_cpp.LlamaModel):  # type: ignore[misc]
            @property
            def n_vocab(self) -> int:
                """cyllama 0.2's own get_logits_ith asks its model for it, which has none."""
                return int(self.get_vocab().n_vocab)

        if not path.is_file():
            raise ModelError(f"{path} does not exist", "name a GGUF file")
        self.path, self._library, self._precise = path, llama_cpp, precise
        parameters = llama_cpp.LlamaModelParams()
        parameters.n_gpu_layers = 0
        try:
            self._model = Model(str(path), parameters)
        except (ValueError, RuntimeError, OSError) as error:
            raise ModelError(f"llama.cpp cannot load {path}: {error}", "export the model again") from None
        self.vocab = self._model.get_vocab()
        self._context: Any = None
        self._evaluated: list[int] = []

    def logits(self, tokens: Sequence[int], last: int) -> NDArray[np.float32]:
        """After each of the last `last` tokens: last x vocabulary."""
        context, start = self._reserve(len(tokens)), self._keep(tokens, len(tokens) - last)
        rows = []
        for first in range(start, len(tokens), _BATCH):
            part = tokens[first : first + _BATCH]
            wanted = [first + at >= len(tokens) - last for at in range(len(part))]
            self._decode(context, part, first, wanted)
            places = (at for at, is_wanted in enumerate(wanted) if is_wanted)
            rows += [np.asarray(context.get_logits_ith(at), dtype=np.float32) for at in places]
        self._evaluated = list(tokens)
        return np.stack(rows)

    def _decode(self, context: Any, tokens: Sequence[int], first: int, wanted: Sequence[bool]) -> None:
        batch = self._library.LlamaBatch(n_tokens=len(tokens), embd=0, n_seq_max=1)
        for at, (token, is_wanted) in enumerate(zip(tokens, wanted, strict=True)):
            batch.add(token, first + at, [0], is_wanted)
        self._evaluated = []  # until the batch is done
        context.decode(batch)
        batch.close()

    def _keep(self, tokens: Sequence[int], limit: int) -> int:
        """Forgets what `tokens` do not begin with; returns how many are kept, fewer than `limit`."""
        same = takewhile(lambda pair: pair[0] == pair[1], zip(self._evaluated, tokens, strict=False))
        kept = min(sum(1 for _ in same), limit)
        # recurrent models have no memory of an earlier token to go back to
        if kept < len(self._evaluated) and not self._context.memory_seq_rm(0, kept, -1):
            kept = 0
        if kept == 0:
            self._context.kv_cache_clear()
        return kept

    def _reserve(self, length: int) -> Any:
        if self._context is not None and length <= self._context.n_ctx:
            return self._context
        parameters = self._library.LlamaContextParams()
        parameters.n_ctx = -(-length // _CONTEXT_STEP) * _CONTEXT_STEP
        parameters.n_batch = parameters.n_ubatch = _BATCH
        parameters.n_threads = parameters.n_threads_batch = _num_threads()
        parameters.swa_full = True  # else the cache of a sliding window forgets what `_keep` goes back to
        if self._precise:
            parameters.type_k = parameters.type_v = _F32
            parameters.flash_attn_type = 0
        if self._context is not None:
            self._context.close()
        self._context, self._evaluated = self._library.LlamaContext(self._model, parameters, verbose=False), []
        return self._context

    def greedy(self, prompt: Sequence[int], *, stops: Sequence[int], max_new_tokens: int) -> tuple[int, ...]:
        tokens = list(prompt)
        for _ in range(max_new_tokens):
            token = int(self.logits(tokens, 1)[0].argmax())
            if token in stops:
                break
            tokens.append(token)
        return tuple(tokens[len(prompt) :])

    def stream(
        self, messages: Sequence[Mapping[str, str]], *, max_new_tokens: int, temperature: float
    ) -> Iterator[str]:
        """The answer in pieces as they come. The template is the file's own; temperature 0 is greedy."""
        prompt = self.vocab.tokenize(self._write(messages), False, True)
        if (longest := self._model.n_ctx_train) < len(prompt) + 1:
            problem = f"the conversation has {len(prompt):,} tokens, {self.path.name} was trained on up to {longest:,}"
            raise ModelError(problem, "begin a new conversation")
        self._reserve(max(min(len(prompt) + max_new_tokens, longest), _CHAT_CONTEXT))
        chance, tokens, said = np.random.default_rng(), list(prompt), ""
        for _ in range(min(max_new_tokens, longest - len(prompt))):
            token = choose(self.logits(tokens, 1)[0], temperature, chance)
            if self.vocab.is_eog(token):
                break
            tokens.append(token)
            text = self.text(tokens[len(prompt) :])
            if not text.endswith(_UNFINISHED) and text != said:
                yield text.removeprefix(said)
                said = text

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.vocab.detokenize(list(tokens), _TOKEN_BYTES * len(tokens), False, False))

    def _write(self, messages: Sequence[Mapping[str, str]]) -> str:
        if not (template := self._model.get_default_chat_template()):
            raise ModelError(f"{self.path} has no chat template, so it cannot answer in a chat", "export a chat model")
        names = {"bos_token": self.vocab.token_bos(), "eos_token": self.vocab.token_eos()}
        variables = {name: self.vocab.get_text(token) for name, token in names.items() if token >= 0}
        conversation = TemplateRequest([dict(message) for message in messages], True, None)
        (written,) = shared_process().render(f"the chat template in {self.path}", template, variables, [conversation])
        if isinstance(written, FinefitError):
            raise written
        return written


def choose(logits_V: NDArray[np.float32], temperature: float, chance: np.random.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    scaled = (logits_V - logits_V.max()).astype(np.float64) / temperature
    weights = np.exp(scaled)
    return int(chance.choice(len(weights), p=weights / weights.sum()))


def outputs_of_model(model: GgufModel, probe: Probe) -> Outputs:
    logits, greedy = [], []
    for prompt, answer in zip(probe.prompts, probe.answers, strict=True):
        logits.append(model.logits([*prompt, *answer[:-1]], len(answer)))
        greedy.append(model.greedy(prompt, stops=probe.stop_tokens, max_new_tokens=probe.max_new_tokens))
    return Outputs(logits=tuple(logits), greedy=tuple(greedy))


def outputs_with_lora(gguf: Path, lora: Path, probe: Probe) -> Outputs:
    """By llama.cpp's server, which says log probabilities: logits but for a constant, which no comparison sees. It says
    them of one next token at a time."""
    vocabulary = _vocabulary_of(gguf)
    longest = max(map(len, probe.prompts)) + max(probe.max_new_tokens, *map(len, probe.answers))
    server = _serve(gguf, lora, longest + 1)
    logits, greedy = [], []
    with httpx.Client(base_url=server.listening_address, timeout=None, trust_env=False) as client:
        for prompt, answer in zip(probe.prompts, probe.answers, strict=True):
            before = ([*prompt, *answer[:at]] for at in range(len(answer)))
            logits.append(np.stack([_next_logits(client, tokens, vocabulary) for tokens in before]))
            body = {"prompt": prompt, "n_predict": probe.max_new_tokens, "return_tokens": True, **_GREEDY}
            said = _ask(client, body | {"ignore_eos": False})["tokens"]
            greedy.append(tuple(takewhile(lambda token: token not in probe.stop_tokens, said)))
    return Outputs(logits=tuple(logits), greedy=tuple(greedy))


def _vocabulary_of(gguf: Path) -> list[str]:
    from gguf import GGUFReader

    texts: list[str] = GGUFReader(gguf).fields["tokenizer.ggml.tokens"].contents()
    return texts


def _serve(gguf: Path, lora: Path, length: int) -> Any:
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(gguf)
    parameters.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(lora), 1.0)]
    parameters.n_ctx, parameters.n_parallel = -(-length // _CONTEXT_STEP) * _CONTEXT_STEP, 1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = _num_threads()
    parameters.n_gpu_layers, parameters.warmup, parameters.swa_full = 0, False, True
    return xllamacpp.Server(parameters)


_GREEDY = {"temperature": 0.0, "cache_prompt": True}


def _next_logits(client: httpx.Client, tokens: Sequence[int], vocabulary: Sequence[str]) -> NDArray[np.float32]:
    # the server reports nothing for the end of a text or a part of a character, so it is made to say a letter, which
    # changes what it samples and not the probabilities that it reports
    letter = next(at for at, text in enumerate(vocabulary) if len(text) == 1 and text.isascii() and text.isalpha())
    asked = {"n_predict": 1, "n_probs": len(vocabulary), "post_sampling_probs": False, "logit_bias": [[letter, 1e6]]}
    (found,) = _ask(client, {"prompt": list(tokens), **asked, **_GREEDY})["completion_probabilities"]
    logits_V = np.full(len(vocabulary), np.nan, dtype=np.float32)
    for one in found["top_logprobs"]:
        logits_V[one["id"]] = one["logprob"]
    if num_missing := int(np.isnan(logits_V).sum()):
        raise FinefitError(f"llama.cpp's server left out {num_missing} of {len(vocabulary)} tokens")
    return logits_V


def _ask(client: httpx.Client, body: Mapping[str, Any]) -> dict[str, Any]:
    return dict(client.post("/completion", json=body).raise_for_status().json())


def _quantise(source: Path, target: Path, kind: int) -> None:
    from cyllama.llama import llama_cpp

    parameters = llama_cpp.LlamaModelQuantizeParams()
    parameters.ftype, parameters.nthread = kind, _num_threads()
    llama_cpp.model_quantize(str(source), str(target), parameters)


def _print_errors(level: int, text: str) -> None:
    if level == _LOG_ERROR:
        print(text, end="", file=sys.stderr, flush=True)


def _write_probe_outputs(gguf: Path, folder: Path, lora: Path | None) -> None:
    probe = read_probe(folder)
    if lora is not None:
        write_outputs(folder, outputs_with_lora(gguf, lora, probe))
        return
    write_outputs(folder, outputs_of_model(GgufModel(gguf, precise=True), probe))


def main() -> None:
    try:
        match sys.argv[1:]:
            case ["outputs", gguf, folder]:
                from cyllama.llama.llama_cpp import set_log_callback

                set_log_callback(_print_errors)
                _write_probe_outputs(Path(gguf), Path(folder), None)
            case ["outputs", gguf, folder, lora]:
                _write_probe_outputs(Path(gguf), Path(folder), Path(lora))
            case ["quantise", source, target, kind]:
                _quantise(Path(source), Path(target), int(kind))
            case other:
                raise FinefitError(f"not a task of this module: {other}")
    except FinefitError as error:
        sys.exit(error.problem)


if __name__ == "__main__":
    main()
