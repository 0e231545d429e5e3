"""holdfast explain: how a call would run, what it should cost, and why not otherwise."""

from typing import Annotated

import typer

from .sizes import sizes_of


def explain(
    op: Annotated[str, typer.Argument(help="An op's name, such as gla.")],
    shape: Annotated[str, typer.Option(help="Sizes, such as B=4,T=4096,H=32,K=128,V=128.")] = "",
    dtype: Annotated[str, typer.Option(help="The inputs' dtype.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, h200, ..., which need not be here; cuda is the GPU here.")] = "cpu",
    grad: Annotated[bool, typer.Option(help="Whether a backward pass follows.")] = True,
    varlen: Annotated[bool, typer.Option(help="Whether sequences are packed (cu_seqlens).")] = False,
    backend: Annotated[str | None, typer.Option(help="Force a backend.")] = None,
    calls: Annotated[int, typer.Option(help="Make so many calls first, on cuda: which are not replayed, and why.")] = 0,
    ranks: Annotated[
        int, typer.Option(help="GPUs that share a layer around the op: what each way to share it costs.", min=1)
    ] = 1,
    link: Annotated[str, typer.Option(help="Between them: nvlink or ib.")] = "nvlink",
    width: Annotated[
        int | None, typer.Option(help="Channels of that layer. By default all heads' values.", min=1)
    ] = None,
) -> None:
    """Print the plan of each pass, its predicted cost beside the floor, what it beat, and why others do not run."""
    from holdfast.ops.explain import explain as explain_call

    sizes = sizes_of(shape)
    said = [str(explain_call(op, sizes, dtype, device, grad, varlen, backend, calls))]
    if ranks > 1:
        from .scale import layer_around, told

        if varlen or not grad:
            raise ValueError(
                "--ranks: expected neither --varlen nor --no-grad beside it, as it tells of training batches"
            )
        said.append(told(layer_around(op, sizes, dtype, device, width), ranks, link))
    typer.echo("\n".join(said))
