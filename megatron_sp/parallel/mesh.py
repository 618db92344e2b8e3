"""The parallel mesh: which rank is where on the five axes, and every process group.

Axes from outer to inner: ``pp, dp, ring, ulysses, tp``. The axis that communicates most is innermost, so that its
ranks are neighbours. Views join axes: ``sp`` = ring x ulysses (ranks that share a sequence), ``fsdp`` = dp x ring x
ulysses (ranks that hold the same part of the model), ``world`` = all. Parameters are sharded on another division of
the same ranks: ``fsdp`` = replicate x shard. ``layout.grid.Grid`` does the arithmetic. ``ParallelMesh`` adds the
process groups; functions get it as an argument. No other module creates a group.
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
    """Sizes, coordinates and process groups of this rank, by the names of axes and views.

    Attributes:
        weights: DeviceMesh of the parameters, with axes ``pp, replicate, shard, tp``. Parameters are split over
            ``tp``, sharded over ``shard``, and copied over ``replicate``. It uses the process groups of this object.
    """

    def __init__(self, parallel: Parallel, device: torch.device):
        check_torch()
        self.grid = Grid(parallel)
        self.global_rank = dist.get_rank()
        self.device = device
        self.timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
        num_shards = num_weight_shards(parallel)
        # rank numbers as [pp, replicate, shard, tp]; the fsdp view is the axes replicate and shard, flattened
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
        """Return the mesh of a checked layout; all ranks call this together, because it creates process groups.

        Args:
            parallel: the resolved layout. Its world size must be that of the default process group.
            device: this rank's device; default CPU.
        """
        assert dist.is_initialized() and dist.get_world_size() == parallel.world_size
        return cls(parallel, device or torch.device("cpu"))

    def _create_groups(self, further: set[tuple[int, ...]],
                       timeout: timedelta) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """Return this rank's process groups, one for each distinct set of ranks.

        Axes and views with the same ranks share a group, because each group takes memory and connections.

        Args:
            further: sets of ranks that need a group although they are no axis or view.
        """
        sets = further | {tuple(group) for name in (*AXES, *VIEWS) for group in self.grid.partition(name)}
        if self.grid.size("pp") > 1:
            sets |= {tuple(self.grid.pipeline_ends(rank)) for rank in range(self.grid.world_size)}
        mine = {}
        for ranks in sorted(sets):  # torch requires that every rank creates every group, in the same order
            group = dist.group.WORLD if len(ranks) == self.grid.world_size else dist.new_group(list(ranks), timeout)
            if self.global_rank in ranks:
                assert group is not None
                mine[ranks] = group
        return mine

    def _group_among(self, sets: set[tuple[int, ...]]) -> dist.ProcessGroup:
        """Return the process group of the one set of ranks that holds this rank."""
        return self._groups[next(ranks for ranks in sets if self.global_rank in ranks)]

    def size(self, name: str) -> int:
        """Return the number of ranks along an axis or view."""
        return self.grid.size(name)

    def rank(self, name: str) -> int:
        """Return this rank's position along an axis or view, from 0."""
        return self.grid.rank_in(name, self.global_rank)

    def group(self, name: str) -> dist.ProcessGroup:
        """Return this rank's process group along an axis or view."""
        return self._groups[tuple(self.grid.ranks(name, self.global_rank))]

    def channel(self, name: str, *, compiled: bool = False) -> Channel:
        """Return the channel through which the ranks along an axis or view send to each other.

        CPU ranks of one machine use memory that they share, unless ``--no-shared-memory`` is given. All others use
        torch's collectives. All ranks of the group must call this in the same order as other collectives, because the
        first call connects them.

        Args:
            compiled: whether compiled code uses the channel; ``torch.compile`` can trace the collectives only.
        """
        if self._may_share_memory and not compiled:
            ranks = tuple(self.grid.ranks(name, self.global_rank))
            if ranks not in self._mailboxes:
                self._mailboxes[ranks] = open_mailboxes(self._groups[ranks], self.timeout, name)
            mailboxes = self._mailboxes[ranks]
            if mailboxes is not None:
                return SharedMemoryChannel(mailboxes)
        return CollectiveChannel(self.group(name), self.device, GRADIENT_BUCKET)

    def pipeline_ends_group(self) -> dist.ProcessGroup | None:
        """Return the group of the first and the last rank of this pipeline; None on the ranks between them."""
        return self._groups.get(tuple(self.grid.pipeline_ends(self.global_rank)))

    def new_background_group(self) -> dist.ProcessGroup:
        """Return a new gloo group of all ranks, for a thread that must not disturb the collectives of training.

        The slowest rank may write its part of a checkpoint for hours, so the time-out is long. All ranks call this.
        """
        backend = "gloo" if dist.get_backend() == "nccl" else None      # else the same as that of training
        group = dist.new_group(backend=backend, timeout=timedelta(hours=12))
        assert group is not None
        return group

    def is_first(self, *names: str) -> bool:
        """Return whether this rank is at position 0 along all of these axes or views."""
        return all(self.rank(name) == 0 for name in names)

    def sum_over(self, value: torch.Tensor | float, *names: str) -> torch.Tensor:
        """Return the sum of a value over the ranks along all of these axes or views, as a new tensor."""
        return self._reduce(value, dist.ReduceOp.SUM, names)

    def max_over(self, value: torch.Tensor | float, *names: str) -> torch.Tensor:
        """Return the largest value among the ranks along all of these axes or views, as a new tensor."""
        return self._reduce(value, dist.ReduceOp.MAX, names)

    def _reduce(self, value: torch.Tensor | float, op: dist.ReduceOp.RedOpType, names: tuple[str, ...]) -> torch.Tensor:
        result = torch.as_tensor(value, device=self.device).detach().clone()
        for name in names:
            if self.size(name) > 1:
                dist.all_reduce(result, op, group=self.group(name))
        return result

    def destroy(self) -> None:
        """Release the process groups and the shared memory; for programs that build several meshes in turn."""
        for mailboxes in self._mailboxes.values():
            if mailboxes is not None:
                mailboxes.close()
        self._mailboxes = {}
        for group in self._groups.values():
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        self._groups = {}
