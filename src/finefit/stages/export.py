"""A model taken elsewhere as a stage of a pipeline: the same as `finefit export`, into the stage's own folder."""

import logging
from pathlib import Path
from typing import Any

from finefit.artifacts.records import StageJob
from finefit.export.make import export_into
from finefit.export.subject import subject_of_stage
from finefit.spec.exports import parse_formats
from finefit.spec.stages import Export
from finefit.stages.worker import serve

log = logging.getLogger("finefit")


def make(job: StageJob, out: Path) -> dict[str, Any]:
    """Fills `out` with every format and export.json."""
    stage = job.stage
    assert isinstance(stage, Export)
    report = export_into(
        subject_of_stage(job.models["model"]),
        parse_formats(stage.to),
        out,
        onto=stage.onto,
        prompts=stage.prompts,
        with_modelfile=stage.ollama,
        accept=stage.accept,
        say=log.info,
    )
    return {
        "name": report.name,
        "prompts": report.prompts,
        "prompts_from": report.prompts_from,
        "exports": [
            {
                "format": one.format,
                "path": one.path,
                "bytes": sum(one.files.values()),
                "loaded_by": one.loaded_by,
                "kl": None if one.distance is None else one.distance.kl.value,
                "agreement": None if one.distance is None else one.distance.agreement.value,
                "problems": list(one.problems),
            }
            for one in report.exports
        ],
    }


if __name__ == "__main__":
    serve(make)
