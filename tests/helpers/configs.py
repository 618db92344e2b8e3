"""Tiny configurations and the layouts in which they must all compute the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_sp.config.load import load_run
from megatron_sp.config.resolve import with_vocab
from megatron_sp.config.schema import Run

#: The training part of every tiny run: 4 sequences of 64 tokens per step.
TRAINING = ("--seq-length 64 --global-batch-size 4 --micro-batch-size 1 --train-iters 8 --lr 1e-3 "
            "--attention-dropout 0 --hidden-dropout 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 97 "
            "--eval-iters 0").split()

#: Model styles, as flags. The vocabulary of 97 is padded, differently at each tp.
STYLES = {
    "none": "",
    "llama": "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-key-value-heads 2 --swiglu "
             "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
             "--untie-embeddings-and-output-weights --make-vocab-size-divisible-by 8",
    "gpt2": "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --make-vocab-size-divisible-by 16",
    # The model choices that the other styles do not use.
    "mixed": "--num-layers 2 --hidden-size 48 --num-attention-heads 6 --num-key-value-heads 3 --kv-channels 16 "
             "--squared-relu --normalization LayerNorm --apply-layernorm-1p --add-qkv-bias --disable-bias-linear "
             "--qk-layernorm --position-embedding-type rope --rotary-percent 0.5 --rotary-interleaved "
             "--use-rope-scaling --make-vocab-size-divisible-by 1 --padded-vocab-size 100",
    "eight_heads": "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --num-key-value-heads 2 --swiglu "
                   "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
                   "--untie-embeddings-and-output-weights --make-vocab-size-divisible-by 8",
    "six_heads": "--num-layers 2 --hidden-size 48 --num-attention-heads 6 --num-key-value-heads 6 --swiglu "
                 "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
                 "--untie-embeddings-and-output-weights --make-vocab-size-divisible-by 8",
}


@dataclass(frozen=True)
class Case:
    """One layout that must compute the same as one process.

    Attributes:
        name: id of the test.
        world: number of ranks.
        layout: flags that must not change any result.
        style: a key of ``STYLES``.
        model: further flags, which may change results and which the reference gets too.
        masked: which labels are masked (see megatron_sp.proof.data.batch).
    """

    name: str
    world: int
    layout: str = ""
    style: str = "llama"
    model: str = ""
    masked: str = "nothing"

    def flags(self) -> list[str]:
        """Return the flags of the model and the layout, without those of ``TRAINING``."""
        return [*STYLES[self.style].split(), *self.model.split(), *self.layout.split()]

    def run(self) -> Run:
        """Return the resolved configuration."""
        return tiny_run(self.flags(), self.world)


def tiny_run(flags: Sequence[str], world_size: int = 1, vocab_size: int = 97) -> Run:
    """Return the resolved and checked configuration of ``TRAINING`` and these flags, which win over it.

    Raises:
        AssertionError: a flag has no effect, so the test would not test what its flags say.
    """
    run, notes = load_run([*TRAINING, *flags], world_size, files=False)
    assert not [note for note in notes if "no effect" in note], notes
    return with_vocab(run, vocab_size)
