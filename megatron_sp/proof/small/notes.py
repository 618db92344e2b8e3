"""Tell the user what a small run has in common with the run that it stands for, and what not. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_sp.config.schema import Run
from megatron_sp.layout.patterns.choice import layer_patterns
from megatron_sp.layout.tiles import num_chunks
from megatron_sp.proof.small.code_paths import PATHS

DEGREES = {"tensor": "tp", "pipeline": "pp", "Ulysses": "ulysses", "ring": "ring",
           "stages per rank": "stages_per_rank"}


def sizes(run: Run) -> dict[str, str]:
    """Return the sizes that a run uses and a proof makes smaller, in words, by names that the user knows."""
    model, memory, train = run.model, run.memory, run.train
    found: dict[str, object] = {
        "hidden": model.hidden_size, "heads": f"{model.num_attention_heads}/{model.num_query_groups}",
        "head width": model.kv_channels, "ffn": model.ffn_hidden_size, "layers": model.num_layers,
        "vocabulary": model.vocab_size or "unknown", "sequence": run.data.seq_length, "window": model.window_size,
        "MLP tile": memory.mlp_tile_size, "loss tile": memory.loss_tile_size,
        "head groups": memory.attention_head_groups, "data parallel": run.parallel.dp,
        "global batch": train.global_batch_size, "micro-batch": train.micro_batch_size,
    }
    if memory.sequence_chunk_size:
        found["chunks"] = f"{num_chunks(run)} of {memory.sequence_chunk_size} tokens"
    if memory.recompute_granularity:
        found["recomputed layers"] = memory.recompute_num_layers
    if any(pattern is not None for pattern in layer_patterns(model)):
        found |= {"tokens of a block": model.attention_block_size, "local blocks": model.attention_local_blocks,
                  "global blocks": model.attention_global_blocks, "random blocks": model.attention_random_blocks,
                  "stride": model.attention_stride}
    return {name: str(value) for name, value in found.items()}


def notes_on_sizes(run: Run, small: Run) -> list[str]:
    """Return a sentence for the user about the sizes that became smaller."""
    before, after = sizes(run), sizes(small)
    changed = [f"{name} {before[name]} -> {after[name]}" for name in before if before[name] != after[name]]
    return [f"made smaller: {', '.join(changed)}."] if changed else []


def notes_on_degrees(run: Run, small: Run, missing: Sequence[str], most: int) -> list[str]:
    """Return sentences for the user about degrees that became smaller and about code paths that are not proven.

    Args:
        missing: the code paths (keys of ``PATHS``) that the small run does not take.
        most: number of processes that the proof may use.
    """
    before, after = run.parallel, small.parallel
    changed = [f"{name} {getattr(before, axis)} -> {getattr(after, axis)}" for name, axis in DEGREES.items()
               if getattr(before, axis) != getattr(after, axis)]
    found = []
    if changed:
        found.append(f"degrees made smaller, because one replica of {before.tp * before.pp * before.sp} ranks does not "
                     f"fit here or a smaller one takes the same code paths: {', '.join(changed)}.")
    if missing:
        found.append(f"not in this proof, because no run of at most {most} processes that its flags allow has all of "
                     f"it: {'; '.join(PATHS[name][1] for name in missing)}.")
    return found
