"""Spellings of other frameworks, translated into fields of the schema.

Each function reads some flags from ``Claims.given`` and claims values for fields; ``deepspeed.py`` and ``dialect.py``
hold the longer translations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_sp.config.cli.claims import Claims
from megatron_sp.config.cli.load_hf import LOAD_HF, claim_model_of_load_hf
from megatron_sp.config.cli.options import schema_options
from megatron_sp.config.cli.presets import PRESETS
from megatron_sp.config.cli.translation.data_lists import translate_data_lists
from megatron_sp.config.cli.translation.deepspeed import translate_deepspeed
from megatron_sp.config.cli.translation.dialect import GELU, translate_dialect
from megatron_sp.config.cli.translation.tables import EXPERT_COMPANIONS
from megatron_sp.config.cli.values import parse_choice, parse_int, parse_words


@dataclass(frozen=True)
class Foreign:
    """A spelling that the schema does not declare: how many values it takes, what it stands for, and their name."""

    nargs: int | str
    help: str
    metavar: str = "N"


PRESET = "--model-preset"
#: Fields without which there is no model, and the flags that set them.
MODEL_SIZES = {"model.num_layers": "--num-layers", "model.hidden_size": "--hidden-size",
               "model.num_attention_heads": "--num-attention-heads"}
#: Switches that simply set one field: flag -> (field, value).
SWITCHES: dict[str, tuple[str, Any]] = {
    "--swiglu": ("model.activation", "swiglu"),
    "--squared-relu": ("model.activation", "squared_relu"),
    "--openai-gelu": ("model.activation", "openai_gelu"),
    "--quick-gelu": ("model.activation", "quick_gelu"),
    "--RMSNorm": ("model.normalization", "RMSNorm"),
    "--use-rotary-position-embeddings": ("model.position_embedding_type", "rope"),
    "--use-llama2-rotary-position-embeddings": ("model.position_embedding_type", "rope"),
    "--checkpoint-activations": ("memory.recompute_granularity", "full"),
    "--recompute-activations": ("memory.recompute_granularity", "selective"),
    "--enable-zb-runtime": ("parallel.pipeline_schedule", "zero-bubble"),
    "--enable-zbh1-pipeline": ("parallel.pipeline_schedule", "zero-bubble"),
    "--enable-zbh1-exact-semantics": ("parallel.pipeline_schedule", "zero-bubble"),
}

SWITCH_HELP: dict[str, str] = {
    "--swiglu": "Gated SiLU feed-forward layers (SwiGLU).",
    "--squared-relu": "Squared ReLU as the activation.",
    "--openai-gelu": "GELU by its tanh approximation.",
    "--quick-gelu": "GELU approximated by x sigmoid(1.702 x).",
}

SHARDING_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
CP_COMM_TYPES = ("p2p", "a2a", "all_gather", "a2a+p2p", "allgather")

#: Spellings with a value, or whose meaning depends on other flags; the functions below read them.
OTHERS: dict[str, Foreign] = {
    "--group-query-attention": Foreign(0, "Use --num-query-groups key/value heads (without it: 1, as in Megatron)."),
    "--attention-head-type": Foreign(1, "multihead or multiquery (1 key/value head).", metavar="KIND"),
    "--glu-activation": Foreign(1, "swiglu: the same as --swiglu.", metavar="KIND"),
    "--no-position-embedding": Foreign(0, "No learned positions (none, unless rotary ones are asked for)."),
    "--use-distributed-optimizer": Foreign(0, "ZeRO stage 1 at least."),
    "--overlapped-distributed-optimizer": Foreign(0, "ZeRO stage 1 at least."),
    "--use-torch-fsdp2": Foreign(0, "ZeRO by --data-parallel-sharding-strategy (default: stage 3)."),
    "--use-megatron-fsdp": Foreign(0, "ZeRO by --data-parallel-sharding-strategy (default: stage 3)."),
    "--use-custom-fsdp": Foreign(0, "ZeRO by --data-parallel-sharding-strategy (default: stage 3)."),
    "--data-parallel-sharding-strategy": Foreign(1, "no_shard, optim, optim_grads, optim_grads_params: ZeRO stage 0, "
                                                    "1, 2, 3.", metavar="STRATEGY"),
    "--context-parallel-size": Foreign(1, "Ranks that share a sequence: --ring-size, or --ulysses-size with "
                                          "--cp-comm-type a2a."),
    "--cp-comm-type": Foreign("*", "p2p (ring, the default), a2a (Ulysses), all_gather (run as a2a), a2a+p2p.",
                              metavar="KIND"),
    "--hierarchical-context-parallel-sizes": Foreign("*", "U R: Ulysses and ring sizes of --cp-comm-type a2a+p2p."),
    "--no-train": Foreign("?", "The same as --skip-train."),
    "--pipe-parallel-size": Foreign(1, "The same as --pipeline-model-parallel-size."),
    PRESET: Foreign(1, f"Fill in the model flags that are not given: {', '.join(PRESETS)}.", metavar="NAME"),
    "--num-experts": Foreign("*", "1 is accepted: a dense model."),
    GELU: Foreign(1, "none (exact GELU, the default) or tanh (its approximation, the same as --openai-gelu). With "
                     "flags that only Megatron has, models with biases use tanh unless --no-bias-gelu-fusion is given, "
                     "as in Megatron.", metavar="KIND"),
    "--deepspeed": Foreign(0, "Take sharding, precision, loss scale and clipping from --deepspeed_config."),
    "--deepspeed-config": Foreign(1, "DeepSpeed's JSON file; needs --deepspeed.", metavar="FILE"),
    "--deepspeed-activation-checkpointing": Foreign(0, "No effect without --checkpoint-activations."),
    "--decoder-first-pipeline-num-layers": Foreign(1, "Layers of the first pipeline rank; the others share the rest "
                                                      "(--pipeline-layers)."),
    "--decoder-last-pipeline-num-layers": Foreign(1, "Layers of the last pipeline rank; the others share the rest "
                                                     "(--pipeline-layers)."),
    "--checkpoint-in-cpu": Foreign(0, "Keep the inputs of recomputed layers in host memory (--offload-activations); no "
                                      "effect without recomputation."),
    "--disable-bias-linear-fc": Foreign(0, "With --disable-bias-attn-fc: biases on q, k and v alone "
                                           "(--disable-bias-linear --add-qkv-bias). Refused alone."),
    "--disable-bias-attn-fc": Foreign(0, "With --disable-bias-linear-fc: biases on q, k and v alone "
                                         "(--disable-bias-linear --add-qkv-bias). Refused alone."),
    "--account-for-embedding-in-pipeline-split": Foreign(0, "The first pipeline stage gets one layer less."),
    "--account-for-loss-in-pipeline-split": Foreign(0, "The last pipeline stage gets one layer less."),
    "--ds-sequence-parallel-fpdt": Foreign(0, "--sequence-chunk-size of --ds-sequence-parallel-fpdt-chunk-size tokens; "
                                              "another algorithm than DeepSpeed's FPDT, with the same result."),
    "--ds-sequence-parallel-fpdt-chunk-size": Foreign(1, "Tokens of a chunk under --ds-sequence-parallel-fpdt; "
                                                         "default: 65536."),
    "--ds-sequence-parallel-fpdt-offloading": Foreign(0, "--offload-key-values, under --ds-sequence-parallel-fpdt."),
    "--data-args-path": Foreign(1, "File that lists the values of --data-path, on any number of lines.",
                                metavar="FILE"),
    "--per-split-data-args-path": Foreign(1, "JSON file with the values of --train-data-path, --valid-data-path and "
                                             '--test-data-path: {"train": [...], "valid": [...], "test": [...]}.',
                                          metavar="FILE"),
    "--multiple-validation-sets": Foreign(0, "Evaluate each prefix of --valid-data-path as a set of its own, named "
                                             "like its file."),
    "--profile-steps": Foreign(1, "START,END: the same as --profile-step-start and --profile-step-end.",
                               metavar="START,END"),
}


def foreign_flags() -> dict[str, Foreign]:
    """Return every spelling that is translated, in the order of the help."""
    names = {key: option.names[0] for key, option in schema_options().items()}
    table = {}
    for flag, (key, value) in SWITCHES.items():
        target = names.get(key, "")
        said = target if value is True else f"{target} {value}"
        table[flag] = Foreign(0, SWITCH_HELP.get(flag) or f"The same as {said}.")
    return table | OTHERS


def translate(claims: Claims) -> None:
    """Turn every foreign spelling in ``claims.given`` into claims, notes and problems."""
    for flag, (key, value) in SWITCHES.items():
        if flag in claims.given:
            claims.claim(key, value, flag)
    for step in (_activation, _positions, _query_groups, _context_parallel, _zero, _others, _experts,
                 translate_deepspeed, claim_model_of_load_hf, _preset, _ask_for_no_model,
                 translate_data_lists, translate_dialect):
        step(claims)


def _preset(claims: Claims) -> None:
    """Fill in a published shape where no other flag says something, and note what was filled in."""
    name = (claims.read(PRESET, str) or "").lower()
    if not name:
        return
    if name not in PRESETS:
        claims.problems.append(f"--model-preset {name} is unknown; choose one of {', '.join(PRESETS)}.")
        return
    filled = {key: value for key, value in PRESETS[name].items() if not claims.values.get(f"model.{key}")}
    for key, value in filled.items():
        claims.claim(f"model.{key}", value, PRESET)
    said = [words for key, value in filled.items() if (words := _as_flag(f"model.{key}", value))]
    claims.notes.append(f"--model-preset {name} stands for: {' '.join(said)}")


def _ask_for_no_model(claims: Claims) -> None:
    """Keep later checks from reporting model flags as missing when their source could not be read.

    The source is a preset or the config.json of ``--load-hf``. The failure to read it is reported already.
    """
    named = {PRESET, LOAD_HF} & (claims.given.keys() | claims.broken)
    if not named:
        return
    open_flags = {flag for key, flag in MODEL_SIZES.items() if not claims.values.get(key)}
    if open_flags and LOAD_HF in named and not claims.values.get("data.tokenizer_type"):
        open_flags.add("--tokenizer-type")
    claims.broken |= open_flags


def _as_flag(key: str, value: Any) -> str:
    """Return the arguments that set a field to a value; "" for a default that has no flag of its own."""
    option = schema_options().get(key)
    if option is None:
        return next((flag for flag, said in SWITCHES.items() if said == (key, value)), "")
    if key == "model.num_query_groups":
        return f"--num-key-value-heads {value}"  # --num-query-groups would also need --group-query-attention
    if option.kind == "bool":
        return option.flag if value != option.default else ""
    return f"{option.flag} {value}"


def _activation(claims: Claims) -> None:
    word = claims.read("--glu-activation", str)
    if word == "swiglu":
        claims.claim("model.activation", "swiglu", "--glu-activation")
    elif word:
        claims.problems.append(f"--glu-activation {word}: only swiglu is supported.")


def _positions(claims: Claims) -> None:
    if "--no-position-embedding" not in claims.given:
        return
    asked = claims.claimed("model.position_embedding_type")
    if asked == "learned_absolute":
        claims.problems.append("--no-position-embedding and --position-embedding-type learned_absolute contradict "
                               "each other; drop one of them.")
    elif asked is None:
        claims.claim("model.position_embedding_type", "none", "--no-position-embedding")


def _query_groups(claims: Claims) -> None:
    """Read --num-query-groups as Megatron does.

    Without --group-query-attention the number has no effect. --group-query-attention without a number means one group.
    """
    key = "model.num_query_groups"
    spelled = claims.values.get(key, {})
    if "--group-query-attention" in claims.given:
        if not spelled and "--num-query-groups" not in claims.broken:
            claims.claim(key, 1, "--group-query-attention")
    elif "--num-query-groups" in spelled:
        groups = spelled.pop("--num-query-groups")
        heads = claims.claimed("model.num_attention_heads")
        if groups != heads and groups not in spelled.values():
            claims.notes.append(
                f"--num-query-groups {groups} has no effect without --group-query-attention, as in Megatron: every "
                f"query head gets its own key/value head. Add --group-query-attention, or say "
                f"--num-key-value-heads {groups}.")
    word = claims.read("--attention-head-type", lambda text: parse_choice(text, ("multihead", "multiquery")))
    if word == "multiquery":
        claims.claim(key, 1, "--attention-head-type")


def _context_parallel(claims: Claims) -> None:
    flag = "--context-parallel-size"
    size = claims.read(flag, parse_int)
    if size is None:
        return
    if size < 1:
        claims.problems.append(f"{flag} {size}: must be at least 1.")
        return
    if size == 1:
        return
    words = {word.lower() for word in parse_words(claims.given.get("--cp-comm-type", ["p2p"]))} or {"p2p"}
    word = words.pop()
    if words:
        claims.problems.append("--cp-comm-type: one kind for all layers is supported, several are given.")
    elif word not in CP_COMM_TYPES:
        claims.problems.append(f"--cp-comm-type: {word!r} is not one of {', '.join(CP_COMM_TYPES[:-1])}.")
    elif word == "p2p":
        claims.claim("parallel.ring", size, flag)
    elif word == "a2a+p2p":
        _hierarchical(claims, size)
    else:
        claims.claim("parallel.ulysses", size, flag)
        if word != "a2a":
            claims.notes.append(f"--cp-comm-type {word} is run as a2a (Ulysses); the loss is the same up to rounding.")


def _hierarchical(claims: Claims, size: int) -> None:
    flag = "--hierarchical-context-parallel-sizes"
    try:
        sizes = [parse_int(word) for word in parse_words(claims.given.get(flag, []))]
    except ValueError as error:
        claims.problems.append(f"{flag}: {error}.")
        return
    if len(sizes) != 2 or min(sizes) < 1 or sizes[0] * sizes[1] != size:
        claims.problems.append(f"--cp-comm-type a2a+p2p needs {flag} U R with U x R = --context-parallel-size {size}; "
                               f"given: {' '.join(map(str, sizes)) or 'nothing'}.")
        return
    claims.claim("parallel.ulysses", sizes[0], flag)
    claims.claim("parallel.ring", sizes[1], flag)


def _zero(claims: Claims) -> None:
    key = "parallel.zero_stage"
    fsdp = next((name for name in ("--use-torch-fsdp2", "--use-megatron-fsdp", "--use-custom-fsdp")
                 if name in claims.given), "")
    flag = "--data-parallel-sharding-strategy"
    strategy = claims.read(flag, lambda text: parse_choice(text, SHARDING_STRATEGIES))
    if fsdp and strategy:
        claims.claim(key, SHARDING_STRATEGIES.index(strategy), flag)
    elif fsdp and flag not in claims.broken and not claims.values.get(key):
        claims.claim(key, len(SHARDING_STRATEGIES) - 1, fsdp)
    elif strategy:
        claims.notes.append(f"{flag} has no effect without --use-torch-fsdp2 or --use-megatron-fsdp; say --zero-stage.")
    for switch in ("--use-distributed-optimizer", "--overlapped-distributed-optimizer"):
        if switch not in claims.given:
            continue
        if claims.claimed(key) is None:
            claims.claim(key, 1, switch)
        elif claims.claimed(key) == 0 and not fsdp:
            claims.problems.append(f"{switch} shards the optimizer states (stage 1) and --zero-stage 0 shards nothing; "
                                   f"drop one of them.")


def _others(claims: Claims) -> None:
    if "--no-train" in claims.given:
        claims.claim("train.skip_train", True, "--no-train")
    size = claims.read("--pipe-parallel-size", parse_int)
    if size:
        claims.claim("parallel.pp", size, "--pipe-parallel-size")
    words = (claims.read("--profile-steps", str) or "").split(",")
    if words != [""]:
        try:
            start, end = map(parse_int, words)
        except ValueError:
            claims.problems.append(f"--profile-steps {','.join(words)}: give START,END, such as 2,3.")
            return
        claims.claim("logging.profile_step_start", start, "--profile-steps")
        claims.claim("logging.profile_step_end", end, "--profile-steps")


def _experts(claims: Claims) -> None:
    words = parse_words(claims.given.get("--num-experts", []))
    if any(word != "1" for word in words):
        claims.problems.append(f"--num-experts {' '.join(words)}: mixture of experts is not supported; only 1 is "
                               f"accepted.")
    elif not words:
        companions = [name for name in EXPERT_COMPANIONS if name in claims.given]
        if companions:
            claims.notes.append(f"Without effect on a dense model: {', '.join(companions)}.")
