"""Peak memory of a run by component, before it starts.

The step is followed through the moments at which memory can be largest: the loss, the backward of
each layer (recomputed first, where it is), the last gradients. At each of them every tensor that the
code then holds is counted; the largest moment of the fullest pipeline rank is the answer.
FSDP2's real behaviour is counted (fp32 shards, gathered copies, fp32 reduction buffers), checked
against allocation traces of the real model (tests/unit/plan/test_memory_model.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_sp.config.schema import Run
from megatron_sp.layout.schedules import SCHEDULES, stages_of_rank
from megatron_sp.layout.sharding import GRADIENT_BUCKET, uses_fsdp
from megatron_sp.layout.stages import stage_layers
from megatron_sp.plan.layer_activations import LayerMemory, layer_memory
from megatron_sp.plan.sizes import FP32, Sizes, Weights

#: What a process holds before it makes a tensor: interpreter and libraries; on a GPU the context and its libraries.
FIXED = {"cpu": 0, "gpu": 3 << 30}
COMPONENTS = ("weights", "gradients", "optimizer states", "gathered weights", "kept activations", "layer working set",
              "loss", "other", "fixed")


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of the fullest rank at its fullest moment.

    Attributes:
        components: by name, see ``COMPONENTS``.
        moment: when, in words.
        rank: pipeline rank.
        host: bytes in host memory beside them (offload). On a CPU device they come on top of ``total``.
    """

    components: dict[str, int]
    moment: str
    rank: int
    host: int

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self.components.values())


def predict(run: Run, *, device: str = "cpu", optimizer: bool = True) -> MemoryPlan:
    """Peak memory of a resolved run with vocabulary sizes.

    Args:
        device: "cpu" or "gpu"; they differ in automatic tiles, kernels' own buffers and the fixed part.
        optimizer: count the optimizer's states (they exist from the first step on).
    """
    ranks = [_Rank(run, rank, device, optimizer) for rank in range(run.parallel.pp)]
    return max((plan for rank in ranks for plan in rank.plans()), key=lambda plan: plan.total)


