"""Run random programs of public calls on two engines and compare the results bit for bit (`fp4kit fuzz`).

A case is one operation with a recipe, arrays and options. draw.py draws a case from an integer; programs.py turns it
into a program, a list of calls; check.py runs the program; shrink.py makes a failing case smaller; print_repro.py
prints it as Python.
"""
