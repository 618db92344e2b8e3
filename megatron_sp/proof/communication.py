"""Check the order of a pipeline's sends and receives for the real degrees of a run, without starting a process.

A step of chunks is the list of ``layout.transfers``. For torch's schedules this module says which sends and receives
``torch.distributed.pipelining.schedules`` (torch 2.13) posts, and what it waits for. The exchange of shapes before the
first step is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.distributed.pipelining.schedules import PipelineScheduleSingle, Schedule1F1B

from megatron_sp.config.schema import Run
from megatron_sp.layout.length_schedule import phases, run_of_length
from megatron_sp.layout.rendezvous import TRANSPORTS, Message, Post, Program, Rule, Wait, problem_of, waiting
from megatron_sp.layout.schedules import stages_of_rank
from megatron_sp.parallel.pipeline import schedule_class, schedule_of_stages
from megatron_sp.torch_internals import actions_with_transfers


def _as_torch(rank: int, message: Message, post: Post) -> object:
    """torch's choice: a batch of sends and receives on the group's communicator, others on that of the pair."""
    is_mixed = len({each.sends for each in post.messages}) == 2
    return "all" if is_mixed else frozenset((rank, message.peer))


#: The transports under which torch's own schedules run.
TORCH_TRANSPORTS: dict[str, Rule] = {**TRANSPORTS, "NCCL as torch uses it": _as_torch}


def order_problem(run: Run) -> str:
    """Return a sentence if some ranks of a run's pipeline would wait for each other for ever; else ""."""
    parallel = run.parallel
    if parallel.pp == 1:
        return ""
    lengths = [phase.length for phase in phases(run)] if run.data.seq_length_schedule else [run.data.seq_length]
    return next((problem for length in lengths if (problem := _problem(run_of_length(run, length)))), "")


def _problem(run: Run) -> str:
    """Do what ``order_problem`` does for a run of one sequence length."""
    parallel, size = run.parallel, run.memory.sequence_chunk_size
    microbatches = run.train.global_batch_size // (run.train.micro_batch_size * parallel.dp)
    if size:
        return problem_of(parallel.pp, microbatches, run.data.seq_length // size)
    programs = torch_programs(parallel.pipeline_schedule, parallel.pp, parallel.stages_per_rank, microbatches)
    for name, rule in TORCH_TRANSPORTS.items():
        if stuck := waiting(programs, rule):
            return f"with {name}, {stuck[0]} for ever"
    return ""


@dataclass
class _Rank:
    """Notes what one rank posts and waits for.

    Attributes:
        rank_of: which rank holds each stage.
    """

    rank_of: Sequence[int]
    program: Program = field(default_factory=list)

    def message(self, kind: str, stage: int, microbatch: int, *, sends: bool) -> list[Message]:
        """Return the message by which a stage sends or receives a forward (F) or backward (B) result; none at an end.

        A forward result goes to the next stage, a backward result to the one before.
        """
        peer = stage + (1 if sends == (kind == "F") else -1)
        if not 0 <= peer < len(self.rank_of):
            return []
        return [Message(sends, self.rank_of[peer], (kind, stage if sends else peer, microbatch))]

    def post(self, messages: list[Message]) -> list[Message]:
        """Begin messages: one by one where all are sends or all receives, else as one batch."""
        batches = [messages] if len({each.sends for each in messages}) == 2 else [[each] for each in messages]
        self.program += [Post(tuple(batch)) for batch in batches]
        return messages

    def wait(self, messages: list[Message]) -> None:
        self.program += map(Wait, messages)


def _gpipe(stage: int, pp: int, microbatches: int) -> Program:
    """Return a rank's program under GPipe: all forwards, then all backwards; after each half it waits for its sends."""
    rank = _Rank(range(pp))
    for kind in "FB":
        sent: list[Message] = []
        for number in range(microbatches):
            rank.wait(rank.post(rank.message(kind, stage, number, sends=False)))
            sent += rank.post(rank.message(kind, stage, number, sends=True))
        rank.wait(sent)
    return rank.program


def _one_forward_one_backward(stage: int, pp: int, microbatches: int) -> Program:
    """Return a rank's program under 1F1B: some forwards, then a backward and a forward in turn.

    Each of these begins its receive in one batch with the send of the result before it.
    """
    rank = _Rank(range(pp))
    warm_up = min(microbatches, pp - stage)
    sent: list[Message] = []
    last: list[Message] = []
    for number in range(warm_up):
        rank.wait(rank.post(rank.message("F", stage, number, sends=False)))
        rank.wait(sent)
        last = rank.message("F", stage, number, sends=True)
        if number < warm_up - 1:
            sent = rank.post(last)
    for number in range(microbatches):
        forward = warm_up + number
        if forward <= microbatches:
            rank.wait(rank.post([*last, *rank.message("B", stage, number, sends=False)]))
            last = rank.message("B", stage, number, sends=True)
            if forward < microbatches:
                rank.wait(rank.post([*last, *rank.message("F", stage, forward, sends=False)]))
                last = rank.message("F", stage, forward, sends=True)
            else:
                sent = rank.post(last)
        else:
            rank.wait(rank.post(rank.message("B", stage, number, sends=False)))
            rank.wait(sent)
            sent = rank.post(rank.message("B", stage, number, sends=True))
    rank.wait(sent)
    return rank.program


def _several_stages(actions: Sequence[tuple[str, int, int]], rank_of: Sequence[int], own: Sequence[int]) -> Program:
    """Return a rank's program under a schedule that is a list of actions, in which sends and receives are named.

    Work waits for the receive of its input. The rank waits for its sends at the end.
    """
    rank = _Rank(rank_of)
    sent: list[Message] = []
    for action, stage, number in actions:
        kind = action[-1]
        if action.startswith("SEND"):
            sent += rank.post(rank.message(kind, stage, number, sends=True))
        elif action.startswith("RECV"):
            rank.post(rank.message(kind, stage, number, sends=False))
        elif action in "FBI":
            need = rank.message("F" if action == "F" else "B", stage, number, sends=False)
            source = stage + (-1 if action == "F" else 1)
            rank.wait(need if source not in own else [])
    rank.wait(sent[::-1])
    return rank.program


def torch_programs(schedule: str, pp: int, stages_per_rank: int, microbatches: int) -> list[Program]:
    """Return what the ranks post and wait for in a training step of one of torch's schedules."""
    stages = pp * stages_per_rank
    kind = schedule_class(schedule, microbatches, stages)
    if issubclass(kind, PipelineScheduleSingle):
        one = _one_forward_one_backward if kind is Schedule1F1B else _gpipe
        return [one(rank, pp, microbatches) for rank in range(pp)]
    numbers = [stages_of_rank(schedule, pp, stages_per_rank, rank) for rank in range(pp)]
    rank_of = [next(rank for rank in range(pp) if stage in numbers[rank]) for stage in range(stages)]
    made = schedule_of_stages(schedule, pp, stages_per_rank, microbatches)
    return [_several_stages(actions_with_transfers(made, rank), rank_of, numbers[rank]) for rank in range(pp)]
