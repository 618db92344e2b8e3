"""A walk through every flag: what it changes, that code reads it, or what is answered; and its documentation."""

from __future__ import annotations

import functools
import re

import pytest

from docs.make.flags_page import ROOT
from megatron_sp.config.cli.flags import parse
from megatron_sp.config.cli.help import build_parser
from megatron_sp.config.cli.options import schema_options
from megatron_sp.config.cli.translation.tables import HINTS, IGNORED, REFUSED
from megatron_sp.config.schema import Run
from tests.helpers.field_reads import reads
from tests.unit.config.known_flags import ESSENTIAL

#: Words of the command line -> ``section.field=value`` that they must set (Python's repr of the value).
SETS = """
--accumulate-allreduce-grads-in-fp32        precision.accumulate_allreduce_grads_in_fp32=True
--adam-beta1 0.8                            optimizer.adam_beta1=0.8
--adam-beta2 0.95                           optimizer.adam_beta2=0.95
--adam-eps 1e-6                             optimizer.adam_eps=1e-06
--add-qkv-bias                              model.add_qkv_bias=True
--attention-dropout 0.2                     model.attention_dropout=0.2
--attention-pattern sliding-window          model.attention_pattern='sliding-window'
--attention-pattern-per-layer fixed causal  model.attention_pattern_per_layer=('fixed','causal')
--attention-block-size 64                   model.attention_block_size=64
--attention-local-blocks 3                  model.attention_local_blocks=3
--attention-global-blocks 2                 model.attention_global_blocks=2
--attention-random-blocks 2                 model.attention_random_blocks=2
--attention-stride 3                        model.attention_stride=3
--attention-blocks-by-head                  model.attention_blocks_by_head=True
--attention-pattern-seed 7                  model.attention_pattern_seed=7
--window-size 128                           model.window_size=128
--window-size 127,0                         model.window_size=128
--window-size (127,0)                       model.window_size=128
--window-size 127 0                         model.window_size=128
--sliding-window 128                        model.window_size=128
--window-attn-skip-freq 4                   model.window_attn_skip_freq='4'
--bf16                                      precision.bf16=True
--checkpoint-activations                    memory.recompute_granularity='full'
--checkpoint-num-layers 2                   memory.recompute_num_layers=2
--clip-grad 0.5                             optimizer.clip_grad=0.5
--context-parallel-size 2                   parallel.ring=2
--context-parallel-size 2 --cp-comm-type a2a  parallel.ulysses=2
--data-cache-path /c                        data.data_cache_path='/c'
--data-path 1 a 2 b                         data.data_path=('1','a','2','b')
--dataset-provider a.py:f                   data.dataset_provider='a.py:f'
--dataset-arguments a=b c=d                 data.dataset_arguments=('a=b','c=d')
--dataloader-type cyclic                    data.dataloader_type='cyclic'
--deepspeed --fp16 --loss-scale 12          precision.initial_loss_scale=65536.0
--deepspeed-activation-checkpointing --checkpoint-activations  memory.recompute_granularity='full'
--disable-bias-linear                       model.add_bias_linear=False
--distributed-backend gloo                  parallel.distributed_backend='gloo'
--distributed-timeout-minutes 3             parallel.distributed_timeout_minutes=3.0
--ds-sequence-parallel-fpdt                 memory.sequence_chunk_size=65536
--ds-sequence-parallel-fpdt --ds-sequence-parallel-fpdt-chunk-size 64   memory.sequence_chunk_size=64
--ds-sequence-parallel-fpdt --ds-sequence-parallel-fpdt-offloading      memory.offload_key_values=True
--ds-sequence-parallel-size 2               parallel.ulysses=2
--document-boundaries eod                   data.document_boundaries='eod'
--eod-mask-loss                             data.eod_mask_loss=True
--eval-interval 7                           train.eval_interval=7
--eval-iters 7                              train.eval_iters=7
--exit-duration-in-mins 7                   train.exit_duration_in_mins=7.0
--exit-interval 7                           train.exit_interval=7
--exit-signal-handler                       train.exit_signal_handler=True
--ffn-hidden-size 96                        model.ffn_hidden_size=96
--finetune                                  checkpoint.finetune=True
--fp16                                      precision.fp16=True
--global-batch-size 16                      train.global_batch_size=16
--group-query-attention                     model.num_query_groups=1
--hidden-dropout 0.2                        model.hidden_dropout=0.2
--hidden-size 96                            model.hidden_size=96
--hysteresis 3                              precision.hysteresis=3
--init-method-std 0.01                      model.init_method_std=0.01
--initial-loss-scale 4096                   precision.initial_loss_scale=4096.0
--kv-channels 24                            model.kv_channels=24
--layernorm-epsilon 1e-6                    model.norm_epsilon=1e-06
--load /l                                   checkpoint.load='/l'
--log-batch-size-to-tensorboard             logging.log_batch_size_to_tensorboard=True
--log-interval 7                            logging.log_interval=7
--log-memory-to-tensorboard                 logging.log_memory_to_tensorboard=True
--log-num-zeros-in-grad                     logging.log_num_zeros_in_grad=True
--log-params-norm                           logging.log_params_norm=True
--log-progress                              logging.log_progress=True
--log-throughput                            logging.log_throughput=True
--log-timers-to-tensorboard                 logging.log_timers_to_tensorboard=True
--log-validation-ppl-to-tensorboard         logging.log_validation_ppl_to_tensorboard=True
--loss-scale 64                             precision.loss_scale=64.0
--lr 1e-4                                   schedule.lr=0.0001
--lr-decay-iters 7                          schedule.lr_decay_iters=7
--lr-decay-samples 7                        schedule.lr_decay_samples=7
--lr-decay-style cosine                     schedule.lr_decay_style='cosine'
--lr-decay-tokens 7                         schedule.lr_decay_tokens=7
--lr-warmup-fraction 0.1                    schedule.lr_warmup_fraction=0.1
--lr-warmup-iters 7                         schedule.lr_warmup_iters=7
--lr-warmup-samples 7                       schedule.lr_warmup_samples=7
--lr-warmup-tokens 7                        schedule.lr_warmup_tokens=7
--lr-wsd-decay-iters 7                      schedule.lr_wsd_decay_iters=7
--lr-wsd-decay-style linear                 schedule.lr_wsd_decay_style='linear'
--make-vocab-size-divisible-by 64           model.make_vocab_size_divisible_by=64
--max-position-embeddings 99                model.max_position_embeddings=99
--merge-file /m                             data.merge_file='/m'
--micro-batch-size 4                        train.micro_batch_size=4
--min-lr 1e-5                               schedule.min_lr=1e-05
--mock-data                                 data.mock_data=True
--no-check-for-nan-in-loss-and-grad         train.check_for_nan_in_loss_and_grad=False
--no-log-loss-scale-to-tensorboard          logging.log_loss_scale_to_tensorboard=False
--no-load-optim                             checkpoint.load_optimizer=False
--no-save-optim                             checkpoint.save_optimizer=False
--no-position-embedding                     model.position_embedding_type='none'
--norm-epsilon 1e-6                         model.norm_epsilon=1e-06
--normalization RMSNorm                     model.normalization='RMSNorm'
--num-attention-heads 6                     model.num_attention_heads=6
--num-key-value-heads 2                     model.num_query_groups=2
--num-layers 3                              model.num_layers=3
--num-layers-per-virtual-pipeline-stage 2   parallel.layers_per_virtual_stage=2
--group-query-attention --num-query-groups 2  model.num_query_groups=2
--num-virtual-stages-per-pipeline-rank 2    parallel.stages_per_rank=2
--num-workers 0                             data.num_workers=0
--optimizer sgd                             optimizer.optimizer='sgd'
--override-lr-scheduler                     schedule.override_opt_param_scheduler=True
--override-opt_param-scheduler              schedule.override_opt_param_scheduler=True
--pack-documents best-fit                   data.pack_documents='best-fit'
--pipeline-model-parallel-size 2            parallel.pp=2
--position-embedding-type rope              model.position_embedding_type='rope'
--position-embedding-type yarn              model.position_embedding_type='rope'
--position-embedding-type yarn              model.rope_scaling_type='yarn'
--rope-scaling-type ntk                     model.rope_scaling_type='ntk'
--rotary-scaling-factor 4                   model.rotary_scaling_factor=4.0
--original-max-position-embeddings 64       model.original_max_position_embeddings=64
--yarn-original-max-position-embeddings 64  model.original_max_position_embeddings=64
--yarn-beta-fast 16                         model.yarn_beta_fast=16.0
--yarn-beta-slow 2                          model.yarn_beta_slow=2.0
--mscale 0.7                                model.mscale=0.7
--mscale-all-dim 0.7                        model.mscale_all_dim=0.7
--yarn-attention-factor 1.2                 model.yarn_attention_factor=1.2
--no-yarn-correction-range-round-to-int     model.yarn_correction_range_round_to_int=False
--qk-layernorm                              model.qk_layernorm=True
--rampup-batch-size 2 2 8                   train.rampup_batch_size=(2,2,8)
--recompute-activations                     memory.recompute_granularity='selective'
--recompute-granularity full                memory.recompute_granularity='full'
--recompute-method block                    memory.recompute_method='block'
--recompute-num-layers 2                    memory.recompute_num_layers=2
--reset-attention-mask                      data.reset_attention_mask=True
--reset-position-ids                        data.reset_position_ids=True
--rotary-base 500000                        model.rotary_base=500000.0
--rotary-percent 0.5                        model.rotary_percent=0.5
--rotary-position-embeddings-theta 5e5      model.rotary_base=500000.0
--save /s                                   checkpoint.save='/s'
--save-interval 7                           checkpoint.save_interval=7
--seed 7                                    train.seed=7
--seq-length 99                             data.seq_length=99
--seq-length-schedule 0:8K 10B:32K          data.seq_length_schedule=('0:8K','10B:32K')
--seq-length-phase 2                        data.seq_length_phase=2
--sequence-parallel                         parallel.megatron_sp=True
--split 90,5,5                              data.split='90,5,5'
--swiglu                                    model.activation='swiglu'
--tensor-model-parallel-size 2              parallel.tp=2
--tensorboard-dir /t                        logging.tensorboard_dir='/t'
--tensorboard-log-interval 7                logging.tensorboard_log_interval=7
--tensorboard-queue-size 7                  logging.tensorboard_queue_size=7
--test-data-path a                          data.test_data_path=('a',)
--tiktoken-num-special-tokens 7             data.tiktoken_num_special_tokens=7
--tiktoken-pattern v1                       data.tiktoken_pattern='v1'
--timing-log-level 2                        logging.timing_log_level=2
--tokenizer-model /t                        data.tokenizer_model='/t'
--tokenizer-name-or-path /t                 data.tokenizer_model='/t'
--tokenizer-type NullTokenizer              data.tokenizer_type='NullTokenizer'
--train-data-path a                         data.train_data_path=('a',)
--tp-comm-overlap                           parallel.tp_comm_overlap=True
--train-iters 7                             train.train_iters=7
--train-samples 7                           train.train_samples=7
--train-tokens 7                            train.train_tokens=7
--untie-embeddings-and-output-weights       model.untie_embeddings_and_output_weights=True
--use-checkpoint-opt_param-scheduler        schedule.use_checkpoint_opt_param_scheduler=True
--use-distributed-optimizer                 parallel.zero_stage=1
--use-rotary-position-embeddings            model.position_embedding_type='rope'
--valid-data-path code=a books=b            data.valid_data_path=('code=a','books=b')
--vocab-extra-ids 7                         data.vocab_extra_ids=7
--vocab-file /v                             data.vocab_file='/v'
--vocab-size 99                             model.vocab_size=99
--wandb-entity e                            logging.wandb_entity='e'
--wandb-exp-name n                          logging.wandb_exp_name='n'
--wandb-project p                           logging.wandb_project='p'
--wandb-save-dir d                          logging.wandb_save_dir='d'
--weight-decay 0.1                          optimizer.weight_decay=0.1
--zero-stage 2                              parallel.zero_stage=2
"""

