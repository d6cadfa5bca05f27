"""List which recorded arrays the recipes of serving engines and quantizers must equal, such as vLLM and Quark.

Each function yields rows: objects of the class GoldenRow of rows.py, which imports this module. To avoid a circular
import, each function takes that class as ``row``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

GoldenRows = Iterator[Any]


def serving_rows(row: Callable[..., Any]) -> GoldenRows:
    """Yield the GoldenRow objects of all producers of this module, one producer after the other."""
    for family in (_vllm, _triton_kernels, _quark, _auto_round, _fouroversix, _comfy_kitchen, _mslk, _others):
        yield from family(row)


def _vllm(row: Callable[..., Any]) -> GoldenRows:
    """Yield the GoldenRow objects for recorded outputs of vLLM, on CPU and GPU. ``row`` is the class GoldenRow."""
    yield row("nvfp4-vllm-emulation", "vllm", "nvfp4", min_amax=1e-8)
    yield row("nvfp4-vllm-emulation", "vllm", "nvfp4", fake=True)
    yield row("nvfp4-vllm-emulation-cuda", "producers_h200", "vllm_nvfp4_fake_gpu", fake=True, skip="nonfinite_block")
    # Compare the recorded tensor scale too, which a row with fake=True does not compare.
    yield row("nvfp4-vllm-emulation-cuda", "producers_h200", "vllm_nvfp4_fake_gpu")
    yield row("mxfp4-vllm", "vllm", "mxfp4", on_gpu="vllm_mxfp4")
    yield row("mxfp4-vllm-cpu", "vllm", "mxfp4")
    yield row("mxfp8-modelopt", "vllm", "mxfp8", skip="nonfinite_block")  # also named mxfp8-vllm


def _triton_kernels(row: Callable[..., Any]) -> GoldenRows:
    """Yield the GoldenRow objects for recorded outputs of triton_kernels. ``row`` is the class GoldenRow."""
    for name, variant in (
        ("mxfp4-triton-kernels", "mxfp4_up"),
        ("mxfp4-triton-kernels-down", "mxfp4_down"),
        ("mxfp8-triton-kernels", "mxfp8_e4m3_up"),
        ("mxfp8-triton-kernels-down", "mxfp8_e4m3_down"),
        ("mxfp8-triton-kernels-e5m2", "mxfp8_e5m2_up"),
    ):
        yield row(name, "triton_kernels", variant, skip="nan_element" if "mxfp4" in variant else "")
        yield row(name, "producers_h200", f"triton_kernels_{variant}", skip="nonfinite_block")
    yield row("mxfp4-triton-kernels", "triton_kernels", "mxfp4_up", fake=True, skip="nonfinite_block")


def _quark(row: Callable[..., Any]) -> GoldenRows:
    """Yield the GoldenRow objects for recorded outputs of Quark. ``row`` is the class GoldenRow."""
    yield row("nvfp4-quark", "quark", "nvfp4", skip="infinite_quotient")
    yield row("nvfp4-quark-file2file", "quark", "nvfp4_file2file", skip="infinite_quotient")
    for mode in ("even", "floor", "ceil"):
        yield row(f"mxfp4-quark-{mode}", "quark", f"mxfp4_{mode}", skip="nonfinite_block", decoded=True)
        yield row(f"mxfp4-quark-{mode}", "quark", f"mxfp4_{mode}", fake=True, values=("output",), skip="applied_scale")
    for element in ("e2m3", "e3m2"):
        yield row(f"mxfp6-quark-{element}-even", "quark", f"mxfp6_{element}_even", skip="nonfinite_block")
    yield row("mxfp8-quark-even", "quark", "mxfp8_e4m3_even", fake=True, skip="nonfinite_block")
    yield row("mxfp8-quark-even", "quark", "mxfp8_e4m3_even", min_scale=1, skip="nonfinite_block")


def _auto_round(row: Callable[..., Any]) -> GoldenRows:
    """Yield the GoldenRow objects for recorded outputs of auto-round. ``row`` is the class GoldenRow."""
    yield row("nvfp4-auto-round", "auto_round", "nvfp4")
    yield row("nvfp4-auto-round-fake", "auto_round", "nvfp4", fake=True)
    yield row("nvfp4-auto-round-opt", "auto_round", "nvfp4_opt_rtn")
    yield row("mxfp4-auto-round-opt", "auto_round", "mxfp4_opt_rtn", skip="nonfinite_block")
    yield row("mxfp4-auto-round", "auto_round", "mxfp4")
    yield row("mxfp4-auto-round", "auto_round", "mxfp4", fake=True)
    for mode in ("rceil", "rceil_v2"):
        yield row(f"mxfp4-auto-round-{mode.replace('_', '-')}", "auto_round", f"mxfp4_{mode}")
    yield row("mxfp8-auto-round", "auto_round", "mxfp8")
    yield row("mxfp8-auto-round-rceil", "auto_round", "mxfp8_rceil")


def _fouroversix(row: Callable[..., Any]) -> GoldenRows:
    """Yield the GoldenRow objects for recorded outputs of fouroversix. ``row`` is the class GoldenRow."""
    for name, variant in (("", "mse"), ("-mae", "mae"), ("-absmax", "abs_max")):
        yield row(f"nvfp4-fouroversix{name}", "fouroversix", f"nvfp4_{variant}", skip="nonfinite_tensor", decoded=True)
    yield row("nvfp4-fouroversix", "fouroversix", "nvfp4_mse_2d", block=(16, 16), skip="nonfinite_tensor")
    for name, variant in (("6", "static_6"), ("6-2d", "static_6_2d"), ("4", "static_4")):
        yield row(f"nvfp4-fouroversix-{name}", "fouroversix", f"nvfp4_{variant}", skip="nonfinite_tensor", decoded=True)
    yield row("nvint4-fouroversix", "fouroversix_new", "nvint4", decoded=True)
    for name, variant in (("", "mse"), ("-mae", "mae"), ("-absmax", "abs_max")):
        yield row(f"if4-fouroversix{name}", "fouroversix_new", f"if4_{variant}", skip="signed_nan", decoded=True)
    options = {"rounding": "stochastic", "seed": 7}
    for fmt in ("nvfp4", "if4"):
        for inputs in ("__f16", "__bf16"):
            variant = f"fouroversix_ms_eden_{fmt}_seed7"
            yield row(f"{fmt}-fouroversix-ms-eden", "triton_h100", variant, inputs=inputs, fake=True, options=options)
    for top in ("6", "4"):
        yield row(f"mxfp4-fouroversix-{top}", "fouroversix", f"mxfp4_static_{top}", decoded=True)
    for name, variant, block in (
        ("", "mse", None),
        ("", "mse_2d", (16, 16)),
        ("-mae", "mae", None),
        ("-6", "static_6", None),
    ):
        fields = {"block": block, "skip": "nonfinite_tensor", "on_gpu": f"fouroversix_triton_nvfp4_{variant}"}
        yield row(f"nvfp4-fouroversix-triton{name}", "fouroversix", f"nvfp4_{variant}", **fields)


def _comfy_kitchen(row: Callable[..., Any]) -> GoldenRows:
    """Yield the GoldenRow objects for recorded outputs of comfy-kitchen. ``row`` is the class GoldenRow."""
    yield row("nvfp4-comfy-kitchen", "comfy_kitchen", "nvfp4", skip="nan_value", decoded=True)
    given = {"tensor_amax": 26.88}  # 26.88 / 2688 is the float32 number 0.01
    yield row("nvfp4-comfy-kitchen-static", "comfy_kitchen", "nvfp4_given_0.01", options=given, skip="nan_value")
    yield row("mxfp8-comfy-kitchen", "comfy_kitchen", "mxfp8", decoded=True)
    for name, variant, seed in (
        ("nvfp4-comfy-kitchen-stochastic", "nvfp4", 1),
        ("nvfp4-comfy-kitchen-stochastic", "nvfp4", 1234),
        ("mxfp8-comfy-kitchen", "mxfp8", 1),
    ):
        options = {"rounding": "stochastic", "seed": seed}
        yield row(name, "comfy_kitchen", f"{variant}_sr_seed{seed}", options=options)
    yield row("nvfp4-comfy-kitchen-stochastic-cuda", "comfy_kitchen", "nvfp4_sr_cuda_seed1", torch_seed=1)
    yield row("fp8-comfy-kitchen", "comfy_kitchen", "fp8_e4m3")
    yield row("fp8-comfy-kitchen-e5m2", "comfy_kitchen", "fp8_e5m2")


def _mslk(row: Callable[..., Any]) -> GoldenRows:
    """Yield the GoldenRow objects for recorded outputs of MSLK. ``row`` is the class GoldenRow."""
    for name, variant in (("", ""), ("-fast", "_fast"), ("-power", "_e8m0"), ("-power", "_e8m0_fast")):
        yield row(f"nvfp4-mslk{name}", "triton_h100", f"mslk_nvfp4{variant}")
    yield row("nvfp4-mslk-single", "triton_h100", "mslk_nvfp4_single")
    options = {"rounding": "stochastic", "seed": 1234}
    yield row("mxfp4-mslk-stochastic", "triton_h100", "mslk_mx4_stochastic_seed1234", options=options)
    for size in (16, 32):
        for name, mode in (("", "ceil"), ("-even", "even"), ("-nearest", "nearest")):
            yield row(f"mxfp4-mslk{name}", "triton_h100", f"mslk_mx4_{mode}_b{size}", block=(1, size))
        # also named mxfp4-mslk-floor
        yield row("mxfp4-ocp", "triton_h100", f"mslk_mx4_floor_b{size}", block=(1, size), skip="nonfinite_block")
    # The Python reference of MSLK's tests. In a block with NaN, its scale byte is 0.
    yield row("mxfp4-mslk", "mslk_aiter", "mslk_mx4_ceil", skip="nonfinite_block")
    yield row("mxfp4-mslk", "mslk_aiter", "mslk_mx4_ceil_b16", block=(1, 16), skip="nonfinite_block")


def _others(row: Callable[..., Any]) -> GoldenRows:
    """Yield the GoldenRow objects for recorded outputs of SGLang, DeepGEMM, qwix, aiter and FP-Quant."""
    yield row("mxfp4-sglang-util", "sglang", "mxfp4")
    yield row("mxfp4-sglang-kv", "sglang", "kv_mxfp4_b16")
    for name in ("mxfp4", "mxfp8"):
        yield row(f"{name}-deepgemm", "deepgemm", name)
        yield row(f"{name}-qwix", "qwix", name)
    yield row("nvfp4-qwix", "qwix", "nvfp4")
    for name, mode in (("aiter", "up"), ("aiter-ceil", "ceil"), ("ocp", "down"), ("torchao-even", "even")):
        yield row(f"mxfp4-{name}", "mslk_aiter", f"aiter_mxfp4_{mode}", skip="nan_scale")
    # also named mxfp4-aiter-triton
    fields = {"min_scale": 127, "skip": "overflowing_scale"}
    yield row("mxfp4-torchao-even", "triton_h100", "aiter_triton_mxfp4", **fields)
    yield row("nvfp4-aiter-triton", "triton_h100", "aiter_triton_nvfp4")
    for inputs in ("__f16", "__bf16"):
        yield row("mxfp4-fp-quant", "triton_h100", "fp_quant_mxfp4_abs_max", inputs=inputs, fake=True)
        yield row("mxfp4-fp-quant-quest", "triton_h100", "fp_quant_mxfp4_quest", inputs=inputs, fake=True)
        fields = {"inputs": inputs, "fake": True, "skip": "nonfinite_group"}
        yield row("nvfp4-fp-quant", "triton_h100", "fp_quant_nvfp4_gs3", **fields)
    yield row("mxfp4-fp-quant", "fp_quant", "mxfp4_abs_max", fake=True, skip="flushed_block")
    yield row("mxfp4-fp-quant-quest", "fp_quant", "mxfp4_quest", fake=True)
