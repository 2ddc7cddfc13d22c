import io
import os
import pickle
import random
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from finefit.data import images
from finefit.data.columns import RecordError
from finefit.data.images import MAX_PIXELS, ImageLocation, content_of, decode, find_image
from finefit.data.rows import Image, Message, Row
from tests.memory import peak_of


def _fill(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())


def _zip(path: Path, *names: str) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, f"zipped {name}")


def _content(root: Path, path: str) -> str:
    return content_of(Image(path=path, root=str(root))).decode()


def _file_fault(root: Path, path: str) -> str:
    with pytest.raises(RecordError) as caught:
        content_of(Image(path=path, root=str(root)))
    return str(caught.value)


def test_an_image_lies_at_its_path_or_in_a_folder_beside_the_data(tmp_path: Path) -> None:
    _fill(tmp_path, "1.png", "png/1.png", "png/2.png", "documents/3.png", "png/deep/4.png", ".hidden/5.png")
    assert [
        _content(tmp_path, path) for path in ("1.png", "2.png", "documents/3.png", "./png/../png/2.png", "deep/4.png")
    ] == ["1.png", "png/2.png", "documents/3.png", "png/2.png", "png/deep/4.png"]
    for path in ("5.png", "4.png", "3.gif"):
        assert _file_fault(tmp_path, path) == (
            f"{path} does not exist: looked in {tmp_path}, and in the folders and zips in it; name another place "
            "with images_root"
        )


def test_a_name_without_an_extension_stands_for_the_image_of_that_name(tmp_path: Path) -> None:
    _fill(tmp_path, "images/000215949X.jpg", "images/2.GIF", "images/v1.5.png", "images/3.json", "images/4")
    assert [_content(tmp_path, path) for path in ("000215949X", "2", "v1.5", "4")] == [
        "images/000215949X.jpg",
        "images/2.GIF",
        "images/v1.5.png",
        "images/4",
    ]
    assert "3 does not exist" in _file_fault(tmp_path, "3")
    _fill(tmp_path, "images/2.png")
    assert _file_fault(tmp_path, "2") == (
        f"2 may be {tmp_path}/images/2.png and {tmp_path}/images/2.GIF; name the one folder or zip with images_root"
    )


def test_what_lies_in_two_folders_is_not_guessed(tmp_path: Path) -> None:
    _fill(tmp_path, "train/1.png", "test/1.png")
    assert _file_fault(tmp_path, "1.png") == (
        f"1.png may be {tmp_path}/test/1.png and {tmp_path}/train/1.png; name the one folder or zip with images_root"
    )
    assert _content(tmp_path / "train", "1.png") == "train/1.png"


def test_zips_are_looked_into_where_no_folder_has_it(tmp_path: Path) -> None:
    _fill(tmp_path, "train_images/1.jpg")
    _zip(tmp_path / "all.zip", "train_images/1.jpg", "train_images/2.jpg", "3.jpg", "train_images/")
    assert [_content(tmp_path, path) for path in ("1.jpg", "2.jpg", "train_images/2.jpg", "3.jpg", "3")] == [
        "train_images/1.jpg",
        "zipped train_images/2.jpg",
        "zipped train_images/2.jpg",
        "zipped 3.jpg",
        "zipped 3.jpg",
    ]
    assert find_image(Image(path="2", root=str(tmp_path))) == ImageLocation(tmp_path / "all.zip", "train_images/2.jpg")
    assert "2.jpg does not exist" in _file_fault(tmp_path, "images/2.jpg")


def test_a_zip_may_be_the_root_itself(tmp_path: Path) -> None:
    _zip(tmp_path / "all.zip", "a/1.png", "b/1.png", "1.png", "a/2.png", "b/2.png")
    assert [_content(tmp_path / "all.zip", path) for path in ("1.png", "a/1.png")] == ["zipped 1.png", "zipped a/1.png"]
    assert _file_fault(tmp_path / "all.zip", "2.png").startswith(
        f"2.png may be a/2.png in {tmp_path}/all.zip and b/2.png in"
    )
    assert "is outside" in _file_fault(tmp_path / "all.zip", "../secret.png")


@pytest.mark.parametrize(
    "path", ["../secret.png", "png/../../secret.png", "/etc/passwd", "..", ".", "png/..", "a\0.png", "//etc/passwd"]
)
def test_a_path_that_leaves_its_root_is_refused(tmp_path: Path, path: str) -> None:
    _fill(tmp_path, "secret.png", "root/png/1.png")
    assert _file_fault(tmp_path / "root", path).endswith(
        (
            "is not a path",
            f"is outside of {tmp_path}/root, the root of its images; name another folder with images_root",
        )
    )


