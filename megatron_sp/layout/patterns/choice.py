"""Which attention each layer of a run has, from its flags, and how much work it is."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_sp.config.schema import Model
from megatron_sp.layout.masks.windows import attended_area, layer_names, layer_windows
from megatron_sp.layout.patterns.blocks import BigBird, BlockPattern, Fixed, Longformer, Strided, pairs_in_pattern
from megatron_sp.layout.patterns.own import own_pattern

#: The patterns that are made of blocks and have a name.
BLOCK_PATTERNS = ("fixed", "longformer", "bigbird", "strided")
#: All names that ``--attention-pattern`` knows.
PATTERNS = ("causal", "sliding-window", *BLOCK_PATTERNS)


@dataclass(frozen=True)
class LayerAttention:
    """Which earlier tokens the tokens of a layer see.

    Attributes:
        window: tokens of the window; 0: none.
        pattern: blocks that are seen; None: all.
        heads: query heads of the model.
    """

    window: int = 0
    pattern: BlockPattern | None = None
    heads: int = 1

    def area(self, start: int, stop: int) -> float:
        """Return twice the number of pairs of query and key in a range of tokens, as ``windows.attended_area`` does.

        Args:
            start, stop: range of positions, such as a document; its tokens see no key before it.
        """
        if self.pattern is None:
            return attended_area(stop - start, self.window)
        return 2 * pairs_in_pattern(self.pattern, range(self.heads), start, stop) - (stop - start)


def layer_attention(model: Model) -> tuple[LayerAttention, ...]:
    """Return the attention of each layer."""
    return tuple(LayerAttention(window, pattern, model.num_attention_heads)
                 for window, pattern in zip(layer_windows(model), layer_patterns(model)))


def layer_patterns(model: Model) -> tuple[BlockPattern | None, ...]:
    """Return for each layer the blocks that its tokens see; None where it has no pattern of blocks.

    Raises:
        ConfigError: a user's function cannot be loaded.
    """
    names = layer_names(model)
    found = {name: pattern_of(model, name) for name in dict.fromkeys(names)}
    return tuple(found[name] for name in names)


def pattern_of(model: Model, name: str) -> BlockPattern | None:
    """Return the pattern of blocks that a value of ``--attention-pattern`` names; None for causal and sliding-window.

    Raises:
        ConfigError: a user's function cannot be loaded.
    """
    block, by_head, local = model.attention_block_size, model.attention_blocks_by_head, model.attention_local_blocks
    if name == "fixed":
        return Fixed(block, by_head, local, model.attention_global_blocks)
    if name == "longformer":
        return Longformer(block, False, local, model.attention_global_blocks)
    if name == "bigbird":
        return BigBird(block, by_head, local, model.attention_global_blocks, model.attention_random_blocks,
                       model.attention_pattern_seed)
    if name == "strided":
        return Strided(block, by_head, local, model.attention_stride or local)
    flag = "--attention-pattern-per-layer" if model.attention_pattern_per_layer else "--attention-pattern"
    return None if name in ("causal", "sliding-window") else own_pattern(flag, name, block)


def seen_in_words(model: Model) -> str:
    """Return text for reports on which part of causal attention the model computes; "" if it computes all of it."""
    words = [" within the window"] * any(layer_windows(model)) + [" in the blocks of the pattern"] * any(
        layer_patterns(model))
    return " or".join(words)
