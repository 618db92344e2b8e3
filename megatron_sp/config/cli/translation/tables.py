"""Flags that other frameworks know and the schema does not: what becomes of each.

One table for each answer. A flag that gets built moves from its table to the schema; nothing else has to change. The
names of Megatron-DeepSpeed's flags were read off its parser, so that each has an answer here.
"""

from __future__ import annotations

from typing import NamedTuple


def _names(text: str, nargs: int | str) -> dict[str, int | str]:
    return {"--" + name: nargs for name in text.split()}


#: Flags that only tune: kernels, overlap, buffers, file handling. Name -> number of values.
HINTS: dict[str, int | str] = {
    # attention and fused kernels
    **_names("""use-flash-attn use-flash-attn-v1 use-flash-attn-v2 use-flash-attn-triton use-flash-attn-builder
        use-mcore-models use-legacy-models no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion
        no-bias-dropout-fusion no-rope-fusion no-gradient-accumulation-fusion no-persist-layer-norm
        cross-entropy-loss-fusion abort-on-unmet-fused-kernel-constraints attention-softmax-in-fp32
        no-query-key-layer-scaling apply-query-key-layer-scaling causal-lm use-cpu-initialization
        init-model-with-meta-device deterministic-mode calculate-per-token-loss disable-mem-efficient-ln torch-adam
        ds-fused-adam""", 0),
    **_names("transformer-impl attention-backend cross-entropy-fusion-impl onnx-safe", 1),
    **_names("use-torch-compile use-torch-compiled-autograd use-fused-rmsnorm use-fused-sdpa "
             "use-fused-sdpa-with-recompute compiled-autograd-fallback-mode", "?"),
    # communication
    **_names("""no-async-tensor-model-parallel-allreduce no-pipeline-parallel overlap-grad-reduce overlap-param-gather
        overlap-param-gather-with-optimizer-step no-scatter-gather-tensors-in-pipeline
        defer-embedding-wgrad-compute overlap-p2p-communication overlap-p2p-communication-warmup-flush
        no-overlap-p2p-communication ddp-average-in-collective disable-gloo-process-groups use-nccl-ub
        fsdp-double-buffer fsdp-manual-registration no-pre-communication-optimization force-ds-sequence-parallel
        sync-tp-duplicated-parameters no-data-sharding use-mpi no-contiguous-buffers-in-local-ddp
        use-ring-exchange-p2p allow-padding-num-layers deepspeed-mpi""", 0),
    **_names("""DDP-impl tp-comm-overlap-cfg wgrad-deferral-limit local-rank ddp-bucket-size ddp-num-buckets
        reduce-bucket-size zero-allgather-bucket-size zero-reduce-bucket-size lazy-mpu-init
        microbatch-group-size-per-virtual-pipeline-stage interleave-group-size""", 1),
    # memory
    **_names("""distribute-checkpointed-activations distribute-saved-activations partition-activations
        contigious-checkpointing synchronize-each-layer zero-reduce-scatter zero-contigious-gradients use-pin-memory
        use-precision-aware-optimizer no-manual-gc-eval offload-continuous-buffers scattered-embeddings
        split-transformers memory-centric-tiled-linear profile-backward""", 0),
    **_names("""empty-unused-memory-level main-grads-dtype main-params-dtype exp-avg-dtype
        exp-avg-sq-dtype tile-factor""", 1),
    # data
    **_names("no-create-attention-mask-in-dataloader no-mmap-bin-files repeated-dataloader lazy-loader mmap-warmup "
             "return-data-index", 0),
    **_names("data-impl num-dataset-builder-threads valid-num-workers", 1),
    # checkpoints
    **_names("""use-dist-ckpt auto-detect-ckpt-format ckpt-fully-parallel-save no-ckpt-fully-parallel-save
        ckpt-fully-parallel-load use-persistent-ckpt-worker dist-ckpt-optim-fully-reshardable
        dist-ckpt-save-pre-mcore-014 ckpt-assume-constant-structure checkpoint-writer-decoupled no-initialization
        universal-checkpoint""", 0),
    **_names("ckpt-format dist-ckpt-format dist-ckpt-strictness checkpoint-io-buffer-size checkpoint-data-parallel "
             "aio-intra-op-parallelism", 1),
    # logging
    **_names("no-barrier-with-level-1-timing use-pytorch-profiler nvtx-ranges", 0),
    **_names("logging-level log-level log-level-replica job-name", 1),
}

