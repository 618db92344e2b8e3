"""Build everything that a run needs from its configuration, in order, and train."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_sp.checkpoint.state_file import read_part
from megatron_sp.config.resolve import with_vocab
from megatron_sp.config.schema import Run
from megatron_sp.config.serialize import to_dict
from megatron_sp.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megatron_sp.layout.batch_size import BatchSize
from megatron_sp.layout.length_schedule import Phase
from megatron_sp.layout.patterns.choice import seen_in_words
from megatron_sp.layout.tiles import tokens_at_once
from megatron_sp.runtime import Environment, start, stop
from megatron_sp.train.checkpoints.resume import choose_schedule, load, resume_notes
from megatron_sp.train.checkpoints.state import TrainState
from megatron_sp.train.length_phases import run_of_phase, starting_phase
from megatron_sp.train.report.recorder import Recorder
from megatron_sp.train.report.timers import Timers
from megatron_sp.train.signals import StopSignals

#: Sequence length from which on unfused attention takes most of the time of a step.
LONG_SEQUENCE = 8192

if TYPE_CHECKING:
    from megatron_sp.data.batch import Readers
    from megatron_sp.data.build import Splits
    from megatron_sp.parallel.mesh import ParallelMesh
    from megatron_sp.train.trainer import Trainer


def pretrain(run: Run, environment: Environment, signals: StopSignals, notes: Sequence[str] = (), *,
             started: float) -> int:
    """Set up the run, train, leave the process group, and return the exit code.

    Args:
        notes: lines to print before the configuration.
        started: ``time.monotonic()`` when the program started.

    Raises:
        UserError: on every rank, for mistakes that the user can correct.
    """
    tokenizer = choose_tokenizer(run)
    run = with_vocab(run, tokenizer.vocab_size)
    if run.memory.memory_efficiency:    # the ranks agree on the smallest device before the configuration is known
        from megatron_sp.train.memory_efficiency import with_needed_techniques

        run, chosen = with_needed_techniques(run, start(run.parallel, environment, signals),
                                             environment.local_world_size)
        notes = [*notes, *chosen]
    if environment.rank == 0:
        print_configuration(run, notes)
    device = start(run.parallel, environment, signals)

    from megatron_sp.checkpoint.save_directory import reserve_save_directory, store_configuration
    from megatron_sp.parallel.lost_peers import naming_lost_peers
    from megatron_sp.parallel.stall_warning import warning_of_stalls

    with reserve_save_directory(run) as lock_notes:
        trainer = build_trainer(run, tokenizer, device, signals, started=started)
        try:
            store_configuration(run)      # after build_trainer, so that a run that is refused does not change the file
            for note in lock_notes:
                trainer.recorder.say(note)
            with contextlib.ExitStack() as watching:
                watching.enter_context(naming_lost_peers(trainer.mesh))
                if device.type == "cuda":      # gloo raises an error when a collective runs out of time; NCCL does not
                    watching.enter_context(warning_of_stalls(trainer.mesh, lambda: trainer.state.iteration, _warn_here))
                trainer.fit()
        except BaseException:
            trainer.abandon()
            raise
        trainer.close()
        stop()
    return 0


def _warn_here(line: str) -> None:
    """Print a line on this rank at once, whichever rank it is."""
    print(line, file=sys.stderr, flush=True)


def choose_tokenizer(run: Run) -> Tokenizer:
    """Return the tokenizer that the flags name.

    With ``--mock-data``, ``--vocab-size`` and no flag of a tokenizer it is the NullTokenizer, whose tokens are numbers.
    """
    data = run.data
    named = data.vocab_file or data.merge_file or data.tokenizer_model or data.tokenizer_type != "GPT2BPETokenizer"
    if data.mock_data and run.model.vocab_size and not named:
        data = replace(data, tokenizer_type="NullTokenizer")
    return build_tokenizer(data, run.model.vocab_size)


def print_configuration(run: Run, notes: Sequence[str]) -> None:
    """Print the notes, then the resolved configuration."""
    print("\n".join(notes), end="\n" if notes else "")
    print("configuration:")
    for section, fields in to_dict(run).items():
        for name, value in fields.items():
            print(f"  {section + '.' + name:.<52} {value}")


def unfused_warnings(run: Run) -> list[str]:
    """Return lines for the log on flags that make attention to long sequences unfused."""
    lines = []
    dropout, tokens = run.model.attention_dropout, run.data.seq_length
    if dropout and not run.train.skip_train:
        lines.append(f"WARNING: --attention-dropout {dropout:g} makes attention slow: no fused kernel computes it, and "
                     "at 2048 tokens a step takes about 7 times as long as without. Give --attention-dropout 0 unless "
                     "you need it (0.1 is Megatron's default; most models of today are trained without dropout)")
        if tokens >= LONG_SEQUENCE:
            lines[-1] += (f". This run has {tokens} tokens: at 8192, attention alone takes about 7 times as long, and "
                          "its time grows with the square of the tokens")
    is_used = run.parallel.ring == 1 and tokens_at_once(run) == tokens and not dropout
    if run.train.attention_backend == "unfused" and is_used and tokens >= LONG_SEQUENCE:
        heads = -(-run.model.num_attention_heads // (run.parallel.tp * run.parallel.ulysses))
        size = run.train.micro_batch_size * heads * tokens ** 2 * 4 / 2**30
        lines.append(f"WARNING: --attention-core unfused forms the scores of all pairs of {tokens} tokens at once: "
                     f"{size:,.1f} GiB in fp32 on each rank, several times. Give --attention-core auto")
    return lines


def advice(run: Run) -> list[str]:
    """Return lines for the log on settings that users often choose unknowingly: slow attention, no output files."""
    lines = unfused_warnings(run)
    if not run.checkpoint.save:
        lines.append("no --save: neither metrics.jsonl nor config.json nor a checkpoint is written")
    if run.logging.log_throughput:
        inside = seen_in_words(run.model) + (
            " inside documents" if run.data.reset_attention_mask else "")
        lines.append(f"throughput and MFU count matrix products, the causal half of attention{inside} and no "
                     "recomputation; HFU counts recomputation, too")
    return lines


def build_trainer(run: Run, tokenizer: Tokenizer, device: Any, signals: StopSignals, *, started: float) -> Trainer:
    """Return the trainer with all its parts, on this rank. The process group must exist.

    The checkpoint is read before the datasets are built, because the number of samples still to train on depends on it.

    Args:
        run: a resolved run with known vocabulary sizes.
        device: this rank's ``torch.device``.
    """

    from megatron_sp.model.build import build_model
    from megatron_sp.model.kernels import choose_kernels, kernels_in_words, tries_flash
    from megatron_sp.parallel.mesh import ParallelMesh
    from megatron_sp.train.train_step import TrainStep
    from megatron_sp.train.trainer import Trainer

    mesh = ParallelMesh.build(run.parallel, device)
    if mesh.global_rank == 0 and tries_flash(run, device):
        print("trying the versions of flash attention that are installed, each on every GPU in a process of its own; "
              "--attention-core sdpa leaves this out", flush=True)
    kernels = choose_kernels(run, device, mesh.group("tp"))
    model = build_model(run, mesh, kernels=kernels)
    timers = Timers(run.logging.timing_log_level, device)
    step, state = TrainStep.build(run, model, mesh, timers), TrainState()
    notes: list[str] = []
    continued: dict[str, Any] | None = None
    if run.checkpoint.load or run.checkpoint.pretrained_checkpoint or run.checkpoint.load_hf:
        saved, weights_only = load(run, model, step.optimizer)
        notes = resume_notes(run, saved, weights_only)
        if saved is not None and not weights_only:
            state, continued = read_part(saved, "train", TrainState.from_dict), saved["config"]
            if scale_note := read_part(saved, "loss_scaler", step.scaler.load_state_dict):
                notes.append(scale_note)
            if not run.train.skip_train:
                step = replace(step, schedule=choose_schedule(step.schedule, saved, run))
    phase = starting_phase(run, state, continued)
    recorder = Recorder(run, device, timers, state, is_writer=mesh.global_rank == 0)
    for note in (*notes, *advice(run)):
        recorder.say(note)
    readers_of = partial(build_readers, run, tokenizer, mesh, state, recorder)
    try:
        readers = readers_of(phase)
    except BaseException:
        recorder.close(failed=True)
        raise
    num_layers, num_parameters = count_layers_and_parameters(model, mesh)
    world, layout = run.parallel.world_size, layout_in_words(run_of_phase(run, phase))
    recorder.say(f"model of {num_layers} layers, {num_parameters:,} parameters (vocabulary padded to "
                 f"{run.model.padded_vocab_size:,}); {world} rank{'s' if world > 1 else ''}: {layout}")
    recorder.say(kernels_in_words(run, kernels))
    for warning in kernels.warnings:
        recorder.say(f"WARNING: {warning}")
    recorder.progress(f"started at iteration {state.iteration}, {state.consumed_samples} samples")
    trainer = Trainer(run, step, readers, state, recorder, signals, started=started, readers_of=readers_of)
    trainer.enter(phase)
    return trainer


def build_readers(run: Run, tokenizer: Tokenizer, mesh: ParallelMesh, state: TrainState, recorder: Recorder,
                  phase: Phase | None = None) -> Readers:
    """Build the datasets and return their readers. Each evaluation reads the same ``--eval-iters`` global batches.

    Args:
        run: the whole training.
        phase: a phase of ``--seq-length-schedule``, whose sequence length all sets get.
    """
    from megatron_sp.data.batch import BatchReader, Readers
    from megatron_sp.data.documents import Documents
    from megatron_sp.layout.tokens import SequenceLayout

    with recorder.timers("datasets", occasional=True):
        splits = run_datasets(run, tokenizer, state, phase)
    recorder.say(f"data:\n{splits.describe()}")
    run = run_of_phase(run, phase)
    layout, documents = SequenceLayout.of(run), Documents.of(run.data, tokenizer.eod)

    def reader(dataset: Any, read_ahead: bool) -> BatchReader | None:
        if dataset is None:
            return None
        return BatchReader(dataset, layout, mesh.rank("sp"), mesh.rank("dp"), mesh.size("dp"), tokenizer.eod,
                           run.data.eod_mask_loss, read_ahead, vocab_size=run.model.vocab_size, documents=documents,
                           pin=mesh.device.type == "cuda")

    named = {name: made for name, dataset in splits.named_valid.items() if (made := reader(dataset, False))}
    return Readers(reader(splits.train, run.data.num_workers > 0), reader(splits.valid, False),
                   reader(splits.test, False), named)


def run_datasets(run: Run, tokenizer: Tokenizer | None, state: TrainState, phase: Phase | None = None, *,
                 must_store: bool = False) -> Splits:
    """Build the datasets of a run, or of a phase of ``--seq-length-schedule``.

    The training set of a phase is made of samples of the whole training. The other sets have samples of its length.

    Args:
        tokenizer: None where the data needs none.
        must_store: see ``build_datasets``.
    """
    from megatron_sp.data.build import build_datasets
    from megatron_sp.data.length_phase import LengthPhaseDataset

    def build(of: Run, *counts: int) -> Splits:
        return build_datasets(of.data, None, counts, of.train.seed, vocab_size=of.model.vocab_size,
                              tokenizer=tokenizer, must_store=must_store)

    if phase is None or phase.parts == 1:
        return build(run, *sample_counts(run, state))
    whole, short = build(run, samples_to_train(run, state), 0, 0).train, run_of_phase(run, phase)
    train = None if whole is None else LengthPhaseDataset(whole, phase, run.train.seed)
    return replace(build(short, 0, evaluation_samples(short), evaluation_samples(short)), train=train)


def sample_counts(run: Run, state: TrainState) -> tuple[int, int, int]:
    """Return how many samples the training, validation and test sets need."""
    return samples_to_train(run, state), evaluation_samples(run), evaluation_samples(run)


def evaluation_samples(run: Run) -> int:
    """Return how many samples an evaluation reads."""
    return run.train.eval_iters * BatchSize.of(run).last


def samples_to_train(run: Run, state: TrainState) -> int:
    """Return the number of samples of the training set, those read before a resume included.

    Usually the flags alone decide, so that the order of the samples does not depend on where a run was resumed. A run
    whose global batch size was raised on resume needs more samples than the flags give. Then the set is longer.
    """
    train = run.train
    if train.skip_train:
        return 0
    if train.train_samples:
        return train.train_samples
    batch, remaining = BatchSize.of(run), max(train.train_iters - state.iteration, 0)
    return max(batch.samples(train.train_iters),
               state.consumed_samples + batch.samples(remaining, consumed_samples=state.consumed_samples))


def count_layers_and_parameters(model: Any, mesh: ParallelMesh) -> tuple[int, int]:
    """Return the numbers of layers and parameters that were built, summed over the pipeline stages."""
    import torch

    from megatron_sp.parallel.pipeline import own_parameters

    own = dict(own_parameters(model))
    layers = {name.split(".")[1] for name in own if name.startswith("layers.")}
    counts = torch.tensor([len(layers), sum(p.numel() for p in own.values())], dtype=torch.int64)
    num_layers, num_parameters = mesh.sum_over(counts, "pp").tolist()
    return num_layers, num_parameters


def layout_in_words(run: Run) -> str:
    """Return a clause for the log: data-parallel size and how it follows from the other degrees, and the batch size."""
    parallel, train = run.parallel, run.train
    sizes = {"tensor": parallel.tp, "pipeline": parallel.pp, "ulysses": parallel.ulysses, "ring": parallel.ring}
    others = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    origin = f" = {parallel.world_size} / ({' x '.join(others)})" if others else ""
    size = BatchSize.of(run).last
    return (f"data parallel {parallel.dp}{origin}, ZeRO stage {parallel.zero_stage}; global batch {size} = micro-batch "
            f"{train.micro_batch_size} x data parallel {parallel.dp} x "
            f"{size // max(1, train.micro_batch_size * parallel.dp)} microbatches")