def test_a_whole_path_below_the_root_is_taken(tmp_path: Path) -> None:
    _fill(tmp_path, "png/1.png", "secret.png")
    assert _content(tmp_path, f"{tmp_path}/png/1.png") == "png/1.png"
    assert "is outside" in _file_fault(tmp_path / "png", f"{tmp_path}/secret.png")
    assert "is outside" in _file_fault(tmp_path / "png", f"{tmp_path}/png/../secret.png")


def test_links_of_the_user_are_followed(tmp_path: Path) -> None:
    _fill(tmp_path, "disk/1.png", "data/rows.json")
    (tmp_path / "data/images").symlink_to(tmp_path / "disk")
    assert _content(tmp_path / "data", "1.png") == "disk/1.png"


@pytest.mark.parametrize("path", ["x" * 5000, "\ud800.png", "a/b/c" * 100])
def test_a_name_that_no_file_can_have_is_not_there(tmp_path: Path, path: str) -> None:
    assert "does not exist" in _file_fault(tmp_path, path)


def test_a_folder_is_no_image_and_a_root_that_is_gone_is_told(tmp_path: Path) -> None:
    (tmp_path / "1.png").mkdir()
    assert "1.png does not exist" in _file_fault(tmp_path, "1.png")
    assert (
        _file_fault(tmp_path / "gone", "1.png")
        == f"{tmp_path}/gone, the root of the images, cannot be read: No such file or directory"
    )


def test_files_that_come_later_are_found(tmp_path: Path) -> None:
    _fill(tmp_path, "rows.json")
    assert "does not exist" in _file_fault(tmp_path, "1.png")
    os.utime(tmp_path, ns=(0, 0))
    _fill(tmp_path, "png/1.png")
    assert _content(tmp_path, "1.png") == "png/1.png"
    _zip(tmp_path / "a.zip", "2.png")
    assert _content(tmp_path, "2.png") == "zipped 2.png"
    _zip(tmp_path / "a.zip", "3.png")
    os.utime(tmp_path / "a.zip", ns=(1, 1))
    assert _content(tmp_path, "3.png") == "zipped 3.png"


def test_a_broken_zip_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(b"PK no zip")
    assert _file_fault(tmp_path, "1.png") == f"{tmp_path}/a.zip is not a zip that can be read: File is not a zip file"
    _zip(tmp_path / "b.zip", *(f"{n}.png" for n in range(50)))
    whole = bytearray((tmp_path / "b.zip").read_bytes())
    at = whole.index(b"zipped") if b"zipped" in whole else 40
    whole[at : at + 8] = b"\xff" * 8
    (tmp_path / "a.zip").write_bytes(whole)
    (tmp_path / "b.zip").unlink()
    assert _file_fault(tmp_path, "0.png").startswith(f"0.png cannot be read from {tmp_path}/a.zip: ")


def test_an_encrypted_image_is_told(tmp_path: Path) -> None:
    _zip(tmp_path / "a.zip", "1.png")
    whole = bytearray((tmp_path / "a.zip").read_bytes())
    whole[whole.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "a.zip").write_bytes(whole)
    assert _file_fault(tmp_path, "1.png") == f"1.png in {tmp_path}/a.zip is encrypted"


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_BYTES", 100)
    _zip(tmp_path / "a.zip", "zipped.png" + "x" * 100)
    (tmp_path / "1.png").write_bytes(b"x" * 101)
    (tmp_path / "2.png").write_bytes(b"x" * 100)
    problem = "1.png has more than 100 bytes, and no larger image is read; save it smaller, or leave its row out"
    assert _file_fault(tmp_path, "1.png") == problem
    assert "has more than 100 bytes" in _file_fault(tmp_path, "zipped.png" + "x" * 100)
    assert _content(tmp_path, "2.png") == "x" * 100


def test_bytes_need_no_file(tmp_path: Path) -> None:
    assert content_of(Image(data=b"abc", root=str(tmp_path / "gone"))) == b"abc"


MESSAGES = (Message("user", "What colour?"), Message("assistant", "red"))
CORNERS = {"red": (255, 0, 0), "lime": (0, 255, 0), "blue": (0, 0, 255), "black": (0, 0, 0)}
SIZE = (32, 16)
SHARP: dict[str, dict[str, Any]] = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}}


