"""Models from Hugging Face and back: weights, logits, losses in layouts, tokens, memory."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers

from megatron_sp.checkpoint.state import model_pieces
from megatron_sp.config.families import model_fields
from megatron_sp.config.load import load_run
from megatron_sp.config.resolve import with_vocab
from megatron_sp.config.schema import Data, Run
from megatron_sp.convert import lazy
from megatron_sp.convert.conversions import model_run
from megatron_sp.convert.fill import fill_model
from megatron_sp.convert.hugging_face import stored_tensors, weights_of
from megatron_sp.convert.native import write_checkpoint
from megatron_sp.data.tokenizers.tokenizer import build_tokenizer
from megatron_sp.errors import CheckpointError
from megatron_sp.inference.sampling import Sampling, generate
from megatron_sp.model.build import build_model
from megatron_sp.model.context import Context
from megatron_sp.model.gpt import GPT
from megatron_sp.parallel.mesh import ParallelMesh
from tests.helpers.hugging_face import MODELS, save_model
from tests.helpers.spawn import run_ranks
from tests.helpers.training import full_tensors, train_and_tell
from tests.integration.programs import ROOT
from tools import convert_checkpoint, generate_text

#: Flags of a run on made-up tokens that starts from a Hugging Face model.
START = "--vocab-size 97 --lr 1e-3 --train-iters 1 --global-batch-size 2 --seq-length 48 --load-hf"
TOKENS = torch.arange(48).mul(37).remainder(97)[None]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one directory for each model."""
    root = tmp_path_factory.mktemp("models")
    for name in MODELS:
        save_model(name, root / name)
    return root


def convert(*words: object) -> None:
    convert_checkpoint.main([str(word) for word in words])


def read(directory: Path) -> transformers.PreTrainedModel:
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()


def start_of(directory: str, layout: str) -> Run:
    """Return the configuration of a run that starts from a model."""
    words = f"--mock-data --tokenizer-type NullTokenizer {START} {directory} {layout}".split()
    return with_vocab(load_run(words, dist.get_world_size())[0], 97)


def logits_and_tokens(directories: list[str]) -> list[tuple[torch.Tensor, list[int]]]:
    """Return the logits of ``TOKENS`` and ten greedy tokens after them, of each model loaded with --load-hf."""
    found = []
    for directory in directories:
        run = start_of(directory, "")
        model = build_model(run, ParallelMesh.build(run.parallel))
        assert isinstance(model, GPT)
        fill_model(model, run.model, partial(weights_of, directory, run.model), directory, shows=False)
        model.eval()
        with torch.no_grad():
            logits = model(TOKENS, Context(torch.arange(48)[None]))
        tokens = list(generate(model, TOKENS[0].tolist(), 10, Sampling(temperature=0), vocab_size=97))
        found.append((logits[..., :97].clone(), tokens))
    return found


def test_logits_and_greedy_tokens_are_those_of_transformers(models: Path) -> None:
    ((*found,),) = run_ranks(logits_and_tokens, 1, [str(models / name) for name in MODELS])
    for name, (logits, tokens) in zip(MODELS, found):
        theirs = read(models / name)
        with torch.no_grad():
            difference = (logits - theirs(TOKENS).logits).abs().max()
        assert difference < 1e-4, name
        expected = theirs.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), max_new_tokens=10, do_sample=False,
                                   eos_token_id=None, pad_token_id=0)
        assert tokens == expected[0, 48:].tolist(), name


LAYOUTS = ["--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--ulysses-size 2 --zero-stage 3"]


def wrong_parts(directories: list[str]) -> list[str]:
    """Return the parameters of which this rank, in some layout, holds another part than it should."""
    wrong = []
    for directory in directories:
        for layout in LAYOUTS:
            run = start_of(directory, layout)
            model = build_model(run, ParallelMesh.build(run.parallel))
            fill_model(model, run.model, partial(weights_of, directory, run.model), directory, shows=False)
            whole = {name: tensor.whole() for name, tensor in weights_of(directory, run.model).items()}
            for name, piece in model_pieces(model, run.model).items():
                part = whole[name.removeprefix("model.")]
                for dim, (start, size) in enumerate(zip(piece.offset, piece.data.shape)):
                    part = part.narrow(dim, start, size) if size else part[:0]
                if not torch.equal(piece.data, part) or (piece.padding is not None and piece.padding.any()):
                    wrong.append(f"{directory} {layout} {name}")
    return wrong


def test_every_rank_reads_its_part_in_every_layout(models: Path) -> None:
    assert run_ranks(wrong_parts, 2, [str(models / name) for name in MODELS], timeout=200) == [[], []]


def test_a_run_from_a_model_has_the_same_loss_in_every_layout(models: Path) -> None:
    def first_loss(layout: str, world: int) -> float:
        output, error = run_ranks(train_and_tell, world, f"{START} {models / 'llama3'} {layout}")[0]
        assert not error, (layout, error)
        return float(re.findall(r"lm loss: (\S+)", output)[0])

    alone = first_loss("", 1)
    assert [first_loss(layout, 2) for layout in LAYOUTS] == pytest.approx([alone] * 3, rel=2e-6)


