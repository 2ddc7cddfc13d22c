"""The page of a review: what a rater sees and decides, as JSON between `pages/review.js` and a session. No address and no answer names a model
until the rater asks for the results, which is kept."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from importlib.resources import files
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from finefit.errors import FinefitError
from finefit.report.review import results_document
from finefit.review.exhibits import Gone
from finefit.review.results import results_of
from finefit.review.session import NAME_LENGTH, NOTE_LENGTH, Press, Refused, Session, Stale, Turn
from finefit.review.verdicts import REASONS
from finefit.web.guard import LOGIN, Token
from finefit.web.pictures import picture_of

_PAGES = {
    "/": ("review.html", "text/html"),
    "/review.js": ("review.js", "text/javascript"),
    "/review.css": ("review.css", "text/css"),
}
_NO_ROOM = 507
Answer = Callable[[Request], Awaitable[Response]]


class _Misread(Exception):
    """The body is none that our page sends."""


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


A = TypeVar("A", bound=_Asked)


class _Rater(_Asked):
    rater: str = Field(max_length=4 * NAME_LENGTH)


class _Decision(_Rater):
    sheet: str
    press: Press
    reasons: list[list[str]] = Field(max_length=2)
    note: str = Field(default="", max_length=NOTE_LENGTH)


class _Results(_Rater):
    is_sure: Literal[True]
    """The page has asked: results name the models."""


class _Login(_Asked):
    token: str


def review_app(session: Session, *, rater: str | None = None, token: Token | None = None) -> Starlette:
    """`rater`: who judges, where the command says so; else the page asks."""

    async def begin(_: Request) -> Response:
        settings = {
            "models": len(session.stack.models),
            "reasons": list(REASONS),
            "rater": rater,
            "name_length": NAME_LENGTH,
            "note_length": NOTE_LENGTH,
        }
        return JSONResponse(settings)

    async def turn(request: Request) -> Response:
        return _shown(session.turn((await _body(request, _Rater)).rater))

    async def verdict(request: Request) -> Response:
        asked = await _body(request, _Decision)
        try:
            return _shown(session.judge(asked.rater, asked.sheet, asked.press, reasons=asked.reasons, note=asked.note))
        except Stale:
            return _shown(session.turn(asked.rater), 409)

    async def undo(request: Request) -> Response:
        return _shown(session.undo((await _body(request, _Rater)).rater))

    async def results(request: Request) -> Response:
        asked = await _body(request, _Results)
        session.reveal(asked.rater)
        return JSONResponse(results_document(results_of(session.stack, session.entries)))

    async def login(request: Request) -> Response:
        given = (await _body(request, _Login)).token
        if token is None or not token.opens(given):
            return JSONResponse({"error": "this is not the token"}, 401)
        return Response(status_code=204, headers={"Set-Cookie": token.cookie})

    exhibits = {exhibit.sha256: exhibit for sheet in session.stack.sheets for exhibit in sheet.images}

    async def image(request: Request) -> Response:
        """By its digest alone: no path comes from outside, and none goes there."""
        exhibit = exhibits.get(request.path_params["sha256"])
        if exhibit is None:
            return JSONResponse({"error": "no sheet of this review shows such an image"}, 404)
        try:
            return Response(await run_in_threadpool(picture_of, exhibit), media_type="image/png")
        except Gone as gone:
            return JSONResponse({"error": str(gone)}, 410)

    asked: dict[str, Answer] = {
        "/api/begin": begin,
        "/api/turn": turn,
        "/api/verdict": verdict,
        "/api/undo": undo,
        "/api/results": results,
        LOGIN: login,
    }
    routes = [Route(path, _page(name, kind)) for path, (name, kind) in _PAGES.items()]
    routes.append(Route("/favicon.ico", _no_icon))
    routes += [Route(path, answer, methods=["POST"]) for path, answer in asked.items()]
    routes.append(Route("/api/image/{sha256}", image))
    return Starlette(routes=routes, exception_handlers={Refused: _refused, _Misread: _misread, FinefitError: _failed})


def _page(name: str, kind: str) -> Answer:
    content = files("finefit.web").joinpath("pages", name).read_bytes()

    async def page(_: Request) -> Response:
        return Response(content, media_type=f"{kind}; charset=utf-8")

    return page


async def _no_icon(_: Request) -> Response:
    return Response(status_code=204)


async def _body(request: Request, kind: type[A]) -> A:
    try:
        return kind.model_validate(json.loads(await request.body()))
    except (ValueError, RecursionError):  # no JSON, no UTF-8, nested too deep, or other fields; it is not repeated
        raise _Misread from None


def _shown(turn: Turn, status: int = 200) -> Response:
    return JSONResponse(asdict(turn), status)


async def _refused(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 422)


async def _misread(_: Request, __: Exception) -> Response:
    return JSONResponse({"error": "this is no request of the page; load it again"}, 400)


async def _failed(_: Request, error: Exception) -> Response:
    """The disk is full, most likely: the verdict was not kept, and the rater must know."""
    return JSONResponse({"error": f"not kept: {error}"}, _NO_ROOM)
