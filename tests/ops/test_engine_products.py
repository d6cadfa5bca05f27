"""Test that matmul gives the bits of MLX's and llama.cpp's products on a CPU, and refuses what they do not have."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tensors import to_torch
from together import together

import fp4kit
from fp4kit import layouts
from fp4kit.quantized.container import Quantized
from fp4kit.reference.matmul import quantize_q8_0

DATA = Path(__file__).parents[1] / "data" / "engines"
BF16 = ml_dtypes.bfloat16
DTYPES = (np.float32, np.float16, BF16)


def assert_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    """Assert that two arrays have equal bits, except that every NaN equals every other."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    nan = np.isnan(found.astype(np.float32)) & np.isnan(expected.astype(np.float32))
    bits = f"u{found.dtype.itemsize}"
    np.testing.assert_array_equal(found.view(bits) * ~nan, expected.view(bits) * ~nan)


def check(x: np.ndarray, w: Quantized, unit: str, expected: np.ndarray) -> None:
    """Assert that both host engines give the expected product, in the dtype of x."""
    assert_same_bits(fp4kit.matmul(x, w, unit=unit, out_dtype=x.dtype), expected)
    with fp4kit.specification(), np.errstate(all="ignore"):
        assert_same_bits(fp4kit.matmul(x, w, unit=unit, out_dtype=x.dtype), expected)


def weight(recipe: str, packed: np.ndarray, scales: np.ndarray) -> Quantized:
    r = fp4kit.recipe(recipe)
    shape = (len(packed), scales.shape[1] * r.block_size)
    return Quantized(packed.view(np.uint8), scales, None, None, shape, np.dtype(np.float32), 1, r)


# ---- recordings ----


def recordings(file: str) -> dict[str, dict[str, np.ndarray]]:
    """Return {"scheme/input": {name of an array: array}} of a file."""
    found: dict[str, dict[str, np.ndarray]] = {}
    with np.load(DATA / f"{file}.npz") as arrays:
        for key in arrays:
            case, _, name = key.rpartition("/")
            array = arrays[key].view(BF16) if name.endswith(":bf16") else arrays[key]
            found.setdefault(case, {})[name.removesuffix(":bf16")] = array
    return found


def mlx_cases() -> Iterator[tuple[str, np.ndarray, Quantized, str, np.ndarray]]:
    cases = recordings("mlx")
    for name, case in cases.items():
        format = name.partition("/")[0]
        if "y" in case:
            w = cases[f"{format}/weight"]
            yield name, case["x"], weight(f"{format}-mlx-cpu", w["packed"], w["scale"]), "mlx-cpu", case["y"]


def ggml_cases() -> Iterator[tuple[str, np.ndarray, Quantized, str, np.ndarray]]:
    cases = recordings("llamacpp")
    for name, case in cases.items():
        scheme, format = name.partition("/")[0], name.partition("-")[0]
        w = weight(f"{format}-gguf", *layouts.unpack_gguf(cases[f"{scheme}/weight"]["blocks"], format))
        for array in case:
            if array.startswith("y_"):
                repacked = "repack" in array and format == "mxfp4"
                unit = "ggml-avx2-repacked" if repacked else "ggml-avx2"
                yield f"{name}/{array}", case["x"][: len(case[array])], w, unit, case[array]


@together("case", [*mlx_cases(), *ggml_cases()], ids=lambda case: case[0])
def test_recorded_products(case) -> None:
    check(*case[1:])


def test_every_recorded_scheme_is_compared() -> None:
    counts = {"mlx": len([*mlx_cases()]), "ggml": len([*ggml_cases()])}
    assert counts == {"mlx": 30, "ggml": 2 * 10 * 4 + 8 * 2}


def q8_0_bytes(x: np.ndarray) -> np.ndarray:
    """Return the blocks of 34 bytes of Q8_0, (blocks, 34)."""
    with np.errstate(all="ignore"):
        codes, d = quantize_q8_0(x)
    codes = codes.astype(np.int8).view(np.uint8).reshape(-1, 32)
    return np.concatenate([d.astype(np.float16).reshape(-1, 1).view(np.uint8), codes], axis=1)


@together("case", [case for case in recordings("llamacpp").values() if "x_q8_0" in case], ids=lambda case: "")
def test_recorded_q8_0(case) -> None:
    found, expected = q8_0_bytes(case["x"]), case["x_q8_0"].reshape(-1, 34)
    np.testing.assert_array_equal(found[:, 2:], expected[:, 2:])
    assert_same_bits(*(np.ascontiguousarray(blocks[:, :2]).view(np.float16) for blocks in (found, expected)))


# ---- installed engines ----


# Both engines add in another order on other processors.
on_x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the units add as x86-64 does")


