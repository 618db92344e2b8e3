"""Rules between fields. Each function looks at one topic and returns sentences about what is wrong."""

from __future__ import annotations

from collections.abc import Callable

from megatron_sp.config.cli.options import schema_options
from megatron_sp.config.rules.attention import attention_notes, check_attention
from megatron_sp.config.rules.bounds import BOUNDS, bound_problem
from megatron_sp.config.rules.data import check_data, check_tokenizer
from megatron_sp.config.rules.lengths import check_length_schedule, check_phases, length_notes
from megatron_sp.config.rules.memory import check_chunks, check_memory, check_sizes, check_use_of_sizes
from megatron_sp.config.rules.pipeline import check_pipeline, check_ring
from megatron_sp.config.rules.positions import check_positions, position_notes
from megatron_sp.config.rules.schedule import check_schedule, check_weight_decay, horizon_notes
from megatron_sp.config.rules.sizes import check_batch, check_model, check_overlap, check_parallel, check_sequence
from megatron_sp.config.schema import Data, Run
from megatron_sp.errors import ConfigError
from megatron_sp.layout.recomputation import recompute_unit
from megatron_sp.layout.sequence_split import split_note
from megatron_sp.layout.sharding import may_overlap_tensor


def check(run: Run) -> None:
    """Check a resolved run.

    Raises:
        ConfigError: listing every problem.
    """
    problems = check_problems(run)
    if problems:
        raise ConfigError(problems)


def check_problems(run: Run, plan: bool = False) -> list[str]:
    """Return every broken rule of a resolved run, one sentence each. Looks at no files.

    Args:
        plan: leave out the rules about data, tokenizer, checkpoints and logs, which a plan does not depend on.
    """
    topics: tuple[Callable[[Run], list[str]], ...] = (
        check_required, check_bounds, check_model, check_attention, check_parallel, check_overlap,
        check_ring, check_memory, check_sizes, check_length_schedule, _check_lengths, check_length, check_schedule,
        check_weight_decay, check_precision, check_kernels, check_positions)
    if not plan:
        topics += (check_data, check_tokenizer, check_checkpoint, check_logging, check_use_of_sizes)
    return [problem for topic in topics for problem in topic(run)]


def _check_lengths(run: Run) -> list[str]:
    """Return problems of the rules that depend on the sequence length, in each phase of a length schedule."""
    return check_phases(run, (check_pipeline, check_chunks, check_sequence, check_batch))


def check_required(run: Run) -> list[str]:
    """Return which flags are missing without which nothing can be built."""
    needed = {"--num-layers": run.model.num_layers, "--hidden-size": run.model.hidden_size,
              "--num-attention-heads": run.model.num_attention_heads, "--seq-length": run.data.seq_length,
              "--lr": run.schedule.lr}
    if run.data.seq_length_schedule:        # the schedule gives the lengths; if it is wrong, another rule reports it
        del needed["--seq-length"]
    return [f"{flag} is required." for flag, value in needed.items() if not value]


def check_bounds(run: Run) -> list[str]:
    """Return single values out of bounds; the default of a field may mean "derive it" or "off" and is always right."""
    found = []
    options = schema_options()
    for key in BOUNDS:
        section, _, name = key.partition(".")
        value = getattr(getattr(run, section), name)
        if value != options[key].default and bound_problem(key, value):
            found.append(f"{options[key].flag} {value}: {bound_problem(key, value)}.")
    return found


def check_length(run: Run) -> list[str]:
    """Return problems of the length of the training: missing, given twice, or less than a step."""
    train = run.train
    if train.skip_train and not train.eval_iters:
        return ["--skip-train with --eval-iters 0 leaves nothing to do; give --eval-iters 1 or more, or drop "
                "--skip-train."]
    if train.train_iters and train.train_samples:
        return [f"--train-iters {train.train_iters} and --train-samples {train.train_samples} exclude each other; "
                f"keep one."]
    if not train.train_iters and not train.train_samples:
        return [f"--train-iters or --train-samples is required{_samples_of_tokens(run)}."]
    grows = train.rampup_batch_size or train.step_batch_size_schedule
    if train.train_samples and 0 < train.train_samples < train.global_batch_size and not grows:
        return [f"--train-samples {train.train_samples} is less than one step of --global-batch-size "
                f"{train.global_batch_size}."]
    return []


