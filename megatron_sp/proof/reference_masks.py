"""Which keys the queries of a layer may see, for the plain model: written a second time, from the definitions.

Each pattern is a rule for one pair of blocks. Nothing here is fast, and nothing is shared with ``layout``, so that a
fault there is not repeated in the model that should reveal it.
"""

from __future__ import annotations

import hashlib
import runpy
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_sp.config.schema import Model

#: Whether a head lets a block of queries see a block of keys before it, by their numbers.
Rule = Callable[[int, int, int], bool]


def visible_keys(model: Model, layer: int, length: int) -> Tensor | None:
    """Return which keys each query of a layer may see, bool ``[n, s, s]``; None where all keys before it."""
    name = pattern_name(model, layer)
    if name == "causal":
        return None
    place = torch.arange(length)
    if name == "sliding-window":
        near = place.unsqueeze(1) - place < model.window_size
        return near.expand(model.num_attention_heads, -1, -1)
    rule, size = rule_of(model, name), model.attention_block_size
    blocks = -(-length // size)
    table = torch.tensor([[[key == query or key < query and rule(head, query, key) for key in range(blocks)]
                           for query in range(blocks)] for head in range(model.num_attention_heads)])
    block = place // size
    return table[:, block.unsqueeze(1), block]  # [n, s, s]


def pattern_name(model: Model, layer: int) -> str:
    """Return the pattern of a layer. Under Megatron's rule every N-th layer has none, or a list says which have one."""
    if model.attention_pattern_per_layer:
        return model.attention_pattern_per_layer[layer % len(model.attention_pattern_per_layer)]
    name = model.attention_pattern or ("sliding-window" if model.window_size else "causal")
    if model.window_attn_skip_freq:
        value = eval(model.window_attn_skip_freq, {"__builtins__": {}})  # as Megatron reads it; the check has seen it
        if not (value[layer] if isinstance(value, list) else (layer + 1) % value):
            return "causal"
    return name


def rule_of(model: Model, name: str) -> Rule:
    """Return the rule of a pattern for the blocks before a query's own."""
    local, chosen, differs = model.attention_local_blocks, model.attention_global_blocks, model.attention_blocks_by_head

    def fixed(head: int, query: int, key: int) -> bool:
        """Return whether a block sees an earlier one: it is in its window, or near the end of an earlier one."""
        turn = head % (local // chosen) if differs and chosen else 0
        from_end = local - key % local  # 1 for the last block of a window
        return query // local == key // local or turn * chosen < from_end <= (turn + 1) * chosen

    def longformer(head: int, query: int, key: int) -> bool:
        """Return whether a block sees an earlier one: it is one of the nearest blocks, or one of the first."""
        return query - key < local or key < chosen

    def bigbird(head: int, query: int, key: int) -> bool:
        """Return whether a block sees an earlier one: as in ``longformer``, or it was drawn at random."""
        others = [block for block in range(query) if not longformer(head, query, block)]
        who = head if differs else 0
        picked: list[int] = []
        for last in range(max(0, len(others) - model.attention_random_blocks), len(others)):
            digest = hashlib.blake2b(f"{model.attention_pattern_seed} {who} {query} {last}".encode(), digest_size=8)
            number = int.from_bytes(digest.digest(), "little") % (last + 1)
            picked.append(last if number in picked else number)
        return longformer(head, query, key) or key in [others[number] for number in picked]

    def strided(head: int, query: int, key: int) -> bool:
        """Return whether a block sees an earlier one: it is one of the nearest blocks, or whole strides away."""
        stride = model.attention_stride or local
        return query - key < local or (query - key) % stride == (head % stride if differs else 0)

    rules: dict[str, Rule] = {"fixed": fixed, "longformer": longformer, "bigbird": bigbird, "strided": strided}
    return rules[name] if name in rules else _own(name)


def _own(spec: str) -> Rule:
    place, _, name = spec.rpartition(":")
    function = runpy.run_path(place)[name]
    takes_head = function.__code__.co_argcount == 2

    def rule(head: int, query: int, key: int) -> bool:
        return key in (function(head, query) if takes_head else function(query))

    return rule
