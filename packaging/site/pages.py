"""What the site's Markdown has beside Zensical's: equations as MathML, and files of the repository by their path.

A page is read where the repository is too, so it may link to any of its files; the site has the pages alone.
"""

import re
from typing import Any

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?:benchmarks|src|tests|packaging)/[^)\s]*|[A-Z]+\.md[^)\s]*)\)")


def equation(source: str, *_: Any, **__: Any) -> str:
    """A fence of `math`; a browser sets it without a script."""
    return f'<div class="equation">{convert(source, display="block")}</div>'


class _Files(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        return [_OUTSIDE.sub(r"\1 (`\2`)", line) for line in lines]


class RepositoryFiles(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        # before links and fences are read
        md.preprocessors.register(_Files(md), "repository_files", 40)


def makeExtension(**options: Any) -> RepositoryFiles:
    return RepositoryFiles(**options)
