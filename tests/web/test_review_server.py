"""The page's server: it answers our own page on this machine and nobody else, and no answer of it names a model before
the results are asked for."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from finefit.errors import DiskFull, UserError
from finefit.review.items import ReviewSet
from finefit.review.session import Session
from finefit.review.verdicts import JournalEntry, ResultsRevealed, Verdict
from finefit.web.review import review_app
from finefit.web.server import MAX_BODY_BYTES, MAX_HEADER_BYTES, Token, bound, is_loopback, names_of
from tests.clients import ORIGIN, Client, client_of
from tests.reviews import MODELS, OPENED, in_memory, make_review_set, make_single, on_disk, side_of

APIS = ("begin", "turn", "verdict", "undo", "results", "login")


def _client(
    session: Session, *, token: Token | None = None, rater: str | None = None
) -> AbstractContextManager[Client]:
    return client_of(review_app(session, rater=rater, token=token), token=token)


@pytest.fixture
def written() -> list[JournalEntry]:
    return [OPENED]


@pytest.fixture
def client(written: list[JournalEntry]) -> Iterator[Client]:
    with _client(Session(make_review_set(), [OPENED], written.append)) as client:
        yield client


def _post(client: Client, name: str, status: int = 200, **body: Any) -> Any:
    response = client.post(f"/api/{name}", json=body, headers=ORIGIN)
    assert response.status_code == status, response.text
    return response.json() if response.content else None


def _judge(client: Client, press: str, status: int = 200, *, rater: str = "ann", **more: Any) -> Any:
    turn = _post(client, "turn", rater=rater)
    return _post(
        client,
        "verdict",
        status,
        **{"rater": rater, "item": turn["item"]["handle"], "press": press, "reasons": [[], []]} | more,
    )


def test_a_verdict_is_kept_and_answered_with_the_next_item(client: Client, written: list[JournalEntry]) -> None:
    first = _post(client, "turn", rater="ann")
    side = side_of(first["item"]["answers"], MODELS[1])
    reasons = [["fabricated"], []] if side == 2 else [[], ["fabricated"]]
    after = _judge(client, str(side), reasons=reasons, note="clear")
    verdict = written[-1]
    assert isinstance(verdict, Verdict)
    assert (verdict.choice, verdict.reasons, verdict.note) == ("second", (("fabricated",), ()), "clear")
    assert (after["judged"], after["total"]) == (1, 6)
    assert after["item"]["handle"] != first["item"]["handle"]


def test_the_same_verdict_sent_twice_is_kept_once(client: Client, written: list[JournalEntry]) -> None:
    item = _post(client, "turn", rater="ann")["item"]["handle"]
    body = {"rater": "ann", "item": item, "press": "1", "reasons": [[], []]}
    after = _post(client, "verdict", **body)
    assert _post(client, "verdict", 409, **body) == after
    assert len(written) == 2


def test_undo_gives_the_item_back(client: Client) -> None:
    item = _post(client, "turn", rater="ann")["item"]["handle"]
    _judge(client, "tie")
    assert _post(client, "undo", rater="ann")["item"]["handle"] == item
    assert _post(client, "undo", 422, rater="ann") == {"error": "there is no verdict to undo"}


def test_no_answer_names_a_model_until_the_results_are_asked_for() -> None:
    review_set = make_review_set()
    secret = ReviewSet(
        name="secret-name", task="secret-task", models=("secret-run-1", "secret-run-2"), items=review_set.items
    )
    session, written = in_memory(secret)
    with _client(session) as client:
        said = [client.get(path).text for path in ("/", "/review.js", "/review.css")]
        said += [
            json.dumps(_post(client, "begin")),
            json.dumps(_judge(client, "1")),
            json.dumps(_post(client, "undo", rater="ann")),
        ]
        said.append(client.get("/secret", headers=ORIGIN).text)
        assert not any("secret-" in text for text in said)
        assert not any(isinstance(entry, ResultsRevealed) for entry in written)
        found = _post(client, "results", rater="ann", is_sure=True)
    assert found["models"] == ["secret-run-1", "secret-run-2"]
    assert [entry.open for entry in written if isinstance(entry, ResultsRevealed)] == [6]


@pytest.mark.parametrize("body", [{"rater": "ann"}, {"rater": "ann", "is_sure": False}])
def test_results_need_a_word_of_their_own(client: Client, written: list[JournalEntry], body: dict[str, Any]) -> None:
    _post(client, "results", 400, **body)
    assert written == [OPENED]


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "127.0.0.1",
        "127.0.0.1:8001",
        "localhost",
        "[::1]:8000",
        "127.0.0.1:8000.evil.example",
        "",
    ],
)
@pytest.mark.parametrize("path", ["/", "/review.js", "/api/turn"])
def test_a_foreign_host_is_refused(client: Client, host: str, path: str) -> None:
    response = client.get(path, headers={"Host": host})
    assert response.status_code == 421
    assert (
        client.post("/api/turn", json={"rater": "ann"}, headers={"Host": host, "Origin": f"http://{host}"}).status_code
        == 421
    )


@pytest.mark.parametrize(
    "origin",
    [
        None,
        "null",
        "http://evil.example",
        "https://127.0.0.1:8000",
        "http://127.0.0.1",
        "http://127.0.0.1:8001",
        "http://localhost:8000",
    ],
)
@pytest.mark.parametrize("name", APIS)
def test_a_post_without_our_own_origin_is_refused(
    client: Client, written: list[JournalEntry], origin: str | None, name: str
) -> None:
    headers = {} if origin is None else {"Origin": origin}
    assert client.post(f"/api/{name}", json={"rater": "ann"}, headers=headers).status_code == 403
    assert written == [OPENED]


def test_both_names_of_this_machine_may_be_used(client: Client) -> None:
    headers = {"Host": "localhost:8000", "Origin": "http://localhost:8000"}
    assert client.post("/api/turn", json={"rater": "ann"}, headers=headers).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_a_form_is_no_request(client: Client, kind: str) -> None:
    """Another site's form cannot send JSON without asking first."""
    response = client.post("/api/turn", content=b'{"rater": "ann"}', headers={**ORIGIN, "Content-Type": kind})
    assert response.status_code == 415


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_browser_that_says_another_site_asks_is_believed(client: Client, site: str) -> None:
    assert client.get("/", headers={"Sec-Fetch-Site": site}).status_code == 403
    assert client.get("/", headers={"Sec-Fetch-Site": "none"}).status_code == 200


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_other_methods_are_refused_without_a_word_to_other_origins(client: Client, method: str) -> None:
    response = client.request(method, "/api/turn", headers=ORIGIN)
    assert response.status_code == 405
    assert not any(name.startswith("access-control") for name in response.headers)


