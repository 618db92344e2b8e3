"""A step gathers weights and sums gradients as often as the table in ``parallel/zero.py`` says, whatever the batch.

Nor does the host read a value while it launches the step. It reads the numbers at its end, which is not seen on a CPU.
"""

from __future__ import annotations

from collections import Counter

from megatron_sp.model.build import build_model
from megatron_sp.parallel.mesh import ParallelMesh
from megatron_sp.proof.data import batch, local_microbatches
from megatron_sp.proof.traffic import Traffic
from megatron_sp.train.train_step import TrainStep
from tests.helpers.configs import tiny_run
from tests.helpers.spawn import RunRanks

WORLD = 4
LAYERS = 2
MODEL = (f"--num-layers {LAYERS} --hidden-size 32 --num-attention-heads 4 --swiglu --normalization RMSNorm "
         "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights "
         "--micro-batch-size 1 --seq-length 16 --no-shared-memory ")
KINDS = {"all-gather": "gathers", "reduce-scatter": "scatters", "all-reduce": "sums", "send": "sent",
         "receive": "received"}
#: Units that FSDP gathers: the layers, the embedding, the output layer with the norm before it.
UNITS = LAYERS + 2
#: Sums of a few numbers in every step: valid tokens, and the loss with the gradient norm.
NUMBERS = 2


def count(cases: list[str]) -> list[dict[str, int]]:
    """Return this rank's collectives in the second step of each case; the first step may also create states."""
    found = []
    for flags in cases:
        run = tiny_run((MODEL + flags).split(), WORLD)
        mesh = ParallelMesh.build(run.parallel)
        step = TrainStep.build(run, build_model(run, mesh), mesh)
        microbatches = local_microbatches(run, mesh, *batch(run))
        for _ in range(2):
            with Traffic() as traffic:
                step.train(microbatches, 0)
        counts = Counter({"reads": sum(traffic.host_reads.values())})
        for (kind, _), calls in traffic.collectives.items():
            counts[KINDS.get(kind, kind)] += calls
        found.append(dict(+counts))
        mesh.destroy()
    return found


def test_collectives_of_a_step(ranks: RunRanks) -> None:
    expected: dict[str, dict[str, int]] = {
        "--zero-stage 0": {"sums": NUMBERS + 1},
        "--zero-stage 0 --bf16": {"sums": NUMBERS + UNITS},
        "--zero-stage 0 --bf16 --global-batch-size 12": {"sums": NUMBERS + UNITS},
    }
    for microbatches in (1, 3):
        flags = f"--global-batch-size {4 * microbatches} --zero-stage"
        every, once = microbatches * UNITS, UNITS
        # Stage 3 keeps the output layer for backward, and backward of the embedding needs no weight.
        again = microbatches * (UNITS + LAYERS)
        expected |= {
            f"{flags} 1": {"gathers": once, "scatters": once, "sums": NUMBERS},
            f"{flags} 2": {"gathers": once, "scatters": every, "sums": NUMBERS},
            f"{flags} 3": {"gathers": again, "scatters": every, "sums": NUMBERS},
            f"{flags} 2 --fsdp-size 2": {"gathers": once, "scatters": every, "sums": NUMBERS + once},
            f"{flags} 3 --fsdp-size 2": {"gathers": again, "scatters": every, "sums": NUMBERS + once},
        }
    # Two pipeline stages, each with a layer and one end of the model. Each microbatch crosses once in each direction.
    # Stage 3 frees weights after a forward, but after a backward it keeps them until the next forward.
    pipeline = [f"--pipeline-model-parallel-size 2 --global-batch-size 6 --zero-stage {stage}" for stage in range(4)]
    crossing, unit = {"sent": 3, "received": 3}, UNITS // 2
    sharded = {"gathers": unit, "scatters": unit, "sums": NUMBERS} | crossing
    expected |= {pipeline[0]: {"sums": NUMBERS + 1} | crossing, pipeline[1]: sharded, pipeline[2]: sharded}
    # An entry "reads" would be one too many.
    for rank, of_rank in enumerate(ranks(count, WORLD, [*expected, pipeline[3]])):
        assert dict(zip(expected, of_rank)) == expected
        assert of_rank[-1] == sharded | {"gathers": 7 if rank < 2 else 5}
