#!/usr/bin/env bash
# Train a model of Llama-3-8B's shape on sequences of 512K tokens on one node of 8 GPUs with 80 GiB, started by torchrun.
#
#   bash examples/llama_8b_one_node.sh [FLAGS of pretrain_gpt.py]
#
# Ulysses divides each sequence over the GPUs of the node. Planned with DRY_RUN=1, not measured: 51.4 GiB on each H100,
# 322 s a step of 4 sequences.
#
#   SEQ_LENGTH      tokens of a sequence; 256K means 256 x 1024, 1M 1024 x 1024  (default: 512K)
#   ITERATIONS      steps of the whole run                                       (default: 1000)
#   DATA_PREFIX     token files without .bin and .idx, several with blanks       (default: data/corpus_text_document)
#   TOKENIZER_TYPE, TOKENIZER_MODEL  tokenizer    (default: HuggingFaceTokenizer, data/tokenizer)
#   OUTPUT_DIR      checkpoints and metrics; the same command resumes from there (default: runs/llama_8b_one_node)
#   SAVE_INTERVAL   steps between two checkpoints                                (default: 50)
#   NPROC           processes, one for each GPU                                  (default: 8)
#   PYTHON          interpreter                                                  (default: .venv/bin/python of the checkout)
#   DRY_RUN=1       print the command and its plan for DEVICE (default: H100), and do nothing
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
OUTPUT_DIR=${OUTPUT_DIR:-runs/llama_8b_one_node}
NPROC=${NPROC:-8}
SEQ_LENGTH=$(($(sed 's/K$/*1024/; s/M$/*1048576/' <<<"${SEQ_LENGTH:-512K}")))
read -ra PREFIXES <<<"${DATA_PREFIX:-data/corpus_text_document}"

MODEL=(--model-preset llama3-8b --vocab-size 128256 --bf16)
TRAINING=(--seq-length "$SEQ_LENGTH" --micro-batch-size 1 --global-batch-size 4 --train-iters "${ITERATIONS:-1000}"
    --lr 3e-5 --min-lr 3e-6 --lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0.1 --adam-beta2 0.95
    --eval-iters 0 --log-interval 1 --log-throughput)
PARALLEL=(--ulysses-size "$NPROC" --zero-stage 3 --recompute-granularity full)
DATA=(--data-path "${PREFIXES[@]}" --tokenizer-type "${TOKENIZER_TYPE:-HuggingFaceTokenizer}"
    --tokenizer-model "${TOKENIZER_MODEL:-data/tokenizer}")
OUTPUT=(--save "$OUTPUT_DIR" --load "$OUTPUT_DIR" --save-interval "${SAVE_INTERVAL:-50}")

FLAGS=("${MODEL[@]}" "${TRAINING[@]}" "${PARALLEL[@]}" "${DATA[@]}" "${OUTPUT[@]}" "$@")
# When torchrun is stopped, the ranks get 15 minutes to finish their step and save; torchrun's default is 30 seconds.
COMMAND=("$PYTHON" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$NPROC"
    --shutdown-timeout 900 "$ROOT/pretrain_gpt.py" "${FLAGS[@]}")
if [ "${DRY_RUN:-0}" = 1 ]; then
    printf '%q ' "${COMMAND[@]}"
    echo
    exec "$PYTHON" "$ROOT/pretrain_gpt.py" "${FLAGS[@]}" --dry-run --world-size "$NPROC" --device "${DEVICE:-H100}"
fi
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True} # keeps fragmentation small
exec "${COMMAND[@]}"
