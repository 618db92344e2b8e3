"""Flags that other frameworks know and the schema does not: what becomes of each.

One table for each answer. When a flag of ``NOT_YET`` is built, its line is deleted here and the flag becomes a field of
the schema; nothing else has to change.
"""

from __future__ import annotations

from typing import NamedTuple


def _names(text: str, nargs: int | str) -> dict[str, int | str]:
    return {"--" + name: nargs for name in text.split()}


#: Kernel choices, overlap and tuning switches: nothing to do here. Name -> number of values.
HINTS: dict[str, int | str] = {
    # attention and fused kernels
    **_names("""use-flash-attn use-flash-attn-v1 use-flash-attn-v2 use-flash-attn-triton use-flash-attn-builder
        use-mcore-models use-legacy-models no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion
        no-bias-dropout-fusion no-rope-fusion no-gradient-accumulation-fusion no-persist-layer-norm
        cross-entropy-loss-fusion abort-on-unmet-fused-kernel-constraints attention-softmax-in-fp32
        no-query-key-layer-scaling apply-query-key-layer-scaling causal-lm use-cpu-initialization
        init-model-with-meta-device deterministic-mode calculate-per-token-loss""", 0),
    **_names("transformer-impl attention-backend cross-entropy-fusion-impl", 1),
    **_names("use-torch-compile use-torch-compiled-autograd use-fused-rmsnorm use-fused-sdpa "
             "use-fused-sdpa-with-recompute compiled-autograd-fallback-mode", "?"),
    # communication
    **_names("""no-async-tensor-model-parallel-allreduce no-pipeline-parallel overlap-grad-reduce overlap-param-gather
        overlap-param-gather-with-optimizer-step no-scatter-gather-tensors-in-pipeline tp-comm-overlap
        defer-embedding-wgrad-compute overlap-p2p-communication overlap-p2p-communication-warmup-flush
        no-overlap-p2p-communication ddp-average-in-collective disable-gloo-process-groups use-nccl-ub
        fsdp-double-buffer fsdp-manual-registration no-pre-communication-optimization force-ds-sequence-parallel
        sync-tp-duplicated-parameters no-data-sharding use-mpi""", 0),
    **_names("""DDP-impl tp-comm-overlap-cfg wgrad-deferral-limit local-rank ddp-bucket-size ddp-num-buckets
        reduce-bucket-size zero-allgather-bucket-size zero-reduce-bucket-size""", 1),
    # memory
    **_names("""distribute-checkpointed-activations distribute-saved-activations partition-activations
        contigious-checkpointing synchronize-each-layer zero-reduce-scatter zero-contigious-gradients use-pin-memory
        use-precision-aware-optimizer no-manual-gc-eval offload-continuous-buffers""", 0),
    **_names("""empty-unused-memory-level main-grads-dtype main-params-dtype exp-avg-dtype
        exp-avg-sq-dtype""", 1),
    # data
    **_names("no-create-attention-mask-in-dataloader no-mmap-bin-files repeated-dataloader lazy-loader", 0),
    **_names("data-impl num-dataset-builder-threads valid-num-workers", 1),
    # checkpoints
    **_names("""async-save use-dist-ckpt auto-detect-ckpt-format ckpt-fully-parallel-save no-ckpt-fully-parallel-save
        ckpt-fully-parallel-load use-persistent-ckpt-worker dist-ckpt-optim-fully-reshardable
        dist-ckpt-save-pre-mcore-014 ckpt-assume-constant-structure""", 0),
    **_names("ckpt-format dist-ckpt-format dist-ckpt-strictness", 1),
    # logging
    **_names("no-barrier-with-level-1-timing use-pytorch-profiler nvtx-ranges", 0),
    **_names("logging-level log-level log-level-replica job-name", 1),
}

_ELSEWHERE = "it belongs to another tool"
_NOT_HERE = "there is nothing like it here"

