"""Translate a Megatron command line where the same flags, or absent flags, have another meaning in this package."""

from __future__ import annotations

from megatron_sp.config.cli.claims import Claims
from megatron_sp.config.cli.translation.tables import HINTS
from megatron_sp.config.cli.values import parse_choice, parse_int, strip_quotes

#: Hints that people also give to this project's own command lines; they are no sign of Megatron's dialect.
_NO_SIGN = {"--local-rank", "--calculate-per-token-loss", "--deterministic-mode", "--use-cpu-initialization"}
GELU = "--gelu-approximation"
FUSED_GELU = "Megatron's fused GELU"
#: A static loss scale up to this number is probably meant as an exponent: 12 for 2^12.
LARGEST_POWER = 32
#: Default chunk size of Megatron-DeepSpeed's FPDT, in tokens.
FPDT_CHUNK = 65536


def translate_dialect(claims: Claims) -> None:
    """Set the values that Megatron means where a flag is absent or differs in meaning; a note names each of them."""
    for step in (_yarn, _recomputation, _zero_bubble, _stage_layers, _biases, _chunks, _same_data_twice, _gelu,
                 _loss_mean, _loss_scale):
        step(claims)


def _yarn(claims: Claims) -> None:
    """Read Megatron's kind of position embedding "yarn" as rotary embeddings with YaRN's scaling."""
    said = claims.values.get("model.position_embedding_type", {})
    for spelling in [spelling for spelling, value in said.items() if value == "yarn"]:
        said[spelling] = "rope"
        claims.claim("model.rope_scaling_type", "yarn", f"{spelling} yarn")


def is_megatrons(claims: Claims) -> bool:
    """Return whether a flag is given that only Megatron-LM or Megatron-DeepSpeed has."""
    return "--deepspeed" in claims.given or any(name in HINTS and name not in _NO_SIGN for name in claims.given)


def _gelu(claims: Claims) -> None:
    """Choose the GELU: as asked, else the tanh approximation where Megatron's fusion of bias and GELU would use it."""
    key = "model.activation"
    asked = claims.read(GELU, lambda text: parse_choice(text, ("none", "tanh")))
    if asked:
        claims.claim(key, "openai_gelu" if asked == "tanh" else "gelu", GELU)
    fuses = "--no-bias-gelu-fusion" not in claims.given and claims.claimed("model.add_bias_linear", True)
    if asked or GELU in claims.broken or not fuses or claims.claimed(key) or not is_megatrons(claims):
        return
    claims.claim(key, "openai_gelu", FUSED_GELU)
    claims.notes.append("GELU is computed by its tanh approximation, as Megatron does without --no-bias-gelu-fusion "
                        f"(this command line has Megatron's flags). Say {GELU} none for the exact GELU.")


def _loss_mean(claims: Claims) -> None:
    """Note where Megatron's default mean of the loss differs from the mean over tokens: where masks differ."""
    if claims.claimed("data.eod_mask_loss") and "--calculate-per-token-loss" not in claims.given and (
            is_megatrons(claims)):
        claims.notes.append("The loss is the mean over the valid tokens of the whole global batch, as under Megatron's "
                            "--calculate-per-token-loss. With --eod-mask-loss and without that flag Megatron averages "
                            "the means of the microbatches, which differs slightly.")


def _loss_scale(claims: Claims) -> None:
    """Note a static loss scale so small that it is probably meant as the exponent of a dynamic scale's power of two."""
    scale = claims.claimed("precision.loss_scale")
    if scale and scale <= LARGEST_POWER and claims.claimed("precision.fp16") and "--deepspeed" not in claims.given:
        claims.notes.append(f"--loss-scale {scale:g} is a static scale of {scale:g}. Some scripts for "
                            "DeepSpeed give it although it has no effect together with --deepspeed. In this case leave "
                            f"it out for a dynamic scale; --initial-loss-scale {2.0**scale:.0f} lets the dynamic scale "
                            f"start at 2^{scale:g}.")


def _biases(claims: Claims) -> None:
    """Read the two switches of Pai-Megatron-Patch for Qwen: together they leave biases on q, k and v alone."""
    pair = ("--disable-bias-linear-fc", "--disable-bias-attn-fc")
    given = [flag for flag in pair if flag in claims.given]
    if not given or claims.claimed("model.add_bias_linear", True) is False:
        return
    if len(given) == 1:
        claims.problems.append(f"{given[0]}: the bias of one of the two output layers cannot be switched off alone; "
                               f"give {' and '.join(pair)} for biases on q, k and v alone, or --disable-bias-linear "
                               "for no biases.")
        return
    claims.claim("model.add_bias_linear", False, " ".join(pair))
    claims.claim("model.add_qkv_bias", True, " ".join(pair))
    claims.notes.append(f"{' '.join(pair)} is read as --disable-bias-linear --add-qkv-bias: biases on q, k and v "
                        "alone, as in Qwen.")


