"""The command line: reading, spellings, translation, refusals, help and docs."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from megatron_sp.config.cli.flags import parse, parse_args
from megatron_sp.config.cli.help import build_parser
from megatron_sp.config.cli.options import schema_options
from megatron_sp.config.cli.plan_flags import PLAN_FLAGS
from megatron_sp.config.cli.translation.foreign import foreign_flags
from megatron_sp.config.cli.translation.tables import EXPERT_COMPANIONS, HINTS, IGNORED, REFUSED, RUN_ONLY
from megatron_sp.config.schema import Run
from megatron_sp.errors import ConfigError
from tests.unit.config.known_flags import ESSENTIAL, LISTS, SWITCHES, VALUED


def read(line: str) -> tuple[Run, list[str]]:
    return parse_args(line.split())


def problems(argv: str | list[str]) -> list[str]:
    return parse(argv.split() if isinstance(argv, str) else argv).problems


# --- reading -------------------------------------------------------------------------------------

def test_hyphens_underscores_and_equals_are_alike():
    for line in ("--hidden-size 64", "--hidden_size 64", "--hidden-size=64", "--hidden_size=64", "--hidden-size '64'"):
        assert read(line)[0].model.hidden_size == 64


@pytest.mark.parametrize("flag", ["--override-opt_param-scheduler", "--override-opt-param-scheduler",
                                  "--override_opt_param_scheduler", "--override-lr-scheduler"])
def test_mixed_spellings(flag):
    assert read(flag)[0].schedule.override_opt_param_scheduler


def test_the_last_of_repeated_flags_counts():
    run, notes = read("--clip-grad 1.0 --weight-decay .01 --clip-grad 0.5 --weight-decay 1e-1")
    assert (run.optimizer.clip_grad, run.optimizer.weight_decay, notes) == (0.5, 0.1, [])


@pytest.mark.parametrize("text, value", [("220_000_000", 220_000_000), ("1e6", 1_000_000), ("64.0", 64), ("7", 7)])
def test_whole_numbers(text, value):
    run, _ = read(f"--train-samples {text}")
    assert run.train.train_samples == value and isinstance(run.train.train_samples, int)


@pytest.mark.parametrize("text", ["6.5", "abc", "1e-3", "inf", ""])
def test_not_a_whole_number(text):
    assert problems(["--train-samples", text]) == [f"--train-samples: {text!r} is not a whole number."]


@pytest.mark.parametrize("text, value", [(".01", 0.01), ("6.0e-5", 6e-5), ("1", 1.0)])
def test_numbers(text, value):
    assert read(f"--lr {text}")[0].schedule.lr == value


def test_not_finite():
    assert problems("--lr nan") == ["--lr: 'nan' is not a finite number."]


def test_choices_have_no_case():
    run, _ = read("--normalization rmsnorm --lr-decay-style wsd --lr-wsd-decay-style minus-sqrt")
    assert (run.model.normalization, run.schedule.lr_decay_style) == ("RMSNorm", "WSD")
    assert run.schedule.lr_wsd_decay_style == "minus_sqrt"
    assert problems("--lr-decay-style cosin")[0].startswith("--lr-decay-style: 'cosin' is not one of constant, linear")


def test_quotes_left_by_the_shell():
    run, _ = parse_args(["--split", "'99,1,0'", "--data-path", '"1.0 a"', "2 'b'"])
    assert run.data.split == "99,1,0"
    assert run.data.data_path == ("1.0", "a", "2", "b")


def test_lists_end_at_the_next_flag():
    run, _ = read("--data-path 0.3 a 0.7 b --rampup-batch-size 16 8 2_000 --seed 5")
    assert run.data.data_path == ("0.3", "a", "0.7", "b")
    assert run.train.rampup_batch_size == (16, 8, 2000)
    assert problems("--rampup-batch-size 16 8") == ["--rampup-batch-size: 3 values are needed, 2 given."]


def test_switches_take_no_value():
    assert problems("--bf16=true") == ["--bf16 is a switch and takes no value; given: 'true'."]
    assert problems("--bf16 true") == ["'true' belongs to no flag."]


def test_off_switches():
    run, _ = read("--disable-bias-linear --no-check-for-nan-in-loss-and-grad --no-log-loss-scale-to-tensorboard")
    assert not run.model.add_bias_linear
    assert not run.train.check_for_nan_in_loss_and_grad
    assert not run.logging.log_loss_scale_to_tensorboard
    assert read("")[0].model.add_bias_linear


def test_a_missing_value():
    assert problems("--lr --bf16") == ["--lr needs a value."]


def test_no_abbreviations():
    assert problems("--hidden 64") and problems("--sequence-paralle")


def test_an_unknown_flag_gets_its_nearest_match():
    assert problems("--hiden-size 64") == ["Unknown flag --hiden-size; did you mean --hidden-size?"]
    assert problems("--ulyses-size=2")[0].endswith("did you mean --ulysses-size?")
    assert problems("--qwertz 1") == ["Unknown flag --qwertz; --help lists all flags."]


def test_all_problems_come_together():
    with pytest.raises(ConfigError) as caught:
        read("--hiden-size 64 --lr x --swiglu --squared-relu --fp8-format hybrid --full-validation stray --gas 2")
    assert "Accepted" not in str(caught.value)
    assert len(caught.value.problems) == 6


@pytest.mark.parametrize("line", ["--hidden-size 0", "--tensor-model-parallel-size -2", "--attention-dropout 1.0",
                                  "--hidden-dropout -0.1", "--global-batch-size 0", "--zero-stage 4", "--lr 0",
                                  "--rotary-percent 1.5", "--rampup-batch-size 8 0 100", "--adam-beta2 1",
                                  "--save-interval -1", "--timing-log-level 3", "--eval-iters -1"])
def test_values_out_of_bounds(line):
    (problem,) = problems(line)
    assert problem.startswith(line) and "must be" in problem


# --- translation ---------------------------------------------------------------------------------

@pytest.mark.parametrize("line, section, field, value", [
    ("--swiglu", "model", "activation", "swiglu"),
    ("--glu-activation swiglu", "model", "activation", "swiglu"),
    ("--squared-relu", "model", "activation", "squared_relu"),
    ("--openai-gelu", "model", "activation", "openai_gelu"),
    ("--quick-gelu", "model", "activation", "quick_gelu"),
    ("--RMSNorm", "model", "normalization", "RMSNorm"),
    ("--use-rotary-position-embeddings", "model", "position_embedding_type", "rope"),
    ("--position-embedding-type rotary", "model", "position_embedding_type", "rope"),
    ("--no-position-embedding", "model", "position_embedding_type", "none"),
    ("--no-position-embedding --use-rotary-position-embeddings", "model", "position_embedding_type", "rope"),
    ("--layernorm-epsilon 1e-6", "model", "norm_epsilon", 1e-6),
    ("--rotary-position-embeddings-theta 5e5", "model", "rotary_base", 5e5),
    ("--pad-vocab-size-to 1024", "model", "padded_vocab_size", 1024),
    ("--use-distributed-optimizer", "parallel", "zero_stage", 1),
    ("--use-distributed-optimizer --zero-stage 3", "parallel", "zero_stage", 3),
    ("--zero-stage 1.0", "parallel", "zero_stage", 1),
    ("--use-torch-fsdp2", "parallel", "zero_stage", 3),
    ("--use-megatron-fsdp --data-parallel-sharding-strategy no_shard", "parallel", "zero_stage", 0),
    ("--use-megatron-fsdp --data-parallel-sharding-strategy optim", "parallel", "zero_stage", 1),
    ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "parallel", "zero_stage", 2),
    ("--use-megatron-fsdp --use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params",
     "parallel", "zero_stage", 3),
    ("--ds-sequence-parallel-size 4", "parallel", "ulysses", 4),
    ("--context-parallel-size 4 --cp-comm-type a2a", "parallel", "ulysses", 4),
    ("--context-parallel-size 4", "parallel", "ring", 4),
    ("--context-parallel-size 4 --cp-comm-type p2p", "parallel", "ring", 4),
    ("--context-parallel-size 1 --ulysses-size 2", "parallel", "ulysses", 2),
    ("--pipe-parallel-size 2", "parallel", "pp", 2),
    ("--group-query-attention --num-query-groups 4", "model", "num_query_groups", 4),
    ("--group-query-attention", "model", "num_query_groups", 1),
    ("--num-key-value-heads 2", "model", "num_query_groups", 2),
    ("--attention-head-type multiquery", "model", "num_query_groups", 1),
    ("--attention-head-type multihead", "model", "num_query_groups", 0),
    ("--checkpoint-activations", "memory", "recompute_granularity", "full"),
    ("--deepspeed-activation-checkpointing --checkpoint-activations", "memory", "recompute_granularity", "full"),
    ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "memory",
     "recompute_granularity", "full"),
    ("--recompute-activations", "memory", "recompute_granularity", "selective"),
    ("--optimizer fusedadamw", "optimizer", "optimizer", "adamw"),
    ("--optimizer cpu-adam", "optimizer", "optimizer", "adam"),
    ("--no-train", "train", "skip_train", True),
])
def test_translated(line, section, field, value):
    run, notes = read(line)
    assert getattr(getattr(run, section), field) == value
    assert notes == []


def test_hierarchical_context_parallel():
    line = "--context-parallel-size 8 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes"
    run, _ = read(f"{line} 2 4")
    assert (run.parallel.ulysses, run.parallel.ring) == (2, 4)
    for sizes in ("2 2", "8", "", "-2 -4", "a b"):
        assert len(problems(f"{line} {sizes}")) == 1


def test_all_gather_runs_as_ulysses_and_says_so():
    run, notes = read("--context-parallel-size 2 --cp-comm-type all_gather")
    assert run.parallel.ulysses == 2 and "run as a2a" in notes[0]


def test_cp_comm_type_per_layer():
    assert read("--context-parallel-size 2 --cp-comm-type a2a a2a")[0].parallel.ulysses == 2
    assert "one kind for all layers" in problems("--context-parallel-size 2 --cp-comm-type a2a p2p")[0]
    assert "'b2b' is not one of" in problems("--context-parallel-size 2 --cp-comm-type b2b")[0]


def test_query_groups_without_megatrons_switch_are_ignored_with_a_warning():
    run, notes = read("--num-attention-heads 8 --num-query-groups 2")
    assert run.model.num_query_groups == 0
    assert "--num-query-groups 2 has no effect without --group-query-attention" in notes[0]
    assert read("--num-attention-heads 8 --num-query-groups 8")[1] == []


@pytest.mark.parametrize("line", [
    "--swiglu --squared-relu",
    "--num-key-value-heads 2 --num-query-groups 4 --group-query-attention",
    "--norm-epsilon 1e-5 --layernorm-epsilon 1e-6",
    "--use-rotary-position-embeddings --position-embedding-type learned_absolute",
    "--RMSNorm --normalization LayerNorm",
    "--context-parallel-size 2 --cp-comm-type a2a --ulysses-size 4",
    "--attention-head-type multiquery --group-query-attention --num-query-groups 2",
    "--use-torch-fsdp2 --data-parallel-sharding-strategy optim --zero-stage 3",
])
def test_two_spellings_that_disagree(line):
    (problem,) = problems(line)
    assert "contradict each other" in problem
    assert all(word.partition(" ")[0] in problem for word in line.split() if word in ("--swiglu", "--squared-relu"))


def test_two_spellings_that_agree():
    run, _ = read("--normalization RMSNorm --RMSNorm --norm-epsilon 1e-6 --layernorm-epsilon 1e-6")
    assert (run.model.normalization, run.model.norm_epsilon) == ("RMSNorm", 1e-6)


@pytest.mark.parametrize("line, part", [
    (["--load", ""], "--load: the value is empty"), (["--save="], "--save: the value is empty"),
    (["--train-iters", "1e30"], "must be at most 1000000000000"), (["--lr", "1e400"], "not a finite number")])
def test_empty_and_enormous_values(line, part):
    (problem,) = problems(line)
    assert part in problem


def test_distributed_optimizer_against_stage_0():
    assert "drop one of them" in problems("--use-distributed-optimizer --zero-stage 0")[0]


# --- tables --------------------------------------------------------------------------------------

def test_hints_make_one_line():
    run, notes = read("--use-flash-attn --transformer-impl local --no-bias-gelu-fusion --data-impl mmap "
                      "--attention-backend fused --local_rank=0 --ckpt-format torch_dist")
    assert len(notes) == 1
    assert all(flag in notes[0] for flag in ("--use-flash-attn", "--transformer-impl", "--data-impl"))
    assert run.train.attention_backend == "auto"


def test_ignored_flags_make_one_line():
    (note,) = read("--dataset LLama-Pretrain --max-padding-length 80 --kill-switch-path k")[1]
    assert note == ("Ignored: --max-padding-length 80, --dataset LLama-Pretrain (belongs to another tool); "
                    "--kill-switch-path k (send SIGTERM to save and stop a run).")


def test_dense_models_with_expert_flags():
    assert read("--num-experts 1 --moe-loss-coeff 0.01 --moe-min-capacity 4")[1] == []
    assert "only 1 is accepted" in problems("--num-experts 1 8")[0]


@pytest.mark.parametrize("line, key, value", [
    ("--batch-size 4", "train.micro_batch_size", 4), ("--model-parallel-size 2", "parallel.tp", 2),
    ("--warmup 0.01", "schedule.lr_warmup_fraction", 0.01), ("--gas 8", "train.gradient_accumulation_steps", 8),
    ("--rotary-scale-factor 4", "model.rotary_seq_len_interpolation_factor", 4.0),
    ("--pipeline-model-parallel-size 2 --enable-zb-runtime", "parallel.pipeline_schedule", "zero-bubble"),
    ("--num-distributed-optimizer-instances 2", "parallel.fsdp_replicas", 2), ("--exit-interval 0",
                                                                               "train.exit_interval", 0),
    ("--encoder-num-layers 3", "model.num_layers", 3), ("--profile pt", "logging.profile", True),
    ("--profile-steps 2,3", "logging.profile_step_end", 3)])
def test_names_of_older_versions_and_forks(line, key, value):
    run, notes = read(line)
    section, _, field = key.partition(".")
    assert (getattr(getattr(run, section), field), notes) == (value, [])


@pytest.mark.parametrize("line", ["--embed-layernorm", "--fp8-format hybrid", "--mup",
                                  "--position-embedding-type alibi", "--optimizer muon", "--fim-rate 0.5"])
def test_what_changes_the_mathematics_is_refused_by_name(line):
    (problem,) = problems(line)
    assert line.split()[0] in problem and "support" in problem


@pytest.mark.parametrize("line", ["--full-validation", "--data-file-list f"])
def test_not_available_yet(line):
    (problem,) = problems(line)
    assert problem.startswith(line) and "not available yet" in problem


def test_values_that_mean_the_default_are_accepted():
    assert not problems("--num-virtual-stages-per-pipeline-rank 1 --recompute-method uniform --recompute-num-layers 1 "
                        "--pipeline-model-parallel-size 1 --context-parallel-size 1 --fim-rate 0.0 "
                        "--expert-model-parallel-size 1")


@pytest.mark.parametrize("name", SWITCHES)
def test_every_known_switch_has_an_answer(name):
    assert not any("Unknown" in problem or "belongs to no" in problem for problem in problems([f"--{name}"]))


@pytest.mark.parametrize("name", VALUED + LISTS)
def test_every_known_valued_flag_has_an_answer(name):
    found = problems([f"--{name}", "1"])
    assert not any("Unknown" in problem or "belongs to no" in problem for problem in found)


def test_337_flags_are_known():
    assert len(SWITCHES) + len(VALUED) + len(LISTS) == 337


def test_essential_flags_are_fields_translations_or_announced():
    fields = {name for option in schema_options().values() for name in (*option.names, option.off)}
    hints = {"--ckpt-format"}  # any format is accepted: there is one here
    known = fields | set(foreign_flags()) | set(REFUSED) | set(RUN_ONLY) | set(IGNORED) | hints
    assert {"--" + name.replace("_", "-") for name in ESSENTIAL} <= known


def test_no_flag_stands_in_two_tables():
    fields = [name for option in schema_options().values() for name in (*option.names, option.off) if name]
    tables = [fields, foreign_flags(), HINTS, IGNORED, REFUSED, RUN_ONLY, EXPERT_COMPANIONS,
              PLAN_FLAGS]
    names = [name for table in tables for name in table]
    assert sorted(names) == sorted(set(names))


# --- help, docs, cost ----------------------------------------------------------------------------

def test_help_lists_every_option_once():
    text = build_parser().format_help()
    for option in schema_options().values():
        assert option.flag in text
    assert "Model: shape, positions, norms, activation, initialisation" in text
    assert "--ds-sequence-parallel-size" in text and "--swiglu" in text


def test_help_exits(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_args(["--help"])
    assert caught.value.code == 0 and "--ulysses-size" in capsys.readouterr().out


def test_docs_are_up_to_date():
    from docs.make.flags_page import ROOT, render, render_megatron

    pages = {"flags.md": render(), "megatron-flags.md": render_megatron()}
    for name, text in pages.items():
        assert (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8") == text, (
            "run: python docs/make/flags_page.py")


def test_reading_flags_loads_nothing_heavy():
    code = ("import sys\nfrom megatron_sp.config.load import load_run\n"
            "load_run('--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 128 --lr 1e-3 "
            "--train-iters 10 --mock-data --vocab-size 512'.split(), 1)\n"
            "print(sorted({'torch', 'numpy', 'argparse', 'transformers'} & set(sys.modules)))")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_reading_is_quick():
    argv = "--num-layers 2 --hidden-size 64 --lr 1e-3 --data-path 1 a 2 b --swiglu --use-flash-attn".split()
    parse(argv)
    best = min(_timed(argv) for _ in range(5))
    assert best < 0.1


def _timed(argv: list[str]) -> float:
    begin = time.perf_counter()
    parse(argv)
    return time.perf_counter() - begin


def test_a_data_prefix_with_blanks_is_one_word_when_it_exists(tmp_path):
    prefix = tmp_path / "my data" / "c_text_document"
    prefix.parent.mkdir()
    prefix.with_suffix(".idx").touch()
    run, _ = parse_args(["--data-path", str(prefix)])
    assert run.data.data_path == (str(prefix),)
    run, _ = parse_args(["--data-path", "0.3 a 0.7 b"])
    assert run.data.data_path == ("0.3", "a", "0.7", "b")
