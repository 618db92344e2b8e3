"""Tokenizers and preprocessing in one process; see tests/integration for the tool itself."""

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_sp.config.schema import Data
from megatron_sp.data.corpus.encode import Job
from megatron_sp.data.corpus.inputs import find_parts
from megatron_sp.data.corpus.preprocess import Output, Preprocessor
from megatron_sp.data.corpus.readers import read_blocks
from megatron_sp.data.corpus.records import Skipped
from megatron_sp.data.corpus.summary import KeyTotals, Summary
from megatron_sp.data.token_files.indexed_dataset import IndexedDataset
from megatron_sp.data.tokenizers.tokenizer import GPT2BPETokenizer, build_tokenizer
from megatron_sp.errors import DataError
from tests.unit.data.test_indexed import FIXTURES, checksums, digest
from tools import preprocess_data

ODD = FIXTURES / "jsonl" / "odd.jsonl"
SPM = FIXTURES / "tok" / "spm_bpe_4k.model"


def gpt2_data() -> Data:
    folder = FIXTURES / "tok" / "gpt2"
    return Data(tokenizer_type="GPT2BPETokenizer", vocab_file=str(folder / "vocab.json"),
                merge_file=str(folder / "merges.txt"))


def spm_data(kind: str = "GPTSentencePieceTokenizer") -> Data:
    return Data(tokenizer_type=kind, tokenizer_model=str(SPM))


def null_job(skip: bool = False) -> Job:
    return Job(Data(tokenizer_type="NullTokenizer"), 100, ("text",), True, skip)


def preprocess(paths: list[str], prefix: str, job: Job, workers: int = 1,
               progress: Callable[[int, Summary], None] = lambda count, summary: None, **output: Any) -> Summary:
    return Preprocessor(find_parts(paths), job, Output(prefix, **output)).run(workers, progress)


@pytest.mark.parametrize("name, data, vocab_size, source, keys, eod", [
    ("gpt2_odd_eod", gpt2_data(), 0, "odd", ("text",), True),
    ("gpt2_odd", gpt2_data(), 0, "odd", ("text",), False),
    ("gpt2_two_keys_eod", gpt2_data(), 0, "odd", ("text", "title"), True),
    ("spmbpe_odd_eod", spm_data(), 0, "odd", ("text",), True),
    ("null_65499_eod", Data(tokenizer_type="NullTokenizer"), 65499, "nulltok", ("text",), True),
    ("null_65500_eod", Data(tokenizer_type="NullTokenizer"), 65500, "nulltok", ("text",), True),
])
def test_output_has_megatrons_bytes(tmp_path, name, data, vocab_size, source, keys, eod):
    preprocess([str(FIXTURES / "jsonl" / f"{source}.jsonl")], str(tmp_path / name), Job(data, vocab_size, keys, eod))
    for key in keys:
        for ending in ("bin", "idx"):
            file = f"{name}_{key}_document.{ending}"
            assert digest(tmp_path / file) == checksums()[file], file


def test_partitions_have_megatrons_bytes(tmp_path):
    """Megatron deals the documents in turn to the partitions, and joins these.

    The input is Megatron's joined output, with its two halves in turn again; the texts are its token ids.
    """
    dataset = IndexedDataset(FIXTURES / "bin" / "gpt2_small_a_eod_part2_text_document")
    job = Job(Data(tokenizer_type="NullTokenizer"), 50257, ("text",), True)
    order = [i // 2 + (len(dataset) // 2) * (i % 2) for i in range(len(dataset))]
    lines = [json.dumps({"text": " ".join(map(str, dataset.get(i)[:-1]))}).encode() for i in order]
    source = write_lines(tmp_path / "in.jsonl", lines)
    preprocess([source], str(tmp_path / "gpt2_small_a_eod_part2"), job, partitions=2)
    for part in ("", "_0", "_1"):
        for ending in ("bin", "idx"):
            file = f"gpt2_small_a_eod_part2{part}_text_document.{ending}"
            assert digest(tmp_path / file) == checksums()[file], file


def write_lines(path: Path, lines: list[bytes]) -> str:
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)


