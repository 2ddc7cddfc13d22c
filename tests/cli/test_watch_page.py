"""`--web` of run and watch."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from finefit.cli import main
from tests.watched import make_watched


def test_the_page_of_a_run_ends_with_the_command(tmp_path: Path) -> None:
    run = make_watched(tmp_path / "runs" / "orders-1").run
    script = f"""
import sys
from pathlib import Path
from finefit.artifacts.rundir import RunDir
from finefit.cli.run import _page
with _page(RunDir(Path({str(run.path)!r})), as_json=False):
    sys.stdin.readline()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as command:
        assert command.stdout is not None
        address = command.stdout.readline().removeprefix("watch at ").strip()
        assert httpx.get(f"{address}api/run/orders-1/state").json()["name"] == "orders-1"
        command.communicate("\n", timeout=30)
    with pytest.raises(httpx.ConnectError):
        httpx.get(address)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["watch", "nothing", "--web"], "nothing is not a run directory"),
        (["watch", ".", "--web"], "holds no run directory"),
        (["run", "spec.yaml", "--web", "--detach"], "finefit watch RUN --web"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_the_reason(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["finefit", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert said in captured.err + captured.out
