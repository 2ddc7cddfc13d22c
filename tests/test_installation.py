"""finefit as its users install it: a wheel built from the sdist, in an environment of its own outside this folder."""

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from finefit import __version__

ROOT = Path(__file__).resolve().parent.parent
SHAPE = """\
name: orders
model:
  kind: shape
  config: {model_type: llama, architectures: [LlamaForCausalLM], hidden_size: 64, intermediate_size: 128,
           num_hidden_layers: 2, num_attention_heads: 4, vocab_size: 512, dtype: bfloat16}
tuning: {kind: lora, rank: 8}
data: {train: [{path: train.jsonl}], max_tokens: 256}
optimizer: {lr: 1e-4}
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist is built first, and the wheel from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    (found,) = folder.glob("*.whl")
    assert (folder / f"finefit-{__version__}.tar.gz").is_file()
    return found


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    package = ROOT / "src" / "finefit"
    tree = {path.relative_to(package.parent).as_posix() for path in package.rglob("*") if path.is_file()}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == {name for name in tree if "__pycache__" not in name}
    assert {"finefit/py.typed", "finefit/recipes/demo/train.jsonl", "finefit/web/pages/review.html"} <= names


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an environment's programs. The packages that finefit needs are borrowed from this one."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    pip: list[str | Path] = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-index",
        "--no-deps",
    ]
    subprocess.run([*pip, wheel], check=True)
    ask: list[str | Path] = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip())
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


def _finefit(installed: Path, folder: Path, *words: str) -> str:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= {"NO_COLOR": "1", "COLUMNS": "120"}
    command: list[str | Path] = [installed / "finefit", *words]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_installed_program_works_outside_the_repository(installed: Path, tmp_path: Path) -> None:
    where: list[str | Path] = [installed / "python", "-c", "import finefit; print(finefit.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert found.startswith(str(installed.parent))
    assert _finefit(installed, tmp_path, "--version") == f"finefit {__version__}\n"
    assert _finefit(installed, tmp_path, "doctor").splitlines()[-1].startswith("ready to train on ")
    (tmp_path / "spec.yaml").write_text(SHAPE)
    assert "fits:" in _finefit(installed, tmp_path, "plan", "spec.yaml", "--card", "RTX 4090")
    _finefit(installed, tmp_path, "recipes", "chat", "--to", "chat")
    assert (tmp_path / "chat" / "train.jsonl").is_file()


@pytest.mark.twin
@pytest.mark.real_model
@pytest.mark.timeout(1800)
def test_the_installed_demo_trains_and_shows_what_changed(installed: Path, tmp_path: Path) -> None:
    said = _finefit(installed, tmp_path, "demo")
    assert "fine-tuned" in said
    assert (tmp_path / "runs" / "demo-1" / "stages").is_dir()


Instruction = tuple[str, str]


def _instructions(text: str) -> list[Instruction]:
    """Comments are left out and continued lines joined."""
    lines = (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined)]


def test_the_docker_file_is_pinned_and_ends_as_a_user_without_privileges() -> None:
    found = _instructions((ROOT / "Dockerfile").read_text(encoding="utf-8"))
    words = [word for word, _ in found]
    assert set(words) <= {"FROM", "ARG", "ENV", "RUN", "COPY", "WORKDIR", "USER", "ENTRYPOINT", "CMD"}
    images = [rest.split()[0] for word, rest in found if word == "FROM"]
    assert images
    assert not [image for image in images if not re.search(r":\d+\.\d+\.\d+\S*$", image)]
    assert "-runtime-" in images[-1]
    assert [rest for word, rest in found if word == "USER"][-1:] == ["finefit"]
    assert words.index("USER") > max(at for at, (word, rest) in enumerate(found) if word == "RUN" and "apt-get" in rest)
    for rest in (rest for word, rest in found if word == "RUN" and "pip install" in rest):
        assert "-c constraints.txt" in rest
        assert "--no-cache-dir" in rest
    copied = [rest.split()[:-1] for word, rest in found if word == "COPY" and "--from" not in rest]
    assert [name for names in copied for name in names if not (ROOT / name).exists()] == []
