"""The data-movement model: closed forms against brute force, the optimum against enumeration and against Lagrange."""

import contextlib
import random
from itertools import permutations, product

import pytest

from holdfast.planner.constrint import Infeasible
from holdfast.planner.movement import Chain, Movement, Stage, Tensor, best, movement, simulate
from holdfast.planner.movement.lagrange import two_products
from holdfast.planner.movement.optimum import best_in_order, orders
from planner import proposal_032, random_chains


def two_product_chain(m: int, n: int, k: int, l: int) -> Chain:
    return Chain(
        {"m": m, "n": n, "k": k, "l": l},
        (
            Tensor("A", ("m", "k")),
            Tensor("B", ("k", "l")),
            Tensor("S", ("m", "l")),
            Tensor("D", ("l", "n")),
            Tensor("E", ("m", "n")),
        ),
        (Stage("first", ("A", "B"), "S"), Stage("second", ("S", "D"), "E")),
    )


def test_closed_form_is_what_the_nest_does() -> None:
    """Random chains, orders and tiles, those that do not divide their axes too."""
    held_whole = read_again = 0
    for seed in range(1500):
        source = random.Random(seed)
        chain = random_chains.chain(source)
        order, tiles = random_chains.order(source, chain), random_chains.tiles(source, chain)
        predicted = movement(chain, order, tiles)
        assert predicted == simulate(chain, order, tiles), seed
        read_again += any(predicted.read[name] for name in predicted.written)
        held_whole += any(
            predicted.buffers[tensor.name]
            > tensor.element_bytes * product_of(min(tiles[axis], chain.extents[axis]) for axis in tensor.axes)
            for tensor in chain.tensors
            if chain.is_intermediate(tensor.name)
        )
    assert held_whole > 50
    assert read_again > 50


def product_of(numbers) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


def test_every_order_of_two_products() -> None:
    chain = two_product_chain(6, 5, 4, 7)
    for tiles in ({"m": 2, "n": 2, "k": 2, "l": 3}, {"m": 6, "n": 1, "k": 3, "l": 7}):
        for order in permutations(chain.extents):
            assert movement(chain, order, tiles) == simulate(chain, order, tiles), order


def test_two_products_by_hand() -> None:
    """Chimera's case: with k and n inside, S is one tile, A and E move for each tile of l, B and D for each of m."""
    chain = two_product_chain(8, 8, 8, 8)
    found = movement(chain, ("m", "l", "k", "n"), {"m": 4, "n": 2, "k": 2, "l": 2})
    assert found == Movement(
        read={"A": 128 * 4, "B": 128 * 2, "D": 128 * 2, "E": 128 * 3},
        written={"E": 128 * 4},
        buffers={"A": 16, "B": 8, "S": 16, "D": 8, "E": 16},
    )
    # With k outside, nothing of S is complete before the last turn of k: all of it stays.
    assert movement(chain, ("k", "m", "l", "n"), {"m": 4, "n": 2, "k": 2, "l": 2}).buffers["S"] == 128


def test_a_summed_axis_needs_another_name_afterwards() -> None:
    """Proposal 032 uses k for both products, which would need scores before they are complete."""
    tensors = (
        Tensor("Q", ("m", "k")),
        Tensor("K", ("l", "k")),
        Tensor("S", ("m", "l")),
        Tensor("V", ("l", "k")),
        Tensor("O", ("m", "k")),
    )
    stages = (Stage("scores", ("Q", "K"), "S"), Stage("output", ("S", "V"), "O"))
    with pytest.raises(ValueError, match="stage output: axis 'k' is summed over in scores"):
        Chain({"m": 4, "l": 4, "k": 4}, tensors, stages)


def test_bad_chains() -> None:
    a, b = Tensor("a", ("m",)), Tensor("b", ("m",))
    with pytest.raises(ValueError, match="tensor a: no extent is given for its axis 'm'"):
        Chain({"n": 3}, (a,), ())
    with pytest.raises(ValueError, match="stage one: unknown tensor 'c'"):
        Chain({"m": 3}, (a, b), (Stage("one", ("a",), "c"),))
    with pytest.raises(ValueError, match="stage two: b was already read or written"):
        Chain({"m": 3}, (a, b), (Stage("one", ("a",), "b"), Stage("two", ("a",), "b")))
    chain = Chain({"m": 3}, (a, b), (Stage("one", ("a",), "b"),))
    with pytest.raises(ValueError, match="order: expected each of m once; got m, m"):
        movement(chain, ("m", "m"), {"m": 1})
    with pytest.raises(ValueError, match="tiles: expected a positive tile for axis m; got 0"):
        movement(chain, ("m",), {"m": 0})


def test_operations() -> None:
    assert two_product_chain(2, 3, 5, 7).operations == 2 * 2 * 5 * 7 + 2 * 2 * 7 * 3


