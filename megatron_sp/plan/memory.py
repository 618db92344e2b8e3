"""Predict the peak memory of a run by component, from its configuration alone.

Memory rises while forward keeps activations and falls while backward frees them. It can be largest at a few moments,
and at each of them this module adds up every tensor that the code then holds (``_Rank.moments``):

    bytes                        (1) (2)
      ^                          _|___|_
      |                     ____|       |____(3)
      |                ____|                 |____(3)
      |           ____|  kept activations         |____(3)
      |      ____|                                     |____(4)_(5)
      |_____|   weights, optimizer states, gradients              |___
      +-----------------------------------------------------------------> time
        embedding, layer 0, 1, ... | loss | layer n-1, ... 0 | embedding
                 forward                       backward

    (1) loss: all layers have kept their activations; a tile of logits and the gradients of the loss exist
    (2) gradient of the output layer: the logits are gone, the gradient of the weight is being reduced
    (3) backward of each layer, the recomputed activations included
    (4) gradients of the first part: no layer keeps anything, the embedding's gradient is being reduced
    (5) sum of the gradients over the ranks, where it is not FSDP that sums them

The answer is the largest moment of the fullest pipeline rank. FSDP2's real behaviour is counted: fp32 shards, gathered
copies in the compute type, fp32 buffers of the reductions. tests/unit/plan/test_memory_model.py compares the answer
with allocation traces of the real model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_sp.config.schema import Run
from megatron_sp.layout.masks.segments import Segments, window_reach
from megatron_sp.layout.recomputation import recompute_unit, recomputed_layers
from megatron_sp.layout.schedules import SCHEDULES, stages_of_rank
from megatron_sp.layout.sharding import GRADIENT_BUCKET, layers_ahead, uses_fsdp
from megatron_sp.layout.stages import stage_layers
from megatron_sp.layout.tiles import num_chunks
from megatron_sp.plan.layer_activations import LayerMemory, layer_memory, offloaded_results
from megatron_sp.plan.sizes import FP32, Sizes, Weights

#: What a process holds before it makes a tensor: interpreter and libraries; on a GPU the context and its libraries.
FIXED = {"cpu": 0, "gpu": 3 << 30}
COMPONENTS = ("weights", "gradients", "optimizer states", "gathered weights", "kept activations", "layer working set",
              "keys and values", "loss", "other", "fixed")

#: Names in reports for components whose own names say too little.
LABELS = {"weights": "own fp32 weights", "gathered weights": "weights gathered for use"}


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of the fullest rank at its fullest moment.

    Attributes:
        components: bytes by the names of ``COMPONENTS``.
        moment: name of the moment.
        rank: pipeline rank.
        host: bytes that offload and saves in the background keep in host memory, of the rank that keeps most there.
            Where the device is a CPU, they come on top of ``total``.
        notes: what the user should know about the run, a sentence each.
    """

    components: dict[str, int]
    moment: str
    rank: int
    host: int
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Return the bytes on the device."""
        return sum(self.components.values())


def predict(run: Run, *, device: str = "cpu", optimizer: bool = True) -> MemoryPlan:
    """Return the peak memory of a resolved run whose vocabulary sizes are known.

    Args:
        device: "cpu" or "gpu". They differ in the automatic size of tiles, in the buffers of kernels and in what a
            process holds before it makes a tensor.
        optimizer: count the optimizer's states, which exist from the end of the first step on.
    """
    ranks = [_Rank(run, rank, device, optimizer) for rank in range(run.parallel.pp)]
    plans = [plan for rank in ranks for plan in rank.plans()]
    return replace(max(plans, key=lambda plan: plan.total), host=max(plan.host for plan in plans))


class _Rank:
    """The training step of one pipeline rank."""

    def __init__(self, run: Run, rank: int, device: str, optimizer: bool):
        self.run, self.rank, self.device, self.counts_optimizer = run, rank, device, optimizer
        self.sizes, self.weights = Sizes.of(run), Weights.of(run)
        self.layer = layer_memory(run, device=device)
        self.results = offloaded_results(run, self.layer)
        stages = stage_layers(run.model, run.parallel)
        numbers = stages_of_rank(run.parallel.pipeline_schedule, run.parallel.pp, run.parallel.stages_per_rank, rank)
        self.stages = [stages[number] for number in numbers]
        self.num_stages, self.num_layers = len(numbers), sum(map(len, self.stages))
        self.is_first, self.is_last = 0 in numbers, len(stages) - 1 in numbers
        parallel = run.parallel
        self.shard = 1 if parallel.zero_stage == 0 else (parallel.fsdp_size or parallel.fsdp)
        self.offloads = run.memory.offload_optimizer
        self.is_wrapped = uses_fsdp(run)
        self.microbatches = max(1, run.train.global_batch_size // (run.train.micro_batch_size * parallel.dp))
        self.backwards = self.microbatches * num_chunks(run)

    # ---------------------------------------------------------------- states

    @property
    def embedding(self) -> int:
        return self.weights.embedding if self.is_first else 0

    @property
    def output(self) -> int:
        has_copy = self.weights.is_tied and not self.is_first  # of the tied embedding
        return (self.weights.output + has_copy * self.sizes.vocab * self.sizes.hidden) if self.is_last else 0

    @property
    def parameters(self) -> int:
        return self.embedding + self.output + self.num_layers * self.weights.layer

    @property
    def num_states(self) -> int:
        """Return the number of fp32 values that the optimizer keeps for each parameter."""
        return {"sgd": 1 if self.run.optimizer.sgd_momentum else 0}.get(self.run.optimizer.optimizer, 2)

    def plans(self) -> Iterator[MemoryPlan]:
        """Yield a plan for each moment."""
        host = self._offloaded() + self._staged()
        states = self.num_states
        fixed = {"weights": FP32 * self.parameters / self.shard,
                 "optimizer states": states * FP32 * self.parameters / self.shard if self.counts_optimizer else 0,
                 "fixed": FIXED[self.device]}
        kept = self.chunk_store()
        fixed["keys and values"] = self.fetched_chunks() if self.run.memory.offload_key_values else kept
        host += kept if self.run.memory.offload_key_values else 0
        if self.offloads:  # weights, their gradients and optimizer states
            host += fixed["optimizer states"] + 2 * fixed["weights"]
            fixed["weights"] = fixed["optimizer states"] = 0
        for moment, parts in self.moments():
            found = fixed | parts | {"other": self._other()}
            yield MemoryPlan({name: round(found.get(name, 0)) for name in COMPONENTS}, moment, self.rank, round(host),
                             slow_attention(self.run))

    def _other(self) -> float:
        """Return the bytes of tokens, labels and positions (int64) of all microbatches, and of rotary angles of one."""
        run, t = self.run, self.sizes.inside
        whole = t * num_chunks(run)
        angles = run.model.head_dim * run.model.rotary_percent * FP32 if (
            run.model.position_embedding_type == "rope") else 0
        buffers = 0.0
        # torch's stages have a receive buffer for each microbatch and for each gradient.
        if run.parallel.pp > 1 and num_chunks(run) == 1:
            ends = 2 * self.num_stages - self.is_first - self.is_last
            buffers = ends * self.microbatches * self.layer.x
        return 3 * 8 * whole * self.microbatches + t * angles + buffers

    # ---------------------------------------------------------------- chunks of the sequence

    def chunk_store(self) -> float:
        """Return the bytes of keys, values, their gradients and attention outputs that are kept of earlier chunks.

        The maximum is reached before the backward of the last but one chunk. At this time the store holds keys and
        values of all chunks but the last, and their gradients from the last chunk's backward. Where windows reach few
        chunks, few chunks are kept.
        """
        if num_chunks(self.run) == 1:
            return 0.0
        sizes, tokens = self.sizes, self.sizes.inside
        segments = Segments.of(num_chunks(self.run), window_reach(self.run))
        earlier, gradients = segments.most_kept, min(segments.count - 1, segments.reach)
        kept = 2 * tokens * sizes.core_kv * (earlier * sizes.element + gradients * FP32)
        if self.run.memory.recompute_granularity == "selective" and not self.run.model.attention_dropout:
            kept += segments.size * tokens * (sizes.core_query * sizes.element + sizes.core_heads * FP32)
        return kept * self.num_layers

    def fetched_chunks(self) -> float:
        """Return the bytes of offloaded keys and values that are on the device at a time.

        These are the keys and values of two chunks, because those of the next chunk are fetched while one is used.
        """
        sizes = self.sizes
        held = min(2, num_chunks(self.run) - 1) if self.device == "gpu" else 0
        return held * 2 * sizes.inside * sizes.core_kv * (sizes.element + FP32)

    # ---------------------------------------------------------------- weights and gradients during the step

    @property
    def keeps_whole_gradients(self) -> bool:
        """Return whether FSDP keeps gradients unsharded between backwards."""
        # torch's pipelines reduce after the last backward, also when there is only one.
        parallel = self.run.parallel
        return self.is_wrapped and (parallel.pp > 1 or (self.backwards > 1 and parallel.zero_stage < 2))

    def gathered(self, *, layers: int, layer_now: bool, output: bool) -> float:
        """Return the bytes of gathered weights in the compute type, which exist in addition to the fp32 shards.

        Args:
            layers: number of layers whose backward is not done. Below ZeRO stage 3 they are all still gathered.
            layer_now: a layer is computing, else the output layer with the loss.
            output: the weights of the output layer are still gathered.
        """
        if not self.is_wrapped:
            return 0.0
        e, w = self.sizes.element, self.weights
        parallel = self.run.parallel
        ends = (self.output if output else 0) + (self.embedding if w.is_tied and self.is_first else 0)
        fetched = e * self.output if output and self.shard > 1 else 0.0  # the buffer of the all-gather
        if parallel.pp > 1:  # a pipeline keeps all weights gathered from the first microbatch to the last
            return e * self.parameters
        # stages 1 and 2 keep all weights gathered until the last backward
        if parallel.zero_stage < 3 and self.backwards > 1:
            return e * self.parameters
        if parallel.zero_stage < 3:
            return e * (ends + layers * w.layer + (0 if w.is_tied or not layers else self.embedding)) + fetched
        if layer_now:  # weights of the computing layers, and of the next ones, which are being gathered
            # Layers that are recomputed together stay gathered until the backward of each.
            held = max(recompute_unit(self.run.memory), 1 + layers_ahead(e * w.layer))
            return e * (ends + w.layer * min(held, layers))
        return e * ends + fetched

    def gradients(self, *, layers_done: int, working: int, previous: int) -> float:
        """Return the bytes of gradients.

        Args:
            layers_done: number of layers whose backward is done.
            working: number of parameters whose gradients are being computed or reduced.
            previous: number of parameters of the part before, whose reduction still holds its buffer.
        """
        e, done = self.sizes.element, self.output + layers_done * self.weights.layer
        if self.weights.is_tied and self.is_first and self.is_last and not working:
            # FSDP reduces a tied weight's gradient only after backward of the embedding has added its part.
            done_whole = self.sizes.vocab * self.sizes.hidden
        else:
            done_whole = 0
        if not self.is_wrapped:
            # After the first backward all gradients exist.
            made = self.parameters if self.backwards > 1 else done + done_whole
            return FP32 * (made + working)
        if self.keeps_whole_gradients:
            total = FP32 * self.parameters
            if self.run.parallel.pp == 1:
                total += e * working
            return total + FP32 * max(working, previous)
        sharded = FP32 * (self.parameters if self.backwards > 1 else done) / self.shard * (not self.offloads)
        return sharded + self._reduction() * working + FP32 * previous + e * done_whole

    def _reduction(self) -> float:
        """Return the bytes per parameter while the gradient of a part is reduced.

        The gradient is computed in the compute type and copied into an fp32 buffer, then the buffer is reduced into the
        shard, with another copy where there is only one shard.
        """
        return max(self.sizes.element + FP32, FP32 + FP32 / self.shard + (FP32 if self.shard == 1 else 0))

    # ---------------------------------------------------------------- activations

    def kept(self) -> tuple[float, float]:
        """Return the bytes that a layer keeps between forward and backward, and what its backward holds besides x."""
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
        """Return for each layer of this rank the bytes kept and the most at its backward, both with its input.

        Layers that are recomputed together count as one.
        """
        memory, layer, unit = self.run.memory, self.layer, recompute_unit(self.run.memory)
        kept, work = self.kept()
        whole = self._kept_whole(layer)
        if unit > 1:
            return [(layer.x, (unit - 1) * whole + layer.backward)] * (self.num_layers // unit)
        if memory.recompute_granularity and memory.recompute_method == "block":
            count = sum(len(recomputed_layers(memory, stage)) for stage in self.stages)
            return [(kept, max(layer.x + work, kept))] * count + [
                (whole, layer.backward)] * (self.num_layers - count)
        return [(kept, max(layer.x + work, kept if memory.recompute_granularity == "selective" else 0.0))
                ] * self.num_layers

    def _offloaded_of_layer(self) -> float:
        """Return the bytes that offload moves to host memory, of one layer: its inputs and attention's results."""
        inputs = 2 if self.run.memory.attention_head_groups > 1 else 1
        return inputs * self.layer.x + self.results

    def _offloaded(self) -> float:
        """Return the bytes of activations that are offloaded to host memory."""
        count = round(self.run.memory.offload_activations * len(self.layer_sets()))
        return count * self._offloaded_of_layer() * self.in_flight()

    def _staged(self) -> float:
        """Return the bytes of the copy in host memory that ``--async-save`` writes from.

        Only one of the ranks that hold equal tensors makes a copy of them.
        """
        if not self.run.checkpoint.async_save:
            return 0.0
        values = 1 + self.num_states * self.run.checkpoint.save_optimizer
        return values * FP32 * self.parameters / self.run.parallel.fsdp

    def in_flight(self) -> float:
        """Return how many microbatches' or chunks' activations of all this rank's layers are held at a time."""
        parallel, number = self.run.parallel, self.microbatches
        pp, stages = parallel.pp, max(1, self.num_stages)
        if pp == 1:
            return 1
        if num_chunks(self.run) > 1:
            return min(self.backwards, pp - self.rank)
        if parallel.pipeline_schedule == "1f1b":
            return min(number, pp - self.rank) if number >= pp else number
        if SCHEDULES[parallel.pipeline_schedule].is_v_shaped:
            return min(number, pp)
        warm_up = (stages - 1) * pp + 2 * (pp - self.rank - 1) + 1
        return min(number, warm_up / stages)

    def moments(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield the name of each moment of the diagram above and its bytes by component."""
        sets = self.layer_sets()
        num_offloaded = round(self.run.memory.offload_activations * len(sets))
        on_device = [kept - (self._offloaded_of_layer() if index < num_offloaded else 0)
                     for index, (kept, _) in enumerate(sets)]
        other_microbatches = (self.in_flight() - 1) * sum(on_device)
        if self.run.parallel.pp > 1:  # the schedule keeps every stage's output until that microbatch's backward
            other_microbatches += self.in_flight() * self.num_stages * self.layer.x
        if self.is_last:
            yield from self._loss_moments(sum(on_device) + other_microbatches)
        unit = max(1, self.num_layers // max(1, len(sets)))
        for index in range(len(sets) - 1, -1, -1):
            done = self.num_layers - (index + 1) * unit
            previous = self.output if done == 0 else self.weights.layer
            # The layer's input and attention's results are back from host memory, on a GPU also the results before.
            fetched = self.layer.x + self.results if index < num_offloaded else 0
            early = self.results if 0 < index < num_offloaded and self.device == "gpu" else 0
            yield f"backward of layer {index * unit}", {
                "kept activations": sum(on_device[:index]) + other_microbatches + fetched + early,
                "layer working set": sets[index][1] - fetched,
                "gathered weights": self.gathered(layers=(index + 1) * unit, layer_now=True, output=False),
                "gradients": (self.gradients(layers_done=done, working=0, previous=previous)
                              + self.sizes.element * self.weights.layer)}
        first = self.embedding + (self.output if self.weights.is_tied else 0)
        yield "gradients of the first part", {
            "kept activations": other_microbatches, "layer working set": 2 * self.layer.x,
            "gathered weights": self.gathered(layers=0, layer_now=True, output=False),
            "gradients": self.gradients(layers_done=self.num_layers, working=first, previous=0)}
        if self.run.parallel.fsdp > 1 and not self.is_wrapped:
            whole = FP32 * self.parameters
            yield "sum of the gradients", {"gradients": whole + min(GRADIENT_BUCKET, whole)}

    def _loss_moments(self, kept: float) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield the moments (1) and (2), at which all layers hold their kept activations."""
        gradients = self.gradients(layers_done=0, working=0, previous=0) - self._output_gradients()
        for moment, working, output in (("loss", self._loss(), True),
                                        ("gradient of the output layer", self._loss_gradients(), False)):
            yield moment, {"kept activations": kept, "loss": working, "gradients": gradients,
                           "gathered weights": self.gathered(layers=self.num_layers, layer_now=False, output=output)}

    def _output_gradients(self) -> float:
        """Return the bytes of the output layer's gradients, which ``gradients`` counts and which do not exist yet."""
        return 0.0 if self.backwards > 1 or self.offloads else FP32 * self.output / self.shard

    def _loss(self) -> float:
        """Return the bytes of the final norm's input and output, of the gradients of x and weight, and of a tile."""
        sizes, e = self.sizes, self.sizes.element
        tile = sizes.loss_tile(self.run, self.device)
        dx = sizes.inside * sizes.hidden * (FP32 if self.run.precision.fp16 else e)
        gathered = sizes.inside * sizes.hidden * e if sizes.outside != sizes.inside else 0
        logits = tile * sizes.vocab * (FP32 if e == FP32 else FP32 + e) + tile * sizes.hidden * e
        weight = sizes.vocab * sizes.hidden * (FP32 if e == FP32 else FP32 + e)
        return 2 * self.layer.x + gathered + dx + weight + logits

    def _loss_gradients(self) -> float:
        """Return the bytes of x, of its gradient before and after the norm, and of the weight's gradient."""
        weight = self.sizes.vocab * self.sizes.hidden
        if self.weights.is_tied and self.is_first:
            return 3 * self.layer.x  # ``gradients`` counts the gradient of the tied weight
        return 3 * self.layer.x + (self._reduction() if self.is_wrapped else FP32) * weight


def slow_attention(run: Run) -> tuple[str, ...]:
    """Return a sentence where attention dropout keeps a run from fused attention."""
    if run.model.attention_dropout == 0 or run.parallel.ring > 1:
        return ()
    return (f"--attention-dropout {run.model.attention_dropout:g} makes attention several times slower: probabilities "
            "are computed in blocks of queries, because fused attention cannot drop them. Give --attention-dropout 0.",)
