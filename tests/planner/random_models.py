"""Random problems of integers, small enough to enumerate or wide enough to be interesting."""

import random

from holdfast.planner.constrint import Expression, Model, ceil_div, divides, maximum, minimum


def domain(source: random.Random, reach: int):
    """A range, an arithmetic progression or a set, half of them with negative values."""
    low = source.choice((0, 1, 1, -reach // 2))
    kind = source.randrange(3)
    if kind == 0:
        return range(low, low + source.randint(1, reach))
    if kind == 1:
        return range(low, low + reach, source.randint(2, 5))
    return source.sample(range(low, low + reach), min(reach, source.randint(1, 6)))


def expression(source: random.Random, variables, depth: int) -> Expression:
    if depth == 0 or source.random() < 0.15:
        return (
            source.choice(variables) if source.random() < 0.85 else source.choice(variables) * 0 + source.randint(0, 9)
        )
    left = expression(source, variables, depth - 1)
    right = expression(source, variables, depth - 1)
    return source.choice(
        (
            lambda: left + right,
            lambda: left - right,
            lambda: left * right,
            lambda: left * source.randint(-3, 5) + source.randint(-5, 5),
            lambda: source.choice(variables) ** source.randint(0, 3),
            lambda: left // source.randint(1, 5),
            lambda: ceil_div(left, source.randint(1, 5)),
            lambda: left // (right**2 + 1),
            lambda: minimum(left, right),
            lambda: maximum(left, right),
        )
    )()


def constraint(source: random.Random, variables, depth: int = 2):
    left = expression(source, variables, depth)
    right = expression(source, variables, 1) if source.random() < 0.6 else source.randint(-10, 40)
    kind = source.randrange(8)
    if kind < 2:
        return divides(source.choice((2, 3, 4, source.choice(variables))), left)
    return (
        left <= right,
        left < right,
        left >= right,
        left > right,
        left != right,
        left == right,
    )[kind - 2]


def model(source: random.Random, reach: int = 8, count: int = 4) -> Model:
    made = Model()
    variables = [
        made.variable(
            f"v{place}",
            domain(source, reach),
            order=source.choice(("smallest", "largest")),
            auxiliary=source.random() < 0.2,
        )
        for place in range(source.randint(2, count))
    ]
    for _ in range(source.randint(1, 4)):
        made.add(constraint(source, variables))
    return made


def entangled(source: random.Random, reach: int = 12) -> Model:
    """Equalities that name the same numbers again and again, and divisions that leave no remainder."""
    made = Model()
    variables = [
        made.variable(f"v{place}", domain(source, reach), order=source.choice(("smallest", "largest")))
        for place in range(source.randint(2, 4))
    ]
    positive = [variable for variable in variables if variable.domain[0] > 0]
    for _ in range(source.randint(1, 5)):
        a, b, c = (source.choice(variables) for _ in range(3))
        made.add(
            source.choice(
                (
                    lambda a, b, c: a == b * c,
                    lambda a, b, c: a == b * b * c,
                    lambda a, b, c: a == b**2,
                    lambda a, b, c: a == maximum(b, c),
                    lambda a, b, c: a == ceil_div(b, source.randint(1, 4)),
                    lambda a, b, c: a == b // (c**2 + 1),
                    lambda a, b, c: ceil_div(b, c**2 + 1) == a,
                    lambda a, b, c: a * b * c == source.choice((12, 24, -12, 0, 36)),
                    lambda a, b, c: a * b <= source.randint(-5, 30),
                    lambda a, b, c: a == source.randint(-3, 9),
                    lambda a, b, c: b - a <= source.randint(-3, 3),
                    lambda a, b, c: a != b * c,
                    lambda a, b, c: divides(a, b),
                )
            )(a, b, c)
        )
        if positive and source.random() < 0.3:
            size, tile = source.choice((12, 24, 96)), source.choice(positive) * source.choice(positive)
            made.add(divides(tile, size))
            made.add(source.choice(variables) == source.choice((ceil_div(size, tile), size // tile)))
    return made


def objective(source: random.Random, made: Model) -> Expression:
    return expression(source, made.variables, 2)


def plan(source: random.Random) -> tuple[Model, Expression]:
    """A problem of the size and shape of a kernel's plan, and what to make small or large."""
    made = Model()
    sizes = [source.choice((48, 64, 96, 160, 384, 720, 768, 1024, 1344)) for _ in range(3)]
    axes = []
    for place, size in enumerate(sizes):
        tile = made.variable(f"tile{place}", (8, 16, 32), order=source.choice(("smallest", "largest")))
        warps = made.variable(f"warps{place}", range(1, 17), order=source.choice(("smallest", "largest")))
        blocks = made.variable(f"blocks{place}", range(1, 1 << 20), order=source.choice(("smallest", "largest")))
        loops = made.variable(f"loops{place}", range(1, 1 << 20), order=source.choice(("smallest", "largest")))
        axes.append((tile, warps, blocks, loops))
        if source.random() < 0.8:
            made.add(tile * warps * blocks * loops == size)
        else:
            made.add(divides(tile * warps * blocks, size))
            made.add(loops == ceil_div(size, tile * warps * blocks))
    (tile0, warps0, blocks0, loops0), (tile1, warps1, blocks1, loops1), (_, warps2, blocks2, loops2) = axes
    made.add(warps0 * warps1 * warps2 * 32 <= source.choice((128, 256, 1024)))
    made.add(blocks0 * blocks1 * blocks2 <= source.choice((16, 84, 132)))
    held = tile0 * tile1 * loops0 * loops1 * 2
    made.add(held <= source.choice((2048, 8192, 65536)))
    if source.random() < 0.5:
        made.add(blocks0 >= source.choice((2, 4, blocks1, blocks2 + 1)))
    if source.random() < 0.3:
        made.add(loops2 != 1)
    goal = source.choice(
        (
            lambda: loops0 * loops1 * loops2,
            lambda: blocks0 * blocks1 * blocks2 - warps0 * warps1,
            lambda: held + 64 * loops2,
            lambda: ceil_div(held, 96) + loops1 * loops2,
            lambda: maximum(loops0 * loops1, loops2 * 3) - minimum(warps0, warps1),
        )
    )()
    return made, goal
