"""The review page: JSON between `pages/review.js` and a session. No URL and no response names a model until the rater
asks for the results, which is recorded."""

import io
from dataclasses import asdict
from typing import Literal

from pydantic import Field
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from finefit.data.columns import RecordError
from finefit.data.images import decode
from finefit.data.rows import Image
from finefit.errors import FinefitError
from finefit.report.review import results_document
from finefit.review.items import ImageUnavailable, ReviewImage, read_image
from finefit.review.session import NAME_LENGTH, NOTE_LENGTH, Press, Refused, Session, Stale, Turn
from finefit.review.verdicts import REASONS, results_of
from finefit.spec import Part
from finefit.web.server import BadRequest, Token, bad_request, body_of, file_routes, login_route

_PAGES = {"/": "review.html", "/review.js": "review.js", "/review.css": "review.css"}
_INSUFFICIENT_STORAGE = 507
_FAST_COMPRESSION = 1


class _Rater(Part):
    rater: str = Field(max_length=4 * NAME_LENGTH)


class _Decision(_Rater):
    item: str
    press: Press
    reasons: list[list[str]] = Field(max_length=2)
    note: str = Field(default="", max_length=NOTE_LENGTH)


class _Results(_Rater):
    is_sure: Literal[True]
    """The page has asked for confirmation, because results name the models."""


def review_app(session: Session, *, rater: str | None = None, token: Token | None = None) -> Starlette:
    """`rater` is the person who judges, if the command names them; otherwise the page asks."""

    async def begin(_: Request) -> Response:
        lengths = {"name_length": NAME_LENGTH, "note_length": NOTE_LENGTH}
        models = len(session.review_set.models)
        return JSONResponse({"models": models, "reasons": list(REASONS), "rater": rater, **lengths})

    async def turn(request: Request) -> Response:
        return _shown(session.turn((await body_of(request, _Rater)).rater))

    async def verdict(request: Request) -> Response:
        asked = await body_of(request, _Decision)
        try:
            return _shown(session.judge(asked.rater, asked.item, asked.press, reasons=asked.reasons, note=asked.note))
        except Stale:
            return _shown(session.turn(asked.rater), 409)

    async def undo(request: Request) -> Response:
        return _shown(session.undo((await body_of(request, _Rater)).rater))

    async def results(request: Request) -> Response:
        asked = await body_of(request, _Results)
        session.reveal(asked.rater)
        return JSONResponse(results_document(results_of(session.review_set, session.entries)))

    images = {image.sha256: image for item in session.review_set.items for image in item.images}

    async def image(request: Request) -> Response:
        """Found by digest: no path is accepted from outside, and none is revealed."""
        image = images.get(request.path_params["sha256"])
        if image is None:
            return JSONResponse({"error": "no item of this review shows this image"}, 404)
        try:
            return Response(await run_in_threadpool(_png_of, image), media_type="image/png")
        except ImageUnavailable as gone:
            return JSONResponse({"error": str(gone)}, 410)

    asked = {"begin": begin, "turn": turn, "verdict": verdict, "undo": undo, "results": results}
    return Starlette(
        routes=[
            *file_routes(_PAGES),
            *(Route(f"/api/{name}", answer, methods=["POST"]) for name, answer in asked.items()),
            login_route(token),
            Route("/api/image/{sha256}", image),
        ],
        exception_handlers={Refused: _failed, BadRequest: bad_request, FinefitError: _failed},
    )


def _shown(turn: Turn, status: int = 200) -> Response:
    return JSONResponse(asdict(turn), status)


async def _failed(_: Request, error: Exception) -> Response:
    if isinstance(error, Refused):
        return JSONResponse({"error": str(error)}, 422)
    # most likely the disk is full: the verdict was not saved, and the rater must know
    return JSONResponse({"error": f"not saved: {error}"}, _INSUFFICIENT_STORAGE)


def _png_of(image: ReviewImage) -> bytes:
    """The image is decoded as for the model and encoded again: a rater sees what the model saw, and a browser gets
    nothing else."""
    try:
        shown = decode(Image(path=image.name), content=read_image(image))
    except RecordError as fault:
        raise ImageUnavailable(str(fault)) from None
    written = io.BytesIO()
    shown.save(written, "PNG", compress_level=_FAST_COMPRESSION)
    return written.getvalue()
