"""Test files of ComfyUI: how they are written, how they are read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy_formats as numpy
import oracle
import pytest
import synthetic
from numpy_formats import E5M2
from synthetic import BF16, E4M3, refused

import fp4kit
from fp4kit.checkpoint import Rules, convert, make_plan
from fp4kit.checkpoint.identify.run import identify_checkpoint
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.reconcile import reconcile
from fp4kit.checkpoint.selection.selection import Wishes
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify
from fp4kit.storage.files import CheckpointError, read_header

NAME = "model.diffusion_model.blocks.0.qkv"
# The scales (224, 160 / 16) do not fill their tiles of 128 x 4: 224 rows need 2 tiles, and 10 columns need 3.
SHAPE = (224, 160)


def model(root: Path, shape: tuple[int, int] = SHAPE) -> np.ndarray:
    """Write a model with the linear layer NAME and a norm to the directory `root`. Return the layer's weight."""
    x = synthetic.random(NAME, shape) * np.exp2(np.arange(shape[0]) % 5)[:, None]
    x = x.astype(BF16)
    synthetic.write_model(root, {"model_type": "flux"}, {f"{NAME}.weight": x, "norm.weight": np.ones(160, BF16)})
    return x


def blocked(scales: np.ndarray) -> bytes:
    """Return scale bytes (rows, blocks) in cuBLAS's tiles of 128 x 4, by the formula in cuBLAS's documentation."""
    rows, columns = scales.shape
    high, wide = -(-rows // 128), -(-columns // 4)
    found = bytearray(high * wide * 512)
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128) * wide + c // 4
            found[tile * 512 + r % 32 * 16 + r // 32 % 4 * 4 + c % 4] = scales[r, c]
    return bytes(found)


@pytest.mark.parametrize("recipe", ["nvfp4-te", "mxfp8-te", "nvfp4-comfy-kitchen", "mxfp8-comfy-kitchen"])
def test_bytes_are_those_of_quantize_in_the_order_of_comfyui(recipe: str, tmp_path: Path) -> None:
    x = model(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "out", recipe, format="comfy")
    have, q = oracle.load(tmp_path / "out"), fp4kit.quantize(x, recipe)
    codes = np.asarray(q.packed)
    wanted = (codes << 4 | codes >> 4) if recipe.startswith("nvfp4") else codes
    scales = blocked(np.asarray(q.block_scale))
    dtype = "F8_E4M3" if recipe.startswith("nvfp4") else "U8"
    assert have[f"{NAME}.weight"][1:] == (wanted.shape, wanted.tobytes())
    assert have[f"{NAME}.weight_scale"] == (dtype, (256, len(scales) // 256), scales)
    tag = json.loads(have[f"{NAME}.comfy_quant"][2])
    assert tag == {"format": recipe.partition("-")[0], "orig_shape": list(SHAPE)}
    if recipe.startswith("nvfp4"):
        assert have[f"{NAME}.weight_scale_2"] == ("F32", (), np.float32(q.tensor_scale).tobytes())
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("recipe", ["nvfp4-modelopt", "mxfp8-modelopt"])
def test_codes_move_to_other_containers_and_back(recipe: str, tmp_path: Path) -> None:
    model(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "a", recipe, format="comfy")
    assert verify(tmp_path / "a", tmp_path / "m").clean
    convert(tmp_path / "m", tmp_path / "b", recipe, format="modelopt")
    convert(tmp_path / "a", tmp_path / "c", recipe, format="modelopt")
    assert oracle.load(tmp_path / "b") == oracle.load(tmp_path / "c")
    convert(tmp_path / "b", tmp_path / "d", recipe, format="comfy")
    assert oracle.load(tmp_path / "a") == oracle.load(tmp_path / "d")
    for name in "bd":
        convert(tmp_path / name, tmp_path / f"{name}16", format="bf16")
    assert oracle.load(tmp_path / "b16") == oracle.load(tmp_path / "d16")


def changed(root: Path, tag: object, metadata: dict[str, str] | None = None) -> Path:
    """Write a ComfyUI model whose tag is replaced by `tag`, and return its path.

    The tag is the layer's `.comfy_quant` tensor. A `tag` of type str is stored as it is, any other value as JSON; None
    leaves the tensor out. `metadata` is stored in the header of the safetensors file.
    """
    model(root / "m")
    convert(root / "m", root / "a", "nvfp4-te", format="comfy")
    tensors = oracle.arrays(oracle.load(root / "a"))
    del tensors[f"{NAME}.comfy_quant"]
    if tag is not None:
        text = tag if isinstance(tag, str) else json.dumps(tag)
        tensors[f"{NAME}.comfy_quant"] = np.frombuffer(text.encode(), np.uint8)
    (root / "b").mkdir()
    synthetic.write_file(root / "b" / "model.safetensors", tensors, metadata)
    (root / "b" / "config.json").write_text("{}")
    return root / "b"


@pytest.mark.parametrize(
    ("tag", "text"),
    [
        ({"format": "float8_e5m2"}, "declares float8_e5m2, but the tensors are comfy nvfp4"),
        ({"format": "nvfp4", "orig_shape": [200, 160]}, "padded layers are not supported"),
        ({"format": "nvfp4", "orig_shape": 5}, "declares the shape 5, but the tensors hold"),
        ({"format": "mxfp8", "orig_shape": list(SHAPE)}, "declares mxfp8, but the tensors are comfy nvfp4"),
        (
            {"format": "nvfp4", "orig_shape": list(SHAPE), "convrot": True},
            "has the key convrot, which fp4kit does not know",
        ),
        ("[1]", "holds a JSON list; an object is needed"),
        ("{", "not valid JSON"),
    ],
)
def test_tags_that_are_refused(tag: object, text: str, tmp_path: Path) -> None:
    with refused(text):
        make_plan(changed(tmp_path, tag), format="bf16")


@pytest.mark.parametrize("ignore", [(), ("*.comfy_quant",)])
def test_an_ambiguous_tag_is_read_as_comfyui_reads_it(ignore: tuple[str, ...], tmp_path: Path) -> None:
    """Without a nibble order in the tag, the even element is in the high nibble, and a warning says so."""
    root = changed(tmp_path, {"format": "nvfp4"})
    plan = make_plan(root, format="bf16", ignore=ignore)
    convert(root, tmp_path / "x", format="bf16", ignore=ignore)
    convert(tmp_path / "a", tmp_path / "y", format="bf16")
    assert oracle.load(tmp_path / "x") == oracle.load(tmp_path / "y")
    warnings = plan.warnings, [issue.text for issue in verify(root, ignore=ignore).issues]
    assert any("two orders of nibbles" in text for text in warnings[0]) == (not ignore)
    assert any("two orders of nibbles" in text for text in warnings[1])


def test_metadata_in_place_of_tags(tmp_path: Path) -> None:
    layers = {NAME: {"format": "nvfp4", "orig_dtype": "torch.bfloat16", "orig_shape": list(SHAPE)}}
    text = json.dumps({"format_version": "1.0", "layers": layers})
    root = changed(tmp_path, None, {"_quantization_metadata": text})
    convert(root, tmp_path / "x", format="bf16")
    convert(tmp_path / "a", tmp_path / "y", format="bf16")
    assert oracle.load(tmp_path / "x") == oracle.load(tmp_path / "y")


@pytest.mark.parametrize("format", ["bf16", "modelopt", "comfy"])
def test_metadata_about_stored_layers_is_not_copied(format: str, tmp_path: Path) -> None:
    """Entries of ComfyUI and torchao say how the source stores its layers, and would be wrong in the result."""
    x = model(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "q", "nvfp4-te", format="comfy")
    tensors = oracle.arrays(oracle.load(tmp_path / "q"))
    entry = tensors.pop(f"{NAME}.comfy_quant").tobytes().decode()
    layers = {NAME: json.loads(entry)}
    metadata = {
        "format": "pt",
        "author": "somebody",
        "norm.weight": json.dumps({"_type": "Tensor"}),
        "_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers}),
    }
    source = tmp_path / "tagged.safetensors"
    synthetic.write_file(source, tensors, metadata)
    convert(source, tmp_path / "out.safetensors", "nvfp4-te", format=format)
    header = read_header(tmp_path / "out.safetensors")
    kept = header.metadata
    assert kept["author"] == "somebody" and not {"_quantization_metadata", "norm.weight"} & set(kept)
    assert verify(tmp_path / "out.safetensors").clean == (format != "bf16")  # a file of BF16 has nothing to verify
    if format == "bf16":
        assert ("BF16", x.shape) in [(entry.dtype, entry.shape) for entry in header.entries]


def test_row_counts_that_comfyui_cannot_load_are_refused(tmp_path: Path) -> None:
    """The plan rejects an NVFP4 layer whose number of rows is not a multiple of 16, because ComfyUI cannot load it."""
    model(tmp_path / "m", (200, 160))
    with refused(f"{NAME}: has 200 rows; ComfyUI needs a multiple of 16 for nvfp4; leave it out with --keep"):
        make_plan(tmp_path / "m", "nvfp4-te", format="comfy")
    with refused("recipe mxfp4-ocp: cannot be stored for ComfyUI"):
        make_plan(tmp_path / "m", "mxfp4-ocp", format="comfy")
    with refused("format comfy: convert_tensors does not write such files"):
        Rules.of("nvfp4-te", format="comfy")
    model(tmp_path / "n")
    convert(tmp_path / "n", tmp_path / "out", "nvfp4-te", format="comfy")
    with pytest.raises(CheckpointError, match="has no layer in NVFP4 of Model-Optimizer"):  # ComfyUI joins no layers
        reconcile(tmp_path / "out", None)


LAYERS = {"model.diffusion_model.blocks.0.qkv": (96, 64), "model.diffusion_model.blocks.0.proj": (64, 96)}
OTHERS = {"model.diffusion_model.img_in.weight": numpy.gaussian(1, 32, 64).astype(BF16)}


def tag(format: str) -> np.ndarray:
    return np.frombuffer(json.dumps({"format": format}).encode(), np.uint8)


def scaled(dtype: np.dtype, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (codes, scale, values) of a matrix with one scale; the largest value of `dtype` is that of ComfyUI."""
    most = {E4M3: 448, E5M2: 57344, np.dtype(np.int8): 127}[dtype]
    scale = np.float32(np.abs(x).max() / most)
    codes = np.rint(x / scale).astype(dtype) if dtype == np.int8 else (x / scale).astype(dtype)
    return codes, scale, codes.astype(np.float32) * scale


def old(dtype: np.dtype, given: float = 1.0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return (tensors, values) of a file in ComfyUI's older spelling."""
    tensors, wanted = {"model.diffusion_model.scaled_fp8": np.zeros(2, dtype), **OTHERS}, {}
    for seed, (name, shape) in enumerate(LAYERS.items()):
        codes, scale, wanted[name] = scaled(dtype, numpy.gaussian(seed, *shape))
        tensors |= {f"{name}.weight": codes, f"{name}.scale_weight": scale.reshape(())}
        tensors[f"{name}.scale_input"] = np.float32(given).reshape(())
    return tensors, wanted


def tagged(
    dtype: np.dtype, format: str, scale_dtype: np.dtype, shape: tuple[int, ...] = ()
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return (tensors, values) of a file with tags.

    shape: the shape of the scales, where the first axis is the rows; () for one scale per layer.
    """
    tensors, wanted = {**OTHERS}, {}
    for seed, (name, size) in enumerate(LAYERS.items()):
        codes, scale, _ = scaled(dtype, numpy.gaussian(seed, *size))
        scales = np.full((size[0], *shape[1:]) if shape else (), scale * 1.37).astype(scale_dtype)
        wanted[name] = codes.astype(np.float32) * scales.astype(np.float32).reshape(-1, 1)
        tensors |= {f"{name}.weight": codes, f"{name}.weight_scale": scales, f"{name}.comfy_quant": tag(format)}
    return tensors, wanted


def cast(dtype: np.dtype) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return (tensors, values) of a file that was cast to FP8 as a whole: matrices, a norm, a bias, a convolution."""
    tensors = {f"{name}.weight": numpy.gaussian(seed, *shape) for seed, (name, shape) in enumerate(LAYERS.items())}
    tensors |= {"norm.weight": numpy.gaussian(5, 64) + 1, "proj.bias": numpy.gaussian(6, 96)}
    tensors["conv.weight"] = numpy.gaussian(7, 8, 4, 3, 3)
    cast = {name: x.astype(dtype) for name, x in tensors.items()}
    wanted = {name.removesuffix(".weight"): x.astype(np.float32) for name, x in cast.items()}
    return {**cast, **OTHERS}, wanted


F32, INT8 = np.dtype(np.float32), np.dtype(np.int8)
FP8, FP8_E5M2 = "fp8-comfy-kitchen", "fp8-comfy-kitchen-e5m2"
# name -> (tensors and values, container, the recipe of ComfyUI that stores the same codes)
FILES = {
    "scale_weight": (lambda: old(E4M3), "comfy scaled_fp8", FP8),
    "scale_weight and scale_input": (lambda: old(E4M3, 0.02), "comfy scaled_fp8", FP8),
    "scale_weight E5M2": (lambda: old(E5M2), "comfy scaled_fp8 e5m2", FP8_E5M2),
    "tags": (lambda: tagged(E4M3, "float8_e4m3fn", F32), "comfy float8_e4m3fn", FP8),
    "tags, BF16 scales": (lambda: tagged(E4M3, "float8_e4m3fn", BF16), "comfy float8_e4m3fn", FP8),
    "tags E5M2": (lambda: tagged(E5M2, "float8_e5m2", F32), "comfy float8_e5m2", FP8_E5M2),
    "INT8": (lambda: tagged(INT8, "int8_tensorwise", F32), "comfy int8_tensorwise", ""),
    "INT8 rows": (lambda: tagged(INT8, "int8_tensorwise", F32, (0,)), "comfy int8_tensorwise per row", ""),
    "INT8 columns of 1": (lambda: tagged(INT8, "int8_tensorwise", F32, (0, 1)), "comfy int8_tensorwise per row", ""),
    "cast": (lambda: cast(E4M3), "cast to float8_e4m3fn", FP8),
    "cast E5M2": (lambda: cast(E5M2), "cast to float8_e5m2", FP8_E5M2),
}


def values(path: Path) -> dict[str, np.ndarray]:
    """Return the values of a model of one file after a conversion to BF16, by module name."""
    out = path.with_name(f"{path.stem}-bf16.safetensors")
    convert(path, out, format="bf16")
    found = oracle.arrays(oracle.load_file(out))
    assert {x.dtype for x in found.values()} == {BF16}
    return {name.removesuffix(".weight"): x.astype(np.float32) for name, x in found.items()}


@pytest.mark.parametrize("name", FILES)
def test_8_bit_files_are_read_and_written(name: str, tmp_path: Path) -> None:
    """Values are codes times scales, or the codes of a cast; a file for ComfyUI keeps codes and has float32 scales."""
    made, container, recipe = FILES[name]
    tensors, wanted = made()
    path = tmp_path / "a.safetensors"
    synthetic.write_file(path, tensors)
    model = inspect_checkpoint(path)
    assert {str(weight.container) for weight in model.layers.values()} == {container}
    assert not [item for item in model.items if item.group in ("refused", "doubtful")]
    errors = [issue.text for issue in verify(path).issues if issue.severity == "error"]
    assert errors == ["is BF16; ComfyUI needs F32; fp4kit convert --format comfy writes it"] * (2 * ("BF16" in name))
    found = values(path)
    others = {name.removesuffix(".weight"): x.astype(np.float32) for name, x in OTHERS.items()}
    assert set(found) == {*wanted, *others}
    for module, x in {**wanted, **others}.items():
        assert np.array_equal(found[module], x.astype(BF16).astype(np.float32)), module
    assert verify(tmp_path / "a-bf16.safetensors", path).clean
    verdict = identify_checkpoint(path, tmp_path / "a-bf16.safetensors")
    assert len(verdict.layers) == len(LAYERS) and "nothing explains" not in verdict.sentence
    if not recipe:
        with refused("use --requantize to allow that"):
            make_plan(path, "nvfp4-te", format="comfy")
        return
    convert(path, tmp_path / "b.safetensors", recipe, format="comfy")
    have = oracle.arrays(oracle.load_file(tmp_path / "b.safetensors"))
    ends = {".weight", ".weight_scale", ".comfy_quant", *((".input_scale",) if "input" in name else ())}
    for layer in LAYERS:
        assert {end for end in ends if layer + end in have} == {key[len(layer) :] for key in have if layer in key}
        assert have[f"{layer}.weight"].tobytes() == tensors[f"{layer}.weight"].tobytes()
        assert have[f"{layer}.weight_scale"].dtype == np.float32 and have[f"{layer}.weight_scale"].shape == ()
    assert not any(key.endswith("scaled_fp8") for key in have)
    again = values(tmp_path / "b.safetensors") if not name.startswith("cast") else found
    assert all(np.array_equal(found[module], again[module]) for module in found)
    assert not [issue for issue in verify(tmp_path / "b.safetensors").issues if issue.severity == "error"]


@pytest.mark.parametrize("recipe", [FP8, FP8_E5M2])
def test_fp8_for_comfyui(recipe: str, tmp_path: Path) -> None:
    """FP8 has the codes of quantize, one float32 scale, and a tag; other rows than multiples of 16 are usual."""
    x = model(tmp_path / "m", (36, 160))
    convert(tmp_path / "m", tmp_path / "out", recipe, format="comfy")
    have, q = oracle.load(tmp_path / "out"), fp4kit.quantize(x, recipe)
    dtype, format = ("F8_E5M2", "float8_e5m2") if "e5m2" in recipe else ("F8_E4M3", "float8_e4m3fn")
    assert have[f"{NAME}.weight"] == (dtype, x.shape, np.asarray(q.packed).tobytes())
    assert have[f"{NAME}.weight_scale"] == ("F32", (), np.float32(q.tensor_scale).tobytes())
    assert json.loads(have[f"{NAME}.comfy_quant"][2]) == {"format": format, "orig_shape": [36, 160]}
    assert verify(tmp_path / "out", tmp_path / "m").clean
    assert identify_checkpoint(tmp_path / "out", tmp_path / "m").recipe == recipe


def test_int8_embeddings_are_kept(tmp_path: Path) -> None:
    """In a file for ComfyUI, an INT8 layer that is not quantized again keeps its codes, scales and tag."""
    tensors, _ = tagged(INT8, "int8_tensorwise", F32, (0,))
    embedding = {name.replace("model.diffusion_model.blocks.0.qkv", "embed_tokens"): x for name, x in tensors.items()}
    embedding = {name: x for name, x in embedding.items() if name.startswith("embed_tokens")}
    parts = numpy.nvfp4(numpy.gaussian(3, 128, 64), high_first=True)
    layer = {".weight": parts.codes, ".weight_scale": numpy.swizzled(parts.scales), ".comfy_quant": tag("nvfp4")}
    factors = np.exp(numpy.gaussian(4, 64)).astype(BF16)
    layer |= {".weight_scale_2": np.asarray(parts.tensor_scale), ".pre_quant_scale": factors}
    path = tmp_path / "a.safetensors"
    synthetic.write_file(path, embedding | {f"up_proj{end}": x for end, x in layer.items()})
    decoded = values(path)
    wanted = (parts.values * factors.astype(np.float32)).astype(BF16).astype(np.float32)
    assert np.array_equal(decoded["up_proj"], wanted)
    for format, end in (("comfy", ".safetensors"), ("modelopt", "")):
        out = tmp_path / f"{format}{end}"
        convert(path, out, "nvfp4-te", format=format, wishes=Wishes(keep=("embed_tokens",)))
        have = oracle.arrays(oracle.load_file(out) if end else oracle.load(out))
        again = have.get("embed_tokens.weight")
        if format == "comfy":
            same = (".weight", ".weight_scale")
            assert all(
                have[f"embed_tokens{one}"].tobytes() == embedding[f"embed_tokens{one}"].tobytes() for one in same
            )
            assert json.loads(have["embed_tokens.comfy_quant"].tobytes())["format"] == "int8_tensorwise"
        else:
            assert np.array_equal(again.astype(np.float32), decoded["embed_tokens"])
        assert have["up_proj.pre_quant_scale"].tobytes() == factors.tobytes()


def test_scales_that_are_missing_are_no_casts(tmp_path: Path) -> None:
    """FP8 without scales is refused if the file says that there were scales, or if its codes are large."""
    tensors, _ = old(E4M3)
    first, second = LAYERS
    dropped = (".scale_weight", ".scale_input", "scaled_fp8")
    bare = {name: x for name, x in tensors.items() if not name.endswith(dropped)}
    marked = {**bare, "scaled_fp8": np.zeros(2, E4M3)}
    small, _ = cast(E4M3)
    mixed = {**small, f"{first}.weight_scale": np.float32(1).reshape(()), "x.weight_scale": np.ones((), np.float32)}
    one = {name: x for name, x in tensors.items() if name not in (f"{second}.scale_weight", f"{second}.scale_input")}
    for number, (case, text) in enumerate(
        ((bare, "too large for weights; their scales are missing"), (marked, f"{first}.weight"), (mixed, "x.weight"))
    ):
        synthetic.write_file(tmp_path / f"{number}.safetensors", case)
        with refused(text):
            make_plan(tmp_path / f"{number}.safetensors", format="bf16")
    synthetic.write_file(tmp_path / "one.safetensors", one)
    with refused(f"{second}.weight"):
        make_plan(tmp_path / "one.safetensors", format="bf16")
    root = tmp_path / "declared"
    synthetic.write_model(root, {"quantization_config": {"quant_method": "fp8"}}, small)
    with refused(f"{first}.weight"):
        make_plan(root, format="bf16")


def test_input_scales_of_some_layers(tmp_path: Path) -> None:
    """verify names layers without an input scale or with a zero one, and input scales of layers that have no codes."""
    tensors = {**OTHERS, "model.diffusion_model.img_in.input_scale": np.ones((), np.float32)}
    for seed, name in enumerate(("a.img_mlp", "a.txt_mlp")):
        parts = numpy.nvfp4(numpy.gaussian(seed, 128, 64), high_first=True)
        tensors |= {f"{name}.weight": parts.codes, f"{name}.weight_scale": numpy.swizzled(parts.scales)}
        tensors |= {f"{name}.weight_scale_2": np.asarray(parts.tensor_scale), f"{name}.comfy_quant": tag("nvfp4")}
    tensors["a.img_mlp.input_scale"] = np.ones((), np.float32)
    path = tmp_path / "a.safetensors"
    synthetic.write_file(path, tensors)
    issues = [f"{issue.subject}: {issue.text}" for issue in verify(path).issues]
    assert any("a.txt_mlp: no input scale, but 1 of 2 layers in comfy nvfp4 have one" in line for line in issues)
    stray = "img_in.input_scale (F32 []): a scale of inputs beside a layer that is not quantized; it is left out"
    assert any(stray in line for line in issues)
    assert "model.diffusion_model.img_in.input_scale" not in values(path)
    synthetic.write_file(path, tensors | {"a.img_mlp.input_scale": np.zeros((), np.float32)})
    zero = "a.img_mlp: input_scale is 0.0; a positive finite number is needed"
    assert zero in [f"{issue.subject}: {issue.text}" for issue in verify(path).issues]
    synthetic.write_file(path, tensors)
    with refused("has no input scale, but 1 of"):
        make_plan(path, "nvfp4-te", format="comfy", wishes=Wishes(keep=("*img_in",)))


def test_the_dtype_of_a_cast_model_becomes_bfloat16(tmp_path: Path) -> None:
    tensors, _ = cast(E4M3)
    text = {"dtype": "torch.float8_e4m3fn", "x": 1}
    config = {"torch_dtype": "float8_e4m3fn", "text_config": text, "dtype": "float16"}
    synthetic.write_model(tmp_path / "m", config, tensors)
    convert(tmp_path / "m", tmp_path / "out", format="bf16")
    wanted = {"torch_dtype": "bfloat16", "text_config": {"dtype": "bfloat16", "x": 1}, "dtype": "float16"}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == wanted
