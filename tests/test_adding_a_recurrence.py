"""docs/adding-a-recurrence.md, followed to the letter on a copy of the package."""

from followed_page import followed, run

TRIAL = """
from itertools import takewhile
import torch, holdfast
from holdfast.ops.verify import verify
from holdfast.recurrences import RECURRENCES
# doctor's tests verify the others
for name in set(RECURRENCES) - {"hgrn2"}:
    del RECURRENCES[name]
verdicts = list(takewhile(lambda v: v.op == "hgrn2", verify(torch.device("cpu"))))
assert {v.backend for v in verdicts if v.status == "right"} == {"chunked", "reference"}, verdicts
assert not any(v.status == "wrong" for v in verdicts), verdicts
q, v, g = torch.randn(1, 5, 2, 3), torch.randn(1, 5, 2, 4), -torch.rand(1, 5, 2, 3)
o, _ = holdfast.hgrn2(q, v, g)
S = torch.zeros(2, 3, 4)
for t in range(5):
    f = g[0, t].exp()[..., None]
    S = f * S + (1 - f) * v[0, t][:, None]
    torch.testing.assert_close(o[0, t], torch.einsum("hkv,hk->hv", S, q[0, t]))
print("right")
"""


def test_the_page_adds_a_recurrence(tmp_path):
    done = run(TRIAL, followed("adding-a-recurrence.md", tmp_path))
    assert done.stdout.strip() == "right", done.stderr[-2000:]
