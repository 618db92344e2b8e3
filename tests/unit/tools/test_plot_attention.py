"""Patterns as drawn: what is seen, and which patterns of a run are drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_sp.errors import ConfigError
from megatron_sp.proof.reference_masks import visible_keys
from tests.integration.programs import run_tool
from tools import plot_attention


@pytest.mark.parametrize("flags", ["--attention-pattern bigbird", "--attention-pattern strided", "--window-size 7", ""])
def test_with_a_token_in_each_cell_it_is_the_mask(flags: str) -> None:
    run, _ = plot_attention.read_run(f"--seq-length 50 --attention-block-size 4 {flags}".split())
    (one,) = plot_attention.drawings(run)
    visible = visible_keys(run.model, 0, 50)
    causal = np.tri(50, dtype=bool)
    assert one.step == 1 and (one.seen == (causal if visible is None else causal & visible[0].numpy())).all()


def test_a_cell_of_many_tokens_is_the_share_of_its_keys() -> None:
    run, _ = plot_attention.read_run("--seq-length 3000 --attention-block-size 5 --attention-pattern fixed".split())
    (one,) = plot_attention.drawings(run)
    assert one.step == 6 and one.seen.shape == (500, 500)
    visible = visible_keys(run.model, 0, 3000)
    assert visible is not None
    rows = visible[0].tril()[5::6].double().unflatten(1, (500, 6)).mean(2).numpy()
    earlier = np.tri(500, k=-1, dtype=bool)
    np.testing.assert_allclose(one.seen[earlier], rows[earlier])


def test_each_pattern_is_drawn_once() -> None:
    words = ("--seq-length 64 --attention-block-size 4 --attention-blocks-by-head --num-layers 8 "
             "--attention-pattern-per-layer fixed causal fixed bigbird")
    run, _ = plot_attention.read_run(words.split())
    titles = [one.title.partition(":")[0] for one in plot_attention.drawings(run)]
    assert titles == [*(f"fixed, layer 0, head {head}" for head in range(4)), "causal, layer 1",
                      *(f"bigbird, layer 3, head {head}" for head in range(4))]


def test_wrong_flags() -> None:
    with pytest.raises(ConfigError) as error:
        plot_attention.read_run("--attention-pattern nothing --no-such-flag".split(), Path("p.jpg"))
    assert len(error.value.problems) == 4 and "--seq-length N" in str(error.value) and "end in .png" in str(error.value)
    with pytest.raises(ConfigError) as error:
        plot_attention.read_run("--seq-length 0".split())
    assert error.value.problems == ["--seq-length 0: must be at least 1."]


def test_the_program(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    flags = "--attention-pattern longformer --attention-block-size 16 --seq-length 128".split()
    done = run_tool("plot_attention.py", *flags, "--output", tmp_path / "p.png")
    assert done.returncode == 0 and (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert done.stdout.startswith("longformer: 81.2% of causal attention\n#\n# #\n# # #\n# # # #\n# # # # #\n"
                                  "# . # # # #\n")
