"""Floating-point operations (FLOPs) of the model. docs/background/flops.md explains what is counted and why.

Only matrix products count, and a multiply-add counts as 2.

Letters: s tokens of the sequence, h hidden size, f feed-forward width, A = query heads x head width, K = key/value
heads x head width, L layers, V vocabulary without padding (which depends on the layout; the count must not).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_sp.config.schema import Model, Run
from megatron_sp.layout.masks.segments import Segments, window_reach
from megatron_sp.layout.patterns.choice import LayerAttention, layer_attention
from megatron_sp.layout.recomputation import recompute_unit, recomputed_layers
from megatron_sp.layout.stages import stage_layers
from megatron_sp.layout.tiles import num_chunks
from megatron_sp.plan.sizes import forms_probabilities


@dataclass(frozen=True)
class Repeats:
    """How many times a step computes the forward of each part again, as a mean over all layers.

    Attributes:
        projections: products with attention's weights, which give q, k, v and the output.
        attention: scores and their product with the values.
        mlp: products with the feed-forward layers' weights.
    """

    projections: float = 0.0
    attention: float = 0.0
    mlp: float = 0.0


@dataclass(frozen=True)
class SequenceFlops:
    """Forward FLOPs of one sequence of s tokens.

    Attributes:
        projections: products with attention's weights.
        mlp: products with the feed-forward layers' weights.
        output: product with the output layer's weight, which is never computed again.
        attention: scores and their product with the values, as if the causal mask hid none of them. Those that a
            window or a pattern hides are left out.
    """

    projections: float
    mlp: float
    output: float
    attention: float

    def train(self, causal: str = "half", repeats: Repeats = Repeats()) -> float:
        """Return the FLOPs of forward, of backward (twice the forward) and of what backward computes again.

        Args:
            causal: "half" counts half of the square of scores, which is what a causal kernel has to compute. "full"
                counts the whole square, as older tools do.
            repeats: the default gives model FLOPs (MFU); with ``repeats_of(run)`` hardware FLOPs (HFU).
        """
        attention = self.attention / 2 if causal == "half" else self.attention
        return (3 * self.output + (3 + repeats.projections) * self.projections + (3 + repeats.mlp) * self.mlp
                + (3 + repeats.attention) * attention)


def repeats_of(run: Run) -> Repeats:
    """Return what recomputation, tiles, head groups, attention dropout and chunks compute again.

    - ``--mlp-tile-size`` and ``--attention-head-groups`` compute their own part again. Recomputing a single layer
      leaves that part out. Recomputing several layers together does not, and neither does selective recomputation with
      tiles.
    - ``--attention-dropout`` forms probabilities in blocks of queries and computes their scores again.
    - Selective recomputation keeps the results of attention of every kind but the unfused one of ``--attention-core
      unfused`` without dropout, whose backward needs the probabilities. Layers that are recomputed together keep none.
    - torch stops a recomputation before its last product, whose result nobody needs.
    - ``--sequence-chunk-size`` computes the forward of all chunks but the last once more, before any backward. The
      store of keys and values keeps the output of attention for selective recomputation, which then repeats none.
    """
    memory, model = run.memory, run.model
    kind, tiled, grouped = memory.recompute_granularity, memory.mlp_tile_size > 0, memory.attention_head_groups > 1
    drops = model.attention_dropout > 0
    chunks = num_chunks(run)
    unit, stages = recompute_unit(memory), stage_layers(model, run.parallel)
    is_kept = kind == "selective" and unit == 1 and not grouped and not forms_probabilities(run)
    # Fractions of all layers: ``layers`` are recomputed, ``ends`` are the last layer of a unit that is recomputed as
    # one.
    layers = sum(len(recomputed_layers(memory, stage)) for stage in stages) / model.num_layers
    ends = layers if unit == 1 else sum(-(-len(stage) // unit) for stage in stages) / model.num_layers
    attention = layers if unit > 1 or not grouped else 0.0
    mlp = layers if unit > 1 or not tiled or (kind == "selective" and not grouped) else 0.0
    query, key_value = model.num_attention_heads * model.kv_channels, model.num_query_groups * model.kv_channels
    first_pass = (chunks - 1) / chunks  # of the tokens
    scores = (0.0 if is_kept else attention) + grouped + drops / 2
    if chunks > 1:  # the first pass needs no attention in the last layer
        seen, length, again = layer_attention(model), run.data.seq_length, segments_again(run)
        scores += _attended(seen[:-1], length * (chunks - 1) // chunks) / _attended(seen, length)
        if kind == "selective" and not drops:
            scores = 0.0
        scores += again * (1 - 1 / model.num_layers)
        first_pass += again
    return Repeats(
        projections=attention + first_pass + grouped * (query + 2 * key_value) / (2 * query + 2 * key_value),
        mlp=mlp + tiled + first_pass - (0.0 if tiled else ends / _matrices(model)), attention=scores)


def _matrices(model: Model) -> int:
    """Return the number of weight matrices of a feed-forward layer."""
    return 3 if model.is_gated else 2


def sequence_flops(model: Model, seq_length: int) -> SequenceFlops:
    """Return the forward FLOPs of one sequence.

    Per token: ``2 [L (h (A + 2K) + A h + m h f) + V h]``, with m = 3 matrices for gated activations, else 2.
    Attention per sequence: ``4 L A s^2``; in a layer with a window of W tokens ``4 A (s^2 - (s - W)^2)``, and
    under a pattern that allows p pairs of a query and a key ``4 A (2 p - s)``.
    """
    h, layers = model.hidden_size, model.num_layers
    query = model.num_attention_heads * model.kv_channels
    key_value = model.num_query_groups * model.kv_channels
    return SequenceFlops(
        projections=2 * seq_length * layers * (h * (query + 2 * key_value) + query * h),
        mlp=2 * seq_length * layers * _matrices(model) * h * model.ffn_hidden_size,
        output=2 * seq_length * model.vocab_size * h,
        attention=4 * query * _attended(layer_attention(model), seq_length))


def segments_again(run: Run) -> float:
    """Return the share of a sequence's tokens that goes through the model once more, see ``layout.segments``."""
    segments = Segments.of(num_chunks(run), window_reach(run))
    return (segments.starts[-1] - len(segments.starts) + 1) / segments.count


def _attended(layers: Sequence[LayerAttention], tokens: int) -> float:
    """Return the sum over some layers of what attention to a sequence computes; see ``attended_area``."""
    return sum(layers.count(layer) * layer.area(0, tokens) for layer in dict.fromkeys(layers))
