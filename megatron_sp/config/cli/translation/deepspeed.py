"""``--deepspeed --deepspeed_config FILE``: which keys of DeepSpeed's JSON file set fields, and what becomes of others.

Under ``--deepspeed`` the file decides about sharding, precision, the loss scale and clipping; Megatron-DeepSpeed's
flags decide about the batch. Where both speak, that order holds here too, and a note names the difference.
"""

from __future__ import annotations

import json
import math
import os
from typing import Any

from megatron_sp.config.cli.claims import Claims, FileBatch
from megatron_sp.config.cli.values import strip_quotes

SWITCH, FILE = "--deepspeed", "--deepspeed-config"
#: Field -> the flag that sets it. Under --deepspeed these flags have no effect, because the file sets the fields.
LOSS_SCALE_FLAGS = {
    "precision.loss_scale": "--loss-scale", "precision.initial_loss_scale": "--initial-loss-scale",
    "precision.min_loss_scale": "--min-loss-scale", "precision.loss_scale_window": "--loss-scale-window",
    "precision.hysteresis": "--hysteresis"}
#: Field -> its value where the ``fp16`` section of DeepSpeed's file leaves the key out: the default that DeepSpeed has.
DYNAMIC_SCALE: dict[str, Any] = {
    "precision.initial_loss_scale": 2.0**16, "precision.min_loss_scale": 1.0, "precision.loss_scale_window": 1000,
    "precision.hysteresis": 2}
#: Sections that change the mathematics when their "enabled" is true, and why they are refused.
REFUSED_SECTIONS = {
    "curriculum_learning": "sequences that grow during training are not supported",
    "curriculum_learning_legacy": "sequences that grow during training are not supported",
    "data_efficiency": "curriculum learning and token dropping are not supported",
    "compression_training": "compression during training is not supported",
    "progressive_layer_drop": "dropping layers is not supported",
    "eigenvalue": "it steers compression, which is not supported",
    "amp": "mixed precision of apex is not supported; enable fp16 or bf16 instead",
    "sparse_attention": "sparse attention has flags, see --attention-pattern",
    "autotuning": "tools/plan.py looks for a layout instead",
}
#: Sections that set fields, and the keys of them that do.
SECTIONS: dict[str, tuple[str, ...]] = {
    "zero_optimization": ("stage", "cpu_offload", "offload_optimizer", "offload_param"),
    "fp16": ("enabled", "loss_scale", "initial_scale_power", "min_loss_scale", "loss_scale_window", "hysteresis"),
    "bf16": ("enabled",), "bfloat16": ("enabled",), "data_types": ("grad_accum_dtype",)}
#: Keys that set fields; the functions below read them.
HONOURED = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
            "zero_optimization", "fp16", "bf16", "bfloat16", "data_types"}


def translate_deepspeed(claims: Claims) -> None:
    """Turn DeepSpeed's two flags and the keys of its file into claims, notes and problems."""
    if SWITCH not in claims.given:
        if FILE in claims.given:
            claims.notes.append("--deepspeed_config has no effect without --deepspeed: the flags decide.")
        return
    config = _checked_sections(_read_file(claims), claims)
    _refuse_sections(config, claims)
    _sharding(config, claims)
    _precision(config, claims)
    _batch(config, claims)
    _clipping(config, claims)
    others = sorted(key for key in config if key not in HONOURED and key not in REFUSED_SECTIONS)
    others += [f"{name}.{key}" for name, known in SECTIONS.items() for key in _section(config, name)
               if key not in known]
    for name in ("offload_optimizer", "offload_param"):
        others += [f"zero_optimization.{name}.{key}" for key in _section(_section(config, "zero_optimization"), name)
                   if key != "device"]
    if others:
        claims.notes.append(f"Keys of {_file(claims)} that have no effect here: {', '.join(others)}.")


def _file(claims: Claims) -> str:
    return strip_quotes((claims.given.get(FILE) or ["DeepSpeed's file"])[0])