class _Rank:
    """One pipeline rank's step."""

    def __init__(self, run: Run, rank: int, device: str, optimizer: bool):
        self.run, self.rank, self.device, self.counts_optimizer = run, rank, device, optimizer
        self.sizes, self.weights = Sizes.of(run), Weights.of(run)
        self.layer = layer_memory(run, device=device)
        stages = stage_layers(run.model, run.parallel)
        numbers = stages_of_rank(run.parallel.pipeline_schedule, run.parallel.pp, run.parallel.stages_per_rank, rank)
        self.num_stages = len(numbers)
        self.num_layers = sum(len(stages[number]) for number in numbers)
        self.largest_stage = max(len(stages[number]) for number in numbers)
        self.is_first, self.is_last = 0 in numbers, len(stages) - 1 in numbers
        parallel = run.parallel
        self.shard = 1 if parallel.zero_stage == 0 else (parallel.fsdp_size or parallel.fsdp)
        self.offloads = run.memory.offload_optimizer
        self.is_wrapped = uses_fsdp(run)
        self.microbatches = max(1, run.train.global_batch_size // (run.train.micro_batch_size * parallel.dp))

    # ---------------------------------------------------------------- states

    @property
    def embedding(self) -> int:
        return self.weights.embedding if self.is_first else 0

    @property
    def output(self) -> int:
        copy = self.weights.is_tied and not self.is_first  # of the embedding, on the last stage
        return (self.weights.output + copy * self.sizes.vocab * self.sizes.hidden) if self.is_last else 0

    @property
    def parameters(self) -> int:
        return self.embedding + self.output + self.num_layers * self.weights.layer

    def plans(self) -> Iterator[MemoryPlan]:
        """One for each moment."""
        host = self._offloaded()
        states = {"sgd": 1 if self.run.optimizer.sgd_momentum else 0}.get(self.run.optimizer.optimizer, 2)
        fixed = {"weights": FP32 * self.parameters / self.shard,
                 "optimizer states": states * FP32 * self.parameters / self.shard if self.counts_optimizer else 0,
                 "fixed": FIXED[self.device]}
        if self.offloads:  # the shards' gradients too
            host += fixed["optimizer states"] + 2 * fixed["weights"]
            fixed["weights"] = fixed["optimizer states"] = 0
        for moment, parts in self.moments():
            found = fixed | parts | {"other": self._other()}
            yield MemoryPlan({name: round(found.get(name, 0)) for name in COMPONENTS}, moment, self.rank, round(host))

    def _other(self) -> float:
        """Tokens, labels, positions (int64) of all microbatches; angles of one."""
        run, t = self.run, self.sizes.inside
        angles = run.model.head_dim * run.model.rotary_percent * FP32 if (
            run.model.position_embedding_type == "rope") else 0
        buffers = 0.0
        if run.parallel.pp > 1:  # torch's stages receive every microbatch, and its gradient, in a buffer of its own
            ends = 2 * self.num_stages - self.is_first - self.is_last
            buffers = ends * self.microbatches * self.layer.x
        return 3 * 8 * t * self.microbatches + t * angles + buffers

    # ---------------------------------------------------------------- weights and gradients during the step

    @property
    def keeps_whole_gradients(self) -> bool:
        """Gradients stay unsharded between microbatches."""
        parallel = self.run.parallel
        several = self.microbatches > 1
        return self.is_wrapped and several and (parallel.pp > 1 or parallel.zero_stage < 2)

    def gathered(self, *, layers: int, layer_now: bool, output: bool) -> float:
        """Bytes of whole weights in the compute type beside the shards.

        Args:
            layers: how many layers' backward has not been (they are still gathered below stage 3).
            layer_now: a layer is at work; else output and loss.
            output: the output layer's weights are still there.
        """
        if not self.is_wrapped:
            return 0.0
        e, w = self.sizes.element, self.weights
        parallel = self.run.parallel
        pipelined = parallel.pp > 1
        ends = (self.output if output else 0) + (self.embedding if w.is_tied and self.is_first else 0)
        fetched = e * self.output if output and self.shard > 1 else 0.0  # the buffer it was fetched in
        if pipelined:  # they stay from the first microbatch to the last
            return e * self.parameters
        if parallel.zero_stage < 3:
            return e * (ends + layers * w.layer + (0 if w.is_tied or not layers else self.embedding)) + fetched
        if layer_now:  # this one and the next, which is being fetched
            return e * (ends + w.layer * min(2, layers))
        return e * ends + fetched

    def gradients(self, *, layers_done: int, working: int, previous: int) -> float:
        """Bytes of gradients.

        Args:
            layers_done: layers whose backward has been.
            working: parameters whose gradients are being formed.
            previous: parameters of the part before, whose buffer of the reduction is still there.
        """
        e, done = self.sizes.element, self.output + layers_done * self.weights.layer
        if self.weights.is_tied and self.is_first and self.is_last and not working:
            done_whole = self.sizes.vocab * self.sizes.hidden  # waits for the embedding's part
        else:
            done_whole = 0
        if not self.is_wrapped:
            made = self.parameters if self.microbatches > 1 else done + done_whole  # by the microbatch before
            return FP32 * (made + working)
        if self.keeps_whole_gradients:
            total = FP32 * self.parameters
            if self.run.parallel.pp == 1:
                total += e * working
            return total + FP32 * max(working, previous)
        sharded = FP32 * (self.parameters if self.microbatches > 1 else done) / self.shard * (not self.offloads)
        return sharded + self._reduction() * working + FP32 * previous + e * done_whole

    def _reduction(self) -> float:
        """Bytes a parameter while a part's gradient is reduced: formed in the compute type, copied into an fp32
        buffer, reduced into the shard (with a copy where there is nothing to shard)."""
        return max(self.sizes.element + FP32, FP32 + FP32 / self.shard + (FP32 if self.shard == 1 else 0))

    # ---------------------------------------------------------------- activations

    def kept(self) -> tuple[float, float]:
        """Bytes that a layer keeps between forward and backward, and the most at its backward beside the input."""
        memory, layer = self.run.memory, self.layer
        if not memory.recompute_granularity:
            return self._kept_whole(layer), layer.backward - layer.x
        if memory.attention_head_groups > 1:
            extra = 0.0 if self.run.parallel.tp == 1 else layer.attention
            return 2 * layer.x + extra, max(layer.backward_mlp - layer.x, layer.backward_attention - layer.x)
        if memory.recompute_granularity == "selective":
            return layer.x + layer.exchanged, layer.backward - layer.x
        return layer.x, layer.backward - layer.x

    @staticmethod
    def _kept_whole(layer: LayerMemory) -> float:
        return layer.x + layer.attention + layer.mlp

    def layer_sets(self) -> list[tuple[float, float]]:
        """For each layer (or unit) of this rank: bytes kept, and bytes at its backward, both with its input."""
        memory, layer = self.run.memory, self.layer
        kept, work = self.kept()
        unit = memory.recompute_num_layers if (
            memory.recompute_granularity and memory.recompute_method == "uniform") else 1
        whole = self._kept_whole(layer)
        if unit > 1:
            return [(layer.x, (unit - 1) * whole + layer.backward)] * (self.num_layers // unit)
        if memory.recompute_granularity and memory.recompute_method == "block":
            count = min(memory.recompute_num_layers * self.num_stages, self.num_layers)
            return [(kept, max(layer.x + work, kept))] * count + [
                (whole, layer.backward)] * (self.num_layers - count)
        return [(kept, max(layer.x + work, kept if memory.recompute_granularity == "selective" else 0.0))
                ] * self.num_layers

    def _offloaded(self) -> float:
        """Bytes of layer inputs in host memory."""
        memory = self.run.memory
        if not memory.offload_activations:
            return 0.0
        twice = 2 if memory.attention_head_groups > 1 else 1
        count = round(memory.offload_activations * len(self.layer_sets()))
        return count * twice * self.layer.x * self.in_flight()

    def in_flight(self) -> float:
        """Microbatches whose activations are held at a time, in units of all of this rank's layers."""
        parallel, number = self.run.parallel, self.microbatches
        pp, stages = parallel.pp, max(1, self.num_stages)
        if pp == 1:
            return 1
        if parallel.pipeline_schedule == "1f1b":
            return min(number, pp - self.rank) if number >= pp else number
        if SCHEDULES[parallel.pipeline_schedule].is_v_shaped:
            return min(number, pp)
        warm_up = (stages - 1) * pp + 2 * (pp - self.rank - 1) + 1
        return min(number, warm_up / stages)

    def moments(self) -> Iterator[tuple[str, dict[str, float]]]:
        """In words, and bytes by component."""
        sets, e = self.layer_sets(), self.sizes.element
        offloaded = round(self.run.memory.offload_activations * len(sets))
        twice = 2 if self.run.memory.attention_head_groups > 1 else 1
        on_device = [kept - (twice * self.layer.x if index < offloaded else 0) for index, (kept, _) in enumerate(sets)]
        flight = self.in_flight()
        others = (flight - 1) * sum(on_device)
        if self.run.parallel.pp > 1:
            others += flight * self.num_stages * self.layer.x  # outputs, which the schedule holds
        unit = max(1, self.num_layers // max(1, len(sets)))
        if self.is_last:
            yield "loss", {"kept activations": sum(on_device) + others, "loss": self._loss(),
                           "gathered weights": self.gathered(layers=self.num_layers, layer_now=False, output=True),
                           "gradients": self.gradients(layers_done=0, working=0, previous=0) - self._unmade()}
            working = self._loss_gradients()
            yield "gradient of the output layer", {
                "kept activations": sum(on_device) + others, "loss": working,
                "gathered weights": self.gathered(layers=self.num_layers, layer_now=False, output=False),
                "gradients": self.gradients(layers_done=0, working=0, previous=0) - self._unmade()}
        for index in range(len(sets) - 1, -1, -1):
            done = self.num_layers - (index + 1) * unit
            previous = self.output if done == 0 else self.weights.layer
            yield f"backward of layer {index * unit}", {
                "kept activations": sum(on_device[:index]) + others + (self.layer.x if index < offloaded else 0),
                "layer working set": sets[index][1] - (self.layer.x if index < offloaded else 0),
                "gathered weights": self.gathered(layers=(index + 1) * unit, layer_now=True, output=False),
                "gradients": self.gradients(layers_done=done, working=0, previous=previous) + e * self.weights.layer}
        first = self.embedding + (self.output if self.weights.is_tied else 0)
        yield "gradients of the first part", {
            "kept activations": others, "layer working set": 2 * self.layer.x,
            "gathered weights": self.gathered(layers=0, layer_now=True, output=False),
            "gradients": self.gradients(layers_done=self.num_layers, working=first, previous=0)}
        if self.run.parallel.fsdp > 1 and not self.is_wrapped:
            whole = FP32 * self.parameters
            yield "sum of the gradients", {"gradients": whole + min(GRADIENT_BUCKET, whole)}

    def _unmade(self) -> float:
        """The output layer's gradients, which ``gradients`` counts as made."""
        return 0.0 if self.microbatches > 1 or self.offloads else FP32 * self.output / self.shard

    def _loss(self) -> float:
        """Final norm's input and output, gradients of x and of the weight, a tile of logits."""
        sizes, e = self.sizes, self.sizes.element
        tile = sizes.loss_tile(self.run, self.device)
        dx = sizes.inside * sizes.hidden * (FP32 if self.run.precision.fp16 else e)
        gathered = sizes.inside * sizes.hidden * e if sizes.outside != sizes.inside else 0
        logits = tile * sizes.vocab * (FP32 if e == FP32 else FP32 + e) + tile * sizes.hidden * e
        weight = sizes.vocab * sizes.hidden * (FP32 if e == FP32 else FP32 + e)
        return 2 * self.layer.x + gathered + dx + weight + logits

    def _loss_gradients(self) -> float:
        """When they leave: x, its gradient before and after the norm, the weight's on its way."""
        weight = self.sizes.vocab * self.sizes.hidden
        if self.weights.is_tied and self.is_first:
            return 3 * self.layer.x  # it stays, counted with the gradients
        return 3 * self.layer.x + (self._reduction() if self.is_wrapped else FP32) * weight


def gibibytes(size: float) -> str:
    """For people."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{math.ceil(size / 2**20)} MiB"
