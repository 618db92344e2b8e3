"""The sizes of a model of Llama's type, which the benchmarks compare in several implementations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of the layers and of the vocabulary.

    Attributes:
        heads, kv_heads: numbers of query heads and of key/value heads.
        ffn: width of the feed-forward layer.
    """

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int

    def model_flags(self, layers: int) -> list[str]:
        """Return the flags of pretrain_gpt.py for this model, without dropout."""
        return (f"--num-layers {layers} --hidden-size {self.hidden} --num-attention-heads {self.heads} "
                f"--group-query-attention --num-query-groups {self.kv_heads} --swiglu --ffn-hidden-size {self.ffn} "
                "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
                "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
                f"--vocab-size {self.vocab}").split()