#: Flags that tune another system or steer a tool of its own: ignored, one warning each with the reason.
IGNORED: dict[str, tuple[int | str, str]] = {
    **dict.fromkeys(_names("""patch-tokenizer-type max-padding-length dataset codecarbon-dir structured-logs-dir
        wandb-id cache-dir verify-checkpoint-model-type""", 1), (1, _ELSEWHERE)),
    **dict.fromkeys(_names("structured-logs verify-checkpoint test-mode", 0), (0, _ELSEWHERE)),
    "--extra-vocab-size": (1, "set --vocab-size to the number of rows you want"),
    "--rerun-mode": (1, _NOT_HERE),
    "--error-injection-rate": (1, _NOT_HERE),
    "--error-injection-type": (1, _NOT_HERE),
    "--save-retain-interval": (1, "every checkpoint is kept"),
    "--use-tp-pp-dp-mapping": (0, "the order of the ranks is fixed: pp, dp, ring, ulysses, tp from outer to inner"),
    "--fp8-amax-history-len": (1, "there is no fp8 here"),
    "--fp8-amax-compute-algo": (1, "there is no fp8 here"),
    "--fp8-margin": (1, "there is no fp8 here"),
    "--fp8-interval": (1, "there is no fp8 here"),
    "--measure-activation-memory": (0, "peak memory is always logged"),
    "--kill-switch-path": (1, "send SIGTERM to stop a run"),
    "--trigger-path": (1, "send SIGTERM to save and stop a run"),
    "--keep-last": (0, "its meaning is not known"),
    "--recompute-lgd": (0, "use --recompute-granularity full to recompute activations"),
    "--pp-partition-method": (1, "embedding and loss are counted when layers are split over stages"),
    "--account-for-embedding-in-pipeline-split": (0, "embedding and loss are counted when layers are split"),
    "--account-for-loss-in-pipeline-split": (0, "embedding and loss are counted when layers are split over stages"),
    "--microbatch-group-size-per-virtual-pipeline-stage": (1, "it tunes interleaved pipelines only"),
}

#: Companions of mixture of experts: accepted beside a dense model, where they have no effect.
EXPERT_COMPANIONS: dict[str, int | str] = {
    **_names("moe-eval-capacity-factor moe-expert-parallel-size moe-loss-coeff moe-min-capacity "
             "moe-train-capacity-factor expert-tensor-parallel-size topk mlp-type moe-aux-loss-coeff "
             "moe-router-topk moe-router-load-balancing-type moe-token-dispatcher-type", 1),
    **_names("create-moe-param-group disable-moe-token-dropping moe-grouped-gemm", 0),
}


class Refusal(NamedTuple):
    """Why a flag is refused: a sentence, or for ``NOT_YET`` the name of what is missing.

    ``harmless`` are values (compared as text or number) that change nothing.
    """

    nargs: int | str
    reason: str
    harmless: tuple[str, ...] = ()
    cure: str = ""


def _refuse(text: str, nargs: int | str, reason: str, *harmless: str, cure: str = "") -> dict[str, Refusal]:
    return {name: Refusal(nargs, reason, harmless, cure) for name in _names(text, nargs)}


