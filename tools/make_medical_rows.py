"""Writes the rows of the recipe medical-sft-dpo-twin: invented abstracts of trials, each with a question and an answer
that they bear out.

Every sentence is written by hand here; drugs, conditions, people and numbers are drawn, and no study behind them
exists: nothing here is medical knowledge. Whether a drug works is nowhere said in the words of the answer: it follows
from whether the trial met its primary end point, so that a model cannot find the right answer by copying. Numbers and
names can be copied. Train and test share no drug and no condition.

    python tools/make_medical_rows.py src/finefit/recipes/medical-sft-dpo-twin
"""

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

TRIALS = (
    "We randomised {n} {who} in {place} to {drug} or placebo.",
    "In a trial in {place}, {n} {who} took {drug} or a placebo for {months} months.",
    "{n} {who} from {place} entered a trial of {drug} against placebo.",
)
RATES = (
    "{Condition} was seen in {b}% and {b2}% after {months} months.",
    "At {months} months {condition} had returned in {b}% and {b2}%.",
    "Rates of {condition} were {b}% and {b2}% after {months} months.",
)
QUESTIONS = (
    "Does {drug} reduce {condition} in {who}?",
    "Is {drug} effective against {condition} in {who}?",
    "Can {drug} prevent {condition} in {who}?",
)
ENDS = ("The trial had {n} participants.", "The participants came from {place}.", "Follow-up lasted {months} months.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the abstract says of it, and what follows. {drug}, {condition}, {who} and {place} are words, {n} and the
    like are numbers."""

    said: str
    answers: tuple[str, ...]


OUTCOMES = (
    Outcome(
        said="The primary end point was met.",
        answers=(
            "{Drug} was effective against {condition} in {who}.",
            "{Drug} was of use against {condition} in {who}.",
        ),
    ),
    Outcome(
        said="The primary end point was missed.",
        answers=(
            "{Drug} was not effective against {condition} in {who}.",
            "{Drug} was not of use against {condition} in {who}.",
        ),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What one split draws from."""

    drugs: tuple[str, ...]
    conditions: tuple[str, ...]
    places: tuple[str, ...]
    rows_of_an_outcome: int


TRAIN = World(
    drugs=(
        *(
            "metformin",
            "atorvastatin",
            "lisinopril",
            "sertraline",
            "prednisone",
            "omeprazole",
            "amoxicillin",
            "warfarin",
            "ibuprofen",
        ),
        *("furosemide", "gabapentin", "levothyroxine", "bisoprolol", "clopidogrel", "insulin", "salbutamol"),
    ),
    conditions=(
        *(
            "type 2 diabetes",
            "heart failure",
            "asthma",
            "depression",
            "rheumatoid arthritis",
            "gastritis",
            "pneumonia",
            "atrial fibrillation",
        ),
        *(
            "migraine",
            "chronic kidney disease",
            "neuropathy",
            "hypothyroidism",
            "angina",
            "ulcerative colitis",
            "osteoporosis",
            "psoriasis",
        ),
    ),
    places=("Norway", "Ghana", "Chile", "Vietnam", "Portugal", "Kenya", "Poland", "Canada"),
    rows_of_an_outcome=45,
)
TEST = World(
    drugs=(
        "ramipril",
        "simvastatin",
        "citalopram",
        "naproxen",
        "doxycycline",
        "apixaban",
        "pantoprazole",
        "torasemide",
        "carvedilol",
    ),
    conditions=(
        "hypertension",
        "bronchitis",
        "epilepsy",
        "gout",
        "endometriosis",
        "arthritis",
        "anemia",
        "thrombosis",
        "dermatitis",
    ),
    places=("Finland", "Peru", "Nepal", "Ireland"),
    rows_of_an_outcome=20,
)
WHO = ("women", "men", "children", "adults", "older patients", "nurses", "smokers", "pregnant women")


def row(outcome: Outcome, world: World, chance: random.Random) -> dict[str, str]:
    words = _words(world, chance)
    context = f"{chance.choice(TRIALS)} {chance.choice(RATES)} {outcome.said}"
    answer = f"{chance.choice(outcome.answers)} {chance.choice(ENDS)}"
    return {
        name: text.format(**words)
        for name, text in (("context", context), ("question", chance.choice(QUESTIONS)), ("answer", answer))
    }


def _words(world: World, chance: random.Random) -> dict[str, str]:
    words = {"drug": chance.choice(world.drugs), "condition": chance.choice(world.conditions)}
    words |= {"place": chance.choice(world.places), "who": chance.choice(WHO)}
    capitals = {name.capitalize(): word[0].upper() + word[1:] for name, word in words.items()}
    low, high = sorted(chance.sample(range(4, 60), 2))
    numbers = {"n": chance.randrange(60, 980), "b": low, "b2": high, "months": chance.randrange(2, 25)}
    return words | capitals | {name: str(number) for name, number in numbers.items()}


def rows(world: World, seed: int) -> list[dict[str, str]]:
    chance = random.Random(seed)
    made = [row(outcome, world, chance) for outcome in OUTCOMES for _ in range(world.rows_of_an_outcome)]
    chance.shuffle(made)
    return made


def main() -> None:
    folder = Path(sys.argv[1])
    for name, world, seed in (("train", TRAIN, 7), ("test", TEST, 8)):
        lines = [json.dumps(one, ensure_ascii=False) + "\n" for one in rows(world, seed)]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
