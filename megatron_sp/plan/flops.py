"""Floating-point operations of the model, counted exactly. Pure; see docs/background/flops.md for the conventions.

Letters: s sequence, h hidden, f feed-forward width, A = query heads x head width, K = key/value
heads x head width, L layers, V vocabulary (unpadded: the number must not depend on the layout).
Only matrix products count, a multiply-add as 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_sp.config.schema import Model, Run
from megatron_sp.layout.stages import stage_layers


@dataclass(frozen=True)
class Repeats:
    """How often backward computes the forward of a part again, as a mean over all layers."""

    projections: float = 0.0  # of attention: q, k, v, output
    attention: float = 0.0
    mlp: float = 0.0


@dataclass(frozen=True)
class SequenceFlops:
    """Forward FLOPs of one sequence of s tokens.

    Attributes:
        projections: the products with attention's weights.
        mlp: those with the feed-forward layers'.
        output: the output layer (never recomputed).
        attention: scores and their product with the values, as if nothing were masked.
    """

    projections: float
    mlp: float
    output: float
    attention: float

    def train(self, causal: str = "half", repeats: Repeats = Repeats()) -> float:
        """FLOPs of forward, backward (twice the forward) and what is computed again.

        Args:
            causal: ``"half"`` counts half of the square of scores (what a causal kernel has to do);
                ``"full"`` counts all of it, as older tools do.
            repeats: none gives model FLOPs, else hardware FLOPs.
        """
        attention = self.attention / 2 if causal == "half" else self.attention
        return (3 * self.output + (3 + repeats.projections) * self.projections + (3 + repeats.mlp) * self.mlp
                + (3 + repeats.attention) * attention)


def repeats_of(run: Run) -> Repeats:
    """What ``--recompute-granularity``, ``--mlp-tile-size`` and ``--attention-head-groups`` compute again.

    Tiles and head groups run their own part again in backward. A layer that is recomputed by itself leaves
    that part out; a unit of several layers does not, and neither does selective recomputation with tiles.
    torch stops a recomputation before its last product, whose result nobody needs.
    """
    memory, model = run.memory, run.model
    kind, tiled, grouped = memory.recompute_granularity, memory.mlp_tile_size > 0, memory.attention_head_groups > 1
    unit = memory.recompute_num_layers if kind and memory.recompute_method == "uniform" else 1
    layers = ends = 1.0 if kind else 0.0  # shares of the layers: recomputed; at the end of what is recomputed at once
    if kind and memory.recompute_method == "block":
        stages = stage_layers(model, run.parallel)
        layers = ends = sum(min(len(stage), memory.recompute_num_layers) for stage in stages) / model.num_layers
    elif unit > 1:
        ends = sum(-(-len(stage) // unit) for stage in stage_layers(model, run.parallel)) / model.num_layers
    attention = layers if unit > 1 or not grouped else 0.0
    mlp = layers if unit > 1 or not tiled or (kind == "selective" and not grouped) else 0.0
    query, key_value = model.num_attention_heads * model.kv_channels, model.num_query_groups * model.kv_channels
    return Repeats(projections=attention + grouped * (query + 2 * key_value) / (2 * query + 2 * key_value),
                   mlp=mlp + tiled - (0.0 if tiled else ends / _matrices(model)),
                   attention=(attention if kind == "full" or grouped else 0.0) + grouped)


def _matrices(model: Model) -> int:
    return 3 if model.is_gated else 2


def sequence_flops(model: Model, seq_length: int) -> SequenceFlops:
    """Count one sequence of ``seq_length`` tokens.

    Per token: ``2 [L (h (A + 2K) + A h + m h f) + V h]`` with m = 3 for gated activations, else 2;
    attention per sequence: ``4 L A s^2``.
    """
    h, layers = model.hidden_size, model.num_layers
    query = model.num_attention_heads * model.kv_channels
    key_value = model.num_query_groups * model.kv_channels
    return SequenceFlops(
        projections=2 * seq_length * layers * (h * (query + 2 * key_value) + query * h),
        mlp=2 * seq_length * layers * _matrices(model) * h * model.ffn_hidden_size,
        output=2 * seq_length * model.vocab_size * h,
        attention=4 * layers * query * seq_length**2)
