#!/usr/bin/env bash
# The whole main job on real text, with no download of data: gather long documents, train a
# tokenizer, preprocess, pretrain a small Llama-style model on sequences that are split over two
# processes (Ulysses) with sharded model states (ZeRO 3), evaluate, save, sample, draw.
#
#   bash examples/quickstart.sh                  run; run again to go on from the checkpoint
#   bash examples/quickstart.sh --lr 1e-3 ...    further flags of pretrain_gpt.py
#
# Environment variables:
#   OUTPUT_DIR   where everything is written        (default: runs/quickstart)
#   ITERATIONS   iterations to add in this run      (default: 240); a tenth of all, at most 20, warm up
#   SEQ_LENGTH   tokens in one sequence             (default: 2048)
#   NPROC        processes that share one sequence  (default: 2; with GPUs: one per GPU, at most 2)
#   DRY_RUN=1    print the training command, do nothing
#   VENV, PYTHON see tools/make_venv.sh             (default: .venv, python3)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
fi
output=${OUTPUT_DIR:-runs/quickstart}
iterations=${ITERATIONS:-240}
seq_length=${SEQ_LENGTH:-2048}
case $output in /*) ;; *) [ -n "${OUTPUT_DIR:-}" ] && output=$PWD/$output ;; esac
cd "$root"

corpus=$output/corpus.jsonl
tokenizer=$output/tokenizer.model
data=$output/corpus_text_document
checkpoints=$output/checkpoints
metrics=$checkpoints/metrics.jsonl
picture=$output/loss.png
tracker=$checkpoints/latest_checkpointed_iteration.txt

say() { printf '\n== %s\n' "$*"; }

if [ "${DRY_RUN:-0}" = 1 ]; then
    python=${VENV:-.venv}/bin/python
else
    say "Environment"
    python=$(bash tools/make_venv.sh requirements.txt)
    "$python" --version
fi

gpus=0
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
    gpus=$(nvidia-smi -L | grep -c '^GPU')
    if [ "${DRY_RUN:-0}" != 1 ]; then # a driver is no promise that this torch can use it
        gpus=$("$python" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')
    fi
fi
if [ "$gpus" -gt 0 ]; then
    nproc=${NPROC:-$((gpus < 2 ? gpus : 2))}
    precision=(--bf16)
else
    nproc=${NPROC:-2}
    precision=()
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the processes share the cores
fi

done_before=0
if [ -f "$tracker" ]; then
    done_before=$(cat "$tracker")
fi
total=$((done_before + iterations))
interval=$((iterations >= 4 ? iterations / 4 : 1))
warmup=$((total < 200 ? total / 10 : 20)) # the learning rate must have time left to decay

command=(
    "$python" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$nproc" pretrain_gpt.py
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --num-key-value-heads 2
    --seq-length "$seq_length" --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0
    --ulysses-size "$nproc" --zero-stage 3
    --micro-batch-size 1 --global-batch-size 2 --train-iters "$total"
    --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters "$warmup" --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$tokenizer" --data-path "$data" --split '90,8,2'
    --eval-interval "$interval" --eval-iters 8 --log-interval 2
    --save "$checkpoints" --save-interval "$total"
)
if [ "$done_before" -gt 0 ]; then
    # A longer run has a longer decay of the learning rate than the one in the checkpoint.
    command+=(--load "$checkpoints" --override-opt_param-scheduler)
fi
command+=(${precision[@]+"${precision[@]}"} "$@")

if [ "${DRY_RUN:-0}" = 1 ]; then
    printf '%q ' "${command[@]}"
    printf '\n'
    exit 0
fi

say "Corpus: the long documents of this interpreter's standard library"
if [ -f "$corpus" ]; then
    echo "$corpus is there"
else
    "$python" tools/gather_corpus.py --output "$corpus"
fi

say "Tokenizer"
if [ -f "$tokenizer" ]; then
    echo "$tokenizer is there"
else
    "$python" tools/train_tokenizer.py --input "$corpus" --output "$tokenizer" --vocab-size 4096
fi

say "Preprocessing"
if [ -f "$data.idx" ] && [ -f "$data.bin" ]; then
    echo "$data.bin and .idx are there"
else
    "$python" tools/preprocess_data.py --input "$corpus" --output-prefix "$output/corpus" --workers 2 --append-eod \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$tokenizer"
fi
"$python" tools/data_statistics.py "$data" | tee "$output/statistics.txt"
entropy=$("$python" tools/data_statistics.py --json "$data" 2>/dev/null |
    "$python" -c 'import json, sys; print(json.load(sys.stdin)["unigram_entropy"])')

# A stop by SIGTERM leaves the ranks ten minutes for their step and a save; torchrun's own limit is 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
say "Training: iterations $((done_before + 1)) to $total on $nproc processes"
printf '%q ' "${command[@]}"
printf '\n'
"${command[@]}"

say "Sample"
"$python" tools/generate_text.py --load "$checkpoints" --prompt 'def ' --max-new-tokens 120 \
    --temperature 0.8 --top-p 0.95 --seed 1

say "Summary"
"$python" tools/plot_run.py "quickstart=$metrics" --output "$picture" \
    --reference "unigram entropy of the data=$entropy"
echo "metrics: $metrics"
echo "checkpoint: $checkpoints (iteration $(cat "$tracker"))"
echo "continue with: ${OUTPUT_DIR:+OUTPUT_DIR=$OUTPUT_DIR }bash examples/quickstart.sh"
