#!/usr/bin/env bash
# Settings of examples/slurm_pretrain.sh for the models of the DeepSpeed-Ulysses paper (arXiv 2309.14509), dense attention:
#
#   SIZE=1.2b SEQ_LENGTH=1M   SETTINGS=examples/paper_settings.sh sbatch --nodes 8 examples/slurm_pretrain.sh
#   SIZE=7b   SEQ_LENGTH=256K SETTINGS=examples/paper_settings.sh sbatch --nodes 4 examples/slurm_pretrain.sh
#   SIZE=30b  SEQ_LENGTH=128K SETTINGS=examples/paper_settings.sh sbatch --nodes 8 examples/slurm_pretrain.sh
#
# The numbers of GPUs are the paper's: 64, 32 and 64, in nodes of 8. Fewer --nodes give its strong scaling. The paper does
# not name heads, batch and vocabulary; here they are GPT-3's heads, 8 sequences and GPT-2's vocabulary. Rotary positions
# replace learned ones, because a table of a million positions would have more weights than the model.
# Every length from 32K to 1M fits an A100 with 40 GiB: planned with DRY_RUN=1, not measured.
#
#   SIZE        1.2b, 7b or 30b                                                (default: 1.2b)
#   SEQ_LENGTH  tokens of a sequence; 256K means 256 x 1024, 1M 1024 x 1024    (default: 32K)
#   ITERATIONS  steps of the whole run                                         (default: 1000)
#   NODES       nodes that DRY_RUN=1 plans for; in a job Slurm's number counts (default: 8 for 1.2b, 4 for 7b, 8 for 30b)
#   DEVICE      device that DRY_RUN=1 plans for                                (default: A100-40)
if [ "${BASH_SOURCE[0]}" = "$0" ]; then # run, not sourced by a launch script
    echo "examples/paper_settings.sh only sets the flags of another script; use it as SETTINGS:" >&2
    echo "    SETTINGS=examples/paper_settings.sh sbatch examples/slurm_pretrain.sh" >&2
    echo "    DRY_RUN=1 SETTINGS=examples/paper_settings.sh bash examples/slurm_pretrain.sh    # print the command and its plan" >&2
    exit 2
fi
set -euo pipefail
SIZE=${SIZE:-1.2b}
SEQ_LENGTH=$(($(sed 's/K$/*1024/; s/M$/*1048576/' <<<"${SEQ_LENGTH:-32K}")))
DEVICE=${DEVICE:-A100-40}

# Ulysses stays inside a node. Where 8 GPUs are too few for a sequence, a ring joins the nodes of the default number.
RING=1
case $SIZE in
1.2b) PRESET=gpt3-1.3b NODES=${NODES:-8} LR=2e-4 ;;
7b)
    PRESET=gpt3-6.7b NODES=${NODES:-4} LR=1.2e-4
    if [ "$SEQ_LENGTH" -gt 524288 ]; then RING=4; fi
    ;;
30b)
    PRESET=gpt-30b NODES=${NODES:-8} LR=1e-4
    if [ "$SEQ_LENGTH" -gt 131072 ]; then RING=8; fi
    ;;
*)
    echo "SIZE=$SIZE is not one of 1.2b, 7b, 30b" >&2
    exit 2
    ;;
esac

MODEL=(--model-preset "$PRESET" --position-embedding-type rope --vocab-size 50257 --bf16
    --attention-dropout 0 --hidden-dropout 0)
TRAINING=(--seq-length "$SEQ_LENGTH" --micro-batch-size 1 --global-batch-size 8 --train-iters "${ITERATIONS:-1000}"
    --lr "$LR" --min-lr 1e-6 --lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0.1 --adam-beta2 0.95
    --eval-iters 0 --log-interval 1 --log-throughput)
PARALLEL=(--ulysses-size 8 --ring-size "$RING" --zero-stage 3 --recompute-granularity full)