def drawn_weight(rng: np.random.Generator, format: str, producer: str, N: int, K: int, wild: bool) -> Quantized:
    """Draw a weight of any codes. Its scales have any code if `wild`, else those of ordinary numbers."""
    r = fp4kit.recipe(f"{format}-{producer}")
    low, high = (0, 256) if wild else (0x20, 0x70) if format == "nvfp4" else (100, 140)
    codes = rng.integers(0, 256, (N, K if format == "mxfp8" else K // 2), np.uint8)
    if not wild and format == "mxfp8":
        codes = codes & np.uint8(0xBF)  # no NaN
    return weight(r.id, codes, rng.integers(low, high, (N, K // r.block_size), np.uint8))


KINDS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Any]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "any size": lambda rng, shape: rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 14, shape),
    "subnormal in float16": lambda rng, shape: rng.standard_normal(shape) * 2.0**-20,
    "subnormal in float32": lambda rng, shape: rng.integers(0, 1 << 25, shape).astype(np.uint32).view(np.float32),
    "zeros": lambda rng, shape: -np.abs(rng.standard_normal(shape)) * (rng.random(shape) < 0.05),
    "large": lambda rng, shape: rng.standard_normal(shape) * 3e4,
    "overflow": lambda rng, shape: rng.standard_normal(shape) * 1e38,
    "infinities": lambda rng, shape: np.where(rng.random(shape) < 0.02, np.inf, rng.standard_normal(shape)),
    "NaN": lambda rng, shape: np.where(rng.random(shape) < 0.01, np.nan, rng.standard_normal(shape)),
}


def mlx_product(x: np.ndarray, w: Quantized, mode: str) -> np.ndarray:
    mx = pytest.importorskip("mlx.core")
    with mx.stream(mx.cpu):
        array = mx.array(x.view(np.uint16)).view(mx.bfloat16) if x.dtype == BF16 else mx.array(x)
        y = mx.quantized_matmul(array, mx.array(w.packed.view(np.uint32)), mx.array(w.block_scale), mode=mode)
        return np.array(y.view(mx.uint16)).view(BF16) if x.dtype == BF16 else np.array(y)


@on_x86
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8"])
def test_installed_mlx(format) -> None:
    pytest.importorskip("mlx.core")
    rng = np.random.default_rng(len(format))
    for kind, draw in KINDS.items():
        for dtype in DTYPES:
            for M, N, K in ((1, 5, 32), (3, 17, 160), (8, 33, 96)):
                with np.errstate(all="ignore"):
                    x = np.asarray(draw(rng, (M, K))).astype(dtype)
                w = drawn_weight(rng, format, "mlx-cpu", N, K, kind == "normal" or rng.random() < 0.5)
                check(x, w, "mlx-cpu", mlx_product(x, w, format))


@on_x86
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_qqmm_of_the_installed_mlx(format) -> None:
    """mx.qqmm quantizes one row of inputs first, NVFP4 to nearest even, where mx.quantize takes the lower code."""
    mx = pytest.importorskip("mlx.core")
    rng, recipe = np.random.default_rng(0), f"{format}-mlx-cpu"
    inputs = fp4kit.recipe(recipe)
    inputs = replace(inputs, id="qqmm", rounding="rn") if format == "nvfp4" else inputs
    differs = 0
    for _ in range(60):
        w = fp4kit.quantize(rng.standard_normal((32, 128), np.float32), recipe)
        x = rng.standard_normal((1, 128)) * 2.0 ** rng.integers(-3, 3)
        x[:, ::3] = rng.integers(-24, 25, x[:, ::3].shape) / 4  # ties
        for dtype, name in ((np.float32, "float32"), (np.float16, "float16"), (ml_dtypes.bfloat16, "bfloat16")):
            row = x.astype(dtype)
            given = mx.array(row.astype(np.float32)).astype(getattr(mx, name))
            parts = mx.array(w.packed.view(np.uint32)), mx.array(w.block_scale)
            sizes = {"group_size": w.recipe.block_size, "bits": w.recipe.element.bits, "mode": format}
            with mx.stream(mx.cpu):
                expected = np.array(mx.qqmm(given, *parts, **sizes).astype(mx.float32))
            found = fp4kit.matmul(fp4kit.fake_quantize(row, inputs), w, unit="mlx-cpu")
            assert_same_bits(np.asarray(found), expected)
            plain = fp4kit.matmul(fp4kit.fake_quantize(row, recipe), w, unit="mlx-cpu")
            differs += not np.array_equal(plain, expected)
    assert (differs > 0) == (format == "nvfp4")


class Ggml:
    """The functions of llama.cpp in the installed xllamacpp, called by their C names."""

    def __init__(self) -> None:
        module = pytest.importorskip("xllamacpp")
        self.library = ctypes.CDLL(str(next(Path(module.__path__[0]).glob("*.so"))))
        self.library.ggml_cpu_init()

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function. Arguments are arrays, passed as pointers, ints of 64 bits, or other ctypes values."""
        kinds: dict[type, Callable[[Any], Any]] = {
            np.ndarray: lambda a: ctypes.c_void_p(a.ctypes.data),
            int: ctypes.c_int64,
        }
        getattr(self.library, name)(*(kinds.get(type(a), lambda a: a)(a) for a in arguments))

    def vec_dot(self, x: np.ndarray, w: Quantized, format: str) -> np.ndarray:
        blocks, K = layouts.pack_gguf(w.packed, w.block_scale, format), ctypes.c_int(x.shape[1])
        q, out = np.empty((len(x), x.shape[1] // 32 * 34), np.uint8), np.empty((len(x), len(blocks)), np.float32)
        for m, n in np.ndindex(out.shape):
            self.call("quantize_row_q8_0", x[m], q[m], x.shape[1])
            self.call(f"ggml_vec_dot_{format}_q8_0", K, out[m, n:], 0, blocks[n], 0, q[m], 0, ctypes.c_int(1))
        return out

    def repacked(self, x: np.ndarray, w: Quantized, rows: int) -> np.ndarray:
        """Return the product with the repacked weight, by the function for one row at a time or for four rows."""
        N, K = w.shape
        blocks = layouts.pack_gguf(w.packed, w.block_scale, "mxfp4").reshape(N // 8, 8, K // 32, 17)
        scales = blocks[..., 0].transpose(0, 2, 1)
        codes = blocks[..., 1:].reshape(N // 8, 8, K // 32, 2, 8).transpose(0, 2, 3, 1, 4).reshape(N // 8, K // 32, 128)
        packed, out = np.concatenate([scales, codes], -1), np.empty((len(x), N), np.float32)
        q = np.empty((len(x) // rows, rows * K // 32 * 34), np.uint8)
        names = {1: ("quantize_row_q8_0", "ggml_gemv"), 4: ("ggml_quantize_mat_q8_0_4x8", "ggml_gemm")}[rows]
        sizes = ctypes.c_int(K), ctypes.c_int(rows), ctypes.c_int(N)
        for i in range(len(q)):
            self.call(names[0], x[rows * i], q[i], K)
            self.call(f"{names[1]}_mxfp4_8x8_q8_0", sizes[0], out[rows * i], N, packed, q[i], *sizes[1:])
        return out


@on_x86
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_installed_llama_cpp(format) -> None:
    """All numbers are equal, except that single rows of repacked weights are compared for ordinary numbers only."""
    ggml, rng = Ggml(), np.random.default_rng(len(format))
    for kind, draw in KINDS.items():
        for K in (64, 128, 320) if format == "nvfp4" else (32, 64, 96, 160, 256):
            with np.errstate(over="ignore"):
                x = np.asarray(draw(rng, (8, K))).astype(np.float32)
            w = drawn_weight(rng, format, "gguf", 16, K, rng.random() < 0.5)
            check(x, w, "ggml-avx2", ggml.vec_dot(x, w, format))
            if format == "mxfp4":
                check(x, w, "ggml-avx2-repacked", ggml.repacked(x, w, 4))
                if kind not in ("overflow", "infinities", "NaN"):
                    check(x, w, "ggml-avx2-repacked", ggml.repacked(x, w, 1))


# ---- engines and arguments of fp4kit ----

UNITS = [
    *(("mlx-cpu", format, dtype) for format in ("nvfp4-te", "mxfp4-ocp", "mxfp8-te") for dtype in DTYPES),
    *(("ggml-avx2", format, np.float32) for format in ("nvfp4-te", "mxfp4-ocp")),
    ("ggml-avx2-repacked", "mxfp4-ocp", np.float32),
]


@pytest.mark.parametrize(("unit", "recipe", "dtype"), UNITS)
def test_engine_and_specification(unit, recipe, dtype) -> None:
    """Shapes across tiles and panels, stacks, alpha, tensor scales and every out_dtype."""
    rng = np.random.default_rng(7)
    for shape, N, K, alpha in (((67,), 24, 192, None), ((2, 5), 40, 64, -0.3), ((1,), 8, 576, 2), ((0,), 8, 64, 1)):
        x = rng.standard_normal((*shape, K)).astype(dtype)
        w = fp4kit.quantize(rng.standard_normal((N, K), np.float32), recipe)
        alpha = 1 if alpha is None and unit == "mlx-cpu" else alpha
        for out_dtype in DTYPES:
            d = fp4kit.matmul(x, w, unit=unit, alpha=alpha, out_dtype=out_dtype)
            with fp4kit.specification():
                assert_same_bits(d, fp4kit.matmul(x, w, unit=unit, alpha=alpha, out_dtype=out_dtype))
        plain = fp4kit.matmul(x, w, unit=unit, alpha=1)
        scale = alpha if alpha is not None else 1 if w.tensor_scale is None else w.tensor_scale
        assert_same_bits(fp4kit.matmul(x, w, unit=unit, alpha=alpha), plain * np.float32(scale))


def test_groups_and_other_libraries() -> None:
    rng = np.random.default_rng(8)
    x = rng.standard_normal((9, 64), np.float32)
    weights = rng.standard_normal((3, 16, 64), np.float32)
    stack, experts = fp4kit.quantize(weights, "mxfp4-ocp"), [fp4kit.quantize(w, "mxfp4-ocp") for w in weights]
    whole = fp4kit.matmul_grouped(x, stack, m_indptr=[0, 2, 2, 9], unit="ggml-avx2")
    parts = fp4kit.matmul_grouped([x[:2], x[2:2], x[2:]], experts, unit="ggml-avx2")
    assert_same_bits(whole, np.concatenate(parts))
    assert_same_bits(whole[2:], fp4kit.matmul(x[2:], experts[2], unit="ggml-avx2"))
    pytest.importorskip("torch")
    assert_same_bits(
        fp4kit.matmul(to_torch(x), experts[0], unit="mlx-cpu").numpy(), fp4kit.matmul(x, experts[0], unit="mlx-cpu")
    )


X = np.ones((4, 64), np.float32)
NV, MX = (fp4kit.quantize(np.ones((8, 64), np.float32), id) for id in ("nvfp4-te", "mxfp4-ocp"))
MX7, NV80 = fp4kit.quantize(X[:3], "mxfp4-ocp"), fp4kit.quantize(np.ones((8, 80), np.float32), "nvfp4-gguf")
MX16 = fp4kit.quantize(X, replace(fp4kit.recipe("mxfp4-ocp"), block=(1, 16)))
ERRORS = [
    (
        MX,
        MX,
        "mlx-cpu",
        {},
        "a is E2M1 with E8M0 scales of 32 .* needs an array of float32 or float16 or bfloat16 as a",
    ),
    (X, X, "mlx-cpu", {}, "b float32; mlx-cpu needs"),
    (X, MX16, "mlx-cpu", {}, r"scales of 16; mlx-cpu needs .* NVFP4 \(E2M1 with E4M3 scales of 16\) or MXFP4 .* as b"),
    (X, fp4kit.quantize(X, "fp8-modelopt"), "ggml-avx2", {}, "b E4M3; ggml-avx2 needs an array of float32 as a"),
    (X.astype(np.float16), MX, "ggml-avx2", {}, "a is float16"),
    (X, NV, "ggml-avx2-repacked", {}, "ggml-avx2-repacked needs an array of float32 as a, and MXFP4"),
    (X, MX7, "ggml-avx2-repacked", {}, "b has 3 rows; ggml-avx2-repacked needs a multiple of 8"),
    (NV80.dequantize(np.float32), NV80, "ggml-avx2", {}, "a has length 80 along K; .* a multiple of 64"),
    (X, NV, "mlx-cpu", {}, "b has a tensor scale, which mx.quantized_matmul does not take; pass alpha"),
    (X, MX, "ggml-avx2", {"c": np.ones((4, 8), np.float32)}, "c is given; needs None for ggml-avx2"),
]


@together("a, b, unit, options, message", ERRORS)
def test_errors(a, b, unit, options, message) -> None:
    with pytest.raises(ValueError, match=f"matmul: .*{message}"):
        fp4kit.matmul(a, b, unit=unit, **options)
    with pytest.raises(ValueError, match="matmul_grouped: "):
        fp4kit.matmul_grouped([a], [b], unit=unit, **{name: [c] for name, c in options.items()})


def test_float32_beside_mxfp4_is_for_engines_and_exact_sums() -> None:
    with pytest.raises(
        TypeError, match=r"a is float64; mlx-cpu needs .* an array of float16, .*or round it to float32"
    ):
        fp4kit.matmul(X.astype(np.float64), MX, unit="mlx-cpu")
    with pytest.raises(TypeError, match="a is float32; dequantized needs a Quantized"):
        fp4kit.matmul(X, MX, unit="dequantized")
    with pytest.raises(ValueError, match="a is float32 and b E2M1 with E8M0 scales of 32; sm100 has no instruction"):
        fp4kit.matmul(X, MX, unit="sm100")
    assert fp4kit.matmul(X, MX, unit="exact").shape == (len(X), len(MX.packed))
