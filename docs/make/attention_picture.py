#!/usr/bin/env python3
"""Draw docs/images/attention.png: four patterns of sparse attention beside each other.

    python docs/make/attention_picture.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools import plot_attention  # noqa: E402

FLAGS = ("--seq-length 2048 --attention-block-size 64 --attention-local-blocks 4 --attention-stride 6 "
         "--attention-pattern-per-layer longformer bigbird fixed strided")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", nargs="?", type=Path, default=ROOT / "docs/images/attention.png",
                        help="default: docs/images/attention.png")
    run, _ = plot_attention.read_run(FLAGS.split())
    plot_attention.plot(list(plot_attention.drawings(run)), parser.parse_args().output)
