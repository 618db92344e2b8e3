"""Rules about which tokens a token attends to."""

from __future__ import annotations

import contextlib

from megatron_sp.config.schema import Model, Run
from megatron_sp.errors import ConfigError
from megatron_sp.layout.masks.windows import layer_names, layer_windows, parse_local_layers
from megatron_sp.layout.patterns.blocks import Own
from megatron_sp.layout.patterns.choice import BLOCK_PATTERNS, PATTERNS, layer_patterns
from megatron_sp.layout.patterns.own import names_function, problems_of

#: For each flag of the patterns of blocks: its field, and the patterns that it changes.
USES = {
    "--attention-block-size": ("attention_block_size", (*BLOCK_PATTERNS, "FILE.py:FUNCTION")),
    "--attention-local-blocks": ("attention_local_blocks", BLOCK_PATTERNS),
    "--attention-global-blocks": ("attention_global_blocks", ("fixed", "longformer", "bigbird")),
    "--attention-random-blocks": ("attention_random_blocks", ("bigbird",)),
    "--attention-stride": ("attention_stride", ("strided",)),
    "--attention-blocks-by-head": ("attention_blocks_by_head", ("fixed", "bigbird", "strided")),
    "--attention-pattern-seed": ("attention_pattern_seed", ("bigbird",)),
}


def check_attention(run: Run) -> list[str]:
    """Return contradictions of the flags of windows and patterns, and lists of layers that do not fit the model."""
    model = run.model
    found = _names(model) + _window(model)
    if model.window_attn_skip_freq:
        try:
            local = parse_local_layers(model.window_attn_skip_freq)
        except ValueError as error:
            return [*found, f"--window-attn-skip-freq: {error}.", *_ring(run)]
        if not isinstance(local, int) and model.num_layers > 0 and len(local) != model.num_layers:
            found.append(f"--window-attn-skip-freq {model.window_attn_skip_freq} is a list for {len(local)} layers, "
                         f"and --num-layers is {model.num_layers}; give one number for each layer.")
    return (found or _blocks(run)) + _ring(run)


def _flag(model: Model) -> str:
    """Return the flag that names the patterns."""
    return "--attention-pattern-per-layer" if model.attention_pattern_per_layer else "--attention-pattern"


def _named(model: Model) -> tuple[str, ...]:
    """Return the patterns that the flags name."""
    return model.attention_pattern_per_layer or (model.attention_pattern,)


def _names(model: Model) -> list[str]:
    """Return patterns that do not exist, and flags that name patterns twice."""
    several = model.attention_pattern_per_layer
    found = [f"{_flag(model)} {name!r} is not one of {', '.join(PATTERNS)}, and no FILE.py:FUNCTION."
             for name in _named(model) if name not in PATTERNS and not names_function(name)]
    said = " ".join(several)
    if several and model.attention_pattern:
        found.append(f"--attention-pattern {model.attention_pattern} and --attention-pattern-per-layer {said} both say "
                     "what layers attend to; keep one of them.")
    if several and model.window_attn_skip_freq:
        found.append(f"--window-attn-skip-freq {model.window_attn_skip_freq} and --attention-pattern-per-layer {said} "
                     "both say which layers are local; keep one of them.")
    if len(several) > model.num_layers > 0:
        found.append(f"--attention-pattern-per-layer {said} names {len(several)} patterns, and --num-layers is "
                     f"{model.num_layers}; leave {len(several) - model.num_layers} out.")
    return found


def _window(model: Model) -> list[str]:
    """Return a problem where sliding-window has no --window-size, or --window-size stands with other patterns."""
    names, window = _named(model), model.window_size
    if "sliding-window" in names:
        return [] if window else [f"{_flag(model)} {' '.join(names)} needs --window-size W: how many tokens a token "
                                  "attends to, itself included."]
    return [f"{_flag(model)} {' '.join(names)} and --window-size {window} contradict each other; keep one of them."
            ] if window else []


def _blocks(run: Run) -> list[str]:
    """Return what is wrong with the blocks of patterns."""
    model = run.model
    found = []
    if "fixed" in _named(model) and model.attention_global_blocks > model.attention_local_blocks:
        found.append(f"--attention-global-blocks {model.attention_global_blocks} is more than a window of the "
                     f"pattern fixed has: --attention-local-blocks {model.attention_local_blocks}; give at most as "
                     "many.")
    if model.attention_block_size < 1 or model.attention_local_blocks < 1 or found:
        return found  # ``bound_problem`` reports values below 1
    try:
        patterns = dict.fromkeys(pattern for pattern in layer_patterns(model) if pattern is not None)
    except ConfigError as error:
        return error.problems
    length = run.data.seq_length
    for pattern in patterns:
        if isinstance(pattern, Own) and length > 0:
            found += problems_of(pattern, model.num_attention_heads, -(-length // pattern.block))
    return found


def _ring(run: Run) -> list[str]:
    """Return a problem where a run combines patterns of blocks with a ring."""
    ring, names = run.parallel.ring, _named(run.model)
    with contextlib.suppress(ValueError):   # --window-attn-skip-freq cannot be read, which is reported already
        names = layer_names(run.model)
    if ring < 2 or all(name not in BLOCK_PATTERNS and not names_function(name) for name in names):
        return []
    names = tuple(dict.fromkeys(_named(run.model)))
    return [f"{_flag(run.model)} {' '.join(names)} is not possible with --ring-size {ring}: a ring passes on fixed "
            "shares of the keys, not the pattern's blocks. Use --ulysses-size, whose ranks share the work equally."]


def attention_notes(run: Run) -> list[str]:
    """Return notes on flags of windows and patterns that have no effect in a valid run."""
    model, length = run.model, run.data.seq_length
    found = _unused(model)
    blocks = any(name not in ("causal", "sliding-window") for name in _named(model))
    if blocks and length <= model.attention_block_size:
        found.append(f"--attention-block-size {model.attention_block_size} holds all of --seq-length {length}: every "
                     "token sees all tokens before it.")
    elif blocks and length <= model.attention_block_size * model.attention_local_blocks and not any(
            map(names_function, _named(model))):
        found.append(f"{_flag(model)} has no effect at --seq-length {length}: --attention-local-blocks "
                     f"{model.attention_local_blocks} of {model.attention_block_size} tokens hold all of it.")
    if blocks and model.window_attn_skip_freq and set(layer_names(model)) == {"causal"}:
        found.append(f"--attention-pattern {model.attention_pattern} has no effect with --window-attn-skip-freq "
                     f"{model.window_attn_skip_freq}, which leaves no layer with it.")
    if not model.window_size:
        return found + [f"--window-attn-skip-freq {model.window_attn_skip_freq} has no effect without --window-size or "
                        "--attention-pattern."] * bool(model.window_attn_skip_freq and not blocks)
    if model.window_size >= length:
        found.append(f"--window-size {model.window_size} has no effect at --seq-length {length}: every token sees all "
                     "tokens before it.")
    elif not any(layer_windows(model)):
        found.append(f"--window-size {model.window_size} has no effect with --window-attn-skip-freq "
                     f"{model.window_attn_skip_freq}, which leaves no layer with a window.")
    return found


def _unused(model: Model) -> list[str]:
    """Return notes on flags of blocks that no pattern of the run reads."""
    used = {"FILE.py:FUNCTION" if names_function(name) else name for name in _named(model)}
    default = Model()
    return [f"{flag} has no effect without --attention-pattern {' or '.join(patterns)}."
            for flag, (field, patterns) in USES.items()
            if getattr(model, field) != getattr(default, field) and not used.intersection(patterns)]
