"""Recognise a directory of another system by its file names, so that a message can say how to read it."""

from __future__ import annotations

import json
from pathlib import Path

CONVERT = "python tools/convert_checkpoint.py"
_TRACKER = "latest_checkpointed_iteration.txt"


def other_system_problem(directory: str | Path, flag: str = "--load") -> str:
    """Return what a directory holds and how to read it, when another system wrote it; else "".

    Args:
        directory: given where a directory of checkpoints of this program is expected.
        flag: the flag that named the directory.
    """
    path = Path(directory)
    if not path.is_dir():
        return ""
    if _is_hugging_face(path):
        return (f"{flag} {path} is a model in Hugging Face's format. Train it further with pretrain_gpt.py --load-hf "
                f"{path}, or convert it first: {CONVERT} hf-to-megatron-sp --load {path} --save NEW_DIRECTORY.")
    if kind := _megatron_kind(path):
        if kind == "Megatron-core":
            return (f"{flag} {path} is a distributed checkpoint of Megatron-core (torch_dist), which cannot be read. "
                    "Convert it with Megatron's --ckpt-convert-format torch first, then with "
                    f"{CONVERT} megatron-lm-to-megatron-sp.")
        command = "megatron-deepspeed-to-megatron-sp" if kind == "Megatron-DeepSpeed" else "megatron-lm-to-megatron-sp"
        return (f"{flag} {path} is a checkpoint of {kind}. Convert it first: {CONVERT} {command} --load {path} --save "
                f"NEW_DIRECTORY. Then give {flag} NEW_DIRECTORY --finetune.")
    return ""


def _is_hugging_face(path: Path) -> bool:
    """Return whether there is a config.json with a ``model_type``, which the config.json of this program lacks."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return bool(list(path.glob("*.safetensors")))
    return isinstance(config, dict) and "model_type" in config


def _megatron_kind(path: Path) -> str:
    """Return which program of the Megatron family wrote a directory, or an iteration's directory in it; else ""."""
    places = [path, *sorted(path.glob("iter_*")), *sorted(path.glob("global_step*"))]
    if (path / _TRACKER).is_file() and (path / "release").is_dir():
        places.append(path / "release")
    if any((place / "manifest.json").is_file() for place in places):
        return ""       # the directory holds checkpoints of this program, which will be loaded
    for place in places:
        if list(place.glob("*_model_states.pt")):
            return "Megatron-DeepSpeed"
        if list(place.glob("mp_rank_*/model*.pt")):
            return "Megatron-LM"
        if (place / "metadata.json").is_file() or (place / "common.pt").is_file():
            return "Megatron-core"
    return ""
