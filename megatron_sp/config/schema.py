"""The configuration: frozen dataclasses with one field for each flag. A flag is declared here and nowhere else.

``cli/flags.py`` generates the command line from the fields (name, type, default, help, choices, other spellings),
``rules/checks.py`` checks the values, and ``resolve.py`` computes what is derived. A field whose help text says
"default: ..." has the value 0 or "" until ``resolve`` computes its default. This module imports no torch, so that a
wrong flag is reported at once.

Words and letters: see docs/background/parallelism.md. Degrees end in ``_size`` on the command line and
carry the axis name here (``tp``, ``pp``, ``ulysses``, ``ring``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


def flag(default: Any, help: str, *names: str, choices: Sequence[str] = (), nargs: str | int | None = None,
         off: str = "", metavar: str = "") -> Any:
    """Declare a field that is a command-line flag.

    Args:
        default: value when the flag is absent. Its type decides how the flag is parsed; ``bool``
            fields are bare switches.
        help: full sentences; they include units and how a derived default is computed.
        names: spellings, ours first; empty means ``--field-name``. Underscore/hyphen variants
            are accepted for every spelling.
        choices: allowed values (compared without case).
        nargs: argparse ``nargs`` for list-valued flags (stored as a tuple).
        off: spelling of the negative switch of a field that is True by default.
    """
    return field(default=default, metadata=dict(
        flag=True, help=help, names=names, choices=tuple(choices), nargs=nargs, off=off, metavar=metavar))


@dataclass(frozen=True)
class Model:
    """Model: shape, positions, norms, activation, initialisation."""

    num_layers: int = flag(0, "Number of transformer layers (required).", "--num-layers", "--encoder-num-layers")
    hidden_size: int = flag(0, "Width of the hidden states between layers (required).")
    num_attention_heads: int = flag(0, "Number of query heads (required).")
    num_query_groups: int = flag(0, "Number of key/value heads (GQA; 1 is MQA); default: the number of query heads. As "
                                    "in Megatron, the spelling --num-query-groups has an effect only together with "
                                    "--group-query-attention.",
                                 "--num-query-groups", "--num-key-value-heads")
    kv_channels: int = flag(0, "Width of one head; default: hidden-size / num-attention-heads.")
    ffn_hidden_size: int = flag(0, "Width of the feed-forward layer; with --swiglu the width of the gate and of the "
                                   "up projection each; "
                                   "default: 4 x hidden-size, with --swiglu int(8/3 x hidden-size / 64) x 64.",
                                "--ffn-hidden-size", "--intermediate-size")
    max_position_embeddings: int = flag(0, "Longest position the model can encode; default: seq-length.")
    position_embedding_type: str = flag("learned_absolute", "How the model knows positions: learned_absolute (learned "
                                                            "embeddings), rope (rotary embeddings), yarn (rope with "
                                                            "--rope-scaling-type yarn, as in Megatron) or none.",
                                        choices=("learned_absolute", "rope", "yarn", "none"))
    rotary_base: float = flag(10000.0, "Base of the rotary frequencies (theta).",
                              "--rotary-base", "--rotary-position-embeddings-theta")
    rotary_percent: float = flag(1.0, "Share of each head's width to which rotary embeddings apply, above 0 and at "
                                      "most 1.")
    rotary_interleaved: bool = flag(False, "Rotate neighbouring elements as pairs, as GPT-J does, instead of pairing "
                                           "the first half of a head with the second.")
    rotary_seq_len_interpolation_factor: float = flag(1.0, "Divide rotary positions by this factor, to use a model on "
                                                           "longer sequences.",
                                                      "--rotary-seq-len-interpolation-factor", "--rotary-scale-factor")
    use_rope_scaling: bool = flag(False, "Scale rotary frequencies by the Llama-3.1 rule.")
    rope_scaling_factor: float = flag(8.0, "Factor by which --use-rope-scaling lengthens the context.")
    rope_scaling_type: str = flag("", "Scale rotary frequencies so that a model can be used on longer sequences than "
                                      "it was trained on: ntk (a larger rotary base, NTK-aware) or yarn (slow "
                                      "frequencies are divided by the factor, fast ones kept, and attention gets a "
                                      "temperature); default: not at all.", choices=("ntk", "yarn"))
    rotary_scaling_factor: float = flag(0.0, "Factor by which --rope-scaling-type lengthens the context; default: "
                                             "max-position-embeddings / original-max-position-embeddings.",
                                        "--rotary-scaling-factor", "--yarn-rotary-scaling-factor")
    original_max_position_embeddings: int = flag(
        0, "Longest position that the model was trained on before --rope-scaling-type lengthens its context; yarn "
           "needs it.",
        "--original-max-position-embeddings", "--yarn-original-max-position-embeddings")
    yarn_beta_fast: float = flag(32.0, "YaRN keeps frequencies that turn at least this often within the original "
                                       "context.", "--yarn-beta-fast", "--beta-fast")
    yarn_beta_slow: float = flag(1.0, "YaRN divides by the whole factor the frequencies that turn at most this often "
                                      "within the original context.", "--yarn-beta-slow", "--beta-slow")
    yarn_correction_range_round_to_int: bool = flag(
        True, "Do not round to whole pairs where YaRN's range of partly divided frequencies begins and ends.",
        off="--no-yarn-correction-range-round-to-int")
    mscale: float = flag(1.0, "YaRN multiplies cosines and sines by (0.1 mscale ln(factor) + 1) / (0.1 mscale-all-dim "
                              "ln(factor) + 1).", "--mscale", "--yarn-mscale")
    mscale_all_dim: float = flag(0.0, "The value of mscale-all-dim in the formula of --mscale.",
                                 "--mscale-all-dim", "--yarn-mscale-all-dim")
    yarn_attention_factor: float = flag(0.0, "Multiply cosines and sines by this number under YaRN; default: the "
                                             "result of the formula of --mscale.")
    normalization: str = flag("LayerNorm", "Kind of the norm layers.", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = flag(1e-5, "Number that the norm layers add to the variance.",
                                "--norm-epsilon", "--layernorm-epsilon")
    apply_layernorm_1p: bool = flag(False, "Store each norm weight minus 1, so that weight decay pulls it towards 1.")
    activation: str = field(default="gelu", metadata=dict(
        help="Activation; set by --swiglu, --squared-relu, --openai-gelu or --quick-gelu."))
    add_bias_linear: bool = flag(True, "No biases in linear layers.", off="--disable-bias-linear")
    add_qkv_bias: bool = flag(False, "Give the query, key and value projections biases, also when other linear layers "
                                     "have none.")
    attention_pattern: str = flag("", "Which earlier tokens a token attends to. causal: all of them; sliding-window: "
                                      "the nearest ones, see --window-size; fixed, longformer, bigbird, strided: the "
                                      "tokens of some blocks; FILE.py:FUNCTION: the tokens of the blocks that your "
                                      "function returns; default: sliding-window with --window-size, else causal.",
                                  metavar="PATTERN")
    attention_pattern_per_layer: tuple[str, ...] = flag((), "A value of --attention-pattern for each layer, in order. "
                                                            "A list shorter than the model is repeated from its start; "
                                                            "default: all layers have the same pattern.",
                                                        nargs="*", metavar="PATTERN")
    attention_block_size: int = flag(128, "Number of tokens in a block of a pattern.")
    attention_local_blocks: int = flag(4, "Number of nearest blocks that a token attends to, its own block included. "
                                          "Under fixed: number of blocks in a window.")
    attention_global_blocks: int = flag(1, "Under longformer and bigbird: number of blocks at the beginning of the "
                                           "sequence that all tokens attend to. Under fixed: number of blocks of each "
                                           "window that later windows attend to.")
    attention_random_blocks: int = flag(1, "Under bigbird: number of blocks that are drawn at random for each block of "
                                           "queries.")
    attention_stride: int = flag(0, "Under strided: distance, in blocks, between the far blocks that a token attends "
                                    "to; default: attention-local-blocks.")
    attention_blocks_by_head: bool = flag(False, "Let heads attend to different blocks. Under fixed: to different "
                                                 "blocks of each window; under bigbird: to different random blocks; "
                                                 "under strided: to different blocks of each stride.")
    attention_pattern_seed: int = flag(0, "Seed of the random blocks of bigbird. It is part of the model: another seed "
                                          "is another pattern.")
    window_size: int = flag(0, "Number of tokens that a token attends to under sliding-window: itself and the W - 1 "
                               "tokens before it. Megatron's pair A,B means W = A + 1.",
                            "--window-size", "--sliding-window", nargs="*",
                            metavar="W")
    window_attn_skip_freq: str = flag("", "Which layers attend within the window or pattern, as in Megatron. N: all "
                                          "layers except every N-th one, which attends to all earlier tokens. A list "
                                          "such as ([1]*3+[0])*4: the layers with 1; the layers with 0 attend to all "
                                          "earlier tokens; default: all layers.")
    qk_layernorm: bool = flag(False, "Normalise queries and keys per head before the rotary embedding.")
    untie_embeddings_and_output_weights: bool = flag(False, "Use separate weights for the embedding and the output "
                                                            "layer, instead of the same ones.")
    init_method_std: float = flag(0.02, "Standard deviation of the initial weights; output projections get "
                                        "std / sqrt(2 x num-layers).")
    embedding_init_method_std: float = flag(0.0, "Standard deviation of the initial embeddings; "
                                                 "default: init-method-std.",
                                            "--embedding-init-method-std", "--word-embedding-init-std")
    init_method_xavier_uniform: bool = flag(False, "Draw initial weights from the Xavier-uniform distribution instead "
                                                   "of a normal one, also those of embeddings, unless "
                                                   "--embedding-init-method-std is given.")
    attention_dropout: float = flag(0.1, "Dropout probability of attention probabilities. Above 0, attention cannot "
                                         "use fused kernels and is several times slower.")
    hidden_dropout: float = flag(0.1, "Dropout probability after the embedding and after each residual branch.")
    make_vocab_size_divisible_by: int = flag(128, "Pad the vocabulary to a multiple of this times the tensor-parallel "
                                                  "size; padding is never predicted.")
    vocab_size: int = flag(0, "Vocabulary size; default: the tokenizer's. Needed by NullTokenizer and --mock-data.")
    padded_vocab_size: int = flag(0, "Padded vocabulary size; default: derived from make-vocab-size-divisible-by.",
                                  "--padded-vocab-size", "--pad-vocab-size-to")

    @property
    def head_dim(self) -> int:
        return self.kv_channels

    @property
    def rotary_width(self) -> int:
        """Return the number of elements of each head that are rotated."""
        return int(self.head_dim * self.rotary_percent) // 2 * 2

    @property
    def scaled_rotary_base(self) -> float:
        """Return the base of the rotary frequencies: ``rotary_base``, which NTK-aware scaling makes larger.

        The fastest pair then keeps its frequency, and the slowest one gets its frequency divided by the factor.
        """
        if self.rope_scaling_type != "ntk":
            return self.rotary_base
        return self.rotary_base * self.rotary_scaling_factor ** (self.rotary_width / (self.rotary_width - 2))

    @property
    def rotary_attention_factor(self) -> float:
        """Return what cosines and sines are multiplied by; its square multiplies every attention score."""
        if self.rope_scaling_type != "yarn" or self.yarn_attention_factor:
            return self.yarn_attention_factor if self.rope_scaling_type == "yarn" else 1.0
        grows = math.log(max(self.rotary_scaling_factor, 1.0))
        return (0.1 * self.mscale * grows + 1) / (0.1 * self.mscale_all_dim * grows + 1)

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward layer has a gate (SwiGLU)."""
        return self.activation == "swiglu"


