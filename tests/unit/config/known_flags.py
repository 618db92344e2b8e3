"""The flags that public launch scripts of Megatron-LM and Megatron-DeepSpeed use: facts, not code."""

from __future__ import annotations

#: Flags that take no value.
SWITCHES = """
    RMSNorm abort-on-unmet-fused-kernel-constraints account-for-embedding-in-pipeline-split
    account-for-loss-in-pipeline-split accumulate-allreduce-grads-in-fp32 add-qkv-bias adjust-word-embedding-init
    allow-padding-num-layers apply-layernorm-1p apply-query-key-layer-scaling async-save attention-softmax-in-fp32
    bf16 calculate-per-token-loss causal-lm checkpoint-activations checkpoint-in-cpu ckpt-fully-parallel-load
    contigious-checkpointing cpu-optimizer cross-entropy-loss-fusion ddp-average-in-collective deepspeed
    deepspeed-activation-checkpointing defer-embedding-wgrad-compute deterministic-mode disable-bias-attn-fc
    disable-bias-linear disable-bias-linear-fc disable-gloo-process-groups dist-ckpt-optim-fully-reshardable
    distribute-checkpointed-activations ds-sequence-parallel-fpdt ds-sequence-parallel-fpdt-offloading
    embed-layernorm enable-zb-runtime enable-zbh1-exact-semantics enable-zbh1-pipeline eod-mask-loss
    exit-signal-handler finetune fp16 fp8-param-gather fsdp-double-buffer fsdp-manual-registration
    grad-reduce-in-bf16 group-query-attention init-model-with-meta-device keep-last lazy-loader
    log-batch-size-to-tensorboard log-memory-to-tensorboard log-num-zeros-in-grad
    log-optimizer-states-to-tensorboard log-params-norm log-progress log-throughput log-timers-to-tensorboard
    log-validation-ppl-to-tensorboard manual-gc measure-activation-memory mock-data mup mup-attn-mult mup-input-mult
    no-async-tensor-model-parallel-allreduce no-barrier-with-level-1-timing no-bias-dropout-fusion
    no-bias-gelu-fusion no-check-for-nan-in-loss-and-grad no-ckpt-fully-parallel-save
    no-create-attention-mask-in-dataloader no-data-sharding no-gradient-accumulation-fusion no-load-lr-state
    no-load-optim no-load-rng no-log-loss-scale-to-tensorboard no-masked-softmax-fusion no-mmap-bin-files
    no-persist-layer-norm no-pipeline-parallel no-position-embedding no-pre-communication-optimization
    no-query-key-layer-scaling no-rope-fusion no-save-optim no-scatter-gather-tensors-in-pipeline nvtx-ranges
    offload-continuous-buffers overlap-grad-reduce overlap-p2p-communication-warmup-flush overlap-param-gather
    overlap-param-gather-with-optimizer-step overlapped-distributed-optimizer override-lr-scheduler
    override-opt_param-scheduler partition-activations profile qk-layernorm recompute-activations recompute-lgd
    repeated-dataloader reset-attention-mask reset-iteration reset-position-ids rotary-interleaved sequence-parallel
    shuffle-sample-in-corpus squared-relu structured-logs swiglu sync-tp-duplicated-parameters
    synchronize-each-layer test-mode tp-comm-overlap universal-checkpoint untie-embeddings-and-output-weights
    use-alibi-mask use-bnb-optimizer use-checkpoint-opt_param-scheduler use-distributed-optimizer use-flash-attn
    use-flash-attn-builder use-flash-attn-triton use-flash-attn-v2 use-legacy-models
    use-llama2-rotary-position-embeddings use-mcore-models use-megatron-fsdp use-mpi use-nccl-ub
    use-persistent-ckpt-worker use-precision-aware-optimizer use-rope-scaling use-rotary-position-embeddings
    use-tp-pp-dp-mapping use-z-loss verify-checkpoint zero-contigious-gradients zero-reduce-scatter
""".split()

