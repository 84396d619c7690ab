"""The table of cases; the same loader as for the architectures makes one concrete."""

from tests.cases.base import Case
from tests.cases.derivatives import DERIVATIVES
from tests.cases.images import IMAGES
from tests.cases.language import LANGUAGE
from tests.cases.unusual import UNUSUAL

__all__ = ["CASES", "Case", "case_by_id"]

CASES: list[Case] = sorted([*DERIVATIVES, *IMAGES, *LANGUAGE, *UNUSUAL], key=lambda case: case.name)


def case_by_id(identifier: str) -> Case:
    """The case of this id, such as c01."""
    return next(case for case in CASES if case.id == identifier)
