"""Tasks: how answers are scored, and how rows are built."""

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from finefit.spec import Part
from finefit.spec.models import FolderModel, HubModel


class ExactMatch(Part):
    """The answer equals the reference."""

    kind: Literal["exact_match"]


class JsonMatch(Part):
    """The answer is JSON, and every field is right."""

    kind: Literal["json_match"]


class Rouge(Part):
    """ROUGE-1, -2, -L and -Lsum, each against the nearest reference (rouge-score)."""

    kind: Literal["rouge"]
    stemmer: bool = True
    """Compare English words by their stems."""
    tokenizer: Literal["unicode", "rouge"] = "unicode"
    """`unicode` keeps the letters of every script and equals `rouge` for plain English; `rouge`, rouge-score's own,
    drops everything but a-z and 0-9: it keeps fragments of Vietnamese and nothing of Chinese."""
    sentences: Literal["split", "lines"] = "split"
    """How ROUGE-Lsum splits sentences: `split` also at full stops, `lines` only at line ends, like rouge-score."""


class Bleu(Part):
    """Corpus BLEU (sacrebleu)."""

    kind: Literal["bleu"]
    tokenize: Literal["13a", "char", "intl", "zh", "none"] = "13a"
    lowercase: bool = False


class Chrf(Part):
    """Corpus chrF (sacrebleu); with `word_order: 2` chrF++."""

    kind: Literal["chrf"]
    word_order: int = Field(0, ge=0, le=2)


class RelaxedAccuracy(Part):
    """The answer equals the reference, or is a number near it (ChartQA)."""

    kind: Literal["relaxed_accuracy"]
    tolerance: float = Field(0.05, ge=0, lt=1)
    """The accepted error of a number, as a share of the reference."""


class Anls(Part):
    """Similarity of the answer to the nearest reference by characters; 0 below the threshold (DocVQA,
    InfographicVQA)."""

    kind: Literal["anls"]
    threshold: float = Field(0.5, ge=0, le=1)


class VqaAccuracy(Part):
    """Share of people who gave the same answer, of whom three are enough; rows need the answers of several people
    (VQAv2, TextVQA)."""

    kind: Literal["vqa_accuracy"]


class Amr(Part):
    """Smatch over all pairs: an answer that is not a graph matches nothing and adds no triples of its own."""

    kind: Literal["amr"]
    restarts: int = Field(20, ge=20)
    """Seeded starts of the search for the best variable mapping."""
    concepts: Literal["as_written", "underscores"] = "underscores"
    """How the words of a concept are joined, on both sides."""
    repair_gold: bool = False
    """Rename a variable that a gold graph defines twice; otherwise such a row is an error."""
    mend_answers: bool = False
    """Score every answer a second time with repaired brackets and variables; both scores are shown for the same
    items."""


class TruthfulQa(Part):
    """MC1 and MC2 by log-probability; with `generate` also answers, scored by their similarity to right and wrong
    references."""

    kind: Literal["truthfulqa"]
    generate: bool = True
    scorer: Literal["rouge", "bleu", "bleurt"] = "rouge"
    """`bleurt` needs the package of that name."""
    checkpoint: str | None = None
    """BLEURT's checkpoint, a folder relative to the spec file; by default the package's small one."""


class QmSum(Part):
    """Query-based meeting summaries with the whole meeting in the prompt; ROUGE."""

    kind: Literal["qmsum"]


class Summary(Part):
    """ROUGE-Lsum, relative length, presence of sections, extractive coverage, and faithfulness if an NLI model is
    named."""

    kind: Literal["summary"]
    sections: tuple[str, ...] = Field((), strict=False)  # a Python list, which a strict tuple would refuse
    """Headings that a summary must have."""
    nli: Annotated[HubModel | FolderModel, Field(discriminator="kind")] | None = None
    """A model that decides whether one sentence follows from another; the meaning of its labels is tested on known
    pairs."""


class Hallucination(Part):
    """How often a wrong answer is likelier per token than the right one; rows need wrong answers, as in preference
    pairs."""

    kind: Literal["hallucination"]


class Perplexity(Part):
    """Perplexity of the row's answer over all its tokens, or of the whole plain text."""

    kind: Literal["perplexity"]
    window: int = Field(2048, ge=2)
    """Tokens of plain text in one window. A longer text has consecutive windows, whose first tokens are not counted."""


class LmEval(Part):
    """Tasks of lm-evaluation-harness (needs lm-eval), in a process of their own."""

    kind: Literal["lm_eval"]
    tasks: tuple[str, ...] = Field(min_length=1, strict=False)
    shots: int | None = Field(None, ge=0)
    folder: str | None = None
    """A folder with your own task files, relative to the spec file."""


class CustomTask(Part):
    """Your own Python file with `METRICS`, `extract(answer)` and `score(found, reference)`, and optionally
    `build(prompt, answer)` for rows."""

    kind: Literal["python"]
    path: str
    """A path relative to the spec file."""


def _named(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


_OfShortAnswers = ExactMatch | JsonMatch | RelaxedAccuracy | Anls | VqaAccuracy
_OfTexts = Rouge | Bleu | Chrf | Amr | TruthfulQa | QmSum | Summary
_Others = Hallucination | Perplexity | LmEval | CustomTask
Task = Annotated[_OfShortAnswers | _OfTexts | _Others, Field(discriminator="kind"), BeforeValidator(_named)]
"""A name alone is the task with its defaults."""


WITH_LIKELIHOODS = (Hallucination, Perplexity, TruthfulQa, LmEval)
"""Tasks that ask a model how likely given answers are."""


def task_kinds() -> tuple[str, ...]:
    return tuple(get_args(part.model_fields["kind"].annotation)[0] for part in get_args(get_args(Task)[0]))


class AmrForm(Part):
    """A sentence becomes a graph in one answer, after the results of sub-tasks (MTUP)."""

    kind: Literal["amr"]
    method: Literal["baseline", "mtup2", "mtup3a", "mtup3b", "mtup4"] = "baseline"
    """`baseline`: the graph. `mtup2`: its skeleton, then the graph. `mtup3a`: concepts, the graph without variables,
    the graph. `mtup3b`: concepts, relations, the graph. `mtup4`: all four."""
    concepts: Literal["as_written", "underscores"] = "underscores"
    repair_gold: bool = False


Form = Annotated[AmrForm | CustomTask, Field(discriminator="kind"), BeforeValidator(_named)]
