"""Writes the rows of the recipe amr-twin: simple English sentences, each with the graph of its meaning in the manner of
AMR.

Words and patterns are written by hand here; which of them meet is drawn. The patterns cover what makes a graph more
than a list: a node that two others point to, negation, quantities, names, inverse roles, several clauses. No test
sentence is a training sentence, and no subject, verb and object of a test sentence meet in training.

    python tools/make_amr_rows.py src/finefit/recipes/amr-twin
"""

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

NUM_ROWS = {"train": 120, "test": 30}
PEOPLE = ("boy", "girl", "teacher", "farmer", "cook", "nurse", "sailor", "baker", "painter", "pilot")
NAMES = ("Anna", "Peter", "Maria", "Tom", "Clara", "Ivan")
QUALITIES = ("old", "young", "tall", "quiet", "clever")
LOOKS = ("red", "heavy", "small", "new", "broken")
PLACES = ("kitchen", "garden", "school", "harbour", "market")
NUMBERS = {2: "two", 3: "three", 4: "four", 5: "five", 7: "seven"}
DAYS = ("Monday", "Tuesday", "Friday", "Sunday")


@dataclass(frozen=True, slots=True)
class Verb:
    base: str
    past: str
    frame: str


VERBS = (
    Verb("see", "saw", "see-01"),
    Verb("buy", "bought", "buy-01"),
    Verb("sell", "sold", "sell-01"),
    Verb("find", "found", "find-01"),
    Verb("carry", "carried", "carry-01"),
    Verb("paint", "painted", "paint-02"),
    Verb("lose", "lost", "lose-02"),
    Verb("hide", "hid", "hide-01"),
    Verb("clean", "cleaned", "clean-01"),
    Verb("draw", "drew", "draw-01"),
)
THINGS = {
    "book": "books",
    "lamp": "lamps",
    "boat": "boats",
    "chair": "chairs",
    "letter": "letters",
    "apple": "apples",
    "door": "doors",
    "cup": "cups",
}


@dataclass(eq=False)
class Node:
    concept: str
    edges: list[tuple[str, "Node | str"]] = field(default_factory=list)

    def add(self, role: str, target: "Node | str") -> "Node":
        self.edges.append((role, target))
        return self


@dataclass(frozen=True, slots=True)
class Clause:
    """Somebody does something to a thing."""

    who: Node
    told_who: str
    verb: Verb
    what: Node
    told_what: str

    @property
    def words(self) -> tuple[str, str, str]:
        return self.who.concept, self.verb.base, self.what.concept

    def node(self) -> Node:
        return Node(self.verb.frame).add("ARG0", self.who).add("ARG1", self.what)


Sentence = tuple[str, Node]


def person(chance: random.Random) -> tuple[Node, str]:
    noun = chance.choice(PEOPLE)
    if chance.random() < 0.5:
        return Node(noun), f"the {noun}"
    quality = chance.choice(QUALITIES)
    return Node(noun).add("mod", Node(quality)), f"the {quality} {noun}"


def thing(chance: random.Random) -> tuple[Node, str]:
    noun = chance.choice(sorted(THINGS))
    kind = chance.random()
    if kind < 0.35:
        number = chance.choice(sorted(NUMBERS))
        return Node(noun).add("quant", str(number)), f"{NUMBERS[number]} {THINGS[noun]}"
    if kind < 0.7:
        look = chance.choice(LOOKS)
        return Node(noun).add("mod", Node(look)), f"the {look} {noun}"
    return Node(noun), f"the {noun}"


def clause(chance: random.Random) -> Clause:
    who, told_who = person(chance)
    what, told_what = thing(chance)
    return Clause(who, told_who, chance.choice(VERBS), what, told_what)


def plain(chance: random.Random, told: Clause) -> Sentence:
    place = chance.choice(PLACES)
    where = Node(place)
    return f"{told.told_who} {told.verb.past} {told.told_what} in the {place}.", told.node().add("location", where)


def negated(_: random.Random, told: Clause) -> Sentence:
    return f"{told.told_who} did not {told.verb.base} {told.told_what}.", told.node().add("polarity", "-")


def wanted(chance: random.Random, told: Clause) -> Sentence:
    word, frame = chance.choice((("wants", "want-01"), ("tries", "try-01"), ("hopes", "hope-01")))
    return f"{told.told_who} {word} to {told.verb.base} {told.told_what}.", Node(frame).add("ARG0", told.who).add(
        "ARG1", told.node()
    )


