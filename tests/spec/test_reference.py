"""The reference in docs/ is the schema's own words."""

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