BAD_LINES = {
    "malformed JSON": b'{"text": "1 2"',
    "no key 'text'": b'{"texts": "1"}',
    "'text' is not a string": b'{"text": 5}',
    "invalid UTF-8": b'{"text": "\xff"}',
    "not a JSON object": b'[1]',
    "'text' has a lone surrogate": b'{"text": "a \\ud800 b"}',
    "refused by the tokenizer": b'{"text": "1 two"}',
    "malformed JSON ": b'{"text": "1 \x00 2"}',
}


@pytest.mark.parametrize("reason", BAD_LINES)
def test_a_bad_line_is_named_or_skipped(tmp_path, reason):
    source = write_lines(tmp_path / "in.jsonl", [b'{"text": "1 2"}', b"", BAD_LINES[reason], b'{"text": "3"}'])
    with pytest.raises(DataError, match=rf"in.jsonl, line 3: {reason.strip()}"):
        preprocess([source], str(tmp_path / "out"), null_job(), 1)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    summary = preprocess([source], str(tmp_path / "out"), null_job(skip=True), 1)
    assert summary.documents == 2 and dict(summary.skipped.counts) == {reason.strip(): 1}
    assert summary.skipped.first(reason.strip()).endswith("in.jsonl, line 3")
    assert IndexedDataset(tmp_path / "out_text_document").lengths.tolist() == [3, 2]


@pytest.mark.parametrize("record, cure", [
    ({"id": "7", "messages": [{"role": "user", "content": "hi"}]}, "'messages' holds a conversation.*chat_template"),
    ({"id": "7", "content": "a long text"}, "--json-keys content"), ({"id": 7}, "--on-error skip")])
def test_the_cure_fits_the_record(tmp_path, record, cure):
    """Skipping all records of a chat would leave nothing."""
    source = write_lines(tmp_path / "in.jsonl", [json.dumps(record).encode()])
    with pytest.raises(DataError, match=cure) as error:
        preprocess([source], str(tmp_path / "out"), null_job(), 1)
    assert ("--on-error" in str(error.value)) == (cure == "--on-error skip")


def test_an_escaped_pair_of_surrogates_is_a_character(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [json.dumps({"text": "\N{GRINNING FACE}"}).encode()])
    preprocess([source], str(tmp_path / "out"), Job(spm_data(), 0, ("text",), False), 1)
    tokens = IndexedDataset(tmp_path / "out_text_document").get(0).tolist()
    assert build_tokenizer(spm_data()).decode(tokens) == "\N{GRINNING FACE}"


@pytest.mark.parametrize("lines, lengths, documents", [
    ([b'{"text": ""}', b'{"text": "1"}'], [2], 2), ([b'{"text": "1"}', b'{"text": ""}', b'{"text": "2"}'], [2, 2], 3),
    ([b'{"text": "1"}', b'{"text": ""}'], [2], 2), ([b'{"text": ""}', b'{"text": " "}'], [], 2),
])
def test_empty_documents_are_counted(tmp_path, lines, lengths, documents):
    summary = preprocess([write_lines(tmp_path / "in.jsonl", lines)], str(tmp_path / "out"), null_job(), 1)
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert dataset.lengths.tolist() == lengths and dataset.num_documents == documents
    assert summary.keys["text"].empty == documents - len(lengths)


