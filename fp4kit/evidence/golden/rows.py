"""List which recorded arrays each recipe must equal: one GoldenRow per recipe and variant of a producer's recording. A
producer is a library that quantizes. `fp4kit recipes --check` and the tests compare the arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

# The files and the variants (by the beginnings of their names) that were not computed by the producer's code on a CPU
_FILES = {
    **dict.fromkeys(("jax_gpu", "modelopt_sweep_h200", "producers_h200", "triton_h100"), "GPU"),
    **dict.fromkeys(("flashinfer", "producers_compiled"), "emulated"),
    **dict.fromkeys(("flashinfer_per_token", "hf_nvfp4_gemm", "te", "te_1x64"), "reference"),
}
_VARIANTS = {
    "kern_": "emulated",
    **dict.fromkeys(("mslk_mx4", "nvfp4-te-4over6", "mxfp4-triton-kernels-main", "nvfp4_sr_cuda"), "reference"),
}


@dataclass(frozen=True)
class GoldenRow:
    """Recorded outputs of a producer (a variant in a file of the golden set) that a recipe must equal.

    Attributes:
        recipe: id of the recipe.
        file: file of the golden set.
        variant: variant in that file.
        alias: the alias of the recipe whose producer made the outputs, if it is not the recipe's own.
        inputs: a suffix that input names must have, such as "__bf16" if the producer takes only bfloat16. "" selects
            all inputs.
        block: the block size if it differs from the recipe's, else None.
        given_amaxes: the amaxes that the file supplies. "tensor": global_amax or amax. "static": block_amax too.
            "global_scale": an amax of that name. "": none; the call computes all amaxes.
        options: further arguments of the call.
        skip: name of the exception that excuses differences, a key of check.SKIPS, or "" for none.
        columnwise_in_place: True if the file stores codes quantized along columns untransposed, as (M, K), with scales
            (M/block, K).
        fake: True if fake_quantize is compared instead of quantize.
        widen: True if inputs are cast to float32, because the producer takes only float32.
        decoded: True if the decoded values of the codes are compared too.
        raw: how to make the bytes that the producer stores, a key of stored_bytes.RAW. If "", these bytes are not
            compared.
        min_amax: the smallest global_amax that the producer records; smaller amaxes of fp4kit are raised to it.
        on_gpu: the variant in the file producers_h200 with the arrays that differ on a GPU, or "" if no array differs.
        on_cpu: True if the arrays of a CPU are compared, even if the file <file>_h200 has those of a GPU.
        values: names of the recorded arrays that are compared if ``fake`` is True.
        min_scale: the smallest scale byte that the producer records; smaller scales of fp4kit are raised to it.
        searched: how search_scales chooses the block amaxes: "by error", or "by hessian" with the file's Hessian. If
            "", quantize or fake_quantize is compared instead.
        elements: "at least 10000" or "fewer than 10000" if the row has only inputs with so many elements, else "".
        window: the number of elements that share a tensor scale, if rows have several such windows; otherwise 0. Each
            window is then a row of the call. For variants that end in "_T", the input is transposed first.
        torch_seed: the seed of the random numbers that torch.rand of PyTorch 2.11 gave on a CPU; None for none.
        torch_bits: the number of random bits of these numbers, for each dtype.
    """

    recipe: str
    file: str
    variant: str
    alias: str = ""
    inputs: str = ""
    block: tuple[int, int] | None = None
    given_amaxes: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    skip: str = ""
    columnwise_in_place: bool = False
    fake: bool = False
    widen: bool = False
    decoded: bool = False
    raw: str = ""
    min_amax: float = 0.0
    on_gpu: str = ""
    on_cpu: bool = False
    values: tuple[str, ...] = ("output", "dequant")
    min_scale: int = 0
    searched: str = ""
    elements: str = ""
    window: int = 0
    torch_seed: int | None = None
    torch_bits: ClassVar[dict[str, int]] = {"float32": 24, "float16": 11, "bfloat16": 8}

    @property
    def computed(self) -> str:
        """How the outputs were computed: a key of recipes.schema.EVIDENCE."""
        if self.on_gpu or (self.file == "modelopt_fake" and not self.on_cpu):
            return "GPU"  # of such outputs, those that differ on a GPU were recorded in another file
        file = _FILES.get(self.file, "emulated" if "_metal" in self.variant else "CPU")
        if file == "GPU":
            return file
        return next((kind for name, kind in _VARIANTS.items() if self.variant.startswith(name)), file)

    def takes(self, name: str, size: int) -> bool:
        """Return whether the row has the input `name`, which has `size` elements."""
        count = "fewer than 10000" if size < 10000 else "at least 10000"
        return name.endswith(self.inputs) and self.elements in ("", count)


_fake = partial(GoldenRow, fake=True)


def _te_rows() -> Iterator[GoldenRow]:
    pairs = (
        ("nvfp4-te-reference", "nvfp4_1d"),
        ("nvfp4-te-reference-2d", "nvfp4_2d"),
        ("nvfp4-te", "cpp_nvfp4_1d"),
        ("nvfp4-te-2d", "kern_primary_weight"),
        ("nvfp4-te-rowscaled", "nvfp4_1d_rowscaled"),
    )
    for name, variant in pairs:
        yield GoldenRow(name, "te", variant)
        yield GoldenRow(name, "te", f"{variant}_T", options={"axis": 0})
    for variant, hadamard in (("nvfp4_1d_rht_T", True), ("nvfp4_1d_rht_nosign_T", "no_signs")):
        yield GoldenRow("nvfp4-te-reference", "te", variant, inputs="__bf16", options={"axis": 0, "hadamard": hadamard})
    for error in ("mae", "mse"):
        for scale_max in (448, 256):
            name, variant = f"nvfp4-te-4over6-{error}-{scale_max}", f"4over6_{error}_{scale_max}"
            yield GoldenRow(name, "te", f"nvfp4_1d_{variant}")
            if variant in ("4over6_mae_256", "4over6_mse_448"):  # producers_cpu has the others
                yield GoldenRow(f"{name}-2d", "te", f"nvfp4_2d_{variant}")
            yield GoldenRow(
                f"nvfp4-flashinfer-4over6-{error}-{scale_max}", "flashinfer", f"nvfp4_4over6_{scale_max}_{error}"
            )
    yield GoldenRow("nvfp4-te-1x64", "te_1x64", "nvfp4_1x64", window=64)
    yield GoldenRow("nvfp4-te-1x64", "te_1x64", "nvfp4_1x64_T", window=64)
    yield GoldenRow("nvfp4-te-4over6-mse-256-fasterr", "te", "nvfp4_1d_4over6_mse_256_fasterr")
    yield GoldenRow("mxfp4-te", "te", "mxfp4_1d_ref")
    yield GoldenRow("mxfp4-te", "te", "nvfp4_1d_pow2", block=(1, 16))
    for element, suffix in (("e4m3", ""), ("e5m2", "-e5m2")):
        for shape, kind in (("1d", ""), ("2d", "-2d")):
            yield GoldenRow(f"mxfp8-te{suffix}{kind}", "te", f"cpp_mxfp8_{element}_{shape}")
            yield GoldenRow(
                f"mxfp8-te{suffix}{kind}",
                "te",
                f"cpp_mxfp8_{element}_{shape}_C",
                options={"axis": 0},
                columnwise_in_place=True,
            )


def _flashinfer_rows() -> Iterator[GoldenRow]:
    for name, variant in (("nvfp4-flashinfer", "nvfp4"), ("mxfp4-flashinfer", "mxfp4"), ("mxfp8-flashinfer", "mxfp8")):
        yield GoldenRow(name, "flashinfer", f"{variant}_linear", skip="uncertain")
        yield GoldenRow(name, "flashinfer", f"{variant}_swizzled", options={"scale_layout": "swizzled_128x4"})
        yield GoldenRow(name, "flashinfer", f"{variant}_swizzled_8x4", options={"scale_layout": "swizzled_8x4"})
    yield GoldenRow("nvfp4-flashinfer-precise", "flashinfer", "nvfp4_precise_linear")
    yield GoldenRow("nvfp4-flashinfer-token-reference", "flashinfer_per_token", "nvfp4_per_token")
    for error in ("mae", "mse"):
        for scale_max in (448, 256):
            name, variant = f"nvfp4-flashinfer-token-4over6-{error}-{scale_max}", f"4over6_{error}_{scale_max}"
            yield GoldenRow(name, "flashinfer_per_token", f"nvfp4_per_token_{variant}")
            yield GoldenRow(f"{name}-fasterr", "flashinfer_per_token", f"nvfp4_per_token_{variant}_fast")


def _modelopt_rows() -> Iterator[GoldenRow]:
    yield GoldenRow("nvfp4-modelopt", "modelopt", "nvfp4")
    yield GoldenRow("nvfp4-modelopt", "modelopt", "nvfp4_amaxhalf", given_amaxes="tensor")
    yield GoldenRow("nvfp4-modelopt-static", "modelopt", "nvfp4_static", given_amaxes="static")
    yield GoldenRow("nvfp4-modelopt-static-4over6", "modelopt", "nvfp4_static_4over6", given_amaxes="static")
    yield GoldenRow("nvfp4-modelopt-mse", "modelopt_sweep_h200", "nvfp4_mse_sweep", searched="by error")
    yield GoldenRow("nvfp4-modelopt-mse", "modelopt_sweep_h200", "nvfp4_hessian_sweep", searched="by hessian")
    yield GoldenRow("mxfp4-modelopt", "modelopt", "mxfp4", skip="nonfinite_block")
    yield GoldenRow("mxfp8-modelopt", "modelopt", "mxfp8")
    fakes = {
        "fp8-modelopt": "fp8_per_tensor",
        "fp8-modelopt-channel": "fp8_axis0",
        "int8-modelopt": "int8_per_tensor",
        "int8-modelopt-channel": "int8_per_channel_axis0",
        "int8-modelopt-channel-narrow": "int8_per_channel_axis0_narrow",
        "int4-modelopt-channel": "int4_axis0",
        "int4-modelopt": "int4_block32",
    }
    for name, variant in fakes.items():
        yield _fake(name, "modelopt_fake", f"fake_{variant}", given_amaxes="tensor", skip="cpu_only_rows")
        yield _fake(name, "modelopt_fake", f"fake_{variant}_clip", given_amaxes="tensor")
    for suffix in ("", "_clip"):
        variant = f"fake_fp8_axis0{suffix}"
        yield _fake("fp8-modelopt-channel-cpu", "modelopt_fake", variant, given_amaxes="tensor", on_cpu=True)
    for name, variant in (("nvfp4-modelopt-fake", "nvfp4"), ("nvfp4-modelopt-fake-cuda", "nvfp4_cuda")):
        yield _fake(name, "modelopt_fake", f"fake_{variant}", given_amaxes="tensor")
    yield _fake("nvfp4-modelopt-static-fake", "modelopt_fake", "fake_nvfp4_static", given_amaxes="static")
    yield _fake("mxfp4-modelopt-fake", "modelopt_fake", "fake_mxfp4", skip="undefined")
    yield _fake("mxfp8-modelopt-fake", "modelopt_fake", "fake_mxfp8", skip="undefined")


def _torchao_rows() -> Iterator[GoldenRow]:
    yield GoldenRow("nvfp4-torchao", "ao", "nvfp4_two_level", skip="nan_scale")
    yield GoldenRow("nvfp4-torchao-single", "ao", "nvfp4", skip="nan_scale")
    for mode in ("floor", "rceil", "ceil", "even"):
        yield from _to_mx_rows(mode, "ao")
        yield from _to_mx_rows(mode, "ao_018", "-018")


def _to_mx_rows(mode: str, file: str, release: str = "") -> Iterator[GoldenRow]:
    name = "mxfp4-ocp" if mode == "floor" and not release else f"mxfp4-torchao-{mode}{release}"
    yield GoldenRow(name, file, f"mxfp4_{mode}", skip="nan_scale")
    for size in (16, 64):
        yield GoldenRow(name, file, f"mxfp4_{mode}_b{size}", block=(1, size), skip="nan_scale")
    for element, suffix in (("e4m3", ""), ("e5m2", "-e5m2")):
        yield GoldenRow(f"mxfp8-torchao-{mode}{suffix}{release}", file, f"mxfp8_{element}_{mode}", skip="nan_scale")
    for element in ("e2m3", "e3m2") if mode in ("floor", "rceil") else ():
        yield GoldenRow(f"mxfp6-torchao-{mode}-{element}{release}", file, f"mxfp6_{element}_{mode}", skip="nan_scale")


def _other_rows() -> Iterator[GoldenRow]:
    yield GoldenRow("nvfp4-compressed-tensors", "compressed_tensors", "nvfp4_two_level", skip="nan_scale")
    for name, variant in (("mxfp4", "mxfp4"), ("mxfp6", "mxfp6_e2m3"), ("mxfp8", "mxfp8_e4m3")):
        yield GoldenRow(f"{name}-compressed-tensors", "compressed_tensors", variant, skip="overflowing_block")
    for mode in ("nearest", "nearest_flush", "even", "floor"):
        yield _fake(f"mxfp4-microxcaling-{mode.replace('_', '-')}", "microxcaling", f"mxfp4_{mode}")
    for mode in ("nearest", "even"):
        yield _fake(f"mxfp8-microxcaling-{mode}", "microxcaling", f"mxfp8_e4m3_{mode}")


def _gguf_rows() -> Iterator[GoldenRow]:
    for name in ("mxfp4", "nvfp4"):
        yield GoldenRow(f"{name}-gguf", "gguf", name, widen=True, decoded=True, raw=f"gguf_{name}")
    yield GoldenRow("mxfp4-gguf", "gguf", "mxfp4_python", widen=True, decoded=True, skip="nonfinite_block")


def _mlx_rows() -> Iterator[GoldenRow]:
    for name in ("mxfp4", "mxfp8", "nvfp4"):
        yield GoldenRow(f"{name}-mlx-cpu", "mlx", name, decoded=True, raw="mlx")
    for version in ("", "-0322"):  # both versions decode these codes alike, because none of the scales is NaN
        fields: dict[str, Any] = {"given_amaxes": "global_scale", "decoded": True, "raw": "mlx"}
        yield GoldenRow(f"nvfp4-mlx-cpu{version}-global", "mlx", "nvfp4_global", **fields)
    for name in ("mxfp8", "nvfp4"):
        yield GoldenRow(f"{name}-mlx-cpu-0322", "mlx", name, decoded=True)
    for name in ("mxfp4", "mxfp8"):
        yield GoldenRow(f"{name}-mlx-cpu-0321", "mlx", f"{name}_0321")
    yield GoldenRow("mxfp4-torchao-rceil", "mlx", "mxfp4_metal", "mxfp4-mlx-metal", skip="nonfinite_block")
    yield GoldenRow("mxfp8-te", "mlx", "mxfp8_metal", "mxfp8-mlx-metal", skip="nonfinite_block")
    yield GoldenRow("mxfp4-mlx-metal-0321", "mlx", "mxfp4_metal_0321", skip="nonfinite_block")
    yield GoldenRow("nvfp4-mlx-metal", "mlx", "nvfp4_metal")
    yield GoldenRow("nvfp4-mlx-metal-global", "mlx", "nvfp4_global_metal", given_amaxes="global_scale")


def _vllm() -> Iterator[GoldenRow]:
    yield GoldenRow("nvfp4-vllm-emulation", "vllm", "nvfp4", min_amax=1e-8)
    yield _fake("nvfp4-vllm-emulation", "vllm", "nvfp4")
    yield _fake("nvfp4-vllm-emulation-cuda", "producers_h200", "vllm_nvfp4_fake_gpu", skip="nonfinite_block")
    # Compare the recorded tensor scale too, which a row with fake=True does not compare.
    yield GoldenRow("nvfp4-vllm-emulation-cuda", "producers_h200", "vllm_nvfp4_fake_gpu")
    yield GoldenRow("mxfp4-vllm", "vllm", "mxfp4", on_gpu="vllm_mxfp4")
    yield GoldenRow("mxfp4-vllm-cpu", "vllm", "mxfp4")
    yield GoldenRow("mxfp8-modelopt", "vllm", "mxfp8", "mxfp8-vllm", skip="nonfinite_block")


def _triton_kernels() -> Iterator[GoldenRow]:
    for name, variant in (
        ("mxfp4-triton-kernels", "mxfp4_up"),
        ("mxfp4-triton-kernels-down", "mxfp4_down"),
        ("mxfp8-triton-kernels", "mxfp8_e4m3_up"),
        ("mxfp8-triton-kernels-down", "mxfp8_e4m3_down"),
        ("mxfp8-triton-kernels-e5m2", "mxfp8_e5m2_up"),
    ):
        yield GoldenRow(name, "triton_kernels", variant, skip="nan_element" if "mxfp4" in variant else "")
        yield GoldenRow(name, "producers_h200", f"triton_kernels_{variant}", skip="nonfinite_block")
    yield _fake("mxfp4-triton-kernels", "triton_kernels", "mxfp4_up", skip="nonfinite_block")


def _quark() -> Iterator[GoldenRow]:
    yield GoldenRow("nvfp4-quark", "quark", "nvfp4", skip="infinite_quotient")
    yield GoldenRow("nvfp4-quark-file2file", "quark", "nvfp4_file2file", skip="infinite_quotient")
    for mode in ("even", "floor", "ceil"):
        yield GoldenRow(f"mxfp4-quark-{mode}", "quark", f"mxfp4_{mode}", skip="nonfinite_block", decoded=True)
        yield _fake(f"mxfp4-quark-{mode}", "quark", f"mxfp4_{mode}", values=("output",), skip="applied_scale")
    for element in ("e2m3", "e3m2"):
        yield GoldenRow(f"mxfp6-quark-{element}-even", "quark", f"mxfp6_{element}_even", skip="nonfinite_block")
    yield _fake("mxfp8-quark-even", "quark", "mxfp8_e4m3_even", skip="nonfinite_block")
    yield GoldenRow("mxfp8-quark-even", "quark", "mxfp8_e4m3_even", min_scale=1, skip="nonfinite_block")


def _auto_round() -> Iterator[GoldenRow]:
    yield GoldenRow("nvfp4-auto-round", "auto_round", "nvfp4")
    yield _fake("nvfp4-auto-round-fake", "auto_round", "nvfp4")
    yield GoldenRow("nvfp4-auto-round-opt", "auto_round", "nvfp4_opt_rtn")
    yield GoldenRow("mxfp4-auto-round-opt", "auto_round", "mxfp4_opt_rtn", skip="nonfinite_block")
    yield GoldenRow("mxfp4-auto-round", "auto_round", "mxfp4")
    yield _fake("mxfp4-auto-round", "auto_round", "mxfp4")
    for mode in ("rceil", "rceil_v2"):
        yield GoldenRow(f"mxfp4-auto-round-{mode.replace('_', '-')}", "auto_round", f"mxfp4_{mode}")
    yield GoldenRow("mxfp8-auto-round", "auto_round", "mxfp8")
    yield GoldenRow("mxfp8-auto-round-rceil", "auto_round", "mxfp8_rceil")


def _fouroversix() -> Iterator[GoldenRow]:
    rules = {"": "mse", "-mae": "mae", "-absmax": "abs_max", "-6": "static_6", "-6-2d": "static_6_2d", "-4": "static_4"}
    fields: dict[str, Any] = {"skip": "nonfinite_tensor", "decoded": True}
    for name, variant in rules.items():
        yield GoldenRow(f"nvfp4-fouroversix{name}", "fouroversix", f"nvfp4_{variant}", **fields)
    yield GoldenRow("nvfp4-fouroversix", "fouroversix", "nvfp4_mse_2d", block=(16, 16), skip="nonfinite_tensor")
    yield GoldenRow("nvint4-fouroversix", "fouroversix_new", "nvint4", decoded=True)
    for name, variant in (("", "mse"), ("-mae", "mae"), ("-absmax", "abs_max")):
        yield GoldenRow(f"if4-fouroversix{name}", "fouroversix_new", f"if4_{variant}", skip="signed_nan", decoded=True)
    options = {"rounding": "stochastic", "seed": 7}
    for fmt in ("nvfp4", "if4"):
        for inputs in ("__f16", "__bf16"):
            variant = f"fouroversix_ms_eden_{fmt}_seed7"
            yield _fake(f"{fmt}-fouroversix-ms-eden", "triton_h100", variant, inputs=inputs, options=options)
    for top in ("6", "4"):
        yield GoldenRow(f"mxfp4-fouroversix-{top}", "fouroversix", f"mxfp4_static_{top}", decoded=True)
    for name, variant, block in (
        ("", "mse", None),
        ("", "mse_2d", (16, 16)),
        ("-mae", "mae", None),
        ("-6", "static_6", None),
    ):
        fields = {
            "block": block,
            "skip": "nonfinite_tensor",
            "on_gpu": f"fouroversix_triton_nvfp4_{variant}",
        }
        yield GoldenRow(f"nvfp4-fouroversix-triton{name}", "fouroversix", f"nvfp4_{variant}", **fields)


def _comfy_kitchen() -> Iterator[GoldenRow]:
    yield GoldenRow("nvfp4-comfy-kitchen", "comfy_kitchen", "nvfp4", skip="nan_value", decoded=True)
    given = {"tensor_amax": 26.88}  # 26.88 / 2688 is the float32 number 0.01
    yield GoldenRow("nvfp4-comfy-kitchen-static", "comfy_kitchen", "nvfp4_given_0.01", options=given, skip="nan_value")
    yield GoldenRow("mxfp8-comfy-kitchen", "comfy_kitchen", "mxfp8", decoded=True)
    for name, variant, seed in (
        ("nvfp4-comfy-kitchen-stochastic", "nvfp4", 1),
        ("nvfp4-comfy-kitchen-stochastic", "nvfp4", 1234),
        ("mxfp8-comfy-kitchen", "mxfp8", 1),
    ):
        options = {"rounding": "stochastic", "seed": seed}
        yield GoldenRow(name, "comfy_kitchen", f"{variant}_sr_seed{seed}", options=options)
    yield GoldenRow("nvfp4-comfy-kitchen-stochastic-cuda", "comfy_kitchen", "nvfp4_sr_cuda_seed1", torch_seed=1)
    yield GoldenRow("fp8-comfy-kitchen", "comfy_kitchen", "fp8_e4m3")
    yield GoldenRow("fp8-comfy-kitchen-e5m2", "comfy_kitchen", "fp8_e5m2")


def _mslk() -> Iterator[GoldenRow]:
    for name, variant in (("", ""), ("-fast", "_fast"), ("-power", "_e8m0"), ("-power", "_e8m0_fast")):
        yield GoldenRow(f"nvfp4-mslk{name}", "triton_h100", f"mslk_nvfp4{variant}")
    yield GoldenRow("nvfp4-mslk-single", "triton_h100", "mslk_nvfp4_single")
    options = {"rounding": "stochastic", "seed": 1234}
    yield GoldenRow("mxfp4-mslk-stochastic", "triton_h100", "mslk_mx4_stochastic_seed1234", options=options)
    for size in (16, 32):
        for name, mode in (("", "ceil"), ("-even", "even"), ("-nearest", "nearest")):
            yield GoldenRow(f"mxfp4-mslk{name}", "triton_h100", f"mslk_mx4_{mode}_b{size}", block=(1, size))
        # also named mxfp4-mslk-floor
        fields: dict[str, Any] = {"block": (1, size), "skip": "nonfinite_block"}
        yield GoldenRow("mxfp4-ocp", "triton_h100", f"mslk_mx4_floor_b{size}", "mxfp4-mslk-floor", **fields)
    # The Python reference of MSLK's tests. In a block with NaN, its scale byte is 0.
    yield GoldenRow("mxfp4-mslk", "mslk_aiter", "mslk_mx4_ceil", skip="nonfinite_block")
    yield GoldenRow("mxfp4-mslk", "mslk_aiter", "mslk_mx4_ceil_b16", block=(1, 16), skip="nonfinite_block")


def _others() -> Iterator[GoldenRow]:
    yield GoldenRow("mxfp4-sglang-util", "sglang", "mxfp4")
    yield GoldenRow("mxfp4-sglang-kv", "sglang", "kv_mxfp4_b16")
    for name in ("mxfp4", "mxfp8"):
        yield GoldenRow(f"{name}-deepgemm", "deepgemm", name)
        yield GoldenRow(f"{name}-qwix", "qwix", name)
    yield GoldenRow("nvfp4-qwix", "qwix", "nvfp4")
    for name, mode in (("aiter", "up"), ("aiter-ceil", "ceil"), ("ocp", "down"), ("torchao-even", "even")):
        alias = "" if "aiter" in name else f"mxfp4-aiter-{mode}"
        yield GoldenRow(f"mxfp4-{name}", "mslk_aiter", f"aiter_mxfp4_{mode}", alias, skip="nan_scale")
    fields: dict[str, Any] = {"min_scale": 127, "skip": "overflowing_scale"}
    yield GoldenRow("mxfp4-torchao-even", "triton_h100", "aiter_triton_mxfp4", "mxfp4-aiter-triton", **fields)
    yield GoldenRow("nvfp4-aiter-triton", "triton_h100", "aiter_triton_nvfp4")
    for inputs in ("__f16", "__bf16"):
        yield _fake("mxfp4-fp-quant", "triton_h100", "fp_quant_mxfp4_abs_max", inputs=inputs)
        yield _fake("mxfp4-fp-quant-quest", "triton_h100", "fp_quant_mxfp4_quest", inputs=inputs)
        fields = {"inputs": inputs, "fake": True, "skip": "nonfinite_group"}
        yield GoldenRow("nvfp4-fp-quant", "triton_h100", "fp_quant_nvfp4_gs3", **fields)
    yield _fake("mxfp4-fp-quant", "fp_quant", "mxfp4_abs_max", skip="flushed_block")
    yield _fake("mxfp4-fp-quant-quest", "fp_quant", "mxfp4_quest")


def _producers_cpu() -> Iterator[GoldenRow]:
    """Yield the rows of the file that tools/record_producers.py makes, whose variants are ids of recipes."""
    te = ("nvfp4-te-4over6-mae-448-2d", "nvfp4-te-4over6-mse-256-2d")
    for id in (*te, "fp8-transformers-block", "fp8-deepgemm-block"):
        yield GoldenRow(id, "producers_cpu", id)
    yield GoldenRow("mxfp4-triton-kernels-main", "producers_cpu", "mxfp4-triton-kernels-main", skip="nan_element")
    yield _fake("nvfp4-compressed-tensors-static", "producers_cpu", "nvfp4-compressed-tensors-static")
    for strategy in ("", "-token", "-group"):
        yield _fake(id := f"fp8-compressed-tensors{strategy}", "producers_cpu", id)
    for id in ("int4-qat", "int8-modelopt-narrow"):
        yield _fake(id, "producers_cpu", id)


def _producers_compiled() -> Iterator[GoldenRow]:
    """Yield the rows of the file whose arrays compiled kernels gave on a CPU. Most variants are ids of recipes."""
    for id in ("nvfp4-flashinfer-static", "nvfp4-flashinfer-kv-page", "nvfp4-vllm-kv", "nvfp4-vllm-static-divisor"):
        yield GoldenRow(id, "producers_compiled", id, given_amaxes="tensor")
    id = "nvfp4-flashinfer-kv"
    yield GoldenRow(id, "producers_compiled", id, given_amaxes="tensor", decoded=True)
    yield GoldenRow("nvfp4-vllm-kv", "producers_compiled", "nvfp4-vllm-static", given_amaxes="tensor")
    yield GoldenRow("nvfp4-flashinfer-token", "producers_compiled", "nvfp4-flashinfer-token", skip="zero_row")
    for id in ("nvfp4-flashinfer-token-precise", "nvfp4-vllm-online", "nvfp4-hf-kernels", "nvfp4-nunchaku"):
        yield GoldenRow(id, "producers_compiled", id)
    for id in ("nvfp4-sglang-online", "nvfp4-sglang-online-a022252"):
        yield GoldenRow(id, "producers_compiled", id)
    for id in ("mxfp4-deepseek-v4", "mxfp8-deepseek-v4", "fp8-deepseek-v4"):
        yield GoldenRow(id, "producers_compiled", id, skip="nonfinite_block")
    mxfp8 = ("mxfp8-deepseek-v4", "producers_compiled", "mxfp8-deepseek-v4_b128")
    yield GoldenRow(*mxfp8, block=(1, 128), skip="nonfinite_block")
    yield GoldenRow("mxfp8-mlx-metal-0321", "producers_compiled", "mxfp8-mlx-metal-0321", skip="nan_element")


def _jax() -> Iterator[GoldenRow]:
    for file, place in (("jax", ""), ("jax_gpu", "-gpu")):
        yield GoldenRow(f"nvfp4-jax{place}", file, "nvfp4_single")
        for jit in ("", "_jit"):  # a variant with jit has only the arrays that differ from those without
            suffix = jit.replace("_", "-")
            yield GoldenRow(f"nvfp4-jax{place}-global{suffix}", file, f"nvfp4_global{jit}")
            yield GoldenRow(f"mxfp8-jax{place or '-011'}{suffix}", file, f"mxfp8{jit}")
    for id in ("mxfp8-jax", "mxfp8-jax-jit", "mxfp4-jax", "mxfp4-jax-jit"):
        yield GoldenRow(id, "producers_cpu", id)


def _miles() -> Iterator[GoldenRow]:
    for name, variant in (("", "even"), ("-ceil", "ceil"), ("-dsv4", "dsv4")):
        yield GoldenRow(f"mxfp4-miles{name}", "miles", f"mxfp4_{variant}", decoded=True)


def _nncf() -> Iterator[GoldenRow]:
    names = {"nvfp4-nncf": "nvfp4", "mxfp4-nncf": "mxfp4", "mxfp8-nncf": "mxfp8", "fp4-nncf": "fp4_b32"}
    for name, variant in names.items():
        yield GoldenRow(name, "nncf", variant, elements="at least 10000", decoded=True)
        yield GoldenRow(f"{name}-small", "nncf", variant, elements="fewer than 10000", decoded=True)
    yield GoldenRow("nvfp4-nncf-medium", "nncf", "nvfp4", elements="at least 10000", decoded=True)


def _onednn() -> Iterator[GoldenRow]:
    for name, variant in (("mxfp4", "mxfp4"), ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4_single")):
        yield GoldenRow(f"{name}-onednn", "onednn", variant)
    yield GoldenRow("mxfp8-onednn-e5m2", "onednn", "mxfp8_e5m2")


def _hf_kernels() -> Iterator[GoldenRow]:
    yield _fake("nvfp4-hf-kernels-reference", "hf_nvfp4_gemm", "nvfp4_reference")
    yield GoldenRow("nvfp4-hf-kernels-reference", "hf_nvfp4_gemm", "nvfp4_reference")  # compares global_scale


def _ascend() -> Iterator[GoldenRow]:
    names = {name: name for name in ("mxfp4", "hifx3", "hifx5")}
    names |= {"hif4": "hifx4", "nvfp4": "nvf4", "mxfp8": "mxfp8e4m3"}
    for name, variant in names.items():
        yield _fake(f"{name}-hifloat4", "hif4", variant)
        yield _fake(f"{name}-hifloat4-native", "hif4", f"{variant}_native")
    yield _fake("hif4-hifloat4-numpy", "hif4", "hifx4_numpy", widen=True)
    yield GoldenRow("hif4-amct", "amct", "hif4", decoded=True)
    yield _fake("hif4-amct", "amct", "hif4_fake")
    for suffix in ("", "_ceil_x", "_ceil_x_search", "_4over6"):
        name = f"mxfp4-msmodelslim{suffix.replace('_', '-')}"
        yield GoldenRow(name, "msmodelslim", f"mxfp4{suffix}")
        yield _fake(name, "msmodelslim", f"mxfp4{suffix}")
    yield GoldenRow("mxfp8-msmodelslim", "msmodelslim", "mxfp8")
    yield _fake("mxfp8-msmodelslim", "msmodelslim", "mxfp8")
    yield GoldenRow("mxfp8-msmodelslim-mse", "msmodelslim", "mxfp8_mse_round")
    yield GoldenRow("mxfp4-msmodelslim-dual", "msmodelslim", "mxfp4_dualscale")
    yield GoldenRow("mxfp4-msmodelslim-dual-64", "msmodelslim", "mxfp4_dualscale64")


PRODUCERS = (
    *(_te_rows, _flashinfer_rows, _modelopt_rows, _torchao_rows, _other_rows, _gguf_rows, _mlx_rows),
    *(_vllm, _triton_kernels, _quark, _auto_round, _fouroversix, _comfy_kitchen, _mslk, _others),
    *(_jax, _miles, _nncf, _onednn, _hf_kernels, _ascend, _producers_cpu, _producers_compiled),
)
ROWS = tuple(row for rows in PRODUCERS for row in rows())
COMPARED = frozenset(row.recipe for row in ROWS)  # ids of the recipes that are compared with recorded arrays