@pytest.mark.parametrize("name", APIS)
def test_nothing_is_asked_for_by_get(client: Client, name: str) -> None:
    assert client.get(f"/api/{name}").status_code == 405


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/pages/review.html",
        "/review.py",
        "/review.js/..%2fguard.py",
        "/static/../guard.py",
        "//etc/passwd",
    ],
)
def test_another_path_is_not_there(client: Client, path: str) -> None:
    assert client.get(path).status_code == 404


async def _pieces(*pieces: bytes) -> AsyncIterator[bytes]:
    """Sent without saying how long they are."""
    for piece in pieces:
        yield piece


def test_a_long_body_is_refused_and_one_at_the_limit_is_read(client: Client) -> None:
    long = b'{"rater": "' + b"x" * MAX_BODY_BYTES + b'"}'
    headers = {**ORIGIN, "Content-Type": "application/json"}
    assert client.post("/api/turn", content=long, headers=headers).status_code == 413
    assert client.post("/api/turn", content=_pieces(long[:40000], long[40000:]), headers=headers).status_code == 413
    fits = b'{"rater": "ann"}'.ljust(MAX_BODY_BYTES)
    assert client.post("/api/turn", content=fits, headers=headers).status_code == 200


@pytest.mark.parametrize("more", [{"X-Long": "x" * 100_000}, {f"X-{at}": "x" * 500 for at in range(40)}])
def test_long_headers_are_refused_and_those_at_the_limit_are_read(client: Client, more: dict[str, str]) -> None:
    assert client.get("/", headers=more).status_code == 431
    assert client.get("/?" + "x" * MAX_HEADER_BYTES).status_code == 431
    assert client.get("/", headers={"X-Long": "x" * (MAX_HEADER_BYTES - 500)}).status_code == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 50_000, b'{"rater": 7}', b'{"rater": "ann", "more": 1}', b"null"]
)
@pytest.mark.parametrize("name", ["turn", "verdict", "undo", "results", "login"])
def test_what_the_page_does_not_send_is_no_fault_of_ours(
    client: Client, written: list[JournalEntry], body: bytes, name: str
) -> None:
    response = client.post(f"/api/{name}", content=body, headers={**ORIGIN, "Content-Type": "application/json"})
    assert response.status_code == 400
    assert written == [OPENED]


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({"press": "3"}, 400),
        ({"reasons": [["rude"], []]}, 422),
        ({"reasons": [[]]}, 422),
        ({"note": "x" * 5000}, 400),
        ({"rater": " "}, 422),
        ({"item": "other"}, 409),
    ],
)
def test_a_decision_that_means_nothing_is_refused(
    client: Client, written: list[JournalEntry], more: dict[str, Any], status: int
) -> None:
    item = _post(client, "turn", rater="ann")["item"]["handle"]
    _post(client, "verdict", status, **{"rater": "ann", "item": item, "press": "1", "reasons": [[], []]} | more)
    assert written == [OPENED]


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/"), ("GET", "/review.js"), ("GET", "/nothing"), ("POST", "/api/begin"), ("PUT", "/")]
)
def test_every_answer_forbids_framing_sniffing_keeping_and_foreign_scripts(
    client: Client, method: str, path: str
) -> None:
    headers = client.request(method, path, headers=ORIGIN | {"Content-Type": "application/json"}, content=b"{}").headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert "unsafe" not in headers["content-security-policy"]
    assert (headers["x-content-type-options"], headers["cache-control"], headers["referrer-policy"]) == (
        "nosniff",
        "no-store",
        "no-referrer",
    )


