"""The size of the vocabulary that a plan takes when no flag gives it."""

from __future__ import annotations

from megatron_sp.config.resolve import with_vocab
from megatron_sp.config.schema import Run

#: Part of a tokenizer's name in lower case -> vocabulary size of the best known tokenizer of that kind. The first match
#: is used.
USUAL_SIZES = {
    "llama3": 128_256,
    "qwen": 151_936,
    "tiktoken": 131_072,
    "gpt2": 50_257,
    "huggingface": 128_256,     # as Llama 3
    "hftokenizer": 128_256,
    "fromhf": 128_256,
    "llama": 32_000,            # Llama and Llama 2
    "mistral": 32_000,
    "sentencepiece": 32_000,
}
DEFAULT_SIZE = 50_257           # as GPT-2


def with_usual_vocabulary(run: Run, tokenizer: str, notes: list[str]) -> tuple[Run, list[str]]:
    """Return a run with vocabulary sizes, from its flags or else the usual one of a tokenizer, and the notes.

    Args:
        tokenizer: the kind of tokenizer as written on the command line.
        notes: what the user should read; one more where a size was taken.

    Raises:
        ConfigError: the padded size is too small or does not divide over the tensor-parallel ranks.
    """
    size = run.model.vocab_size or run.model.padded_vocab_size
    if size:
        return with_vocab(run, size), notes
    size = next((size for part, size in USUAL_SIZES.items() if part in tokenizer.lower()), DEFAULT_SIZE)
    return with_vocab(run, size), [*notes, f"No flag gives the size of the vocabulary, so this plan takes {size:,} "
                                           f"tokens, as usual with {tokenizer}; give --vocab-size N for another."]
