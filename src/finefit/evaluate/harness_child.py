"""`python -m finefit.evaluate.harness_child ARGUMENTS`: lm-eval with these. It ends with the process that started it, also when that was killed."""

import os
import runpy
import signal
import sys

from finefit.artifacts.launcher import when_parent_ends


def main() -> None:
    when_parent_ends(lambda: os.kill(os.getpid(), signal.SIGKILL))
    sys.argv[0] = "lm_eval"
    runpy.run_module("lm_eval", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
