"""The Metal source that mlx generates for a call, printed through its export tracing, and what its signature says."""

import ctypes
import os
import re
import tempfile
from dataclasses import dataclass

import mlx.core as mx

_C = ctypes.CDLL(None)


def generated_source(kernel, inputs, template, grid, threadgroup, output_shapes, output_dtypes) -> str:
    """What mlx would compile for these inputs; nothing is compiled or run."""

    def call(*arrays):
        return kernel(
            inputs=list(arrays),
            template=template,
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            verbose=True,
            stream=mx.gpu,
        )

    blanks = [mx.zeros(x.shape, x.dtype) for x in inputs]
    printed = _stdout_of(lambda: mx.export_function(lambda *_: None, call, *blanks))
    return re.search(r"```\n(.*?)```", printed, re.S).group(1)


def _stdout_of(run) -> str:
    """What C++ code prints: Python's own redirection does not see it."""
    with tempfile.TemporaryFile() as file:
        _C.fflush(None)
        kept = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            run()
        finally:
            _C.fflush(None)
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        return file.read().decode()


@dataclass(frozen=True)
class Signature:
    """A generated kernel's name, template arguments and parameters.

    buffers: every buffer in order, `<input>_shape` too; kinds: the C++ type of each, and whether it is a reference.
    """

    name: str
    template: tuple[tuple[str, str], ...]
    buffers: tuple[str, ...]
    kinds: tuple[tuple[str, bool], ...]
    attributes: tuple[str, ...]

    @property
    def inputs(self) -> list[str]:
        pairs = zip(self.buffers, self.kinds, strict=True)
        return [b for b, (kind, _) in pairs if kind.startswith("const") and not b.endswith("_shape")]

    @property
    def outputs(self) -> list[str]:
        return [b for b, (kind, _) in zip(self.buffers, self.kinds, strict=True) if not kind.startswith("const")]

    def as_plain_function(self, text: str, before: str = "static void", between: str = "") -> str:
        """The source as one C++ function: template arguments become constants, attributes go, `before` leads it."""
        constants = "".join(
            f"using {name} = {value};\n" if kind == "typename" else f"constexpr {kind} {name} = {value};\n"
            for (kind, name), value in self._values(text)
        )
        text = text.partition("template [[host_name")[0]
        text = re.sub(r"\[\[(buffer\(\d+\)|\w+)\]\]", "", text)
        return re.sub(r"(template <[^>]*>\s*)?void " + self.name, f"{constants}{before} {self.name}", text)

    def _values(self, text: str):
        if not self.template:
            return []
        listed = re.search(re.escape(f"decltype({self.name}<") + r"(.*?)>\)", text).group(1)
        return zip(self.template, listed.split(", "), strict=True)


def signature_of(text: str) -> Signature:
    head = re.search(r"(?:template <([^>]*)>\n)?\[\[kernel\]\] void (\w+)\((.*?)\) \{", text, re.S)
    template, name, parameters = head.groups()
    buffers, kinds, attributes = [], [], []
    for parameter in parameters.split(",\n"):
        kind, reference, word, attribute = re.fullmatch(
            r"\s*(.*?)([*&]?) (\w+) \[\[(.*?)\]\]", parameter, re.S
        ).groups()
        if attribute.startswith("buffer"):
            buffers.append(word)
            kinds.append((re.sub(r"\b(device|constant) ", "", kind), reference == "&"))
        else:
            attributes.append(word)
    pairs = tuple(tuple(part.split(" ")) for part in template.split(", ")) if template else ()
    return Signature(name, pairs, tuple(buffers), tuple(kinds), tuple(attributes))


def signature_text(text: str) -> str:
    """The generated lines that are not the project's own: template, parameters, instantiation."""
    head = re.search(r"(template <[^>]*>\n)?\[\[kernel\]\] void .*?\) \{", text, re.S).group(0)
    tail = re.search(r"template \[\[host_name.*", text, re.S)
    return head + "\n...\n}\n" + (tail.group(0).strip() if tail else "") + "\n"