def _recomputation(claims: Claims) -> None:
    """Turn recomputation on by old Megatron's method alone, and note that DeepSpeed's switch alone does not.

    Flags that ask for different kinds of recomputation do not contradict each other, because no result depends on them.
    In this case "full" is used.
    """
    key, method, deepspeed = ("memory.recompute_granularity", "--activations-checkpoint-method",
                              "--deepspeed-activation-checkpointing")
    if method in claims.values.get("memory.recompute_method", {}) and claims.claimed(key) is None:
        claims.claim(key, "full", method)
        claims.notes.append(f"{method} turns recomputation of whole layers on, as in Megatron of 2021 "
                            "(--recompute-granularity full).")
    if deepspeed in claims.given and claims.claimed(key) is None:
        claims.notes.append(f"{deepspeed} alone has no effect, as in Megatron-DeepSpeed; add --checkpoint-activations "
                            "to recompute activations.")
    spelled = claims.values.get(key, {})
    if len(set(spelled.values())) > 1:
        claims.notes.append(f"{' and '.join(spelled)} ask for different recomputation; whole layers are recomputed "
                            "(--recompute-granularity full), which needs the least memory. No result depends on it.")
        claims.claim_alone(key, "full", next(name for name, value in spelled.items() if value == "full"))
    if any(strip_quotes(word).lower() == "chunk" for word in claims.given.get("--recompute-method", [])):
        claims.notes.append("--recompute-method chunk is run as block: the first --recompute-num-layers layers of each "
                            "pipeline stage are recomputed. No result depends on it.")
    if "--checkpoint-in-cpu" in claims.given:
        if claims.claimed(key):
            claims.claim("memory.offload_activations", 1.0, "--checkpoint-in-cpu")
        else:
            claims.notes.append("--checkpoint-in-cpu has no effect without --checkpoint-activations: nothing is "
                                "recomputed.")


def _zero_bubble(claims: Claims) -> None:
    """Run 1F1B where the switches of zero-bubble forks are given and a zero-bubble schedule is impossible here."""
    key = "parallel.pipeline_schedule"
    flags = [name for name in claims.values.get(key, {}) if name.startswith("--enable-zb")]
    if not flags or "--pipeline-schedule" in claims.given:
        return
    reason = ("there is one pipeline stage" if claims.claimed("parallel.pp", 1) < 2 else
              "zero-bubble schedules cannot recompute activations" if claims.claimed("memory.recompute_granularity")
              else "zero-bubble schedules do not go with ZeRO stage 3" if claims.claimed("parallel.zero_stage") == 3
              else "")
    if reason:
        claims.values.pop(key)
        claims.notes.append(f"{', '.join(flags)}: 1F1B is run instead, because {reason}. No result depends on it.")


def _chunks(claims: Claims) -> None:
    """Compute in chunks of the sequence where DeepSpeed's FPDT is asked for, which also computes in chunks."""
    fpdt, size_flag, offloading = (f"--ds-sequence-parallel-fpdt{part}" for part in ("", "-chunk-size", "-offloading"))
    size = claims.read(size_flag, parse_int, FPDT_CHUNK)
    if fpdt not in claims.given:
        claims.notes += [f"{flag} has no effect without {fpdt}." for flag in (size_flag, offloading)
                         if flag in claims.given]
        return
    length = claims.claimed("data.seq_length")
    if length is not None and size >= length:
        claims.notes.append(f"{fpdt} has no effect: --seq-length {length} is not more than one chunk of {size} tokens "
                            f"({size_flag}).")
        return
    claims.claim("memory.sequence_chunk_size", size, size_flag if size_flag in claims.given else fpdt)
    claims.notes.append(f"{fpdt}: each sequence is computed in chunks of {size} tokens, as with --sequence-chunk-size. "
                        "Unlike FPDT, chunks go through the whole model one after another. The result is the same.")
    if offloading in claims.given:
        claims.claim("memory.offload_key_values", True, offloading)