CASES = [tuple(line.rsplit(maxsplit=1)) for line in SETS.strip().splitlines()]

#: Field that only config/ (or layout/, while it derives other fields) reads -> the derived field that the rest reads.
BECOMES = {
    "model.make_vocab_size_divisible_by": "model.padded_vocab_size",
    "parallel.fsdp_replicas": "parallel.fsdp_size",
    "train.gradient_accumulation_steps": "train.global_batch_size",
    "parallel.layers_per_virtual_stage": "parallel.stages_per_rank",
    "parallel.sequence_split": "parallel.ulysses",
    "precision.bf16": "precision.dtype",
    "model.kv_channels": "model.head_dim",
    "model.rotary_percent": "model.rotary_width",
    "model.mscale": "model.rotary_attention_factor",
    "model.mscale_all_dim": "model.rotary_attention_factor",
    "model.yarn_attention_factor": "model.rotary_attention_factor",
}
#: Other such fields -> why that is right.
NOT_READ = {
    "parallel.pipeline_layers": "read through layout.stages.stage_layers",
    "precision.accumulate_allreduce_grads_in_fp32": "always on unless --grad-reduce-in-bf16",
    "train.decrease_batch_size_if_needed": "batches are rounded down in any case; without it a check refuses them",
    "train.exit_signal_handler": "always on",
    "logging.log_batch_size_to_tensorboard": "always on",
}


