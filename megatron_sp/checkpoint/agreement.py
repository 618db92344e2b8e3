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


def gather(value: T) -> list[T]:
    """Return the values of all ranks, ordered by rank. All ranks call it."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_every_rank(purpose: str, action: Callable[[], T]) -> list[T]:
    """Call ``action`` on every rank and return all results by rank.

    Args:
        purpose: begins the message of a failure, for example "cannot write DIR".

    Raises:
        CheckpointError: on all ranks when any failed, naming the first that did.
    """
    outcomes = gather(_Outcome.of(action))
    for rank, outcome in enumerate(outcomes):
        if outcome.error:
            raise CheckpointError(outcome.error if outcome.is_complete_message
                                  else f"{purpose}: rank {rank}: {outcome.error}")
    return [cast(T, outcome.value) for outcome in outcomes]


def on_rank_zero(purpose: str, action: Callable[[], T]) -> T:
    """Call ``action`` on rank 0 and return its result on every rank.

    Raises:
        CheckpointError: on all ranks when it failed.
    """
    answer: list[Any] = [_Outcome.of(action) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(answer, src=0)
    outcome: _Outcome[T] = answer[0]
    if outcome.error:
        raise CheckpointError(outcome.error if outcome.is_complete_message else f"{purpose}: {outcome.error}")
    return cast(T, outcome.value)


@dataclass(frozen=True)
class _Outcome(Generic[T]):
    """The result of an action on one rank, or its error.

    Attributes:
        value: the result of the action.
        error: the text of the action's error; "" when the action succeeded.
        is_complete_message: whether ``error`` can be shown without ``purpose`` before it, because the action itself
            raised a CheckpointError.
    """

    value: T | None = None
    error: str = ""
    is_complete_message: bool = False

    @classmethod
    def of(cls, action: Callable[[], T]) -> _Outcome[T]:
        try:
            return cls(value=action())
        except CheckpointException as error:      # torch derives it from BaseException, not from Exception
            return cls._of_torch(error)
        except CheckpointError as error:
            return cls(error=str(error), is_complete_message=True)
        except Exception as error:      # file systems and torch raise many types
            return cls(error=error_in_words(error))

    @classmethod
    def _of_torch(cls, failure: CheckpointException) -> _Outcome[T]:
        """Return the failing ranks' own errors, which torch buries in a collection of tracebacks."""
        causes = {rank: cause for rank, (cause, _) in sorted(failure.failures.items())}
        for cause in causes.values():
            if isinstance(cause, CheckpointError):
                return cls(error=str(cause), is_complete_message=True)
        errors = [f"on rank {rank}: {error_in_words(cause)}" for rank, cause in causes.items()]
        return cls(error="; ".join(errors[:4]) + (f" (and {len(errors) - 4} more ranks)" if len(errors) > 4 else ""))


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
