"""What answers are measured by."""

from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, model_validator

from finefit.spec.models import FolderModel, HubModel
from finefit.spec.part import Part


class ExactMatch(Part):
    """The answer is the reference."""

    kind: Literal["exact_match"]


class JsonMatch(Part):
    """The answer is JSON with every field right."""

    kind: Literal["json_match"]


class Rouge(Part):
    """ROUGE-1, -2, -L and -Lsum, each against the reference that is nearest by it (rouge-score)."""

    kind: Literal["rouge"]
    stemmer: bool = True
    """English words are compared by their stems."""
    tokenizer: Literal["unicode", "rouge"] = "unicode"
    """`unicode` keeps the letters of every script, and is equal to `rouge` for plain English; `rouge`, which is rouge-score's own, drops all but
    a-z and 0-9: of Vietnamese it keeps fragments, of Chinese nothing."""
    sentences: Literal["split", "lines"] = "split"
    """What ROUGE-Lsum takes for sentences: `split` ends them at full stops too, `lines` at the ends of lines only, as rouge-score does."""


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
    """The answer is the reference, or a number near it (ChartQA)."""

    kind: Literal["relaxed_accuracy"]
    tolerance: float = Field(0.05, ge=0, lt=1)
    """How far a number may be off, as a share of the reference."""


class Anls(Part):
    """How near the answer is to a reference, character by character; nothing where less than half of it agrees (DocVQA, InfographicVQA)."""

    kind: Literal["anls"]
    threshold: float = Field(0.5, ge=0, le=1)


class VqaAccuracy(Part):
    """How many people gave the same answer, three being enough; rows need the answers of several people (VQAv2, TextVQA)."""

    kind: Literal["vqa_accuracy"]


class Amr(Part):
    """Smatch over all pairs: an answer that is no graph matches nothing and adds no triples of its own."""

    kind: Literal["amr"]
    restarts: int = Field(20, ge=20)
    """Seeded starts of the search for the best mapping of variables."""
    concepts: Literal["as_written", "underscores"] = "underscores"
    """How words of a concept are joined, on both sides alike."""
    repair_gold: bool = False
    """A variable that a gold graph defines twice gets another name the second time; without this such a row is an error."""
    mend_answers: bool = False
    """Score every answer a second time after brackets and variables were put right; both scores are shown, for the same items."""


class TruthfulQa(Part):
    """MC1 and MC2 by log-probability; with `generate` answers too, scored by their nearness to right and to wrong references."""

    kind: Literal["truthfulqa"]
    generate: bool = True
    scorer: Literal["rouge", "bleu", "bleurt"] = "rouge"
    """`bleurt` needs the package of that name."""
    checkpoint: str | None = None
    """Of BLEURT: a folder relative to the spec file; None: the small one that comes with the package."""


class QmSum(Part):
    """Summaries of meetings by query, the whole meeting in the prompt; ROUGE."""

    kind: Literal["qmsum"]


class Summary(Part):
    """ROUGE-Lsum, length against the reference's, sections that are there, extractive coverage, and faithfulness where an NLI model is named."""

    kind: Literal["summary"]
    sections: tuple[str, ...] = Field(
        (), strict=False
    )  # a list comes to a task as Python's, which a strict tuple would refuse
    """Headings that a summary must have."""
    nli: Annotated[HubModel | FolderModel, Field(discriminator="kind")] | None = None
    """A model that tells whether one sentence follows from another; which of its labels means what is tried on known pairs first."""


class Hallucination(Part):
    """How often a wrong answer is more likely to the model than the right one, per token; rows need wrong answers, as preference pairs have them."""

    kind: Literal["hallucination"]


class Perplexity(Part):
    """Of the answer that a row gives, over all of its tokens; of plain text, over all of it."""

    kind: Literal["perplexity"]
    window: int = Field(2048, ge=2)
    """Tokens of plain text that are looked at together. A longer text is looked at in windows behind one another; the first token of each is not
    counted."""


class LmEval(Part):
    """Tasks of lm-evaluation-harness (needs lm-eval), in a process of their own."""

    kind: Literal["lm_eval"]
    tasks: tuple[str, ...] = Field(min_length=1, strict=False)
    shots: int | None = Field(None, ge=0)
    folder: str | None = None
    """With task files of your own, relative to the spec file."""


class OwnTask(Part):
    """A Python file of yours with `METRICS`, `extract(answer)` and `score(found, reference)`, and if rows need it `build(prompt, answer)`."""

    kind: Literal["python"]
    path: str
    """Relative to the spec file."""


def _named(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


Task = Annotated[
    ExactMatch
    | JsonMatch
    | RelaxedAccuracy
    | Anls
    | VqaAccuracy
    | Rouge
    | Bleu
    | Chrf
    | Amr
    | TruthfulQa
    | QmSum
    | Summary
    | Hallucination
    | Perplexity
    | LmEval
    | OwnTask,
    Field(discriminator="kind"),
    BeforeValidator(_named),
]
"""A bare name is the task with its defaults."""


def task_kinds() -> tuple[str, ...]:
    return tuple(get_args(part.model_fields["kind"].annotation)[0] for part in get_args(get_args(Task)[0]))


class AmrForm(Part):
    """A sentence becomes a graph in one answer, by way of sub-tasks whose results stand before it (MTUP)."""

    kind: Literal["amr"]
    method: Literal["baseline", "mtup2", "mtup3a", "mtup3b", "mtup4"] = "baseline"
    """`baseline`: the graph. `mtup2`: its skeleton, then the graph. `mtup3a`: concepts, the graph without variables, the graph. `mtup3b`: concepts,
    relations, the graph. `mtup4`: all four."""
    concepts: Literal["as_written", "underscores"] = "underscores"
    repair_gold: bool = False


Form = Annotated[AmrForm | OwnTask, Field(discriminator="kind"), BeforeValidator(_named)]


class Judge(Part):
    """A language model behind an OpenAI-compatible address that gives every answer a mark; never needed, always recorded."""

    url: str
    """For instance http://localhost:8000/v1."""
    model: str
    key: str | None = None
    """The name of the environment variable that holds the secret; the secret itself belongs in no file."""
    question: str | None = None
    """What the judge is asked, with {prompt}, {answer} and {reference} in braces; it must reply `Mark: N`, from 1 to 5."""

    @model_validator(mode="after")
    def _can_be_asked(self) -> "Judge":
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"url: {self.url!r} is no address; give one such as http://localhost:8000/v1")
        if "@" in parts.netloc or parts.query:
            raise ValueError(
                "url: it holds a user or a query, which all who read the run could read; name an environment variable with key instead"
            )
        if self.question is not None and "{answer}" not in self.question:
            raise ValueError("question: it does not hold {answer}, so the judge would not see what it judges")
        return self
