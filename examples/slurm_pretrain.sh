#!/usr/bin/env bash
#SBATCH --job-name=pretrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8        # one task for each GPU; add --gpus-per-node=8 where your cluster asks for it
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600        # ten minutes before the time limit this script saves and requeues the job
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out
# Pretrain on a Slurm cluster:   sbatch --nodes 4 examples/slurm_pretrain.sh   (options of sbatch win over those above)
# Submit it in the checkout, or with --chdir CHECKOUT. `srun` starts one process for each task. The job resumes from its
# newest checkpoint whenever it is started again: by you, after a failed node, or when its time is up.
#   SETTINGS         file that sets MODEL, TRAINING, PARALLEL, DATA anew, such as examples/paper_settings.sh (default: none)
#   DATA_PREFIX      token files without .bin and .idx, several with blanks (default: data/corpus_text_document)
#   TOKENIZER_TYPE, TOKENIZER_MODEL  tokenizer    (default: HuggingFaceTokenizer, data/tokenizer)
#   OUTPUT_DIR       checkpoints, metrics and one log for each rank         (default: runs/slurm)
#   SAVE_INTERVAL    steps between two checkpoints                          (default: 100)
#   CONTAINER        image to run in (pyxis); it sees the checkout          (default: none)
#   PYTHON           interpreter                                            (default: .venv/bin/python of the checkout)
#   DRY_RUN=1        print the command of each task and its plan, and do nothing
#   NODES, NPROC, DEVICE  nodes, devices of a node and their name that DRY_RUN=1 plans for (default: 2, 8, H100)
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ ! -f "$ROOT/pretrain_gpt.py" ]; then ROOT=$PWD; fi # Slurm runs a copy of this script, in the job's directory
PYTHON=${PYTHON:-$ROOT/.venv/bin/python} OUTPUT_DIR=${OUTPUT_DIR:-runs/slurm} NODES=${SLURM_NNODES:-${NODES:-}}
read -ra PREFIXES <<<"${DATA_PREFIX:-data/corpus_text_document}"

MODEL=(--model-preset llama3-8b --vocab-size 128256 --bf16)
TRAINING=(--seq-length 131072 --micro-batch-size 1 --global-batch-size 16 --train-iters 1000
    --lr 3e-5 --min-lr 3e-6 --lr-decay-style cosine --lr-warmup-iters 50 --log-interval 1 --log-throughput)
PARALLEL=(--ulysses-size 8 --zero-stage 3 --recompute-granularity full --mlp-tile-size 8192)
DATA=(--data-path "${PREFIXES[@]}" --tokenizer-type "${TOKENIZER_TYPE:-HuggingFaceTokenizer}"
    --tokenizer-model "${TOKENIZER_MODEL:-data/tokenizer}")
if [ -n "${SETTINGS:-}" ]; then source "$(realpath "$SETTINGS")"; fi
OUTPUT=(--save "$OUTPUT_DIR" --load "$OUTPUT_DIR" --save-interval "${SAVE_INTERVAL:-100}")
COMMAND=("$PYTHON" "$ROOT/pretrain_gpt.py" "${MODEL[@]}" "${TRAINING[@]}" "${PARALLEL[@]}" "${DATA[@]}" "${OUTPUT[@]}" "$@")
if [ "${DRY_RUN:-0}" = 1 ]; then
    printf '%q ' "${COMMAND[@]}" && echo
    exec "${COMMAND[@]}" --dry-run --world-size $((${NODES:-2} * ${NPROC:-8})) --device "${DEVICE:-H100}"
fi
mkdir -p "$OUTPUT_DIR/logs"
# All ranks meet at the first node. The port follows from the job's number, so that two jobs on a node do not collide.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000)) OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True} # keeps fragmentation small

time_is_up=0
# The signal goes to the ranks only: they finish their step, save and exit with 0.
trap 'time_is_up=1; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1
srun --kill-on-bad-exit=1 --output="$OUTPUT_DIR/logs/%j-rank%t.log" --open-mode=append \
    ${CONTAINER:+--container-image="$CONTAINER" --container-mounts="$ROOT,$PWD" --container-workdir="$PWD"} "${COMMAND[@]}" &
ranks=$! code=0
wait "$ranks" || code=$?
if [ "$time_is_up" = 1 ]; then code=0; wait "$ranks" || code=$?; fi # the signal ended the first wait, not the ranks
tail -n 3 "$OUTPUT_DIR/logs/$SLURM_JOB_ID-rank0.log" || true
if [ "$time_is_up" = 1 ] && [ "$code" = 0 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