def _samples_of_tokens(run: Run) -> str:
    """Return the samples that ``--train-tokens`` stands for, as the end of a sentence; "" without it."""
    tokens, length = run.train.train_tokens, run.data.seq_length
    if tokens < 1 or length < 1:
        return ""
    return (f"; --train-tokens {tokens} alone does not say how long the learning rate decays. Add --train-samples "
            f"{-(-tokens // length)}, which are as many tokens at --seq-length {length}")


def check_precision(run: Run) -> list[str]:
    """Return contradictions between compute types, and between bounds of the loss scale."""
    precision = run.precision
    found = []
    if precision.bf16 and precision.fp16:
        found.append("--bf16 and --fp16 exclude each other; keep one.")
    if precision.grad_reduce_in_bf16 and precision.accumulate_allreduce_grads_in_fp32:
        found.append("--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 contradict each other; keep one.")
    if precision.min_loss_scale > precision.initial_loss_scale:
        found.append(f"--min-loss-scale {precision.min_loss_scale:g} is above --initial-loss-scale "
                     f"{precision.initial_loss_scale:g}.")
    return found


def check_logging(run: Run) -> list[str]:
    """Return problems of the profiler: an empty window of steps, and ranks that do not exist."""
    flags = run.logging
    found = []
    if flags.profile and flags.profile_step_end <= flags.profile_step_start:
        found.append(f"--profile-step-end {flags.profile_step_end} must be above --profile-step-start "
                     f"{flags.profile_step_start}.")
    last = run.parallel.world_size - 1
    wrong = [rank for rank in flags.profile_ranks if rank > last]
    if flags.profile and wrong:
        found.append(f"--profile-ranks {' '.join(map(str, flags.profile_ranks))}: there "
                     f"{'is only rank 0' if last == 0 else f'are only ranks 0 to {last}'}.")
    return found


def check_kernels(run: Run) -> list[str]:
    """Return kernels that cannot do what the run asks for."""
    model, train = run.model, run.train
    found = []
    if train.attention_backend == "flash" and run.precision.dtype == "float32":
        found.append("--attention-core flash computes in half precision; add --bf16, or use auto.")
    if train.attention_backend == "flash" and model.attention_dropout:
        found.append("--attention-core flash cannot drop attention probabilities; add --attention-dropout 0, or use "
                     "auto.")
    return found


def check_checkpoint(run: Run) -> list[str]:
    """Return flags of saving and loading that need another flag."""
    checkpoint = run.checkpoint
    found = []
    if checkpoint.save and not checkpoint.save_interval:
        found.append("--save-interval N of 1 or more is required with --save.")
    if checkpoint.ckpt_step and not checkpoint.load:
        found.append(f"--ckpt-step {checkpoint.ckpt_step} needs --load.")
    if checkpoint.use_checkpoint_args and not checkpoint.load:
        found.append("--use-checkpoint-args needs --load.")
    if checkpoint.exit_on_missing_checkpoint and not checkpoint.load:
        found.append("--exit-on-missing-checkpoint needs --load.")
    if checkpoint.pretrained_checkpoint and checkpoint.load_hf:
        found.append(f"--pretrained-checkpoint {checkpoint.pretrained_checkpoint} and --load-hf {checkpoint.load_hf} "
                     "both say where the weights come from; keep one of them.")
    if checkpoint.pretrained_checkpoint and run.train.skip_train:
        found.append(f"--pretrained-checkpoint {checkpoint.pretrained_checkpoint} is what training starts from; with "
                     "--skip-train say --load.")
    return found


