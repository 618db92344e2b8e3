"""Who is where: the five axes, the views on them, and every process group.

Axes from outer to inner: ``pp, dp, ring, ulysses, tp``; the axis that communicates most lies on neighbouring
ranks. Views: ``sp`` = ring x ulysses (ranks that share a sequence), ``fsdp`` = dp x ring x ulysses (ranks that hold
the same part of the model), ``world``. Parameters lie on a view of their own: ``fsdp`` cut into ``replicate`` x
``shard``. ``layout.grid.Grid`` does the arithmetic; ``ParallelMesh`` adds the process groups and is passed by
argument. No other module creates a group.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron_sp.config.schema import Parallel
from megatron_sp.layout.grid import AXES, VIEWS, Grid
from megatron_sp.layout.sharding import GRADIENT_BUCKET, num_weight_shards
from megatron_sp.torch_internals import check_torch
from megatron_sp.transport.channel import Channel, CollectiveChannel, SharedMemoryChannel
from megatron_sp.transport.connect import open_mailboxes
from megatron_sp.transport.mailboxes import Mailboxes


class ParallelMesh:
    """Sizes, coordinates and process groups of this rank; see the module's text for the names.

    Attributes:
        weights: the mesh that parameters live on, with axes ``pp, replicate, shard, tp``: split over ``tp``,
            sharded over ``shard``, copied over ``replicate``. Its groups are those of this object.
    """

    def __init__(self, parallel: Parallel, device: torch.device):
        check_torch()
        self.grid = Grid(parallel)
        self.global_rank = dist.get_rank()
        self.device = device
        self.timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
        num_shards = num_weight_shards(parallel)
        # rank numbers as [pp, replicate, shard, tp]; replicate and shard together are the fsdp view
        ranks = torch.arange(parallel.world_size).view(parallel.pp, -1, num_shards, parallel.tp)
        copies = {tuple(group) for group in ranks.movedim(1, 3).flatten(0, 2).tolist()}
        shards = {tuple(group) for group in ranks.movedim(2, 3).flatten(0, 2).tolist()}
        self._groups = self._create_groups(copies | shards, self.timeout)
        self.weights = DeviceMesh.from_group(
            [self.group("pp"), self._group_among(copies), self._group_among(shards), self.group("tp")], device.type,
            ranks, mesh_dim_names=("pp", "replicate", "shard", "tp"))
        self._may_share_memory = parallel.shared_memory and device.type == "cpu"
        self._mailboxes: dict[tuple[int, ...], Mailboxes | None] = {}

    @classmethod
    def build(cls, parallel: Parallel, device: torch.device | None = None) -> ParallelMesh:
        """Create the groups of a validated layout.

        Args:
            parallel: the resolved section; its world size must be the process group's.
            device: this rank's device; default CPU.
        """
        assert dist.is_initialized() and dist.get_world_size() == parallel.world_size
        return cls(parallel, device or torch.device("cpu"))

    def _create_groups(self, further: set[tuple[int, ...]],
                       timeout: timedelta) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """One group per distinct set of ranks; axes and views with the same ranks share it.

        Args:
            further: sets of ranks that need a group beside the axes and views.
        """
        sets = further | {tuple(group) for name in (*AXES, *VIEWS) for group in self.grid.partition(name)}
        if self.grid.size("pp") > 1:
            sets |= {tuple(self.grid.ends(rank)) for rank in range(self.grid.world_size)}
        mine = {}
        for ranks in sorted(sets):  # every rank creates every group, in the same order
            group = dist.group.WORLD if len(ranks) == self.grid.world_size else dist.new_group(list(ranks), timeout)
            if self.global_rank in ranks:
                assert group is not None
                mine[ranks] = group
        return mine

    def _group_among(self, sets: set[tuple[int, ...]]) -> dist.ProcessGroup:
        """The group of the set that holds this rank."""
        return self._groups[next(ranks for ranks in sets if self.global_rank in ranks)]

    def size(self, name: str) -> int:
        """Number of ranks along an axis or view."""
        return self.grid.size(name)

    def rank(self, name: str) -> int:
        """This rank's place along an axis or view."""
        return self.grid.rank_in(name, self.global_rank)

    def group(self, name: str) -> dist.ProcessGroup:
        """This rank's process group along an axis or view."""
        return self._groups[tuple(self.grid.ranks(name, self.global_rank))]

    def channel(self, name: str, *, compiled: bool = False) -> Channel:
        """What the ranks along an axis or view send to each other through.

        That is memory that they share, if all are CPU ranks of one machine and ``--no-shared-memory`` is not given;
        otherwise torch's collectives. All ranks of the group call it, in the same order as other collectives.

        Args:
            compiled: use only what ``torch.compile`` can trace, which are the collectives.
        """
        if self._may_share_memory and not compiled:
            ranks = tuple(self.grid.ranks(name, self.global_rank))
            if ranks not in self._mailboxes:
                self._mailboxes[ranks] = open_mailboxes(self._groups[ranks], self.timeout, name)
            mailboxes = self._mailboxes[ranks]
            if mailboxes is not None:
                return SharedMemoryChannel(mailboxes)
        return CollectiveChannel(self.group(name), self.device, GRADIENT_BUCKET)

    def ends_group(self) -> dist.ProcessGroup | None:
        """First and last stage's group of two; None on the ranks between them."""
        return self._groups.get(tuple(self.grid.ends(self.global_rank)))

    def is_first(self, *names: str) -> bool:
        """Whether this rank is at place 0 along all of these."""
        return all(self.rank(name) == 0 for name in names)

    def sum_over(self, value: torch.Tensor | float, *names: str) -> torch.Tensor:
        """Sum over the ranks along all of these axes or views; a new tensor."""
        return self._reduce(value, dist.ReduceOp.SUM, names)

    def max_over(self, value: torch.Tensor | float, *names: str) -> torch.Tensor:
        """Largest over the ranks along all of these axes or views; a new tensor."""
        return self._reduce(value, dist.ReduceOp.MAX, names)

    def _reduce(self, value: torch.Tensor | float, op: dist.ReduceOp.RedOpType, names: tuple[str, ...]) -> torch.Tensor:
        result = torch.as_tensor(value, device=self.device).detach().clone()
        for name in names:
            if self.size(name) > 1:
                dist.all_reduce(result, op, group=self.group(name))
        return result

    def destroy(self) -> None:
        """Release the groups and the memory made here; for programs that build several meshes in turn."""
        for mailboxes in self._mailboxes.values():
            if mailboxes is not None:
                mailboxes.close()
        self._mailboxes = {}
        for group in self._groups.values():
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        self._groups = {}
