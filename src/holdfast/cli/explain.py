"""holdfast explain: which backend a call would take, and why the others would not."""

from typing import Annotated

import typer


def _sizes(shape: str) -> dict[str, int]:
    sizes = {}
    for item in filter(None, shape.split(",")):
        name, _, value = item.partition("=")
        if not value.strip().isdigit():
            raise ValueError(f"--shape: expected AXIS=SIZE,... such as B=4,T=4096,H=32; got {item!r}")
        sizes[name.strip()] = int(value)
    return sizes


def explain(
    op: Annotated[str, typer.Argument(help="An op's name, such as gla.")],
    shape: Annotated[str, typer.Option(help="Sizes, such as B=4,T=4096,H=32,K=128,V=128.")] = "",
    dtype: Annotated[str, typer.Option(help="The inputs' dtype.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, h200, ...; it need not be present.")] = "cpu",
    grad: Annotated[bool, typer.Option(help="Whether a backward pass follows.")] = True,
    varlen: Annotated[bool, typer.Option(help="Whether sequences are packed (cu_seqlens).")] = False,
    backend: Annotated[str | None, typer.Option(help="Force a backend.")] = None,
) -> None:
    """Print which backend a call would take, its plan, and why the others would not run."""
    from holdfast.ops.explain import explain as explain_call

    typer.echo(explain_call(op, _sizes(shape), dtype, device, grad, varlen, backend))
