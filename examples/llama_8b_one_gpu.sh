#!/usr/bin/env bash
# Train a model of Llama-3-8B's shape on sequences of 500,000 tokens on one H100 with 80 GiB.
#
#   bash examples/llama_8b_one_gpu.sh [FLAGS of pretrain_gpt.py]
#
# Master weights, gradients and Adam's states do not fit the GPU, and neither do the inputs of 32 layers, so both stay in
# host memory. Planned with DRY_RUN=1, not measured: 52.0 GiB on the GPU, 363.8 GiB in host memory, 600 s a step.
#
#   SEQ_LENGTH      tokens of a sequence; 256K means 256 x 1024, 1M 1024 x 1024  (default: 500000)
#   ITERATIONS      steps of the whole run                                       (default: 1000)
#   DATA_PREFIX     token files without .bin and .idx, several with blanks       (default: data/corpus_text_document)
#   TOKENIZER_TYPE, TOKENIZER_MODEL  tokenizer    (default: HuggingFaceTokenizer, data/tokenizer)
#   OUTPUT_DIR      checkpoints and metrics; the same command resumes from there (default: runs/llama_8b_one_gpu)
#   SAVE_INTERVAL   steps between two checkpoints                                (default: 10)
#   PYTHON          interpreter                                                  (default: .venv/bin/python of the checkout)
#   DRY_RUN=1       print the command and its plan for DEVICE (default: H100) in a node with 512 GB, and do nothing
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
OUTPUT_DIR=${OUTPUT_DIR:-runs/llama_8b_one_gpu}
SEQ_LENGTH=$(($(sed 's/K$/*1024/; s/M$/*1048576/' <<<"${SEQ_LENGTH:-500000}")))
read -ra PREFIXES <<<"${DATA_PREFIX:-data/corpus_text_document}"

MODEL=(--model-preset llama3-8b --vocab-size 128256 --bf16)
TRAINING=(--seq-length "$SEQ_LENGTH" --micro-batch-size 1 --global-batch-size 1 --train-iters "${ITERATIONS:-1000}"
    --lr 3e-5 --min-lr 3e-6 --lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0.1 --adam-beta2 0.95
    --eval-iters 0 --log-interval 1 --log-throughput)
PARALLEL=(--recompute-granularity full --mlp-tile-size 8192 --attention-head-groups 2 --offload-activations
    --offload-optimizer)
DATA=(--data-path "${PREFIXES[@]}" --tokenizer-type "${TOKENIZER_TYPE:-HuggingFaceTokenizer}"
    --tokenizer-model "${TOKENIZER_MODEL:-data/tokenizer}")
OUTPUT=(--save "$OUTPUT_DIR" --load "$OUTPUT_DIR" --save-interval "${SAVE_INTERVAL:-10}")

FLAGS=("${MODEL[@]}" "${TRAINING[@]}" "${PARALLEL[@]}" "${DATA[@]}" "${OUTPUT[@]}" "$@")
COMMAND=("$PYTHON" "$ROOT/pretrain_gpt.py" "${FLAGS[@]}")
if [ "${DRY_RUN:-0}" = 1 ]; then
    printf '%q ' "${COMMAND[@]}"
    echo
    exec "${COMMAND[@]}" --host-memory 512GB --dry-run --world-size 1 --device "${DEVICE:-H100}"
fi
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True} # keeps fragmentation small
exec "${COMMAND[@]}"
