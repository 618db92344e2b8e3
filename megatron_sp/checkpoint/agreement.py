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
    """Every rank's value, by rank."""
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
    """What an action gave on one rank.

    Attributes:
        value: its result.
        error: the text of its failure, or "".
        is_complete_message: the text needs no introduction: the action raised a CheckpointError.
    """

    value: T | None = None
    error: str = ""
    is_complete_message: bool = False

    @classmethod
    def of(cls, action: Callable[[], T]) -> _Outcome[T]:
        try:
            return cls(value=action())
        except CheckpointException as error:      # torch's; a BaseException, which "except Exception" lets pass
            return cls._of_torch(error)
        except CheckpointError as error:
            return cls(error=str(error), is_complete_message=True)
        except Exception as error:      # whatever file systems and torch raise
            return cls(error=in_words(error))

    @classmethod
    def _of_torch(cls, failure: CheckpointException) -> _Outcome[T]:
        """The first failing rank's own error instead of torch's collection of tracebacks."""
        causes = {rank: cause for rank, (cause, _) in sorted(failure.failures.items())}
        for cause in causes.values():
            if isinstance(cause, CheckpointError):
                return cls(error=str(cause), is_complete_message=True)
        words = [f"on rank {rank}: {in_words(cause)}" for rank, cause in causes.items()]
        return cls(error="; ".join(words[:4]) + (f" (and {len(words) - 4} more ranks)" if len(words) > 4 else ""))


def in_words(error: BaseException) -> str:
    """Describe an error in one line: for a failed file operation its file and reason, else type and first line."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno is not None:
            place = f"{seen.filename}: " if seen.filename else ""
            more = " (free space there, or give another --save)" if seen.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            return f"{place}{seen.strerror}{more}"
        seen = seen.__cause__ or seen.__context__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
