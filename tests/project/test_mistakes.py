"""Test the error messages for users' usual mistakes: each says what came, what is needed and what to do."""

import dataclasses
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from together import together

import fp4kit
from fp4kit.arrays import imports

X = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)


def raises(kind, text):
    """Return a context manager that expects an error of type `kind` whose message contains `text`."""
    return pytest.raises(kind, match=re.escape(text))


class Module:
    """Stand in for a torch.nn.Module, with the attributes by which fp4kit's error messages recognize one.

    names: the names of its parameters.
    """

    def __init__(self, *names):
        self.names = names
        if "weight" in names:
            self.weight = X

    def named_parameters(self):
        return ((name, X) for name in self.names)


NO_ARRAYS = {
    "layer": (Module("weight", "bias"), "pass one parameter, such as x.weight, or fake-quantize all with "),
    "model": (Module("0.bias", "0.weight"), "pass one parameter, such as x.get_parameter('0.bias'), or fake-quantize"),
    "state dict": ({"0.weight": X}, "pass one of its arrays, such as x['0.weight']"),
    "empty dict": ({}, "pass one of its arrays, such as x['weight']"),
    "Quantized": (
        fp4kit.quantize(X, "nvfp4"),
        "it is quantized already; pass x.dequantize() or x.packed, or call fp4kit.requantize",
    ),
    "path": ("model.safetensors", "load the file first: fp4kit.load for files of fp4kit.save, safetensors for models"),
    "None": (None, "pass an array"),
    "list": ([1.0, 2.0], "pass np.asarray(x, np.float32)"),
    "number": (3.0, "pass np.asarray(x, np.float32)"),
}


@together("name", NO_ARRAYS)
def test_an_object_that_is_no_array(name):
    x, way_out = NO_ARRAYS[name]
    with raises(TypeError, f"; needs a NumPy array or an array that exports DLPack (PyTorch, JAX, ...); {way_out}"):
        fp4kit.quantize(x, "nvfp4")


def test_a_layer_in_place_of_a_tensor():
    torch = pytest.importorskip("torch")
    import fp4kit.torch as ft

    with raises(TypeError, "quantize: x is Linear; needs a torch.Tensor; pass one parameter, such as x.weight, or "):
        ft.quantize(torch.nn.Linear(32, 32), "nvfp4")
    with raises(TypeError, "quantize: x is ndarray; needs a torch.Tensor; fp4kit.quantize takes arrays of other lib"):
        ft.quantize(X, "nvfp4")


