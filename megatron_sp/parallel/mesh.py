"""Who is where: the five axes, the views on them, and every process group.

Axes from outer to inner: ``pp, dp, ring, ulysses, tp`` (the chattiest on the nearest ranks).
Views: ``sp`` = ring x ulysses (ranks that share a sequence), ``fsdp`` = dp x ring x ulysses (ranks
that hold the same part of the model), ``world``. ``Grid`` is the arithmetic alone; ``ParallelMesh``
adds the process groups and is passed by argument. No other module creates a group.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_sp.config.schema import Parallel
from megatron_sp.layout.grid import AXES, VIEWS, Grid
from megatron_sp.transport.shared_memory import SharedMemoryLink, open_link


class ParallelMesh:
    """Sizes, coordinates and process groups of this rank; see the module's text for the names."""

    def __init__(self, parallel: Parallel, device: torch.device):
        self.grid = Grid(parallel)
        self.global_rank = dist.get_rank()
        self.device = device
        self._timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
        self._groups = self._create_groups(self._timeout)
        self._shares_memory = parallel.shared_memory and device.type == "cpu"
        self._links: dict[tuple[int, ...], SharedMemoryLink | None] = {}
        shard = parallel.fsdp if parallel.fsdp_size == 0 else parallel.fsdp_size
        if parallel.zero_stage == 0:
            shard = 1
        # Parameters live on this mesh: split over tp, sharded over `shard`, copied over `replicate`.
        self.weights: DeviceMesh = init_device_mesh(
            device.type, (parallel.pp, parallel.fsdp // shard, shard, parallel.tp),
            mesh_dim_names=("pp", "replicate", "shard", "tp"))

    @classmethod
    def build(cls, parallel: Parallel, device: torch.device | None = None) -> ParallelMesh:
        """Create the groups of a validated layout.

        Args:
            parallel: the resolved section; its world size must be the process group's.
            device: this rank's device; default CPU.
        """
        assert dist.is_initialized() and dist.get_world_size() == parallel.world_size
        return cls(parallel, device or torch.device("cpu"))

    def _create_groups(self, timeout: timedelta) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """One group per distinct set of ranks; axes and views with the same ranks share it."""
        sets = {tuple(group) for name in (*AXES, *VIEWS) for group in self.grid.partition(name)}
        if self.grid.size("pp") > 1:
            sets |= {tuple(self.grid.ends(rank)) for rank in range(self.grid.world_size)}
        wanted = sorted(sets)
        mine = {}
        for ranks in wanted:  # every rank creates every group, in the same order
            group = dist.group.WORLD if len(ranks) == self.grid.world_size else dist.new_group(list(ranks), timeout)
            if self.global_rank in ranks:
                assert group is not None
                mine[ranks] = group
        return mine

    def size(self, name: str) -> int:
        """Number of ranks along an axis or view."""
        return self.grid.size(name)

    def rank(self, name: str) -> int:
        """This rank's place along an axis or view."""
        return self.grid.rank_in(name, self.global_rank)

    def group(self, name: str) -> dist.ProcessGroup:
        """This rank's process group along an axis or view."""
        return self._groups[tuple(self.grid.ranks(name, self.global_rank))]

    def link(self, name: str) -> SharedMemoryLink | None:
        """Shared memory between the ranks along an axis or view, where all are CPUs of one machine.

        All ranks of the group call it the first time.
        """
        if not self._shares_memory:
            return None
        ranks = tuple(self.grid.ranks(name, self.global_rank))
        if ranks not in self._links:
            self._links[ranks] = open_link(self._groups[ranks], self._timeout)
        return self._links[ranks]

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
        """Give up the groups made here (a program that builds several meshes in turn needs it)."""
        for link in self._links.values():
            if link is not None:
                link.close()
        self._links = {}
        for group in self._groups.values():
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        self._groups = {}