#: Flags that take one value.
VALUED = """
    DDP-impl activations-checkpoint-method adam-beta1 adam-beta2 adam-eps attention-backend attention-dropout
    attention-head-type batch-size cache-dir check-weight-hash-across-dp-replicas-interval checkpoint-num-layers
    ckpt-format clip-grad codecarbon-dir compiled-autograd-fallback-mode context-parallel-size data-cache-path
    data-file-list data-impl data-parallel-sharding-strategy dataloader-type dataset
    decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers decoupled-lr decoupled-min-lr
    deepspeed_config dist-ckpt-strictness distributed-backend distributed-timeout-minutes
    ds-sequence-parallel-fpdt-chunk-size ds-sequence-parallel-size empty-unused-memory-level epochs
    error-injection-rate error-injection-type eval-interval eval-iters exit-duration-in-mins exit-interval
    expert-tensor-parallel-size extra-vocab-size ffn-hidden-size fim-rate fp8-amax-compute-algo fp8-amax-history-len
    fp8-format fp8-recipe gas global-batch-size glu-activation hidden-dropout hidden-size hysteresis init-method-std
    initial-loss-scale interleave-group-size intermediate-size job-name kill-switch-path kv-channels
    layernorm-epsilon load log-interval log-level log-level-replica logging-level loss-scale lr lr-decay-iters
    lr-decay-samples lr-decay-style lr-decay-tokens lr-warmup-fraction lr-warmup-init lr-warmup-iters
    lr-warmup-samples lr-warmup-tokens lr-wsd-decay-iters lr-wsd-decay-style main-grads-dtype
    make-vocab-size-divisible-by manual-gc-interval max-padding-length max-position-embeddings merge-file
    micro-batch-size microbatch-group-size-per-virtual-pipeline-stage min-lr model-parallel-size
    moe-eval-capacity-factor moe-expert-parallel-size moe-loss-coeff moe-min-capacity moe-train-capacity-factor
    mup-output-mult no-train norm-epsilon normalization num-attention-heads num-dataset-builder-threads
    num-distributed-optimizer-instances num-experts num-key-value-heads num-layers
    num-layers-per-virtual-pipeline-stage num-query-groups num-virtual-stages-per-pipeline-rank num-workers
    optimizer pad-vocab-size-to padded-vocab-size patch-tokenizer-type pipe-parallel-size
    pipeline-model-parallel-size position-embedding-type pp-partition-method profile-step-end profile-step-start
    recompute-granularity recompute-method recompute-num-layers reduce-bucket-size rerun-mode rope-scaling-factor
    rotary-base rotary-percent rotary-position-embeddings-theta rotary-scale-factor
    rotary-seq-len-interpolation-factor save save-interval save-retain-interval seed seq-length sliding-window split
    step-batch-size-schedule structured-logs-dir tensor-model-parallel-size tensorboard-dir tensorboard-log-interval
    tensorboard-queue-size test-weighted-split-paths timing-log-level tokenizer-file tokenizer-model
    tokenizer-name-or-path tokenizer-type tp-comm-overlap-cfg train-data train-iters train-mode train-samples
    train-tokens train-weighted-split-paths train-weighted-split-paths-path transformer-impl trigger-path
    use-fused-rmsnorm use-fused-sdpa use-fused-sdpa-with-recompute use-torch-compile use-torch-compiled-autograd
    valid-data valid-num-workers valid-weighted-split-paths valid-weighted-split-paths-path
    verify-checkpoint-model-type vocab-file vocab-size wandb-entity wandb-entity-name wandb-exp-name wandb-id
    wandb-name wandb-project wandb-project-name wandb-save-dir warmup weight-decay wgrad-deferral-limit
    word-embedding-init-std zero-allgather-bucket-size zero-reduce-bucket-size zero-stage
""".split()

#: Flags that take several values.
LISTS = """
    cp-comm-type data-path hierarchical-context-parallel-sizes profile-ranks rampup-batch-size
    skip-train-iteration-range test-data-path train-data-path valid-data-path
""".split()

#: Flags that a training script cannot do without: implemented, translated, or refused as not available yet.
ESSENTIAL = """
    accumulate-allreduce-grads-in-fp32 adam-beta1 adam-beta2 adam-eps add-qkv-bias attention-dropout bf16
    checkpoint-activations checkpoint-num-layers ckpt-format clip-grad context-parallel-size cp-comm-type
    data-cache-path data-path dataloader-type deepspeed deepspeed-activation-checkpointing deepspeed_config
    disable-bias-linear distributed-backend distributed-timeout-minutes ds-sequence-parallel-size eod-mask-loss
    eval-interval eval-iters exit-duration-in-mins exit-interval exit-signal-handler ffn-hidden-size finetune fp16
    global-batch-size group-query-attention hidden-dropout hidden-size hysteresis init-method-std initial-loss-scale
    kv-channels layernorm-epsilon load log-batch-size-to-tensorboard log-interval log-memory-to-tensorboard
    log-num-zeros-in-grad log-params-norm log-progress log-throughput log-timers-to-tensorboard
    log-validation-ppl-to-tensorboard loss-scale lr lr-decay-iters lr-decay-samples lr-decay-style lr-decay-tokens
    lr-warmup-fraction lr-warmup-iters lr-warmup-samples lr-warmup-tokens lr-wsd-decay-iters lr-wsd-decay-style
    make-vocab-size-divisible-by max-position-embeddings merge-file micro-batch-size min-lr mock-data
    no-check-for-nan-in-loss-and-grad no-load-optim no-load-rng no-log-loss-scale-to-tensorboard
    no-position-embedding no-save-optim norm-epsilon normalization num-attention-heads num-key-value-heads
    num-layers num-layers-per-virtual-pipeline-stage num-query-groups num-virtual-stages-per-pipeline-rank
    num-workers optimizer override-lr-scheduler override-opt_param-scheduler pipeline-model-parallel-size
    position-embedding-type qk-layernorm rampup-batch-size recompute-activations recompute-granularity
    recompute-method recompute-num-layers reset-attention-mask reset-position-ids rotary-base rotary-percent
    rotary-position-embeddings-theta save save-interval seed seq-length sequence-parallel split swiglu
    tensor-model-parallel-size tensorboard-dir tensorboard-log-interval tensorboard-queue-size test-data-path
    timing-log-level tokenizer-model tokenizer-name-or-path tokenizer-type train-data-path train-iters train-samples
    train-tokens untie-embeddings-and-output-weights use-checkpoint-opt_param-scheduler use-distributed-optimizer
    use-rotary-position-embeddings valid-data-path vocab-file vocab-size wandb-entity wandb-exp-name wandb-project
    tiktoken-num-special-tokens tiktoken-pattern vocab-extra-ids dataset-provider dataset-arguments document-boundaries
    ds-sequence-parallel-fpdt attention-pattern window-size window-attn-skip-freq sliding-window
    pack-documents rope-scaling-type rotary-scaling-factor
    original-max-position-embeddings yarn-beta-fast yarn-beta-slow
    yarn-original-max-position-embeddings mscale mscale-all-dim yarn-attention-factor
    no-yarn-correction-range-round-to-int seq-length-schedule seq-length-phase
    attention-pattern-per-layer attention-block-size attention-local-blocks attention-global-blocks
    attention-random-blocks attention-stride attention-blocks-by-head attention-pattern-seed
    ds-sequence-parallel-fpdt-chunk-size ds-sequence-parallel-fpdt-offloading
    wandb-save-dir weight-decay zero-stage tp-comm-overlap
""".split()

