"""Test that each example in a docstring runs and prints what it shows."""

import doctest
import importlib
import inspect

import pytest
from package_modules import MODULES

import fp4kit

NOT_RUN = ("fp4kit.__main__",)  # a command
FLAGS = doctest.ELLIPSIS


def examples(module):
    finder = doctest.DocTestFinder(exclude_empty=True)
    return [test for test in finder.find(importlib.import_module(module)) if test.examples]


@pytest.mark.parametrize(
    "module", [name for name, path in MODULES.items() if name not in NOT_RUN and ">>>" in path.read_text()]
)
def test_examples(module):
    if module.startswith(("fp4kit.torch", "fp4kit.jax")):
        pytest.importorskip(module.split(".")[1])
    tests = examples(module)
    assert tests, "a >>> that doctest does not find"
    for test in tests:
        result = doctest.DocTestRunner(optionflags=FLAGS).run(test)
        assert result.failed == 0, f"{test.name}: see above"


def test_a_wrong_example_is_found():
    """An example with a wrong output or a wrong error must fail; otherwise test_examples could not fail."""
    for text in (">>> 1 + 1\n3\n", ">>> int('x')\nTraceback (most recent call last):\nValueError: y\n"):
        test = doctest.DocTestParser().get_doctest(text, {}, "wrong", None, 0)
        assert doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=lambda line: None).failed == 1


EXAMPLES = {
    "fp4kit.quantized.container": ("from_parts", "dequantize", "equals", "__getitem__"),
    "fp4kit.storage.quantized_file": ("save", "load"),
}


def test_every_public_function_has_an_example():
    functions = {name: getattr(fp4kit, name) for name in fp4kit.__all__}
    assert [name for name, f in functions.items() if inspect.isfunction(f) and ">>> " not in (f.__doc__ or "")] == []


@pytest.mark.parametrize("module", EXAMPLES)
def test_named_functions_have_an_example(module):
    assert {test.name.rpartition(".")[2] for test in examples(module)} >= set(EXAMPLES[module])
