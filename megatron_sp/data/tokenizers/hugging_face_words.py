"""Know how some Hugging Face tokenizers split a text into words, so that the tokens of words can be remembered.

A ``tokenizer.json`` says how a text is split. Known are the two ways of byte-level BPE without a normalizer that most
models use: GPT-2's, and that of Llama 3 (and cl100k). All other tokenizers encode every text with the library.
"""

from __future__ import annotations

import json
import re
from typing import Any

from megatron_sp.data.tokenizers.words import Splitter, WordPatterns, gpt2_words, word_patterns

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
LONG_S = "\u017f"  # equals "s" where upper and lower case are not distinguished


def llama3_words(letters: str, digits: str, spaces: str) -> re.Pattern[str]:
    """Return Llama 3's pattern of words for characters that are letters, digits and white space."""
    return re.compile(f"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])|[^\\r\\n{letters}{digits}]?[{letters}]+"
                      f"|[{digits}]{{1,3}}| ?[^{spaces}{letters}{digits}]+[\\r\\n]*|[{spaces}]*[\\r\\n]+"
                      f"|[{spaces}]+(?![^{spaces}])|[{spaces}]+")


def hugging_face_splitter(library: Any, parse_special: bool) -> Splitter | None:
    """Return the splitter for a tokenizer of the tokenizers library, or None if no exact one is known.

    Args:
        library: a ``tokenizers.Tokenizer``.
        parse_special: whether the spelling of a special token in a text is encoded as that token.
    """
    content = json.loads(library.to_str())
    model, patterns = content["model"], _patterns_of(content.get("pre_tokenizer") or {})
    if model.get("type") != "BPE" or model.get("dropout") or content.get("normalizer") or not patterns:
        return None
    # The library takes these out of a text before it splits the text.
    taken_out = [token["content"] for token in content.get("added_tokens", []) if parse_special or not token["special"]]
    added = re.compile("|".join(map(re.escape, taken_out))) if taken_out else None

    def split(text: str) -> list[str] | None:
        return None if added and added.search(text) else patterns.split(text)

    return split


def _patterns_of(pre_tokenizer: dict[str, Any]) -> WordPatterns | None:
    """Return the patterns for a way to split that is known."""
    if BYTE_LEVEL.items() <= pre_tokenizer.items():
        return word_patterns(gpt2_words)
    steps = pre_tokenizer.get("pretokenizers") or []
    split = {"type": "Split", "pattern": {"Regex": LLAMA3}, "behavior": "Isolated", "invert": False}
    if pre_tokenizer.get("type") == "Sequence" and len(steps) == 2 and steps[0] == split and \
            {**BYTE_LEVEL, "use_regex": False}.items() <= steps[1].items():
        return word_patterns(llama3_words, LONG_S)
    return None
