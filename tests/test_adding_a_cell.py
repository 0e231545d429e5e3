"""docs/adding-a-cell.md, followed to the letter."""

import re
from pathlib import Path

import pytest
import torch

PAGE = (Path(__file__).parents[1] / "docs" / "adding-a-cell.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def follow(upto):
    """Runs the page's blocks one after another, as a reader would."""
    scope = {"__name__": "adding_a_cell"}
    for block in BLOCKS[:upto]:
        exec(compile(block, "docs/adding-a-cell.md", "exec"), scope)
    return scope


def test_the_page_runs_as_pasted():
    assert len(BLOCKS) == 4
    follow(len(BLOCKS))


def test_the_first_block_trains_nothing_but_what_it_says(capsys):
    scope = follow(1)
    printed = capsys.readouterr().out
    for numbers in re.findall(r"\[[\d, ]+\]", BLOCKS[0].split("print(h.shape")[1].split("\n")[0]):
        assert numbers in printed
    assert scope["R"].grad.abs().max() > 0
    assert scope["b"].grad.abs().max() > 0


def test_the_cell_of_the_page_is_what_its_function_says():
    scope = follow(1)
    x, R, b = (scope[name].detach() for name in ("x", "R", "b"))
    h = c = torch.zeros(8, 2, 16)
    for t in range(30):
        keep, write, read = (x[:, t] + torch.einsum("ghij,bhj->bghi", R, h) + b).unbind(1)
        c = keep.sigmoid() * c + (1 - keep.sigmoid()) * write.tanh()
        h = read.sigmoid() * c / (1 + c.abs())
        torch.testing.assert_close(scope["h"][:, t], h, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("body", ["g.write.sum()", "torch.rand_like(g.write)", "g.write.softmax(-1)"])
def test_what_the_page_says_is_refused_is_refused(body):
    block = BLOCKS[0].replace("torch.tanh(g.write)", body)
    assert block != BLOCKS[0]
    with pytest.raises(ValueError, match="cell 'memory': expected"):
        exec(compile(block, "docs/adding-a-cell.md", "exec"), {"__name__": "adding_a_cell"})
