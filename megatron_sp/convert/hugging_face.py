"""Read the weights of a Hugging Face model, and give them this package's parameter names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from megatron_sp.checkpoint.files import read_json
from megatron_sp.config.families import Family, WeightName, family_named, read_config
from megatron_sp.config.schema import Model
from megatron_sp.convert.lazy import LazyTensor, Weights, changed, row_part, transposed
from megatron_sp.convert.parameters import is_norm_weight, parameter_shapes
from megatron_sp.convert.safetensors_file import read_safetensors
from megatron_sp.convert.torch_file import read_tensors
from megatron_sp.errors import CheckpointError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
OLD_INDEX, OLD_SINGLE = "pytorch_model.bin.index.json", "pytorch_model.bin"
#: Largest number of problems that one message lists.
SHOWN = 5


def weights_of(directory: str | Path, model: Model) -> Weights:
    """Return the weights of a Hugging Face model as lazy tensors, under this package's parameter names.

    Only the headers of the files are read now. The weights are read when they are used.

    Args:
        model: the resolved model flags, vocabulary size included.

    Raises:
        CheckpointError: files are missing or damaged, or the weights are not those of the model.
    """
    directory = Path(directory)
    try:
        family = family_named(str(read_config(directory).get("model_type")))
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    assert family is not None      # the check of the flags has refused unknown families
    theirs = stored_tensors(directory)
    if not any(name.startswith(family.prefix) for name in theirs):      # saved without the output layer's wrapper
        theirs = {name if name.startswith("lm_head.") else family.prefix + name: it for name, it in theirs.items()}
    return _renamed(directory, family, model, theirs)


def stored_tensors(directory: Path) -> dict[str, LazyTensor]:
    """Return all tensors of a model's directory by Hugging Face's names.

    Raises:
        CheckpointError: there are none, or a file is missing or damaged.
    """
    for index, single, read in ((INDEX, SINGLE, read_safetensors), (OLD_INDEX, OLD_SINGLE, read_tensors)):
        if (directory / index).is_file():
            content = read_json(directory / index)
            places = content.get("weight_map") if isinstance(content, dict) else None
            if not isinstance(places, dict) or not all(
                    isinstance(file, str) and Path(file).name == file for file in places.values()):
                raise CheckpointError(f"{directory / index} is damaged: it does not say which tensor is in which file")
            files = {name: read(directory / name) for name in sorted(set(places.values()))}
            lost = [name for name, file in places.items() if name not in files[file]]
            if lost:
                raise CheckpointError(f"{directory / places[lost[0]]} lacks the tensor {lost[0]}, which {index} names")
            return {name: files[file][name] for name, file in places.items()}
        if (directory / single).is_file():
            return read(directory / single)
    if parts := _numbered_files(directory):
        return {name: tensor for part in parts for name, tensor in read_safetensors(part).items()}
    raise CheckpointError(f"{directory} has no weights: neither {SINGLE} nor {INDEX} nor {OLD_SINGLE} is there. "
                          "Download the model again, with its weights")


def _numbered_files(directory: Path) -> list[Path]:
    """Return the files ``model-K-of-N.safetensors`` of a model that has lost the index which names them.

    Raises:
        CheckpointError: some of the N files are missing.
    """
    numbered = [(re.fullmatch(r"model-(\d+)-of-(\d+)\.safetensors", path.name), path)
                for path in sorted(directory.glob("model-*-of-*.safetensors"))]
    found = {(int(match[1]), int(match[2])): path for match, path in numbered if match}
    count = max((total for _, total in found), default=0)
    missing = [str(number) for number in range(1, count + 1) if (number, count) not in found]
    if missing or len(found) != count:
        raise CheckpointError(f"{directory} has no {INDEX}, and of the {count} files that make up the model "
                              f"{'number ' + ', '.join(missing) if missing else 'some are there twice'}"
                              f"{' is not there' if missing else ''}. Download the model again")
    return list(found.values())


def _renamed(directory: Path, family: Family, model: Model, theirs: dict[str, LazyTensor]) -> Weights:
    """Return the tensors under this package's names. Each parameter must have one tensor of the right shape."""
    found: Weights = {}
    problems, used = [], set()
    shapes = parameter_shapes(model)
    for own, rule, name in weight_names(family, model):
        used.add(name)
        if name not in theirs:
            problems.append(f"{name} is missing")
            continue
        tensor = _by_rule(theirs[name], rule)
        if tensor.shape != shapes[own]:
            problems.append(f"{name} has the shape {list(theirs[name].shape)}, and config.json asks "
                            f"for {list(_stored_shape(shapes[own], rule))}")
            continue
        around_zero = model.apply_layernorm_1p and is_norm_weight(own)
        found[own] = changed(tensor, lambda x: x.float() - 1) if around_zero else tensor
    tied = () if model.untie_embeddings_and_output_weights else ("lm_head.weight",)
    problems += [f"{name} has no place in a {family.model_type} model" for name in theirs
                 if name not in used and name not in tied and not name.endswith(family.ignored)]
    if problems:
        more = f" (and {len(problems) - SHOWN} more)" if len(problems) > SHOWN else ""
        raise CheckpointError(f"the weights in {directory} are not those of its config.json: "
                              f"{'; '.join(problems[:SHOWN])}{more}")
    return found


def weight_names(family: Family, model: Model) -> Iterator[tuple[str, WeightName, str]]:
    """Yield for each parameter of a model its name, its rule, and Hugging Face's name of the tensor that stores it."""
    rules = {rule.own: rule for rule in family.weights}
    for own in parameter_shapes(model):
        parts = own.split(".")
        number = parts[1] if parts[0] == "layers" else ""
        rule = rules[".".join(["layers", "N", *parts[2:]]) if number else own]
        theirs = rule.theirs.replace(".N.", f".{number}.")
        yield own, rule, theirs if theirs.startswith("lm_head.") else family.prefix + theirs


def _by_rule(tensor: LazyTensor, rule: WeightName) -> LazyTensor:
    if rule.transposed:
        tensor = transposed(tensor)
    if rule.parts == 1:
        return tensor
    rows = tensor.shape[0] // rule.parts
    return row_part(tensor, rule.part * rows, (rule.part + 1) * rows)


def _stored_shape(shape: tuple[int, ...], rule: WeightName) -> tuple[int, ...]:
    """Return the shape of the tensor in which a parameter of this shape is stored."""
    stored = (shape[0] * rule.parts, *shape[1:])
    return stored[::-1] if rule.transposed else stored