def normalised(name: str) -> str:
    return "--" + name.lstrip("-").replace("_", "-")


ALL = {normalised(name) for name in ESSENTIAL}
SETTING = {normalised(word) for words, _ in CASES for word in words.split() if word.startswith("--")}
#: What is left is a hint, or is refused by name until it is there.
ANSWERED = sorted(ALL - SETTING)


@functools.cache
def fields_read() -> tuple[set[str], set[str]]:
    """Return the fields that code acts on, and those that only derive others; predictions and proofs are no effect."""
    package = ROOT / "megatron_sp"
    deriving = [*(package / "config").rglob("*.py"), package / "layout/sequence_split.py", package / "layout/stages.py"]
    acting = [path for path in package.rglob("*.py")
              if path not in deriving and path.relative_to(package).parts[0] not in ("plan", "proof")]
    return set().union(*map(reads, [*acting, ROOT / "pretrain_gpt.py"])), set().union(*map(reads, deriving))


@functools.cache
def documentation() -> tuple[str, str]:
    """Return the text of ``--help``, and of the two pages of flags."""
    pages = [ROOT / "docs" / "reference" / name for name in ("flags.md", "megatron-flags.md")]
    return build_parser().format_help(), "\n".join(page.read_text(encoding="utf-8") for page in pages)