def test_the_page_asks_for_nothing_from_elsewhere_and_has_no_script_of_its_own(client: Client) -> None:
    page = client.get("/").text
    assert page.count("<script") == 1
    assert "style=" not in page
    for path in ("/", "/review.js", "/review.css"):
        text = client.get(path).text
        assert "http://" not in text
        assert "https://" not in text
        assert "innerHTML" not in text


def test_a_verdict_that_was_not_kept_is_told() -> None:
    def no_room(_: JournalEntry) -> None:
        raise DiskFull("the disk is full", "free some space")

    with _client(Session(make_review_set(), [OPENED], no_room)) as client:
        assert "not saved: the disk is full" in _judge(client, "1", 507)["error"]
        assert _post(client, "turn", rater="ann")["judged"] == 0


def test_two_raters_judge_on_one_server(tmp_path: Path) -> None:
    with on_disk(make_single(4), tmp_path) as session, _client(session) as client:
        for rater, presses in {"ann": "1122", "bob": "1121"}.items():
            for press in presses:
                _judge(client, press, rater=rater, reasons=[[]])
        found = _post(client, "results", rater="ann", is_sure=True)
    assert [line["rater"] for line in found["raters"]] == ["ann", "bob"]
    assert found["agreement"][0]["n"] == 4
    assert found["faults"][0]["bad"]["n"] == 4


TOKEN = Token(secret="a-token-of-some-length", port=8000)


