"""AMR parsing: notation, sub-tasks, and Smatch over all pairs."""

from finefit.data.tasks.amr.task import amr_task, build_row, smatch_of_files

__all__ = ["amr_task", "build_row", "smatch_of_files"]