@dataclass(frozen=True)
class Parallel:
    """Parallelism: how weights, sequences, samples and states are split over ranks."""

    tp: int = flag(1, "Tensor parallelism: weights split by rows and columns over this many ranks.",
                   "--tensor-model-parallel-size", "--model-parallel-size")
    pp: int = flag(1, "Pipeline parallelism: layers split into this many stages.", "--pipeline-model-parallel-size")
    ulysses: int = flag(1, "Ulysses sequence parallelism: each sequence is split over this many ranks, and all-to-alls "
                           "around attention exchange tokens for heads.",
                        "--ulysses-size", "--ds-sequence-parallel-size")
    ring: int = flag(1, "Ring sequence parallelism: each sequence is split over this many ranks, and keys and values "
                        "travel in a ring.", "--ring-size")
    ulysses_overlap_groups: int = flag(0, "Number of groups into which Ulysses cuts the heads, so that the heads of "
                                          "one group are exchanged while attention of another group runs; default: 2 "
                                          "on a GPU where each rank has at least two query heads and attention is not "
                                          "compiled, else 1 (no overlap).")
    sequence_split: int = flag(0, "Split each sequence over this many ranks and choose ulysses-size and ring-size from "
                                  "the head counts, the tensor-parallel size and the devices of a node.")
    devices_per_node: int = flag(0, "Devices with fast links between them, for --sequence-split; default: the "
                                    "launcher's processes per node, else 8.")
    megatron_sp: bool = flag(False, "Split the activations between tensor-parallel regions over the tensor-parallel "
                                    "ranks. This is Megatron's sequence parallelism, not Ulysses.",
                             "--sequence-parallel")
    tp_comm_overlap: bool = flag(False, "Compute matrix products while the tensor-parallel ranks exchange activations. "
                                        "Has an effect on GPUs that are connected by NVLink, with --compile and "
                                        "--sequence-parallel.")
    zero_stage: int = flag(0, "What is sharded over the data- and sequence-parallel ranks together: 0 nothing, 1 the "
                              "optimizer states, 2 also the gradients, 3 also the parameters.")
    fsdp_size: int = flag(0, "Shard within groups of this many ranks and replicate across them (hybrid sharding); "
                             "default: all data- and sequence-parallel ranks.")
    fsdp_replicas: int = flag(0, "Divide the data- and sequence-parallel ranks into this many groups, shard states "
                                 "within each group and replicate them across groups; an alternative to --fsdp-size; "
                                 "default: 1.", "--num-distributed-optimizer-instances")
    stages_per_rank: int = flag(0, "Pipeline stages per rank (virtual stages); default: 1, or what the schedule needs.",
                                "--num-virtual-stages-per-pipeline-rank")
    layers_per_virtual_stage: int = flag(0, "Number of layers in each virtual pipeline stage, from which the number of "
                                            "stages per rank follows.",
                                         "--num-layers-per-virtual-pipeline-stage")
    pipeline_schedule: str = flag("", "Order of the microbatches in the pipeline; default: 1f1b, or interleaved with "
                                      "several stages per rank.",
                                  choices=("1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"))
    pipeline_layers: tuple[int, ...] = flag((), "Layers of each pipeline stage, in order; default: balanced, with "
                                                "embedding and loss counted.", nargs="*", metavar="N")
    distributed_backend: str = flag("", "Library for communication between ranks; default: nccl with GPUs, else gloo.",
                                    choices=("nccl", "gloo"))
    shared_memory: bool = flag(True, "CPU ranks of one machine exchange heads and gradients through sockets instead of "
                                     "shared memory.", off="--no-shared-memory")
    distributed_timeout_minutes: float = flag(10.0, "Minutes after which a rank gives up waiting for the others in a "
                                                    "collective operation.")
    world_size: int = 1

    @property
    def sp(self) -> int:
        """Ranks that share one sequence."""
        return self.ulysses * self.ring

    @property
    def dp(self) -> int:
        """Ranks with different samples: world / (tp * pp * sp)."""
        return self.world_size // (self.tp * self.pp * self.sp)

    @property
    def fsdp(self) -> int:
        """Ranks that hold the same part of the model: dp * sp."""
        return self.dp * self.sp