def asked(chance: random.Random, told: Clause) -> Sentence:
    noun = chance.choice([noun for noun in PEOPLE if noun != told.who.concept])
    root = Node("ask-02").add("ARG0", Node(noun)).add("ARG1", told.node()).add("ARG2", told.who)
    return f"the {noun} asked {told.told_who} to {told.verb.base} {told.told_what}.", root


def owned(chance: random.Random, told: Clause) -> Sentence:
    noun = chance.choice(sorted(THINGS))
    root = Node(told.verb.frame).add("ARG0", told.who).add("ARG1", Node(noun).add("poss", told.who))
    return f"{told.told_who} {told.verb.past} {'an' if noun[0] == 'a' else 'a'} {noun} of their own.", root


def both(chance: random.Random, told: Clause) -> Sentence:
    second = chance.choice([verb for verb in VERBS if verb != told.verb])
    other = Node(second.frame).add("ARG0", told.who).add("ARG1", told.what)
    return f"{told.told_who} {told.verb.past} and {second.past} {told.told_what}.", Node("and").add(
        "op1", told.node()
    ).add("op2", other)


def possible(chance: random.Random, told: Clause) -> Sentence:
    root = Node("possible-01").add("ARG1", told.node())
    if chance.random() < 0.5:
        return f"{told.told_who} cannot {told.verb.base} {told.told_what}.", root.add("polarity", "-")
    return f"{told.told_who} can {told.verb.base} {told.told_what}.", root


def named(chance: random.Random, told: Clause) -> Sentence:
    name, day = chance.choice(NAMES), chance.choice(DAYS)
    who = Node("person").add("name", Node("name").add("op1", f'"{name}"'))
    when = Node("date-entity").add("weekday", Node(day.lower()))
    root = Node(told.verb.frame).add("ARG0", who).add("ARG1", told.what).add("time", when)
    return f"{name} {told.verb.past} {told.told_what} on {day}.", root


def questioned(_: random.Random, told: Clause) -> Sentence:
    return f"who {told.verb.past} {told.told_what}?", Node(told.verb.frame).add("ARG0", Node("amr-unknown")).add(
        "ARG1", told.what
    )


def relative(chance: random.Random, told: Clause) -> Sentence:
    word, frame = chance.choice((("slept", "sleep-01"), ("laughed", "laugh-01"), ("sang", "sing-01")))
    who = Node(told.who.concept, [*told.who.edges]).add("ARG0-of", Node(told.verb.frame).add("ARG1", told.what))
    return f"{told.told_who} who {told.verb.past} {told.told_what} {word}.", Node(frame).add("ARG0", who)


PATTERNS: tuple[Callable[[random.Random, Clause], Sentence], ...] = (
    plain,
    negated,
    wanted,
    asked,
    owned,
    both,
    possible,
    named,
    questioned,
    relative,
)


def written(root: Node) -> str:
    """PENMAN notation; a node that is met again is its variable."""
    variables: dict[Node, str] = {}

    def lines(node: Node, depth: int) -> str:
        letter = node.concept[0]
        taken = set(variables.values())
        variables[node] = next(
            name for name in (letter, *(f"{letter}{number}" for number in range(2, 99))) if name not in taken
        )
        inside = "".join(f"\n{'    ' * (depth + 1)}:{role} {target(value, depth + 1)}" for role, value in node.edges)
        return f"({variables[node]} / {node.concept}{inside})"

    def target(value: Node | str, depth: int) -> str:
        if isinstance(value, str):
            return value
        return variables[value] if value in variables else lines(value, depth)

    return lines(root, 0)


def sentences(chance: random.Random) -> Iterator[tuple[tuple[str, str, str], str, Node]]:
    while True:
        for pattern in PATTERNS:
            told = clause(chance)
            text, root = pattern(chance, told)
            yield told.words, text[0].upper() + text[1:], root


def make_rows() -> dict[str, list[tuple[str, str]]]:
    rows: dict[str, list[tuple[str, str]]] = {split: [] for split in NUM_ROWS}
    seen: set[str] = set()
    trained: set[tuple[str, str, str]] = set()
    drawn = sentences(random.Random(6))
    for split, count in NUM_ROWS.items():
        while len(rows[split]) < count:
            words, text, root = next(drawn)
            if text in seen or (split == "test" and words in trained):
                continue
            seen.add(text)
            trained.add(words)
            rows[split].append((text, written(root)))
    return rows


def main(folder: Path) -> None:
    for split, rows in make_rows().items():
        blocks = (f"# ::snt {text}\n{graph}\n" for text, graph in rows)
        (folder / f"{split}.txt").write_text("\n".join(blocks), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
