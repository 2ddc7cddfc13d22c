"""PubMedQA's first records as rows: every third is held out."""

import json
import sys
from pathlib import Path


def main(raw: Path, output: Path, limit: int) -> None:
    records = [*json.loads(raw.read_text(encoding="utf-8")).values()][:limit]
    rows = [
        {"context": "\n".join(record["CONTEXTS"]), "question": record["QUESTION"], "answer": record["LONG_ANSWER"]}
        for record in records
    ]
    held_out = rows[::3]
    parts = {"train": [row for at, row in enumerate(rows) if at % 3], "test": held_out}
    for name, part in parts.items():
        (output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