def test_with_a_token_nothing_is_answered_before_it_was_given() -> None:
    session, written = in_memory(make_review_set())
    with _client(session, token=TOKEN) as client:
        for name in APIS:
            if name != "login":
                _refused_by_token(client, name)
        assert client.get("/").status_code == 200
        _post(client, "login", 401, token="a-token-of-some-lengtH")
        _refused_by_token(client, "turn")
        response = client.post("/api/login", json={"token": TOKEN.secret}, headers=ORIGIN)
        assert response.status_code == 204
        cookie = response.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert TOKEN.secret not in cookie
        assert _post(client, "turn", rater="ann")["total"] == 6
    assert written == [OPENED]


def _refused_by_token(client: Client, name: str) -> None:
    assert client.post(f"/api/{name}", json={"rater": "ann"}, headers=ORIGIN).status_code == 401


@pytest.mark.parametrize(
    "cookie",
    [
        *(
            "finefit-8000=wrong",
            "finefit-8000=",
            "finefit-8000",
            "other=1",
            "finefit-8000=\xe9",
            '"',
            TOKEN.secret,
            f"finefit-8000={TOKEN.secret}",
        ),
        *(f"finefit-8001={TOKEN.session}", f"other={TOKEN.session}", f"finefit-8000={TOKEN.session}x"),
    ],
    ids=range(11),
)
def test_another_cookie_is_no_token(cookie: str) -> None:
    with _client(in_memory(make_review_set())[0], token=TOKEN) as client:
        headers: dict[str, Any] = {**ORIGIN, "Cookie": cookie.encode("latin-1")}
        assert client.post("/api/turn", json={"rater": "ann"}, headers=headers).status_code == 401


@pytest.mark.parametrize(
    "others",
    ["", 'a={"b": 1, "c": [2]}; ', "odd name=1; ", "=; ;; ", "finefit-8000=of-an-earlier-start; ", "\xe9=\xe9; "],
)
def test_a_cookie_is_found_among_odd_ones_of_other_programs(others: str) -> None:
    with _client(in_memory(make_review_set())[0], token=TOKEN) as client:
        headers: dict[str, Any] = {
            **ORIGIN,
            "Cookie": f"{others}{TOKEN.cookie.partition(';')[0]}; last=1".encode("latin-1"),
        }
        assert client.post("/api/turn", json={"rater": "ann"}, headers=headers).status_code == 200


def test_two_reviews_on_one_machine_keep_a_cookie_each() -> None:
    first, second = (Token(secret="x", port=port).cookie.partition("=")[0] for port in (8000, 8001))
    assert first != second


def test_a_token_shows_itself_to_nobody() -> None:
    assert TOKEN.secret not in repr(TOKEN)
    assert TOKEN.session not in repr(TOKEN)
    assert Token(secret="x", port=1).session != Token(secret="x", port=1).session


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("::1", True),
        ("127.1.2.3", True),
        ("0.0.0.0", False),
        ("192.168.0.4", False),
        ("box", False),
    ],
)
def test_loopback_is_known(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected


def test_names_are_exact_and_those_of_this_machine_where_it_listens_everywhere() -> None:
    assert names_of("127.0.0.1", 81) == ["127.0.0.1:81", "localhost:81"]
    assert names_of("::1", 81) == ["[::1]:81", "localhost:81"]
    assert names_of("192.168.0.4", 81) == ["192.168.0.4:81"]
    assert names_of("::1", 80) == ["[::1]", "localhost", "[::1]:80", "localhost:80"]  # a browser leaves this port away
    everywhere = names_of("0.0.0.0", 81)
    assert {"127.0.0.1:81", "localhost:81"} <= set(everywhere)
    assert not any(name.startswith("0.0.0.0") for name in everywhere)


def test_a_port_that_is_taken_is_the_users_to_change() -> None:
    with bound("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"127\.0\.0\.1:{port}") as refused, bound("127.0.0.1", port):
            pass
        assert "--port" in refused.value.remedy


@pytest.mark.parametrize("host", ["999.1.1.1", "192.0.2.1", "a\udcff", "::ffff::1", "a" * 70])
def test_a_host_that_is_not_of_this_machine_is_the_users_to_change(host: str) -> None:
    with pytest.raises(UserError, match="cannot listen on") as refused, bound(host, 0):
        pass
    assert "--host" in refused.value.remedy
