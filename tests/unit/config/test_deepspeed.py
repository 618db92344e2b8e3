"""``--deepspeed --deepspeed_config FILE``: each key of the file that sets a field, contradicts a flag or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_sp.config.cli.flags import Parsed, parse
from megatron_sp.config.load import load_run
from megatron_sp.errors import ConfigError


def read(tmp_path: Path, config: Any, flags: str = "") -> Parsed:
    path = tmp_path / "ds.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return parse(["--deepspeed", "--deepspeed_config", str(path), *flags.split()])


@pytest.mark.parametrize("config, flags, key, value", [
    ({"zero_optimization": {"stage": 2}}, "", "parallel.zero_stage", 2),
    ({"zero_optimization": {"stage": 3}}, "--zero-stage 1", "parallel.zero_stage", 3),
    ({"zero_optimization": {"stage": "auto"}}, "--zero-stage 1", "parallel.zero_stage", 1),
    ({"bf16": {"enabled": True}}, "", "precision.bf16", True),
    ({"bfloat16": {"enabled": True}}, "", "precision.bf16", True),
    ({"bf16": {"enabled": "auto"}}, "--bf16", "precision.bf16", True),
    ({"fp16": {"enabled": True, "initial_scale_power": 12}}, "--loss-scale 12", "precision.initial_loss_scale", 4096.0),
    ({"fp16": {"enabled": True, "initial_scale_power": 12}}, "--loss-scale 12", "precision.loss_scale", 0.0),
    ({"fp16": {"enabled": True, "loss_scale": 128}}, "", "precision.loss_scale", 128.0),
    ({"fp16": {"enabled": True, "loss_scale_window": 500}}, "", "precision.loss_scale_window", 500),
    ({"fp16": {"enabled": True, "hysteresis": 4}}, "--hysteresis 2", "precision.hysteresis", 4),
    ({"fp16": {"enabled": True, "min_loss_scale": 2}}, "", "precision.min_loss_scale", 2.0),
    ({"gradient_clipping": 0.5}, "", "optimizer.clip_grad", 0.5),
    ({"gradient_clipping": 0.0}, "--clip-grad 1", "optimizer.clip_grad", 0.0),
    ({"train_batch_size": 64}, "", "train.global_batch_size", 64),
    ({"train_batch_size": 64}, "--global-batch-size 32", "train.global_batch_size", 32),
    ({"train_micro_batch_size_per_gpu": 4}, "", "train.micro_batch_size", 4),
    ({"gradient_accumulation_steps": 8}, "", "train.gradient_accumulation_steps", 8),
    ({"data_types": {"grad_accum_dtype": "bf16"}}, "", "precision.grad_reduce_in_bf16", True),
    ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "", "memory.offload_optimizer", True),
    ({"zero_optimization": {"cpu_offload": True}}, "", "memory.offload_optimizer", True),
    ({"zero_optimization": {"offload_optimizer": {"device": "auto"}}}, "", "memory.offload_optimizer", False),
    ({"zero_optimization": {"offload_optimizer": {"device": "auto"}}}, "--offload-optimizer",
     "memory.offload_optimizer", True),
    ({"zero_optimization": True}, "", "parallel.zero_stage", 1),
    ({"zero_optimization": False}, "--zero-stage 1", "parallel.zero_stage", 0),
    ({"zero_optimization": "auto"}, "--zero-stage 2", "parallel.zero_stage", 2),
    ({"gradient_clipping": "auto"}, "--clip-grad 3", "optimizer.clip_grad", 3.0),
    ({"fp16": {"enabled": True, "loss_scale": "auto"}}, "--loss-scale 12", "precision.loss_scale", 12.0),
    ({"fp16": {"enabled": True, "hysteresis": "auto"}}, "--hysteresis 5", "precision.hysteresis", 5),
])
def test_keys_that_set_fields(tmp_path: Path, config: dict[str, Any], flags: str, key: str, value: Any) -> None:
    parsed = read(tmp_path, config, flags)
    section, _, name = key.partition(".")
    assert parsed.problems == [] and getattr(getattr(parsed.run, section), name) == value


@pytest.mark.parametrize("config, flags, parts", [
    ({"zero_optimization": {"stage": 3}}, "--zero-stage 1", ("zero_optimization.stage 3 in", "not --zero-stage 1")),
    ({"train_batch_size": 64}, "--global-batch-size 32", ("--global-batch-size 32 is used", "train_batch_size 64")),
    ({"gradient_clipping": 2}, "--clip-grad 1", ("gradient_clipping 2 in", "not --clip-grad 1")),
    ({"bf16": {"enabled": False}}, "", ("DeepSpeed would not clip", "--clip-grad 0")),
    ({"fp16": {"enabled": True}, "gradient_clipping": 1}, "--loss-scale 12", ("--loss-scale 12 has no effect",
                                                                               "65536")),
    ({"steps_per_print": 9, "wall_clock_breakdown": False, "gradient_clipping": 1}, "",
     ("steps_per_print, wall_clock_breakdown", "no effect")),
    ({"zero_optimization": {"overlap_comm": True, "offload_optimizer": {"device": "none", "ratio": 1}},
      "fp16": {"auto_cast": True}, "gradient_clipping": 1}, "",
     ("zero_optimization.overlap_comm", "fp16.auto_cast", "zero_optimization.offload_optimizer.ratio", "no effect")),
])
def test_one_note_says_what_counts(tmp_path: Path, config: dict[str, Any], flags: str, parts: tuple[str, ...]) -> None:
    parsed = read(tmp_path, config, flags)
    assert parsed.problems == []
    assert sum(all(part in note for part in parts) for note in parsed.notes) == 1


@pytest.mark.parametrize("config, flags, part", [
    ({"fp16": {"enabled": True}}, "--bf16", "--bf16 and fp16.enabled true in"),
    ({"bf16": {"enabled": False}}, "--bf16", "--bf16 and bf16.enabled false in"),
    ({"zero_optimization": {"stage": 4}}, "", "there are stages 0 to 3"),
    ({"zero_optimization": {"stage": "two"}}, "", "must be a whole number of 0 or more"),
    ({"curriculum_learning": {"enabled": True}}, "", "curriculum_learning.enabled true in"),
    ({"data_types": {"grad_accum_dtype": "fp16"}}, "", "use fp32 or bf16"),
    ({"zero_optimization": 1}, "", "zero_optimization of"),
    ({"fp16": True}, "", 'is true; it must be an object such as {"enabled": true}'),
    ({"bf16": "yes"}, "", 'is "yes"; it must be an object'),
    ({"data_types": ["fp32"]}, "", "data_types of"),
    ({"zero_optimization": {"offload_optimizer": "cpu"}}, "",
     'is "cpu"; it must be an object such as {"device": "cpu"}'),
    ({"zero_optimization": {"offload_param": True}}, "", "zero_optimization.offload_param of"),
    ({"zero_optimization": {"cpu_offload": "yes"}}, "", "zero_optimization.cpu_offload of"),
    ({"curriculum_learning": True}, "", "curriculum_learning of"),
    ({"amp": {"enabled": "yes"}}, "", "amp.enabled of"),
    ({"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}}, "",
     "compression_training.weight_quantization.shared_parameters.enabled true in"),
    ({"sparse_attention": {"mode": "fixed"}}, "", "sparse_attention in"),
    ('{"gradient_clipping": Infinity}', "", "gradient_clipping of"),
    ("{,}", "", "cannot be read as JSON"),
    ("[]", "", "holds no JSON object"),
])
def test_refused_by_name(tmp_path: Path, config: Any, flags: str, part: str) -> None:
    (problem,) = read(tmp_path, config, flags).problems
    assert part in problem


@pytest.mark.parametrize("keys, said", [
    ((64, 2, 8), ""), ((64, 2, 0), ""), ((64, 0, 8), ""), ((0, 2, 3), ""),
    ((64, 2, 4), "x gradient_accumulation_steps 4 x data-parallel size 4, and DeepSpeed"),
    ((65, 2, 0), "is not a multiple of train_micro_batch_size_per_gpu 2 x data-parallel size 4")])
def test_a_batch_that_deepspeed_refuses(tmp_path: Path, keys: tuple[int, int, int], said: str) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    (tmp_path / "ds.json").write_text(json.dumps({name: key for name, key in zip(names, keys, strict=True) if key}))
    line = ("--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --lr 1e-3 --train-iters 2 "
            f"--mock-data --vocab-size 128 --global-batch-size 32 --deepspeed --deepspeed_config {tmp_path}/ds.json")
    if not said:
        load_run(line.split(), 4, files=False)
        return
    with pytest.raises(ConfigError) as caught:
        load_run(line.split(), 4, files=False)
    (problem,) = caught.value.problems
    assert said in problem and f"train_batch_size {keys[0]} in" in problem


def test_a_section_that_is_off_is_accepted(tmp_path: Path) -> None:
    assert read(tmp_path, {"curriculum_learning": {"enabled": False}, "amp": {"enabled": False}}).problems == []


def test_clipping_that_follows_the_flag_has_no_note(tmp_path: Path) -> None:
    parsed = read(tmp_path, {"gradient_clipping": "auto"})
    assert parsed.problems == [] and not [note for note in parsed.notes if "clip" in note]
