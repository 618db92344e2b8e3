#!/usr/bin/env bash
# The convergence study of the DeepSpeed-Ulysses paper (arXiv 2309.14509, section 4.5): training with Ulysses 4 and ZeRO
# stages 1, 2 and 3 has the loss curve of training without. One figure shows all curves; they coincide.
#
#   bash examples/convergence_study.sh            reduced: a 1M-parameter model on sequences of 512 tokens, on a CPU
#   SIZE=paper bash examples/convergence_study.sh the paper's: GPT 1.3B on sequences of 32,768 tokens, on 8 GPUs
#
#   SIZE        reduced or paper                                    (default: reduced)
#   ITERATIONS  steps of each reduced run                           (default: 60)
#   DATA_PREFIX, TOKENIZER_MODEL  token files and SentencePiece model (default: the quickstart's; run it first)
#   OUTPUT_DIR  runs and figure  (default: runs/convergence)        DRY_RUN=1  print the commands and do nothing
#   PYTHON      interpreter      (default: .venv/bin/python of the checkout)
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
OUTPUT_DIR=${OUTPUT_DIR:-runs/convergence}
SIZE=${SIZE:-reduced}

if [ "$SIZE" = paper ]; then
    RANKS=8
    MODEL=(--model-preset gpt3-1.3b --max-position-embeddings 32768 --bf16 --recompute-granularity full)
    TRAINING=(--seq-length 32768 --global-batch-size 16 --train-iters 1000 --lr 2e-4 --min-lr 2e-5 --lr-warmup-iters 100)
else
    RANKS=4
    MODEL=(--num-layers 4 --hidden-size 128 --num-attention-heads 8)
    TRAINING=(--seq-length 512 --global-batch-size 4 --train-iters "${ITERATIONS:-60}" --lr 1e-3 --lr-warmup-fraction 0.1)
fi
TRAINING+=(--lr-decay-style cosine --attention-dropout 0 --hidden-dropout 0 --log-interval 1 --eval-iters 0 --seed 42)
DATA=(--data-path "${DATA_PREFIX:-$ROOT/runs/quickstart/corpus_text_document}" --tokenizer-type SentencePieceTokenizer
    --tokenizer-model "${TOKENIZER_MODEL:-$ROOT/runs/quickstart/tokenizer.model}")

# Name of the curve, number of processes, flags of the layout.
train() {
    local name=$1 processes=$2
    shift 2
    local command=("$PYTHON" "$ROOT/pretrain_gpt.py")
    if [ "$processes" -gt 1 ]; then
        command=("$PYTHON" -m torch.distributed.run --standalone --local-addr 127.0.0.1
            --nproc-per-node "$processes" "$ROOT/pretrain_gpt.py")
    fi
    command+=("${MODEL[@]}" "${TRAINING[@]}" "${DATA[@]}" "$@" --save "$OUTPUT_DIR/$name" --save-interval 1000000)
    if [ "${DRY_RUN:-0}" = 1 ]; then printf '%q ' "${command[@]}" && echo && return; fi
    echo "== $name"
    RUNS+=("$OUTPUT_DIR/$name")
    "${command[@]}" | awk '/iteration +[0-9]+\// { step = $0; sub(/^[^|]*iteration +/, "", step); if (step % 10 == 1) print; fflush() }'
}
RUNS=()
if [ "${DRY_RUN:-0}" != 1 ] && [ ! -f "${DATA[1]}.idx" ]; then
    echo "no token files ${DATA[1]}: run examples/quickstart.sh first, or name yours with DATA_PREFIX and TOKENIZER_MODEL" >&2
    exit 2
elif [ "${DRY_RUN:-0}" != 1 ] && [ -e "$OUTPUT_DIR" ]; then
    echo "OUTPUT_DIR=$OUTPUT_DIR exists: remove it, or choose another for a new study" >&2
    exit 2
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [ "$SIZE" = reduced ]; then train one-process 1; else train no-ulysses-zero1 "$RANKS" --zero-stage 1; fi
for stage in 1 2 3; do train "ulysses4-zero$stage" "$RANKS" --ulysses-size 4 --zero-stage "$stage"; done
if [ "${DRY_RUN:-0}" = 1 ]; then exit 0; fi
"$PYTHON" "$ROOT/tools/plot_run.py" --compare "${RUNS[@]}" --output "$OUTPUT_DIR/convergence.png"
