"""Every other case of the kernels on the host again, all under sanitizers: a usual run builds some without
(support/host/README.md).
"""

from __future__ import annotations

import pytest
from exhaustive import exhaustive

import tests.cuda.test_fake_on_host as fake
import tests.cuda.test_grouped_on_host as grouped
import tests.cuda.test_hadamard_on_host as hadamard
import tests.cuda.test_kernels_on_host as kernels
import tests.cuda.test_layouts_on_host as layouts
import tests.cuda.test_partial_on_host as partial
import tests.cuda.test_quantize_columns_on_host as patch
import tests.cuda.test_search_on_host as search

CHECKS_ALL = True


def cases_of(module: object) -> list[object]:
    """The cases that the tests of a module have by default."""
    marks = [mark for test in vars(module).values() for mark in getattr(test, "pytestmark", ())]
    cases = [case for mark in marks if mark.args[:1] == ("case",) for case in mark.args[1]]
    return [case for case in cases if not hasattr(case, "marks")]


CASES = [
    case
    for module in (kernels, patch, partial, fake, grouped, hadamard, layouts, search)
    for case in cases_of(module)[::2]
]


@pytest.mark.parametrize("case", exhaustive(CASES), ids=str)
def test_kernel(host, case):
    host.check(case)
