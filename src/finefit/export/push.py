"""A finished export onto the hub: what would go, the upload by huggingface_hub, and its errors in words.

The token stays in the client. Everything that is said passes through `redacted`."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
from huggingface_hub import HfApi, constants, get_token
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import disable_progress_bars, validate_repo_id  # type: ignore[attr-defined]

from finefit.artifacts.export_records import EXPORT, ExportReport
from finefit.artifacts.reading import is_there
from finefit.artifacts.records import read_record
from finefit.errors import ModelError, Resumable, UserError

Say = Callable[[str], None]
_AGAIN = "give the same command again: what has arrived is not sent twice"
_LOG_IN = "`hf auth login` logs in, or set HF_TOKEN to a token with write access"
_TOKEN_NAMES: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN", "HUGGINGFACE_TOKEN")
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{8,}|(?i:\bbearer\s+)[\w.~+/=-]{12,}|(?<=://)[^/@\s]+@")
_MIN_TOKEN = 6
_HIDDEN: Final = "[token]"
_LEFT_OUT = (".git", ".cache")
_LIMITED, _GATEWAY = 429, range(500, 600)


@dataclass(frozen=True, slots=True, kw_only=True)
class PushResult:
    repo: str
    private: bool
    files: dict[str, int]
    """Sizes by path in the repository."""
    url: str
    commit: str | None
    """None for a dry run."""


class NotPushed(UserError):
    """The hub refuses it."""


def push(folder: Path, repo: str, *, private: bool = True, dry_run: bool, say: Say) -> PushResult:
    """`dry_run`: without the network. The same call again goes on with an upload that was interrupted."""
    require_repo_name(repo)
    require_proved(folder)
    files = _files(folder)
    url = redacted(f"{constants.ENDPOINT}/{repo}")
    kind, verb = "private" if private else "public", "would upload" if dry_run else "uploading"
    say(f"{verb} {len(files)} files, {sum(files.values()):,} bytes, to the {kind} model repository {repo}")
    for name, size in files.items():
        say(f"{size:>16,}  {name}")
    if dry_run:
        return PushResult(repo=repo, private=private, files=files, url=url, commit=None)
    disable_progress_bars()
    with _reported(repo):
        commit = _upload(folder, repo, files, private=private)
    say(f"pushed to {url}")
    return PushResult(repo=repo, private=private, files=files, url=url, commit=commit)


def _upload(folder: Path, repo: str, files: dict[str, int], *, private: bool) -> str:
    api = HfApi(library_name="finefit")
    api.create_repo(repo, private=private, exist_ok=True)
    if private and api.repo_info(repo).private is False:
        problem = f"{repo} exists and is public, and a private repository is asked for"
        raise NotPushed(problem, "name another repository, make this one private on the hub, or push with --public")
    named = [_literal(name) for name in files]
    done = api.upload_folder(repo_id=repo, folder_path=folder, allow_patterns=named, commit_message="Upload by finefit")
    return str(done.oid)


def _literal(name: str) -> str:
    """A pattern that means this file alone."""
    return re.sub(r"([*?\[])", r"[\1]", name)


def require_repo_name(repo: str) -> None:
    try:
        validate_repo_id(repo)
    except hub_errors.HFValidationError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{repo!r} is not the name of a repository: {reason}", "name it as owner/name") from None
    if repo.count("/") != 1:
        raise UserError(f"{repo!r} does not say whose repository it is", "name it as owner/name")


def require_proved(folder: Path) -> None:
    """An export is published with its proof, or because somebody accepted what it lacks."""
    if not is_there(folder / EXPORT):
        problem = f"{folder} holds no {EXPORT}, so nothing says that it is the model that was trained"
        raise ModelError(problem, "`finefit export` makes a folder with its proof")
    report = read_record(folder / EXPORT, ExportReport)
    if not report.exports:
        raise ModelError(f"{folder} holds no exported model", "export it again")
    for one in report.exports:
        is_proved = one.distance is not None and not one.problems
        if not is_proved and one.format not in report.accepted:
            why = "; ".join(one.problems) or "it was not loaded by another program"
            raise ModelError(f"{one.format} in {folder} was not proved: {why}", "export it again")
    proved = {name: size for one in report.exports for name, size in one.files.items()}
    if missing := [name for name in proved if not (folder / name).is_file()]:
        raise ModelError(f"{folder} lacks {', '.join(missing[:3])} of its {EXPORT}", "export it again")
    if changed := [name for name, size in proved.items() if (folder / name).stat().st_size != size]:
        raise ModelError(f"{', '.join(changed[:3])} in {folder} changed since it was proved", "export it again")


def _files(folder: Path) -> dict[str, int]:
    """What a user sees in the folder: nothing hidden, and no link that leads out of it."""
    found: dict[str, int] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_dir() or any(part in _LEFT_OUT for part in name.parts):
            continue
        text = name.as_posix()
        if name.name.startswith(".") and name.name != ".gitattributes":
            raise UserError(f"{path} is hidden, and an export has no hidden files", "take it out of the folder")
        if not text.isprintable() or "\\" in text or not text.isascii():
            raise UserError(f"{text!r} in {folder} is no name for a file on the hub", "rename it in plain ASCII")
        if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
            raise UserError(f"{path} is not a file of its own", "put a copy of the file there")
        found[text] = path.stat().st_size
    return found


def tokens() -> set[str]:
    """Those that this process could send."""
    named = {os.environ.get(name, "").strip() for name in _TOKEN_NAMES}
    with_file = {get_token() or ""} if not os.environ.get("HF_OIDC_RESOURCE") else set[str]()
    return {token for token in named | with_file if len(token) >= _MIN_TOKEN}


def redacted(text: str) -> str:
    """Without anything that is a token or looks like one."""
    for token in sorted(tokens(), key=len, reverse=True):
        text = text.replace(token, _HIDDEN)
    return _TOKEN.sub(_HIDDEN, text)


@contextmanager
def _reported(repo: str) -> Iterator[None]:
    """The boundary to the client. No cause is chained: its message could hold a header."""
    try:
        yield
    except UserError:
        raise
    except hub_errors.LocalTokenNotFoundError:
        raise NotPushed(f"no token for the hub is set, so {repo} cannot be written", _LOG_IN) from None
    except hub_errors.OfflineModeIsEnabled:
        raise NotPushed("the hub client is offline (HF_HUB_OFFLINE)", "unset it") from None
    except (hub_errors.HfHubHTTPError, httpx.HTTPError, OSError, RuntimeError, ValueError) as error:
        raise _in_words(error, repo) from None


def _in_words(error: BaseException, repo: str) -> UserError | Resumable:
    chain = list(_causes(error))
    answered = next((one for one in chain if isinstance(one, hub_errors.HfHubHTTPError)), None)
    said = redacted(" ".join(str(answered or error).split()))[:300]
    if answered is None:
        if any(isinstance(one, httpx.TransportError | ConnectionError | TimeoutError) for one in chain):
            problem = f"the connection to the hub was lost: {said or type(error).__name__}"
            return Resumable(problem, _AGAIN)
        return NotPushed(f"{repo} could not be uploaded: {said}", "mend this and push again")
    match answered.response.status_code:
        case 401:
            has_token = bool(tokens())
            why = "the hub does not accept the token" if has_token else "no token for the hub is set"
            return NotPushed(f"{why}, so {repo} cannot be written (401)", _LOG_IN)
        case 403:
            remedy = f"take a token with write access to {repo.partition('/')[0]}, or another owner"
            return NotPushed(f"the token may not write {repo} (403): {said}", remedy)
        case 404:
            return NotPushed(f"the hub has no owner or repository {repo} (404)", "check the name: owner/name")
        case 429:
            return Resumable(f"the hub limits the rate of requests (429): {said}", f"wait, then {_AGAIN}")
        case code if code in _GATEWAY:
            return Resumable(f"the hub failed ({code}): {said}", f"wait, then {_AGAIN}")
        case code:
            return NotPushed(f"the hub refused {repo} ({code}): {said}", "mend this and push again")


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__