_ELSEWHERE = "belongs to another tool"
_NOT_HERE = "there is nothing like it here"
_FP8 = "there is no fp8 here"
_NO_RANDOM_STATE = "checkpoints hold no random state, so there is none to save or load"

#: Flags without effect here for a reason that the user may want to know; one line names them. Name -> (values, reason).
IGNORED: dict[str, tuple[int | str, str]] = {
    **dict.fromkeys(_names("""max-padding-length dataset codecarbon-dir structured-logs-dir
        wandb-id cache-dir verify-checkpoint-model-type aml-data-download-path
        inference-batch-times-seqlen-threshold max-tokens-to-oom adlr-autoresume-interval""", 1), (1, _ELSEWHERE)),
    **dict.fromkeys(_names("structured-logs test-mode adlr-autoresume", 0), (0, _ELSEWHERE)),
    "--extra-vocab-size": (1, "set --vocab-size to the number of rows you want"),
    **dict.fromkeys(_names("rerun-mode error-injection-rate error-injection-type", 1), (1, _NOT_HERE)),
    "--use-tp-pp-dp-mapping": (0, "the order of the ranks is fixed: pp, dp, ring, ulysses, tp from outer to inner"),
    **dict.fromkeys(_names("fp8-amax-history-len fp8-amax-compute-algo fp8-margin fp8-interval", 1), (1, _FP8)),
    "--measure-activation-memory": (0, "peak memory is always logged"),
    **dict.fromkeys(_names("kill-switch-path kill-switch-file trigger-path", 1), (1, "send SIGTERM to save and stop a "
                                                                                    "run")),
    "--recompute-lgd": (0, "use --recompute-granularity full to recompute activations"),
    "--pp-partition-method": (1, "embedding and loss are counted when layers are split over stages"),
    "--standalone-embedding-stage": (0, "embedding and loss are counted when layers are split over stages"),
    "--no-log-learnig-rate-to-tensorboard": (0, "TensorBoard always gets the learning rate"),
    "--fp16-lm-cross-entropy": (0, "the loss is computed in fp32"),
    "--shuffle-sample-in-corpus": (0, "it changes the order of the samples only; here they are shuffled over the "
                                      "whole blend"),
    **dict.fromkeys(_names("no-load-rng no-save-rng", 0), (0, _NO_RANDOM_STATE)),
    "--remote-device": (1, "parameters stay on the devices, where --zero-stage 3 shards them; --offload-optimizer "
                           "moves the optimizer to host memory"),
}

#: Flags that only matter for mixture of experts: accepted for a dense model, where they have no effect.
EXPERT_COMPANIONS: dict[str, int | str] = {
    **_names("moe-eval-capacity-factor moe-expert-parallel-size moe-loss-coeff moe-min-capacity "
             "moe-train-capacity-factor expert-tensor-parallel-size topk mlp-type moe-aux-loss-coeff "
             "moe-router-topk moe-router-load-balancing-type moe-token-dispatcher-type expert-interval", 1),
    **_names("create-moe-param-group disable-moe-token-dropping moe-grouped-gemm use-tutel "
             "enable-expert-tensor-parallelism disable-moe-top2-2nd-expert-sampling", 0),
}


class Refusal(NamedTuple):
    """Why a flag is refused.

    Attributes:
        nargs: number of values, "?" or "*".
        reason: a clause that says what is not supported, and a cure that is accepted.
        harmless: values (compared as text or number) that change nothing and are accepted.
        only_with: a flag without which this one does nothing, and is accepted.
        not_beside: a flag that decides instead of this one, which is then accepted.
    """

    nargs: int | str
    reason: str
    harmless: tuple[str, ...] = ()
    only_with: str = ""
    not_beside: str = ""


def _refuse(text: str, nargs: int | str, reason: str, *harmless: str, only_with: str = "",
            not_beside: str = "") -> dict[str, Refusal]:
    return {name: Refusal(nargs, reason, harmless, only_with, not_beside) for name in _names(text, nargs)}


_OTHER_MODEL = ("it belongs to another kind of model (encoder-decoder, BERT, retrieval or vision), and only GPT is "
                "trained here; leave it out")
_NO_DISTILLATION = "distillation from a teacher is not supported; leave it out to train the model by itself"
_NO_FP8 = "fp8 is not supported; leave the fp8 flags out and compute in --bf16"
_NO_EMBEDDING_LR = ("a separate learning rate for embedding and output layer is not supported; leave it out, and --lr "
                    "holds for all weights")