def test_best_is_the_best_of_all_orders_and_tiles() -> None:
    fitted = 0
    for seed in range(60):
        source = random.Random(seed)
        chain = random_chains.chain(source)
        if len(chain.extents) > 3:
            continue
        capacity = source.choice((24, 60, 120, 300))
        allowed = {axis: range(1, extent + 1) for axis, extent in chain.extents.items()}
        candidates = (
            movement(chain, order, dict(zip(allowed, sizes, strict=True)))
            for order in permutations(chain.extents)
            for sizes in product(*allowed.values())
        )
        expected = min((one.moved for one in candidates if one.footprint <= capacity), default=None)
        try:
            found = best(chain, capacity, allowed)
        except Infeasible:
            assert expected is None, seed
            continue
        assert found.movement.moved == expected, seed
        assert found.movement.footprint <= capacity
        assert found.movement == simulate(chain, found.order, found.tiles)
        fitted += 1
    assert fitted > 15


def test_of_several_best_the_first_is_found() -> None:
    """Where all fits at once every byte moves once, however it is cut: nothing is cut."""
    chain = two_product_chain(6, 4, 4, 8)
    allowed = {axis: range(1, extent + 1) for axis, extent in chain.extents.items()}
    found = best(chain, 10**6, allowed)
    assert found.movement.moved == sum(chain.bytes(name) for name in ("A", "B", "D", "E"))
    assert (found.order, found.tiles) == (("m", "n", "k", "l"), {"m": 6, "n": 4, "k": 4, "l": 8})
    # on a chip too small for that, of all orders that move the fewest bytes the first again
    capacity = found.movement.footprint - 1
    choices = []
    for order in orders(tuple(chain.extents)):
        with contextlib.suppress(Infeasible):
            choices.append(best_in_order(chain, order, capacity, allowed, None))
    least = min(one.movement.moved for one in choices)
    assert sum(one.movement.moved == least for one in choices) > 1
    assert best(chain, capacity, allowed) == next(one for one in choices if one.movement.moved == least)


def test_a_tile_of_nothing_and_one_of_everything_are_no_cut() -> None:
    """Loops of several turns need tiles between the two; best_in_order has nothing to offer without."""
    chain = two_product_chain(6, 4, 4, 8)
    whole = {axis: (0, extent, extent + 1) for axis, extent in chain.extents.items()}
    assert best_in_order(chain, ("m",), 10**6, whole, None) is None
    assert best(chain, 10**6, whole).tiles == chain.extents


def test_what_fits_to_the_byte_fits() -> None:
    chain = two_product_chain(6, 4, 4, 8)
    whole = best(chain, 10**6, dict.fromkeys(chain.extents, ()))
    assert best(chain, whole.movement.footprint, dict.fromkeys(chain.extents, ())) == whole
    with pytest.raises(Infeasible):
        best(chain, whole.movement.footprint - 1, dict.fromkeys(chain.extents, ()))


@pytest.mark.parametrize(
    ("sizes", "capacity"), [((2048,) * 4, 65536), ((4096, 4096, 1024, 4096), 65536), ((4096, 512, 512, 4096), 116224)]
)
def test_lagrange_bounds_the_integer_optimum(sizes: tuple[int, int, int, int], capacity: int) -> None:
    """Real tiles move less than any multiples of 16, by a little."""
    continuous = two_products(*sizes, capacity=capacity, z=16)
    chain = two_product_chain(*sizes)
    multiples = {axis: range(16, extent + 1, 16) for axis, extent in chain.extents.items()}
    found = best(chain, 2 * capacity, multiples)
    assert (set(found.order[:2]), found.tiles["k"], found.tiles["n"]) == ({"m", "l"}, 16, 16)
    assert 1 <= found.movement.moved / 2 / continuous.moved < 1.06


def test_lagrange_point_is_a_minimum() -> None:
    m, n, k, l, capacity, z = 4096, 512, 1024, 2048, 65536, 16
    found = two_products(m, n, k, l, capacity, z)
    assert found.footprint == pytest.approx(capacity)
    for x in (found.x * 0.99, found.x * 1.01):
        y = (capacity - 2 * z * x) / (x + 2 * z)
        assert m * l * (k + n) / x + m * l * (k + 2 * n) / y - m * n > found.moved
    # With hardly any fringe, and with as much traffic along both axes, the tile is a square that fills the capacity.
    square = two_products(4096, 0, 1024, 4096, capacity, z=1e-6)
    assert (square.x, square.y) == (pytest.approx(256, rel=1e-4), pytest.approx(256, rel=1e-4))


def test_whole_heads_want_tall_tiles() -> None:
    """With k and n whole only K and V move again, once for each tile of m: m takes what l at its least leaves."""
    choice = proposal_032.long_chunk()
    assert (choice.tiles["m"], choice.tiles["l"]) == (224, 16)
    continuous = (65536 - 2 * 16 * 128) / (2 * 128 + 16)
    assert continuous - 16 < choice.tiles["m"] <= continuous


def test_the_page_on_proposal_032_is_what_the_model_says() -> None:
    page = (proposal_032.PAGE).read_text(encoding="utf-8")
    for row in proposal_032.rows():
        assert row in page
