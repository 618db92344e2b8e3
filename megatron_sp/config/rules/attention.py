"""Rules about which tokens a token attends to."""

from __future__ import annotations

from megatron_sp.config.schema import Run
from megatron_sp.layout.windows import layer_windows, parse_local_layers


def check_attention(run: Run) -> list[str]:
    """Return contradictions of the flags of the window, and a list of layers that does not fit the model."""
    model = run.model
    found = []
    if model.attention_pattern == "sliding-window" and not model.window_size:
        found.append("--attention-pattern sliding-window needs --window-size W: how many tokens a token attends to, "
                     "itself included.")
    if model.attention_pattern == "causal" and model.window_size:
        found.append(f"--attention-pattern causal and --window-size {model.window_size} contradict each other; keep "
                     "one of them.")
    if model.window_attn_skip_freq:
        try:
            local = parse_local_layers(model.window_attn_skip_freq)
        except ValueError as error:
            return [*found, f"--window-attn-skip-freq: {error}."]
        if not isinstance(local, int) and model.num_layers > 0 and len(local) != model.num_layers:
            found.append(f"--window-attn-skip-freq {model.window_attn_skip_freq} is a list for {len(local)} layers, "
                         f"and --num-layers is {model.num_layers}; give one number for each layer.")
    return found


def window_notes(run: Run) -> list[str]:
    """Return notes on flags of the window that have no effect in a valid run."""
    model, length = run.model, run.data.seq_length
    if not model.window_size:
        return [f"--window-attn-skip-freq {model.window_attn_skip_freq} has no effect without --window-size."
                ] if model.window_attn_skip_freq else []
    if model.window_size >= length:
        return [f"--window-size {model.window_size} has no effect at --seq-length {length}: every token sees all "
                "tokens before it."]
    if not any(layer_windows(model)):
        return [f"--window-size {model.window_size} has no effect with --window-attn-skip-freq "
                f"{model.window_attn_skip_freq}, which leaves no layer with a window."]
    return []
