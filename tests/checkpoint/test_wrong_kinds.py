"""Test arguments of the wrong kind: every function of fp4kit.checkpoint rejects them by name, before any work."""

import inspect
import re
from collections.abc import Iterable
from functools import partial

import numpy as np
import pytest
import synthetic

from fp4kit import checkpoint
from fp4kit.arguments import checks_kinds
from fp4kit.calibration import Collector
from fp4kit.checkpoint import (
    Activations,
    CheckpointError,
    Rules,
    Wishes,
    compare_checkpoints,
    convert,
    identify_checkpoint,
    make_plan,
    verify_checkpoint,
)

FUNCTIONS = {name: one for name in checkpoint.__all__ if inspect.isfunction(one := getattr(checkpoint, name))}
# No model exists at these paths, so a call whose arguments are all accepted fails with a CheckpointError.
RIGHT = {"bits": 5.0, "tensors": [], "recipe": "nvfp4-te"}
WRONG = [3, -1, 2.5, "three", None, True, [1, 2], ["a"], [("a", 3)], {}, {"a": "b"}, b"a", object(), np.zeros(3)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    synthetic.dense(root / "dense")
    return root


@pytest.mark.parametrize("name", FUNCTIONS)
def test_errors_name_the_function_and_the_argument(name, tmp_path, models, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where "three" is no file
    function, parameters = FUNCTIONS[name], inspect.signature(FUNCTIONS[name]).parameters
    known = {**RIGHT, "rules": Rules.of("nvfp4-te"), "plan": make_plan(models / "dense")}
    (tmp_path / "there").mkdir()
    known |= {"destination": tmp_path / "there"} if name == "execute" else {}
    required = [one.name for one in parameters.values() if one.default is one.empty]
    right = {one: known.get(one, tmp_path / one) for one in required}
    for argument in parameters:
        refused = 0
        for value in WRONG:
            try:
                function(**{**right, argument: value})
            except TypeError as error:
                assert re.match(rf"{name}: {argument} is .*; needs ", str(error), re.DOTALL), str(error)
                refused += 1
            except ValueError as error:  # also CheckpointError
                assert type(value) is not object, str(error)
                assert not re.search("unpack|iterable|attribute", str(error)), str(error)
            else:
                assert name in ("convert_tensors", "execute") and type(value) is not object, (argument, value)
        assert refused >= 3, argument


def test_one_string_is_one_glob():
    @checks_kinds
    def given(globs: Iterable[str] = ()):
        return globs

    assert given("*.x") == given(["*.x"]) == given(iter(["*.x"])) == ("*.x",)
    for name, function in FUNCTIONS.items():
        for one in inspect.signature(function).parameters.values():
            if one.name in ("ignore", "layers", "hadamard_only"):
                assert one.annotation == "Iterable[str]", name
    for name in ("keep", "only", "include"):
        assert Wishes(**{name: "*.x"}) == Wishes(**{name: ("*.x",)})
        with pytest.raises(CheckpointError, match=f"^{name} 3: "):
            Wishes(**{name: 3})


def test_one_string_is_one_glob_in_calls(tmp_path, models):
    source, made = models / "dense", tmp_path / "made"
    how = {"hadamard": 16, "format": "compressed-tensors"}
    one, several = (make_plan(source, hadamard_only=globs, **how) for globs in ("*.down_proj", ["*.down_proj"]))
    assert one.request == several.request
    convert(source, made, "nvfp4-te")
    some, every = (identify_checkpoint(made, source, layers=globs).layers for globs in ("model.layers.0.*", ()))
    assert 0 < len(some) < len(every)
    for call in (partial(compare_checkpoints, made, made), partial(make_plan, source)):
        with pytest.raises(CheckpointError, match=re.escape("--ignore *.x: matches nothing that is refused")):
            call(ignore="*.x")


def test_verify_takes_what_convert_takes(tmp_path, models):
    collector, source = Collector(), models / "dense"
    for tensor in make_plan(source, "nvfp4-te").converted:
        weight = tensor.pieces[0].weight
        collector.collect(weight.name.removesuffix(".weight"), np.full((1, weight.shape[-1]), 3, np.float32))
    collector.save(tmp_path / "a.safetensors")
    paths = [tmp_path / "a.safetensors"]
    for number, given in enumerate((collector, paths[0], str(paths[0]), paths, Activations.of(collector))):
        convert(source, tmp_path / str(number), "nvfp4-te", activations=given)
        report = verify_checkpoint(tmp_path / str(number), source, activations=given)
        assert report.clean and report.unmeasured == 0
    with pytest.raises(CheckpointError, match="is not a file; needs a file that"):
        verify_checkpoint(tmp_path / "0", source, activations="none.safetensors")
