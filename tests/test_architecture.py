"""Packages import only packages below them, every package has its place, and packages of plain data stay light."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINT = [str(Path(sys.executable).with_name("lint-imports"))]
PLAIN = ("web", "report", "compare", "review", "artifacts", "facts", "spec", "stats")


def _lint(cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LINT, "--no-cache"], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The package and its contracts, to be spoilt; the folder is first on the path of lint-imports."""
    shutil.copytree(ROOT / "src" / "finefit", tmp_path / "finefit", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_every_package_imports_only_packages_below_it() -> None:
    done = _lint(ROOT)
    assert done.returncode == 0, done.stdout


def test_a_copy_of_the_package_keeps_its_contracts(copied: Path) -> None:
    done = _lint(copied)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["utils.py", "helpers/__init__.py"])
def test_a_package_without_a_place_breaks_the_contract(copied: Path, name: str) -> None:
    new = copied / "finefit" / name
    new.parent.mkdir(exist_ok=True)
    new.write_text("")
    done = _lint(copied)
    assert done.returncode != 0
    assert f"finefit.{Path(name).parts[0].removesuffix('.py')}" in done.stdout


def test_a_package_that_imports_one_above_it_breaks_the_contract(copied: Path) -> None:
    with (copied / "finefit" / "spec" / "every.py").open("a") as file:
        file.write("\nimport finefit.plan.resolve\n")
    done = _lint(copied)
    assert done.returncode != 0
    assert "finefit.spec is not allowed to import finefit.plan" in done.stdout


def test_packages_of_plain_data_load_no_torch() -> None:
    """Not even through the packages and libraries that they use."""
    package = ROOT / "src" / "finefit"
    modules = [
        "finefit." + ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__")
        for name in PLAIN
        for path in sorted((package / name).glob("*.py"))
    ]
    assert len(modules) > 20
    code = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
heavy = {{"torch", "transformers", "datasets", "peft"}} & sys.modules.keys()
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