def test_there_and_back_is_bit_equal(models: Path, tmp_path: Path) -> None:
    """Hugging Face -> checkpoint -> Hugging Face, and that checkpoint -> Hugging Face -> checkpoint."""
    for name in MODELS:
        source, there, back = models / name, tmp_path / name / "there", tmp_path / name / "back"
        kind = json.loads((source / "config.json").read_text())["model_type"]
        convert("hf-to-megatron-sp", "--load", source, "--save", there)
        convert("megatron-sp-to-hf", "--load", there, "--save", back, "--model-type", kind, "--max-shard-size", "40KB")
        assert len(list(back.glob("*.safetensors"))) > 1
        one, two = read(source), read(back)
        assert one.state_dict().keys() == two.state_dict().keys() and type(one) is type(two)
        assert all(torch.equal(value, two.state_dict()[key]) for key, value in one.state_dict().items()), name
        with torch.no_grad():
            assert torch.equal(one(TOKENS).logits, two(TOKENS).logits), name
        convert("hf-to-megatron-sp", "--load", back, "--save", tmp_path / name / "again")
        tensors = [full_tensors(path / "iter_0000000") for path in (there, tmp_path / name / "again")]
        assert tensors[0].keys() == tensors[1].keys()
        assert all(torch.equal(tensors[0][key], tensors[1][key]) for key in tensors[0]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_comes_back_in_the_same_type(tmp_path: Path, dtype: torch.dtype) -> None:
    save_model("qwen2", tmp_path / "source", dtype=dtype)
    convert("hf-to-megatron-sp", "--load", tmp_path / "source", "--save", tmp_path / "there")
    convert("megatron-sp-to-hf", "--load", tmp_path / "there", "--save", tmp_path / "back")
    one, two = read(tmp_path / "source"), read(tmp_path / "back")
    assert two.dtype is dtype
    assert all(torch.equal(value, two.state_dict()[key]) for key, value in one.state_dict().items())


def test_a_checkpoint_of_any_layout_is_exported(models: Path, tmp_path: Path) -> None:
    """Two steps on two layouts give the same model up to rounding, with another vocabulary padding in memory."""
    for number, layout in enumerate(["--tensor-model-parallel-size 2 --zero-stage 1",
                                     "--pipeline-model-parallel-size 2"]):
        flags = f"{START} {models / 'llama3'} {layout} --train-iters 2 --save {tmp_path / str(number)} " \
                "--save-interval 2"
        assert all(not error for _, error in run_ranks(train_and_tell, 2, flags))
        convert("megatron-sp-to-hf", "--load", tmp_path / str(number), "--save", tmp_path / f"export{number}")
    first, other = (read(tmp_path / f"export{number}").state_dict() for number in range(2))
    torch.testing.assert_close(other, first, rtol=0, atol=2e-5)
    assert not torch.equal(first["model.embed_tokens.weight"],
                           read(models / "llama3").state_dict()["model.embed_tokens.weight"])


def test_generated_text_is_that_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run with a tokenizer of its own, exported; both programs continue a prompt greedily."""
    folder = ROOT / "tests/fixtures/tok/gpt2"
    tokenizer = transformers.GPT2TokenizerFast(str(folder / "vocab.json"), str(folder / "merges.txt"))
    source, prompt = tmp_path / "source", "once upon a time"
    save_model("gpt2", source, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(source)
    convert("hf-to-megatron-sp", "--load", source, "--save", tmp_path / "there")
    convert("megatron-sp-to-hf", "--load", tmp_path / "there", "--save", tmp_path / "back")
    shutil.rmtree(source)
    capsys.readouterr()
    generate_text.main(["--load", str(tmp_path / "there"), "--prompt", prompt, "--greedy", "--max-new-tokens", "20",
                        "--ignore-eod"])
    ours = capsys.readouterr().out
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    ids = theirs(prompt, return_tensors="pt").input_ids
    tokens = read(tmp_path / "back").generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20,
                                              do_sample=False, eos_token_id=None, pad_token_id=0)
    assert ours.rstrip("\n") == theirs.decode(tokens[0]).rstrip("\n")


@pytest.mark.parametrize("model", ["gpt2", "llama2"])
def test_a_gpt2_tokenizer_is_one_of_transformers(tmp_path: Path, model: str) -> None:
    """A run's vocabulary and merges under other names become files that AutoTokenizer finds in every family."""
    folder = ROOT / "tests/fixtures/tok/gpt2"
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(folder / name, tmp_path / f"my-{name}")
    ids = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    save_model(model, tmp_path / "source", vocab_size=len(ids))
    data = Data(seq_length=64, vocab_file=str(tmp_path / "my-vocab.json"), merge_file=str(tmp_path / "my-merges.txt"))
    fields, _ = model_fields(json.loads((tmp_path / "source/config.json").read_text()))
    run = model_run(fields, "config.json", data=data)
    write_checkpoint(tmp_path / "run", 4, weights_of(tmp_path / "source", run.model), run, {})
    convert("megatron-sp-to-hf", "--load", tmp_path / "run", "--save", tmp_path / "back")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert config["eos_token_id"] == ids["<|endoftext|>"] == tokenizer.eos_token_id
    text = "def f(x):\n    return x  # 1"
    assert tokenizer(text).input_ids == build_tokenizer(
        Data(vocab_file=str(folder / "vocab.json"), merge_file=str(folder / "merges.txt"))).encode(text)


PEAK = """
import sys, threading, time
from tools import convert_checkpoint
import megatron_sp.convert.conversions

megatron_sp.convert.lazy.PIECE_BYTES = int(sys.argv.pop(1))

def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))

before, most, done = anonymous(), [0], threading.Event()
def watch():
    while not done.wait(0.002):
        most[0] = max(most[0], anonymous())
thread = threading.Thread(target=watch); thread.start()
convert_checkpoint.main(sys.argv[1:])
done.set(); thread.join()
print("PEAK", (most[0] - before) * 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("to", ["there", "back"])
def test_memory_does_not_grow_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    """A model of 250 MB with an embedding of 64 MB (fp32), of which 16 MiB are read or stored at a time."""
    source, piece = tmp_path / "source", 1 << 24
    save_model("llama2", source, dtype=torch.bfloat16, shard="5GB", hidden_size=512, vocab_size=32768,
               intermediate_size=4096, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8, head_dim=64)
    words = ["hf-to-megatron-sp", "--load", source, "--save", tmp_path / "there"]
    if to == "back":
        monkeypatch.setattr(lazy, "PIECE_BYTES", piece)
        convert(*words)
        words = ["megatron-sp-to-hf", "--load", tmp_path / "there", "--save", tmp_path / "back"]
    done = subprocess.run([sys.executable, "-c", PEAK, str(piece), *map(str, words)], cwd=ROOT, text=True,
                          capture_output=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    peak = int(re.search(r"PEAK (\d+)", done.stdout)[1])  # type: ignore[index]
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert 2 * size > 250e6 and peak < 6 * piece, (size, peak)


def second_file(directory: Path) -> Path:
    return sorted(directory.glob("*.safetensors"))[1]


@pytest.mark.parametrize("spoil, message", [
    (lambda d: second_file(d).unlink(), "cannot be read: No such file"),
    (lambda d: second_file(d).write_bytes(b"123"), "does not begin with the header"),
    (lambda d: [path.unlink() for path in (d / "model.safetensors.index.json", second_file(d))],
     "has no model.safetensors.index.json, and of the"),
    (lambda d: [path.unlink() for path in d.glob("model*")], "has no weights"),
    (lambda d: (d / "model.safetensors.index.json").write_text("[]"), "does not say which tensor"),
    (lambda d: (d / "config.json").write_text((d / "config.json").read_text().replace(
        '"intermediate_size": 56', '"intermediate_size": 64')), "has the shape [56, 48]"),
    (lambda d: (d / "config.json").write_text((d / "config.json").read_text().replace(
        '"num_hidden_layers": 2', '"num_hidden_layers": 1')), "has no place in a llama model"),
])
def test_a_spoiled_model_is_one_message(models: Path, tmp_path: Path, spoil: object, message: str) -> None:
    shutil.copytree(models / "llama2", tmp_path / "model")
    assert callable(spoil)
    spoil(tmp_path / "model")
    with pytest.raises(CheckpointError) as error:
        convert("hf-to-megatron-sp", "--load", tmp_path / "model", "--save", tmp_path / "there")
    assert message in str(error.value) and str(tmp_path / "model") in str(error.value)
    assert not (tmp_path / "there").exists()


def test_a_model_that_lost_its_index_is_read(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "llama2", tmp_path / "model")
    expected = set(stored_tensors(tmp_path / "model"))
    (tmp_path / "model" / "model.safetensors.index.json").unlink()
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    assert set(stored_tensors(tmp_path / "model")) == expected


@pytest.mark.parametrize("command", ["hf-to-megatron-sp", "megatron-sp-to-hf"])
def test_a_full_disk_is_one_message_and_leaves_nothing(models: Path, tmp_path: Path, command: str) -> None:
    """A limit on the size of files stands for the full disk."""
    convert("hf-to-megatron-sp", "--load", models / "gpt2", "--save", tmp_path / "there")
    source = {"hf-to-megatron-sp": models / "gpt2", "megatron-sp-to-hf": tmp_path / "there"}[command]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
    try:
        with pytest.raises(CheckpointError) as error:
            convert(command, "--load", source, "--save", tmp_path / "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"cannot write {tmp_path / 'full'}: File too large" in str(error.value)
    assert not list(tmp_path.glob("full*"))     # not even an empty directory
