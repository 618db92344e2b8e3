"""Which layers attend within a sliding window, and how many pairs of query and key that leaves. Pure arithmetic.

With a window of W tokens a query sees the key at its own position and the W - 1 before it. Local layers, which have the
window, and global layers, which see all earlier tokens, can alternate (``--window-attn-skip-freq``). The patterns of
blocks that layers can have in place of a window are in ``layout/patterns``.
"""

from __future__ import annotations

import ast

from megatron_sp.config.schema import Model

#: More layers than any model has; a list of layers on the command line cannot become longer.
MOST_LAYERS = 100_000


def parse_local_layers(text: str) -> int | tuple[bool, ...]:
    """Return the meaning of ``--window-attn-skip-freq``.

    Args:
        text: "N": every N-th layer is global. Or a Python list, of which sums and multiples are allowed as in
            Megatron ("([1]*3+[0])*4"): for each layer 1 (local) or 0 (global).

    Returns:
        N, or for each layer whether it is local.

    Raises:
        ValueError: with a sentence fragment saying what is wrong.
    """
    wrong = ValueError(f"{text!r} is neither a number of layers of 1 or more nor a list of 1 and 0 such as "
                       "([1]*3+[0])*4")
    try:
        value = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise wrong from None
    if isinstance(value, int):
        if value < 1:
            raise wrong
        return value
    if not value or any(part not in (0, 1) for part in value):
        raise wrong
    return tuple(bool(part) for part in value)


def _evaluate(node: ast.expr) -> int | list[int]:
    """Return the value of a whole number, a list of whole numbers, a sum of lists or a multiple of a list."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        parts = [_evaluate(part) for part in node.elts]
        if all(isinstance(part, int) for part in parts):
            return [part for part in parts if isinstance(part, int)]
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult):
            some, times = (left, right) if isinstance(left, list) else (right, left)
            if isinstance(some, list) and isinstance(times, int) and len(some) * times <= MOST_LAYERS:
                return some * times
    raise ValueError("not a list of layers")


def layer_windows(model: Model) -> tuple[int, ...]:
    """Return for each layer the tokens of its window; 0 where a token sees all tokens before it.

    A window as long as the longest sequence hides nothing, so it counts as none.
    """
    window = model.window_size
    if window < 1 or 0 < model.max_position_embeddings <= window:
        return (0,) * model.num_layers
    return tuple(window if name == "sliding-window" else 0 for name in layer_names(model))


def layer_names(model: Model) -> tuple[str, ...]:
    """Return for each layer the value of ``--attention-pattern`` that holds for it.

    ``--attention-pattern-per-layer`` gives its values to the layers in order, and starts again with the first value
    after the last one. Without that flag, the layers that ``--window-attn-skip-freq`` calls global are causal.
    """
    layers, several = model.num_layers, model.attention_pattern_per_layer
    if several:
        return tuple(several[layer % len(several)] for layer in range(layers))
    name = model.attention_pattern or ("sliding-window" if model.window_size > 0 else "causal")
    if not model.window_attn_skip_freq:
        return (name,) * layers
    local = parse_local_layers(model.window_attn_skip_freq)
    if isinstance(local, int):
        local = tuple((layer + 1) % local != 0 for layer in range(layers))
    return tuple(name if is_local else "causal" for is_local in local)


def attended_area(tokens: int, window: int) -> int:
    """Return twice the number of pairs of query and key, counted as the square of the tokens is for causal attention.

    Of the square, the band of the window leaves out two triangles of ``tokens - window`` tokens::

        0 . . . .
        0 0 . . .        5 tokens, window 2: 5^2 - 3^2 = 16, of which the lower half counts
        x 0 0 . .
        x x 0 0 .
        x x x 0 0

    Args:
        window: tokens that a query sees; 0: all before it.
    """
    return tokens * tokens - (max(0, tokens - window)**2 if window else 0)
