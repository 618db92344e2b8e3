"""Floating-point operations of the model, counted exactly. Pure; see docs/flops.md for the conventions.

Letters: s sequence, h hidden, f feed-forward width, A = query heads x head width, K = key/value
heads x head width, L layers, V vocabulary (unpadded: the number must not depend on the layout).
Only matrix products count, a multiply-add as 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_sp.config.schema import Model


@dataclass(frozen=True)
class SequenceFlops:
    """Forward FLOPs of one sequence of s tokens.

    Attributes:
        linear: all matrix products with weights, the output layer included.
        attention: scores and their product with the values, as if nothing were masked.
        output: the share of ``linear`` that is the output layer (never recomputed).
    """

    linear: float
    attention: float
    output: float

    def train(self, causal: str = "half", recompute: bool = False) -> float:
        """FLOPs of forward and backward (twice the forward).

        Args:
            causal: ``"half"`` counts half of the square of scores (what a causal kernel has to do);
                ``"full"`` counts all of it, as older tools do.
            recompute: count also the second forward of all layers (hardware FLOPs).
        """
        attention = self.attention / 2 if causal == "half" else self.attention
        forward = self.linear + attention
        return 3 * forward + ((forward - self.output) if recompute else 0)

    def hardware(self, recomputed: tuple[float, float]) -> float:
        """FLOPs of forward, backward and what is computed again (causal half).

        Args:
            recomputed: shares of the layers' products with weights, and of attention, whose forward is repeated.
        """
        layers, attention = recomputed
        return self.train() + layers * (self.linear - self.output) + attention * self.attention / 2


def sequence_flops(model: Model, seq_length: int) -> SequenceFlops:
    """Count one sequence of ``seq_length`` tokens.

    Per token: ``2 [L (h (A + 2K) + A h + m h f) + V h]`` with m = 3 for gated activations, else 2;
    attention per sequence: ``4 L A s^2``.
    """
    h = model.hidden_size
    query = model.num_attention_heads * model.kv_channels
    key_value = model.num_query_groups * model.kv_channels
    matrices = 3 if model.is_gated else 2
    layer = h * (query + 2 * key_value) + query * h + matrices * h * model.ffn_hidden_size
    output = 2 * seq_length * model.vocab_size * h
    return SequenceFlops(
        linear=2 * seq_length * model.num_layers * layer + output,
        attention=4 * model.num_layers * query * seq_length**2,
        output=output)
