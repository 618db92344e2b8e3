"""Lowest and highest values of single fields; whatever involves two fields is in checks.py."""

from __future__ import annotations

from typing import Any, NamedTuple


class Bound(NamedTuple):
    """An interval; an open end excludes the limit itself."""

    low: float | None = None
    high: float | None = None
    low_open: bool = False
    high_open: bool = False

    def problem(self, value: float) -> str:
        """Return a sentence fragment when ``value`` is outside the interval, else ""."""
        if self.low is not None and (value < self.low or (self.low_open and value == self.low)):
            return f"must be {'above' if self.low_open else 'at least'} {_text(self.low)}"
        if self.high is not None and (value > self.high or (self.high_open and value == self.high)):
            return f"must be {'below' if self.high_open else 'at most'} {_text(self.high)}"
        return ""


def _text(limit: float) -> str:
    """Return a limit as text; whole numbers are written with all their digits."""
    return f"{limit:.0f}" if limit == int(limit) else f"{limit:g}"


#: Larger than any count in a real run, and small enough for products of two such numbers to fit into 64 bits.
LARGEST_COUNT = 10**12
POSITIVE_INT = Bound(low=1, high=LARGEST_COUNT)
NOT_NEGATIVE = Bound(low=0, high=LARGEST_COUNT)
TOKENS = Bound(low=0, high=10**18)
POSITIVE = Bound(low=0, low_open=True)
SHARE = Bound(low=0, high=1, high_open=True)


def _bounds(bound: Bound, section: str, names: str) -> dict[str, Bound]:
    return {f"{section}.{name}": bound for name in names.split()}


#: ``section.field`` -> what a value on the command line must satisfy.
BOUNDS: dict[str, Bound] = {
    **_bounds(POSITIVE_INT, "model", "num_layers hidden_size num_attention_heads num_query_groups kv_channels "
              "ffn_hidden_size max_position_embeddings "
              "attention_block_size attention_local_blocks attention_stride make_vocab_size_divisible_by vocab_size "
              "padded_vocab_size"),
    **_bounds(POSITIVE, "model", "rotary_base rotary_seq_len_interpolation_factor rope_scaling_factor norm_epsilon "
              "init_method_std embedding_init_method_std yarn_beta_fast yarn_beta_slow yarn_attention_factor"),
    "model.rotary_scaling_factor": Bound(low=1, high=10**6),
    "model.original_max_position_embeddings": POSITIVE_INT,
    **_bounds(Bound(low=0, high=10**3), "model", "mscale mscale_all_dim"),
    **_bounds(NOT_NEGATIVE, "model", "window_size attention_global_blocks attention_random_blocks "
              "attention_pattern_seed"),
    "model.rotary_percent": Bound(low=0, high=1, low_open=True),
    **_bounds(SHARE, "model", "attention_dropout hidden_dropout"),
    **_bounds(POSITIVE_INT, "parallel", "tp pp ulysses ring ulysses_overlap_groups fsdp_size fsdp_replicas "
              "devices_per_node"),
    "parallel.sequence_split": NOT_NEGATIVE,
    "parallel.zero_stage": Bound(low=0, high=3),
    "parallel.distributed_timeout_minutes": Bound(low=0, high=525_600, low_open=True),  # a year
    **_bounds(POSITIVE, "precision", "initial_loss_scale min_loss_scale"),
    "precision.loss_scale": NOT_NEGATIVE,
    **_bounds(POSITIVE_INT, "precision", "loss_scale_window hysteresis"),
    "data.seq_length": POSITIVE_INT,
    "data.seq_length_phase": POSITIVE_INT,
    "data.num_workers": NOT_NEGATIVE,
    **_bounds(NOT_NEGATIVE, "optimizer", "weight_decay start_weight_decay end_weight_decay clip_grad"),
    **_bounds(SHARE, "optimizer", "adam_beta1 adam_beta2 sgd_momentum"),
    "optimizer.adam_eps": POSITIVE,
    "schedule.lr": POSITIVE,
    **_bounds(NOT_NEGATIVE, "schedule", "min_lr lr_warmup_iters lr_warmup_samples lr_warmup_init"),
    **_bounds(POSITIVE_INT, "schedule", "lr_decay_iters lr_decay_samples"),
    **_bounds(NOT_NEGATIVE, "schedule", "lr_wsd_decay_iters lr_wsd_decay_samples"),
    **_bounds(TOKENS, "schedule", "lr_decay_tokens lr_warmup_tokens"),
    "train.train_tokens": TOKENS,
    "schedule.lr_warmup_fraction": SHARE,
    **_bounds(POSITIVE_INT, "train", "micro_batch_size global_batch_size gradient_accumulation_steps eval_interval"),
    **_bounds(NOT_NEGATIVE, "train", "train_iters train_samples"),
    "train.exit_duration_in_mins": NOT_NEGATIVE,
    "train.seed": Bound(low=0, high=2**32 - 1),  # numpy's
    "train.eval_iters": NOT_NEGATIVE,
    "train.rampup_batch_size": POSITIVE_INT,
    **_bounds(NOT_NEGATIVE, "train", "check_replicas manual_gc_interval exit_interval"),
    **_bounds(POSITIVE_INT, "memory", "recompute_num_layers loss_tile_size mlp_tile_size attention_head_groups"),
    "memory.sequence_chunk_size": NOT_NEGATIVE,
    "memory.offload_activations": Bound(low=0, high=1),
    "checkpoint.save_interval": NOT_NEGATIVE,
    "checkpoint.ckpt_step": NOT_NEGATIVE,
    "checkpoint.keep_last": NOT_NEGATIVE,
    "checkpoint.save_retain_interval": NOT_NEGATIVE,
    **_bounds(POSITIVE_INT, "logging", "log_interval tensorboard_log_interval tensorboard_queue_size"),
    "logging.timing_log_level": Bound(low=0, high=2),
    "logging.device_peak_tflops": POSITIVE,
    **_bounds(NOT_NEGATIVE, "logging", "profile_step_start profile_ranks"),
    "logging.profile_step_end": POSITIVE_INT,
}


def bound_problem(key: str, value: Any) -> str:
    """Return a sentence fragment when ``value`` is outside the field's bounds, else ""."""
    bound = BOUNDS.get(key)
    if bound is None:
        return ""
    for number in value if isinstance(value, tuple) else (value,):
        problem = bound.problem(number)
        if problem:
            return problem
    return ""
