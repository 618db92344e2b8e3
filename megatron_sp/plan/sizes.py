"""How much of a run one rank holds: tokens, heads, widths and parameters, counted in elements.

Letters as in docs/background/parallelism.md: h hidden size, A and K width of all query and of all key heads, f
feed-forward width, v padded vocabulary, P Ulysses size.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_sp.config.schema import Run
from megatron_sp.layout.heads import kv_range
from megatron_sp.layout.tiles import loss_tile, num_chunks, tokens_at_once

#: Bytes of an fp32 number.
FP32 = 4


@dataclass(frozen=True)
class Sizes:
    """What one rank holds of a microbatch, or of a chunk of it, and of the weights.

    Attributes:
        element: bytes of a number in the compute type.
        inside, outside: tokens of this rank within tensor-parallel regions, and between them.
        hidden: h.
        query, kv: A/tp and K/tp, the width of all query and of all key (or value) heads of this tp rank.
        core_query, core_kv: the same widths as the attention core sees them, per token of this rank. Without Ulysses
            they equal query and kv. With Ulysses the core has fewer heads and P times as many tokens, so the
            products stay about equal.
        core_heads: query heads of the core times tokens of the core, per token of this rank.
        ffn: f/tp.
        vocab: v/tp.
    """

    element: int
    inside: int
    outside: int
    hidden: int
    query: int
    kv: int
    core_query: float
    core_kv: float
    core_heads: float
    ffn: int
    vocab: int

    @classmethod
    def of(cls, run: Run) -> Sizes:
        """Return the sizes of the rank with the most heads."""
        model, parallel = run.model, run.parallel
        tokens = run.train.micro_batch_size * (tokens_at_once(run) // parallel.sp)

        def kv_heads(num_query: int) -> int:
            """Return the number of key/value heads that this many query heads need."""
            return kv_range((0, num_query), model.num_attention_heads, model.num_query_groups)[1]

        heads = model.num_attention_heads // parallel.tp
        kv = model.num_query_groups // parallel.tp
        if model.num_query_groups % parallel.tp:
            kv = kv_heads(heads)
        core = -(-heads // parallel.ulysses)
        core_kv = kv_heads(core) if parallel.ulysses > 1 else kv
        if parallel.ulysses > 1 and (core * model.num_query_groups) % model.num_attention_heads and core_kv > 1:
            core_kv = core  # groups of unequal size: each query head gets a copy of its key/value head
        d, width = model.head_dim, parallel.ulysses
        return cls(
            element=FP32 if run.precision.dtype == "float32" else 2,
            inside=tokens, outside=tokens // (parallel.tp if parallel.megatron_sp else 1), hidden=model.hidden_size,
            query=heads * d, kv=kv * d, core_query=core * width * d, core_kv=core_kv * width * d,
            core_heads=core * width, ffn=model.ffn_hidden_size // parallel.tp,
            vocab=model.padded_vocab_size // parallel.tp)

    def loss_tile(self, run: Run, device: str) -> int:
        """Return the number of tokens whose logits exist at once."""
        tile = run.memory.loss_tile_size or loss_tile(self.vocab, on_cpu=device == "cpu")
        return min(tile, self.inside)


@dataclass(frozen=True)
class Weights:
    """Numbers of parameters of one tp rank, by the part of the model that FSDP gathers together.

    Attributes:
        layer: parameters of one whole layer.
        mlp: parameters of the feed-forward half of a layer.
        output: parameters of the output layer and the final norm; with tied embeddings only those of the norm.
        is_tied: the output layer uses the embedding's weight.
    """

    layer: int
    mlp: int
    embedding: int
    output: int
    is_tied: bool

    @classmethod
    def of(cls, run: Run) -> Weights:
        """Return the numbers of the first tp rank."""
        model, tp = run.model, run.parallel.tp
        sizes, h = Sizes.of(run), model.hidden_size
        norm = h * (2 if model.normalization == "LayerNorm" else 1)
        kv = sizes.kv if model.num_query_groups % tp == 0 else model.num_query_groups * model.head_dim
        attention = 2 * h * sizes.query + 2 * h * kv
        if model.add_bias_linear or model.add_qkv_bias:
            attention += sizes.query + 2 * kv
        if model.qk_layernorm:
            attention += 2 * model.head_dim * (2 if model.normalization == "LayerNorm" else 1)
        matrices = 3 if model.is_gated else 2
        mlp = matrices * h * sizes.ffn
        if model.add_bias_linear:
            attention += h
            mlp += (matrices - 1) * sizes.ffn + h
        embedding = sizes.vocab * h
        if model.position_embedding_type == "learned_absolute":
            embedding += model.max_position_embeddings * h
        tied = not model.untie_embeddings_and_output_weights
        return cls(attention + mlp + 2 * norm, mlp, embedding, norm + (0 if tied else sizes.vocab * h), tied)


def forms_probabilities(run: Run) -> bool:
    """Return whether attention keeps all probabilities for backward: that of ``--attention-core unfused`` does.

    With dropout it attends in blocks of queries. A ring and chunks of the sequence attend with block kernels.
    """
    return (run.train.attention_backend == "unfused" and run.model.attention_dropout == 0 and run.parallel.ring == 1
            and num_chunks(run) == 1)