#: Flags that would change the model, the data or the meaning of the run in a way that is not offered.
REFUSED: dict[str, Refusal] = {
    **_refuse("embed-layernorm", 0, "a layer norm after the embedding (BLOOM) is not supported"),
    **_refuse("use-alibi-mask", 0, "ALiBi is not supported; use --position-embedding-type rope"),
    **_refuse("fim-rate", 1, "fill-in-the-middle data is not supported", "0"),
    **_refuse("mup", 0, "muP is not supported"),
    **_refuse("mup-attn-mult mup-input-mult mup-output-mult", "?", "muP is not supported", "1"),
    **_refuse("sliding-window", 1, "sliding-window attention is not supported"),
    **_refuse("decoupled-lr decoupled-min-lr", 1,
              "a separate learning rate for embedding and output layer is not supported"),
    **_refuse("fp8-format fp8-recipe", 1, "fp8 is not supported; use --bf16"),
    **_refuse("fp8-param-gather", 0, "fp8 is not supported; use --bf16"),
    **_refuse("use-bnb-optimizer", 0, "8-bit optimizers are not supported"),
    **_refuse("use-z-loss", 0, "the z-loss is not supported"),
    **_refuse("adjust-word-embedding-init", 0,
              "this initialisation is not supported; use --embedding-init-method-std"),
    **_refuse("rotary-scale-factor", 1,
              "this scaling is not supported; use --rotary-seq-len-interpolation-factor", "1"),
    **_refuse("disable-bias-attn-fc disable-bias-linear-fc", 0,
              "biases of single layers cannot be switched off; use --disable-bias-linear"),
    **_refuse("quick-geglu", 0, "this activation is not supported; use --swiglu"),
    **_refuse("expert-model-parallel-size", 1, "mixture of experts is not supported", "1"),
    **_refuse("allow-padding-num-layers", 0, "the number of layers is never padded; choose --num-layers so that it "
                                             "divides over the stages"),
    **_refuse("num-distributed-optimizer-instances", 1, "use --fsdp-size to shard within groups", "1"),
    **_refuse("shuffle-sample-in-corpus", 0, "samples are shuffled over the whole blend"),
    **_refuse("train-weighted-split-paths valid-weighted-split-paths test-weighted-split-paths "
              "train-weighted-split-paths-path valid-weighted-split-paths-path test-weighted-split-paths-path", "*",
              "this form is not supported; use --train-data-path, --valid-data-path and --test-data-path"),
    **_refuse("train-mode", 1, "only pretraining is supported", "pretrain"),
    **_refuse("train-data valid-data", "*", "its meaning is not known here; use --train-data-path and "
                                            "--valid-data-path"),
    **_refuse("epochs", 1, "training is counted in --train-iters or --train-samples"),
    **_refuse("gas", 1, "accumulation follows from --global-batch-size / (--micro-batch-size x data-parallel size)"),
}

#: Old names whose replacement the user should see.
RENAMED: dict[str, str] = {
    "--batch-size": "--micro-batch-size",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--warmup": "--lr-warmup-fraction",
}

#: Flags whose mechanism is built later. Delete a line when its flag enters the schema.
NOT_YET: dict[str, Refusal] = {
    # pipeline
    **_refuse("decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers interleave-group-size", 1,
              "this way to say the layers of each stage", cure="say them with --pipeline-layers"),
    **_refuse("enable-zb-runtime enable-zbh1-pipeline enable-zbh1-exact-semantics", 0,
              "this way to ask for a zero-bubble pipeline", cure="use --pipeline-schedule zero-bubble"),
    # sequence parallelism beyond memory
    **_refuse("ds-sequence-parallel-fpdt ds-sequence-parallel-fpdt-offloading", 0, "chunked attention"),
    **_refuse("ds-sequence-parallel-fpdt-chunk-size", 1, "chunked attention"),
    # recompute and offload
    **_refuse("remote-device", 1, "offload to host memory", "none"),
    # data
    **_refuse("reset-position-ids reset-attention-mask", 0, "separate attention per document"),
    **_refuse("data-args-path per-split-data-args-path data-file-list", 1, "reading the data list from a file"),
    **_refuse("tokenizer-file tiktoken-pattern", 1, "this tokenizer"),
    # batch and length
    **_refuse("skip-train-iteration-range", "*", "skipping ranges of the data"),
    **_refuse("full-validation", 0, "validation on the whole set"),
    **_refuse("eval-global-batch-size eval-micro-batch-size", 1, "a batch size of its own for evaluation"),
    # checkpoints
    **_refuse("finetune no-load-optim no-load-rng no-load-lr-state no-save-optim no-save-rng reset-iteration", 0,
              "loading or saving only a part of a checkpoint"),
    **_refuse("pretrained-checkpoint", 1, "loading or saving only a part of a checkpoint"),
    **_refuse("universal-checkpoint use-checkpoint-args use-mp-args-from-checkpoint-args", 0,
              "reading the checkpoints of other frameworks or their arguments"),
    # DeepSpeed
    **_refuse("deepspeed", 0, "running from DeepSpeed's settings",
              cure="leave it out and say --zero-stage, --bf16 or --fp16 and --clip-grad"),
    **_refuse("deepspeed-config", 1, "reading DeepSpeed's JSON file",
              cure="say the same with --zero-stage, --bf16 or --fp16, --clip-grad and the batch flags"),
}