def _read_file(claims: Claims) -> dict[str, Any]:
    """Return the file's object, empty when there is none to read."""
    if FILE not in claims.given or FILE in claims.broken:
        claims.notes.append("--deepspeed without --deepspeed_config: the flags decide.")
        return {}
    path = _file(claims)
    if not os.path.exists(path):
        if claims.plan:
            claims.notes.append(f"--deepspeed_config {path}: there is no such file; this plan takes the flags alone.")
        else:
            claims.problems.append(f"--deepspeed_config {path}: there is no such file; name the file, or leave "
                                   "--deepspeed and --deepspeed_config out and let the flags decide.")
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError) as error:
        claims.problems.append(f"--deepspeed_config {path} cannot be read as JSON: {error}.")
        return {}
    if not isinstance(config, dict):
        claims.problems.append(f"--deepspeed_config {path} holds no JSON object: it must begin with {{.")
        return {}
    return config


def _checked_sections(config: dict[str, Any], claims: Claims) -> dict[str, Any]:
    """Return the file's object with an object for each section, and name the sections that are none.

    A section that is null or "auto" is left out, so that the flags decide. true and false for ``zero_optimization`` are
    an old spelling of the stages 1 and 0.
    """
    config = dict(config)
    if isinstance(config.get("zero_optimization"), bool):
        config["zero_optimization"] = {"stage": int(config["zero_optimization"])}
    cures = dict.fromkeys((*SECTIONS, *REFUSED_SECTIONS), '{"enabled": true} or {"enabled": false}')
    cures |= {"zero_optimization": '{"stage": 2}', "data_types": '{"grad_accum_dtype": "fp32"}'}
    _keep_objects(config, cures, "", claims)
    if "zero_optimization" in config:
        zero = config["zero_optimization"] = dict(config["zero_optimization"])
        _keep_objects(zero, dict.fromkeys(("offload_optimizer", "offload_param"), '{"device": "cpu"}'),
                      "zero_optimization.", claims)
    return config


def _keep_objects(config: dict[str, Any], cures: dict[str, str], prefix: str, claims: Claims) -> None:
    """Remove each named section that is no object; null and "auto" leave the choice to the flags, others are refused.

    Args:
        cures: section -> an object that it might hold.
        prefix: what stands before the section's name in a message.
    """
    for name, cure in cures.items():
        if name not in config or isinstance(config[name], dict):
            continue
        value = config.pop(name)
        if value not in (None, "auto"):
            claims.problems.append(f"{prefix}{name} of {_file(claims)} is {json.dumps(value)}; it must be an object "
                                   f"such as {cure}.")


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    section: dict[str, Any] = config.get(name, {})
    return section


def _value(config: dict[str, Any], path: str, claims: Claims, kind: type = float, prefix: str = "") -> Any:
    """Return the number (or, with ``bool``, the truth) under a dotted key; None where it is absent or "auto".

    Args:
        prefix: what stands before the path in a message.
    """
    *sections, key = path.split(".")
    for name in sections:
        config = _section(config, name)
    value = config.get(key)
    if value is None or value == "auto":
        return None
    if kind is bool:
        if not isinstance(value, bool):
            claims.problems.append(f"{prefix}{path} of {_file(claims)} is {value!r}; it must be true or "
                                   "false.")
            return None
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(
            value) or value < 0 or (kind is int and value != int(value)):
        claims.problems.append(f"{path} of {_file(claims)} is {value!r}; it must be a "
                               f"{'whole ' if kind is int else ''}number of 0 or more, or \"auto\".")
        return None
    return kind(value)


def _name(path: str, value: Any, claims: Claims) -> str:
    """Return how messages name a value of the file."""
    said = str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
    return f"{path} {said} in {_file(claims)}"


def _refuse_sections(config: dict[str, Any], claims: Claims) -> None:
    for name, reason in REFUSED_SECTIONS.items():
        section = _section(config, name)
        if section and _value(section, "enabled", claims, bool, f"{name}.") is not False and (
                name == "sparse_attention" or (path := _turned_on(section, name))):
            said = f"{path}.enabled true" if name != "sparse_attention" else name
            claims.problems.append(f"{said} in {_file(claims)}: {reason}; "
                                   f"{'leave it out' if name == 'sparse_attention' else 'set it to false'}.")


