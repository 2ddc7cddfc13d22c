"""Writes the rows of the recipe legal-200k-twin: invented court files, each with the summary that a clerk would write.

Every sentence is written by hand here; names, dates and sums are drawn. What the summary says stands in the file
exactly once, among exhibits and statements that do not matter: only who reads all of it can answer. Train, validation
and test share no parties and no dispute.

    python tools/make_legal_rows.py src/finefit/recipes/legal-200k-twin
"""

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispute:
    """What two parties fight about. {c} is the claimant, {r} the respondent, {sum} what is asked for."""

    about: str
    """After `over` in a summary."""
    facts: tuple[str, ...]
    claim: str
    defence: str
    won: str
    """Why the court allows the claim."""
    lost: str
    """Why it dismisses it."""


TRAIN = (
    Dispute(
        about="the unpaid price of forty oak doors",
        facts=(
            "In spring {r} ordered forty oak doors for a guest house that was to open in June.",
            "{c} made the doors in its own workshop and brought them on two lorries.",
            "On the day of delivery it rained, and the doors stood in the yard of the guest house until the evening.",
            "No price was written on the delivery note, but both sides had initialled an offer a month before.",
        ),
        claim="{c} asks for the price of the offer, {sum}, and says that a door does not become free because it rains.",
        defence="{r} says that eleven of the doors had swollen and that the whole price was therefore not due.",
        won="who leaves doors in the rain after taking them over cannot blame their maker for the water",
        lost="the doors had been left uncovered by the maker's own driver, who had also kept the key of the shed",
    ),
    Dispute(
        about="a roof that leaked after its repair",
        facts=(
            "{c} owns a reading room whose slate roof is older than the street it stands in.",
            "{r} renewed the slates of the north side in autumn and gave a warranty of five years by handshake.",
            "In the second winter water ran down the wall behind the map cabinet.",
            "Three hundred maps had to be dried between sheets of blotting paper.",
        ),
        claim="{c} asks for {sum} for a new roof and for the drying of the maps.",
        defence="{r} answers that the water came from a gutter which had never been a part of the order.",
        won="the slates had been nailed too low, and a gutter does not explain a stain above it",
        lost="the gutter had been full of leaves for two years, and the stain begins beneath it",
    ),
    Dispute(
        about="a shipment of lenses that arrived a season late",
        facts=(
            "{c} sells spectacles in four towns and buys its lenses abroad.",
            "{r} undertook to carry nine crates of lenses across two borders before the end of April.",
            "The crates were found in September in a warehouse for garden furniture.",
            "By then the opticians of the four towns had bought elsewhere.",
        ),
        claim="{c} asks for {sum}, the margin that it lost in the summer.",
        defence="{r} says that the label had been written by hand and that a seven looked like a one.",
        won="a carrier who cannot read a label has to ask, and did not ask for five months",
        lost="the label had been written by the sender, who was asked twice and gave the wrong number twice",
    ),
    Dispute(
        about="the dismissal of a bookkeeper",
        facts=(
            "{c} kept the books of {r} for eleven years without a complaint in writing.",
            "In March a payment went to the wrong supplier and came back after six days.",
            "On the following Monday the desk of {c} stood in the corridor.",
            "The letter of dismissal gave no reason and was signed by somebody whom nobody knew.",
        ),
        claim="{c} asks for {sum}, which is the salary of the notice period.",
        defence=(
            "{r} says that trust is worth more than a notice period and that six days are a long time for money to "
            "be away."
        ),
        won="a single payment that comes back within a week does not end eleven years in one day",
        lost="the payment had been made to a firm of the bookkeeper's own brother, which was not said to anybody",
    ),
    Dispute(
        about="a hedge that was cut down to its roots",
        facts=(
            "Between the gardens of {c} and {r} stood a beech hedge of two metres and a half.",
            "Who had planted it could not be found out, although four neighbours were asked.",
            "In August, while {c} was at the sea, the hedge was cut to the ground.",
            "The roots are alive, and a gardener expects the old height in nine years.",
        ),
        claim="{c} asks for {sum}, the price of a grown hedge.",
        defence="{r} says that the hedge stood on its own side and took the light from its tomatoes.",
        won=(
            "the boundary stones lie on the tomato side of the roots, so that the hedge was not the respondent's to cut"
        ),
        lost="the boundary stones lie on the far side of the roots, and one may cut what grows in one's own garden",
    ),
    Dispute(
        about="a booking program that could not count to thirty-one",
        facts=(
            "{c} lets out rowing boats by the hour and wanted to take bookings at night.",
            "{r} delivered a program that worked in February, when it was shown.",
            "On the thirty-first of March it sold every boat twice.",
            "Forty-four parties stood at the jetty, and there were twenty boats.",
        ),
        claim="{c} asks for {sum}: the price of the program and what was paid back at the jetty.",
        defence=(
            "{r} says that the program had been tested by the claimant itself and approved in an e-mail with two "
            "exclamation marks."
        ),
        won="an approval in February says nothing of a month with thirty-one days",
        lost="the contract gave the claimant four weeks of testing over the turn of a month, of which it used two days",
    ),
)
VALIDATION = (
    Dispute(
        about="the noise of a workshop beneath a music school",
        facts=(
            "{c} teaches the violin on the first floor of a house in which {r} mends mopeds on the ground floor.",
            "Since the workshop bought a second compressor, lessons are given with the windows shut.",
            "A measurement in the stairwell showed fifty-eight decibels at noon.",
            "Nine pupils have left, among them both cellists.",
        ),
        claim="{c} asks for {sum} for the pupils who left and that the compressor be moved.",
        defence="{r} says that the workshop was there first and that mopeds were never silent.",
        won="who makes a trade louder cannot rely on having been there when it was quieter",
        lost="the school had moved in above a workshop whose noise was measured before it signed its lease",
    ),
)
TEST = (
    Dispute(
        about="a hedge that was cut down to the ground",
        facts=(
            "{c} keeps bees behind a hawthorn hedge that stands on the boundary with {r}.",
            "In February {r} had the hedge cut to the ground by a man with a hired machine.",
            "The hives stood in the wind until April, and four of the seven colonies did not live to see it.",
            "The boundary was surveyed in the year of the flood and not since.",
        ),
        claim="{c} asks for {sum} for the colonies and for a hedge of the same height.",
        defence="{r} says that a hedge which hangs over a path may be cut, and that bees come back.",
        won="a right to cut what hangs over a path is no right to cut what stands beside it",
        lost="the hedge had been cut in every third winter with the keeper's own consent",
    ),
)
CLAIMANTS = (
    "Aldine Works",
    "the Corner Library",
    "Dunmore Opticians",
    "Ms Elin Farrow",
    "Brook and Daughters",
    "Fallow Boats",
)
RESPONDENTS = (
    "the Hillside Guest House",
    "Ingram Slates",
    "Juniper Freight",
    "Kestrel Trading",
    "Mr Lorn Mabey",
    "Nine Lines Software",
)
OTHERS = (("Mr Gero Haim",), ("Otter Mopeds",))
STRANGERS = (("Ms Pia Quill",), ("Rook Farm",))
WITNESSES = (
    "a postman",
    "the caretaker",
    "a cousin of the claimant",
    "an apprentice",
    "the owner of the bakery opposite",
    "a surveyor",
    "a clerk",
)
MONTHS = ("January", "March", "April", "June", "August", "October", "November")
EXHIBITS = (
    (
        "Exhibit {n} is a letter of {day} {month}, in which {c} asks for an answer within a fortnight. No answer "
        "is in the file."
    ),
    "Exhibit {n} is a photograph that shows a yard, a wall and part of a bicycle. Nobody could say when it was taken.",
    (
        "Exhibit {n} is an invoice for stamps and paper. It was put in by mistake and stays in the file because it "
        "is numbered."
    ),
    (
        "Exhibit {n} is a receipt of {day} {month} over {odd} pounds, which both sides agree has nothing to do "
        "with the matter."
    ),
    (
        "Exhibit {n} is a note of a telephone call of {day} {month}; the line was bad, and the note ends in the "
        "middle of a word."
    ),
    "Exhibit {n} is a plan of the ground at one to five hundred, on which somebody has drawn a cup of coffee.",
    (
        "Exhibit {n} is a calendar of the year before. {r} put it in to show that {day} {month} had been a "
        "holiday, which it had not."
    ),
    (
        "Exhibit {n} is an offer to settle at {odd} pounds, made on {day} {month} without prejudice and declined "
        "on the same day."
    ),
)
STATEMENTS = (
    "As a witness {w} said that the parties had been on good terms until {month} and greeted each other in the street.",
    "As a witness {w} remembered a conversation on {day} {month}, but not who had spoken.",
    "As a witness {w} was asked about the sum of {odd} pounds and had never heard of it.",
    "As a witness {w} said that the weather had been unusual, and was thanked.",
    "As a witness {w} described the place in detail, in particular a tree that has since been felled.",
    "As a witness {w} confirmed the date of {day} {month}, then corrected it, then confirmed it again.",
)
PROCEDURE = (
    "The file was opened on {day} {month} and has been numbered by hand since page forty.",
    "A first hearing on {day} {month} was adjourned because the heating of the court room had failed.",
    "Both sides were asked to shorten their writings. Both sides lengthened them.",
    "The court put it to the parties that a settlement would be cheaper than a judgment. They asked for the judgment.",
    "An expert was named on {day} {month}, fell ill, and was replaced by another who came to the same result.",
)