#: Flags of Megatron-DeepSpeed's parser that no launch script above uses; many belong to models other than GPT.
MEGATRON_DEEPSPEED = """
    adlr-autoresume adlr-autoresume-interval aio-intra-op-parallelism aml-data-download-path
    apply-residual-connection-post-layernorm bert-embedder-type bert-load bert-no-binary-head biencoder-projection-dim
    biencoder-shared-query-context-model block-data-path checkpoint-data-parallel checkpoint-io-buffer-size
    checkpoint-writer-decoupled classes-fraction create-moe-param-group data-efficiency-curriculum-learning
    data-parallel-random-init data-per-class-fraction decoder-num-layers decoder-seq-length disable-mem-efficient-ln
    disable-moe-token-dropping disable-moe-top2-2nd-expert-sampling dino-bottleneck-size dino-freeze-last-layer
    dino-head-hidden-size dino-local-crops-number dino-local-img-size dino-norm-last-layer dino-teacher-temp
    dino-warmup-teacher-temp dino-warmup-teacher-temp-epochs distribute-saved-activations ds_fused_adam ds-inference
    embedding-path embedding-weights-in-fp32 enable-expert-tensor-parallelism encoder-num-layers encoder-seq-length
    evidence-data-path exit-on-missing-checkpoint expert-interval force-ds-sequence-parallel fp16-lm-cross-entropy
    fp32-residual-connection head-lr-mult hidden-size-teacher ict-head-size ict-load img-h img-w indexer-batch-size
    indexer-log-interval inference inference-batch-times-seqlen-threshold init-method-xavier-uniform iter-per-epoch kd
    kd-alpha-ce kd-beta-ce kd-temp kill-switch-file lazy-mpu-init load-tag load-teacher local_rank
    log-world-size-to-tensorboard loss-scale-window mask-factor mask-prob mask-type max-tokens-to-oom
    memory-centric-tiled-linear min-loss-scale mlp-type mmap-warmup mos no-contiguous-buffers-in-local-ddp
    no-initialization no-log-learnig-rate-to-tensorboard no-save-rng num-attention-heads-teacher num-channels
    num-classes num-experts-switch num-experts-teacher num-layers-teacher onnx-safe openai-gelu output-bert-embeddings
    overlap-p2p-communication patch-dim pipeline-model-parallel-split-rank profile-backward profile_steps
    query-in-block-prob random-ltd remote-device retriever-report-topk-accuracies retriever-score-scaling
    retriever-seq-length retro-add-retriever retro-cyclic-train-iters retro-encoder-attention-dropout
    retro-encoder-hidden-dropout retro-encoder-layers retro-num-neighbors retro-num-retrieved-chunks
    retro-return-doc-ids retro-workdir return-data-index sample-rate scattered-embeddings sgd-momentum short-seq-prob
    skip-train
    split-transformers standalone-embedding-stage start-weight-decay end-weight-decay weight-decay-incr-style
    swin-backbone-type tile-factor timing-log-option titles-data-path topk torch_adam train-data-exact-num-epochs
    train-desc-path train-doc-idx-path train-idx-path train-sample-idx-path train-shuffle-idx-path trust-remote-code
    use-checkpoint-args use-cpu-initialization use-dataset-only use-flash-attn-v1 use-one-sent-docs use-pin-memory
    use-ring-exchange-p2p use-tutel vision-backbone-type vision-pretraining vision-pretraining-type vocab-extra-ids
""".split()
