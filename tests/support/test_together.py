"""Test that together.py runs every case of a test and names the cases that fail."""

import pytest
from together import together

made = []


@together("number", range(4), ids=lambda number: f"case {number}")
def fails_for_odd_numbers(number, fixture):
    made.append((number, fixture))
    assert number % 2 == 0, f"{number} is odd"


def test_every_case_is_made_and_those_that_fail_are_named():
    with pytest.raises(pytest.fail.Exception) as failure:
        fails_for_odd_numbers(fixture="one for all")
    assert made == [(number, "one for all") for number in range(4)]
    first, *named = str(failure.value).splitlines()
    assert first == "2 of 4 cases:"
    assert [line for line in named if line.startswith("[")] == [
        "[case 1] AssertionError: 1 is odd",
        "[case 3] AssertionError: 3 is odd",
    ]


@together("number", (1, 2))
def test_cases_that_hold_pass(number, tmp_path):
    assert number and tmp_path.is_dir()


@together("number, text", [(1, "1"), (2, "2")])
@together("base", (8, 10))
def test_cases_have_several_parts(number, text, base):
    assert int(text, base) == number


def test_marks_of_cases_are_refused():
    with pytest.raises(AssertionError, match="marks of single cases"):
        together("number", [pytest.param(1, marks=pytest.mark.exhaustive)])


@together("number", range(3))
def does_not_raise(number):
    if number == 0:
        pytest.skip("not here")
    with pytest.raises(ValueError):
        int(str(number))


def test_an_error_that_does_not_come_and_a_skip_are_failures():
    with pytest.raises(pytest.fail.Exception) as failure:
        does_not_raise()
    assert [line.split("]")[0] for line in str(failure.value).splitlines() if line.startswith("[")] == [
        "[0",
        "[1",
        "[2",
    ]


def test_no_cases_are_refused():
    with pytest.raises(AssertionError, match="no cases"):
        together("number", [])
