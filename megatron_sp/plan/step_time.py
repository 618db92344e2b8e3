"""Estimate the time of a training step from its FLOPs and bytes, under the assumptions listed here.

::

    step = (compute + exposed communication + transfers to the host) / (1 - pipeline bubble)

Assumptions, all of them in ``Assumptions``: matrix products and attention run at a fixed share of the device's peak;
links reach a fixed share of their data-sheet bandwidth; a group whose ranks lie in one node uses the links of the node,
any other the network; communication that normally overlaps with computation (ZeRO, ring, pipeline) costs only the time
by which it is longer than that computation; Ulysses and tensor parallelism wait for their communication. An optimizer
in host memory updates there, at the speed at which the host reads and writes memory, while the device waits.
Elementwise operators, launch overhead, stragglers and data reading are not counted. The figures compare layouts; they
promise no speed.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_sp.config.schema import Run
from megatron_sp.layout.grid import AXES, VIEWS
from megatron_sp.layout.schedules import SCHEDULES
from megatron_sp.layout.tiles import num_chunks
from megatron_sp.plan.communication import Traffic, step_traffic
from megatron_sp.plan.devices import Device
from megatron_sp.plan.flops import repeats_of, sequence_flops
from megatron_sp.plan.layer_activations import layer_memory, offloaded_results
from megatron_sp.plan.sizes import FP32, Sizes, Weights


@dataclass(frozen=True)
class Assumptions:
    """Shares of the data-sheet figures that a real run reaches.

    Attributes:
        compute: share of the device's peak FLOP/s that matrix products and attention together reach.
        link: share of a link's bandwidth that communication reaches.
        overlap: share of the computation that can overlap with communication.
        host_update: not a share but bytes/s: what the host reads and writes for one device in an optimizer's update.
    """

    compute: float = 0.5
    link: float = 0.7
    overlap: float = 0.8
    host_update: float = 2e10


@dataclass(frozen=True)
class StepTime:
    """Seconds of one training step and its parts.

    Attributes:
        compute: matrix products and attention of one device, recomputation included.
        exposed: communication that computation does not hide, by axis.
        host: transfers of offloaded activations and states that computation does not hide, and an update on the host.
        bubble: share of the step in which a pipeline rank waits.
        mfu: model FLOPs (causal half, no recomputation) over peak times step time.
    """

    compute: float
    exposed: dict[str, float]
    host: float
    bubble: float
    mfu: float

    @property
    def total(self) -> float:
        """Return the seconds of the whole step."""
        return (self.compute + sum(self.exposed.values()) + self.host) / (1 - self.bubble)


def predict_step_time(run: Run, device: Device, devices_per_node: int = 8,
                      assumptions: Assumptions = Assumptions()) -> StepTime:
    """Return the time of one step of a resolved run with vocabulary sizes."""
    parallel = run.parallel
    peak = 1e12 * (device.tflops_fp32 if run.precision.dtype == "float32" else device.tflops)
    flops = sequence_flops(run.model, run.data.seq_length)
    share = run.train.global_batch_size / parallel.world_size
    compute = share * flops.train(repeats=repeats_of(run)) / (peak * assumptions.compute)
    room = assumptions.overlap * compute
    exposed: dict[str, float] = {}
    for traffic in step_traffic(run):
        seconds = traffic.sent / (_bandwidth(run, traffic, device, devices_per_node) * assumptions.link)
        if traffic.hidden:
            seconds, room = max(0.0, seconds - room), max(0.0, room - seconds)
        exposed[traffic.axis] = seconds
    host = max(0.0, _host_bytes(run) / (device.host_bandwidth * assumptions.link) - room)
    host += _updated_bytes(run) / assumptions.host_update
    bubble = pipeline_bubble(run)
    total = (compute + sum(exposed.values()) + host) / (1 - bubble)
    return StepTime(compute, exposed, host, bubble, share * flops.train() / (peak * total))


def bytes_between_nodes(run: Run, device: Device, devices_per_node: int) -> float:
    """Return the bytes that the busiest rank sends in a step within groups that reach over several nodes."""
    return sum(traffic.sent for traffic in step_traffic(run)
               if _bandwidth(run, traffic, device, devices_per_node) == device.network_bandwidth)


def _bandwidth(run: Run, traffic: Traffic, device: Device, devices_per_node: int) -> float:
    """Return the bandwidth of the slowest link that the ranks of a group use."""
    axes = VIEWS.get(traffic.axis, (traffic.axis,))
    sizes = {axis: getattr(run.parallel, axis) for axis in AXES}
    inner = AXES[AXES.index(axes[-1]) + 1:]
    span = 1
    for axis in (*axes, *inner):  # ranks from the first to the last member of a group, the group's inner axes included
        span *= sizes[axis]
    return device.node_bandwidth if span <= devices_per_node else device.network_bandwidth


def pipeline_bubble(run: Run) -> float:
    """Return the share of a step in which a pipeline rank waits (Narayanan et al., arXiv 2104.04473, section 2.2).

    Schedules that split backward fill most of the bubble with gradients of weights. For them a third of it is counted
    (Qi et al., arXiv 2401.10241, table 1, with equal times for forward and both halves of backward).
    """
    parallel = run.parallel
    if parallel.pp == 1:
        return 0.0
    microbatches = max(1, run.train.global_batch_size // max(1, run.train.micro_batch_size * parallel.dp))
    chunks = num_chunks(run)
    if chunks > 1:  # the forward of the first pass takes a third of forward and backward of the second
        return (parallel.pp - 1) / (microbatches * (chunks + (chunks - 1) / 3) + parallel.pp - 1)
    waiting = (parallel.pp - 1) / max(1, parallel.stages_per_rank)
    if SCHEDULES[parallel.pipeline_schedule].splits_backward:
        waiting /= 3
    return waiting / (microbatches + waiting)


def _host_bytes(run: Run) -> float:
    """Return the bytes that offload moves over a device's link to the host in one step, both directions together."""
    memory, parallel, sizes = run.memory, run.parallel, Sizes.of(run)
    microbatches = max(1, run.train.global_batch_size // max(1, run.train.micro_batch_size * parallel.dp))
    microbatches *= num_chunks(run)
    layers = run.model.num_layers / parallel.pp
    of_layer = sizes.outside * sizes.hidden * sizes.element + offloaded_results(run, layer_memory(run, device="gpu"))
    moved = 2 * memory.offload_activations * layers * of_layer * microbatches
    if memory.offload_key_values:
        moved += layers * microbatches * _fetched_keys(run, num_chunks(run))
    if memory.offload_optimizer:
        moved += 2 * FP32 * _own_parameters(run)
    return moved


def _updated_bytes(run: Run) -> float:
    """Return the bytes of host memory that the update of an offloaded optimizer reads and writes.

    It reads the weight, its gradient and the optimizer's states, and writes weight and states: 7 values with Adam.
    """
    return 7 * FP32 * _own_parameters(run) if run.memory.offload_optimizer else 0.0


def _fetched_keys(run: Run, chunks: int) -> float:
    """Return the bytes of keys and values that a chunk of a layer moves, as a mean over the chunks.

    Each forward and each backward fetches what all earlier chunks keep, which is half of the chunks on average.
    Backward also fetches their gradients, adds to them and writes them back.
    """
    sizes = Sizes.of(run)
    forwards = 1 + (run.memory.recompute_granularity == "full") + (chunks - 1) / chunks
    if run.memory.recompute_granularity == "selective":
        forwards = 1
    one = 2 * sizes.inside * sizes.core_kv
    return (chunks - 1) / 2 * one * ((forwards + 1) * sizes.element + 2 * FP32) + 2 * one * sizes.element


def _own_parameters(run: Run) -> float:
    """Return the number of parameters whose optimizer states a rank holds."""
    parallel, weights = run.parallel, Weights.of(run)
    shards = 1 if parallel.zero_stage == 0 else parallel.fsdp_size or parallel.fsdp
    return (run.model.num_layers / parallel.pp * weights.layer + weights.embedding + weights.output) / max(1, shards)
