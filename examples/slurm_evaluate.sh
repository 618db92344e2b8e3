#!/usr/bin/env bash
#SBATCH --job-name=evaluate
#SBATCH --ntasks=1                 # one process on one GPU; add --gpus=1 where your cluster asks for it
#SBATCH --time=02:00:00
#SBATCH --output=slurm-%x-%j.out
# Measure the perplexity of a trained model by document and by position, which shows whether it uses long context:
#
#   OUTPUT_DIR=runs/slurm DATA_PREFIX=data/held_out_text_document sbatch examples/slurm_evaluate.sh [FLAGS]
#
# FLAGS are those of tools/evaluate.py. The model must fit one device, whatever layout it was trained in. Submit it in the
# checkout, or with --chdir CHECKOUT; without Slurm start it with bash.
#
#   OUTPUT_DIR       the training's directory; the results are evaluation.json and .png in it  (default: runs/slurm)
#   DATA_PREFIX      token files of documents that the training did not read, without .bin and .idx
#                                                                   (default: data/held_out_text_document)
#   SEQ_LENGTH       tokens of a document that are read; 256K means 256 x 1024       (default: as in the training)
#   PYTHON           interpreter                                     (default: .venv/bin/python of the checkout)
#   DRY_RUN=1        print the command and do nothing
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ ! -f "$ROOT/pretrain_gpt.py" ]; then ROOT=$PWD; fi # Slurm runs a copy of this script, in the job's directory
PYTHON=${PYTHON:-$ROOT/.venv/bin/python} OUTPUT_DIR=${OUTPUT_DIR:-runs/slurm}

MODEL=(--load "$OUTPUT_DIR")
DATA=(--data-path "${DATA_PREFIX:-data/held_out_text_document}")
if [ -n "${SEQ_LENGTH:-}" ]; then
    DATA+=(--seq-length $(($(sed 's/K$/*1024/; s/M$/*1048576/' <<<"$SEQ_LENGTH"))))
fi
OUTPUT=(--output "$OUTPUT_DIR/evaluation.json")
COMMAND=("$PYTHON" "$ROOT/tools/evaluate.py" "${MODEL[@]}" "${DATA[@]}" "${OUTPUT[@]}" "$@")
if [ "${DRY_RUN:-0}" = 1 ]; then
    printf '%q ' "${COMMAND[@]}" && echo
    exit 0
fi
exec "${COMMAND[@]}"
