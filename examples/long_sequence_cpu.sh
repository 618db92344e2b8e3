#!/usr/bin/env bash
# One training step on a dense sequence of 65,536 tokens, on a CPU, in little memory: the logits alone
# would take 8 GiB a copy. Prints the step's time and the peak resident memory of each process, beside
# what a process needs to start.
#
#   bash examples/long_sequence_cpu.sh                    one process, about 10 minutes on two free cores
#   bash examples/long_sequence_cpu.sh --ulysses-size 2   two processes share the sequence
#   bash examples/long_sequence_cpu.sh FLAGS ...          further flags of pretrain_gpt.py
#
# Environment variables:
#   SEQ_LENGTH    tokens                            (default: 65536)
#   OUTPUT_DIR    where the figures are written     (default: runs/long_sequence)
#   DRY_RUN=1     print the training command, do nothing
#   VENV, PYTHON  see tools/make_venv.sh            (default: .venv, python3)
#
# Memory (docs/background/memory.md): the loss and the feed-forward layer go through the tokens in tiles, attention goes
# through its heads in two groups, and each layer keeps only its inputs. The C library is told to give
# large blocks back at once (MALLOC_MMAP_THRESHOLD_): otherwise freed blocks below 32 MiB stay resident.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
fi
output=${OUTPUT_DIR:-runs/long_sequence}
case $output in /*) ;; *) [ -n "${OUTPUT_DIR:-}" ] && output=$PWD/$output ;; esac
seq_length=${SEQ_LENGTH:-65536}

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

common=(--num-layers 4 --num-attention-heads 8 --group-query-attention --num-query-groups 2
    --swiglu --normalization RMSNorm --position-embedding-type rope
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 --eval-iters 0 --log-interval 1 --mock-data)
memory=(--recompute-granularity full --mlp-tile-size 2048 --attention-head-groups 2)
[ "$nproc" -gt 1 ] && memory+=(--zero-stage 3)
large=(--hidden-size 256 --ffn-hidden-size 688 --vocab-size 32000 --seq-length "$seq_length")
tiny=(--hidden-size 64 --ffn-hidden-size 64 --vocab-size 128 --seq-length $((64 * nproc)))

launch=("$python")
[ "$nproc" -gt 1 ] && launch+=(-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$nproc")
train=("${launch[@]}" pretrain_gpt.py "${common[@]}" "${memory[@]}")

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
above = [(b - a) / 2**30 for a, b in zip(start, step)]
print(f"{int(tokens):,} tokens, {number} process(es): peak {max(step) / 2**30:.2f} GiB, above start-up "
      + ", ".join(f"{value:.2f} GiB" for value in above))
PYTHON
