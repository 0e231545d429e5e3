"""What the parallel functions take: no states in front, and none behind."""

from torch import Tensor


def without_states(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: object,
    n_initial: object,
    m_initial: object,
    return_last_states: bool,
) -> dict[str, Tensor | None]:
    """The arguments of `call.sequence`. Raises ValueError for a state that is given or asked for."""
    states = {"c_initial": c_initial, "n_initial": n_initial, "m_initial": m_initial}
    for name, x in states.items():
        if x is not None:
            raise ValueError(f"{name}: expected None, as the chunkwise kernels alone take states; got one")
    if return_last_states:
        raise ValueError("return_last_states: expected False, as the chunkwise kernels alone return states; got True")
    return {"q": q, "k": k, "v": v, "i": i, "f": f} | dict.fromkeys(states)