_NO_MUP = "muP is not supported; leave the mup flags out"
_NO_CURRICULUM = "it leaves out tokens or changes the sequences during training, which is not supported; leave it out"

#: Flags that change the mathematics, the model or the meaning of the run in a way that is not offered.
REFUSED: dict[str, Refusal] = {
    # model
    **_refuse("embed-layernorm", 0, "a layer norm after the embedding (BLOOM) is not supported; leave it out"),
    **_refuse("use-alibi-mask", 0, "ALiBi is not supported; use --position-embedding-type rope"),
    **_refuse("mup", 0, _NO_MUP),
    **_refuse("mup-attn-mult mup-input-mult mup-output-mult", "?", _NO_MUP, "1"),
    **_refuse("adjust-word-embedding-init", 0,
              "it does not say how large the embedding's initial values are; give their standard deviation with "
              "--word-embedding-init-std X in addition, or with --embedding-init-method-std X instead",
              not_beside="--word-embedding-init-std"),
    **_refuse("quick-geglu", 0, "this activation is not supported; use --swiglu"),
    **_refuse("apply-residual-connection-post-layernorm", 0,
              "the residual connection always leaves before the norm layer; leave it out"),
    **_refuse("expert-model-parallel-size num-experts-switch", 1,
              "mixture of experts is not supported; leave it out to train a dense model", "1"),
    **_refuse("multi-latent-attention", 0, "latent attention is not supported; use --num-key-value-heads for a "
                                           "smaller key/value cache"),
    **_refuse("mtp-num-layers", 1, "prediction of several tokens is not supported; leave it out", "0"),
    # numbers
    **_refuse("fp8-format fp8-recipe", 1, _NO_FP8),
    **_refuse("fp8-param-gather", 0, _NO_FP8),
    **_refuse("fp32-residual-connection", 0, "the residual stream has the type computed in; leave it out, or compute "
                                             "everything in fp32 without --bf16 and --fp16"),
    **_refuse("embedding-weights-in-fp32", 0, "embeddings are looked up in the type computed in (their master weights "
                                              "are fp32); leave it out"),
    **_refuse("use-bnb-optimizer", 0, "8-bit optimizers are not supported; use --optimizer adam"),
    **_refuse("decoupled-lr decoupled-min-lr", 1, _NO_EMBEDDING_LR),
    **_refuse("head-lr-mult", 1, _NO_EMBEDDING_LR, "1"),
    **_refuse("use-z-loss", 0, "the z-loss is not supported; leave it out to train on the cross-entropy alone"),
    **_refuse("data-parallel-random-init", 0, "all data-parallel ranks start from the same weights; leave it out"),
    **_refuse("random-ltd data-efficiency-curriculum-learning", 0, _NO_CURRICULUM),
    **_refuse("train-mode", 1, "only pretraining is supported; leave it out", "pretrain"),
    **_refuse("epochs", 1, "training is counted in --train-iters or --train-samples; give one of them instead"),
    # other kinds of runs and models
    **_refuse("inference ds-inference", 0, "this program trains; tools/generate_text.py samples text"),
    **_refuse("use-dataset-only", 1, "data sets are not offered to other trainers; leave it out", "false", "0"),
    **_refuse("kd mos", 0, _NO_DISTILLATION),
    **_refuse("num-layers-teacher hidden-size-teacher num-attention-heads-teacher load-teacher kd-alpha-ce kd-beta-ce "
              "kd-temp", 1, _NO_DISTILLATION),
    **_refuse("num-experts-teacher", "*", _NO_DISTILLATION),
    **_refuse("""decoder-num-layers decoder-seq-length pipeline-model-parallel-split-rank mask-prob
        short-seq-prob bert-embedder-type bert-load retro-workdir retro-cyclic-train-iters retro-encoder-layers
        retro-encoder-hidden-dropout retro-encoder-attention-dropout retro-num-neighbors retro-num-retrieved-chunks
        retriever-seq-length ict-head-size ict-load biencoder-projection-dim titles-data-path query-in-block-prob
        evidence-data-path block-data-path embedding-path indexer-batch-size indexer-log-interval num-classes img-h
        img-w num-channels patch-dim classes-fraction data-per-class-fraction vision-pretraining-type
        vision-backbone-type swin-backbone-type mask-type mask-factor iter-per-epoch dino-local-img-size
        dino-local-crops-number dino-head-hidden-size dino-bottleneck-size dino-freeze-last-layer
        dino-warmup-teacher-temp dino-teacher-temp dino-warmup-teacher-temp-epochs""", 1, _OTHER_MODEL, "0"),
    **_refuse("""output-bert-embeddings bert-no-binary-head retro-add-retriever retro-return-doc-ids
        biencoder-shared-query-context-model use-one-sent-docs retriever-score-scaling vision-pretraining
        dino-norm-last-layer""", 0, _OTHER_MODEL),
    **_refuse("retriever-report-topk-accuracies", "*", _OTHER_MODEL),
}

