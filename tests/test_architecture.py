"""Packages import only packages below them, every package has its place, packages of plain data stay light, and files
are read under limits."""

import ast
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


_MEMORY = "a text that is in memory already, and was read under limits"
_OURS = "a file of the package itself"
_SYSTEM = "a file of the operating system, which is short"
ALLOWED = {
    ("finefit.importers.documents", "_yaml"): _MEMORY,
    ("finefit.bounded", "open_descriptor"): "the guarded reader itself",
    ("finefit.bounded", "parse_json"): "the guarded reader itself",
    ("finefit.artifacts.atomic", "claimed_folder"): "to lock a folder, of which nothing is read",
    ("finefit.artifacts.atomic", "sync"): "nothing is read",
    ("finefit.artifacts.cache", "source_digest"): _OURS,
    ("finefit.custom.inputs", "__call__"): "a config that finefit wrote as text to hand it on",
    ("finefit.data.batch_workers", "main"): "/dev/null",
    ("finefit.data.examples", "_images"): "a part of the prepared rows, which are whole by their digest",
    ("finefit.data.examples", "_map"): "the prepared rows, which are whole by their digest",
    ("finefit.data.template_process", "forget"): "/dev/null",
    ("finefit.data.template_process", "_address_space_bytes"): _SYSTEM,
    ("finefit.drafts.data_file", "_is_json"): _MEMORY,
    ("finefit.facts.converters", "_pins"): _OURS,
    ("finefit.facts.machine", "read_cpu_model"): _SYSTEM,
    ("finefit.facts.machine", "read_peak_resident_bytes"): _SYSTEM,
    ("finefit.facts.machine", "_read_text"): _SYSTEM,
    ("finefit.model.family", "save_weights"): "what peft has written a moment before",
    ("finefit.model.resolve_model", "require_matching_adapter"): _MEMORY,
    ("finefit.negatives.lexicon", "shipped_words"): _OURS,
    ("finefit.negatives.pairs", "tools_record"): _MEMORY,
    ("finefit.recipes", "all_recipes"): _OURS,
    ("finefit.rehearse.fake_model", "layer_shapes"): "a config that finefit wrote as text to hand it on",
    ("finefit.report.page", "html_page"): _OURS,
    ("finefit.review.export", "preference_pairs"): _MEMORY,
    ("finefit.run.external_launch", "await_run"): "a message of another rank of the same run",
    ("finefit.run.resume", "follow"): "a spec that finefit wrote as text a line before",
    ("finefit.spec.load", "changed_text"): _MEMORY,
    ("finefit.tasks.short_answer", "_json_object"): "the answer of a model, of at most max_new_tokens",
    ("finefit.train.ranks", "rendezvous"): "a message of another rank of the same run",
    ("finefit.web.linked_pages", "made"): "a page that a process of finefit wrote a moment before",
    ("finefit.web.linked_pages", "_address_of"): "what a process of finefit says first",
    ("finefit.web.server", "file_response"): _OURS,
    ("finefit.web.server", "body_of"): "the body of a request, which the server has limited",
}
"""Functions that open, read or parse without `finefit.bounded` or `finefit.artifacts.reading`, and why they may."""
_READERS = ("read_text", "read_bytes")
_PARSERS = {("json", "loads"), ("json", "load"), ("yaml", "load"), ("os", "open")}


def _reads(call: ast.Call) -> bool:
    """Opens a file to read it, reads it as a whole, or parses a text. `open` with a name in place of a mode is the
    method of something else, such as a zip, an image or a ledger."""
    match call.func:
        case ast.Name(id="open"):
            return True
        case ast.Attribute(value=ast.Name(id=holder), attr=name) if (holder, name) in _PARSERS:
            return True
        case ast.Attribute(value=ast.Name(id="bounded")):
            return False
        case ast.Attribute(attr=name) if name in _READERS:
            return True
        case ast.Attribute(attr="open"):
            given = call.args[:1] or [word.value for word in call.keywords if word.arg == "mode"]
            modes = [value.value if isinstance(value, ast.Constant) else None for value in given]
            return all(isinstance(mode, str) and set(mode) <= set("rbt+") for mode in modes)
    return False


def _reading_functions(source: str, module: str) -> set[tuple[str, str]]:
    """The functions that read by themselves; the innermost, where they are nested."""
    found = set()

    def walk(node: ast.AST, function: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call) and _reads(child):
                found.add((module, function))
            walk(child, child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function)

    walk(ast.parse(source), "")
    return found


def test_files_are_read_through_the_guarded_readers() -> None:
    """A new function that opens or parses a file by itself fails here: use `finefit.bounded`, or say why it may not."""
    found = set[tuple[str, str]]()
    for path in sorted((ROOT / "src" / "finefit").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        found |= _reading_functions(path.read_text(encoding="utf-8"), module)
    assert found - ALLOWED.keys() == set()
    assert ALLOWED.keys() - found == set()


@pytest.mark.parametrize(
    "line",
    [
        "open(path)",
        "path.open()",
        "path.open('rb')",
        "path.open(encoding='utf-8')",
        "path.read_text()",
        "(folder / name).read_bytes()",
        "json.loads(text)",
        "json.load(file)",
        "yaml.load(text)",
        "os.open(path, flags)",
    ],
)
def test_a_reader_of_its_own_is_noticed(line: str) -> None:
    assert _reading_functions(f"def read(path):\n    return {line}\n", "new") == {("new", "read")}


@pytest.mark.parametrize("line", ["path.open('w')", "ledger.open('train', reader)", "bounded.read_bytes(path, 9)"])
def test_what_writes_or_is_guarded_is_not(line: str) -> None:
    assert _reading_functions(f"def read(path):\n    return {line}\n", "new") == set()


def test_no_two_classes_have_one_name() -> None:
    """One name for each concept: a reader who finds a class by its name has found the one that is meant."""
    defined: dict[str, list[str]] = {}
    for path in sorted((ROOT / "src" / "finefit").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                defined.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    assert {name: places for name, places in defined.items() if len(places) > 1} == {}
