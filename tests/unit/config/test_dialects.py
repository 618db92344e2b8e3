"""Command lines of Megatron-LM, Megatron-DeepSpeed and their forks: what they mean here, and what is said.

The lines are made up for these tests, each with the flags that scripts of its kind use.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from megatron_sp.config.cli.flags import parse
from megatron_sp.config.cli.options import REFUSED_CHOICES, normalise
from megatron_sp.config.cli.translation.answers import nearest_flag
from megatron_sp.config.cli.translation.tables import (
    FOREIGN_TOKENIZERS,
    HINTS,
    IGNORED,
    PARTLY_REFUSED,
    REFUSED,
    RUN_ONLY,
)
from megatron_sp.config.load import load_run
from megatron_sp.config.schema import Run
from megatron_sp.errors import ConfigError
from tests.unit.config.known_flags import MEGATRON_DEEPSPEED

SHAPE = "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512"
STEPS = "--micro-batch-size 2 --lr 1e-4 --train-iters 100 --attention-dropout 0 --hidden-dropout 0"
BASE = f"{SHAPE} {STEPS}"

#: A name -> (world size, flags, ``section.field=value`` that must come out).
LINES = {
    "megatron of today": (8, f"{BASE} --use-mcore-models --transformer-impl transformer_engine --bf16 --swiglu "
                          "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
                          "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights "
                          "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer "
                          "--overlap-grad-reduce --overlap-param-gather --data-path corpus --split 99,1,0 "
                          "--tokenizer-type TikTokenizer --tokenizer-model t --save out --ckpt-format torch_dist",
                          "parallel.zero_stage=1 model.activation='swiglu' model.vocab_size=131072"),
    "megatron of 2021": (4, f"{BASE} --fp16 --activations-checkpoint-method uniform --DDP-impl local "
                         "--pipeline-model-parallel-size 2 --data-impl mmap --data-path d --vocab-file v "
                         "--merge-file m", "memory.recompute_granularity='full' model.activation='openai_gelu'"),
    "megatron of 2020": (2, f"{SHAPE} --batch-size 4 --model-parallel-size 2 --warmup 0.01 --lr 1e-4 --train-iters 50 "
                         "--distribute-checkpointed-activations --fp16",
                         "train.micro_batch_size=4 parallel.tp=2 schedule.lr_warmup_fraction=0.01"),
    "deepspeed without its file": (8, f"{BASE} --deepspeed --deepspeed_config DS_CONFIG --zero-stage 2 --fp16 "
                                   "--loss-scale 12 --no-pipeline-parallel --deepspeed-activation-checkpointing "
                                   "--checkpoint-activations --data-path d",
                                   "parallel.zero_stage=2 precision.loss_scale=0.0 "
                                   "precision.initial_loss_scale=65536.0 "
                                   "memory.recompute_granularity='full'"),
    "deepspeed's ulysses": (4, f"{BASE} --ds-sequence-parallel-size 4 --ds-sequence-parallel-fpdt "
                            "--ds-sequence-parallel-fpdt-chunk-size 128 --universal-checkpoint --bf16 --load ckpt",
                            "parallel.ulysses=4 memory.sequence_chunk_size=128"),
    "fork's data": (4, f"{BASE} --train-weighted-split-paths-path train.txt --valid-weighted-split-paths-path v.txt "
                    "--tokenizer-type PretrainedFromHF --tokenizer-name-or-path name --tensorboard-dir tb",
                    "model.vocab_size=128256"),
    "fork's tokenizer": (2, f"{BASE} --patch-tokenizer-type Qwen2Tokenizer --extra-vocab-size 421 --dataset d "
                         "--max-padding-length 128 --data-path x --save s", "model.vocab_size=151936"),
    "japanese tokenizer": (2, f"{BASE} --tokenizer-type JapaneseSentencePiece --use-mpi --data-path x",
                           "model.vocab_size=32000"),
    "weights of another run": (2, f"{BASE} --load old --finetune --no-load-optim --no-load-rng --reset-iteration "
                               "--use-checkpoint-args --data-path x", "checkpoint.finetune=True"),
    "uneven pipeline": (4, f"{BASE} --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1 "
                        "--decoder-last-pipeline-num-layers 3", "parallel.pipeline_layers=(1,2,2,3)"),
    "embedding counted as a layer": (4, f"{BASE} --num-layers 10 --pipeline-model-parallel-size 2 "
                                     "--num-layers-per-virtual-pipeline-stage 3 --micro-batch-size 1 "
                                     "--global-batch-size 8 --account-for-embedding-in-pipeline-split "
                                     "--account-for-loss-in-pipeline-split",
                                     "parallel.pipeline_layers=(2,3,3,2) parallel.stages_per_rank=2"),
    "replicated shards": (8, f"{BASE} --use-distributed-optimizer --num-distributed-optimizer-instances 4",
                          "parallel.fsdp_size=2"),
    "accumulation": (4, f"{BASE} --gas 3", "train.global_batch_size=24"),
    "zero-bubble": (4, f"{BASE} --pipeline-model-parallel-size 4 --enable-zbh1-pipeline --enable-zbh1-exact-semantics "
                    "--allow-padding-num-layers --interleave-group-size 4", "parallel.pipeline_schedule='zero-bubble'"),
    "layers of a fork's padding": (4, f"{BASE} --num-layers 30 --pipeline-model-parallel-size 4 "
                                   "--num-layers-per-virtual-pipeline-stage 2 --allow-padding-num-layers "
                                   "--micro-batch-size 1 --global-batch-size 8", "parallel.stages_per_rank=3"),
    "zero-bubble and recomputation": (4, f"{BASE} --pipeline-model-parallel-size 4 --enable-zb-runtime "
                                      "--recompute-granularity full --recompute-method chunk "
                                      "--global-batch-size 16", "parallel.pipeline_schedule='1f1b' "
                                      "memory.recompute_method='block'"),
    "qwen's biases": (1, f"{BASE} --swiglu --disable-bias-linear-fc --disable-bias-attn-fc",
                      "model.add_bias_linear=False model.add_qkv_bias=True"),
    "spike-free initialisation": (1, f"{BASE} --adjust-word-embedding-init --word-embedding-init-std 0.6",
                                  "model.embedding_init_method_std=0.6"),
    "zeros that mean never": (1, f"{BASE} --fp16 --loss-scale 0 --exit-duration-in-mins 0 --exit-interval 0 --save s "
                              "--save-interval 0", "precision.loss_scale=0.0 train.exit_duration_in_mins=0.0"),
    "other devices": (1, f"{BASE} --distributed-backend hccl --dataloader-type external",
                      "parallel.distributed_backend=''"),
    "window of the whole sequence": (1, f"{BASE} --sliding-window 512 --window-size 511,0",
                                     "data.seq_length=512 model.window_size=512"),
    "nothing to exit": (1, f"{BASE} --exit-interval 0 --epochs-unused-by-nobody", ""),
}
UNKNOWN = "nothing to exit"


def planned(line: str, world_size: int = 1) -> tuple[Run, list[str]]:
    return load_run(line.split(), world_size, files=False, plan=True)


def field(run: Run, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(run, section), name)


def problems(line: str, world_size: int = 1, **kwargs: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_run(line.split(), world_size, files=False, **kwargs)
    return caught.value.problems


@pytest.mark.parametrize("name", [name for name in LINES if name != UNKNOWN])
def test_a_command_line_gives_a_plan(name: str) -> None:
    world, line, expected = LINES[name]
    run, _ = planned(line, world)
    for word in expected.split():
        key, _, value = word.partition("=")
        assert repr(field(run, key)).replace(" ", "") == value


def test_an_unknown_flag_stays_an_error() -> None:
    assert problems(LINES[UNKNOWN][1], plan=True) == [
        "Unknown flag --epochs-unused-by-nobody; --help lists all flags."]


# --- what is said --------------------------------------------------------------------------------------------------

def test_gelu_of_megatrons_flags_is_the_approximation_and_says_so() -> None:
    run, notes = planned(f"{BASE} --use-mcore-models")
    assert run.model.activation == "openai_gelu"
    assert sum("--gelu-approximation none" in note for note in notes) == 1
    for flags in ("", "--use-mcore-models --no-bias-gelu-fusion", "--use-mcore-models --disable-bias-linear",
                  "--use-mcore-models --gelu-approximation none"):
        run, notes = planned(f"{BASE} {flags}")
        assert run.model.activation == "gelu" and not any("tanh" in note for note in notes)
    assert planned(f"{BASE} --gelu-approximation tanh")[0].model.activation == "openai_gelu"
    assert planned(f"{BASE} --use-mcore-models --swiglu")[0].model.activation == "swiglu"
    (problem,) = problems(f"{BASE} --swiglu --gelu-approximation tanh", plan=True)
    assert "contradict each other" in problem


@pytest.mark.parametrize("flags, said", [
    ("--use-mcore-models --eod-mask-loss", "Megatron averages the means"),
    ("--deepspeed-activation-checkpointing", "alone has no effect"),
    ("--activations-checkpoint-method block", "turns recomputation of whole layers on"),
    ("--sliding-window 512", "--sliding-window 512 has no effect"),
    ("--ds-sequence-parallel-fpdt", "no effect: --seq-length 512 is not more than one chunk of 65536"),
    ("--ds-sequence-parallel-fpdt-chunk-size 128", "no effect without --ds-sequence-parallel-fpdt"),
    ("--ds-sequence-parallel-fpdt --ds-sequence-parallel-fpdt-chunk-size 128", "Unlike FPDT, chunks go through the"),
    ("--deepspeed_config f.json", "no effect without --deepspeed"),
    ("--fp16 --loss-scale 12", "--loss-scale 12 is a static scale of 12"),
    ("--deepspeed --bf16 --zero-stage 0", "shards the fp32 states of bf16 runs"),
    ("--no-load-rng --no-save-rng", "checkpoints hold no random state"),
    ("--data-path a --train-data-path a", "--train-data-path names the same data as --data-path"),
    ("--step-batch-size-schedule 0:2 8K:8 --lr-decay-iters 50", "Megatron counts every iteration with the last batch"),
    ("--lr-decay-tokens 260 --lr-warmup-iters 30", "falls to --min-lr 0 right after the warm-up"),
    ("--recompute-granularity full --recompute-activations", "ask for different recomputation"),
    ("--checkpoint-activations --recompute-granularity selective", "ask for different recomputation"),
    ("--checkpoint-in-cpu", "no effect without --checkpoint-activations"),
    ("--enable-zb-runtime", "1F1B is run instead, because there is one pipeline stage"),
    ("--recompute-granularity full --recompute-method chunk", "is run as block"),
    ("--distributed-backend ccl", "nccl on GPUs"), ("--dataloader-type external", "refused in a run"),
    ("--wandb-project=", "--wandb-project is empty"), ("--data-path x --mock-data", "exclude each other"),
    ("--disable-bias-linear-fc --disable-bias-attn-fc", "--disable-bias-linear --add-qkv-bias"),
])
def test_what_differs_is_said_once(flags: str, said: str) -> None:
    _, notes = planned(f"{BASE} {flags}")
    assert sum(said in note for note in notes) == 1


def test_the_mean_of_the_loss_is_not_mentioned_where_it_is_the_same() -> None:
    for flags in ("--use-mcore-models --eod-mask-loss --calculate-per-token-loss", "--eod-mask-loss"):
        assert not any("Megatron averages" in note for note in planned(f"{BASE} {flags}")[1])


def test_what_only_tunes_makes_one_line_for_all() -> None:
    flags = "--use-flash-attn --ds-fused-adam --torch-adam --no-rope-fusion --tile-factor 2 --no-bias-gelu-fusion"
    (note,) = parse(flags.split()).notes
    assert all(flag in note for flag in flags.split() if flag.startswith("--"))


def test_notes_are_shown_beside_problems() -> None:
    with pytest.raises(ConfigError, match=r"(?s)fp8 is not.*Notes on the rest of it:\n  - .*--use-flash-attn"):
        load_run(f"{BASE} --fp8-format e4m3 --use-flash-attn".split(), 1, files=False, plan=True)


@pytest.mark.parametrize("line", [
    "--fp8-format hybrid --fp8-param-gather --bf16", "--mup --mup-attn-mult 8",
    "--decoupled-lr 1e-3 --decoupled-min-lr 1e-5",
    "--kd --kd-temp 2 --load-teacher t", "--img-h 3 --dino-norm-last-layer --retro-workdir w", "--embed-layernorm",
    "--random-ltd", "--fp32-residual-connection", "--position-embedding-type alibi"])
def test_what_changes_the_mathematics_is_refused_in_one_sentence(line: str) -> None:
    (problem,) = problems(f"{BASE} {line}", plan=True)
    assert all(word in problem for word in line.split() if word.startswith("--") and word != "--bf16")


def test_a_broken_value_is_reported_once() -> None:
    assert problems(f"{BASE} --lr-decay-iters -1000 --lr-warmup-iters 200", plan=True) == [
        "--lr-decay-iters -1000: must be at least 1."]


def test_a_cure_does_not_name_a_flag_of_another_meaning() -> None:
    line = (f"{BASE} --sequence-parallel --context-parallel-size 4 --cp-comm-type a2a+p2p "
            "--hierarchical-context-parallel-sizes 2 2")
    assert not any("--hierarchical" in note for note in planned(line, 4)[1])
    few = line.replace("--num-attention-heads 8", "--num-attention-heads 2").replace("-sizes 2 2", "-sizes 4 1")
    (problem,) = problems(few.replace("--sequence-parallel ", ""), 4, plan=True)
    assert problem.startswith("--hierarchical-context-parallel-sizes 4 1 x")
    assert "largest --ulysses-size here is 2" in problem


def test_layers_that_do_not_divide_can_be_given_as_the_message_says() -> None:
    line = (f"{BASE} --num-layers 7 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
            "--micro-batch-size 1 --global-batch-size 4")
    assert "--pipeline-layers" in problems(line, 2, plan=True)[0]
    assert planned(f"{line} --pipeline-layers 4 3", 2)[0].parallel.pipeline_layers == (4, 3)


@pytest.mark.parametrize("line, part", [
    ("--decoder-first-pipeline-num-layers 3 --pipeline-model-parallel-size 4", "leaves 5 of --num-layers 8 for the 3"),
    ("--gas 4 --global-batch-size 4", "--gas 4 and --global-batch-size 4 contradict each other"),
    ("--num-distributed-optimizer-instances 3", "is not the data- and sequence-parallel size 4"),
    ("--disable-bias-attn-fc", "give --disable-bias-linear-fc and --disable-bias-attn-fc"),
    ("--adjust-word-embedding-init", "--word-embedding-init-std X"),
    ("--profile-steps 3", "give START,END"),
    ("--profile stray", "'stray' belongs to no flag")])
def test_refusals(line: str, part: str) -> None:
    assert any(part in problem for problem in problems(f"{BASE} --micro-batch-size 1 {line}", 4, plan=True))


@pytest.mark.parametrize("name", MEGATRON_DEEPSPEED)
def test_every_flag_of_megatron_deepspeed_has_an_answer(name: str) -> None:
    for words in ([f"--{name}"], [f"--{name}", "1"]):
        assert not any("Unknown" in problem for problem in parse(words).problems)


# --- a real run ----------------------------------------------------------------------------------------------------

RUN = f"{BASE} --mock-data --vocab-size 128"


@pytest.mark.parametrize("flags, cure", [
    ("--tokenizer-type Llama3Tokenizer", "HuggingFaceTokenizer"), ("--tokenizer-file t.json", "HuggingFaceTokenizer"),
    ("--patch-tokenizer-type Qwen2Tokenizer", "HuggingFaceTokenizer"),
    ("--train-weighted-split-paths P: 1 0:1 d", "--train-data-path"), ("--load d --reset-iteration", "--finetune"),
    ("--load d --no-load-lr-state", "--override-opt_param-scheduler"),
    ("--load d --use-mp-args-from-checkpoint-args", "any layout loads"),
    ("--deepspeed --deepspeed_config nowhere.json", "there is no such file")])
def test_a_run_refuses_by_name_what_a_plan_accepts(flags: str, cure: str) -> None:
    (problem,) = problems(f"{RUN} {flags}")
    assert cure in problem
    planned(f"{RUN} {flags}")


@pytest.mark.parametrize("flags", ["--no-load-rng", "--no-save-rng", "--reset-iteration", "--keep-last",
                                   "--verify-checkpoint", "--universal-checkpoint",
                                   "--tokenizer-type NullTokenizer --patch-tokenizer-type X"])
def test_a_run_accepts_what_does_nothing(flags: str) -> None:
    load_run(f"{RUN} {flags}".split(), 1, files=False)


def test_no_cure_names_a_refused_flag() -> None:
    refused = {**REFUSED, **RUN_ONLY}
    texts = {name: entry.reason for name, entry in refused.items()}
    texts |= {name: reason for name, (_, reason) in IGNORED.items()} | FOREIGN_TOKENIZERS
    texts |= {word: cure for words in REFUSED_CHOICES.values() for word, cure in words.items()}
    for name, text in texts.items():
        for flag in re.findall(r"--[A-Za-z][\w-]*", text):
            assert normalise(flag) not in refused and flag not in PARTLY_REFUSED, (name, flag)
            assert not any("Unknown" in problem for problem in parse([flag, "1"]).problems), (name, flag)


# --- guesses -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("written, meant", [
    ("--hiden-size", "--hidden-size"), ("--tensor-parallel-size", "--tensor-model-parallel-size"),
    ("--sequence-paralle", "--sequence-parallel"), ("--microbatch-size", "--micro-batch-size"),
    ("--num-expert", ""), ("--sliding-windw", ""),
    ("--ds-fused-sgd", ""), ("--widow-length", ""), ("--fp32-something", ""), ("--size", "")])
def test_guesses_at_typing_mistakes(written: str, meant: str) -> None:
    assert (f"did you mean {meant}?" in parse([written]).problems[0]) == bool(meant)
    known = ["--hidden-size", "--tensor-model-parallel-size", "--sequence-parallel", "--micro-batch-size",
             "--ring-size", *HINTS]
    assert nearest_flag(written, known) == meant
