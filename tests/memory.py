"""What code takes in memory at its peak: in a process of its own, since the peak of a process that ran other tests
before hides all that stays below it."""

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_MEASURED = """
import resource, sys
from pathlib import Path
from finefit.facts.machine import read_peak_resident_bytes
{setup}
before = read_peak_resident_bytes()
held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + {brake}, held + {brake}))
{code}
print(read_peak_resident_bytes() - before)
"""


def peak_of(code: str, *arguments: object, setup: str = "", brake: int = 6 << 30) -> int:
    """Bytes that the resident memory grows by while `code` runs with `arguments` in sys.argv. `setup` is not measured.
    `brake`: of address space, beyond which the process fails."""
    source = _MEASURED.format(setup=setup, code=code, brake=brake)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(_ROOT / "src"), str(_ROOT)])}
    command = [sys.executable, "-c", source, *map(str, arguments)]
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return int(done.stdout.split()[-1])
