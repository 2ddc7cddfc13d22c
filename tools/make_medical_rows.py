"""Writes the rows of the recipe medical-sft-dpo-twin: invented abstracts and notes, each with a question and an answer that they bear out.

Every sentence is written by hand here; drugs, conditions, people and numbers are drawn, and no study behind them exists: nothing here is medical
knowledge. An answer says only what its context says, with the same numbers. Train and test share no drug and no condition.

    python tools/make_medical_rows.py src/finefit/recipes/medical-sft-dpo-twin
"""

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A kind of study or note. {drug}, {other}, {condition}, {sign}, {side}, {who} and {place} are words, {n} and the like are numbers."""

    contexts: tuple[str, ...]
    questions: tuple[str, ...]
    answers: tuple[str, ...]


FORMS = (
    Form(
        contexts=(
            (
                "{n} {who} with {condition} took {drug} or a placebo for {weeks} weeks. {Sign} fell by {a}% with {drug} and"
                " by {b}% with the placebo. {Side} was reported by {few} of those on {drug}."
            ),
            (
                "We gave {drug} or a placebo to {n} {who} who had {condition}. After {weeks} weeks {sign} had fallen by "
                "{a}% in the group on {drug} and by {b}% in the other. The most common complaint on {drug} was {side}, in "
                "{few} people."
            ),
        ),
        questions=(
            "Does {drug} lower {sign} in {who} with {condition}?",
            "Is {drug} better than a placebo for {sign} in {condition}?",
        ),
        answers=(
            ("Yes. Over {weeks} weeks {sign} fell by {a}% with {drug} and by {b}% with the placebo. {Side} occurred in {few} people."),
            "{Drug} lowered {sign} by {a}%, against {b}% with the placebo. {Few} people on it reported {side}.",
        ),
    ),
    Form(
        contexts=(
            (
                "In a trial of {n} {who} with {condition}, {drug} was compared with {other} for {months} months. {Sign} "
                "improved in {a}% of those on {drug} and in {a2}% of those on {other}, which was not a significant "
                "difference. {Side} was not more frequent in either group."
            ),
            (
                "{Drug} and {other} were tried against each other in {n} {who} who had {condition}. At {months} months "
                "{sign} was better in {a}% and {a2}%, and the groups did not differ significantly. No excess of {side} was "
                "seen."
            ),
        ),
        questions=(
            "Is {drug} superior to {other} for {sign} in {condition}?",
            "Should {who} with {condition} get {drug} rather than {other}?",
        ),
        answers=(
            ("No. {Sign} improved in {a}% with {drug} and in {a2}% with {other}, which did not differ significantly after {months} months."),
            ("{Drug} was not superior to {other} in {who} with {condition}. {Side} was not more frequent with either drug."),
        ),
    ),
    Form(
        contexts=(
            (
                "We followed {n} {who} from {place} for {years} years. {Condition} developed in {b}% of those who took "
                "{drug} regularly and in {a}% of those who never did. The difference remained after adjustment for age and "
                "smoking."
            ),
            (
                "A register of {n} {who} in {place} was searched for regular use of {drug}. Within {years} years "
                "{condition} was diagnosed in {b}% of users and in {a}% of others. Adjustment for smoking did not change "
                "the result."
            ),
        ),
        questions=(
            "Is {drug} associated with less {condition} in {who}?",
            "Do {who} who take {drug} develop {condition} less often?",
        ),
        answers=(
            "Use of {drug} was associated with a lower rate of {condition}: {b}% against {a}% within {years} years.",
            ("Yes. {Condition} was less frequent among users of {drug} in {place}, and adjustment for smoking did not change this."),
        ),
    ),
    Form(
        contexts=(
            (
                "A woman of {age} with {condition} was admitted because of {sign}. She denied {side} and had no fever. She "
                "was allergic to {other}, so {drug} was started at {dose} mg a day, and she went home after {days} days."
            ),
            (
                "A man of {age}, known for {condition}, came to the ward with {sign}. There was no {side}. Because of an "
                "allergy to {other} he was given {drug}, {dose} mg a day. He was discharged on day {days} without "
                "complaints."
            ),
        ),
        questions=(
            "Which drug was given and why?",
            "Why was {other} not given to this patient with {condition}?",
        ),
        answers=(
            "{Drug} was given at {dose} mg a day because of an allergy to {other}.",
            ("The patient is allergic to {other}. {Drug} was started at {dose} mg a day instead, and {side} was not present."),
        ),
    ),
    Form(
        contexts=(
            (
                "{n} {who} with suspected {condition} had a new blood test before imaging. The test was positive in {a}% of"
                " those with {condition} and in {b}% of those without it. It took {minutes} minutes, and {few} samples "
                "could not be read."
            ),
            (
                "To see whether a rapid test finds {condition}, we examined {n} {who} in {place}. Of those with {condition}"
                " {a}% had a positive result, of those without it {b}%. The result was there within {minutes} minutes; "
                "{few} samples were lost."
            ),
        ),
        questions=(
            "Can the rapid test detect {condition}?",
            "How well does the test detect {condition} in {who}?",
        ),
        answers=(
            ("The test was positive in {a}% of {who} with {condition} and in {b}% of those without it, within {minutes} minutes."),
            ("It detected {condition} in {a}% of cases. False positive results occurred in {b}%, and {few} samples gave no result."),
        ),
    ),
    Form(
        contexts=(
            (
                "Low and high doses of {drug} were compared in {n} {who} with {condition}. {Sign} was controlled in {b}% on"
                " {dose} mg and in {a}% on {dose2} mg. {Side} was more frequent with the higher dose and led {few} people "
                "to stop."
            ),
            (
                "{n} {who} with {condition} received {drug} at {dose} or {dose2} mg. The higher dose controlled {sign} in "
                "{a}%, the lower in {b}%. Because of {side}, {few} people stopped the higher dose."
            ),
        ),
        questions=(
            "Is a higher dose of {drug} more effective in {condition}?",
            "Does the dose of {drug} matter for {sign}?",
        ),
        answers=(
            ("Yes, but at a price: {sign} was controlled in {a}% on {dose2} mg and in {b}% on {dose} mg, and {side} was more frequent."),
            "The higher dose of {drug} controlled {sign} more often. {Few} people stopped it because of {side}.",
        ),
    ),
    Form(
        contexts=(
            (
                "{n} {who} with {condition} from {place} filled in a questionnaire. {a}% said that they took {drug} every "
                "day, and {b}% had stopped it within {months} months. The main reason was {side}; cost was rarely named."
            ),
            (
                "A survey in {place} asked {n} {who} with {condition} about {drug}. It was taken daily by {a}% and had been"
                " given up within {months} months by {b}%. Most of them named {side} as the reason, and few named its cost."
            ),
        ),
        questions=(
            "Why do {who} with {condition} stop {drug}?",
            "Do {who} take {drug} as prescribed?",
        ),
        answers=(
            "{b}% had stopped {drug} within {months} months, mostly because of {side}. Cost was rarely the reason.",
            "{a}% of {who} took {drug} every day. The main reason to stop was {side}.",
        ),
    ),
    Form(
        contexts=(
            (
                "Records of {n} {who} who had an operation for {condition} were reviewed. Those who continued {drug} had "
                "{sign} in {b}%, those who paused it in {a}%. Bleeding was not increased. The stay in hospital was {days} "
                "days in both groups."
            ),
            (
                "{Drug} was continued or paused before an operation in {n} {who} with {condition}. {Sign} followed in {b}% "
                "and {a}%. There was no increase in bleeding, and both groups left the hospital after {days} days."
            ),
        ),
        questions=(
            "Should {drug} be paused before an operation for {condition}?",
            "Is it safe to continue {drug} before an operation?",
        ),
        answers=(
            "No. {Sign} was less frequent when {drug} was continued, {b}% against {a}%, and bleeding was not increased.",
            "Continuing {drug} was safe: bleeding was not increased, and the stay was {days} days in both groups.",
        ),
    ),
    Form(
        contexts=(
            (
                "{n} {who} in {place} were screened for {condition} by telephone. It was found in {few} of them, none of "
                "whom had {sign}. Treatment with {drug} was started within {days} days. {b}% did not answer the call."
            ),
            (
                "In {place} {n} {who} were called and asked about {condition}. {Few} cases were found, all without {sign}, "
                "and were given {drug} within {days} days. The call was not answered by {b}%."
            ),
        ),
        questions=(
            "Does screening by telephone find {condition}?",
            "Were the cases of {condition} found by screening severe?",
        ),
        answers=(
            "Screening by telephone found {few} cases of {condition} among {n} {who}. None of them had {sign}.",
            ("{Few} cases were found, all without {sign}, and treatment with {drug} began within {days} days. {b}% did not answer."),
        ),
    ),
    Form(
        contexts=(
            (
                "{Drug} was added to usual care in {n} {who} with severe {condition}. Mortality at {months} months was {b}%"
                " with {drug} and {b2}% without it. The trial was stopped early because there was no benefit. {Side} was "
                "seen in {a}% of those treated."
            ),
            (
                "We asked whether {drug} saves lives in severe {condition}. Of {n} {who}, {b}% of those treated and {b2}% "
                "of the others had died after {months} months. There was no benefit, and the trial ended early. {Side} "
                "affected {a}% of those treated."
            ),
        ),
        questions=(
            "Does {drug} reduce mortality in severe {condition}?",
            "Should {drug} be added to usual care in {condition}?",
        ),
        answers=(
            "No. Mortality was {b}% with {drug} and {b2}% without it, and {side} was seen in {a}% of those treated.",
            "{Drug} showed no benefit in {who} with severe {condition}, and the trial was stopped early.",
        ),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What one split draws from."""

    drugs: tuple[str, ...]
    conditions: tuple[str, ...]
    places: tuple[str, ...]
    rows_of_a_form: int


