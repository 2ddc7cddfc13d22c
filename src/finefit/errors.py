"""What can go wrong, by the boundary that was crossed. Each type carries the exit code of the command line.

FinefitError                   70  a fault of ours, if it reaches the user bare
├── UserError                   2  the user can fix it
│   ├── SpecError                  the spec file or an override
│   ├── DataError                  a row or a data file
│   ├── ModelError                 weights, tokenizer, adapter targets
│   │   └── HubUnreachable         files that are not here, and no connection to fetch them
│   ├── MissingPackage             one that only some specs need
│   └── RunError                   a run directory: locked, changed inputs, a foreign checkpoint
│       └── OtherVersion           a record of another version of finefit
├── FindingError                1  the run was stopped by what it found
│   └── Diverged                   a loss or gradient that is not finite
└── Resumable                   3  stopped early; the same command goes on
    ├── Interrupted                a signal
    ├── DiskFull                   no room for a checkpoint
    └── WorkerDied                 a child process was killed
"""

from typing import ClassVar


class FinefitError(Exception):
    """`problem` says what is wrong with the values and why it matters, `remedy` what to do."""

    exit_code: ClassVar[int] = 70

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.problem}\n{self.remedy}" if self.remedy else self.problem


class UserError(FinefitError):
    exit_code = 2


class SpecError(UserError):
    pass


class DataError(UserError):
    pass


class ModelError(UserError):
    pass


class HubUnreachable(ModelError):
    pass


class MissingPackage(UserError):
    pass


class RunError(UserError):
    pass


class OtherVersion(RunError):
    pass


class FindingError(FinefitError):
    exit_code = 1


class Diverged(FindingError):
    pass


class Resumable(FinefitError):
    exit_code = 3


class Interrupted(Resumable):
    pass


class DiskFull(Resumable):
    pass


class WorkerDied(Resumable):
    pass


def first_line(error: BaseException) -> str:
    """The first line of what an error says; the name of its type where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


_OUT_OF_MEMORY = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch's allocator, a library that bypasses it, or the host ran out of memory. torch's error type is known
    by its name, since this module never imports torch."""
    is_torch = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    return is_torch or isinstance(error, MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY)
