"""Sizes as the command line takes them: B=4,T=4096."""


def sizes_of(shape: str) -> dict[str, int]:
    """Axis -> size. Raises ValueError for anything but whole numbers, and for an axis that is named twice."""
    sizes: dict[str, int] = {}
    for item in filter(None, shape.split(",")):
        name, value = (part.strip() for part in item.partition("=")[::2])
        if not name or not (value.isascii() and value.isdigit()):
            raise ValueError(f"--shape: expected AXIS=SIZE,... such as B=4,T=4096,H=32,K=128,V=128; got {item!r}")
        if name in sizes:
            raise ValueError(f"--shape: expected each axis once; got {name}={sizes[name]} and {name}={value}")
        sizes[name] = int(value)
    return sizes
