"""The page shows what a item is about: images of the review's own items, by their digests; one that is gone is told,
and nothing else is served."""

import hashlib
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import PIL.Image
import pytest

from finefit.review.items import ReviewImage, ReviewSet
from finefit.web.server import Token
from tests.clients import ORIGIN, Client
from tests.reviews import in_memory, make_review_set
from tests.vision_models import digit_image
from tests.web.test_review_server import _client, _post


def _exhibit(path: Path) -> ReviewImage:
    return ReviewImage(name=path.name, sha256=hashlib.sha256(path.read_bytes()).hexdigest(), path=path)


@pytest.fixture
def review_set(tmp_path: Path) -> ReviewSet:
    """Of one item with two images, of which the second is transparent and lies on its side."""
    plain, turned = tmp_path / "plain.png", tmp_path / "turned.png"
    digit_image(4, size=(48, 32), seed=1).save(plain)
    notes = PIL.Image.Exif()
    notes[0x0112] = 6
    PIL.Image.new("RGBA", (30, 20), (0, 0, 0, 0)).save(turned, exif=notes)
    whole = make_review_set(2)
    return replace(whole, items=(replace(whole.items[0], images=(_exhibit(plain), _exhibit(turned))), whole.items[1]))


@pytest.fixture
def client(review_set: ReviewSet) -> Iterator[Client]:
    with _client(in_memory(review_set)[0]) as client:
        yield client


def test_an_image_is_served_by_its_digest_as_the_model_was_shown_it(client: Client, review_set: ReviewSet) -> None:
    shown = []
    for image in review_set.items[0].images:
        response = client.get(f"/api/image/{image.sha256}")
        assert (response.status_code, response.headers["content-type"]) == (200, "image/png")
        assert response.headers["x-content-type-options"] == "nosniff"
        shown.append(PIL.Image.open(io.BytesIO(response.content)))
    assert shown[0].tobytes() == digit_image(4, size=(48, 32), seed=1).tobytes()
    assert shown[1].size == (20, 30)  # turned as its notes say
    assert shown[1].getcolors() == [(600, (255, 255, 255))]  # and laid on white


def test_the_turn_names_images_and_no_place_where_they_lie(
    client: Client, review_set: ReviewSet, tmp_path: Path
) -> None:
    turns = [_post(client, "turn", rater=name) for name in ("ann", "ben", "cleo", "dan", "eve", "fay")]
    faces = [turn["item"] for turn in turns if turn["item"]["images"]]
    assert faces
    assert [image["sha256"] for image in faces[0]["images"]] == [image.sha256 for image in review_set.items[0].images]
    assert str(tmp_path) not in str(turns)


@pytest.mark.parametrize("asked", ["0" * 64, "..%2f..%2fetc%2fpasswd", "%2fetc%2fpasswd", "plain.png"])
def test_nothing_else_can_be_asked_for(client: Client, asked: str) -> None:
    response = client.get(f"/api/image/{asked}")
    assert response.status_code == 404
    assert "root:" not in response.text


def test_a_stranger_gets_no_image(review_set: ReviewSet) -> None:
    with _client(in_memory(review_set)[0], token=Token(secret="s" * 24, port=8000)) as client:
        assert client.get(f"/api/image/{review_set.items[0].images[0].sha256}").status_code == 401
        client.post("/api/login", json={"token": "s" * 24}, headers=ORIGIN)
        assert client.get(f"/api/image/{review_set.items[0].images[0].sha256}").status_code == 200


def test_an_image_that_is_gone_another_or_none_is_told(client: Client, review_set: ReviewSet) -> None:
    image = review_set.items[0].images[0]
    assert image.path is not None
    image.path.write_bytes(b"another")
    response = client.get(f"/api/image/{image.sha256}")
    assert (response.status_code, response.json()["error"].split(":")[0]) == (
        410,
        "plain.png has changed since it was answered",
    )
    image.path.unlink()
    response = client.get(f"/api/image/{image.sha256}")
    assert (response.status_code, response.json()["error"]) == (
        410,
        "plain.png is no longer there (No such file or directory)",
    )


def test_bytes_that_were_never_an_image_are_told(tmp_path: Path) -> None:
    path = tmp_path / "page.png"
    path.write_bytes(b"<script>alert(1)</script>")
    whole = make_review_set(1)
    with _client(in_memory(replace(whole, items=(replace(whole.items[0], images=(_exhibit(path),)),)))[0]) as client:
        response = client.get(f"/api/image/{_exhibit(path).sha256}")
        assert response.status_code == 410
        assert "page.png is not an image that can be read" in response.json()["error"]
