"""Megatron's TikTokenizer: a byte-level BPE vocabulary in a JSON file, encoded with the tiktoken library."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence

import numpy as np

from megatron_sp.data.tokenizers.tokenizer import Tokenizer
from megatron_sp.errors import DataError, InstallationError

#: How a text is split into words, by the value of --tiktoken-pattern.
PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
          r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
LARGEST = 1 << 17  # largest number of ids if --vocab-size is not given


class TikTokenizer(Tokenizer):
    """Special tokens first, then the vocabulary's tokens by rank. ``eod`` is ``</s>``.

    Where a text spells a special token, it is encoded as that token, as in Megatron.

    Args:
        vocabulary: path of a JSON list of ``{"rank": 0, "token_bytes": "AA==", "token_str": ...}``, in order of rank.
        pattern: "v1" or "v2".
        num_special_tokens: ids that are kept for special tokens; those without a name are called ``<SPECIAL_7>`` and so
            on.
        vocab_size: all ids; a longer vocabulary is cut to it. 0: at most 131,072.
    """

    def __init__(self, vocabulary: str, pattern: str, num_special_tokens: int, vocab_size: int = 0):
        try:
            import tiktoken
        except ImportError:
            raise InstallationError("--tokenizer-type TikTokenizer needs the package tiktoken: pip install tiktoken"
                                    ) from None
        if num_special_tokens < len(SPECIAL):
            raise DataError(f"--tiktoken-num-special-tokens {num_special_tokens}: {len(SPECIAL)} special tokens have "
                            f"names, so give at least {len(SPECIAL)}.")
        most = (vocab_size or LARGEST) - num_special_tokens
        ranks = {token: num_special_tokens + rank for rank, token in enumerate(_read(vocabulary)[:max(most, 0)])}
        if len(ranks) < 256:
            raise DataError(f"--vocab-size {vocab_size}: with {num_special_tokens} special tokens it leaves no room "
                            "for the 256 bytes that every vocabulary begins with; raise it or leave it out.")
        names = [*SPECIAL, *(f"<SPECIAL_{number}>" for number in range(len(SPECIAL), num_special_tokens))]
        self._encoding = tiktoken.Encoding("megatron", pat_str=PATTERNS[pattern], mergeable_ranks=ranks,
                                           special_tokens={name: number for number, name in enumerate(names)})
        self.vocab_size = num_special_tokens + len(ranks)
        self.eod = SPECIAL.index("</s>")
        self._size = self.vocab_size

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode(text, allowed_special="all")

    def encode_arrays(self, texts: Sequence[str], dtype: np.dtype) -> list[np.ndarray]:
        return [self._encoding.encode_to_numpy(text, allowed_special="all").astype(dtype) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode([int(i) for i in ids if 0 <= i < self._size])


def _read(vocabulary: str) -> list[bytes]:
    """Return the bytes of each token in order of rank."""
    try:
        with open(vocabulary, encoding="utf-8") as file:
            rows = json.load(file)
        tokens = [base64.b64decode(row["token_bytes"], validate=True) for row in rows]
        ranks = [row["rank"] for row in rows]
    except OSError as error:
        raise DataError(f"--tokenizer-model {vocabulary} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"--tokenizer-model {vocabulary} is not a vocabulary of TikTokenizer, which is a JSON list of "
                        f"objects with rank and token_bytes ({type(error).__name__}: {error}).") from None
    single = [bytes([number]) for number in range(256)]
    if ranks != list(range(len(rows))) or tokens[:256] != single or len(set(tokens)) != len(tokens):
        raise DataError(f"--tokenizer-model {vocabulary}: the ranks of a vocabulary of TikTokenizer run from 0 without "
                        "a gap, the first 256 tokens are the bytes 0 to 255, and no token occurs twice.")
    return tokens
