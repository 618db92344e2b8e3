"""Sizes of one rank: tokens, heads, widths and parameters. Pure; letters as in docs/background/parallelism.md."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_sp.config.schema import Run

#: Logits of an automatic tile (see ``model.linear_loss``).
LOSS_TILE = {"cpu": 1 << 21, "gpu": 1 << 27}
FP32 = 4


def heads_needed(num_query: int, run: Run) -> int:
    """Key/value heads that the first ``num_query`` query heads need."""
    model = run.model
    return (num_query - 1) * model.num_query_groups // model.num_attention_heads + 1


@dataclass(frozen=True)
class Sizes:
    """What one rank holds of a microbatch and of the weights, in elements.

    Attributes:
        element: bytes of the compute type.
        inside, outside: tokens within tensor-parallel regions, and between them.
        hidden: h.
        query, kv: A/tp and K/tp, the width of all query and of all key (or value) heads of this tp rank.
        core_query, core_kv: per token of this rank, what the attention core gets of them: equal to query and kv
            without Ulysses, where each rank attends with some heads over P times as many tokens.
        core_heads: query heads of the core times its tokens, per token of this rank.
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
        """Of the rank with the largest share."""
        model, parallel = run.model, run.parallel
        tokens = run.train.micro_batch_size * (run.data.seq_length // parallel.sp)
        heads = model.num_attention_heads // parallel.tp
        kv = model.num_query_groups // parallel.tp
        if model.num_query_groups % parallel.tp:
            kv = heads_needed(heads, run)
        core = -(-heads // parallel.ulysses)
        core_kv = heads_needed(core, run) if parallel.ulysses > 1 else kv
        if parallel.ulysses > 1 and (core * model.num_query_groups) % model.num_attention_heads and core_kv > 1:
            core_kv = core  # uneven groups: each query head gets a copy
        d, width = model.head_dim, parallel.ulysses
        return cls(
            element=FP32 if run.precision.dtype == "float32" else 2,
            inside=tokens, outside=tokens // (parallel.tp if parallel.megatron_sp else 1), hidden=model.hidden_size,
            query=heads * d, kv=kv * d, core_query=core * width * d, core_kv=core_kv * width * d,
            core_heads=core * width, ffn=model.ffn_hidden_size // parallel.tp,
            vocab=model.padded_vocab_size // parallel.tp)

    def loss_tile(self, run: Run, device: str) -> int:
        """Tokens whose logits exist at once."""
        tile = run.memory.loss_tile_size or max(128, LOSS_TILE[device] // self.vocab)
        return min(tile, self.inside)


@dataclass(frozen=True)
class Weights:
    """Parameters of one tp rank, by the part they are gathered in."""

    layer: int
    mlp: int  # of ``layer``
    embedding: int
    output: int  # with the final norm; only the norm where the embedding is used
    is_tied: bool

    @classmethod
    def of(cls, run: Run) -> Weights:
        """Of the first tp rank."""
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
