"""Fine-tuning of language models that fits your card, first time.

The Python API is what this module exports, `finefit.results` and `finefit.errors`; everything else is internal."""

import logging
import sys
from importlib import import_module

__version__ = "0.1.0"

# bitsandbytes logs, when peft imports it, that optional kernels are missing, and later a line for each product in 8
# bits. Set here because every process of ours imports this first; errors still appear.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

# Five functions have the name of a package. Importing a package, once, sets it as an attribute here, so the packages
# come first and the functions replace them.
for _name in ("compare", "evaluate", "export", "plan", "run"):
    import_module(f"finefit.{_name}")

from finefit.api import check, compare, evaluate, export, load_spec, open_run, plan, run  # noqa: E402
from finefit.errors import FinefitError  # noqa: E402
from finefit.progress import Progress  # noqa: E402

# `import finefit.plan.client` finds its module as an attribute of the function, which shares the package's namespace.
for _function in (compare, evaluate, export, plan, run):
    _function.__dict__ = sys.modules[f"finefit.{_function.__name__}"].__dict__

__all__ = [
    "FinefitError",
    "Progress",
    "__version__",
    "check",
    "compare",
    "evaluate",
    "export",
    "load_spec",
    "open_run",
    "plan",
    "run",
]
