#!/usr/bin/env bash
# Settings of examples/slurm_pretrain.sh for the baseline of the DeepSpeed-Ulysses paper: the models, batch and GPUs of
# examples/paper_settings.sh with Megatron's sequence parallelism (tensor parallelism and --sequence-parallel):
#
#   SIZE=7b SEQ_LENGTH=256K SETTINGS=examples/megatron_sp_settings.sh sbatch --nodes 4 examples/slurm_pretrain.sh
#
# Tensor parallelism stays inside a node where that fits an A100 with 40 GiB; else it has the smallest size that fits, and
# DEVICE is the first of A100-40, A100-80 and H200 that holds it. Planned with DRY_RUN=1, not measured.
# The environment variables are those of examples/paper_settings.sh.
if [ "${BASH_SOURCE[0]}" = "$0" ]; then # run, not sourced by a launch script
    echo "examples/megatron_sp_settings.sh only sets the flags of another script; use it as SETTINGS:" >&2
    echo "    SETTINGS=examples/megatron_sp_settings.sh sbatch examples/slurm_pretrain.sh" >&2
    echo "    DRY_RUN=1 SETTINGS=examples/megatron_sp_settings.sh bash examples/slurm_pretrain.sh    # print the command and its plan" >&2
    exit 2
fi
set -euo pipefail
given_device=${DEVICE:-}
source "$(dirname "${BASH_SOURCE[0]}")/paper_settings.sh"

TENSOR=8 DEVICE=A100-40
case $SIZE in
1.2b) if [ "$SEQ_LENGTH" -gt 524288 ]; then TENSOR=16; fi ;;
7b)
    if [ "$SEQ_LENGTH" -gt 524288 ]; then
        TENSOR=16 DEVICE=A100-80
    elif [ "$SEQ_LENGTH" -gt 262144 ]; then
        TENSOR=32
    fi
    ;;
30b)
    if [ "$SEQ_LENGTH" -gt 524288 ]; then
        TENSOR=32 DEVICE=H200
    elif [ "$SEQ_LENGTH" -gt 262144 ]; then
        TENSOR=32 DEVICE=A100-80
    elif [ "$SEQ_LENGTH" -gt 131072 ]; then
        TENSOR=32
    fi
    ;;
esac
DEVICE=${given_device:-$DEVICE}
PARALLEL=(--tensor-model-parallel-size "$TENSOR" --sequence-parallel --zero-stage 1 --recompute-granularity full)
