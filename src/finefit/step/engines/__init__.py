"""One module for each way to share a step between ranks; `make_engine` chooses by the stage."""

from finefit.step.engines.choose import engine_problems as engine_problems
from finefit.step.engines.choose import loads_on as loads_on
from finefit.step.engines.choose import make_engine as make_engine
from finefit.step.engines.choose import require_possible as require_possible
