"""How a printed cell reads in C++ and in Triton. Functions have the same names in both: see functions of each."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Language:
    """Formats of one language.

    suffix: of a float32 number. declare: a variable from kind, name and text. choose: condition, then, else. negate,
    both, either: logic on bools. fractions: whether functions may return a fraction's two parts through references.
    """

    suffix: str
    true: str
    false: str
    declare: str
    choose: str
    negate: str
    both: str
    either: str
    fractions: bool

    def number(self, value: float) -> str:
        if value != value:
            return "hf_nan()"
        if value in (float("inf"), float("-inf")):
            return "hf_inf()" if value > 0 else "(-hf_inf())"
        text = f"{value!r}{self.suffix}"
        return f"({text})" if text[0] == "-" else text


CPP = Language(
    suffix="f",
    true="true",
    false="false",
    declare="const {kind} {name} = {text};",
    choose="{} ? {} : {}",
    negate="!{}",
    both="{} && {}",
    either="{} || {}",
    fractions=True,
)
# what is bool in Triton has one bit an element, where | and & are logic
TRITON = Language(
    suffix="",
    true="True",
    false="False",
    declare="{name} = {text}",
    choose="tl.where({}, {}, {})",
    negate="{} == 0",
    both="{} & {}",
    either="{} | {}",
    fractions=False,
)