def _same_data_twice(claims: Claims) -> None:
    """Drop one of two flags that name the same training data, as in scripts of some forks."""
    whole, train = claims.claimed("data.data_path"), claims.claimed("data.train_data_path")
    if not whole or whole != train:
        return
    others = claims.values.get("data.valid_data_path") or claims.values.get("data.test_data_path")
    kept, dropped = ("--train-data-path", "--data-path") if others else ("--data-path", "--train-data-path")
    claims.values.pop("data.data_path" if others else "data.train_data_path")
    claims.notes.append(f"{dropped} names the same data as {kept}; {kept} is used.")


# --- layers of pipeline stages ------------------------------------------------------------------------------------

def _stage_layers(claims: Claims) -> None:
    """Set the layers of each pipeline stage as Megatron's flags about uneven stages say.

    These flags give the first or last stage a number of layers of its own (``--decoder-first-pipeline-num-layers``),
    or count the embedding or the loss as one layer. The result is the value of ``--pipeline-layers``.
    """
    first = claims.read("--decoder-first-pipeline-num-layers", parse_int)
    last = claims.read("--decoder-last-pipeline-num-layers", parse_int)
    stages, layers = claims.claimed("parallel.pp", 1), claims.claimed("model.num_layers")
    if first is not None or last is not None:
        if layers and stages > 1:
            _uneven_ends(claims, first, last, stages, layers)
        return
    _padded_layers(claims, stages, layers)
    counted = {flag: flag in claims.given for flag in (
        "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")}
    if any(counted.values()) and layers and stages > 1:
        _counted_ends(claims, counted, stages, layers)


def _padded_layers(claims: Claims, stages: int, layers: int | None) -> None:
    """Replace a number of layers per stage that does not divide the model under ``--allow-padding-num-layers``.

    The fork that has this flag adds empty layers until the number divides. Here the layers are spread over the stages
    as evenly as possible, and a note says so.
    """
    key, flag = "parallel.layers_per_virtual_stage", "--allow-padding-num-layers"
    each = claims.claimed(key)
    if flag not in claims.given or not each or not layers or stages < 2 or layers % (stages * each) == 0:
        return
    per_rank = max(1, layers // (stages * each))
    claims.values.pop(key)
    claims.claim("parallel.stages_per_rank", per_rank, flag)
    claims.notes.append(f"{flag}: no empty layers are added; the {layers} layers are spread over {stages} x {per_rank} "
                        "pipeline stages of almost equal work.")


def _uneven_ends(claims: Claims, first: int | None, last: int | None, stages: int, layers: int) -> None:
    """Give the first and last rank their numbers of layers; the ranks between them share the rest equally."""
    flags = " ".join(f"--decoder-{name}-pipeline-num-layers {value}" for name, value in (
        ("first", first), ("last", last)) if value is not None)
    inner = stages - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    per_rank = claims.claimed("parallel.stages_per_rank", 1)
    if rest < inner or (inner and rest % inner) or (not inner and rest):
        claims.problems.append(f"{flags} leaves {rest} of --num-layers {layers} for the {inner} other stages, which "
                               "does not divide; give the layers of every stage with --pipeline-layers instead.")
        return
    ranks = [rest // inner] * inner if inner else []
    ranks = ([first] if first is not None else []) + ranks + ([last] if last is not None else [])
    odd = [count for count in ranks if count % per_rank or not count]
    if odd:
        claims.problems.append(f"{flags} gives a rank {odd[0]} layers, which does not divide into {per_rank} stages "
                               "per rank; give the layers of every stage with --pipeline-layers instead.")
        return
    claims.claim("parallel.pipeline_layers", tuple(count // per_rank for count in ranks) * per_rank, flags)


def _counted_ends(claims: Claims, counted: dict[str, bool], stages: int, layers: int) -> None:
    """Count embedding and loss as one layer each, so that the first and the last stage get one layer less."""
    embedding, loss = counted.values()
    total = layers + embedding + loss
    each_virtual = claims.claimed("parallel.layers_per_virtual_stage")
    per_rank = total // (stages * each_virtual) if each_virtual else claims.claimed("parallel.stages_per_rank", 1)
    number = stages * per_rank
    size = total // number if number else 0
    flags = " ".join(flag for flag, given in counted.items() if given)
    if not number or total % number or size - embedding < 1 or size - loss < 1:
        claims.notes.append(f"{flags}: embedding and loss are counted when layers are split over stages, here by what "
                            "they compute.")
        return
    sizes = [size] * number
    sizes[0] -= embedding
    sizes[-1] -= loss
    claims.claim("parallel.pipeline_layers", tuple(sizes), flags)
    if each_virtual:
        claims.values.pop("parallel.layers_per_virtual_stage")
        claims.claim("parallel.stages_per_rank", per_rank, "--num-layers-per-virtual-pipeline-stage")