@dataclass(frozen=True)
class Precision:
    """Precision: compute type, loss scaling, gradient reduction."""

    bf16: bool = flag(False, "Compute in bfloat16 with fp32 master weights.")
    fp16: bool = flag(False, "Compute in float16 with fp32 master weights and loss scaling.")
    loss_scale: float = flag(0.0, "Static fp16 loss scale; 0 or default: dynamic.")
    initial_loss_scale: float = flag(2.0**24, "First dynamic fp16 loss scale (Megatron's default is 2^32).")
    min_loss_scale: float = flag(1.0, "Smallest dynamic loss scale.")
    loss_scale_window: int = flag(1000, "Steps without overflow after which the dynamic loss scale doubles.")
    hysteresis: int = flag(2, "Number of overflows after which the dynamic loss scale is halved.")
    accumulate_allreduce_grads_in_fp32: bool = flag(False, "Accumulate and reduce gradients in fp32 (always the case "
                                                           "here unless --grad-reduce-in-bf16).")
    grad_reduce_in_bf16: bool = flag(False, "Reduce gradients in bfloat16.")

    @property
    def dtype(self) -> str:
        """Compute type by torch name."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"


@dataclass(frozen=True)
class Data:
    """Data and tokenizer."""

    seq_length: int = flag(0, "Tokens in one sequence (required).", "--seq-length", "--encoder-seq-length")
    seq_length_schedule: tuple[str, ...] = flag((), "TOKENS:LENGTH ...: from TOKENS tokens of training on, sequences "
                                                    "have LENGTH tokens, for example 0:8K 10B:32K 20B:128K. The first "
                                                    "TOKENS is 0. K to T after TOKENS mean thousands to trillions, but "
                                                    "a LENGTH of 1K is 1,024. --seq-length is the last and longest "
                                                    "length. Batch sizes count samples of --seq-length tokens, so a "
                                                    "step has the same number of tokens in all phases. "
                                                    "--micro-batch-size counts sequences of the current phase.",
                                                nargs="*", metavar="TOKENS:LENGTH")
    seq_length_phase: int = flag(0, "Train only this phase of --seq-length-schedule (the first is 1): the run saves "
                                    "and exits at its end, and the next phase can have another layout; default: all "
                                    "phases, one after another.")
    data_path: tuple[str, ...] = flag((), "Dataset prefixes, or weights and prefixes in turn: W1 P1 W2 P2 ...",
                                      nargs="*")
    split: str = flag("969, 30, 1", "Shares of the documents for training, validation and test.")
    train_data_path: tuple[str, ...] = flag((), "Training data, in the form of --data-path.", nargs="*")
    valid_data_path: tuple[str, ...] = flag((), "Validation data, in the form of --data-path. With names, as in "
                                                "code=P1 books=0.3 P2 0.7 P3, these are several sets, each of which is "
                                                "evaluated separately.",
                                            nargs="*")
    test_data_path: tuple[str, ...] = flag((), "Test data, in the form of --data-path.", nargs="*")
    mock_data: bool = flag(False, "Train on made-up tokens; no data files are needed.")
    dataset_provider: str = flag("", "FILE.py:FUNCTION (or package.module:FUNCTION) that returns the data sets, for "
                                     "data that is not in token files; see docs/how-to/own-datasets.md.")
    dataset_arguments: tuple[str, ...] = flag((), "NAME=VALUE ...: values that the function of --dataset-provider "
                                                  "gets.",
                                              nargs="*")
    data_cache_path: str = flag("", "Directory of the index cache; default: cache/megatron_sp in the directory of the "
                                    "data.")
    dataloader_type: str = flag("single", "Order of the samples: single (shuffled once per epoch set, resumable) or "
                                          "cyclic.", choices=("single", "cyclic"))
    num_workers: int = flag(2, "Above 0, a background thread reads the next batch while the model computes; the "
                               "number makes no other difference.")
    eod_mask_loss: bool = flag(False, "Leave predictions that follow an end-of-document token out of the loss.")
    reset_position_ids: bool = flag(False, "Count positions from the start of each document inside a sequence.")
    reset_attention_mask: bool = flag(False, "Let tokens attend only to tokens of their own document.")
    document_boundaries: str = flag("index", "What tells --reset-position-ids and --reset-attention-mask where "
                                             "documents end: the index of the data, for which no token needs to be "
                                             "read, or the end-of-document tokens (eod), as in Megatron.",
                                    choices=("index", "eod"))
    pack_documents: str = flag("", "best-fit: make samples of whole documents. Room that remains in a sample is filled "
                                   "with padding, which has no loss. Default: cut samples out of one row of documents, "
                                   "as Megatron does.", choices=("best-fit",))
    tokenizer_type: str = flag("GPT2BPETokenizer", "Kind of tokenizer.", choices=(
        "GPT2BPETokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer",
        "HuggingFaceTokenizer", "HFTokenizer", "PretrainedFromHF", "TikTokenizer", "NullTokenizer"))
    vocab_file: str = flag("", "vocab.json of GPT2BPETokenizer.", "--vocab-file", "--vocab")
    merge_file: str = flag("", "merges.txt of GPT2BPETokenizer.")
    tokenizer_model: str = flag("", "SentencePiece .model file, directory of a Hugging Face tokenizer, or JSON "
                                    "vocabulary of TikTokenizer.", "--tokenizer-model", "--tokenizer-name-or-path")
    vocab_extra_ids: int = flag(0, "Ids to add behind the tokenizer's own; no text is encoded as one of them.")
    tiktoken_pattern: str = flag("v2", "How TikTokenizer splits a text into words.", choices=("v1", "v2"))
    tiktoken_num_special_tokens: int = flag(1000, "Ids that TikTokenizer keeps for special tokens.")
    trust_remote_code: bool = flag(False, "Let a Hugging Face tokenizer run its own code.")


@dataclass(frozen=True)
class Optimizer:
    """Optimizer, weight decay, clipping."""

    optimizer: str = flag("adam", "Optimizer. adam and adamw are both AdamW.", choices=("adam", "adamw", "sgd"))
    weight_decay: float = flag(0.01, "Weight decay, decoupled from the gradient as in AdamW; biases and norm weights "
                                     "have none.")
    start_weight_decay: float = flag(-1.0, "Weight decay at the start; default: weight-decay.")
    end_weight_decay: float = flag(-1.0, "Weight decay at the end; default: weight-decay.")
    weight_decay_incr_style: str = flag("constant", "How weight decay moves from start to end.",
                                        choices=("constant", "linear", "cosine"))
    adam_beta1: float = flag(0.9, "Adam's decay rate of the mean of gradients.")
    adam_beta2: float = flag(0.999, "Adam's decay rate of the mean of squared gradients.")
    adam_eps: float = flag(1e-8, "Number that Adam adds to the denominator of its update.")
    sgd_momentum: float = flag(0.9, "Momentum of SGD.")
    clip_grad: float = flag(1.0, "Clip the global gradient norm to this value; 0 turns clipping off.")


@dataclass(frozen=True)
class Schedule:
    """Learning-rate schedule (counts samples)."""

    lr: float = flag(0.0, "Peak learning rate (required).")
    min_lr: float = flag(0.0, "Learning rate at the end of the decay and from there on.")
    lr_decay_style: str = flag("linear", "Shape of the decay from --lr to --min-lr.",
                               choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"))
    lr_decay_iters: int = flag(0, "Iterations after which the learning rate reaches min-lr; default: train-iters.")
    lr_decay_samples: int = flag(0, "Samples after which the learning rate reaches min-lr; default: train-samples.")
    lr_decay_tokens: int = flag(0, "Tokens after which the learning rate reaches min-lr.")
    lr_warmup_iters: int = flag(0, "Iterations of linear warm-up.")
    lr_warmup_samples: int = flag(0, "Samples of linear warm-up.")
    lr_warmup_tokens: int = flag(0, "Tokens of linear warm-up.")
    lr_warmup_fraction: float = flag(0.0, "Length of the warm-up as a share of the decay's length.",
                                     "--lr-warmup-fraction", "--warmup")
    lr_warmup_init: float = flag(0.0, "Learning rate at the start of the warm-up.")
    lr_wsd_decay_style: str = flag("exponential", "Shape of the final decay under --lr-decay-style WSD.",
                                   choices=("exponential", "linear", "cosine", "minus_sqrt"))
    lr_wsd_decay_iters: int = flag(0, "Iterations of the final decay under --lr-decay-style WSD.")
    lr_wsd_decay_samples: int = flag(0, "Samples of the final decay under --lr-decay-style WSD.")
    override_opt_param_scheduler: bool = flag(False, "On resume use the command line's schedule, not the checkpoint's. "
                                                     "(--override-opt_param-scheduler is Megatron's spelling.)",
                                              "--override-opt_param-scheduler", "--override-lr-scheduler")
    use_checkpoint_opt_param_scheduler: bool = flag(False, "On resume use the checkpoint's schedule.",
                                                    "--use-checkpoint-opt_param-scheduler")


@dataclass(frozen=True)
class Train:
    """Training: batch, length, evaluation, stopping."""

    micro_batch_size: int = flag(1, "Sequences that a data-parallel rank computes at once.",
                                 "--micro-batch-size", "--batch-size")
    global_batch_size: int = flag(0, "Sequences of all ranks together in one optimizer step; default: "
                                     "micro-batch-size x data-parallel size.")
    gradient_accumulation_steps: int = flag(0, "Number of microbatches of each data-parallel rank in one optimizer "
                                               "step. It can be given instead of --global-batch-size; when both are "
                                               "given, they must agree; default: follows from the batch sizes.",
                                            "--gradient-accumulation-steps", "--gas")
    rampup_batch_size: tuple[int, ...] = flag((), "START INCREMENT SAMPLES: grow the global batch size from START by "
                                                  "INCREMENT up to global-batch-size over SAMPLES (needs "
                                                  "--train-samples).", nargs=3, metavar="N")
    decrease_batch_size_if_needed: bool = flag(False, "Round the global batch size down to a multiple of "
                                                      "micro-batch-size x data-parallel size.")
    step_batch_size_schedule: tuple[str, ...] = flag((), "TOKENS:SIZE ...: from TOKENS tokens of training on, the "
                                                         "global batch size is SIZE, for example 0:768 250B:1536. The "
                                                         "first TOKENS is 0. K, M, B, T mean thousands to trillions. "
                                                         "Give it instead of --global-batch-size.",
                                                     nargs="*", metavar="TOKENS:SIZE")
    train_iters: int = flag(0, "Iterations to train for (this or --train-samples is required).")
    train_samples: int = flag(0, "Samples to train for.")
    train_tokens: int = flag(0, "Stop also after this many tokens.")
    exit_interval: int = flag(0, "Save and exit after an iteration divisible by this; 0: never.")
    exit_duration_in_mins: float = flag(0.0, "Save and exit after this many minutes; 0: never.")
    exit_signal_handler: bool = flag(True, "Save and exit on SIGTERM (always on; accepted for compatibility).")
    exit_signal: str = flag("SIGTERM", "One more signal on which a run saves a checkpoint and exits; SIGTERM and "
                                       "SIGUSR1 always do.",
                            choices=("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"))
    seed: int = flag(1234, "Seed of the initial weights, of dropout and of the order of the data.")
    eval_interval: int = flag(1000, "Iterations between evaluations.")
    eval_iters: int = flag(100, "Global batches in each evaluation; with 0 there is no validation and no test.")
    skip_train: bool = flag(False, "Evaluate without training.")
    check_replicas: int = flag(0, "Number of iterations after which ranks compare their copies of each weight and "
                                  "moment bit by bit, again and again. The run stops if copies differ. 0: never.",
                               "--check-replicas", "--check-weight-hash-across-dp-replicas-interval")
    manual_gc: bool = flag(False, "Collect Python's garbage at the same moments on all ranks: before training, around "
                                  "evaluations and every manual-gc-interval iterations. Otherwise each rank collects "
                                  "at moments of its own.")
    manual_gc_interval: int = flag(0, "Iterations between garbage collections under --manual-gc; 0: none during "
                                      "training.")
    attention_backend: str = flag("auto", "Attention core. sdpa: torch's fused attention. flash: the fastest kernel "
                                          "that passes a trial among flash attention 4, 3 and 2, cuDNN's and torch's "
                                          "(GPU, half precision). unfused: the quadratic reference. auto: on a GPU in "
                                          "half precision like flash, but sdpa if no kernel passes; elsewhere sdpa.",
                                  "--attention-core",
                                  choices=("auto", "sdpa", "flash", "unfused"))
    fused_kernels: str = flag("auto", "Norm kernels: torch's, apex's or liger's. auto: on a GPU the first of apex and "
                                      "liger that is installed and agrees with torch, else torch's.",
                              choices=("auto", "torch", "apex", "liger"))
    compile: bool = flag(False, "Compile each layer with torch.compile.")
    check_for_nan_in_loss_and_grad: bool = flag(True, "Continue when the loss or the gradient norm is not finite, "
                                                      "instead of stopping the run.",
                                                off="--no-check-for-nan-in-loss-and-grad")


@dataclass(frozen=True)
class Memory:
    """Memory: recomputation, tiling, offload. None of these changes a result.

    Attributes:
        given: fields that the command line sets, where --memory-efficiency auto chooses the others.
    """

    recompute_granularity: str = flag("", "Recompute activations in backward. full: a layer keeps only its input; "
                                          "selective: a layer also keeps the results of attention and of its "
                                          "all-to-all; default: none.",
                                      choices=("full", "selective"))
    recompute_method: str = flag("uniform", "Which layers are recomputed. uniform: all layers, recompute-num-layers of "
                                            "them as one unit; block: only the first recompute-num-layers layers of "
                                            "each stage.",
                                 "--recompute-method", "--activations-checkpoint-method", choices=("uniform", "block"))
    recompute_num_layers: int = flag(1, "Under uniform: number of layers that are recomputed as one unit. Under block: "
                                        "number of recomputed layers in each stage.",
                                     "--recompute-num-layers", "--checkpoint-num-layers")
    loss_tile_size: int = flag(0, "Number of tokens whose logits exist at the same time; default: as many as suit the "
                                  "device.")
    mlp_tile_size: int = flag(0, "Number of tokens whose feed-forward activations exist at the same time; default: "
                                 "all.")
    attention_head_groups: int = flag(1, "Number of groups of heads that attention computes one after another, which "
                                         "divides its working memory by this number.")
    sequence_chunk_size: int = flag(0, "Compute each sequence in chunks of this many tokens. One chunk after another "
                                       "goes through the whole model, so activations exist for one chunk only, "
                                       "whatever the sequence length. Keys and values of all chunks are kept. Default: "
                                       "the whole sequence at once.",
                                    "--sequence-chunk-size")
    offload_key_values: bool = flag(False, "Keep the keys and values of earlier chunks, and their gradients, in host "
                                           "memory (with --sequence-chunk-size).")
    offload_activations: float = flag(0.0, "Move to host memory what recomputed layers keep for backward: the layer's "
                                           "input and, with selective recomputation, the results of attention. SHARE "
                                           "is the fraction of the recomputed layers for which this is done (1 without "
                                           "a value).", nargs="?", metavar="SHARE")
    offload_optimizer: bool = flag(False, "Keep master weights and optimizer states in host memory.",
                                   "--offload-optimizer", "--cpu-optimizer")
    memory_efficiency: str = flag("", "auto: choose the memory techniques of this section that the run is predicted to "
                                      "need on its devices, prefer those that cost the least time, and print what was "
                                      "chosen and why. Flags that are given stay as they are. Default: only the "
                                      "techniques whose flags are given.",
                                  choices=("auto",))
    device_memory: str = flag("", "Memory of one device, such as 80GB or 40GiB, for --memory-efficiency auto and "
                                  "--dry-run; default: the device's own.", metavar="SIZE")
    host_memory: str = flag("", "Memory of one node's host, such as 512GB, for --memory-efficiency auto and --dry-run; "
                                "default: the node's own memory, or in a dry run what the manufacturer's systems have.",
                            metavar="SIZE")
    given: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoints."""

    save: str = flag("", "Directory for checkpoints, metrics.jsonl and the resolved configuration; without it none of "
                           "them is written.")
    load: str = flag("", "Directory of the checkpoint to resume from; if it has none, the run starts afresh with a "
                         "warning.")
    save_interval: int = flag(0, "Iterations between checkpoints (required with --save).")
    ckpt_step: int = flag(0, "Load this iteration instead of the newest.")
    finetune: bool = flag(False, "Load only the weights, and start at iteration 0 with a fresh optimizer and schedule.")
    load_optimizer: bool = flag(True, "Do not load the optimizer's state: the run continues at the checkpoint's "
                                      "iteration with a fresh optimizer.", off="--no-load-optim")
    save_optimizer: bool = flag(True, "Do not save the optimizer's state. Such a checkpoint can be resumed only with "
                                      "--no-load-optim or --finetune.", off="--no-save-optim")
    pretrained_checkpoint: str = flag("", "Directory of the checkpoint whose weights the run starts from when --load "
                                          "has no checkpoint, as with --finetune.")
    load_hf: str = flag("", "Directory of a Hugging Face model (config.json, *.safetensors) whose weights the run "
                            "starts from when --load has no checkpoint. The model's flags follow from its config.json, "
                            "and the tokenizer is the directory's, unless flags name another.", metavar="DIR")
    exit_on_missing_checkpoint: bool = flag(False, "Exit with an error when --load has nothing to load.")
    use_checkpoint_args: bool = flag(
        False, "Take the flags of model, sequence length and tokenizer that the command line leaves out from the "
               "checkpoint in --load.")
    verify_checkpoint: str = flag(
        "full", "What is compared with the manifest before a checkpoint is used: sizes and checksums of all files "
                "(full), sizes alone, or nothing (off).", choices=("full", "size", "off"), nargs="?")
    async_save: bool = flag(
        False, "Continue training while a checkpoint is written. Each rank keeps a copy of its part of the checkpoint "
               "in host memory. The run waits for an unfinished save before the next save and at the end.")
    keep_last: int = flag(
        0, "Keep only this many newest checkpoints, and those of --save-retain-interval; default: all are kept, also "
           "with 0 or without a number.", nargs="?", metavar="N")
    save_retain_interval: int = flag(
        0, "Never delete checkpoints at multiples of this many iterations. Of the other checkpoints the newest one is "
           "kept, or as many as --keep-last says.")
    on_save_failure: str = flag(
        "stop", "What happens when a checkpoint cannot be written, for example on a full disk: stop ends the run, "
                "continue prints a warning and trains until the next save. If the last save of a run fails, the run "
                "ends with an error in any case.",
        choices=("stop", "continue"))