KEYWORDS = {
    "block_size": "the recipe sets it; pass dataclasses.replace(fp4kit.recipe(...), block=(1, 32))",
    "block": "the recipe sets it; pass dataclasses.replace(fp4kit.recipe(...), block=(1, 32))",
    "dim": "use axis",
    "amax": "use tensor_amax",
    "global_scale": "use tensor_scale, which multiplies on decode",
    "stochastic": "use rounding='stochastic' with a seed",
    "roundng": "did you mean rounding?",
    "zzz": "the arguments are x, recipe, axis, tensor_amax, scale_layout, ",
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_an_argument_that_does_not_exist(name):
    with raises(TypeError, f"quantize: there is no argument {name}; {KEYWORDS[name]}"):
        fp4kit.quantize(X, "nvfp4", **{name: 1})
    with raises(TypeError, f"quantize: there is no argument {name}; {KEYWORDS[name]}"):
        fp4kit.quantize(X, "nvfp4", threads=1, **{name: 1})


def test_an_argument_of_another_function():
    with raises(TypeError, "dequantize: there is no argument scale; the arguments are q, dtype, out, threads"):
        fp4kit.dequantize(fp4kit.quantize(X, "nvfp4"), scale=1)
    with raises(TypeError, "quantize: recipe is missing; needs an id such as 'nvfp4-te'; fp4kit.recipes() lists the"):
        fp4kit.quantize(X)
    with raises(TypeError, "quantize: got 3 arguments without a name; needs x, recipe; name the others, such as axis="):
        fp4kit.quantize(X, "nvfp4", -1)
    with raises(TypeError, "quantize() missing 1 required positional argument: 'x'"):
        fp4kit.quantize(recipe="nvfp4")


def test_the_block_size_that_the_message_suggests():
    wide = dataclasses.replace(fp4kit.recipe("nvfp4"), block=(1, 32))
    assert fp4kit.quantize(X, wide).block_scale.shape == (32, 2)


ATTRIBUTES = {
    "scale": "use q.block_scale (bit patterns), q.tensor_scale or q.dequantize()",
    "data": "use q.packed, or q.dequantize() for the values",
    "codes": "use fp4kit.unpack(q.packed), which gives one code per element, or q.packed",
    "T": "call fp4kit.transpose(q)",
    "mean": "call q.dequantize() for an array of the values",
    "numpy": "call q.to('numpy') to move it, or q.dequantize() for the values",
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_that_does_not_exist(name):
    q = fp4kit.quantize(X, "nvfp4")
    with pytest.raises(AttributeError) as caught:
        getattr(q, name)
    assert str(caught.value) == f"'Quantized' object has no attribute {name!r}; {ATTRIBUTES[name]}"
    assert caught.value.name == name and not hasattr(q, name)


def test_an_attribute_without_a_hint():
    with pytest.raises(AttributeError, match=r"^'Quantized' object has no attribute 'zzz'$"):
        fp4kit.quantize(X, "nvfp4").zzz  # noqa: B018  (the access is what is tested)


ARITHMETIC = {
    "q * 2": lambda q: q * 2,
    "2 * q": lambda q: 2 * q,
    "x @ q": lambda q: X @ q,
    "q @ x": lambda q: q @ X,
    "q + q": lambda q: q + q,
    "1 / q": lambda q: 1 / q,
    "-q": lambda q: -q,
    "q ** 2": lambda q: q**2,
    "abs(q)": abs,
    "float(q)": float,
    "np.abs(q)": np.abs,
}


@together("name", ARITHMETIC)
def test_arithmetic_of_a_quantized(name):
    text = "Quantized: is not an array of numbers; call q.dequantize() for its values, or use q.packed for its codes"
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        ARITHMETIC[name](fp4kit.quantize(X, "nvfp4"))


MODULE = {
    **{
        name: f"run import fp4kit.{name} first"
        for name in "attention calibration checkpoint cuda jax plot qat testing torch".split()
    },
    "FakeQuantSettings": "it is in fp4kit.torch, after import fp4kit.torch",
    "pad": "it is fp4kit.layouts.pad",
}


def test_a_name_that_the_package_does_not_have():
    """Attributes that the package lacks give helpful errors in a new process.

    In this process another test may have imported fp4kit.torch.
    """
    tries = (
        f"try: fp4kit.{name}\nexcept AttributeError as error: print(error, error.name, sep='|')" for name in MODULE
    )
    code = "\n".join(["import fp4kit", *tries])
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    expected = [f"module 'fp4kit' has no attribute {name!r}; {advice}|{name}" for name, advice in MODULE.items()]
    assert found.splitlines() == expected


def test_a_misspelled_name_of_the_package():
    with pytest.raises(AttributeError, match=r"^module 'fp4kit' has no attribute 'quantise'$"):
        fp4kit.quantise  # noqa: B018  (the access is what is tested)


def test_completion_shows_public_names_only():
    assert set(dir(fp4kit)) == {*fp4kit.__all__, "__version__", "layouts"}
    assert all(hasattr(fp4kit, name) for name in dir(fp4kit))


def test_short_representations():
    te, ocp = (fp4kit.quantize(X, name) for name in ("nvfp4-te", "nvfp4-flashinfer"))
    found = fp4kit.compare(te, fp4kit.quantize(X, "mxfp4"))
    assert re.fullmatch(r"Comparison\([\d,]+ of 2,048 values, max_error=0\.\d+, sqnr=\d\d\.\d+\)", repr(found))
    assert repr(fp4kit.compare(te, te)) == "Comparison(equal in every bit)"
    assert re.match(r"Comparison\([\d,]+ of 2,048 codes, ", repr(fp4kit.compare(te, fp4kit.quantize(-X, "nvfp4-te"))))
    assert repr(fp4kit.identify(te, X)).startswith("Identification(")
    assert "\n" not in repr(fp4kit.identify(te, X)) and len(repr(fp4kit.identify(ocp, X))) < 1000


def test_a_tensor_of_nan_has_a_note():
    q = fp4kit.quantize(np.full((16, 16), np.nan, np.float32), "nvfp4-te")
    assert "note          codes are not zero although tensor_amax is 0: x holds NaN, or tensor_amax was" in str(q)
    for x in (X, np.zeros((16, 16), np.float32)):
        assert "note" not in str(fp4kit.quantize(x, "nvfp4-te"))


def test_codes_and_scales_swapped():
    q = fp4kit.quantize(X, "nvfp4")
    swapped = "block_scale is larger than packed: pass packed first, then block_scale"
    with raises(
        ValueError, "Quantized: packed is uint8 (32, 4); nvfp4-te of (32, 64) needs uint8 (32, 32); " + swapped
    ):
        fp4kit.Quantized.from_parts(q.block_scale, q.packed, q.tensor_scale, recipe="nvfp4", shape=X.shape)
    with pytest.raises(ValueError, match=r"needs float32 \(\)$"):
        fp4kit.Quantized.from_parts(q.packed, q.block_scale, recipe="nvfp4")


def test_padding_that_the_message_suggests():
    with pytest.raises(ValueError, match=r"; pad with fp4kit\.layouts\.pad\(x, 16, axis=1\)$"):
        fp4kit.quantize(X[:, :50], "nvfp4")
    assert fp4kit.quantize(fp4kit.layouts.pad(X[:, :50], 16, axis=1), "nvfp4").shape == (32, 64)


def test_a_device_that_does_not_exist(monkeypatch):
    runtime = SimpleNamespace(getDeviceCount=lambda: 2)
    monkeypatch.setattr(imports, "cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    with pytest.raises(ValueError, match=r"^Quantized: to\('cuda:9'\); there are 2 CUDA devices; needs 0 to 1$"):
        fp4kit.quantize(X, "nvfp4").to("cuda:9")
