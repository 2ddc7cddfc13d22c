"""`python -m finefit.evaluate.harness_child PARENT ARGUMENTS`: lm-eval with these. It ends with PARENT, which started it, however that ends."""

import runpy
import sys

from finefit.artifacts.launcher import end_with_parent


def main() -> None:
    _, parent, *arguments = sys.argv
    end_with_parent(int(parent))
    sys.argv = ["lm_eval", *arguments]
    runpy.run_module("lm_eval", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
