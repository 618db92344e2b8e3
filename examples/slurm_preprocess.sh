#!/usr/bin/env bash
#SBATCH --job-name=preprocess
#SBATCH --array=0-7                # tasks; each tokenizes its share of the input into token files of its own
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --time=12:00:00
#SBATCH --output=slurm-%x-%A_%a.out
# Tokenize a corpus with a Slurm job array:
#
#   INPUT='corpus/*.jsonl' OUTPUT_PREFIX=data/corpus sbatch --array=0-31 examples/slurm_preprocess.sh [FLAGS]
#
# FLAGS are those of tools/preprocess_data.py. Submit it in the checkout, or with --chdir CHECKOUT.
#
#     corpus/a.jsonl  first half    task 0  ->  data/corpus_00000-of-00003_text_document.bin, .idx
#                     second half   task 1  ->  data/corpus_00001-of-00003_text_document.bin, .idx
#     corpus/b.jsonl                task 2  ->  data/corpus_00002-of-00003_text_document.bin, .idx
#
# Join the token files, or give all of them to the training, which reads each in proportion to its size:
#
#   python tools/merge_datasets.py --input 'data/corpus_*_text_document.idx' --output-prefix data/corpus_text_document
#   DATA_PREFIX=$(ls data/corpus_*-of-*.idx | sed 's/\.idx$//' | xargs) sbatch examples/slurm_pretrain.sh
#
# A task that was killed, or that runs again, continues where it stopped (--resume).
#
#   INPUT            file, directory or pattern                               (default: data/*.jsonl)
#   OUTPUT_PREFIX    start of the names of the token files                    (default: data/corpus)
#   TOKENIZER_TYPE, TOKENIZER_MODEL  tokenizer    (default: HuggingFaceTokenizer, data/tokenizer)
#   SHARDS           number of shares; give it when you repeat single tasks, as in SHARDS=32 sbatch --array=3,7
#                                                                             (default: the number of tasks)
#   PYTHON           interpreter                                              (default: .venv/bin/python of the checkout)
#   DRY_RUN=1        print the command and do nothing
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ ! -f "$ROOT/pretrain_gpt.py" ]; then ROOT=$PWD; fi # Slurm runs a copy of this script, in the job's directory
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
TASK=${SLURM_ARRAY_TASK_ID:-0} TASKS=${SLURM_ARRAY_TASK_COUNT:-1} LAST=${SLURM_ARRAY_TASK_MAX:-0}
if [ -z "${SHARDS:-}" ] && [ "$TASKS" != $((LAST + 1)) ]; then
    echo "these $TASKS tasks are not 0 to $LAST: say with SHARDS=N over how many shares the input is spread" >&2
    exit 2
fi
SHARDS=${SHARDS:-$TASKS}

if [ "$TASK" -ge "$SHARDS" ]; then
    echo "no share for task $TASK of $SHARDS: tasks are numbered from 0; start them with --array=0-$((SHARDS - 1))" >&2
    exit 2
fi

DATA=(--input "${INPUT:-data/*.jsonl}" --shard "$TASK/$SHARDS" --resume
    --tokenizer-type "${TOKENIZER_TYPE:-HuggingFaceTokenizer}" --tokenizer-model "${TOKENIZER_MODEL:-data/tokenizer}"
    --append-eod)
OUTPUT=(--output-prefix "${OUTPUT_PREFIX:-data/corpus}" --workers "${SLURM_CPUS_PER_TASK:-0}")
COMMAND=("$PYTHON" "$ROOT/tools/preprocess_data.py" "${DATA[@]}" "${OUTPUT[@]}" "$@")
if [ "${DRY_RUN:-0}" = 1 ]; then
    printf '%q ' "${COMMAND[@]}" && echo
    exit 0
fi
exec "${COMMAND[@]}"
