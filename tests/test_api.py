"""The Python API: its documentation runs as it is written, importing it is light, and a program of the user's can call
it from its own main."""

import doctest
import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import FunctionType

import pytest
import transformers

import finefit
from finefit.errors import RunError, SpecError, UserError
from finefit.run.eval_args import EvalArgs
from tests.conftest import make_project

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "api.md"
VERBS = (
    finefit.load_spec,
    finefit.plan,
    finefit.check,
    finefit.run,
    finefit.evaluate,
    finefit.compare,
    finefit.export,
    finefit.open_run,
)
PROGRAM = """\
import threading
import finefit

runs = []
thread = threading.Thread(target=lambda: runs.append(finefit.run("spec.yaml", ["evaluate=[]"])))
thread.start()
thread.join()
(run,) = runs
assert run.status == "finished", run.status
assert run.metrics().num_rows == run.result.total_steps
run.write_report("report.html")
"""


def test_the_documented_examples_run_as_written(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.parent)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = doctest.testfile(str(DOCUMENT), module_relative=False)
    assert found.attempted > 15
    assert found.failed == 0


def test_a_program_runs_a_training_from_its_own_main_and_a_thread_and_nothing_is_printed(tmp_path: Path) -> None:
    folder = make_project(tmp_path / "project").parent
    (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
    done = subprocess.run([sys.executable, "program.py"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_importing_it_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'pydantic', 'pyarrow', 'rich', 'typer', 'numpy'}"
    code = f"import sys, finefit; finefit.plan, finefit.open_run; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_verb_is_a_function_whichever_module_of_the_package_of_its_name_was_imported() -> None:
    code = (
        "import finefit.plan.client, finefit.run.launch; print(finefit.plan.__module__, finefit.plan.client.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "finefit.api finefit.plan.client\n"


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_every_verb_is_exported_typed_and_documented(verb: FunctionType) -> None:
    assert verb.__name__ in finefit.__all__
    signature = inspect.signature(verb)
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(one.annotation is not inspect.Parameter.empty for one in signature.parameters.values())
    assert verb.__doc__
    assert f"{verb.__name__}(" in DOCUMENT.read_text(encoding="utf-8")


def test_the_package_says_that_it_is_typed() -> None:
    assert Path(finefit.__file__).with_name("py.typed").is_file()


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: finefit.load_spec("nowhere.yaml"), SpecError),
        (lambda: finefit.open_run("nowhere"), RunError),
        (lambda: finefit.compare("nowhere"), RunError),
        (lambda: finefit.export("nowhere", "cake"), UserError),
        (lambda: finefit.plan("spec.yaml", ["no such card"]), UserError),
        (lambda: finefit.compare(), RunError),
        (lambda: finefit.evaluate("nowhere", limit=-1), UserError),
        (lambda: finefit.evaluate("nowhere", device="tpu"), UserError),  # type: ignore[arg-type]
        (lambda: finefit.evaluate("nowhere", checkpoint=40), RunError),
        (lambda: finefit.export("nowhere", "merged", prompts=0), UserError),
    ],
)
def test_a_mistake_is_the_same_exception_that_the_command_line_reports(
    call: Callable[[], object],
    kind: type[UserError],
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(project.parent)
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.problem
    assert caught.value.exit_code == 2
    assert capsys.readouterr().out == ""


def test_an_evaluation_takes_all_that_the_command_line_takes() -> None:
    arguments = {*inspect.signature(finefit.evaluate).parameters} - {"progress"}
    assert arguments == {field.name for field in fields(EvalArgs)}


def test_an_export_gives_back_the_progress_bars_of_the_caller(tmp_path: Path) -> None:
    bars = transformers.utils.logging
    bars.enable_progress_bar()
    with pytest.raises(UserError):
        finefit.export(tmp_path / "nothing", "merged")
    assert bars.is_progress_bar_enabled()


def test_a_text_in_the_place_of_several_is_one_of_them(project: Path) -> None:
    assert finefit.load_spec(project, "optimizer.lr=1e-3").overrides == ("optimizer.lr=1e-3",)
    with pytest.raises(UserError, match="card 'MacBook' is not known"):
        finefit.plan(project, "MacBook")


def test_ranks_of_a_launcher_are_told_to_use_the_command(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError, match="rank 0 of 2"):
        finefit.run(project)
