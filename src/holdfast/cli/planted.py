"""What holdfast doctor --self-check says: which planted faults its checks would have noticed."""

from collections import Counter

import torch
from rich.console import Console
from rich.table import Table

from .report import plain


def show(device: torch.device, console: Console) -> bool:
    """Plants a fault in each tensor that a kernel writes, and prints what came of each; False if no check notices
    those of some tensor."""
    from holdfast.ops.self_check import Fault, self_check, unnoticed

    by_kernel: dict[str, Counter[str]] = {}
    largest: Counter[str] = Counter()
    unread: dict[str, set[str]] = {}
    wrong: list[str] = []
    found: list[Fault] = []
    with console.status("planting faults"):
        for fault in self_check(device):
            if fault.status == "wrong":
                wrong.append(f"wrong without a fault: {fault.op}, backend {fault.backend}: {fault.kernel}")
                continue
            found.append(fault)
            name = fault.kernel if fault.launched else f"{fault.op}, backend {fault.backend}, {fault.kernel}"
            by_kernel.setdefault(name, Counter())[fault.status] += 1
            largest[name] = max(largest[name], fault.factor)
            if fault.status == "unread":
                unread.setdefault(f"{fault.tensor} of {name}: {fault.reason}", set()).add(fault.op)
    # by how many times its value the element of a kernel that hides faults best had to change, beside its sign
    heads = ("written by", "caught", "times", "missed", "unread")
    table = Table(*heads, title=f"faults of one element, on {device}")
    for name, counts in sorted(by_kernel.items()):
        caught, *others = (str(counts[status]) for status in ("caught", "missed", "unread"))
        table.add_row(name, caught, str(largest[name]), *others)
    console.print(table)
    for line, ops in sorted(unread.items()):
        plain(console, f"unread in {', '.join(sorted(ops))}: {line}")
    missed = [
        f"missed: {fault.op}, backend {fault.backend}: tensor {fault.tensor} of {fault.kernel}"
        for fault in unnoticed(found)
        if fault.status == "missed"
    ]
    for line in wrong + missed:
        plain(console, line)
    counts = sum(by_kernel.values(), Counter())
    told = f"{counts['caught']} of {counts['caught'] + counts['missed']} planted faults would have been caught"
    more = f"; {counts['unread']} more are in what nothing reads" if counts["unread"] else ""
    plain(console, f"{told}{more}.")
    return not (wrong or missed)
