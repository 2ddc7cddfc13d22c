"""`python -m finefit.report.compare_files COMPARISON.json`: its page and its tables, beside it."""

import sys
from pathlib import Path

from finefit.artifacts.atomic import write_text
from finefit.artifacts.records import read_record
from finefit.compare.records import Comparison
from finefit.report.compare_markdown import markdown
from finefit.report.compare_page import page


def write_files(path: Path) -> None:
    found = read_record(path, Comparison)
    write_text(path.with_suffix(".html"), page(found))
    write_text(path.with_suffix(".md"), markdown(found))


if __name__ == "__main__":
    write_files(Path(sys.argv[1]))