def test_input_without_documents_is_refused(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b"\n\n")
    with pytest.raises(DataError, match="no documents"):
        preprocess([str(tmp_path / "in.jsonl")], str(tmp_path / "out"), null_job(), 1)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_gz_files_and_many_inputs(tmp_path):
    for place in range(3):
        with gzip.open(tmp_path / f"{place}.jsonl.gz", "wb") as file:
            file.write(b'{"text": "%d"}\n' % place)
    paths = [str(tmp_path / f"{place}.jsonl.gz") for place in range(3)]
    seen: list[int] = []

    def progress(count: int, summary: Summary) -> None:
        seen.append(summary.documents)

    preprocess(paths, str(tmp_path / "out"), null_job(), 1, progress)
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert [dataset.get(i).tolist() for i in range(3)] == [[0, 99], [1, 99], [2, 99]] and seen == [1, 2, 3]
    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(Path(paths[0]).read_bytes()[:-6])
    with pytest.raises(DataError, match="broken.jsonl.gz"):
        preprocess([str(broken)], str(tmp_path / "no"), null_job(), 1)


def test_batches_keep_line_numbers_and_account_for_every_byte(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_sp.data.corpus.readers.BLOCK_BYTES", 6)
    source = write_lines(tmp_path / "in.jsonl", [b"%d" % number for number in range(1, 11)])
    blocks = list(read_blocks(find_parts([source])))
    assert [block.first for block in blocks] == [1, 4, 7, 10]
    assert all(int(line) == block.first + place for block in blocks for place, line in enumerate(block.data.split()))
    assert sum(block.bytes_read for block in blocks) == Path(source).stat().st_size


def test_gpt2_round_trip_and_special_token():
    tokenizer = build_tokenizer(gpt2_data())
    assert (tokenizer.eod, tokenizer.vocab_size) == (50256, 50257)
    for line in ODD.read_text("utf-8").splitlines():
        text = json.loads(line)["text"]
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and tokenizer.encode_batch([text]) == [ids]
    assert tokenizer.encode("<|endoftext|>") == [50256]


def test_sentencepiece_keeps_every_byte():
    tokenizer = build_tokenizer(spm_data("SentencePieceTokenizer"))
    assert (tokenizer.eod, tokenizer.vocab_size) == (2, 4096)
    for text in ("\N{GRINNING FACE} x", "\u65e5\u672c\u8a9e", "a  b", "line\nline", "caf\u00e9"):
        ids = tokenizer.encode(text)
        assert 0 not in ids and tokenizer.decode(ids) == text
    assert build_tokenizer(spm_data("Llama2Tokenizer")).encode("a") == [1] + tokenizer.encode("a")


def test_null_tokenizer():
    tokenizer = build_tokenizer(Data(tokenizer_type="NullTokenizer"), 10)
    assert (tokenizer.vocab_size, tokenizer.eod) == (10, 9)
    assert tokenizer.encode(" 3 9  1") == [3, 9, 1] and tokenizer.decode([3, 9]) == "3 9"
    for bad in ("10", "-1", "x"):
        with pytest.raises(DataError):
            tokenizer.encode(bad)


@pytest.mark.parametrize("data, match", [
    (Data(), "--vocab-file"), (Data(vocab_file="/nowhere/v.json"), "--vocab-file /nowhere/v.json"),
    (Data(vocab_file=str(ODD), merge_file=str(ODD)), "odd.jsonl"),
    (Data(tokenizer_type="SentencePieceTokenizer"), "--tokenizer-model"),
    (Data(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(ODD)), "not a SentencePiece model"),
    (Data(tokenizer_type="HFTokenizer"), "--tokenizer-model"),
    (Data(tokenizer_type="NullTokenizer"), "--vocab-size"), (Data(tokenizer_type="Best"), "choose one of"),
])
def test_tokenizer_errors_name_flag_and_file(data, match):
    with pytest.raises(DataError, match=match):
        build_tokenizer(data)


def test_packing_dtype_matches_vocabulary(tmp_path):
    job = Job(Data(tokenizer_type="NullTokenizer"), 70000, ("text",), True)
    preprocess([write_lines(tmp_path / "in.jsonl", [b'{"text": "65999"}'])], str(tmp_path / "out"), job, 1)
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert dataset.dtype == np.int32 and dataset.get(0).tolist() == [65999, 69999]


def test_byte_order_marks_are_read(tmp_path):
    """At the start of the file, of a later line (concatenated files), and alone on a line."""
    lines = [b'\xef\xbb\xbf{"text": "1 2"}', b"\xef\xbb\xbf", b'\xef\xbb\xbf{"text": "3"}']
    summary = preprocess([write_lines(tmp_path / "in.jsonl", lines)], str(tmp_path / "out"), null_job(), 1)
    assert summary.documents == 2
    assert IndexedDataset(tmp_path / "out_text_document").lengths.tolist() == [3, 2]


@pytest.fixture(scope="module")
def holed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face tokenizer of words with 5 tokens, the largest id 40, and <s> as a control token."""
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("holed")
    words = {"<unk>": 0, "one": 1, "two": 40, "<s>": 7, "s": 9}
    fast = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<s>", "unk_token": "<unk>"}))
    return folder


def test_ids_with_holes(tmp_path, holed):
    data = Data(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(holed))
    assert build_tokenizer(data).vocab_size == 41
    source = write_lines(tmp_path / "in.jsonl", [b'{"text": "one two one"}'])
    preprocess([source], str(tmp_path / "out"), Job(data, 0, ("text",), True), 1)
    assert IndexedDataset(tmp_path / "out_text_document").get(0).tolist() == [1, 40, 1, 7]


def test_the_data_type_follows_the_largest_id(tmp_path, holed):
    content = json.loads((holed / "tokenizer.json").read_text())
    content["model"]["vocab"]["two"] = 70_000
    folder = tmp_path / "wide"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text((holed / "tokenizer_config.json").read_text())
    job = Job(Data(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder)), 0, ("text",), False)
    preprocess([write_lines(tmp_path / "in.jsonl", [b'{"text": "two"}'])], str(tmp_path / "out"), job, 1)
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert dataset.dtype == np.int32 and dataset.get(0).tolist() == [70_000]


@pytest.mark.parametrize("parse, ids", [(False, [0, 9, 0]), (True, [7])])
def test_control_tokens_in_a_text_are_text_unless_asked_for(tmp_path, holed, parse, ids):
    data = Data(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(holed))
    tokenizer = Job(data, 0, ("text",), False, parse_special=parse).tokenizer()
    assert tokenizer.encode("one <s> two") == [1, *ids, 40] == tokenizer.encode_batch(["one <s> two"])[0]


def test_text_that_the_tokenizer_cannot_represent_is_counted(tmp_path, holed):
    data = Data(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(holed))
    source = write_lines(tmp_path / "in.jsonl", [b'{"text": ""}', b'{"text": "one three four"}'])
    summary = preprocess([source], str(tmp_path / "out"), Job(data, 0, ("text",), True), 1)
    assert summary.keys["text"].unknown == 2 and (summary.compared, summary.changed) == (1, 1)
    assert summary.first_changed.endswith("in.jsonl, line 2")
    summary = preprocess([source], str(tmp_path / "out"), Job(spm_data(), 0, ("text",), True), 1)
    assert summary.keys["text"].unknown == 0 and (summary.compared, summary.changed) == (1, 0)


def test_the_summary_warns_of_lost_text(capsys):
    skipped = Skipped(Counter({"no key": 4}), {"no key": [("in.jsonl, line 9", "no key (keys: 'a')", "{")]})
    summary = Summary({"text": KeyTotals(8, 0, 2)}, documents=2, compared=3, changed=1,
                      first_changed="in.jsonl, line 2", skipped=skipped)
    arguments = preprocess_data.parse(["--input", "in.jsonl", "--output-prefix", "out"])
    preprocess_data.report(summary, arguments, preprocess_data._Progress(None, 1))
    said = capsys.readouterr().out
    assert "WARNING: 2 of these tokens (25.00%) are the unknown token" in said
    assert "WARNING: 1 of 3 texts that were decoded again did not come back" in said
    assert "(first: in.jsonl, line 2)" in said
    assert "skipped 4 records: no key (first: in.jsonl, line 9)" in said and "out.report.json" in said


NASTY = ("it's  we'll I'd\n\n\tx <|endoftext|> a.b, c;d! \u65e5\u672c\u8a9e\u3002\u6f22\u5b57\uff0c Caf\u00e9 1,000.5 "
         "  y\r\nz '\u2019s' \u00d7\u00f7 n\u0303o \N{GRINNING FACE} \u0645\u0631\u062d\u0628. o'clock. '. 'so a 'b ")


def odd_texts() -> list[str]:
    return [json.loads(line)["text"] for line in ODD.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two SentencePiece models that put a blank before a text, as Llama's does: bpe.model and unigram.model."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("trained")
    lines = [line[:1000] for text in odd_texts() for line in text.splitlines() if line]
    for kind in ("bpe", "unigram"):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_prefix=str(folder / kind), vocab_size=500, model_type=kind,
            byte_fallback=True, remove_extra_whitespaces=False, minloglevel=2)
    return folder


def test_a_sentencepiece_model_without_bytes_counts_unknown_text(tmp_path):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["some plain words"] * 9), vocab_size=30, hard_vocab_limit=False,
        model_prefix=str(tmp_path / "small"), minloglevel=2)
    data = Data(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(tmp_path / "small.model"))
    source = write_lines(tmp_path / "in.jsonl", ['{"text": "some \u6f22 words"}'.encode()])
    summary = preprocess([source], str(tmp_path / "out"), Job(data, 0, ("text",), True), 1)
    assert (summary.keys["text"].unknown, summary.changed) == (1, 1)


@pytest.mark.parametrize("name", ["gpt2", "bpe", "llama bpe", "own bpe", "own llama bpe", "own unigram"])
def test_parts_of_a_long_text_have_the_tokens_of_the_whole(name, trained):
    kind = "Llama2Tokenizer" if "llama" in name else "SentencePieceTokenizer"
    model = str(trained / f"{name.split()[-1]}.model") if "own" in name else str(SPM)
    tokenizer = build_tokenizer(gpt2_data() if name == "gpt2" else Data(tokenizer_type=kind, tokenizer_model=model))
    texts = [text[:5000] for text in odd_texts()]
    random = np.random.RandomState(1)
    words = NASTY.split(" ")
    texts += ["".join(words[i] + " " * (j % 3) for i, j in random.randint(0, len(words), (400, 2))) for _ in range(5)]
    for text in texts:
        for length in (1, 7, 100):
            parts = list(tokenizer.encode_in_parts(text, length, np.dtype(np.int32)))
            assert np.concatenate(parts).tolist() == tokenizer.encode(text)
    parts = list(tokenizer.encode_in_parts("some words of a text, and more. " * 100, 100, np.dtype(np.int32)))
    assert (len(parts) > 20) is (name != "own unigram")


def test_a_long_document_is_preprocessed_in_parts(tmp_path, monkeypatch):
    source = write_lines(tmp_path / "in.jsonl", [json.dumps({"text": NASTY * 50}).encode(), b'{"text": "short"}'])
    longest: Counter[str] = Counter()
    encode = GPT2BPETokenizer.encode_arrays

    def measure(tokenizer: GPT2BPETokenizer, texts: list[str], dtype: np.dtype) -> list[np.ndarray]:
        longest[name] = max(longest[name], *map(len, texts), 0)
        return encode(tokenizer, texts, dtype)

    monkeypatch.setattr(GPT2BPETokenizer, "encode_arrays", measure)
    for name, length in (("whole", 1 << 18), ("parts", 100)):
        monkeypatch.setattr("megatron_sp.data.corpus.encode.LONG_TEXT", length)
        preprocess([source], str(tmp_path / name), Job(gpt2_data(), 0, ("text",), True), 1)
    for ending in ("bin", "idx"):
        assert digest(tmp_path / f"whole_text_document.{ending}") == digest(tmp_path / f"parts_text_document.{ending}")
    assert longest["parts"] < 300 < longest["whole"] == len(NASTY * 50)
