"""Convert the attention windows of several dialects to this package's form, before the schema reads its flags.

- One number W, as here, in Hugging Face's ``sliding_window`` and in forks' ``--sliding-window``: a token sees itself
  and the W - 1 tokens before it.
- A pair A,B, as in Megatron's ``--window-size``: a token sees the A tokens before it, itself, and the B after it, of
  which a causal model sees none. So W is A + 1.
- A = -1, and -1 alone: there is no window.
"""

from __future__ import annotations

from megatron_sp.config.cli.claims import Claims
from megatron_sp.config.cli.values import parse_int, parse_words, strip_quotes

FLAGS = ("--window-size", "--sliding-window")


def read_windows(claims: Claims) -> None:
    """Replace the values of each window flag by W, and drop a flag that means no window."""
    for flag in FLAGS:
        if flag not in claims.given:
            continue
        words = [part for word in parse_words(claims.given[flag])
                 for part in strip_quotes(word).strip("()[] ").split(",") if part]
        try:
            sizes = [parse_int(word) for word in words]
        except ValueError as error:
            _break(claims, flag, f"{flag}: {error}.")
            continue
        if not 1 <= len(sizes) <= 2 or min(sizes) < -1:
            _break(claims, flag, f"{flag} {' '.join(words)}".rstrip() + ": give one number W (a token sees itself and "
                                 "the W - 1 before it), or Megatron's pair A,B, which means W = A + 1.")
            continue
        if len(sizes) == 2 and sizes[1] > 0:
            claims.notes.append(f"{flag} {sizes[0]},{sizes[1]}: tokens never see the {sizes[1]} after them, because "
                                "the model is causal. Megatron does the same.")
        if sizes[0] == -1:
            claims.given.pop(flag)
            claims.notes.append(f"{flag} -1 has no effect: every token sees all tokens before it.")
        else:
            claims.given[flag] = [str(sizes[0] + (len(sizes) == 2))]


def _break(claims: Claims, flag: str, problem: str) -> None:
    """Report a value that cannot be read, once."""
    claims.given.pop(flag)
    claims.broken |= set(FLAGS)
    claims.problems.append(problem)