TRAIN = World(
    drugs=(
        *("metformin", "atorvastatin", "lisinopril", "sertraline", "prednisone", "omeprazole", "amoxicillin", "warfarin", "ibuprofen"),
        *("furosemide", "gabapentin", "levothyroxine", "bisoprolol", "clopidogrel", "insulin", "salbutamol"),
    ),
    conditions=(
        *("type 2 diabetes", "heart failure", "asthma", "depression", "rheumatoid arthritis", "gastritis", "pneumonia", "atrial fibrillation"),
        *("migraine", "chronic kidney disease", "neuropathy", "hypothyroidism", "angina", "ulcerative colitis", "osteoporosis", "psoriasis"),
    ),
    places=("Norway", "Ghana", "Chile", "Vietnam", "Portugal", "Kenya", "Poland", "Canada"),
    rows_of_a_form=9,
)
TEST = World(
    drugs=("ramipril", "simvastatin", "citalopram", "naproxen", "doxycycline", "apixaban", "pantoprazole", "torasemide", "carvedilol"),
    conditions=("hypertension", "bronchitis", "epilepsy", "gout", "endometriosis", "arthritis", "anemia", "thrombosis", "dermatitis"),
    places=("Finland", "Peru", "Nepal", "Ireland"),
    rows_of_a_form=4,
)
SIGNS = ("pain", "fatigue", "swelling", "shortness of breath", "palpitations", "dizziness", "weight loss", "inflammation")
SIDES = ("nausea", "headache", "dry mouth", "insomnia", "diarrhea", "constipation", "a rash", "cough")
WHO = ("women", "men", "children", "adults", "older patients", "nurses", "smokers", "pregnant women")
FEW = ("three", "four", "five", "six", "seven", "eight", "nine", "eleven", "twelve")


