"""Pushing with the real client to a hub on this machine: what arrives, what is refused, and that no token is left
anywhere. The client runs in a process of its own, since it reads its address when it is imported."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from finefit.artifacts.export_records import EXPORT
from finefit.errors import ModelError, UserError
from finefit.export.push import push, redacted
from tests.export.hub import TOKEN, Hub, open_hub
from tests.exports import make_export, make_format, make_report

FILES = {
    "adapter_model.safetensors": bytes(range(256)) * 40,
    "adapter_config.json": b'{"r": 12}\n',
    "README.md": b"---\ntags: [finefit]\n---\n# orders\n",
    "odd [1].json": b"{}",
    "gguf/orders-q8_0.gguf": b"GGUF" * 100,
}
_PUSH = """
import json, sys
from pathlib import Path
from finefit.errors import FinefitError
from finefit.export.push import push
try:
    done = push(Path(sys.argv[1]), sys.argv[2], private=sys.argv[3] == "private", dry_run=False, say=print)
    print(json.dumps({"commit": done.commit, "files": done.files}))
except FinefitError as error:
    print(json.dumps({"problem": error.problem, "remedy": error.remedy, "code": error.exit_code}))
"""


@dataclass(frozen=True, slots=True)
class Pushed:
    document: dict[str, Any]
    said: str
    """All that was printed."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with open_hub() as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_export(tmp_path / "orders", FILES)


def _push(hub: Hub, folder: Path, repo: str = "ann/orders", *, token: str = TOKEN, kind: str = "private") -> Pushed:
    home = folder.parent / "home"
    known = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    own = {"HF_ENDPOINT": hub.address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    own |= {"HF_TOKEN": token} if token else {}
    command = [sys.executable, "-c", _PUSH, str(folder), repo, kind]
    done = subprocess.run(command, env={**known, **own}, capture_output=True, text=True, check=True)
    kept = [path.read_text(errors="replace") for path in folder.parent.rglob("*") if path.is_file()]
    assert not any(TOKEN in text for text in (done.stdout, done.stderr, *kept))
    return Pushed(json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr)


def test_the_repository_holds_the_files_of_the_folder_byte_for_byte_and_is_private(hub: Hub, folder: Path) -> None:
    done = _push(hub, folder)
    assert hub.files == {**FILES, EXPORT: (folder / EXPORT).read_bytes()}
    assert hub.visibility == {"ann/orders": "private"}
    assert done.document["commit"] == "1" * 40
    assert done.document["files"] == {name: len(content) for name, content in sorted(hub.files.items())}


def test_a_dropped_connection_is_resumable_and_the_same_push_sends_large_files_once(hub: Hub, folder: Path) -> None:
    hub.answers["commit"] = 0
    lost = _push(hub, folder).document
    assert lost["code"] == 3
    assert "same command" in lost["remedy"]
    assert (hub.files, hub.uploads) == ({}, 2)
    del hub.answers["commit"]
    assert "commit" in _push(hub, folder).document
    assert (set(hub.files), hub.uploads) == ({*FILES, EXPORT}, 2)


@pytest.mark.parametrize(
    ("status", "code", "named"), [(403, 2, "ann"), (404, 2, "ann/orders"), (429, 3, "429"), (500, 3, "500")]
)
def test_what_the_hub_refuses_is_said_with_a_remedy_and_without_the_token(
    hub: Hub, folder: Path, status: int, code: int, named: str
) -> None:
    hub.answers["create"], hub.said = status, f"refused for {TOKEN}"
    refused = _push(hub, folder).document
    assert refused["code"] == code
    assert named in refused["problem"] + refused["remedy"]
    assert hub.files == {}


@pytest.mark.parametrize(("token", "named"), [("hf_anotherTokenForTests", "401"), ("", "no token")])
def test_a_wrong_token_and_none_are_told_apart(hub: Hub, folder: Path, token: str, named: str) -> None:
    refused = _push(hub, folder, token=token).document
    assert refused["code"] == 2
    assert named in refused["problem"]
    assert "HF_TOKEN" in refused["remedy"]


def test_a_private_push_never_goes_to_a_public_repository(hub: Hub, folder: Path) -> None:
    hub.visibility["ann/orders"] = "public"
    assert "public" in _push(hub, folder).document["problem"]
    assert hub.files == {}
    assert "commit" in _push(hub, folder, kind="public").document


def test_a_dry_run_lists_every_file_with_its_size_and_asks_nobody(folder: Path) -> None:
    said: list[str] = []
    done = push(folder, "ann/orders", private=True, dry_run=True, say=said.append)
    assert done.commit is None
    assert done.files == {
        **{name: len(content) for name, content in FILES.items()},
        EXPORT: (folder / EXPORT).stat().st_size,
    }
    assert all(any(name in line and f"{size:,}" in line for line in said) for name, size in done.files.items())


@pytest.mark.parametrize("repo", ["orders", "ann/orders/more", "ann/or ders", "../orders", "ann/--orders", ""])
def test_a_name_that_is_no_repository_is_refused(folder: Path, repo: str) -> None:
    with pytest.raises(UserError, match="owner/name"):
        push(folder, repo, private=True, dry_run=True, say=print)


def _dry(folder: Path) -> None:
    push(folder, "ann/orders", private=True, dry_run=True, say=lambda _line: None)


@pytest.mark.parametrize("changes", [{"problems": ("the head was dropped",)}, {"distance": None}])
def test_an_export_that_was_not_proved_is_pushed_only_if_it_was_accepted(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    unproved = make_format("merged:bf16", **changes)
    with pytest.raises(ModelError, match="merged:bf16"):
        _dry(make_export(tmp_path / "refused", FILES, report=make_report(unproved)))
    _dry(make_export(tmp_path / "accepted", FILES, report=make_report(unproved, accepted=("merged:bf16",))))


def test_a_folder_without_its_record_or_with_a_missing_file_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        _dry(folder)
    (folder / EXPORT).unlink()
    with pytest.raises(ModelError, match=EXPORT):
        _dry(folder)


def test_a_file_that_is_longer_or_shorter_than_when_it_was_proved_is_refused(folder: Path) -> None:
    with (folder / "adapter_model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors"):
        _dry(folder)


@pytest.mark.parametrize("name", [".env", "naïve.json", "new\nline.json"])
def test_a_file_with_an_odd_name_is_refused(folder: Path, name: str) -> None:
    (folder / name).write_text("x")
    with pytest.raises(UserError):
        _dry(folder)


def test_a_link_out_of_the_folder_is_refused(folder: Path) -> None:
    (folder.parent / "secret").write_text("x")
    (folder / "notes.txt").symlink_to("../secret")
    with pytest.raises(UserError, match=r"notes\.txt"):
        _dry(folder)


def test_tokens_are_hidden_wherever_they_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "plain-secret-of-mine")
    said = "plain-secret-of-mine, hf_abcdefgh1234, Bearer abcdefghijklmnop and https://ann:pw123@host/x"
    hidden = redacted(said)
    assert not any(secret in hidden for secret in ("plain-secret", "hf_abc", "abcdefghijklmnop", "pw123"))
    assert redacted("the bearer of news, hf_hub and http://host/x") == "the bearer of news, hf_hub and http://host/x"
