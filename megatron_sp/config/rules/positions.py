"""Rules about rotary positions and their scaling to longer sequences."""

from __future__ import annotations

from megatron_sp.config.schema import Model, Run

_OF_YARN = {"yarn_beta_fast": "--yarn-beta-fast", "yarn_beta_slow": "--yarn-beta-slow", "mscale": "--mscale",
            "mscale_all_dim": "--mscale-all-dim", "yarn_attention_factor": "--yarn-attention-factor"}


def check_positions(run: Run) -> list[str]:
    """Return what is missing for a scaling of rotary positions, and what contradicts it."""
    model = run.model
    flag = f"--rope-scaling-type {model.rope_scaling_type}"
    if not model.rope_scaling_type:
        return []
    if model.position_embedding_type != "rope":
        return [f"{flag} scales rotary positions; add --position-embedding-type rope."]
    found = []
    if model.use_rope_scaling:
        found.append(f"{flag} and --use-rope-scaling, which is Llama-3.1's rule, exclude each other; keep one.")
    if model.rotary_seq_len_interpolation_factor != 1.0:
        found.append(f"{flag} and --rotary-seq-len-interpolation-factor {model.rotary_seq_len_interpolation_factor:g}, "
                     "which is linear scaling, exclude each other; keep one.")
    return found + _sizes(model, flag)


def _sizes(model: Model, flag: str) -> list[str]:
    original, positions = model.original_max_position_embeddings, model.max_position_embeddings
    if not original and (model.rope_scaling_type == "yarn" or not model.rotary_scaling_factor):
        instead = " or --rotary-scaling-factor F" if model.rope_scaling_type == "ntk" else ""
        return [f"{flag} needs --original-max-position-embeddings N: the sequence length that the model was trained "
                f"on before{instead}."]
    if not model.rotary_scaling_factor:
        return [f"--original-max-position-embeddings {original} is above --max-position-embeddings {positions}, and "
                f"{flag} only lengthens the context; leave it out, or exchange the two."]
    rotated = int(model.kv_channels * model.rotary_percent)
    if model.rope_scaling_type == "ntk" and rotated == 2:
        return [f"{flag} needs at least 4 rotated elements in each head, and there are 2; raise --rotary-percent "
                f"{model.rotary_percent:g}."]
    if model.rope_scaling_type == "ntk":
        return []
    found = []
    if model.rotary_base <= 1:
        found.append(f"{flag} needs a --rotary-base above 1, such as 10000; it is {model.rotary_base:g}.")
    if model.yarn_beta_fast <= model.yarn_beta_slow:
        found.append(f"--yarn-beta-fast {model.yarn_beta_fast:g} must be above --yarn-beta-slow "
                     f"{model.yarn_beta_slow:g}.")
    return found


def position_notes(run: Run) -> list[str]:
    """Return notes on flags of the scaling that have no effect, and on a factor that does not reach the sequences."""
    model, given = run.model, Model()
    kind = model.rope_scaling_type
    if not kind:
        unused = {"--rotary-scaling-factor": model.rotary_scaling_factor > 1,
                  "--original-max-position-embeddings": model.original_max_position_embeddings > 0}
        needed = "--rope-scaling-type"
    else:
        unused, needed = {}, "--rope-scaling-type yarn"
    if kind != "yarn":
        unused |= {flag: getattr(model, name) != getattr(given, name) for name, flag in _OF_YARN.items()}
    notes = [f"{flag} has no effect without {needed}." for flag, is_given in unused.items() if is_given]
    reach = model.rotary_scaling_factor * model.original_max_position_embeddings
    if kind and 0 < reach < run.data.seq_length:
        notes.append(f"--rope-scaling-type {kind} reaches {reach:g} tokens (--original-max-position-embeddings "
                     f"{model.original_max_position_embeddings} x --rotary-scaling-factor "
                     f"{model.rotary_scaling_factor:g}), and --seq-length is {run.data.seq_length}: positions beyond "
                     "that are new to the model.")
    return notes
