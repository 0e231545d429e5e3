"""Random chains of products and pointwise stages, small enough to run tile by tile."""

import random

from holdfast.planner.movement import Chain, Stage, Tensor


def chain(source: random.Random) -> Chain:
    """Of one to four stages; each reads results of earlier ones, tensors of its own, or both."""
    while True:
        try:
            return attempt(source)
        except ValueError:
            # A summed axis was used again, or a result was read after it was left as one.
            continue


def attempt(source: random.Random) -> Chain:
    axes = [f"a{place}" for place in range(source.randint(2, 5))]
    tensors: list[Tensor] = []
    stages: list[Stage] = []
    for place in range(source.randint(1, 4)):
        earlier = [stage.writes for stage in stages]
        inputs = source.sample(earlier, min(len(earlier), source.randint(0 if not earlier else 1, 2)))
        if source.random() < 0.8 or not inputs:
            for number in range(source.randint(1, 2)):
                name = f"x{place}{number}"
                chosen = source.sample(axes, source.randint(1, min(3, len(axes))))
                tensors.append(Tensor(name, tuple(chosen), source.choice((2, 4))))
                inputs.append(name)
        named = {tensor.name: tensor for tensor in tensors}
        used = sorted({axis for name in inputs for axis in named[name].axes})
        kept = source.sample(used, source.randint(1, len(used)))
        tensors.append(Tensor(f"y{place}", tuple(kept), source.choice((2, 4))))
        stages.append(Stage(f"s{place}", tuple(inputs), f"y{place}", source.choice((1, 2))))
    extents = {axis: source.randint(1, 9) for axis in axes}
    return Chain(extents, tuple(tensors), tuple(stages))


def order(source: random.Random, made: Chain) -> list[str]:
    axes = list(made.extents)
    return source.sample(axes, len(axes))


def tiles(source: random.Random, made: Chain) -> dict[str, int]:
    """Some divide their extents, some leave a shorter tile at the end, some are longer than the extent."""
    return {axis: source.randint(1, extent + 1) for axis, extent in made.extents.items()}
