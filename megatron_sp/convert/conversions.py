"""The conversions of ``tools/convert_checkpoint.py``, each from one directory to another."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

import torch

from megatron_sp.checkpoint import files
from megatron_sp.checkpoint.compare import flag_name
from megatron_sp.checkpoint.state_file import read_part, read_state
from megatron_sp.checkpoint.tokenizer_files import FIELDS, copied_names, with_existing_tokenizer
from megatron_sp.config.cli.flags import parse
from megatron_sp.config.cli.load_hf import TOKENIZER_FILES
from megatron_sp.config.families import CONFIG, choose_family, model_fields, read_config
from megatron_sp.config.resolve import resolve, with_vocab
from megatron_sp.config.rules.sizes import check_model
from megatron_sp.config.schema import Data, Model, Parallel, Precision, Run
from megatron_sp.config.serialize import from_dict
from megatron_sp.convert import megatron
from megatron_sp.convert.export import export
from megatron_sp.convert.hugging_face import weights_of
from megatron_sp.convert.megatron_files import open_checkpoint
from megatron_sp.convert.native import read_weights, write_checkpoint
from megatron_sp.errors import CheckpointError, ConfigError

#: The token that ends documents under GPT2BPETokenizer.
GPT2_END = "<|endoftext|>"
#: Keys of config.json that say which tokens are special.
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Result:
    """What a conversion wrote.

    Attributes:
        path: the directory.
        notes: sentences for the user.
    """

    path: Path
    notes: list[str]


def refuse_used_directory(load: Path, save: Path) -> None:
    """Refuse a ``--save`` that is the source, or that holds checkpoints already.

    Raises:
        CheckpointError: naming the directory.
    """
    if load.resolve() == save.resolve():
        raise CheckpointError(f"--save {save} is the directory that --load names; give a new directory")
    if found := files.iteration_directories(save):
        raise CheckpointError(f"--save {save} holds checkpoints already (iterations {', '.join(map(str, found))}); "
                              "give a new directory")


def model_run(fields: dict[str, Any], source: str, *, data: Data, precision: Precision | None = None) -> Run:
    """Return the configuration of a one-process run with a model of these fields.

    Args:
        fields: values for fields of ``schema.Model``.
        source: file that the fields come from, for messages.

    Raises:
        CheckpointError: the fields contradict each other.
    """
    vocab_size = fields.get("vocab_size", 0)
    run = Run(model=replace(Model(**fields), padded_vocab_size=0), data=data, precision=precision or Precision(),
              parallel=Parallel())
    run = resolve(run, world_size=1)
    missing = [name for name in ("num_layers", "hidden_size", "num_attention_heads") if not getattr(run.model, name)]
    problems = [f"{name} is missing" for name in [*missing, *([] if vocab_size else ["vocab_size"])]]
    problems = problems or check_model(run)
    if problems:
        raise CheckpointError(f"{source} does not describe a model: {'; '.join(problems)}")
    return with_vocab(run, vocab_size)


# --- from Hugging Face --------------------------------------------------------------------------------------------

def hf_to_native(load: Path, save: Path) -> Result:
    """Write the model in a Hugging Face directory as a checkpoint of iteration 0.

    Raises:
        CheckpointError: the model is not supported, files are missing or damaged, or ``save`` cannot be written.
    """
    try:
        config = read_config(load)
    except ValueError as error:
        raise CheckpointError(f"--load: {error}") from None
    fields, problems = model_fields(config)
    if problems:
        raise CheckpointError(f"{load / CONFIG}: {'; '.join(problems)}")
    refuse_used_directory(load, save)
    notes = []
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    precision = Precision(bf16=dtype == "bfloat16", fp16=dtype == "float16")
    data = Data(seq_length=fields.get("max_position_embeddings", 1), tokenizer_type="NullTokenizer")
    if any((load / name).is_file() for name in TOKENIZER_FILES):
        data = replace(data, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(load.resolve()))
    else:
        notes.append(f"{load} holds no tokenizer.")
    run = model_run(fields, str(load / CONFIG), data=data, precision=precision)
    return Result(write_checkpoint(save, 0, weights_of(load, run.model), run, {}), notes)


# --- from Megatron ------------------------------------------------------------------------------------------------

def megatron_to_native(load: Path, save: Path, *, iteration: int | None, qkv_layout: str, flags: list[str]) -> Result:
    """Write the model in a checkpoint of Megatron-LM or Megatron-DeepSpeed as a checkpoint of the same iteration.

    Args:
        iteration: iteration of Megatron's checkpoint; None for the one that its tracker names.
        qkv_layout: one of ``megatron.QKV_LAYOUTS``; "" to find out.
        flags: a command line that sets fields of the model. These replace the values in the checkpoint.

    Raises:
        CheckpointError: the checkpoint is not complete, not supported, or ``save`` cannot be written.
        ConfigError: ``flags`` are not flags of a model.
    """
    parsed = parse(flags)
    if parsed.problems:
        raise ConfigError(parsed.problems)
    given = {field.name: value for field in fields_of(Model)
             if (value := getattr(parsed.run.model, field.name)) != getattr(Model(), field.name)}
    refuse_used_directory(load, save)
    source = open_checkpoint(load, iteration)
    theirs, problems = megatron.model_fields(source)
    problems = [problem for problem in problems if not any(problem.startswith(name) for name in given)]
    if problems:
        raise CheckpointError(f"{source.directory}: {'; '.join(problems)}")
    notes = [f"{flag_name('model', name)} {value} is used; the checkpoint says {theirs[name]}"
             for name, value in given.items() if name in theirs and theirs[name] != value]
    rows = megatron.embedding_rows(source)
    if not given.get("vocab_size"):
        notes.append(f"the embedding keeps all its {rows} rows, with Megatron's padding of the vocabulary. Give "
                     "--vocab-size N to keep only the N tokens of the tokenizer; otherwise train on with --vocab-size "
                     f"{rows}")
    fields = theirs | {"vocab_size": rows} | given
    args, directory = source.args, source.directory
    data, note = _data_of(args)
    notes += [note] if note else []
    run = model_run(fields, f"the flags in {directory}", data=data,
                    precision=Precision(bf16=bool(args.get("bf16")), fp16=bool(args.get("fp16"))))
    if run.model.vocab_size > rows:
        raise CheckpointError(f"--vocab-size {run.model.vocab_size} is more than the {rows} rows of the embedding")
    layout = qkv_layout or megatron.qkv_layout_of(source)
    weights = megatron.weights_of(source, run.model, layout)
    samples = args.get("consumed_train_samples")
    samples = samples if isinstance(samples, int) and samples > 0 else 0
    return Result(write_checkpoint(save, int(source.iteration), weights, run, {
        "consumed_samples": samples, "scheduler_samples": samples}), notes)


def _data_of(args: dict[str, Any]) -> tuple[Data, str]:
    """Return the tokenizer that Megatron's flags name, and a note where its files are not here."""
    length = args.get("seq_length") or args.get("max_position_embeddings")
    data = Data(seq_length=length if isinstance(length, int) else 1, tokenizer_type="NullTokenizer")
    kind = str(args.get("tokenizer_type") or "")
    named: dict[str, Any] = {name: str(args[name]) for name in FIELDS if args.get(name)}
    known = {"GPT2BPETokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"}
    if kind in known and named and all(Path(path).is_file() for path in named.values()):
        return replace(data, tokenizer_type=kind, **named), ""
    return data, (f"the tokenizer ({kind or 'not named'}) was not copied: its files are not here. Give its flags when "
                  "you continue the training")


