"""ConstrINT: problems of integers with sums, products, powers, divisions and divisibility, solved exactly.

After the solver of that name in the FlashRNN paper (section 5.4 and appendix C).
"""

from .conflict import Infeasible
from .constraint import Constraint
from .domain import Domain
from .expression import (
    Expression,
    Integer,
    Variable,
    as_expression,
    ceil_div,
    divides,
    lookup,
    maximum,
    minimum,
    one_of,
    truth,
)
from .model import Model
from .search import SearchLimit
from .solution import Solution

__all__ = [
    "Constraint",
    "Domain",
    "Expression",
    "Infeasible",
    "Integer",
    "Model",
    "SearchLimit",
    "Solution",
    "Variable",
    "as_expression",
    "ceil_div",
    "divides",
    "lookup",
    "maximum",
    "minimum",
    "one_of",
    "truth",
]