def make_file(
    dispute: Dispute, claimant: str, respondent: str, rng: random.Random, *, num_exhibits: int
) -> dict[str, str]:
    total, allowed = rng.randrange(12, 480) * 100, rng.choice(("all", "part", "none"))
    granted = {"all": total, "part": total // 200 * 100, "none": 0}[allowed]

    def fill(text: str, **more: object) -> str:
        drawn = {
            "day": rng.randrange(1, 29),
            "month": rng.choice(MONTHS),
            "odd": rng.randrange(11, 999),
            "w": rng.choice(WITNESSES),
        }
        said = text.format(c=claimant, r=respondent, sum=f"{total:,} pounds", **drawn | more)
        return said[0].upper() + said[1:]

    exhibits = [fill(rng.choice(EXHIBITS), n=number) for number in range(1, num_exhibits + 1)]
    statements = [fill(text) for text in rng.sample(STATEMENTS, 4)]
    reason = dispute.lost if allowed == "none" else dispute.won
    ruling = {
        "all": f"The claim is allowed. {respondent} has to pay {total:,} pounds",
        "part": f"The claim is allowed in part. {respondent} has to pay {granted:,} pounds; the rest was not proved",
        "none": "The claim is dismissed",
    }[allowed]
    parts = [
        f"IN THE COUNTY COURT\n\n{claimant}, claimant, against {respondent}, respondent",
        "The facts\n" + "\n".join(fill(text) for text in dispute.facts),
        "The course of the proceedings\n" + "\n".join(fill(text) for text in rng.sample(PROCEDURE, 3)),
        "The claim\n" + fill(dispute.claim),
        "The exhibits\n" + "\n".join(exhibits[: num_exhibits // 2]),
        "The defence\n" + fill(dispute.defence),
        "The witnesses\n" + "\n".join(statements),
        "Further exhibits\n" + "\n".join(exhibits[num_exhibits // 2 :]),
        f"The reasons\nThe court has weighed what was said and what was not. What decides is this: {reason}.",
        f"The decision\n{ruling[0].upper()}{ruling[1:]}. The costs follow the event.",
    ]
    outcome = {
        "all": f"The court allowed the claim in full, {total:,} pounds",
        "part": f"The court allowed {granted:,} of {total:,} pounds",
        "none": f"The court dismissed the claim for {total:,} pounds",
    }[allowed]
    summary = f"{claimant} sued {respondent} over {dispute.about}. {outcome}, because {reason}."
    return {"input": "\n\n".join(parts), "output": summary[0].upper() + summary[1:]}


def make_rows(
    disputes: tuple[Dispute, ...], parties: tuple[tuple[str, ...], tuple[str, ...]], *, rounds: int, seed: str
) -> list[dict[str, str]]:
    """Each row has a seed of its own: rewording one sentence changes little else."""
    rows, (claimants, respondents) = [], parties
    for number in range(rounds * len(disputes)):
        at, rng = number % len(disputes), random.Random(f"{seed} {number}")
        respondent = respondents[(at + number // len(disputes)) % len(respondents)]
        rows.append(make_file(disputes[at], claimants[at], respondent, rng, num_exhibits=rng.randrange(24, 44)))
    return rows


def main(folder: Path) -> None:
    splits = {
        "train": make_rows(TRAIN, (CLAIMANTS, RESPONDENTS), rounds=2, seed="train"),
        "validation": make_rows(VALIDATION, OTHERS, rounds=2, seed="validation"),
        "test": make_rows(TEST, STRANGERS, rounds=3, seed="test"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in splits.items():
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
