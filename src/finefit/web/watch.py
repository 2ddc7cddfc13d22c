"""The pages that follow runs: their list, and one run. The curves come as JSON, and what changes comes by server-sent
events. All else only reads; what is asked of a run, and each review that is opened, is recorded first."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from finefit.artifacts.reading import is_there, open_file, read_document, read_text
from finefit.artifacts.rundir import RunDir
from finefit.errors import FinefitError, RunError
from finefit.spec import Part
from finefit.web.linked_pages import FILE_OPTIONS, LinkedPages
from finefit.web.runs import TICK_SECONDS, Action, NoSuchRun, Runs, WatchedRun, record_action
from finefit.web.server import (
    POLICY,
    STATIC_POLICY,
    BadRequest,
    Token,
    bad_request,
    body_of,
    file_response,
    file_routes,
    login_route,
)
from finefit.web.training import Document, WatchedTraining, is_wrong, item_document

_SCRIPTS = ("run.js", "runs.js", "charts.js", "page.js", "panels.js")
_FILES = {f"/files/{name}": name for name in (*_SCRIPTS, "watch.css")} | {"/run/{name}": "run.html"}
_FILES |= {f"/files/{name}": f"vendor/{name}" for name in ("uplot.min.js", "uplot.min.css")}
_MAX_POINTS, _MAX_STEP = 4000, 2**31 - 1
_NUM_ITEMS, _NUM_ROWS = 20, 5
_MAX_COMPARED = 8
_LOG_BYTES = 64 << 10
_MAX_STREAMS, _MAX_TICKS = 100, 900
_BEHIND_SECONDS = 0.02
_QUIET_TICKS = 15
"""A comment after as many ticks without news keeps the connection open, and finds out whether anybody listens."""


class _Act(Part):
    action: Action
    stage: str = ""
    is_sure: Literal[True]
    """The page has asked for confirmation."""


class _Review(Part):
    runs: list[str]
    """One, or two that are judged against each other; a stage as run/stage."""
    is_sure: Literal[True]


def watch_app(runs: Runs, pages: LinkedPages, *, token: Token | None = None) -> Starlette:

    def run_of(request: Request) -> WatchedRun:
        return runs.open(request.path_params["name"])

    async def begin(_: Request) -> Response:
        if runs.only is not None:
            return RedirectResponse(f"/run/{quote(runs.only, safe='')}")
        return file_response("runs.html")

    async def listed(_: Request) -> Response:
        return JSONResponse({"folder": str(runs.folder or ""), "runs": await run_in_threadpool(runs.listed)})

    async def state(request: Request) -> Response:
        return _json(await run_of(request).document(_stage_of(request)))

    async def live(request: Request) -> Response:
        run, stage = run_of(request), _stage_of(request)
        await run.document(stage)  # a stage that is not there is refused before the stream begins
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        if len(streams) >= _MAX_STREAMS:
            return JSONResponse({"error": f"{_MAX_STREAMS} viewers are connected already"}, 503)
        return StreamingResponse(
            _stream(run, stage, streams, request.scope["is_ending"]), media_type="text/event-stream"
        )

    async def series(request: Request) -> Response:
        first, last = _number(request, "first", 0, _MAX_STEP), _number(request, "last", _MAX_STEP, _MAX_STEP)
        points = max(_number(request, "points", 1500, _MAX_POINTS), 2)
        run, stage = run_of(request), _stage_of(request)
        await run.document(stage)  # reads what is new
        return _json(await run.thinned(stage, first, last, points))

    async def items(request: Request) -> Response:
        training = run_of(request).training(_stage_of(request))
        if training is None:
            raise NoSuchRun
        query = request.query_params
        offset, only_wrong = _number(request, "from", 0, _MAX_STEP), query.get("wrong") == "1"
        found = await run_in_threadpool(training.items, query.get("task", ""), query.get("checkpoint", ""))
        chosen = [item for item in found if is_wrong(item)] if only_wrong else found
        shown = [item_document(item) for item in chosen[offset : offset + _NUM_ITEMS]]
        return JSONResponse({"total": len(chosen), "from": offset, "items": shown})

    async def plan(request: Request) -> Response:
        run, other = run_of(request), request.query_params.get("against")
        against = None if other is None else runs.open(other)
        return JSONResponse(await run_in_threadpool(plan_document, run.training(_stage_of(request)), run, against))

    async def log(request: Request) -> Response:
        return JSONResponse({"text": await run_in_threadpool(_log_tail, run_of(request))})

    async def rows(request: Request) -> Response:
        """Through a process of its own, which has the tokenizer."""
        training = run_of(request).training(_stage_of(request))
        if training is None:
            raise NoSuchRun
        first = _number(request, "from", 0, _MAX_STEP)
        words = str(training.where.path), str(first), str(_NUM_ROWS)
        return _json(await pages.answered("finefit.data.shown_rows", *words))

    async def page(request: Request) -> Response:
        verb, named = request.path_params["verb"], request.query_params.getlist("run")
        if verb not in FILE_OPTIONS or not 0 < len(named) <= (1 if verb == "report" else _MAX_COMPARED):
            raise NoSuchRun
        try:
            made = await pages.made(verb, [runs.path_of(one) for one in named])
        except RunError as error:
            return PlainTextResponse(error.problem, 422)
        return Response(made, media_type="text/html; charset=utf-8", headers={POLICY: STATIC_POLICY})

    async def review(request: Request) -> Response:
        asked = await body_of(request, _Review)
        if not 1 <= len(asked.runs) <= 2:
            raise BadRequest
        places = [runs.path_of(one) for one in asked.runs]
        await run_in_threadpool(record_action, RunDir(places[0]), "review", runs=asked.runs)
        return JSONResponse({"url": await pages.review(places)})

    async def act(request: Request) -> Response:
        asked, run = await body_of(request, _Act), run_of(request)
        await run_in_threadpool(run.act, asked.action, asked.stage)
        return Response(status_code=204)

    streams: set[object] = set()
    asked = {"state": state, "live": live, "series": series, "items": items, "plan": plan, "log": log, "rows": rows}
    return Starlette(
        routes=[
            Route("/", begin),
            *file_routes(_FILES),
            Route("/api/runs", listed),
            *(Route(f"/api/run/{{name}}/{what}", answer) for what, answer in asked.items()),
            Route("/api/run/{name}/act", act, methods=["POST"]),
            Route("/api/page/{verb}", page),
            Route("/api/review", review, methods=["POST"]),
            login_route(token),
        ],
        exception_handlers={NoSuchRun: _not_there, BadRequest: bad_request, FinefitError: _unreadable},
    )


async def _stream(
    run: WatchedRun, stage: str, streams: set[object], is_ending: Callable[[], bool]
) -> AsyncIterator[bytes]:
    """What is known at once, then each change. It ends after a while; a browser opens it again by itself."""
    sent, own = b"", object()
    streams.add(own)
    try:
        for tick in range(_MAX_TICKS):
            found = await run.document(stage)
            if found != sent:
                sent = found
                yield b"data: " + found + b"\n\n"
            elif tick % _QUIET_TICKS == 0:
                yield b": no news\n\n"
            await asyncio.sleep(_BEHIND_SECONDS if run.is_behind(stage) else TICK_SECONDS)
            if is_ending():
                return
    except (FinefitError, NoSuchRun) as error:
        problem = error.problem if isinstance(error, FinefitError) else "the run is no longer there"
        yield b"data: " + json.dumps({"problems": [problem]}).encode() + b"\n\n"
    finally:
        streams.discard(own)


def _stage_of(request: Request) -> str:
    return request.query_params.get("stage", "")


def _number(request: Request, name: str, default: int, limit: int) -> int:
    given = request.query_params.get(name, "")
    if not given:
        return default
    if not (given.isascii() and given.isdigit() and len(given) <= len(str(limit))):
        raise BadRequest
    return min(int(given), limit)


def _json(text: bytes) -> Response:
    return Response(text, media_type="application/json")


def plan_document(training: WatchedTraining | None, run: WatchedRun, against: WatchedRun | None) -> Document:
    """What was asked and what was decided, each value with its source; and what another run was asked instead."""
    decided = training.decided() if training else {}
    values = [{"key": key, "value": one.value, "source": one.source} for key, one in decided.items()]
    found: Document = {"values": values, "spec": _text_of(run.run.spec_yaml), "differences": None}
    if against is not None:
        here, there = (_flat(read_document(one.run.spec_json)) for one in (run, against))
        keys = [key for key in {**here, **there} if here.get(key) != there.get(key)]
        found["differences"] = [{"key": key, "here": here.get(key), "there": there.get(key)} for key in keys]
    return found


def _flat(document: object, prefix: str = "") -> dict[str, object]:
    """Nested settings by dotted keys."""
    if isinstance(document, dict):
        pairs = ((f"{prefix}.{key}" if prefix else str(key), value) for key, value in document.items())
    elif isinstance(document, list):
        pairs = ((f"{prefix}[{at}]", value) for at, value in enumerate(document))
    else:
        return {prefix: document}
    return {key: value for name, part in pairs for key, value in _flat(part, name).items()}


def _text_of(path: Path) -> str:
    return read_text(path) if is_there(path) else ""


def _log_tail(run: WatchedRun) -> str:
    if not is_there(run.run.log):
        return ""
    with open_file(run.run.log) as descriptor:
        start = max(0, os.fstat(descriptor).st_size - _LOG_BYTES)
        text = os.pread(descriptor, _LOG_BYTES, start).decode(errors="replace")
    return text.partition("\n")[2] if start else text


async def _not_there(_: Request, __: Exception) -> Response:
    return JSONResponse({"error": "no run or stage of that name is here"}, 404)


async def _unreadable(_: Request, error: Exception) -> Response:
    """A run directory that is damaged or half written; the page shows why."""
    problem = error.problem if isinstance(error, FinefitError) else str(error)
    return JSONResponse({"error": problem}, 422)