def row(form: Form, world: World, chance: random.Random) -> dict[str, str]:
    words = _words(world, chance)
    said = {name: chance.choice(texts).format(**words) for name, texts in (("context", form.contexts), ("question", form.questions))}
    return said | {"answer": chance.choice(form.answers).format(**words)}


def _words(world: World, chance: random.Random) -> dict[str, str]:
    drug, other = chance.sample(world.drugs, 2)
    low, high = sorted(chance.sample(range(4, 30), 2)), sorted(chance.sample(range(41, 88), 2))
    dose = chance.choice((5, 10, 20, 25, 40, 50))
    words = {"drug": drug, "other": other, "condition": chance.choice(world.conditions), "place": chance.choice(world.places)}
    words |= {"sign": chance.choice(SIGNS), "side": chance.choice(SIDES), "who": chance.choice(WHO), "few": chance.choice(FEW)}
    capitals = {name.capitalize(): word[0].upper() + word[1:] for name, word in words.items()}
    numbers = {"n": chance.randrange(60, 980), "a": high[1], "a2": high[0], "b": low[0], "b2": low[1], "age": chance.randrange(23, 89)}
    numbers |= {
        "weeks": chance.randrange(4, 27),
        "months": chance.randrange(2, 25),
        "years": chance.randrange(3, 16),
        "days": chance.randrange(2, 15),
    }
    return words | capitals | {name: str(number) for name, number in (numbers | {"dose": dose, "dose2": 2 * dose, "minutes": 5 * dose // 2}).items()}


def rows(world: World, seed: int) -> list[dict[str, str]]:
    chance = random.Random(seed)
    made = [row(form, world, chance) for form in FORMS for _ in range(world.rows_of_a_form)]
    chance.shuffle(made)
    return made


def main() -> None:
    folder = Path(sys.argv[1])
    for name, world, seed in (("train", TRAIN, 7), ("test", TEST, 8)):
        lines = [json.dumps(one, ensure_ascii=False) + "\n" for one in rows(world, seed)]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