# --- to Hugging Face ----------------------------------------------------------------------------------------------

def native_to_hf(load: Path, save: Path, *, iteration: int | None, model_type: str, dtype: str, shard_bytes: int,
                 tokenizer: Path | None) -> Result:
    """Write the model of a checkpoint as a Hugging Face directory.

    Args:
        iteration: iteration of the checkpoint; None for the newest.
        model_type: ``model_type`` of the config.json to write; "" for the first family that can express the model.
        dtype: torch name of the type of the written weights; "" for the type that the run computed in.
        shard_bytes: largest size of one file in bytes.
        tokenizer: directory or file of the tokenizer; None for the tokenizer of the run.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged, or its model is one that Hugging Face cannot express.
    """
    found = files.find_checkpoint(load, iteration)
    if found is None:
        raise CheckpointError(f"--load {load} holds no checkpoint ({files.TRACKER} is missing); give the --save "
                              "directory of a training run")
    run = read_part(read_state(found.path), "config", from_dict)
    model = run.model
    try:
        family = choose_family(model, model_type)
    except ValueError as error:
        raise CheckpointError(f"{found.path}: {error}") from None
    data, _ = with_existing_tokenizer(run.data, found.path)
    if tokenizer is not None:
        data = replace(data, tokenizer_model=str(tokenizer), vocab_file="", merge_file="")
    copied, special, notes = _exported_tokenizer(data)
    export(save, family, model, read_weights(found.path), dtype=getattr(torch, dtype or run.precision.dtype),
           shard_bytes=shard_bytes, more_config=special, tokenizer=copied)
    return Result(save, [*found.notes, *notes])


def _exported_tokenizer(data: Data) -> tuple[dict[str, Path | str], dict[str, object], list[str]]:
    """Return the tokenizer's files for transformers, the special tokens as keys of config.json, and notes.

    Returns:
        The files as name -> path to copy, or text to write.
    """
    files_here = copied_names(data)
    special: dict[str, object] = dict.fromkeys(SPECIAL_TOKENS)
    if not files_here:
        named = any(getattr(data, name) for name in FIELDS)
        return {}, special, ["the tokenizer's files are not here, so they are not copied; give them with --tokenizer"
                             ] if named else []
    if data.vocab_file and data.merge_file:      # GPT2BPETokenizer, whose files may have any name
        vocabulary = files.read_json(Path(data.vocab_file))
        end = vocabulary.get(GPT2_END) if isinstance(vocabulary, dict) else None
        special |= {"bos_token_id": end, "eos_token_id": end}
        return {"vocab.json": Path(data.vocab_file), "merges.txt": Path(data.merge_file),
                "tokenizer_config.json": json.dumps({"tokenizer_class": "GPT2Tokenizer"})}, special, []
    if CONFIG in files_here:
        theirs = files.read_json(files_here[CONFIG])
        special |= {key: theirs[key] for key in SPECIAL_TOKENS if isinstance(theirs, dict) and key in theirs}
    if Path(data.tokenizer_model).is_file():
        return {"tokenizer.model": Path(data.tokenizer_model)}, special, [
            f"{data.tokenizer_model} is copied as tokenizer.model; config.json names no special tokens, and "
            "transformers may need further packages to read the file"]
    return {name: path for name, path in files_here.items() if name != CONFIG}, special, []
