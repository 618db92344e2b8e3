"""The settings that every proof has, whatever its size: precision, data, optimizer and schedule. Pure arithmetic."""

from __future__ import annotations

from dataclasses import replace

from megatron_sp.config.schema import Checkpoint, Data, Logging, Optimizer, Precision, Run, Schedule
from megatron_sp.layout.heads import HeadSplit

#: A prime, so that the vocabulary is padded in every layout.
VOCABULARY = 89
#: Length of the learning rate schedule in iterations. The proof trains only the first few of them.
ITERATIONS = 8
#: The first step warms up, the second has the peak learning rate, and the third begins the decay.
SCHEDULE = Schedule(lr=3e-3, min_lr=1e-3, lr_decay_style="cosine", lr_decay_iters=ITERATIONS, lr_warmup_iters=1,
                    lr_warmup_init=1e-3)
#: The gradient norm of random weights is larger than this, so clipping is active.
CLIP = 0.1
#: Initial dynamic loss scale of a proof in fp16. The default one would overflow in the first steps and skip them.
LOSS_SCALE = 256.0


def with_settings_of_proof(run: Run) -> tuple[Run, list[str]]:
    """Return the run with the settings that every proof has, and notes about them for the user.

    A proof computes in fp64, on random documents and without a batch size ramp-up. Tensors are exchanged as on GPUs:
    through collectives, and under Ulysses overlapped by groups of heads.
    """
    notes, parallel = [], replace(run.parallel, sequence_split=0, shared_memory=False,
                                  ulysses_overlap_groups=_overlap_on_gpus(run))
    if run.precision.dtype != "float32":
        if parallel.zero_stage == 0 and parallel.fsdp > 1:  # as in half precision: FSDP, with shards of one rank
            parallel = replace(parallel, zero_stage=1, fsdp_size=1)
        notes.append(f"{run.precision.dtype} is proven in float64, since rounding would hide errors; then compared "
                     f"roughly in {run.precision.dtype}.")
    if run.data.pack_documents:
        notes.append(f"samples are cut out of a row of documents, without --pack-documents {run.data.pack_documents}, "
                     "which changes which tokens are read, but not how they are computed.")
    if run.train.rampup_batch_size or run.train.step_batch_size_schedule:
        notes.append("the final global batch size is proven, not its ramp-up.")
    run = replace(
        run, precision=Precision(), checkpoint=Checkpoint(), logging=Logging(), parallel=parallel, schedule=SCHEDULE,
        optimizer=_optimizer_of_proof(run.optimizer),
        data=Data(seq_length=run.data.seq_length, mock_data=True, split="70,30,0", eod_mask_loss=True,
                  tokenizer_type="NullTokenizer", num_workers=run.data.num_workers,
                  reset_position_ids=run.data.reset_position_ids, reset_attention_mask=run.data.reset_attention_mask,
                  document_boundaries=run.data.document_boundaries),
        memory=replace(run.memory, attention_head_groups=min(2, run.memory.attention_head_groups)),
        model=replace(run.model, vocab_size=VOCABULARY, padded_vocab_size=0, make_vocab_size_divisible_by=8),
        train=replace(run.train, rampup_batch_size=(), step_batch_size_schedule=(), train_samples=0, train_tokens=0,
                      train_iters=ITERATIONS, eval_iters=2, decrease_batch_size_if_needed=False))
    step = run.train.micro_batch_size * run.parallel.dp
    rounded = max(1, run.train.global_batch_size // step) * step
    return replace(run, train=replace(run.train, global_batch_size=rounded)), notes


def _optimizer_of_proof(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer with a low clipping threshold, a weight decay and a large epsilon.

    Clipping and decay then change the weights enough for a fault in them to be seen. The epsilon is for Adam, which
    divides by moments of gradients. Where these are nearly 0, rounding differs between layouts, and a small epsilon
    would turn that into different steps.
    """
    return replace(optimizer, clip_grad=min(CLIP, optimizer.clip_grad), adam_eps=1e-4, weight_decay=0.1,
                   start_weight_decay=0.1, end_weight_decay=0.1, weight_decay_incr_style="constant")


def half_precision(precision: Precision) -> Precision | None:
    """Return the half precision of a run with a lower initial loss scale; None for fp32."""
    if precision.dtype == "float32":
        return None
    return replace(precision, initial_loss_scale=min(precision.initial_loss_scale, LOSS_SCALE))


def _overlap_on_gpus(run: Run) -> int:
    """Return the number of head groups by which the Ulysses exchange overlaps on GPUs, at most 2."""
    parallel, model = run.parallel, run.model
    if parallel.ulysses_overlap_groups or parallel.ulysses == 1 or parallel.ring > 1 or run.train.compile or (
            run.memory.attention_head_groups > 1):
        return min(2, parallel.ulysses_overlap_groups)
    heads = HeadSplit.of(model.num_attention_heads, model.num_query_groups, tp=parallel.tp, ulysses=parallel.ulysses)
    chunked = run.memory.sequence_chunk_size and not heads.can_cut_keys(2)
    return 1 if chunked else min(2, heads.fewest_query_heads)
