"""The one table of adapter formats: the tests run it, and docs/adapters.md is made from it."""

from format_applied import APPLIED
from format_case import FormatCase
from format_refused import REFUSED

CASES: list[FormatCase] = [*APPLIED, *REFUSED]
# Rows of the project's list of public failure cases that concern files of dense models.
ROWS = tuple(
    f"C{number:02d}"
    for number in (
        *(1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17, 19, 20, 22, 23, 25, 26, 28, 29, 31, 32, 34, 35),
        *(37, 38, 40, 41, 43, 44, 46),
    )
)