@pytest.mark.parametrize("words, expected", CASES, ids=[words for words, _ in CASES])
def test_it_changes_what_it_should(words: str, expected: str) -> None:
    parsed = parse(words.split())
    assert parsed.problems == []
    key, _, value = expected.partition("=")
    section, _, field = key.partition(".")
    got = getattr(getattr(parsed.run, section), field)
    assert repr(got).replace(" ", "") == value
    if field != "exit_signal_handler":      # always on
        assert got != getattr(getattr(Run(), section), field)


@pytest.mark.parametrize("name", ANSWERED)
def test_it_is_a_hint_or_refused_by_name(name: str) -> None:
    nargs = (HINTS | {key: nargs for key, (nargs, _) in IGNORED.items()} | {
        key: entry.nargs for key, entry in REFUSED.items()} | {"--deepspeed-config": 1})[name]
    parsed = parse([name, *(["1"] if nargs else [])])
    if name in REFUSED:
        (problem,) = parsed.problems
        assert problem.startswith(name) and "not available yet" in problem
    else:
        assert parsed.problems == [] and any(name.replace("-config", "_config") in note for note in parsed.notes)


@pytest.mark.parametrize("name", sorted(ALL))
def test_it_is_documented(name: str) -> None:
    text, docs = documentation()
    assert f"`{name}`" in docs
    if name in SETTING:
        assert name in text.replace("\n", " ")


@pytest.mark.parametrize("key", schema_options())
def test_it_has_an_effect(key: str) -> None:
    """Some code reads the field, not only the parser."""
    acting, in_config = fields_read()
    if key in BECOMES:
        assert key not in acting and key in in_config and BECOMES[key] in acting
    elif key in NOT_READ:
        assert key not in acting
        assert "always" not in NOT_READ[key] or "always" in schema_options()[key].help
    else:
        assert key in acting, "nobody reads it"


def test_nothing_is_left_out() -> None:
    assert BECOMES.keys() | NOT_READ.keys() <= schema_options().keys()
    assert SETTING <= ALL
    assert len(ALL) == 168


def test_a_default_of_0_that_the_page_shows_is_taken() -> None:
    """``--window-size 0`` and ``--sequence-chunk-size 0`` turn off."""
    page = (ROOT / "docs" / "reference" / "flags.md").read_text()
    shown = re.findall(r"^\| `(--[a-z-]+)` \|[^|]*\| `0` \|", page, re.MULTILINE)
    assert len(shown) > 10
    refused = {flag: parse([flag, "0"]).problems for flag in [*shown, "--window-size"]}
    assert {flag: problems for flag, problems in refused.items() if problems} == {}
