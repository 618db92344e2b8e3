"""Do something on all ranks or on rank 0, and raise a failure of any rank on every rank.

A rank that raised alone would leave the others waiting in their next collective until the time-out.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_sp.errors import CheckpointError

T = TypeVar("T")
U = TypeVar("U")


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks, ordered by rank. All ranks call it.

    Args:
        group: a group of all ranks; None: the default group.
    """
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def on_every_rank(purpose: str, action: Callable[[], T]) -> list[T]:
    """Call ``action`` on every rank and return all results by rank.

    Args:
        purpose: begins the message of a failure, for example "cannot write DIR".

    Raises:
        CheckpointError: on all ranks when any failed, naming the first that did.
    """
    return _values(purpose, gather(_Outcome.of(action)))


def on_rank_zero(purpose: str, action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call ``action`` on rank 0 and return its result on every rank.

    Raises:
        CheckpointError: on all ranks when it failed.
    """
    answer: list[Any] = [_Outcome.of(action) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(answer, src=0, group=group)
    outcome: _Outcome[T] = answer[0]
    return outcome.value_or_raise(purpose)


def gather_on_rank_zero(purpose: str, action: Callable[[], T], finish: Callable[[list[T]], U],
                        group: dist.ProcessGroup | None = None) -> U:
    """Call ``action`` on every rank, then ``finish`` with all results by rank on rank 0; return its result everywhere.

    The results travel to rank 0 only, because they can be large where there are many ranks.

    Raises:
        CheckpointError: on all ranks when ``action`` failed on any of them, or ``finish`` on rank 0.
    """
    is_zero = dist.get_rank() == 0
    outcomes: list[Any] | None = [None] * dist.get_world_size() if is_zero else None
    dist.gather_object(_Outcome.of(action), outcomes, dst=0, group=group)
    return on_rank_zero(purpose, lambda: finish(_values(purpose, outcomes or [])), group)


def scatter_from_rank_zero(purpose: str, value: T, divide: Callable[[list[T]], list[U]]) -> U:
    """Gather a value of every rank on rank 0, call ``divide`` there, and return to each rank its entry of the result.

    Raises:
        CheckpointError: on all ranks when ``divide`` failed.
    """
    is_zero, world = dist.get_rank() == 0, dist.get_world_size()
    values: list[Any] | None = [None] * world if is_zero else None
    dist.gather_object(value, values, dst=0)
    answers: list[Any] = [None] * world
    if is_zero:
        outcome: _Outcome[list[U]] = _Outcome.of(lambda: divide(values or []))
        parts: list[Any] = outcome.value or [None] * world
        answers = [_Outcome(part, outcome.error, outcome.kind) for part in parts]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, answers if is_zero else None, src=0)
    return cast(_Outcome[U], mine[0]).value_or_raise(purpose)


def _values(purpose: str, outcomes: list[_Outcome[T]]) -> list[T]:
    return [outcome.value_or_raise(f"{purpose}: rank {rank}") for rank, outcome in enumerate(outcomes)]


@dataclass(frozen=True)
class _Outcome(Generic[T]):
    """The result of an action on one rank, or its error.

    Attributes:
        value: the result of the action.
        error: the text of the action's error; "" when the action succeeded.
        kind: the class of the error if the action itself raised a CheckpointError, whose text is complete without the
            purpose; None for all other errors.
    """

    value: T | None = None
    error: str = ""
    kind: type[CheckpointError] | None = None

    @classmethod
    def of(cls, action: Callable[[], T]) -> _Outcome[T]:
        try:
            return cls(value=action())
        except CheckpointException as error:      # torch derives it from BaseException, not from Exception
            return cls._of_torch(error)
        except CheckpointError as error:
            return cls(error=str(error), kind=type(error))
        except Exception as error:      # file systems and torch raise many types
            return cls(error=error_in_words(error))

    @classmethod
    def _of_torch(cls, failure: CheckpointException) -> _Outcome[T]:
        """Return the failing ranks' own errors, which torch buries in a collection of tracebacks."""
        causes = {rank: cause for rank, (cause, _) in sorted(failure.failures.items())}
        for cause in causes.values():
            if isinstance(cause, CheckpointError):
                return cls(error=str(cause), kind=type(cause))
        errors = [f"on rank {rank}: {error_in_words(cause)}" for rank, cause in causes.items()]
        return cls(error="; ".join(errors[:4]) + (f" (and {len(errors) - 4} more ranks)" if len(errors) > 4 else ""))

    def value_or_raise(self, purpose: str) -> T:
        """Return the value, or raise the error.

        ``purpose`` is put before its text unless the error is a CheckpointError.
        """
        if self.error:
            raise self.kind(self.error) if self.kind else CheckpointError(f"{purpose}: {self.error}")
        return cast(T, self.value)


def error_in_words(error: BaseException) -> str:
    """Describe an error in one line.

    When the error, or an error that caused it, is a failed file operation, the line holds the file and the reason.
    Otherwise it holds the type and the first line of the error.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            file = f"{cause.filename}: " if cause.filename else ""
            cure = " (free space there, or give another --save)" if cause.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            return f"{file}{cause.strerror}{cure}"
        cause = cause.__cause__ or cause.__context__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