def _drawn_image(mode: str = "RGB") -> PIL.Image.Image:
    """A quarter of each colour: red and lime above, blue and black below."""
    image = PIL.Image.new("RGB", SIZE)
    for at, colour in enumerate(CORNERS.values()):
        image.paste(colour, (at % 2 * 16, at // 2 * 8, at % 2 * 16 + 16, at // 2 * 8 + 8))
    return image.convert(mode)


def _encoded(image: PIL.Image.Image, form: str = "PNG", **options: Any) -> bytes:
    written = io.BytesIO()
    image.save(written, form, **options)
    return written.getvalue()


def _row(*images: Image) -> Row:
    return Row(source="val.json", number=7, part=2, messages=MESSAGES, images=images)


def _fault(data: bytes, *, max_pixels: int = MAX_PIXELS) -> str:
    with pytest.raises(RecordError) as caught:
        decode(Image(data=data), max_pixels=max_pixels)
    return str(caught.value)


def _colours(image: PIL.Image.Image) -> list[tuple[int, ...]]:
    """In the middle of each quarter."""
    width, height = image.size
    return [tuple(np.asarray(image)[height * y // 4, width * x // 4]) for y in (1, 3) for x in (1, 3)]


def _is_near(found: list[tuple[int, ...]], wanted: list[tuple[int, ...]], tolerance: int = 4) -> bool:
    return bool(np.abs(np.array(found, int) - np.array(wanted, int)).max() <= tolerance)


@pytest.mark.parametrize(
    ("form", "mode", "options"),
    [
        *(("PNG", "RGB", {}), ("PNG", "P", {}), ("PNG", "RGBA", {}), ("GIF", "P", {}), ("BMP", "RGB", {})),
        *(("PPM", "RGB", {}), ("TIFF", "RGB", {}), ("TIFF", "CMYK", {}), ("WEBP", "RGB", {"lossless": True})),
        *(("JPEG", "RGB", {"quality": 100, "subsampling": 0}), ("JPEG", "CMYK", {"quality": 100, "subsampling": 0})),
    ],
)
def test_every_form_shows_the_same_image_in_rgb(form: str, mode: str, options: dict[str, Any]) -> None:
    data = _encoded(_drawn_image(mode), form, **options)
    shown = decode(Image(data=data))
    assert (shown.mode, shown.size) == ("RGB", SIZE)
    assert _is_near(_colours(shown), list(CORNERS.values()))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize(
    ("orientation", "corners"),
    [
        (1, ["red", "lime", "blue", "black"]),
        (2, ["lime", "red", "black", "blue"]),
        (3, ["black", "blue", "lime", "red"]),
        (4, ["blue", "black", "red", "lime"]),
        (5, ["red", "blue", "lime", "black"]),
        (6, ["blue", "red", "black", "lime"]),
        (7, ["black", "lime", "blue", "red"]),
        (8, ["lime", "black", "red", "blue"]),
    ],
)
def test_an_image_is_turned_as_its_camera_was_held(form: str, orientation: int, corners: list[str]) -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    image = Image(data=_encoded(_drawn_image(), form, exif=exif, **SHARP.get(form, {})))
    shown = decode(image)
    assert _is_near(_colours(shown), [CORNERS[colour] for colour in corners])
    assert shown.size == (SIZE if orientation < 5 else SIZE[::-1])


def test_what_is_transparent_is_laid_on_white() -> None:
    image = _drawn_image("RGBA")
    image.putalpha(PIL.Image.new("L", SIZE, 0))
    assert _colours(decode(Image(data=_encoded(image)))) == [(255, 255, 255)] * 4
    image.putalpha(PIL.Image.new("L", SIZE, 128))
    assert _is_near(
        _colours(decode(Image(data=_encoded(image)))),
        [(255, 127, 127), (127, 255, 127), (127, 127, 255), (127, 127, 127)],
    )
    grey = PIL.Image.new("LA", SIZE, (0, 0))
    assert _colours(decode(Image(data=_encoded(grey)))) == [(255, 255, 255)] * 4


def test_a_colour_that_a_file_calls_transparent_is_white() -> None:
    data = _encoded(_drawn_image(), transparency=CORNERS["black"])
    assert _colours(decode(Image(data=data))) == [*list(CORNERS.values())[:3], (255, 255, 255)]
    palette = _drawn_image("P")
    index = int(np.asarray(palette)[12, 24])
    assert _colours(decode(Image(data=_encoded(palette, "GIF", transparency=index))))[3] == (255, 255, 255)


def test_sixteen_bits_are_taken_as_eight() -> None:
    grey = np.repeat(np.array([[0x0000, 0x40FF, 0x8000, 0xFFFF]], np.uint16), 4, axis=0)
    shown = decode(Image(data=_encoded(PIL.Image.fromarray(grey))))
    assert np.asarray(shown)[0].tolist() == [[value] * 3 for value in (0x00, 0x40, 0x80, 0xFF)]


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_without_an_agreed_range_are_refused(mode: str) -> None:
    assert "pixels of 32 bits" in _fault(_encoded(_drawn_image("L").convert(mode), "TIFF"))


def test_of_an_animation_the_first_frame_is_shown() -> None:
    second = PIL.Image.new("RGB", SIZE, "white")
    for form in ("GIF", "PNG", "WEBP"):
        data = _encoded(_drawn_image(), form, save_all=True, append_images=[second], **SHARP.get(form, {}))
        assert _is_near(_colours(decode(Image(data=data))), list(CORNERS.values()))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", r"its image is not an image that can be read: its 0 bytes begin with b''"),
        (b"<html>404</html>", r"its image is not an image that can be read: its 16 bytes begin with b'<html>40'"),
        (_encoded(_drawn_image())[:60], "its image cannot be decoded: .+"),
        (_encoded(_drawn_image(), "JPEG")[:-30], "its image cannot be decoded: .*truncated.*"),
        (_encoded(_drawn_image(), "TIFF")[:100], "its image .+"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "its image is not an image that can be read.*"),
    ],
)
def test_bytes_that_are_no_whole_image_are_told(data: bytes, reason: str) -> None:
    with pytest.raises(RecordError, match=rf"\A{reason}\Z"):
        decode(Image(data=data))


def _png(width: int, height: int) -> bytes:
    """Of any size that a head can name, with hardly any pixels behind it."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(0, 0), (0, 5), (5, 0)])
def test_an_image_without_pixels_is_refused(size: tuple[int, int]) -> None:
    gif = b"GIF89a" + struct.pack("<HHBBB", *size, 0, 0, 0) + b";"
    bmp = bytearray(_encoded(_drawn_image(), "BMP"))
    bmp[18:26] = struct.pack("<ii", *size)
    for data in (_png(*size), gif, bytes(bmp)):
        assert _fault(data) == f"its image is empty: it has {size[0]} x {size[1]} pixels"
    assert _fault(b"P6 %d %d 255\n" % size).startswith("its image ")


@pytest.mark.parametrize("size", [(9_500, 9_500), (20_000, 20_000), (200_000, 200_000)])
def test_an_image_that_would_fill_the_memory_is_refused_before_it_is_decoded(size: tuple[int, int]) -> None:
    assert _fault(_png(*size)).startswith("its image has too many pixels: ")


def test_a_lower_limit_may_be_set() -> None:
    data = _encoded(_drawn_image())
    assert decode(Image(data=data), max_pixels=512).size == SIZE
    assert _fault(data, max_pixels=511) == "its image has too many pixels: 32 x 16, and at most 511 are decoded"


def test_damaged_bytes_are_an_image_or_a_fault_and_nothing_else() -> None:
    choose = random.Random(7)
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    kinds = (("RGBA", "PNG"), ("P", "GIF"), ("CMYK", "JPEG"), ("RGB", "WEBP"), ("RGB", "BMP"), ("L", "PPM"))
    forms = [*(_encoded(_drawn_image(mode), form) for mode, form in kinds), _encoded(_drawn_image(), "JPEG", exif=exif)]
    refused = 0
    for _ in range(1500):
        data = bytearray(choose.choice(forms))
        for _ in range(choose.randrange(1, 5)):
            data[choose.randrange(min(len(data), choose.choice((20, 80, 1000))))] = choose.randrange(256)
        image = Image(data=bytes(data[: choose.randrange(len(data))] if choose.random() < 0.2 else data))
        try:
            assert decode(image, max_pixels=1 << 20).mode == "RGB"
        except RecordError:
            refused += 1
    assert 500 < refused < 1500


def test_broken_notes_beside_an_image_do_not_break_it() -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    data = bytearray(_encoded(_drawn_image(), "JPEG", exif=exif))
    at = data.index(b"Exif\0\0") + 14  # the number of tags
    data[at : at + 2] = b"\xff\xff"
    assert decode(Image(data=bytes(data))).mode == "RGB"


def test_decoding_needs_no_torch_and_its_inputs_travel_to_spawned_processes() -> None:
    code = "import sys; import finefit.data.images; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert pickle.loads(pickle.dumps(_row(Image(path="a.png", root="x")))) == _row(Image(path="a.png", root="x"))


def test_a_large_image_with_transparency_is_in_memory_no_more_than_twice(tmp_path: Path) -> None:
    path, pixels = tmp_path / "large.png", 5_000 * 6_000
    PIL.Image.new("RGBA", (5_000, 6_000), (255, 0, 0, 128)).save(path, compress_level=1)
    setup = "from finefit.data.images import decode; from finefit.data.rows import Image"
    code = "assert decode(Image(path=Path(sys.argv[1]).name, root=str(Path(sys.argv[1]).parent))).mode == 'RGB'"
    assert peak_of(code, path, setup=setup) < 10 * pixels  # 4 bytes each, and as many for the result