_SPLIT_PATHS = "this form is not supported; use --train-data-path, --valid-data-path and --test-data-path"
_LIST_FILE = ("the form of this file is not known here, and reading it is not available yet; list weights and prefixes "
              "(W1 P1 W2 P2) in a file for --data-args-path")
_OWN_INDEX = "the order of the samples is computed, not read from a file; leave it out"

#: Flags about data, tokenizers, checkpoints and evaluation that a run refuses. A plan accepts them: it depends on none.
RUN_ONLY: dict[str, Refusal] = {
    # data
    **_refuse("train-weighted-split-paths valid-weighted-split-paths test-weighted-split-paths "
              "train-weighted-split-paths-path valid-weighted-split-paths-path test-weighted-split-paths-path", "*",
              _SPLIT_PATHS),
    **_refuse("train-data valid-data", "*", "its meaning is not known here; use --train-data-path and "
                                            "--valid-data-path"),
    **_refuse("data-file-list", 1, _LIST_FILE),
    **_refuse("skip-train-iteration-range", "*", "skipping ranges of the data is not available yet; leave it out"),
    **_refuse("train-data-exact-num-epochs", 1, "the data is repeated as often as the run needs; set --train-samples"),
    **_refuse("train-idx-path train-desc-path train-doc-idx-path train-sample-idx-path train-shuffle-idx-path", 1,
              _OWN_INDEX),
    **_refuse("sample-rate", 1, "leaving out a share of the data is not supported; use the weights of --data-path",
              "1"),
    **_refuse("fim-rate", 1, "fill-in-the-middle data is not supported; leave it out for plain text", "0"),
    # tokenizers
    **_refuse("patch-tokenizer-type", 1, "tokenizers of forks are not supported; use --tokenizer-type "
                                         "HuggingFaceTokenizer --tokenizer-model DIRECTORY",
              not_beside="--tokenizer-type"),
    **_refuse("tokenizer-file", 1, "tokenizer.json files are read from their directory; use --tokenizer-type "
                                   "HuggingFaceTokenizer --tokenizer-model DIRECTORY"),
    # evaluation
    **_refuse("full-validation", 0, "validation on the whole set is not available yet; use --eval-iters"),
    **_refuse("eval-global-batch-size eval-micro-batch-size", 1,
              "a batch size of its own for evaluation is not available yet; leave it out"),
    # checkpoints
    **_refuse("no-load-lr-state", 0, "the learning rate follows from the samples consumed; use "
                                     "--override-opt_param-scheduler for the command line's schedule, or --finetune to "
                                     "start it afresh", only_with="--load"),
    **_refuse("reset-iteration", 0, "iterations go on from the checkpoint's; use --finetune to load the weights alone "
                                    "and start at iteration 0", only_with="--load"),
    **_refuse("load-tag", 1, "checkpoints are named by iteration; use --ckpt-step N", only_with="--load"),
    **_refuse("use-mp-args-from-checkpoint-args", 0,
              "the layout does not come from checkpoints, because any layout loads the checkpoint of any other; give "
              "the degrees of this run", only_with="--load"),
}

#: Flags of which only values that change nothing are accepted; no message may advise them.
PARTLY_REFUSED = ("--num-experts",)

#: Values of --distributed-backend for other devices: they say how ranks communicate, which changes no result.
OTHER_BACKENDS = ("mpi", "ccl", "hccl", "xccl", "cncl", "ucc", "smddp")

#: Tokenizers of other frameworks -> what to use in a run instead. A plan accepts any name.
FOREIGN_TOKENIZERS: dict[str, str] = {
    **dict.fromkeys(("TokenizerFromFile", "TokenizerFromFileWithFIM", "Llama3Tokenizer",
                     "LLamaTokenizer", "QwenTokenizer", "MultimodalTokenizer"),
                    "HuggingFaceTokenizer with --tokenizer-model DIRECTORY"),
    **dict.fromkeys(("AbejaJapaneseGPT2Tokenizer", "JapaneseSentencePiece"),
                    "SentencePieceTokenizer with --tokenizer-model FILE"),
}
