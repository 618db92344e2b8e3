#!/usr/bin/env bash
# Extends the context of a small model step by step, on real text and on a CPU: the model trains on sequences of 256
# tokens, then of 1,024 and of 4,096, each phase on another layout, with YaRN from the second phase on. After each phase
# the perplexity by position is measured on documents that were held out; the last picture shows all of them.
#
#   bash examples/extend_context.sh                  run; run again to go on where it stopped
#   bash examples/extend_context.sh --lr 1e-3 ...    further flags of pretrain_gpt.py, for all phases
#
# Environment variables:
#   OUTPUT_DIR   where everything is written                     (default: runs/extend_context)
#   ITERATIONS   iterations of all phases, a multiple of 10      (default: 200); the last two phases have a fifth each
#   SCALING      yarn, ntk or none: scaling of rotary positions  (default: yarn)
#   DRY_RUN=1    print the training commands, do nothing
#   VENV, PYTHON see tools/make_venv.sh                          (default: .venv, python3)
#
# How: docs/how-to/extend-the-context.md.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
fi
output=${OUTPUT_DIR:-runs/extend_context}
iterations=${ITERATIONS:-200}
scaling=${SCALING:-yarn}
case $output in /*) ;; *) [ -n "${OUTPUT_DIR:-}" ] && output=$PWD/$output ;; esac
case $scaling in yarn | ntk | none) ;; *) echo "SCALING $scaling is not yarn, ntk or none" >&2 && exit 2 ;; esac
case $iterations in '' | *[!0-9]*) echo "ITERATIONS $iterations is not a number" >&2 && exit 2 ;; esac
if [ "$iterations" -lt 10 ] || [ $((iterations % 10)) -ne 0 ]; then
    echo "ITERATIONS $iterations is not a multiple of 10" >&2
    exit 2
fi
cd "$root"

corpus=$output/corpus.jsonl
tokenizer=$output/tokenizer.model
data=$output/train_text_document
held_out=$output/held_out_text_document
checkpoints=$output/checkpoints

say() { printf '\n== %s\n' "$*"; }

if [ "${DRY_RUN:-0}" = 1 ]; then
    python=${VENV:-.venv}/bin/python
else
    say "Environment"
    python=$(bash tools/make_venv.sh requirements.txt)
    "$python" --version
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} CUDA_VISIBLE_DEVICES= # the processes share the cores

# A step has 2 samples of 4096 tokens, or as many tokens in shorter sequences.
step=8192
common=(
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --num-key-value-heads 2
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0
    --seq-length-schedule "0:256" "$((step * (iterations * 6 / 10))):1K" "$((step * (iterations * 8 / 10))):4K"
    --global-batch-size 2 --train-iters "$iterations"
    --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters "$((iterations / 10))"
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$tokenizer" --data-path "$data" --split '100,0,0'
    --eval-iters 0 --log-interval 10
    --save "$checkpoints" --save-interval "$iterations" --load "$checkpoints"
)
# Each phase: its length, the iteration at its end, and its layout on two processes.
lengths=(256 1024 4096)
ends=("$((iterations * 6 / 10))" "$((iterations * 8 / 10))" "$iterations")
layouts=(
    "--micro-batch-size 16"
    "--micro-batch-size 4"
    "--micro-batch-size 1 --ulysses-size 2 --zero-stage 3 --sequence-chunk-size 1024"
)
phase_command() { # phase -> command
    local number=$1
    command=("$python" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2 pretrain_gpt.py
        "${common[@]}" --seq-length-phase "$number")
    # shellcheck disable=SC2206  # the layout is several words
    command+=(${layouts[number - 1]})
    if [ "$scaling" != none ] && [ "$number" -gt 1 ]; then
        command+=(--rope-scaling-type "$scaling" --original-max-position-embeddings 256
            --rotary-scaling-factor $((lengths[number - 1] / 256)))
    fi
}

if [ "${DRY_RUN:-0}" = 1 ]; then
    for number in 1 2 3; do
        phase_command "$number"
        printf '%q ' "${command[@]}" "$@"
        printf '\n'
    done
    exit 0
fi

say "Corpus: the long documents of this interpreter's standard library, every tenth held out"
mkdir -p "$output"
if [ ! -f "$output/held_out.jsonl" ]; then
    [ -f "$corpus" ] || "$python" tools/gather_corpus.py --output "$corpus"
    awk 'NR % 10 != 0' "$corpus" >"$output/train.jsonl"
    awk 'NR % 10 == 0' "$corpus" >"$output/held_out.part"
    mv "$output/held_out.part" "$output/held_out.jsonl"
fi
wc -l "$output/train.jsonl" "$output/held_out.jsonl"

say "Tokenizer and preprocessing"
[ -f "$tokenizer" ] || "$python" tools/train_tokenizer.py --input "$output/train.jsonl" --output "$tokenizer" --vocab-size 4096
for name in train held_out; do
    [ -f "$output/${name}_text_document.idx" ] || "$python" tools/preprocess_data.py --input "$output/$name.jsonl" \
        --output-prefix "$output/$name" --workers 2 --append-eod \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$tokenizer"
done

# A stop by SIGTERM leaves the ranks ten minutes for their step and a save; torchrun's own limit is 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
tracker=$checkpoints/latest_checkpointed_iteration.txt
compare=()
measure() { # result, iteration, further flags: perplexity by position on documents of more than 4,096 tokens
    local result=$1 iteration=$2
    shift 2
    [ -f "$result.json" ] || "$python" tools/evaluate.py --load "$checkpoints" --ckpt-step "$iteration" \
        --data-path "$held_out" --seq-length 4096 --min-length 4097 --sequence-chunk-size 1024 \
        ${compare[@]+--compare "${compare[@]}"} --output "$result.json" "$@"
    compare+=("$result.json")
}
for number in 1 2 3; do
    length=${lengths[number - 1]} end=${ends[number - 1]}
    if [ ! -f "$tracker" ] || [ "$(cat "$tracker")" -lt "$end" ]; then
        say "Phase $number: sequences of $length tokens, until iteration $end"
        phase_command "$number"
        printf '%q ' "${command[@]}" "$@"
        printf '\n'
        "${command[@]}" "$@"
    fi
    say "Perplexity by position after phase $number"
    measure "$output/trained_to_$length" "$end"
    if [ "$number" = 1 ] && [ "$scaling" != none ]; then
        say "The same model with scaled positions, before it has trained with them"
        measure "$output/scaled_without_training" "$end" --rope-scaling-type "$scaling" \
            --original-max-position-embeddings 256
    fi
done

say "Summary"
echo "picture: $output/trained_to_4096.png"
echo "checkpoints: $checkpoints (one for the end of each phase)"
