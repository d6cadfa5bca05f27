"""Run random programs of public calls on two engines and compare the results bit for bit (`fp4kit fuzz`).

A *case* describes one test: an operation with a recipe, arrays and options. A *program* is the list of calls that the
test makes, and of results that must be equal.

- draw.py draws a case from an integer.
- programs.py turns the case into a program.
- check.py runs the program on both engines.
- shrink.py makes a failing case smaller.
- print_repro.py prints the program of a case as Python.
"""