def _turned_on(section: dict[str, Any], path: str) -> str:
    """Return the path of the first object in a section, itself included, whose "enabled" is true, or ""."""
    if section.get("enabled") is True:
        return path
    return next((found for key, value in section.items() if isinstance(value, dict)
                 and (found := _turned_on(value, f"{path}.{key}"))), "")


def _sharding(config: dict[str, Any], claims: Claims) -> None:
    """Take the ZeRO stage and the offload from the file; its stage wins over --zero-stage, as in Megatron-DeepSpeed."""
    stage = _value(config, "zero_optimization.stage", claims, int)
    if stage is not None and stage > 3:
        claims.problems.append(f"{_name('zero_optimization.stage', stage, claims)}: there are stages 0 to 3.")
    elif stage is not None:
        _file_wins("parallel.zero_stage", "zero_optimization.stage", stage, claims)
    zero = _section(config, "zero_optimization")
    on_host = _value(config, "zero_optimization.cpu_offload", claims, bool)
    device = str(_section(zero, "offload_optimizer").get("device") or ("cpu" if on_host else "none"))
    if device == "auto":
        pass        # --offload-optimizer decides
    elif device not in ("none", "cpu", "nvme"):
        claims.problems.append(f"zero_optimization.offload_optimizer.device of {_file(claims)} is {device!r}; it must "
                               "be none, cpu, nvme or auto.")
    elif device != "none":
        claims.claim("memory.offload_optimizer", True, f"offload_optimizer in {_file(claims)}")
        if device == "nvme":
            claims.notes.append(f"{_name('offload_optimizer.device', device, claims)}: optimizer states are kept in "
                                "host memory instead.")
    if _section(zero, "offload_param").get("device") not in (None, "none", "auto"):
        claims.notes.append(f"offload_param in {_file(claims)}: parameters stay on the devices; ZeRO stage 3 shards "
                            "them.")


def _file_wins(key: str, path: str, value: Any, claims: Claims) -> None:
    """Take a field from the file, and add a note that names the flags which contradict it."""
    others = {spelling: said for spelling, said in claims.values.get(key, {}).items() if said != value}
    for spelling, said in others.items():
        claims.notes.append(f"{_name(path, value, claims)} is used, not {spelling} {said}: under --deepspeed the file "
                            "decides.")
    claims.claim_alone(key, value, _name(path, value, claims))


def _precision(config: dict[str, Any], claims: Claims) -> None:
    """Take the compute type, the loss scale and the type of gradient sums from DeepSpeed's file."""
    for kind, sections in (("fp16", ("fp16",)), ("bf16", ("bf16", "bfloat16"))):
        key, other = f"precision.{kind}", "--bf16" if kind == "fp16" else "--fp16"
        enabled = [value for name in sections if (value := _value(config, f"{name}.enabled", claims, bool)) is not None]
        if True in enabled and not claims.claimed(key) and claims.claimed(f"precision.{other[2:]}"):
            claims.problems.append(f"{other} and {_name(f'{sections[0]}.enabled', True, claims)} contradict each "
                                   "other; keep one of them.")
        elif True in enabled and not claims.claimed(key):
            claims.claim(key, True, _name(f"{sections[0]}.enabled", True, claims))
        elif False in enabled and True not in enabled and claims.claimed(key):
            claims.problems.append(f"--{kind} and {_name(f'{sections[0]}.enabled', False, claims)} contradict each "
                                   "other; set it to true, or leave the flag out.")
    if claims.claimed("precision.bf16") and claims.claimed("parallel.zero_stage", 0) == 0:
        claims.notes.append("DeepSpeed shards the fp32 states of bf16 runs also at stage 0, as stage 1 does; say "
                            "--zero-stage 1 for that. Here stage 0 shards nothing.")
    sums = str(_section(config, "data_types").get("grad_accum_dtype", "auto"))
    if sums == "bf16":
        claims.claim("precision.grad_reduce_in_bf16", True, f"data_types.grad_accum_dtype bf16 in {_file(claims)}")
    elif sums not in ("fp32", "auto", "None"):
        claims.problems.append(f"data_types.grad_accum_dtype {sums} in {_file(claims)} is not supported; use fp32 or "
                               "bf16.")
    if claims.claimed("precision.fp16"):
        _loss_scale(config, claims)


