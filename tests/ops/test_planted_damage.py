"""How doctor's self-check damages a tensor, and how it searches for elements that results depend on."""

import pytest
import torch

from holdfast.ops import self_check
from holdfast.ops.self_check import Fault, _Damage, _Planting, _poisoned, _Site, _Watch, _written

SITE = _Site(3, "kernel", "o")
INF, NAN = torch.inf, torch.nan


def test_how_many_are_tried():
    assert (self_check._TRIES, self_check._FACTORS) == (8, (1, 4, 16, 64))
    assert (self_check._EACH, self_check._SOME) == (4, (0.0, 0.5, 1.0))
    assert Fault("gla", "triton", "fwd", "o", True, "caught").factor == 1
    assert (_Damage(SITE, range).factor, _Damage(SITE, range).count) == (1, 0)


@pytest.mark.parametrize(
    ("values", "count"),
    [
        # the root mean square of what is written and finite is 2
        ([4.0, 1.0, -1.0, 1.0, 1.0, NAN, INF], 5),
        ([4.0, 1.0, -1.0, 1.0, 1.0, 0.8, NAN, INF], 5),
        ([0.0, 0.0, 0.0], 3),
        ([], 0),
    ],
)
def test_elements_of_usual_size_count(values, count):
    x = torch.tensor([*values, 4.0])
    before, written = x.clone(), torch.arange(len(x)) < len(values)
    damage = _Damage(SITE, lambda n: [n - 1, 0], factor=4)
    damage.spoil(x, written)
    assert damage.count == count
    changed = {n: value for n, value in enumerate(x.tolist()) if value != before[n] and not before[n].isnan()}
    spoiled = {n: -4 * values[n] or 1.0 for n in (0, count - 1)} if count else {}
    assert changed == spoiled


def test_elements_are_counted_through_all_axes():
    x = torch.tensor([[1.0, 2.0], [3.0, 2.0]])
    _Damage(SITE, lambda n: [2]).spoil(x, torch.ones(2, 2, dtype=torch.bool))
    assert x.tolist() == [[1.0, 2.0], [3.0, -2.0]] or x.tolist() == [[1.0, 2.0], [-3.0, 2.0]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_other_bits_are_written(dtype):
    x, before = torch.tensor([0.0, 1.0, 2.0]).to(dtype), torch.tensor([-0.0, 1.0, 3.0]).to(dtype)
    assert _written(x, before).tolist() == [True, False, True]
    assert _written(torch.tensor([1, 2]), torch.tensor([1, 3])).tolist() == [False, False]


class Search(_Planting):
    """Of a tensor of so many elements, with what is judged told beforehand. differs: of a set of elements."""

    def __init__(self, count, differs, wrong=lambda factor: False):
        self.site, self.draw = SITE, torch.Generator().manual_seed(0)
        self.count, self.differs, self.wrong, self.tried = count, differs, wrong, 0

    def _results(self, damage):
        self.tried += 1
        damage.count = self.count
        elements = set(damage.chosen(self.count))
        assert elements <= set(range(self.count))
        differs = self.differs(elements)
        return differs, differs and self.wrong(damage.factor)


@pytest.mark.parametrize(
    ("needed", "found"),
    [
        ({5}, range(5, 6)),
        ({0}, range(1)),
        ({15}, range(15, 16)),
        ({3, 4}, range(8)),
        ({7, 8}, range(16)),
        ({1, 2}, range(4)),
    ],
)
def test_halves_narrow_down_to_what_is_read_together(needed, found):
    (chosen,) = Search(16, lambda elements: elements >= needed)._by_halves()
    assert chosen(16) == found


def test_what_nothing_reads_is_unread():
    search = Search(16, lambda elements: False)
    assert search.found() == ("unread", 1)
    # each try, and all together
    assert search.tried == 8 + 1


@pytest.mark.parametrize(("grows", "told"), [(1, ("caught", 1)), (16, ("caught", 16)), (65, ("missed", 64))])
def test_a_fault_grows_until_it_is_noticed(grows, told):
    search = Search(16, lambda elements: True, lambda factor: factor >= grows)
    assert search.found() == told
    # half of the tries make a difference, and are tried again with each factor until one is noticed
    assert search.tried == {1: 1 + 1, 16: 4 + 2 * 4 + 1, 65: 4 + 4 * 4}[grows]


@pytest.mark.parametrize(
    ("first", "launches", "some"), [(0, 9, [0, 4, 8]), (10, 6, [10, 12, 15]), (2, 4, [2, 3, 4, 5])]
)
def test_of_many_launches_the_first_the_middle_and_the_last(first, launches, some):
    watch = _Watch(passes=False)
    watch.sites = [_Site(n, "kernel", "o") for n in range(first, first + launches)]
    assert [site.launch for site in watch.chosen()] == some


@pytest.mark.parametrize("filled", [False, True])
def test_memory_is_poisoned_within(monkeypatch, filled):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", filled)
    with _poisoned():
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.empty(3).isnan().all()
    assert torch.utils.deterministic.fill_uninitialized_memory == filled
