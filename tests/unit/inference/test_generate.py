"""Sampling tokens and streaming their text, with small functions in place of the model."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from megatron_sp.errors import ConfigError
from megatron_sp.inference.sampling import Sampling, generate, generate_batch, probabilities
from megatron_sp.inference.text import StopWords, TextStream


class Successor(nn.Module):
    """Predicts token + 1 modulo ``vocab``, and stores how many tokens each call reads.

    The padding columns have the largest logits, so that a sampler that does not leave them out draws them.
    """

    def __init__(self, vocab: int = 10, padding: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.vocab, self.padding = vocab, padding
        self.lengths: list[int] = []

    def forward(self, tokens: Tensor, context: object) -> Tensor:
        self.lengths.append(tokens.shape[1])
        logits = nn.functional.one_hot((tokens + 1) % self.vocab, self.vocab + self.padding).float()
        logits[..., self.vocab:] = 100.0
        return logits


def test_greedy_stops_at_the_count_and_before_eod() -> None:
    greedy = Sampling(temperature=0)
    assert list(generate(Successor(), [3], 4, greedy, vocab_size=10)) == [4, 5, 6, 7]
    assert list(generate(Successor(), [3], 9, greedy, vocab_size=10, eod=6)) == [4, 5]


def test_cache_reads_each_token_once() -> None:
    cached, plain = Successor(), Successor()
    list(generate(cached, [1, 2, 3], 3, Sampling(temperature=0), vocab_size=10))
    list(generate(plain, [1, 2, 3], 3, Sampling(temperature=0), vocab_size=10, use_cache=False))
    assert cached.lengths == [3, 1, 1]
    assert plain.lengths == [3, 4, 5]


def test_seed_decides_the_draws() -> None:
    def draw(seed: int) -> list[int]:
        return list(generate(Successor(), [0], 30, Sampling(temperature=5.0), vocab_size=10, seed=seed))

    assert draw(1) == draw(1) != draw(2)
    assert max(draw(1)) < 10  # never padding


def test_probabilities_are_the_softmax_at_this_temperature() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0])
    torch.testing.assert_close(probabilities(logits, Sampling()), logits.softmax(-1))
    torch.testing.assert_close(probabilities(logits, Sampling(temperature=0.5)), (2 * logits).softmax(-1))
    assert probabilities(logits, Sampling(temperature=0)).tolist() == [0, 1, 0]
    assert probabilities(1e4 * logits, Sampling(temperature=1e-30)).tolist() == [0, 1, 0]


def test_top_k_and_top_p_keep_the_most_probable() -> None:
    logits = torch.tensor([0.1, 0.4, 0.3, 0.2]).log()
    torch.testing.assert_close(probabilities(logits, Sampling(top_k=2)), torch.tensor([0, 4 / 7, 3 / 7, 0]))
    torch.testing.assert_close(probabilities(logits, Sampling(top_p=0.65)), torch.tensor([0, 4 / 7, 3 / 7, 0]))
    torch.testing.assert_close(probabilities(logits, Sampling(top_p=0.8)), torch.tensor([0, 4 / 9, 3 / 9, 2 / 9]))
    assert probabilities(logits, Sampling(top_p=1e-9)).tolist() == [0, 1, 0, 0]
    assert int((probabilities(torch.zeros(5), Sampling(top_k=2)) > 0).sum()) == 2  # also among equals


@pytest.mark.parametrize("bad, flag", [
    (dict(temperature=-1.0), "--temperature"), (dict(temperature=math.nan), "--temp"), (dict(top_k=-1), "--top-k"),
    (dict(top_p=0.0), "--top-p"), (dict(top_p=1.1), "--top-p")])
def test_values_out_of_range_are_refused_by_flag(bad: dict, flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        Sampling(**bad)


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match="no tokens"):
        next(generate(Successor(), [], 1, Sampling(), vocab_size=10))


def test_a_batch_reads_prompts_of_any_length_in_lockstep() -> None:
    model = Successor()
    steps = list(generate_batch(model, [[3], [1, 2, 5], [7, 8]], 3, Sampling(temperature=0), vocab_size=10))
    assert steps == [[4, None, None], [5, None, 9], [6, 6, 0], [None, 7, 1], [None, 8, None]]
    assert model.lengths == [1] * 5        # the shortest prompt is read at once, each later place once


def test_a_row_ends_at_eod_or_when_it_is_told_to() -> None:
    steps = generate_batch(Successor(), [[3], [1]], 9, Sampling(temperature=0), vocab_size=10, eod=5)
    assert next(steps) == [4, 2]
    assert steps.send(()) == [None, 3]
    with pytest.raises(StopIteration):
        steps.send({1})


def test_a_row_of_a_batch_does_not_depend_on_the_others() -> None:
    def rows(prompts: list[list[int]]) -> list[list[int]]:
        steps = list(generate_batch(Successor(), prompts, 20, Sampling(temperature=5.0), vocab_size=10, seed=3))
        return [[token for step in steps if (token := step[row]) is not None] for row in range(len(prompts))]

    alone = [rows([prompt])[0] for prompt in ([0], [4, 4, 4], [9, 1])]
    assert rows([[0], [4, 4, 4], [9, 1]]) == alone


@pytest.mark.parametrize("words, parts, expected", [
    (["stop"], ["a ", "st", "op b"], ["a ", "", ""]),
    (["stop"], ["a st", "ep", " s"], ["a ", "step", " "]),
    (["bc", "abcd"], ["xa", "b", "cd"], ["x", "", "a"]),       # the stop word that ends first decides
    (["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", ""]),
    ([], ["a", "b"], ["a", "b"]),
])
def test_stop_words_need_not_fall_together_with_tokens(words: list[str], parts: list[str],
                                                       expected: list[str]) -> None:
    stop = StopWords(words)
    assert [stop.push(part) for part in parts] == expected


def test_what_was_held_back_comes_when_the_text_ends_by_itself() -> None:
    stop = StopWords(["stop"])
    assert stop.push("a sto") == "a " and stop.finish() == "sto" and not stop.found


def test_stream_gives_whole_characters_only() -> None:
    text = "aé漢🙂 end"
    data = text.encode()
    stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"), prompt=b"before ")
    parts = [stream.push(byte) for byte in data]
    assert "".join(parts) + stream.finish() == text
    assert all("\N{REPLACEMENT CHARACTER}" not in part for part in parts)
    assert parts[1:3] == ["", "é"]


def test_stream_shows_an_unfinished_character_at_the_end() -> None:
    stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"))
    assert stream.push("é".encode()[0]) == ""
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"
    assert stream.finish() == ""


def test_stream_keeps_the_space_between_words() -> None:
    words = ["▁one", "▁two", "▁three"]
    stream = TextStream(lambda ids: "".join(words[i] for i in ids).replace("▁", " ").lstrip(), prompt=[0])
    assert stream.push(1) + stream.push(2) == " two three"
