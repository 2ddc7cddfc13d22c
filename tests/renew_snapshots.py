"""`python -m tests.renew_snapshots [-k VERB]`: rewrites `tests/snapshots/*.txt` from what the verbs print now."""

import os
import subprocess
import sys
from pathlib import Path

from tests.snapshots import RENEW

if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["tests/cli/test_snapshots.py", "tests/report/test_events.py", "tests/report/test_plan_report.py"]
    sys.exit(subprocess.run([*command, *sys.argv[1:]], cwd=root, env=os.environ | {RENEW: "1"}, check=False).returncode)
