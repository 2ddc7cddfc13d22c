"""A package that the spec needs and that is not installed is a mistake of the user's, whatever the verb: exit code 2
and the command that installs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, Answer, environment, rewrite

WITHOUT = """\
import sys
from importlib.machinery import PathFinder


class Without(PathFinder):
    names = {names!r}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in cls.names else super().find_spec(name, path, target)

    @classmethod
    def find_distributions(cls, *context, **more):
        found = super().find_distributions(*context, **more)
        return (one for one in found if one.name not in cls.names)


sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
"""
"""Python imports it when it starts, so it holds for every process of a command."""
BITS = ("tuning: {kind: lora, rank: 4, alpha: 8, dropout: 0.1}", "tuning: {kind: lora, rank: 4, base_bits: 4}")
ENGINE = ("seed: 7\n", "seed: 7\nengine: {kind: deepspeed, devices: 2}\n")
CASES = {
    "bitsandbytes": (BITS, "pip install 'finefit[gpu]'"),
    "deepspeed": (ENGINE, "pip install 'finefit[deepspeed]'"),
}


def _without(package: str, folder: Path, *words: str) -> Answer:
    place = folder / "without"
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(WITHOUT.format(names={package}))
    inherited = [path for path in (os.environ.get("PYTHONPATH"),) if path]
    variables = environment() | {"PYTHONPATH": os.pathsep.join([str(place), *inherited])}
    done = subprocess.run([*COMMAND, *words], cwd=folder, env=variables, capture_output=True, text=True, check=False)
    return Answer(done.returncode, done.stdout, done.stderr)


def _require_refused(folder: Path, package: str, verb: str) -> None:
    change, command = CASES[package]
    rewrite(folder / "spec.yaml", change)
    answer = _without(package, folder, verb, "spec.yaml", "--json")
    assert answer.code == 2, answer.err
    assert answer.document["error"]["exit_code"] == 2
    assert package in answer.document["error"]["problem"]
    assert command in answer.document["error"]["remedy"]
    assert not (folder / "runs").exists()


def test_a_process_without_a_package_does_not_find_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT.format(names={"submitit"}))
    code = "import importlib.util as u; assert u.find_spec('submitit') is None\n"
    code += "import importlib.metadata as m; m.version('submitit')"
    variables = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)
    assert "PackageNotFoundError" in done.stderr


def test_four_bits_without_bitsandbytes_are_refused_by_check(folder: Path) -> None:
    _require_refused(folder, "bitsandbytes", "check")


@pytest.mark.slow
@pytest.mark.parametrize(("package", "verb"), [("bitsandbytes", "run"), ("deepspeed", "check"), ("deepspeed", "run")])
def test_a_package_that_is_missing_is_refused_by_every_verb(package: str, verb: str, folder: Path) -> None:
    _require_refused(folder, package, verb)
