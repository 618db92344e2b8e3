#!/usr/bin/env bash
# Longest sequence and MFU of one large GPU for 1.2B- and 8B-shaped layers with each memory technique:
# at most 10 minutes; results in benchmarks/results/gpu.json and gpu.md. Without a GPU a dry run at toy size.
#
#   bash benchmarks/gpu.sh [flags of benchmarks/gpu.py, for example --memory 79 --layers 8]
#
# Environment variables: PYTHON_GPU, the interpreter to use (default: tools/make_venv.sh makes one).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON_GPU:-$(bash tools/make_venv.sh requirements.txt)}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
timeout --signal=INT --kill-after=10 600 "$python" benchmarks/gpu.py "$@"
