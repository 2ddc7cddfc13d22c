"""The stage exports what `finefit export` would, and its summary shows the proof."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from finefit.artifacts.export_records import EXPORT, ExportReport
from finefit.artifacts.records import StageJob, WiredModel, read_record
from finefit.errors import SpecError
from finefit.report.stage_summary import summary_lines
from finefit.spec.load import parse_any
from finefit.spec.models import FolderModel
from finefit.spec.pipeline import Pipeline
from finefit.spec.stages import Export
from finefit.stages.export import make
from tests.conftest import make_tokenizer
from tests.merged_models import make_family, save_adapter

torch.set_num_threads(1)
STAGE = {"kind": "export", "model": {"kind": "folder", "path": "base"}, "to": ("merged", "adapter"), "prompts": 2}


def test_the_output_is_a_proved_export(tmp_path: Path) -> None:
    make_family("llama").save_pretrained(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "base", target_modules=["q_proj"])
    for folder in (tmp_path / "base", adapter):
        make_tokenizer().save_pretrained(folder)
    out = tmp_path / "out"
    out.mkdir()
    model = FolderModel(kind="folder", path=str(tmp_path / "base"))
    job = StageJob(
        name="take",
        pipeline="p",
        seed=1,
        device="cpu",
        precision="fp32",
        base=str(tmp_path),
        stage=Export.model_validate(STAGE),
        models={"model": WiredModel(model=model, adapter=str(adapter))},
    )
    summary = make(job, out)
    report = read_record(out / EXPORT, ExportReport)
    assert [one["format"] for one in summary["exports"]] == [one.format for one in report.exports]
    assert [one.problems for one in report.exports] == [(), ()]
    assert not (out / ".work").exists()
    assert all(one.format in line for one, line in zip(report.exports, summary_lines("export", summary), strict=True))


@pytest.mark.parametrize("to", [("merged:q8_0",), ("nothing",), ("gguf", "gguf:q8_0"), ()])
def test_formats_are_checked_when_the_spec_is_read(to: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError):
        Export.model_validate({**STAGE, "to": to})


def test_an_adapter_is_only_exported_where_one_is_trained() -> None:
    text = """\
name: p
stages:
  whole:
    kind: train
    model: {kind: folder, path: base}
    tuning: {kind: full}
    data: {train: [{path: train.jsonl}]}
  take: {kind: export, model: {kind: stage, name: whole}, to: [FORM]}
"""
    assert Pipeline.of(parse_any(text.replace("FORM", "merged"), where="spec.yaml")).stages["take"].kind == "export"
    with pytest.raises(SpecError, match="adapter"):
        parse_any(text.replace("FORM", "adapter"), where="spec.yaml")
