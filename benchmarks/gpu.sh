#!/usr/bin/env bash
# Everything that only a GPU can measure, in at most 10 minutes on one large GPU: first tests/gpu as a smoke test, then
# speed beside transformers and torchtitan, a profile, planned beside measured memory, and the longest sequence with each
# technique. Results in benchmarks/results/gpu.json and gpu.md. Without a GPU a dry run at toy size.
#
#   bash benchmarks/gpu.sh [flags of benchmarks/gpu/measure.py, for example --memory 79 --layers 8 --parts speed]
#
#   NPROC        processes, one for each GPU                                    (default: 1)
#   LIMIT        seconds for all of it                                          (default: 600)
#   PYTHON_GPU   interpreter; the smoke test needs pytest in it                 (default: tools/make_venv.sh makes one)
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
LIMIT=${LIMIT:-600}
python=${PYTHON_GPU:-$(bash tools/make_venv.sh requirements.txt)}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
SECONDS=0 # the interpreter's environment is not part of the limit

smoke="not run: no GPU is visible (nvidia-smi)"
if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null; then
    smoke="not run: pytest is not installed"
    if "$python" -c "import pytest, pytest_timeout" 2>/dev/null; then
        smoke="passed"
        timeout --signal=INT --kill-after=10 240 "$python" -m pytest -q -p no:cacheprovider -o addopts= tests/gpu \
            || smoke="FAILED, exit status $?"
    fi
fi
start=("$python")
if [ "${NPROC:-1}" -gt 1 ]; then
    start=("$python" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$NPROC")
fi
left=$((LIMIT - SECONDS))
timeout --signal=INT --kill-after=10 "$left" "${start[@]}" benchmarks/gpu/measure.py --seconds $((left - 20)) --smoke "$smoke" "$@"