def _loss_scale(config: dict[str, Any], claims: Claims) -> None:
    """Take the loss scale from the file, else DeepSpeed's default; under --deepspeed its flags have no effect."""
    names = {"precision.initial_loss_scale": "initial_scale_power"}
    of_flags = {key: claims.claimed(key) for key in LOSS_SCALE_FLAGS if claims.values.get(key) and _section(
        config, "fp16").get(names.get(key, key.partition(".")[2])) == "auto"}     # "auto": the flag decides
    silenced = [f"{flag} {claims.claimed(key):g}" for key, flag in LOSS_SCALE_FLAGS.items()
                if claims.values.get(key) and key not in of_flags]
    for key in LOSS_SCALE_FLAGS:
        claims.values.pop(key, None)
    static = _value(config, "fp16.loss_scale", claims) or of_flags.get("precision.loss_scale")
    scale = dict(DYNAMIC_SCALE)
    for key, name, kind in (("min_loss_scale", "min_loss_scale", float), ("hysteresis", "hysteresis", int),
                            ("loss_scale_window", "loss_scale_window", int)):
        value = _value(config, f"fp16.{name}", claims, kind)
        scale[f"precision.{key}"] = value or scale[f"precision.{key}"]
    power = _value(config, "fp16.initial_scale_power", claims, int)
    if power is not None:
        scale["precision.initial_loss_scale"] = 2.0**min(power, 127)
    scale |= {key: value for key, value in of_flags.items() if key in scale}
    if "precision.min_loss_scale" not in of_flags:
        scale["precision.min_loss_scale"] = min(scale["precision.min_loss_scale"],
                                                scale["precision.initial_loss_scale"])
    if static:
        scale = {"precision.loss_scale": static}
    for key, value in scale.items():
        claims.claim(key, value, f"fp16 in {_file(claims)}")
    if silenced:
        chosen = f"the static scale {static:g}" if static else (
            f"a dynamic scale that starts at {scale['precision.initial_loss_scale']:g}")
        claims.notes.append(f"{', '.join(silenced)} {'has' if len(silenced) == 1 else 'have'} no effect under "
                            f"--deepspeed, where the file's fp16 section decides: {chosen} is used.")


def _batch(config: dict[str, Any], claims: Claims) -> None:
    """Take the batch sizes that no flag gives from the file; flags win, as in Megatron-DeepSpeed."""
    keys = {"train.global_batch_size": "train_batch_size", "train.micro_batch_size": "train_micro_batch_size_per_gpu",
            "train.gradient_accumulation_steps": "gradient_accumulation_steps"}
    given = {key: value for key, path in keys.items() if (value := _value(config, path, claims, int))}
    claims.file_batch = FileBatch(_file(claims), *(given.get(key, 0) for key in keys))
    speaks = any(claims.values.get(key) for key in ("train.global_batch_size", "train.step_batch_size_schedule"))
    for key, value in given.items():
        said = claims.claimed(key)
        if said is not None and said != value:
            claims.notes.append(f"{next(iter(claims.values[key]))} {said} is used, not "
                                f"{_name(keys[key], value, claims)}: about the batch the flags decide.")
        elif said is None and not (speaks and key != "train.micro_batch_size") and not (
                key == "train.gradient_accumulation_steps" and "train.global_batch_size" in given):
            claims.claim(key, value, _name(keys[key], value, claims))


def _clipping(config: dict[str, Any], claims: Claims) -> None:
    value = _value(config, "gradient_clipping", claims)
    if value is not None:
        _file_wins("optimizer.clip_grad", "gradient_clipping", value, claims)
    elif config and config.get("gradient_clipping") is None and claims.claimed("optimizer.clip_grad", 1.0):
        claims.notes.append(f"{_file(claims)} has no gradient_clipping, so DeepSpeed would not clip; here --clip-grad "
                            f"{claims.claimed('optimizer.clip_grad', 1.0):g} clips. Give --clip-grad 0 for no "
                            "clipping.")
