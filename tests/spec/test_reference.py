"""The reference in docs/ is the schema's own words."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_reference_is_what_the_schema_says(tmp_path: Path) -> None:
    written = tmp_path / "spec.md"
    subprocess.run([sys.executable, ROOT / "tools/make_spec_reference.py", written], check=True)
    assert written.read_text(encoding="utf-8") == (ROOT / "docs/spec.md").read_text(encoding="utf-8"), (
        "run `python tools/make_spec_reference.py docs/spec.md`"
    )


def test_every_kind_of_a_model_and_of_a_task_is_described_on_a_line_of_its_own() -> None:
    rows = (ROOT / "docs/spec.md").read_text(encoding="utf-8").splitlines()
    for key in ("model", "tuning", "evaluate[n].task", "stages", "stages.NAME (train).model"):
        (row,) = (row for row in rows if row.startswith(f"| `{key}` |"))
        _, _, kinds, _, text, _ = re.split(r" ?\| ?", row)
        said = [found[1] for line in text.split("<br>") if (found := re.match(r"(`\w+`(?:, `\w+`)*): \w", line))]
        named = [tag for tags in said for tag in re.findall(r"\w+", tags)]
        assert sorted(named) == sorted(re.findall(r"kind: (\w+)", kinds))
