"""An export is published whole and proved, or not at all, whatever strikes it."""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from finefit.artifacts.export_records import EXPORT, ExportReport
from finefit.artifacts.records import read_record
from finefit.errors import DiskFull, FindingError, ModelError, RunError
from finefit.export import gguf, make, merged
from finefit.export.make import export
from finefit.export.subject import ExportSubject, open_subject
from finefit.report.export import show_export
from finefit.spec.exports import GGUF_BITS, ExportFormat, export_bytes, parse_formats
from tests.conftest import make_tokenizer
from tests.faults import die_at_operation, fill_disk, record_operations, small_disk
from tests.forks import FORKS
from tests.merged_models import make_family, save_adapter

torch.set_num_threads(1)
MERGED = parse_formats(["merged"])
KILLS = 10


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("trained")
    make_family("llama", tie_word_embeddings=False).save_pretrained(place / "base")
    make_tokenizer().save_pretrained(place / "base")
    save_adapter(place / "adapter", place / "base", target_modules=["q_proj", "v_proj"])
    make_tokenizer().save_pretrained(place / "adapter")
    return place / "adapter"


@pytest.fixture
def subject(adapter: Path) -> ExportSubject:
    return open_subject(str(adapter))


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_formats_are_proved_and_published_together(subject: ExportSubject, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = export(subject, parse_formats(["merged:fp32,merged:bf16", "adapter"]), out, prompts=2)
    assert [one.format for one in report.exports] == ["merged:fp32", "merged:bf16", "adapter"]
    assert [one.problems for one in report.exports] == [(), (), ()]
    assert all(one.distance is not None and one.distance.kl.value <= one.bound.kl for one in report.exports)
    assert read_record(out / EXPORT, ExportReport) == report
    assert {name for one in report.exports for name in one.files} | {EXPORT, "README.md"} == {
        path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()
    }
    assert AutoModelForCausalLM.from_pretrained(out / "merged-bf16", dtype="auto").dtype == torch.bfloat16
    assert hidden(tmp_path) == []


def spoiled(write: Callable[..., Any]) -> Callable[..., Any]:
    """Merges nothing, as converters have done that did not know an adapter."""

    def bare(subject: ExportSubject, base: merged.MergeBase, out: Path, precision: str) -> Any:
        from dataclasses import replace

        return write(replace(subject, adapter=None), base, out, precision)

    return bare


def test_what_is_not_the_trained_model_is_refused_and_accepted_only_on_demand(
    subject: ExportSubject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merged, "write_merged_folder", spoiled(merged.write_merged_folder))
    with pytest.raises(FindingError) as refused:
        export(subject, MERGED, tmp_path / "out", prompts=2)
    assert refused.value.exit_code == 1
    assert "--accept" in refused.value.remedy
    assert not list(tmp_path.iterdir())
    report = export(subject, MERGED, tmp_path / "out", prompts=2, accept=True)
    assert report.accepted == ("merged:fp32",)
    assert report.exports[0].problems


def test_the_same_export_is_replaced_and_anything_else_is_left(subject: ExportSubject, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(subject, MERGED, out, prompts=1)
    export(subject, MERGED, out, prompts=2)
    assert read_record(out / EXPORT, ExportReport).prompts == 2
    for formats, place in ((parse_formats(["adapter"]), out), (MERGED, tmp_path)):
        before = sorted(path.name for path in place.iterdir())
        with pytest.raises(RunError):
            export(subject, formats, place, prompts=1)
        assert sorted(path.name for path in place.iterdir()) == before


def test_of_two_exports_to_one_place_the_first_alone_goes_on(subject: ExportSubject, tmp_path: Path) -> None:
    refused: list[str] = []

    def export_again(_: str) -> None:
        if not refused:
            with pytest.raises(RunError, match="another process") as found:
                export(subject, MERGED, tmp_path / "out", prompts=1)
            refused.append(found.value.remedy)

    report = export(subject, MERGED, tmp_path / "out", prompts=1, say=export_again)
    assert refused
    (made,) = report.exports
    assert all((tmp_path / "out" / name).stat().st_size == size for name, size in made.files.items())
    assert hidden(tmp_path) == []


def _export_in_child(adapter: Path, out: Path, prepare: str, argument: int | str) -> None:
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 for the rest of this process
    if prepare == "die":
        die_at_operation(out.parent, int(argument))
    else:
        record_operations(out.parent, Path(str(argument)))
    export(open_subject(str(adapter)), MERGED, out, prompts=1)


def _run(*arguments: Any) -> int:
    process = FORKS.Process(target=_export_in_child, args=arguments)
    process.start()
    process.join(300)
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.slow
def test_a_kill_leaves_nothing_half_made_and_the_same_command_finishes(adapter: Path, tmp_path: Path) -> None:
    trace, place = tmp_path / "operations", tmp_path / "place"
    place.mkdir()
    assert _run(adapter, place / "out", "record", str(trace)) == 0
    count = len(trace.read_text().splitlines())
    assert count > KILLS
    shutil.rmtree(place / "out")
    for number in range(KILLS):
        code = _run(adapter, place / "out", "die", number * count // KILLS)
        assert code == -signal.SIGKILL
        assert not (place / "out").exists() or read_record(place / "out" / EXPORT, ExportReport).exports
        shutil.rmtree(place / "out", ignore_errors=True)
    export(open_subject(str(adapter)), MERGED, place / "out", prompts=1)
    assert hidden(place) == []
    assert read_record(place / "out" / EXPORT, ExportReport).exports[0].problems == ()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 8 << 20) as place:
        yield place


@pytest.mark.parametrize("checks_first", [True, False], ids=["before it starts", "while it writes"])
def test_a_full_disk_leaves_nothing_and_the_same_command_finishes(
    subject: ExportSubject, disk: Path, monkeypatch: pytest.MonkeyPatch, *, checks_first: bool
) -> None:
    fill_disk(disk, leave_pages=12)
    with monkeypatch.context() as patch:
        if not checks_first:
            patch.setattr(make, "require_room", lambda *_, **__: None)
        with pytest.raises(DiskFull):
            export(subject, MERGED, disk / "out", prompts=1)
    assert [path.name for path in disk.iterdir()] == ["filler"]
    (disk / "filler").unlink()
    with monkeypatch.context() as patch:  # the slack that is asked for is larger than this disk
        patch.setattr(make, "require_room", lambda *_, **__: None)
        assert export(subject, MERGED, disk / "out", prompts=1).exports[0].problems == ()


def test_a_model_larger_than_memory_is_published_with_its_files_compared_and_only_if_accepted(
    subject: ExportSubject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce = psutil.virtual_memory()._replace(available=10_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: scarce)
    with pytest.raises(FindingError) as refused:
        export(subject, MERGED, tmp_path / "out", prompts=1)
    assert "10,000" in refused.value.problem
    assert "--accept" in refused.value.remedy
    assert not list(tmp_path.iterdir())
    report = export(subject, MERGED, tmp_path / "out", prompts=1, accept=True)
    (one,) = report.exports
    assert (report.computed_in, report.accepted) == (None, ("merged:fp32",))
    assert (one.distance, one.problems) == (None, (make.NOT_COMPARED,))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").num_parameters() == report.parameters
    assert "No program has loaded them" in (tmp_path / "out" / "README.md").read_text()
    assert any("by files alone" in str(line) for line in show_export(report, out="out"))
    monkeypatch.setattr(merged, "write_merged_folder", spoiled(merged.write_merged_folder))
    (spoilt,) = export(subject, MERGED, tmp_path / "spoilt", prompts=1, accept=True).exports
    assert any("the adapter is not in them" in problem for problem in spoilt.problems)


def test_a_whole_model_has_no_adapter_to_export(subject: ExportSubject, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        export(open_subject(str(subject.base)), parse_formats(["adapter"]), tmp_path / "out")
    with pytest.raises(ModelError):
        export(subject, MERGED, tmp_path / "out", with_modelfile=True)


def test_every_kind_of_gguf_that_can_be_made_can_be_named() -> None:
    assert set(GGUF_BITS) == set(gguf.KINDS)


@pytest.mark.parametrize("text", ["merged:q8_0", "gguf:fp32", "adapter:bf16", "onnx", "", "gguf-lora:q8_0"])
def test_a_format_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text or "no format"):
        parse_formats([text])


def test_disk_is_counted_with_what_conversions_start_from() -> None:
    def of(*texts: str) -> int:
        return export_bytes(parse_formats(texts), 8, stored_bits=16.0)

    assert of("merged") == 16
    assert of("merged:fp32") == 32
    assert of("gguf:bf16") == 16 + 16  # the merged model
    assert of("gguf:bf16", "merged:bf16") == of("gguf:bf16")
    assert of("gguf:q4_0") > 16 + 16  # and a file in 16 bits
    assert str(ExportFormat("gguf", "q8_0")) == "gguf:q8_0"
