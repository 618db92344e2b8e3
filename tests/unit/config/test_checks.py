"""Rules between flags: what is refused, in which words, and what is let through."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from megatron_sp.config.load import load_run
from megatron_sp.config.resolve import resolve
from megatron_sp.config.rules.checks import check
from megatron_sp.config.schema import Run
from megatron_sp.errors import ConfigError

BASE = ("--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 128 --lr 1e-3 --mock-data "
        "--vocab-size 512")


def load(extra: str = "", world: int = 1, base: str = BASE + " --train-iters 10",
         files: bool = False) -> tuple[Run, list[str]]:
    return load_run(f"{base} {extra}".split(), world, files=files)


def problems(extra: str = "", world: int = 1, base: str = BASE + " --train-iters 10", files: bool = False) -> list[str]:
    try:
        load(extra, world, base, files)
    except ConfigError as error:
        return error.problems
    return []


def one(extra: str, world: int = 1, base: str = BASE + " --train-iters 10") -> str:
    found = problems(extra, world, base)
    assert len(found) == 1, found
    return found[0]


SAMPLES = BASE + " --train-samples 1000"


def test_the_base_is_fine():
    assert load()[1] == []


def test_tokens_alone_are_answered_with_their_samples():
    said = one("--train-tokens 1000", base=BASE)
    assert "--train-tokens 1000 alone" in said and "Add --train-samples 8, which" in said


@pytest.mark.parametrize("flags", ["--model-preset llama3-9b", "--load-hf nowhere", "--model-preset", "--load-hf"])
def test_a_model_that_cannot_be_read_is_the_only_problem(flags):
    said = one(flags, base="--seq-length 128 --lr 1e-3 --train-iters 10 --mock-data --vocab-size 512")
    assert flags.split()[0] in said


def test_flags_of_saving_without_save_are_noted():
    notes = load("--keep-last 2 --async-save --save-retain-interval 2")[1]
    assert notes == [f"{flag} has no effect without --save." for flag in (
        "--async-save", "--keep-last", "--save-retain-interval")]
    assert one("--save out --save-interval 1 --keep-last -1") == "--keep-last -1: must be at least 0."


def test_required_flags_are_listed_together():
    found = problems(base="")
    for flag in ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--lr"):
        assert f"{flag} is required." in found
    assert "--train-iters or --train-samples is required." in found
    assert any("Data is required" in problem for problem in found)


def test_a_flag_that_could_not_be_read_is_not_called_missing():
    line = BASE.replace("--hidden-size 64", "--hidden-size x").replace("--lr", "--lrr")
    assert problems(base=line + " --train-iters 10") == [
        "Unknown flag --lrr; did you mean --lr?", "--hidden-size: 'x' is not a whole number."]


def test_iterations_or_samples():
    assert "exclude each other" in one("--train-samples 100")
    assert "required" in one("", base=BASE)
    assert "less than one step" in one("--global-batch-size 8", base=BASE + " --train-samples 7")


def test_evaluation_only_evaluates_something():
    assert "--eval-iters 0 leaves nothing to do" in one("--skip-train --eval-iters 0")
    assert problems("--skip-train --eval-iters 1") == []


# --- sizes ---------------------------------------------------------------------------------------

def test_hidden_and_heads():
    assert one("--hidden-size 60") == ("--hidden-size 60 is not a multiple of --num-attention-heads 8; choose 56 or "
                                       "64, or give --kv-channels.")
    assert not problems("--hidden-size 60 --kv-channels 16")


def test_key_value_heads():
    assert "valid: 1, 2, 4, 8" in one("--num-key-value-heads 3")
    assert "--num-key-value-heads 3" in one("--num-key-value-heads 3")
    assert not problems("--num-key-value-heads 2")


def test_tensor_parallel_divides_heads_and_ffn():
    assert "valid: 1, 2, 4" in one("--tensor-model-parallel-size 3 --ffn-hidden-size 96", world=3)
    assert "--ffn-hidden-size 90" in one("--tensor-model-parallel-size 4 --ffn-hidden-size 90", world=4)


def test_ulysses_has_a_head_for_every_rank():
    problem = one("--ulysses-size 8 --tensor-model-parallel-size 2", world=16)
    assert "--ulysses-size 8 x --tensor-model-parallel-size 2 = 16" in problem
    assert "the largest --ulysses-size here is 4, and --sequence-split" in problem
    assert not problems("--ulysses-size 4 --tensor-model-parallel-size 2", world=8)
    assert not problems("--num-attention-heads 6 --hidden-size 96 --ulysses-size 4", world=4), "uneven heads are fine"


def test_messages_use_the_users_spelling():
    problem = one("--ds-sequence-parallel-size 16", world=16)
    assert "--ds-sequence-parallel-size 16" in problem and "--ulysses-size" not in problem
    assert "--context-parallel-size 16" in one("--context-parallel-size 16 --cp-comm-type a2a", world=16)
    assert one("--num-key-value-heads 3").startswith("--num-key-value-heads 3 does not divide")


def test_sequence_divides():
    problem = one("--seq-length 130 --ulysses-size 4", world=4)
    assert problem == ("--seq-length 130 does not divide into 4 parts (--ulysses-size 4); the nearest valid lengths "
                       "are 128 or 132.")
    assert one("--seq-length 65 --max-position-embeddings 64 --ulysses-size 2", world=2) == (
        "--seq-length 65 does not divide into 2 parts (--ulysses-size 2); the nearest valid lengths are 64 or 66 (from "
        "65 on also raise --max-position-embeddings 64).")
    both = "--seq-length 132 --ulysses-size 4 --tensor-model-parallel-size 2"
    assert not problems(both, world=8)
    assert "128 or 136" in one(both + " --sequence-parallel", world=8)
    assert one("--seq-length 2 --ulysses-size 4", world=4).endswith("the nearest valid length is 4.")


def test_world_size_divides():
    problem = one("--tensor-model-parallel-size 2 --ulysses-size 2", world=6)
    assert problem.startswith("6 processes cannot be divided into groups of --tensor-model-parallel-size 2 x "
                              "--ulysses-size 2 = 4; start 4 or 8 processes")


def test_global_batch_divides():
    problem = one("--global-batch-size 9 --micro-batch-size 2 --ulysses-size 2", world=4)
    assert problem == ("--global-batch-size 9 is not a multiple of --micro-batch-size 2 x data-parallel size 2 = 4 "
                       "(2 = 4 processes / 2 per replica: --ulysses-size 2); the nearest valid values are 8 or 12.")
    assert not problems("--global-batch-size 9 --micro-batch-size 2 --decrease-batch-size-if-needed", world=2)
    assert "choose 4 or more" in one("--global-batch-size 3 --micro-batch-size 2 --decrease-batch-size-if-needed",
                                     world=2)


def test_one_of_a_thing_is_singular():
    assert "1 process cannot be divided" in one("--ulysses-size 2")
    assert "(1 = 1 process / 1 per replica); the nearest valid value is 4." in one(
        "--micro-batch-size 4 --global-batch-size 3")
    assert one("--profile --profile-ranks 1") == "--profile-ranks 1: there is only rank 0."
    assert "has 4 heads; leave --ulysses-overlap-groups out." in one(
        "--ulysses-size 4 --tensor-model-parallel-size 2 --ulysses-overlap-groups 2", world=8)


def test_fsdp_size_divides():
    assert "--fsdp-size 3 is not a divisor of the data- and sequence-parallel size 4" in one(
        "--fsdp-size 3 --ulysses-size 2", world=4)
    assert not problems("--fsdp-size 2 --ulysses-size 2", world=4)


def test_positions():
    assert "raise it to 128" in one("--max-position-embeddings 64")
    assert "even number" in one("--position-embedding-type rope --kv-channels 7")
    assert "even number" in one("--position-embedding-type rope --rotary-percent 0.4")


SCALED = "--position-embedding-type rope --rope-scaling-type"


@pytest.mark.parametrize("extra, part", [
    ("--rope-scaling-type ntk --rotary-scaling-factor 2", "add --position-embedding-type rope"),
    (f"{SCALED} yarn", "needs --original-max-position-embeddings N: the sequence length"),
    (f"{SCALED} yarn --rotary-scaling-factor 4", "was trained on before."),
    (f"{SCALED} ntk", "was trained on before or --rotary-scaling-factor F."),
    (f"{SCALED} ntk --original-max-position-embeddings 256", "256 is above --max-position-embeddings 128"),
    (f"{SCALED} ntk --rotary-scaling-factor 2 --use-rope-scaling", "--use-rope-scaling, which is Llama-3.1's rule"),
    (f"{SCALED} ntk --rotary-scaling-factor 2 --rotary-seq-len-interpolation-factor 2", "which is linear scaling"),
    (f"{SCALED} ntk --rotary-scaling-factor 2 --kv-channels 2", "at least 4 rotated elements"),
    (f"{SCALED} yarn --original-max-position-embeddings 64 --rotary-base 1", "above 1, such as 10000; it is 1"),
    (f"{SCALED} yarn --original-max-position-embeddings 64 --yarn-beta-fast 1", "must be above --yarn-beta-slow 1"),
])
def test_scaled_positions(extra, part):
    assert part in one(extra)


def test_scaled_positions_that_are_right():
    yarn = f"{SCALED} yarn --original-max-position-embeddings 32"
    assert load(yarn)[0].model.rotary_scaling_factor == 4
    assert load(f"{yarn} --rotary-scaling-factor 6")[0].model.rotary_scaling_factor == 6
    assert not problems(f"{SCALED} ntk --rotary-scaling-factor 2")


GROWS = BASE.replace("--seq-length 128", "--seq-length-schedule 0:32 4K:64 8K:128") + " --train-iters 10"


@pytest.mark.parametrize("extra, world, part", [
    ("--seq-length 256", 1, "--seq-length 256 is not 128, the last length of --seq-length-schedule 0:32 4K:64 8K:128"),
    ("--seq-length-phase 4", 1, "--seq-length-phase 4: --seq-length-schedule 0:32 4K:64 8K:128 has 3 phases."),
    ("--pack-documents best-fit", 1, "phases cut samples into parts"),
    ("--decrease-batch-size-if-needed", 1, "give a --global-batch-size that divides"),
    ("--global-batch-size 64", 1, "phase 2 is shorter than one step, which has 64 x 128 tokens"),
    ("--global-batch-size 4 --micro-batch-size 3", 1, "--global-batch-size 4 is not a multiple of"),
    ("--global-batch-size 1 --micro-batch-size 2", 1, "--global-batch-size 1 is not a multiple of"),
    ("--global-batch-size 1 --micro-batch-size 8 --seq-length-phase 1", 1,
     "Phase 1 of --seq-length-schedule, with 4 sequences in the place of each sample: --global-batch-size 4 is not"),
    ("--attention-dropout 0 --global-batch-size 2 --ulysses-size 4 --ring-size 8", 32,
     "Phase 1 of --seq-length-schedule, with 4 sequences "
     "in the place of each sample: --seq-length 32 does not divide into 64 parts"),
    ("--sequence-chunk-size 48", 1, "--seq-length 128 does not divide into chunks of 48"),
])
def test_length_schedules(extra, world, part):
    assert part in one(extra, world, base=GROWS)


def test_phases_need_a_schedule():
    assert one("--seq-length-phase 1") == "--seq-length-phase 1 needs --seq-length-schedule."
    without = BASE.replace("--seq-length 128", "") + " --train-iters 10"
    assert "--seq-length is required" in one("", base=without)
    assert "'16:1K' does not lengthen" in one("--seq-length-schedule 0:1K 16:1K", base=without)
    assert "'0:x' is not TOKENS:SIZE" in one("--step-batch-size-schedule 0:x", base=GROWS)
    for flag in ("--seq-length-schedule", "--profile-ranks"):      # an unset shell variable without quotes
        assert "no value is given" in one(flag)


@pytest.mark.parametrize("flag, size", [("--device-memory", "80"), ("--host-memory", "0.0000001B")])
def test_sizes_without_a_unit(flag, size):
    assert one(f"--memory-efficiency auto {flag} {size}").endswith("give the unit too, such as 80GB or 40GiB.")


def test_length_schedules_that_are_right():
    run, notes = load("--global-batch-size 8 --sequence-chunk-size 64", base=GROWS)
    assert (run.data.seq_length, run.model.max_position_embeddings) == (128, 128) and not notes
    assert not problems("--global-batch-size 1 --micro-batch-size 4 --seq-length-phase 1", base=GROWS)
    assert not problems("--global-batch-size 1 --seq-length-phase 1", 4, base=GROWS)
    assert "does not reach phase 3" in load("--global-batch-size 4", base=GROWS)[1][0]


def test_padded_vocabulary():
    assert "below --vocab-size 512" in one("--padded-vocab-size 500")
    assert "does not divide" in one("--padded-vocab-size 513 --tensor-model-parallel-size 2", world=2)


@pytest.mark.parametrize("extra, part", [
    ("--rampup-batch-size 4 4 100", ""),
    ("--rampup-batch-size 5 4 100", "not a multiple of the increment"),
    ("--rampup-batch-size 32 4 100", "starts above"),
    ("--rampup-batch-size 4 4 100 --micro-batch-size 8", "the start 4 is not a multiple"),
    ("--rampup-batch-size 8 4 100 --micro-batch-size 8", "the increment 4 is not a multiple"),
])
def test_rampup(extra, part):
    found = problems("--global-batch-size 16 " + extra, base=SAMPLES)
    assert any(part in problem for problem in found) if part else not found


def test_rampup_needs_samples():
    assert "needs --train-samples" in one("--global-batch-size 16 --rampup-batch-size 4 4 100")


# --- not available yet ---------------------------------------------------------------------------

PIPELINE = "--pipeline-model-parallel-size 2 --global-batch-size 4"


@pytest.mark.parametrize("extra, part", [
    ("--num-virtual-stages-per-pipeline-rank 2", "4 pipeline stages"),
    ("--num-layers 5 --num-layers-per-virtual-pipeline-stage 2", "not a multiple of --pipeline-model-parallel-size 2"),
    ("--num-layers 4 --pipeline-layers 1 2", "sum to --num-layers 4; these are 2 with sum 3"),
    ("--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 1", "2 or more stages per rank"),
    ("--num-layers 4 --pipeline-schedule zbv --zero-stage 3", "use --zero-stage 2 or less"),
    ("--num-layers 4 --pipeline-schedule zero-bubble --recompute-granularity full", "cannot recompute"),
    ("--num-layers 4 --pipeline-schedule dualpipev --global-batch-size 3", "the nearest valid values are 4 or 5"),
    ("--num-layers 8 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 5",
     "the nearest valid values are 4 or 6"),
])
def test_pipeline(extra, part):
    assert part in one(f"{PIPELINE} {extra}", world=2)


def test_stages_need_a_pipeline():
    assert "needs --pipeline-model-parallel-size 2" in one("--num-virtual-stages-per-pipeline-rank 2")


@pytest.mark.parametrize("extra, part", [
    ("--ulysses-overlap-groups 2", "needs --ulysses-size 2 or more"),
    ("--ulysses-overlap-groups 5 --ulysses-size 2", "a tensor-parallel rank has 8 heads; use 4 or less"),
    ("--ulysses-overlap-groups 2 --ulysses-size 2 --attention-head-groups 2", "--attention-head-groups exclude")])
def test_overlap(extra, part):
    assert part in one(f"{extra} --attention-dropout 0 --hidden-dropout 0", world=2)


def test_ring():
    assert "--attention-dropout 0" in one("--context-parallel-size 2 --attention-dropout 0.1", world=2)
    assert "130 does not divide into 4 parts" in one("--ring-size 2 --attention-dropout 0 --seq-length 130", world=2)


# --- schedule ------------------------------------------------------------------------------------

@pytest.mark.parametrize("extra, part", [
    ("--lr-decay-samples 100", "use --lr-decay-iters"),
    ("--lr-warmup-samples 10", "use --lr-warmup-iters"),
    ("--lr-warmup-fraction 0.1 --lr-warmup-iters 2", "exclude each other"),
    ("--lr-warmup-iters 10", "must be less than the decay horizon --lr-decay-iters 10"),
    ("--lr-warmup-tokens 1280", "converted"),
    ("--min-lr 1e-2", "is above --lr"),
    ("--lr-warmup-init 1e-2", "is above --lr"),
    ("--lr-decay-style WSD", "--lr-wsd-decay-iters is required"),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 11", "above the decay horizon"),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 9 --lr-warmup-iters 2", "overlap: together they are more than"),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 9 --lr-warmup-fraction 0.2", "--lr-warmup-fraction 0.2 and"),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 9 --lr-decay-tokens 1000", "(converted by batch size"),
    ("--lr-wsd-decay-iters 5", "needs --lr-decay-style WSD"),
    ("--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler", "exclude each other"),
    ("--start-weight-decay 0.1", "needs --weight-decay-incr-style"),
])
def test_schedule_in_iterations(extra, part):
    assert part in one(extra)


@pytest.mark.parametrize("extra", [
    "--lr-warmup-iters 9", "--lr-decay-style constant --lr-warmup-iters 10", "--lr-warmup-fraction 0.5",
    "--lr-decay-style WSD --lr-wsd-decay-iters 10", "--lr-decay-tokens 2000 --lr-warmup-tokens 1000",
    "--weight-decay-incr-style cosine --start-weight-decay 0 --end-weight-decay 0.1",
    "--lr-decay-style inverse-square-root"])
def test_schedules_that_are_fine(extra):
    assert not problems(extra)


def test_schedule_in_samples():
    assert "use --lr-decay-samples" in one("--lr-decay-iters 5", base=SAMPLES)
    assert "--lr-wsd-decay-samples is required" in one("--lr-decay-style WSD", base=SAMPLES)
    assert "must be less than" in one("--lr-warmup-samples 1000", base=SAMPLES)


# --- precision, checkpoints, data ----------------------------------------------------------------

def test_precision():
    assert "--bf16 and --fp16" in one("--bf16 --fp16")
    assert "contradict" in one("--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32")
    assert "--min-loss-scale" in one("--fp16 --min-loss-scale 8 --initial-loss-scale 4")


def test_checkpoint():
    assert one("--save out") == "--save-interval N of 1 or more is required with --save."
    assert one("--save out --save-interval 0") == one("--save out")
    assert "needs --load" in one("--ckpt-step 5")
    assert not problems("--save out --save-interval 5 --load in --ckpt-step 5")


@pytest.mark.parametrize("split", ["-1,1,0", "90,abc5,5", "0,0,0", "1,2,3,4", "", "1,,2", "1e999,1,1", "nan,1,1"])
def test_splits_that_are_refused(split):
    assert any("--split" in problem for problem in _split_problems(split))


@pytest.mark.parametrize("split", ["100", "1,0,0", "969, 30, 1", "99,1,0", ".9,.1", "98/2/0", "0.5,0.25,0.25"])
def test_splits_that_are_fine(split):
    assert _split_problems(split) == []


def _split_problems(split: str) -> list[str]:
    try:
        load_run([*BASE.split(), "--train-iters", "10", "--split", split], 1, files=False)
    except ConfigError as error:
        return error.problems
    return []


REAL = BASE.replace("--mock-data --vocab-size 512", "--tokenizer-type NullTokenizer --vocab-size 512 --train-iters 10")


@pytest.mark.parametrize("paths, part", [
    ("0 A 0 B", "sum to 0"), ("0.5 A -0.5 B", "must be 0 or more"), ("1 A 2", "take turns"), ("1 A B C", "'B' stands"),
    ("1", "a prefix is missing"), ("nan A 1 B", "must be 0 or more"),
    ("A", ""), ("A B", ""), ("A B C", ""), ("1e-8 A 14486363187 B", ""), ("1 A", ""), ("0 A 1 B", "")])
def test_data_paths(paths, part):
    found = problems(f"--data-path {paths}", base=REAL)
    assert len(found) == bool(part) and all(part in problem for problem in found)


def test_one_source_of_data():
    assert "--mock-data and --data-path exclude" in one("--data-path A")
    assert "exclude each other" in one("--data-path A --train-data-path B", base=REAL)
    assert "--train-data-path is required" in one("--valid-data-path B", base=REAL)
    assert "--split 9,1,0 has no effect" in load("--train-data-path A --split 9,1,0", base=REAL)[1][0]


@pytest.mark.parametrize("extra, part", [
    ("--data-path A", "--vocab-file and --merge-file are required with --tokenizer-type GPT2BPETokenizer"),
    ("--data-path A --vocab-file v", "--merge-file is required"),
    ("--data-path A --tokenizer-type NullTokenizer", "--vocab-size is required"),
    ("--data-path A --tokenizer-type HFTokenizer", "--tokenizer-model is required"),
    ("--mock-data", "--mock-data: --vocab-size is required"),
    ("--mock-data --tokenizer-type SentencePieceTokenizer --tokenizer-model m", ""),
])
def test_tokenizers(extra, part):
    found = problems(extra, base=BASE.replace("--mock-data --vocab-size 512", "--train-iters 10"))
    assert len(found) == bool(part) and all(part in problem for problem in found)


def test_missing_files(tmp_path):
    base = BASE.replace("--mock-data --vocab-size 512", "--train-iters 10 --data-path A")
    line = f"--vocab-file {tmp_path}/v --merge-file {tmp_path}/m"
    write_header(tmp_path / "A", 10_000)
    base = base.replace(" A", f" {tmp_path}/A")
    assert [problem.split()[0] for problem in problems(line, base=base, files=True)] == ["--vocab-file", "--merge-file"]
    (tmp_path / "v").touch()
    (tmp_path / "m").touch()
    assert not problems(line, base=base, files=True)


def write_header(prefix: Path, num_sequences: int) -> None:
    """As much of a token set as a look at the command line reads."""
    prefix.with_suffix(".bin").touch()
    prefix.with_suffix(".idx").write_bytes(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, num_sequences, 2))


def test_everything_that_is_missing_is_reported_together(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "file").touch()
    line = (f"--data-path {tmp_path}/B --vocab-file v --merge-file m --tensorboard-dir tb --wandb-project p "
            f"--save {tmp_path}/file/out --load {tmp_path}/gone --exit-on-missing-checkpoint --hidden-size 60")
    found = problems(line, base=BASE.replace("--mock-data --vocab-size 512", "--train-iters 10"), files=True)
    for part in ("--hidden-size 60", "--vocab-file v", "--merge-file m", f"{tmp_path}/B.idx does not exist",
                 "pip install tensorboard", "pip install wandb", "--save-interval N of 1 or more is required",
                 f"{tmp_path}/file is not a directory", "--load"):
        assert [problem for problem in found if part in problem], part
    assert len(found) == 9


@pytest.mark.parametrize("paths, flags, part", [
    ("A", "--split 99,1,0", "The validation split of {dir}/A is empty: --split '99,1,0' gives it none of the 10"),
    ("A", "--split 99,1,0 --eval-iters 0", ""), ("A", "--split 90,10,0", ""),
    ("A", "--split 0,1,1", "nothing for training"),
    ("1 A 0 C", "--split 90,10,0", ""), ("A C", "--split 99,1,0", ".idx does not exist. Did you mean {dir}/Cc?")])
def test_splits_without_documents(tmp_path, paths, flags, part):
    write_header(tmp_path / "A", 10)
    write_header(tmp_path / "Cc", 10)
    words = " ".join(word if word.isdigit() else f"{tmp_path}/{word}" for word in paths.split())
    found = problems(f"--data-path {words} {flags}", base=REAL, files=True)
    assert len(found) == bool(part) and all(part.format(dir=tmp_path) in problem for problem in found), found


def test_notes():
    assert "--sequence-parallel has no effect" in load("--sequence-parallel")[1][0]
    assert load("--sequence-parallel --tensor-model-parallel-size 2", world=2)[1] == []
    assert "--loss-scale 12 has no effect" in load("--loss-scale 12 --bf16")[1][0]
    selective = "--recompute-granularity selective --recompute-method uniform --recompute-num-layers"
    assert "recomputes as full does" in load(f"{selective} 2")[1][0]
    assert not any("as full does" in note for note in load(f"{selective} 1")[1])


def test_check_by_itself():
    with pytest.raises(ConfigError):
        check(resolve(Run(), 1))
    check(load()[0])


@pytest.mark.parametrize("extra, world, part", [
    ("--sequence-chunk-size 48", 1, "--seq-length 128 does not divide into chunks of 48 tokens "
                                    "(--sequence-chunk-size); the nearest valid lengths are 96 or 144."),
    ("--sequence-chunk-size 256", 1, "is more than --seq-length 128"),
    ("--sequence-chunk-size 64 --ring-size 2", 2, "Use --ulysses-size, whose ranks share every chunk."),
    ("--sequence-chunk-size 64 --pipeline-model-parallel-size 2 --num-layers 4 --pipeline-schedule interleaved", 2,
     "has a pipeline schedule of its own, with one stage per rank; leave --pipeline-schedule interleaved"),
    ("--sequence-chunk-size 2 --tensor-model-parallel-size 2 --sequence-parallel --ulysses-size 2", 4,
     "does not divide over the 4 ranks that share a chunk (--ulysses-size 2 x --tensor-model-parallel-size 2); the "
     "nearest valid value is 4."),
    ("--offload-key-values", 1, "add --sequence-chunk-size"),
])
def test_chunks(extra: str, world: int, part: str) -> None:
    assert part in one(f"--attention-dropout 0 --hidden-dropout 0 {extra}", world)


def test_chunks_of_every_size_that_divides_are_fine() -> None:
    for size in (2, 4, 64, 128):
        assert not problems(f"--sequence-chunk-size {size} --offload-key-values --ulysses-size 2", world=2)
