"""Choose the smallest run that takes the same code paths as the user's run.

Widths, heads, layers, the sequence, microbatches and data parallelism always shrink. The other parallel degrees stay as
they are if one replica fits into the available processes. Otherwise they shrink to the smallest degrees that take the
same code paths (``code_paths``). Pure arithmetic.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_sp.config.resolve import resolve, with_vocab
from megatron_sp.config.rules.checks import check_problems
from megatron_sp.config.schema import Parallel, Precision, Run
from megatron_sp.errors import ConfigError
from megatron_sp.proof.small.code_paths import code_paths, cost_of_missing, head_paths
from megatron_sp.proof.small.notes import notes_on_degrees, notes_on_sizes
from megatron_sp.proof.small.settings import VOCABULARY, half_precision, with_settings_of_proof
from megatron_sp.proof.small.shapes import divisors, small_heads, small_model

MOST_PROCESSES = 16
#: Of small runs that take all code paths, one that needs at most this many processes is preferred.
PREFERRED_PROCESSES = 8


class NoSmallRunError(ConfigError):
    """No run of few processes keeps the rules that the flags must keep."""


@dataclass(frozen=True)
class Small:
    """A small run to prove, and how it differs from the user's run.

    Attributes:
        run: the small run, resolved, with vocabulary sizes, in fp64.
        notes: sentences that tell the user what was changed.
        half: the half precision of the user's run; None for fp32.
        not_proven: code paths of the user's run that the small run does not take (keys of ``code_paths``).
    """

    run: Run
    notes: list[str]
    half: Precision | None = None
    not_proven: tuple[str, ...] = ()


def shrink(run: Run, most: int = MOST_PROCESSES) -> Small:
    """Return the smallest run that takes the same code paths.

    Args:
        run: the user's run, resolved and checked; its vocabulary size may be unknown.
        most: number of processes that the proof may use.

    Raises:
        NoSmallRunError: no smaller run keeps the rules of the flags.
    """
    like, notes = with_settings_of_proof(run)
    small = _smallest(like, most)
    missing = _missing_paths(small, code_paths(like))
    return Small(small, [*notes, *notes_on_sizes(run, small), *notes_on_degrees(run, small, missing, most)],
                 half_precision(run.precision), tuple(missing))


def _smallest(run: Run, most: int) -> Run:
    """Return the run with as few processes as take nearly all of its code paths (see ``_rank``)."""
    best: Run | None = None
    problems: list[str] = []
    for degrees in _choices_of_degrees(run, most):
        with_heads = small_heads(_with_degrees(run, degrees), head_paths(run))
        if with_heads is None:
            continue
        base = small_model(with_heads, run)
        replicas = min(most // (base.parallel.tp * base.parallel.pp * base.parallel.sp), run.parallel.dp)
        for small in _candidates(base, run, replicas):
            broken = check_problems(small)
            problems += broken
            if not broken and (best is None or _rank(small, run) < _rank(best, run)):
                best = small
                if _rank(best, run)[0] == 0:
                    break
        if best is not None and _rank(best, run)[:2] == (0, False):
            break
    if best is None:
        parallel, first = run.parallel, problems[0] if problems else "it has too few heads."
        raise NoSmallRunError(
            f"cannot be proven here: no smaller form of this run with at most {most} processes keeps the rules of its "
            f"flags (tensor {parallel.tp} x pipeline {parallel.pp} x Ulysses {parallel.ulysses} x ring "
            f"{parallel.ring}). The first rule that a small run breaks: {first} Prove a layout with "
            "smaller degrees.")
    return best


def _rank(small: Run, like: Run) -> tuple[int, bool, int]:
    """Return how far a small run is from the best one: the lower, the better.

    What counts first is the cost of the code paths that it misses, then whether it needs more processes than
    preferred, then how many it needs. A run with the user's own degrees may need any number.
    """
    is_exact = _degrees(small.parallel) == _degrees(like.parallel)
    size = small.parallel.world_size
    return (cost_of_missing(_missing_paths(small, code_paths(like))),
            not is_exact and size > PREFERRED_PROCESSES, 0 if is_exact else size)


def _missing_paths(small: Run, wanted: dict[str, object]) -> list[str]:
    return [name for name, value in code_paths(small).items() if value != wanted[name]]


# ---------------------------------------------------------------- degrees


def _degrees(parallel: Parallel) -> tuple[int, ...]:
    """Return tp, pp, ulysses, ring and stages per rank."""
    return parallel.tp, parallel.pp, parallel.ulysses, parallel.ring, parallel.stages_per_rank


def _choices_of_degrees(run: Run, most: int) -> Iterator[tuple[int, ...]]:
    """Yield degrees (see ``_degrees``) whose replica needs at most ``most`` ranks.

    The run's own degrees come first, then smaller ones by their number of ranks.
    """
    own = _degrees(run.parallel)
    options = [range(min(2, degree), min(degree, 4) + 1) for degree in own[:4]]
    options.append(range(min(2, own[4]), min(2, own[4]) + 1))

    def ranks(degrees: tuple[int, ...]) -> int:
        tp, pp, ulysses, ring, _ = degrees
        return tp * pp * ulysses * ring

    if ranks(own) <= most:
        yield own
    smaller = [degrees for degrees in itertools.product(*options) if degrees != own and ranks(degrees) <= most]
    yield from sorted(smaller, key=lambda degrees: (ranks(degrees), degrees))


def _with_degrees(run: Run, degrees: tuple[int, ...]) -> Run:
    """Return the run with these degrees and the same data parallelism. Uneven stages stay uneven."""
    tp, pp, ulysses, ring, stages_per_rank = degrees
    parallel = run.parallel
    if degrees == _degrees(parallel):
        return run
    given, stages = parallel.pipeline_layers, pp * stages_per_rank
    layers = (*given[:stages - 1], given[-1]) if given else ()
    if given and len(set(given)) > 1 and len(set(layers)) == 1:
        layers = (layers[0] + 1, *layers[1:])
    parallel = replace(parallel, tp=tp, pp=pp, ulysses=ulysses, ring=ring, stages_per_rank=stages_per_rank,
                       pipeline_layers=layers, world_size=tp * pp * ulysses * ring * parallel.dp,
                       fsdp_size=0 if parallel.fsdp_size in (0, parallel.fsdp) else parallel.fsdp_size)
    return replace(run, parallel=parallel)


# ---------------------------------------------------------------- replicas and samples


def _candidates(base: Run, like: Run, most_replicas: int) -> Iterator[Run]:
    """Yield the run with few replicas and few samples, smallest first. Some may break a rule of the flags."""
    parallel, train = base.parallel, base.train
    size = min(2, train.micro_batch_size)
    number = train.global_batch_size // (train.micro_batch_size * like.parallel.dp)
    for dp in range(1, min(4, most_replicas) + 1):
        world = parallel.tp * parallel.pp * parallel.sp * dp
        for shard in _shard_sizes(like.parallel, parallel.sp, dp):
            for count in range(1, min(number, 4 * parallel.pp * parallel.stages_per_rank) + 1):
                small = replace(base, parallel=replace(parallel, world_size=world, fsdp_size=shard),
                                train=replace(train, micro_batch_size=size, global_batch_size=size * dp * count))
                yield with_vocab(resolve(small, world), VOCABULARY)


def _shard_sizes(like: Parallel, sp: int, dp: int) -> list[int]:
    """Return the values of --fsdp-size to try: 0 (all ranks) if ``like`` shards over all ranks, else every divisor."""
    return [0] if like.fsdp_size in (0, like.fsdp) else divisors(sp * dp)
