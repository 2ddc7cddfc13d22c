"""Writes the rows of the recipe rmoe-twin: orders to be written as JSON, and dates to be written as ISO 8601.

Two tasks that have nothing in common but the model that learns them. Words and patterns are written by hand here; which
of them meet is drawn. No prompt and no answer stands twice, in either file.

    python tools/make_rmoe_rows.py src/finefit/recipes/rmoe-twin
"""

import datetime
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

NUM_ROWS = {"train": 96, "test": 40}
NUMBERS = {
    1: "one",
    2: "two",
    3: "three",
    4: "four",
    5: "five",
    6: "six",
    7: "seven",
    8: "eight",
    9: "nine",
    10: "ten",
    12: "a dozen",
}
ITEMS = (
    *("lamp", "chair", "desk", "mirror", "carpet", "kettle", "blanket", "clock", "basket", "candle"),
    *("curtain", "pillow", "teapot", "ladder", "bucket", "vase", "towel", "bench", "drawer", "stool"),
    *("cushion", "frame", "plate", "jug", "tray", "shelf", "table", "bowl", "mat", "rug"),
)
PLURALS = {"shelf": "shelves", "bench": "benches"}
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
ORDERS = (
    "We need {some} by {day}.",
    "Please send {some} on {day}.",
    "{Some} for {day}, if you can.",
    "Could I have {some} before {day}?",
    "The {bare} I asked for: {day} would be fine.",
    "Put me down for {some}, {day} delivery.",
    "My shop is out of {plural}: {number} of them by {day}.",
    "On {day} I want {some} at the door.",
    "Add {some} to the van that leaves on {day}.",
    "I'd like {some}; {day} suits me.",
    "Hello, {some} please, to arrive on {day}.",
    "{day}: {some}. Thank you!",
    "Is {day} too soon for {some}?",
    "Our school orders {some} for {day}.",
)
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
DATES = (
    "{month} {day}, {year}",
    "{day} {month} {year}",
    "the {nth} of {month} {year}",
    "{short} {day} {year}",
    "{month} {nth}, {year}",
    "{day}. {short} {year}",
    "{year}, {month} the {nth}",
    "in {year}, on {day} {month}",
    "{weekday}, {day} {month} {year}",
    "{day}-{short}-{year}",
)
Row = dict[str, str]


def order(chance: random.Random) -> Row:
    item, count, day, pattern = (
        chance.choice(ITEMS),
        chance.choice(list(NUMBERS)),
        chance.choice(DAYS),
        chance.choice(ORDERS),
    )
    plural = PLURALS.get(item, f"{item}s")
    some = f"a {item}" if count == 1 else f"{NUMBERS[count]} {plural}" if chance.random() < 0.6 else f"{count} {plural}"
    bare = item if count == 1 else f"{count} {plural}"
    text = pattern.format(
        some=some, Some=some[0].upper() + some[1:], day=day, plural=plural, number=NUMBERS[count], bare=bare
    )
    return {
        "prompt": f"Order: {text}\nJSON:",
        "completion": " " + json.dumps({"item": item, "count": count, "day": day}),
    }


def date(chance: random.Random) -> Row:
    at = chance.randrange(12)
    day, year, pattern = chance.randrange(1, LENGTHS[at] + 1), chance.randrange(1850, 2030), chance.choice(DATES)
    found = datetime.date(year, at + 1, day)
    weekday = DAYS[found.weekday()]
    text = pattern.format(month=MONTHS[at], short=MONTHS[at][:3], day=day, nth=nth(day), year=year, weekday=weekday)
    return {"prompt": f"Date: {text}\nISO:", "completion": f" {found.isoformat()}"}


def nth(day: int) -> str:
    ending = "th" if 10 <= day <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{ending}"


def distinct(draw: Callable[[random.Random], Row], chance: random.Random) -> list[Row]:
    rows: list[Row] = []
    seen: set[str] = set()
    while len(rows) < sum(NUM_ROWS.values()):
        row = draw(chance)
        if not seen & {row["prompt"].lower(), row["completion"]}:
            seen |= {row["prompt"].lower(), row["completion"]}
            rows.append(row)
    return rows


def main(folder: Path) -> None:
    chance = random.Random(20)
    for name, draw in (("orders", order), ("dates", date)):
        rows = iter(distinct(draw, chance))
        for split, count in NUM_ROWS.items():
            lines = [json.dumps(next(rows)) + "\n" for _ in range(count)]
            (folder / f"{name}-{split}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
