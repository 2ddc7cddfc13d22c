"""A script of the user's own. It gets its inputs and a folder to fill, which is its working directory, and must create
the outputs that it declares."""

import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

from finefit.artifacts.atomic import is_full
from finefit.artifacts.records import Failure, StageJob, StageOutcome, write_record
from finefit.artifacts.rundir import StageDir
from finefit.errors import SpecError
from finefit.spec.stages import NAMED_INPUT, OUTPUT, PythonStage
from finefit.stages.worker import serve


def make(job: StageJob, out: Path) -> dict[str, Any]:
    stage, base = job.stage, Path(job.base)
    assert isinstance(stage, PythonStage)
    script = (base / stage.script).resolve()
    places = {name: str((base / path).resolve()) for name, path in stage.inputs.items()} | {OUTPUT: str(out)}
    arguments = [NAMED_INPUT.sub(lambda found: places[found[1]], argument) for argument in stage.arguments]
    os.chdir(out)
    # read only if the process ends within the script, when nothing else can be written
    problem = f"{script.name} ended its process: by os._exit, a crash in a library, or because memory ran out"
    ended_within = SpecError(problem, "let the script return; its output is in the stage's log")
    made = StageDir(out.parent).outcome
    write_record(made, StageOutcome(failure=Failure.of(ended_within)))
    _run(script, arguments)
    made.unlink(missing_ok=True)
    if not out.is_dir():
        remedy = "let it write into {output} and leave the folder itself there"
        raise SpecError("the script has removed the folder that it was to fill", remedy)
    if absent := [name for name in stage.outputs if not (out / name).exists()]:
        there = ", ".join(sorted(path.name for path in out.iterdir())) or "nothing"
        problem = f"the script has not written {', '.join(absent)}; its folder holds {there}"
        raise SpecError(problem, "declare what it writes, below {output}, in `outputs`")
    sizes = {}
    for name in stage.outputs:
        files = [file for file in (out / name, *(out / name).rglob("*")) if file.is_file()]
        sizes[name] = {"files": len(files), "bytes": sum(file.stat().st_size for file in files)}
    return {"script": script.name, "outputs": sizes}


def _run(script: Path, arguments: list[str]) -> None:
    """Runs the script in this process, so that it ends with it. The log stays open, whatever the script closes."""
    sys.argv, sys.path = [str(script), *arguments], [str(script.parent), *sys.path]
    words = sys.stdout
    with os.fdopen(os.dup(words.fileno()), "w", encoding="utf-8", errors="backslashreplace") as log:
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise SpecError(f"{script.name} ended with {end.code}", "its output is in the stage's log") from None
        except Exception as error:  # the boundary to the user's script: whatever it raises is reported
            if is_full(error):
                raise
            traceback.print_exc(file=log)
            frames = reversed(traceback.extract_tb(error.__traceback__))  # the innermost of the script's own
            line = next((f" (line {frame.lineno})" for frame in frames if frame.filename == str(script)), "")
            problem = f"{script.name}{line}: {type(error).__name__}: {error}"
            raise SpecError(problem, "fix the script; its traceback is in the stage's log") from None
        finally:
            if not words.closed:
                words.flush()


if __name__ == "__main__":
    serve(make)
