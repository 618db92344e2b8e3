"""Find the files of a checkpoint of Megatron-LM or Megatron-DeepSpeed, and gather its tensors by layer and rank.

::

    Megatron-LM, --ckpt-format torch       DIR/latest_checkpointed_iteration.txt
                                           DIR/iter_0000100/mp_rank_TT/model_optim_rng.pt          without pipeline
                                           DIR/iter_0000100/mp_rank_TT_PPP/model_optim_rng.pt      with
    Megatron-DeepSpeed                     DIR/latest
                                           DIR/global_step100/mp_rank_TT_model_states.pt           flags; and weights
                                           DIR/global_step100/layer_LL-model_TT-model_states.pt    weights of pipelines

T is the tensor-parallel rank and P the pipeline rank. The authors had no file that Megatron wrote. This module follows
the code with which both programs save, and the tests build their files in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_sp.checkpoint.files import TRACKER
from megatron_sp.convert.lazy import LazyTensor, lazy_of
from megatron_sp.convert.torch_file import Inert, load_torch_file
from megatron_sp.errors import CheckpointError

Tensors = dict[str, LazyTensor]

#: Suffixes of names that are no weights: buffers, and the state of Transformer Engine's fp8.
_NO_WEIGHTS = ("_extra_state", "inv_freq", "masked_bias", "attention.bias", "attn.bias")
#: Suffix of a name outside of layers -> this package's name. The first suffix that matches is used.
_OUTER = {
    "word_embeddings_for_head.weight": "",        # the last pipeline stage's copy of a tied embedding
    "word_embeddings.weight": "embedding.word.weight", "position_embeddings.weight": "embedding.position.weight",
    **{f"{norm}.{end}": f"final_norm.{end}" for norm in ("final_layernorm", "final_norm", "transformer.final_layernorm")
       for end in ("weight", "bias")},
    "output_layer.weight": "output.weight", "lm_head.weight": "output.weight"}


@dataclass
class MegatronCheckpoint:
    """A checkpoint of Megatron-LM or Megatron-DeepSpeed.

    Attributes:
        directory: the directory of the iteration.
        iteration: 0 where the files do not say.
        args: Megatron's flags by name; empty where the files do not hold them.
        version: Megatron's ``checkpoint_version``, which says in which order the rows of query, key and value are.
        of_deepspeed: whether Megatron-DeepSpeed wrote it.
        outer: the tensors outside of layers, for each tensor-parallel rank, under this package's names.
        layers: the tensors of each layer, for each tensor-parallel rank, under Megatron's names within the layer.
    """

    directory: Path
    iteration: int
    args: dict[str, Any]
    version: float
    of_deepspeed: bool
    outer: list[Tensors]
    layers: list[list[Tensors]] = field(default_factory=list)

    @property
    def tp(self) -> int:
        return len(self.outer)


def open_checkpoint(directory: Path, iteration: int | None = None) -> MegatronCheckpoint:
    """Return a checkpoint; its tensors are read when they are needed.

    Args:
        directory: what Megatron's --save named, or the directory of one iteration within it.
        iteration: None for the one that the tracker names.

    Raises:
        CheckpointError: there is none, it is of a kind that cannot be read, or files are missing or damaged.
    """
    path = _find(directory, iteration)
    if list(path.glob("*mp_rank_*_model_states.pt")) or list(path.glob("layer_*-model_*-model_states.pt")):
        return _open_deepspeed(path)
    if (path / "metadata.json").is_file() or (path / ".metadata").is_file() or (path / "common.pt").is_file():
        raise CheckpointError(f"{path} is a distributed checkpoint of Megatron-core (--ckpt-format torch_dist), which "
                              "this program cannot read. Convert it with Megatron's own --ckpt-convert-format torch "
                              "--ckpt-convert-save DIR, and give DIR")
    return _open_megatron(path)


def _find(directory: Path, iteration: int | None) -> Path:
    """Return the directory of one iteration."""
    if iteration is not None:
        named = [f"iter_{iteration:07d}", f"global_step{iteration}"]
        source = f"--ckpt-step {iteration}"
    elif (directory / "latest").is_file():
        named, source = [_first_word(directory / "latest")], str(directory / "latest")
    elif (directory / TRACKER).is_file():
        word = _first_word(directory / TRACKER)
        named = [f"iter_{int(word):07d}", f"global_step{word}"] if word.isdecimal() else [word]
        source = str(directory / TRACKER)
    elif list(directory.glob("*mp_rank_*")) or list(directory.glob("layer_*-model_*")) or (
            directory / "common.pt").is_file():
        return directory
    else:
        raise CheckpointError(f"--load {directory} holds no checkpoint of Megatron: neither {TRACKER} nor latest is "
                              "there, nor files or directories named mp_rank_...")
    found = next((directory / name for name in named if (directory / name).is_dir()), None)
    if found is None:
        raise CheckpointError(f"{directory / named[0]}, named by {source}, does not exist")
    return found


def _first_word(path: Path) -> str:
    words = path.read_text(errors="replace").split()
    if not words or Path(words[0]).name != words[0]:
        raise CheckpointError(f"the tracker {path} names no checkpoint")
    return words[0]


# --- Megatron-LM --------------------------------------------------------------------------------------------------

def _open_megatron(path: Path) -> MegatronCheckpoint:
    files: dict[tuple[int, int], Path] = {}     # (pp, tp) -> file
    for folder in sorted(path.glob("mp_rank_*")):
        match = re.fullmatch(r"mp_rank_(\d+)(?:_(\d+))?(_\d+)?", folder.name)
        names = [name for name in ("model_optim_rng.pt", "model_rng.pt") if (folder / name).is_file()]
        if match and match[3]:
            raise CheckpointError(f"{folder} is of a model with experts, which is not supported")
        if match and names:
            files[int(match[2] or 0), int(match[1])] = folder / names[0]
    ranks = {tp for _, tp in files}
    stages = {pp for pp, _ in files}
    wanted = {(pp, tp) for pp in range(max(stages, default=-1) + 1) for tp in range(max(ranks, default=-1) + 1)}
    if not wanted or wanted != files.keys():
        lost = ", ".join(f"tensor rank {tp} of pipeline rank {pp}" for pp, tp in sorted(wanted - files.keys()))
        raise CheckpointError(f"{path} is not complete: " + (f"the file of {lost} is missing" if lost else
                                                             "it has no mp_rank_.../model_optim_rng.pt"))
    contents = {place: _checked(file) for place, file in files.items()}
    first = contents[0, 0]
    found = MegatronCheckpoint(path, _number(first.get("iteration")), _flags(first), _number(
        first.get("checkpoint_version"), 0.0), False, [{} for _ in ranks])
    _check_sizes(found, len(ranks), len(stages))
    chunks = [f"model{number}" for number in range(len(first)) if f"model{number}" in first] or ["model"]
    for chunk in chunks:        # virtual stages: chunk 0 of all ranks comes before chunk 1 of the first
        for pp in sorted(stages):
            by_rank = []
            for tp in sorted(ranks):
                tensors = dict(_flatten(contents[pp, tp].get(chunk), str(files[pp, tp])))
                by_rank.append(_layers_of(tensors, found.outer[tp]))
            _append_layers(found, by_rank, files[pp, 0])
    return found


def _checked(file: Path) -> dict[str, Any]:
    content = load_torch_file(file)
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is not a checkpoint of Megatron")
    return content


def _append_layers(found: MegatronCheckpoint, by_rank: list[dict[int, Tensors]], file: Path) -> None:
    """Add the layers of one pipeline stage, given by their number within the stage for each rank."""
    numbers = sorted(by_rank[0])
    if numbers != list(range(len(numbers))) or any(sorted(other) != numbers for other in by_rank):
        raise CheckpointError(f"{file}: the layers of this pipeline stage are not numbered from 0 on all tensor ranks")
    found.layers += [[rank[number] for rank in by_rank] for number in numbers]


def _check_sizes(found: MegatronCheckpoint, tp: int, pp: int) -> None:
    """Compare the number of files with the parallel sizes among the flags."""
    for flag, count in (("tensor_model_parallel_size", tp), ("pipeline_model_parallel_size", pp)):
        said = found.args.get(flag)
        if isinstance(said, int) and said != count:
            raise CheckpointError(f"{found.directory} is not complete: its flags say {flag} {said}, and there are "
                                  f"files of {count} ranks")


# --- Megatron-DeepSpeed -------------------------------------------------------------------------------------------

def _open_deepspeed(path: Path) -> MegatronCheckpoint:
    files = {int(match[1]): file for file in path.glob("mp_rank_*_model_states.pt")
             if (match := re.fullmatch(r"mp_rank_(\d+)_model_states\.pt", file.name))}
    layers: dict[tuple[int, int], Path] = {}      # (position in the pipeline, tp) -> file
    for file in path.glob("layer_*-model_*-model_states.pt"):
        if match := re.fullmatch(r"layer_(\d+)-model_(\d+)-model_states\.pt", file.name):
            layers[int(match[1]), int(match[2])] = file
    if not files and list(path.glob("zero_pp_rank_*_model_states.pt")):
        raise CheckpointError(f"{path} was saved under ZeRO stage 3, where no file holds whole weights. Save it again "
                              "with stage3_gather_16bit_weights_on_model_save, or under a lower stage")
    first = _checked(files[min(files)]) if files else {}
    ranks = sorted({tp for _, tp in layers} or files.keys())
    if ranks != list(range(len(ranks))) or (not layers and not files):
        raise CheckpointError(f"{path} is not complete: there are files of the tensor ranks "
                              f"{', '.join(map(str, ranks)) or 'none'}")
    iteration = _number(first.get("iteration"), _number(first.get("global_steps"), _trailing_number(path.name)))
    found = MegatronCheckpoint(path, int(iteration), _flags(first), _number(first.get("checkpoint_version"), 3.0), True,
                               [{} for _ in ranks])
    if layers:
        _gather_pipeline(found, layers)
        return found
    _check_sizes(found, len(ranks), 1)
    by_rank = []
    for tp in ranks:
        content = first if tp == min(files) else _checked(files[tp])
        by_rank.append(_layers_of(dict(_flatten(content.get("module"), str(files[tp]))), found.outer[tp]))
    _append_layers(found, by_rank, files[0])
    return found


def _gather_pipeline(found: MegatronCheckpoint, files: dict[tuple[int, int], Path]) -> None:
    """Gather a pipeline's files, one for each position that has weights: embedding, layers, final norm, output layer.

    The positions between them differ from version to version. So a file's content decides what it is.
    """
    for position in sorted({position for position, _ in files}):
        by_rank: list[dict[int, Tensors]] = []
        for tp in range(found.tp):
            if (position, tp) not in files:
                raise CheckpointError(f"{found.directory} is not complete: layer_{position:02d}-model_{tp:02d}-"
                                      "model_states.pt is missing")
            file = files[position, tp]
            tensors = dict(_flatten(_checked(file), str(file)))
            if any(name.startswith(("self_attention.", "attention.")) for name in tensors):
                by_rank.append({0: {name: it for name, it in tensors.items() if not name.endswith(_NO_WEIGHTS)}})
            elif tensors.keys() <= {"weight", "bias"} and len(tensors["weight"].shape) == 1:
                found.outer[tp] |= {f"final_norm.{name}": tensor for name, tensor in tensors.items()}
            else:
                _layers_of(tensors, found.outer[tp])
        if by_rank:
            _append_layers(found, by_rank, files[position, 0])


# --- both ---------------------------------------------------------------------------------------------------------

def _flatten(content: Any, source: str, prefix: str = "") -> Iterator[tuple[str, LazyTensor]]:
    """Yield the tensors in nested dictionaries, their keys joined by dots."""
    if not isinstance(content, dict):
        raise CheckpointError(f"{source} holds no weights where Megatron stores them")
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, torch.Tensor):
            yield name, lazy_of(value, f"{source}: {name}")
        elif isinstance(value, dict):
            yield from _flatten(value, source, f"{name}.")


def _layers_of(tensors: Tensors, outer: Tensors) -> dict[int, Tensors]:
    """Return the tensors of each layer by the layer's number within its stage; add the others to ``outer``."""
    layers: dict[int, Tensors] = {}
    for name, tensor in tensors.items():
        if name.endswith(_NO_WEIGHTS):
            continue
        if match := re.fullmatch(r"(?:.*\.)?layers\.(\d+)\.(.+)", name):
            layers.setdefault(int(match[1]), {})[match[2]] = tensor
            continue
        own = next((own for end, own in _OUTER.items() if name == end or name.endswith(f".{end}")), None)
        if own is None:
            raise CheckpointError(f"{tensor.source} has no place in a GPT model here")
        if own:
            outer.setdefault(own, tensor)
    return layers


def _flags(content: dict[str, Any]) -> dict[str, Any]:
    """Return Megatron's flags, which a checkpoint holds as an ``argparse.Namespace``."""
    args = content.get("args")
    if isinstance(args, Inert):
        return {name: value for name, value in vars(args).items() if name != "arguments"}
    return dict(args) if isinstance(args, dict) else {}


def _number(value: Any, default: Any = 0) -> Any:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default


def _trailing_number(name: str) -> int:
    match = re.search(r"(\d+)$", name)
    return int(match[1]) if match else 0
