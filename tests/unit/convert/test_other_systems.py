"""A directory of another system that is given to --load is recognised, and the message says how to read it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_sp.checkpoint import files
from megatron_sp.config.load import load_run
from megatron_sp.config.rules.other_systems import other_system_problem
from megatron_sp.errors import CheckpointError, ConfigError

RUN = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --train-iters 1 --lr 1e-3 --mock-data " \
      "--vocab-size 9".split()


@pytest.mark.parametrize("content, message", [
    ({"config.json": json.dumps({"model_type": "llama"})}, "Train it further with pretrain_gpt.py --load-hf"),
    ({"iter_0000100/mp_rank_00/model_optim_rng.pt": "", "latest_checkpointed_iteration.txt": "100"},
     "is a checkpoint of Megatron-LM. Convert it first: python tools/convert_checkpoint.py megatron-lm-to-megatron-sp"),
    ({"global_step100/mp_rank_00_model_states.pt": "", "latest": "global_step100"},
     "is a checkpoint of Megatron-DeepSpeed"),
    ({"iter_0000100/metadata.json": "{}", "latest_checkpointed_iteration.txt": "100"}, "of Megatron-core (torch_dist)"),
])
def test_directories_of_other_systems_are_recognised(tmp_path: Path, content: dict[str, str], message: str) -> None:
    """By a run before torch is imported, and by the tools."""
    for name, text in content.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as error:
        load_run([*RUN, "--load", str(tmp_path)], 1)
    (problem,) = error.value.problems
    assert message in problem and str(tmp_path) in problem
    with pytest.raises(CheckpointError) as refused:
        files.find_checkpoint(tmp_path)
    assert message in str(refused.value)


@pytest.mark.parametrize("content", [
    {}, {"config.json": json.dumps({"model": {"num_layers": 1}})}, {"iter_0000100.building/__0_0.distcp": ""},
    {"iter_0000004/manifest.json": "{}", "iter_0000002/mp_rank_00/model_optim_rng.pt": ""}])
def test_own_and_empty_directories_are_not(tmp_path: Path, content: dict[str, str]) -> None:
    for name, text in content.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert other_system_problem(tmp_path) == ""