@dataclass(frozen=True)
class Logging:
    """Logging."""

    log_interval: int = flag(10, "Iterations between log lines; the first and the last are always logged.")
    log_throughput: bool = flag(False, "Add tokens per second, TFLOP/s per device and, where the device's peak is "
                                       "known, MFU and HFU to the log line.")
    device_peak_tflops: float = flag(0.0, "Peak TFLOP/s of a device in the type computed in, for MFU and HFU; default: "
                                          "known for common GPUs.")
    log_progress: bool = flag(False, "Append to progress.txt in the save directory.")
    log_params_norm: bool = flag(False, "Log the global norm of the parameters.")
    log_num_zeros_in_grad: bool = flag(False, "Log the number of zeros in the gradient.")
    timing_log_level: int = flag(0, "Which times are logged. 0: the time of a step; 1: also its parts; 2: also forward "
                                    "and backward, summed over the microbatches.")
    timing_log_option: str = flag("minmax", "Which times of a part are shown: the longest of all ranks, the shortest "
                                            "and longest, or those of all ranks.",
                                  choices=("max", "minmax", "all"))
    profile: bool = flag(False, "Write a profiler trace (for Perfetto) of some steps to SAVE/profile, on a GPU with a "
                                "memory snapshot.")
    profile_step_start: int = flag(10, "Profile the steps after this iteration.")
    profile_step_end: int = flag(12, "Last iteration to profile.")
    profile_ranks: tuple[int, ...] = flag((0,), "Ranks that profile.", nargs="*", metavar="RANK")
    tensorboard_dir: str = flag("", "Directory for TensorBoard events; turns TensorBoard on.")
    tensorboard_log_interval: int = flag(1, "Iterations between TensorBoard points.")
    tensorboard_queue_size: int = flag(1000, "Events that TensorBoard may keep in memory before it writes them.")
    log_timers_to_tensorboard: bool = flag(False, "Write the times of --timing-log-level to TensorBoard.")
    log_batch_size_to_tensorboard: bool = flag(False, "Accepted for compatibility: TensorBoard always gets the batch "
                                                      "size.")
    log_validation_ppl_to_tensorboard: bool = flag(False, "Write the validation perplexity to TensorBoard.")
    log_memory_to_tensorboard: bool = flag(False, "Write memory in use to TensorBoard.")
    log_world_size_to_tensorboard: bool = flag(False, "Write the number of processes to TensorBoard.")
    log_optimizer_states_to_tensorboard: bool = flag(
        False, "Write norms and largest values of the weights and of Adam's moments to TensorBoard, W&B and "
               "metrics.jsonl.")
    log_loss_scale_to_tensorboard: bool = flag(True, "Keep the loss scale out of TensorBoard.",
                                               off="--no-log-loss-scale-to-tensorboard")
    wandb_project: str = flag("", "Project on Weights & Biases; turns Weights & Biases on.",
                              "--wandb-project", "--wandb-project-name")
    wandb_exp_name: str = flag("", "Name of the run on Weights & Biases.", "--wandb-exp-name", "--wandb-name")
    wandb_entity: str = flag("", "Team or user on Weights & Biases.", "--wandb-entity", "--wandb-entity-name")
    wandb_save_dir: str = flag("", "Directory for files of Weights & Biases; default: SAVE/wandb.")


@dataclass(frozen=True)
class Run:
    """The whole configuration of one run."""

    model: Model = field(default_factory=Model)
    parallel: Parallel = field(default_factory=Parallel)
    precision: Precision = field(default_factory=Precision)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    train: Train = field(default_factory=Train)
    memory: Memory = field(default_factory=Memory)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    logging: Logging = field(default_factory=Logging)
