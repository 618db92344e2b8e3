#!/usr/bin/env bash
# One training step on a sequence of 1,000,448 tokens, on a CPU, within a sliding window of 512 tokens. The sequence goes
# through the model in chunks, and keys that no later chunk sees are dropped, so memory hardly grows with the length.
# Prints the loss, the step's time and the peak resident memory of each process, beside what a process needs to start.
#
#   bash examples/million_tokens_cpu.sh                    one process
#   bash examples/million_tokens_cpu.sh --ulysses-size 2   two processes share the sequence; the loss is the same
#   bash examples/million_tokens_cpu.sh FLAGS ...          further flags of pretrain_gpt.py
#
# Environment variables:
#   SEQ_LENGTH    tokens, a multiple of 1024        (default: 1000448)
#   OUTPUT_DIR    where the figures are written     (default: runs/million_tokens)
#   DRY_RUN=1     print the training command, do nothing
#   VENV, PYTHON  see tools/make_venv.sh            (default: .venv, python3)
#
# How: docs/background/sliding-window.md. The C library is told to give large blocks back at once
# (MALLOC_MMAP_THRESHOLD_): otherwise freed blocks below 32 MiB stay resident.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
fi
output=${OUTPUT_DIR:-runs/million_tokens}
case $output in /*) ;; *) [ -n "${OUTPUT_DIR:-}" ] && output=$PWD/$output ;; esac
seq_length=${SEQ_LENGTH:-1000448}

nproc=1
previous=
for word in "$@"; do
    case $previous in --ulysses-size | --ds-sequence-parallel-size) nproc=$word ;; esac
    case $word in --ulysses-size=*) nproc=${word#*=} ;; esac
    previous=$word
done

cd "$root"
if [ "${DRY_RUN:-0}" = 1 ]; then
    python=${VENV:-.venv}/bin/python
else
    python=$(bash tools/make_venv.sh requirements.txt)
fi
cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores / nproc > 0 ? cores / nproc : 1))}
export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-1048576} MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-1048576}
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive} CUDA_VISIBLE_DEVICES=  # threads that wait do not burn a shared core

common=(--num-layers 2 --num-attention-heads 4
    --swiglu --normalization RMSNorm --position-embedding-type rope
    --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 --eval-iters 0 --log-interval 1 --mock-data)
large=(--hidden-size 128 --ffn-hidden-size 344 --vocab-size 8192 --seq-length "$seq_length" --window-size 512
    --sequence-chunk-size 1024)
tiny=(--hidden-size 64 --ffn-hidden-size 64 --vocab-size 128 --seq-length $((64 * nproc)))

launch=("$python")
[ "$nproc" -gt 1 ] && launch+=(-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$nproc")
train=("${launch[@]}" pretrain_gpt.py "${common[@]}")
if [ "${DRY_RUN:-0}" = 1 ]; then
    printf '%s ' "${train[@]}" "${large[@]}" "$@"
    printf '\n'
    exit 0
fi
echo "== what $nproc process(es) need to start (the same program with next to no model)"
mkdir -p "$output"
"$python" tools/peak_memory.py --json "$output/start_$nproc.json" -- "${train[@]}" "${tiny[@]}" "$@" >"$output/start.log" 2>&1 ||
    { cat "$output/start.log"; exit 1; }
tail -1 "$output/start.log"
echo "== one step on $seq_length tokens (load: $(cut -d' ' -f1-3 /proc/loadavg), $cores cores)"
"$python" tools/peak_memory.py --json "$output/step_$nproc.json" -- "${train[@]}" "${large[@]}" "$@" |
    grep -E "iteration +1/|peak resident|Error" || exit 1
"$python" - "$output" "$nproc" "$seq_length" <<'PYTHON'
import json, sys
directory, number, tokens = sys.argv[1:]
start, step = (json.load(open(f"{directory}/{name}_{number}.json"))["peaks"] for name in ("start", "step"))
above = [(b - a) / 2**20 for a, b in zip(start, step)]
print(f"{int(tokens):,} tokens, {number} process(es): peak {max(step) / 2**20:.0f} MiB, above start-up "
      + ", ".join(f"{value:.0f} MiB" for value in above))
PYTHON
