"""The progress of a run for a callback, with no terminal. What is told is read from the run's records, as in `live`."""

from pathlib import Path
from typing import TYPE_CHECKING

from finefit.artifacts.records import FinishedStage
from finefit.artifacts.rundir import RunDir
from finefit.progress import OnProgress, Progress
from finefit.report.layout import clock
from finefit.report.live import RunFollower, append_line, describe_evaluating
from finefit.report.stage_summary import summary_lines

if TYPE_CHECKING:
    from finefit.run.staleness import StageDecision


class CallbackView:
    """Tells the callback of every change of a training or an evaluation, and writes the events to the run's log."""

    def __init__(self, run: RunDir, progress: OnProgress, *, log: Path | None = None, evaluates: bool = False) -> None:
        self._follower, self._progress, self._log, self._evaluates = RunFollower(run), progress, log, evaluates
        self._words = ""

    def __enter__(self) -> "CallbackView":
        return self

    def __exit__(self, *_: object) -> None:
        self.tick()

    def tick(self) -> None:
        for line in self._follower.news():
            self.say(line)
        now = describe_evaluating(self._follower.where) or (None if self._evaluates else self._follower.training())
        if now is not None and now.words != self._words:
            self._words = now.words
            self._progress(now)

    def say(self, line: str) -> None:
        self._progress(Progress(subject="news", words=line))
        if self._log is not None and append_line(self._log, line) is not None:
            self._log = None


class CallbackProgress:
    """Tells the callback which stage of a run begins and ends, and what its training does."""

    def __init__(self, run: RunDir, progress: OnProgress) -> None:
        self._run, self._progress = run, progress

    def start(self) -> None:
        self.say(f"run {self._run.path}")

    def begin(self, decision: "StageDecision", number: int, count: int) -> None:
        self.say(f"stage {number}/{count}  {decision.name} ({decision.kind}): {decision.reason}")

    def training(self, run: RunDir) -> CallbackView:
        return CallbackView(run, self._progress, log=run.log)

    def say(self, line: str) -> None:
        self._progress(Progress(subject="news", words=line))

    def end(self, decision: "StageDecision", done: FinishedStage) -> None:
        if decision.action != "run":
            return self.say(f"stage {decision.name} ({decision.kind}) is {decision.action}: {decision.reason}")
        for line in summary_lines(done.kind, done.summary):
            self.say(line)
        return self.say(f"stage {decision.name} ended after {clock(done.seconds)}")
