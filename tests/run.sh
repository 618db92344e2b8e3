#!/usr/bin/env bash
# Lint, types and tests, ending in pytest's summary. Makes the environment if it is missing.
#
#   bash tests/run.sh                        everything but the slow tests: what CI runs
#   bash tests/run.sh all                    also the slow ones
#   bash tests/run.sh unit                   one part: unit, distributed, parity, integration, faults, cluster or gpu
#   bash tests/run.sh parity-all             300 random layouts against one process; LAYOUTS=n SEED=n choose others
#   bash tests/run.sh tests/unit/test_x.py -k name    any paths and options of pytest
#
# Whole parts run in two workers, each with its own files, because most tests keep one core busy (WORKERS=n: in n).
# VENV and PYTHON choose the environment, TORCH=2.11.0 the oldest supported torch, with which types are not checked
# (see tools/make_venv.sh). The exit status is 0 when lint, types and tests all pass; the tests run also when lint or
# types fail.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
export OMP_NUM_THREADS=1

arguments=()
# In the order of the directories: the small files of tests/unit come last, so that both workers end at about the same time.
workers=(-n "${WORKERS:-2}" --dist loadfile --no-loadscope-reorder)
slow=(-m "not slow")
for word in "$@"; do
    case $word in
        all) slow=() ;;
        unit | distributed | parity | integration | faults | cluster | gpu) arguments+=("tests/$word") ;;
        parity-all) workers=() && arguments+=(tests/parity/test_matrix.py --long "${LAYOUTS:-300}" --long-seed "${SEED:-1}") ;;
        -h | --help) sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) workers=() && arguments+=("$word") ;;
    esac
done

python=$(bash tools/make_venv.sh requirements-dev.txt)
failed=0
echo "== ruff"
"$python" -m ruff check . || failed=1
if [ -z "${TORCH:-}" ]; then
    echo "== mypy"
    "$python" -m mypy || failed=1
fi
echo "== pytest ${arguments[*]-}"
"$python" -m pytest ${workers[@]+"${workers[@]}"} ${slow[@]+"${slow[@]}"} ${arguments[@]+"${arguments[@]}"} || failed=$?
exit "$failed"