def advice(run: Run) -> list[str]:
    """Return notes on what was chosen for the user, and on flags that have no effect in this run."""
    notes = [note] if (note := split_note(run.parallel, run.model)) else []
    if run.parallel.megatron_sp and run.parallel.tp == 1:
        notes.append("--sequence-parallel has no effect at --tensor-model-parallel-size 1"
                     + (" (to split sequences over ranks say --ulysses-size N)." if run.parallel.sp == 1 else "."))
    if run.memory.recompute_granularity == "selective" and recompute_unit(run.memory) > 1:
        notes.append(f"--recompute-granularity selective with --recompute-num-layers {run.memory.recompute_num_layers} "
                     "recomputes as full does, attention too: layers that are recomputed together keep one input only. "
                     "Leave --recompute-num-layers out to keep the results of attention.")
    if run.parallel.tp_comm_overlap and not may_overlap_tensor(run):
        missing = {"--tensor-model-parallel-size 2 or more": run.parallel.tp == 1,
                   "--sequence-parallel": not run.parallel.megatron_sp, "--compile": not run.train.compile}
        needed = " and ".join(flag for flag, is_missing in missing.items() if is_missing)
        notes.append(f"--tp-comm-overlap has no effect without {needed}.")
    if run.precision.loss_scale and not run.precision.fp16:
        notes.append(f"--loss-scale {run.precision.loss_scale:g} has no effect without --fp16.")
    no_effect_on_blocks = run.train.attention_backend in ("flash", "unfused")  # "sdpa" keeps to torch's own kernels
    if run.parallel.ring > 1 and no_effect_on_blocks:
        notes.append(f"--attention-core {run.train.attention_backend} has no effect with --ring-size "
                     f"{run.parallel.ring}: a ring is made of block kernels.")
    if run.memory.sequence_chunk_size and no_effect_on_blocks:
        notes.append(f"--attention-core {run.train.attention_backend} has no effect with --sequence-chunk-size "
                     f"{run.memory.sequence_chunk_size}: chunks attend with block kernels.")
    if run.parallel.ring > 1 and run.data.reset_attention_mask:
        notes.append(f"--ring-size {run.parallel.ring} balances whole sequences and not documents: with "
                     "--reset-attention-mask its ranks have unequal work. --ulysses-size divides it equally.")
    if run.precision.grad_reduce_in_bf16 and run.precision.dtype == "float32":
        notes.append("--grad-reduce-in-bf16 has no effect without --bf16 or --fp16.")
    if (run.data.train_data_path or run.data.mock_data or run.data.dataset_provider) and run.data.split != Data().split:
        notes.append(f"--split {run.data.split} has no effect: it divides the documents of --data-path.")
    if run.data.document_boundaries != Data().document_boundaries and not (
            run.data.reset_position_ids or run.data.reset_attention_mask):
        notes.append(f"--document-boundaries {run.data.document_boundaries} has no effect without --reset-position-ids "
                     "or --reset-attention-mask.")
    if run.data.pack_documents and run.data.mock_data:
        notes.append(f"--pack-documents {run.data.pack_documents} has no effect with --mock-data.")
    if run.data.pack_documents and run.data.dataset_provider:
        notes.append(f"--pack-documents {run.data.pack_documents} has an effect only where --dataset-provider returns "
                     "documents.")
    if run.checkpoint.finetune and not run.checkpoint.load:
        notes.append("--finetune has no effect without --load.")
    if not run.checkpoint.load_optimizer and not run.checkpoint.load:
        notes.append("--no-load-optim has no effect without --load.")
    notes += [f"{name} has no effect without --save." for name, given in (
        ("--async-save", run.checkpoint.async_save), ("--keep-last", run.checkpoint.keep_last),
        ("--save-retain-interval", run.checkpoint.save_retain_interval)) if given and not run.checkpoint.save]
    notes += horizon_notes(run) + attention_notes(run) + position_notes(run) + length_notes(run)
    if run.train.manual_gc_interval and not run.train.manual_gc:
        notes.append(f"--manual-gc-interval {run.train.manual_gc_interval} has no effect without --manual-gc.")
    return notes
