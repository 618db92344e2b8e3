"""Mutants: copies of the package with a fault in one line, and for each a layout in which the proof must find it.

A mutant names a piece of a source line and the text that replaces it. ``seen_in`` names a value that the proof must
then find wrong. So a test passes only if the fault itself was found, and not if the copy merely does not run.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_sp"

#: The flags of the model of all mutants. It has realistic sizes, since the proof makes it small itself.
MODEL = ("--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --num-key-value-heads 4 --seq-length 4096 "
         "--global-batch-size 64 --train-iters 10 --lr 1e-4 --mock-data --vocab-size 32000 --swiglu --normalization "
         "RMSNorm --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0")
TP2, U2, PP2 = "--tensor-model-parallel-size 2", "--ulysses-size 2", "--pipeline-model-parallel-size 2"
CHUNKS = "--sequence-chunk-size 1024"
DOCUMENTS = "--reset-position-ids --reset-attention-mask"
BLOCKS = "--attention-pattern bigbird --attention-blocks-by-head"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"


@dataclass(frozen=True)
class Mutant:
    """A fault in one line, and how to find it.

    Attributes:
        file: path of the file within the package.
        right: a piece of a line; it occurs once in the file.
        wrong: the text that replaces it.
        world: number of processes.
        flags: flags of the layout, added to ``MODEL``.
        seen_in: part of the name of a value that the proof must find wrong; "" if the mutant does not run.
    """

    file: str
    right: str
    wrong: str
    world: int
    flags: str
    seen_in: str

    def write(self, directory: Path) -> None:
        """Copy the package into a directory and put the fault into the copy."""
        shutil.copytree(PACKAGE, directory / "megatron_sp", ignore=shutil.ignore_patterns("__pycache__"))
        path = directory / "megatron_sp" / self.file
        text = path.read_text()
        assert text.count(self.right) == 1, f"{self.file} does not have one {self.right!r}: update MUTANTS"
        path.write_text(text.replace(self.right, self.wrong))


#: Faults in the reader, trainer and optimizer; in exchanges and sums; in the assignment of heads; in dropout.
MUTANTS = {
    "label at the end of a shard": Mutant(
        "data/batch.py", "window[:-1], window[1:]", "window[:-1], np.append(window[1:-1], window[0])", 2, U2, "loss"),
    "positions of the first rank on all": Mutant(
        "data/batch.py", "layout.positions(sp_rank)", "layout.positions(0)", 2, U2, "loss"),
    "all replicas read the same samples": Mutant(
        "data/sampler.py", "consumed_samples + dp_rank * micro_batch_size", "consumed_samples", 2, "", "loss"),
    "mask of end-of-document tokens on the next token": Mutant(
        "data/batch.py", "labels[tokens ==", "labels[labels ==", 1, "", "loss"),
    "clip by the squared norm": Mutant(
        "train/train_step.py", "[2].sqrt() + CLIP", "[2] + CLIP", 1, "", "weight "),
    "a step skips what is finite": Mutant(
        "train/train_step.py", "logical_not(allowed,", "logical_and(allowed, allowed,", 1, "", "weight "),
    "gradients not unscaled": Mutant(
        "train/train_step.py", "(divisor, divisor.float(),", "(divisor, (divisor / self.loss_scale).float(),", 1,
        "--fp16", "changes"),
    "decay of norm weights": Mutant(
        "train/schedule.py", "weight_decay if group[\"decay\"] else 0.0", "weight_decay", 1, "", "norm.weight"),
    "schedule one step ahead": Mutant(
        "train/trainer.py", "local, state.scheduler_samples", "local, state.scheduler_samples + samples", 1, "",
        "learning rate"),
    "each microbatch replaces the loss": Mutant(
        "train/forward_backward.py", "total = total + loss", "total = loss", 1, "", "loss"),
    "each chunk replaces the loss": Mutant(
        "train/operation_runner.py", "microbatch.loss + y.detach()", "y.detach()", 1, CHUNKS, "loss"),
    "what later chunks send to keys and values is lost": Mutant(
        "model/attention/chunk_attention.py", "(dk + later[0], dv + later[1])", "(dk, dv)", 1, CHUNKS, "gradient of"),
    "chunks do not see the first one": Mutant(
        "model/attention/chunk_attention.py", "for number in range(past.number) if",
        "for number in range(1, past.number) if", 1, CHUNKS, "loss"),
    "patterns of the first heads on every rank": Mutant(
        "model/attention/patterns.py", "mask=mask.of_heads(self.first_head)", "mask=mask", 2, f"{U2} {BLOCKS}", "loss"),
    "global blocks are left out of backward": Mutant(
        "model/attention/patterns.py", "total.index_add_(0, where.flatten(), part.to(total.dtype).flatten(0, 1))",
        "total[where.flatten()] = part.to(total.dtype).flatten(0, 1)", 1, BLOCKS, "gradient of"),
    "gradients of the last chunk alone": Mutant(
        "train/chunk_recurrence.py", "for number in reversed(range(start, stop - 1))]", "for number in range(0)]", 1,
        CHUNKS, "loss"),
    "tokens of one rank as denominator": Mutant(
        "train/train_step.py", "self.mesh.sum_over(mine, \"fsdp\")", "self.mesh.sum_over(mine, \"tp\")", 2, U2, "loss"),
    "evaluation counts masked tokens": Mutant(
        "train/forward_backward.py", "return self._total(losses), sum(batch.num_valid for",
        "return self._total(losses), sum(batch.labels.numel() for", 1, "", "evaluation loss"),
    "gradients summed twice": Mutant(
        "parallel/gradients.py", "(\"fsdp\").sum_in_place(list(", "(\"fsdp\").sum_in_place(2 * list(", 2, U2,
        "gradient"),
    "mean instead of sum": Mutant(
        "parallel/zero.py", "module.set_gradient_divide_factor(1.0)", "module.set_gradient_divide_factor(2.0)", 2,
        f"{U2} --zero-stage 2", "gradient"),
    "no sum where a tensor-parallel region is left": Mutant(
        "parallel/tensor.py", "return reduce_from_group(x, self.group)", "return x", 2, TP2, "loss"),
    "no sum of input gradients over tp": Mutant(
        "parallel/tensor.py", "return copy_to_group(x, self.group)", "return x", 2, TP2, "gradient of"),
    "no sum of a tied weight's gradients": Mutant(
        "train/forward_backward.py", "self.model.tied.sum_gradients()", "pass", 2, PP2, "gradient of embedding.word"),
    "key/value heads of the first tp rank, replicated": Mutant(
        "layout/heads.py", "(tp_rank * share, (tp_rank + 1) * share)", "(0, share)", 2,
        f"{TP2} --hidden-size 1536 --num-attention-heads 12 --num-key-value-heads 3 --kv-channels 64", "loss"),
    "dropout of the first tp rank's heads": Mutant(
        "layout/heads.py", "(tp_rank * share, (tp_rank + 1) * share)", "(0, share)", 2, f"{TP2} {DROPOUT}", "loss"),
    "first key/value head for all query heads": Mutant(
        "layout/heads.py", "* self.num_kv // self.num_query - offset for", "* 0 for", 2,
        f"{U2} --hidden-size 1536 --num-attention-heads 12 --num-key-value-heads 3 --kv-channels 64", "loss"),
    "dropout of the first shard on all": Mutant(
        "model/context.py", "token_keys(self.sample_ids, places)",
        "token_keys(self.sample_ids, places - places[:, :1])", 2, f"{U2} {DROPOUT}", "loss"),
    "dropout of positions inside documents": Mutant(
        "model/context.py", "self.positions if self.places is None else self.places", "self.positions", 1,
        f"{DOCUMENTS} --hidden-dropout 0.1", "loss"),
    "dropout of attention that begins anew with each chunk": Mutant(
        "model/attention/chunk_attention.py", "replace(dropout, earlier=seen.keys(first)[0])", "dropout", 1,
        f"{CHUNKS} {DROPOUT} --window-size 700", "loss"),
    "earlier ring members under the mask": Mutant(
        "parallel/ring.py", "(whole, slice(0, half), False)", "(whole, slice(0, half), True)", 2,
        "--ring-size 2", "loss"),
    "gradients sent to the wrong ring neighbour": Mutant(
        "parallel/ring.py", "(self.rank + 1) % self.size], ranks[(self.rank - 1)",
        "(self.rank - 1) % self.size], ranks[(self.rank + 1)", 3,
        "--ring-size 3 --seq-length 4098", "loss"),
    "documents that start a token late": Mutant(
        "data/gpt_dataset.py", "self.starts[first:last]) - position", "self.starts[first:last]) - position + 1", 1,
        DOCUMENTS, "loss"),
    "documents that start a token late, by tokens": Mutant(
        "data/documents.py", "self.eod_token) + (start + 1)", "self.eod_token) + (start + 2)", 1,
        f"{DOCUMENTS} --document-boundaries eod", "loss"),
    "no mask on later pipeline stages": Mutant(
        "torch_internals.py", "if self.objects else {}",
        "if self.objects and self.is_first else {}", 2, f"{PP2} {DOCUMENTS}", "loss"),
}
#: Mutants of the default run of the tests; the others are marked slow.
QUICK = ("label at the end of a shard", "clip by the squared norm", "gradients not unscaled",
         "key/value heads of the first tp rank, replicated")


def prove_mutant(directory: str, flags: Sequence[str], world: int) -> list[str]:
    """On a rank: shrink and prove a run with the package in ``directory``, and return the names of all wrong values.

    Modules of the real package that this process has imported are removed first.
    """
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron_sp"]:
        del sys.modules[name]
    sys.path.insert(0, directory)
    import megatron_sp.errors
    from megatron_sp.config.load import load_run
    from megatron_sp.model.build import build_model
    from megatron_sp.proof.small.shrink import shrink
    from megatron_sp.proof.verify import compare_trainings

    assert str(megatron_sp.errors.__file__).startswith(directory)
    run, _ = load_run(flags, world, files=False)
    small = shrink(run)
    assert small.run.parallel.world_size == world, "start as many ranks as the small run has"
    run = replace(small.run, train=replace(small.run.train, eval_iters=1))
    steps = compare_trainings(run, 2, build_model, small.half)
    return [name for step in steps for name in step.exceeding()]
