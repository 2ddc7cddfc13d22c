"""`python -m finefit.evaluate.harness_child PARENT ARGUMENTS`: lm-eval with these arguments. It ends with PARENT, the
process that started it, however that ends, and imports nothing of its own that is slow."""

import runpy
import sys

from finefit.artifacts.processes import end_with_parent


def main() -> None:
    _, parent, *arguments = sys.argv
    end_with_parent(int(parent))
    sys.argv = ["lm_eval", *arguments]
    runpy.run_module("lm_eval", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
