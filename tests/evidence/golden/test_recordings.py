"""Test sets of recorded outputs, and the recordings that no recipe is compared with by name."""

import zipfile

import ml_dtypes
import numpy as np
import pytest
from engine_cases import agree
from recorded import groups
from statements import tf32
from together import together

import fp4kit
from fp4kit.evidence.golden.golden_set import BASES, RECORDED, GoldenSet, is_packed, references
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import BNB_FP4, NF4
from fp4kit.layouts import pad, shuffle_rows, swizzle_scales, unswizzle_scales
from fp4kit.reference.codec import block_amax
from tools import pack_golden


@pytest.fixture
def original(tmp_path):
    """Write a small set of recordings in the original form; return its folder.

    It has equal arrays, NaN, 0-d and empty arrays, several dtypes, and a file that packing must exclude.
    """
    codes = np.arange(12, dtype=np.uint8).reshape(3, 4)
    nan = np.array([0x7FC00000, 0xFFC00001], np.uint32).view(np.float32)
    directory = tmp_path / "original"
    directory.mkdir()
    np.savez(directory / "inputs.npz", a__f32=nan, b__bf16=np.array([[0x3F80, 0xFF80]], np.uint16))
    np.savez(
        directory / "te.npz",
        **{
            "a__f32/one/codes": codes,
            "b__bf16/one/codes": codes.copy(),
            "b__bf16/two/more/codes": codes.reshape(4, 3),
            "b__bf16/one/amax": np.float32(3),
            "other/one/values": nan[::-1],
            "b__bf16/none": np.empty((0, 4), np.int64),
        },
    )
    np.savez(directory / "rcp_approx_sm90.npz", delta=codes)
    return directory


@pytest.fixture(params=["original", "packed"])
def small(request, original, tmp_path):
    """Return the small set of recordings, once in each form."""
    if request.param == "original":
        return GoldenSet.open(original)
    return packed(original, tmp_path / "packed")


def packed(original, folder):
    """Pack the files of an original set into a folder and return the packed set."""
    golden = GoldenSet.open(original)
    for name in ("inputs", "te"):
        assert pack_golden.add(folder, name, pack_golden.arrays_of(golden, name)) == [name]
    return GoldenSet.open(folder)


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.npz")}


def test_a_producer_adds_only_itself(tmp_path, original):
    folder = packed(original, tmp_path / "packed").path
    before = bytes_of(folder)
    new = {"a__f32/one/codes": np.arange(3, dtype=np.uint8)}
    assert pack_golden.add(folder, "another", new) == ["another"]
    after = bytes_of(folder)
    assert before.items() <= after.items() and after.keys() - before.keys() == {"another.npz"}
    assert GoldenSet.open(folder).files() == ("another", "te")


def test_arrays_are_added_to_a_producers_file(tmp_path, original):
    folder = packed(original, tmp_path / "packed").path
    key, count = "a__f32/one/codes", len(GoldenSet.open(original).keys("te"))
    pack_golden.add(folder, "te", {"a__f32/new/codes": np.arange(3, dtype=np.uint8)})
    assert len(GoldenSet.open(folder).keys("te")) == count + 1
    other = {key: np.arange(4, dtype=np.uint8)}
    with pytest.raises(ValueError, match=f"te/{key} differs from the recorded one"):
        pack_golden.add(folder, "te", other)
    pack_golden.add(folder, "te", other, replace=True)
    assert GoldenSet.open(folder).get("te", key).tolist() == [0, 1, 2, 3]


@pytest.fixture
def similar_arrays(tmp_path):
    """Return (a packed folder, an array) for two arrays that differ in one byte.

    The folder's file "te" has the other array, and its file "quark" the returned one.
    """
    codes = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    near = codes.copy()
    near[7] ^= 1
    pack_golden.add(tmp_path, "te", {"a__f32/one/codes": codes, "a__f32/one/values": codes.view(np.float32)})
    pack_golden.add(tmp_path, "quark", {"a__f32/its/codes": near, "a__f32/its/values": near.view(np.float32)})
    return tmp_path, near


def test_an_array_like_one_of_a_base_is_stored_as_the_difference(similar_arrays):
    folder, near = similar_arrays
    assert references(folder / "quark.npz") == {
        "a__f32/its/codes": ("te", "a__f32/one/codes"),
        "a__f32/its/values": ("te", "a__f32/one/values"),
    }
    assert (folder / "quark.npz").stat().st_size < 900 < (folder / "te.npz").stat().st_size
    for golden in (GoldenSet.open(folder), GoldenSet.open(folder / "quark.npz")):
        assert golden.get("quark", "a__f32/its/codes").tobytes() == near.tobytes()
        assert golden.get("quark", "a__f32/its/values").tobytes() == near.tobytes()


def test_bases_refer_to_earlier_bases_alone(golden):
    ranks = {name: pack_golden.rank(name) for name in ("inputs", *golden.files())}
    for name in ranks:
        for file, _ in filter(None, references(RECORDED / f"{name}.npz").values()):
            assert file in BASES and ranks[file] < ranks[name]


def test_files_that_refer_to_a_replaced_array_are_packed_again(similar_arrays):
    folder, near = similar_arrays
    changed = np.zeros(1000, np.uint8)
    written = pack_golden.add(folder, "te", {"a__f32/one/codes": changed}, replace=True)
    assert written == ["te", "quark"]
    golden = GoldenSet.open(folder)
    assert golden.get("te", "a__f32/one/codes").tobytes() == changed.tobytes()
    assert golden.get("quark", "a__f32/its/codes").tobytes() == near.tobytes()


def test_only_the_files_that_are_asked_for_are_read(similar_arrays):
    folder, _ = similar_arrays
    (folder / "ao.npz").write_bytes(b"no file of arrays")
    golden = GoldenSet.open(folder)
    assert golden.files() == ("ao", "quark", "te")
    assert golden.keys("quark") == ("a__f32/its/codes", "a__f32/its/values")
    with pytest.raises(zipfile.BadZipFile):
        golden.keys("ao")


def test_one_file_is_opened_with_its_inputs(tmp_path, original):
    packed(original, tmp_path / "packed")
    for path in (original / "te.npz", tmp_path / "packed" / "te.npz"):
        golden = GoldenSet.open(path)
        assert (golden.files(), golden.inputs()) == (("te",), ("a__f32", "b__bf16"))
        assert golden.variants("te") == {"one": ("a__f32", "b__bf16"), "two/more": ("b__bf16",)}


def test_the_tool_packs_files_into_a_directory(tmp_path, original, monkeypatch, capsys):
    files = [str(path) for path in original.glob("*.npz")]
    monkeypatch.setattr("sys.argv", ["pack_golden", *files, "--into", str(tmp_path / "packed")])
    pack_golden.main()
    assert sorted(bytes_of(tmp_path / "packed")) == ["inputs.npz", "te.npz"]
    assert capsys.readouterr().out.count("read back and equal") == 2
    for name in ("inputs", "te"):
        pack_golden.verify(
            pack_golden.arrays_of(GoldenSet.open(original), name), GoldenSet.open(tmp_path / "packed"), name
        )


def test_names(small):
    assert set(small.files()) - {"rcp_approx_sm90"} == {"te"}
    assert small.inputs() == ("a__f32", "b__bf16")
    assert len(small.keys("te")) == 6
    assert small.variants("te") == {"one": ("a__f32", "b__bf16"), "two/more": ("b__bf16",)}


def test_arrays(small):
    assert small.get("te", "b__bf16/one/amax").shape == ()
    assert small.get("te", "b__bf16/none").shape == (0, 4)
    assert small.get("te", "b__bf16/two/more/codes").tolist() == np.arange(12).reshape(4, 3).tolist()
    assert small.get("te", "other/one/values").view(np.uint32).tolist() == [0xFFC00001, 0x7FC00000]
    assert small.input("b__bf16").dtype == ml_dtypes.bfloat16
    assert small.input("b__bf16").tolist() == [[1.0, -np.inf]]
    assert small.input("a__f32").dtype == np.float32


def test_arrays_are_read_only(small):
    with pytest.raises(ValueError, match="read-only"):
        small.get("te", "a__f32/one/codes")[0] = 1


def test_missing_names_are_reported(small):
    assert (small.keys("ao"), small.variants("ao")) == ((), {})
    with pytest.raises(KeyError, match=r"GoldenSet\.get: no 'x' in 'ao' of .*; files: .*te"):
        small.get("ao", "x")
    with pytest.raises(KeyError, match=r"GoldenSet\.get: no 'x' in 'te' of .*; the file has 6 keys"):
        small.get("te", "x")
    with pytest.raises(KeyError, match=r"no 'c__f32' in 'inputs'"):
        small.input("c__f32")


def test_a_set_without_inputs(tmp_path):
    np.savez(tmp_path / "te.npz", **{"a__f32/one/codes": np.zeros(3)})
    golden = GoldenSet.open(tmp_path)
    assert (golden.inputs(), golden.variants("te"), golden.keys("te")) == ((), {}, ("a__f32/one/codes",))


def test_no_set(tmp_path):
    (tmp_path / "README.md").write_text("no set")
    for path in (tmp_path, tmp_path / "README.md", tmp_path / "te.npz"):
        with pytest.raises(
            FileNotFoundError, match=r"GoldenSet\.open: .* is neither a \.npz file of recorded outputs nor"
        ):
            GoldenSet.open(path)


def test_the_recorded_set(golden):
    count = sum(len(golden.keys(file)) for file in golden.files()) + len(golden.inputs())
    assert f" {count} arrays " in (RECORDED / "README.md").read_text(), f"the set has {count} arrays"
    assert "nvfp4_1d" in golden.variants("te")
    assert all(is_packed(path) for path in RECORDED.glob("*.npz"))


def test_verify_sees_a_difference(original, tmp_path):
    source = pack_golden.arrays_of(GoldenSet.open(original), "te")
    pack_golden.write(pack_golden.pack(source, {}), tmp_path / "te.npz")
    source["other/one/values"] = source["other/one/values"][::-1]
    with pytest.raises(ValueError, match="te/other/one/values reads back differently"):
        pack_golden.verify(source, GoldenSet.open(tmp_path), "te")


BOOKS = {"nf4": NF4, "fp4": BNB_FP4}
COUNTS = {"nf4": 19, "fp4": 19}
# bitsandbytes 0.50.2 flushes subnormal bfloat16 values to zero. If rows are not whole blocks, it decodes them with the
# scales of other blocks.
NOT_DECODED = ("tiny__bf16", "amax_sweep__f32")


@pytest.mark.parametrize("name", BOOKS)
def test_tables(name, golden):
    recorded = golden.get("bitsandbytes", f"table/{name}/code")
    assert np.array_equal(BOOKS[name].values, recorded)


@pytest.mark.parametrize("name", BOOKS)
def test_recorded_outputs(name, golden):
    """Codes, scales and values are equal, for blocks that run along the flattened tensor."""
    prefixes = [p for p in groups(golden, "bitsandbytes", "/codes_hi_first") if f"/{name}_b" in p]
    assert len(prefixes) == COUNTS[name]
    for prefix in prefixes:
        source, block = prefix.split("/")[0], int(prefix.rpartition("_b")[2])
        r = fp4kit.custom_recipe(name, BOOKS[name], "float32", block)
        x = golden.input(source).reshape(1, -1)
        q = agree(fp4kit.quantize, x, r)
        high_first = golden.get("bitsandbytes", f"{prefix}/codes_hi_first").reshape(1, -1)
        assert np.array_equal(q.packed, high_first >> 4 | high_first << 4), prefix
        absmax = golden.get("bitsandbytes", f"{prefix}/absmax").reshape(1, -1)
        assert np.array_equal(q.tensor_scale, absmax, equal_nan=True), prefix
        if source not in NOT_DECODED and block == 64:  # only blocks of 64 were decoded
            values = golden.get("bitsandbytes", f"{prefix}/dequant")
            values = values.view(x.dtype).reshape(1, -1).astype(np.float32)
            assert np.array_equal(agree(fp4kit.dequantize, q).astype(np.float32), values, equal_nan=True), prefix


def stored(x, recipe):
    """Return (codes, scales) as comfy-kitchen stores them, for rows and columns that are whole blocks."""
    q = agree(fp4kit.quantize, x, recipe)
    codes = q.packed << 4 | q.packed >> 4 if q.recipe.is_packed else q.packed
    return codes, swizzle_scales(q.block_scale, "swizzled_128x4")


def test_scales_are_stored_swizzled(golden):
    prefixes = [p for p in groups(golden, "comfy_kitchen", "/scales_blocked") if p.endswith("/nvfp4")]
    assert len(prefixes) == 33
    for prefix in prefixes:
        scales = golden.get("comfy_kitchen", f"{prefix}/scales")
        blocked = golden.get("comfy_kitchen", f"{prefix}/scales_blocked")
        assert swizzle_scales(scales, "swizzled_128x4").tobytes() == blocked.tobytes(), prefix


@pytest.mark.parametrize("recipe, size, part", [("nvfp4", 16, "codes_hi_first"), ("mxfp8", 32, "codes")])
def test_other_shapes_are_padded_with_zeros(recipe, size, part, golden):
    """The first 37 rows and 90 columns of an input, padded to whole blocks with zeros, give the recorded bytes."""
    for name in ("weights__bf16", "normal__f32"):
        x = golden.input(name)[:37, :90]
        padded = np.zeros([-(-length // size) * size for length in x.shape], x.dtype)
        padded[:37, :90] = x
        codes, scales = stored(padded, f"{recipe}-comfy-kitchen")
        key = f"{name}/{recipe}_37x90"
        assert np.array_equal(codes, golden.get("comfy_kitchen", f"{key}/{part}")), key
        assert scales.tobytes() == golden.get("comfy_kitchen", f"{key}/scales_blocked").tobytes(), key


def random_bytes(seed, shape):
    """Return the random bytes of ComfyUI for a seed: the lowest byte of each word of PyTorch's generator MT19937."""
    words = np.frombuffer(np.random.RandomState(seed).bytes(4 * np.prod(shape)), np.uint32)
    return words.astype(np.uint8).reshape(shape)


def test_stochastic_rounding(golden, either_engine):
    """ComfyUI's stochastic MXFP8 with seed 1 equals the recipe with ComfyUI's random bytes; NaN has any sign."""
    prefixes = groups(golden, "comfy_kitchen", "/codes")
    prefixes = [prefix for prefix in prefixes if prefix.endswith("/mxfp8_sr_seed1")]
    assert len(prefixes) == 19
    for prefix in prefixes:
        x = golden.input(prefix.split("/")[0])
        seed = random_bytes(1, x.shape)
        q = fp4kit.quantize(x, "mxfp8-comfy-kitchen", rounding="stochastic", seed=seed)
        codes, scales = (golden.get("comfy_kitchen", f"{prefix}/{part}") for part in ("codes", "scales"))
        assert np.array_equal(q.block_scale, scales), prefix
        both_nan = (q.packed & 0x7F == 0x7F) & (codes & 0x7F == 0x7F)
        assert ((q.packed == codes) | both_nan).all(), prefix


VARIANTS = {"mxfp4-fp-quant": "mxfp4_abs_max", "mxfp4-fp-quant-quest": "mxfp4_quest", "nvfp4-fp-quant": "nvfp4_gs3"}


@pytest.mark.parametrize("recipe", VARIANTS)
def test_float32_is_truncated_to_tf32(recipe, golden, either_engine):
    """Elements without their 13 low bits give the recorded values; groups of 32 with inf or NaN are not compared."""
    end = f"__f32/fp_quant_{VARIANTS[recipe]}"
    prefixes = [prefix for prefix in groups(golden, "triton_h100", "/output") if prefix.endswith(end)]
    assert len(prefixes) == 12
    changed = 0
    for prefix in prefixes:
        x = golden.input(prefix.split("/")[0])
        truncated = tf32(x)
        groups_of_32 = block_amax(truncated, fp4kit.recipe("mxfp4-fp-quant-quest"))
        is_finite = np.repeat(np.isfinite(groups_of_32), 32, axis=1)
        recorded = golden.get("triton_h100", f"{prefix}/output")
        found = fp4kit.fake_quantize(truncated, recipe)
        ours, theirs = (np.where(np.isnan(a), np.float32(np.nan), a)[is_finite] for a in (found, recorded))
        assert_same_bits(ours, theirs, prefix)
        with np.errstate(invalid="ignore"):
            changed += int((fp4kit.fake_quantize(x, recipe)[is_finite] != recorded[is_finite]).sum())
    assert changed > 0


def transformed(x, n):
    """Return blocks of n elements multiplied by FP-Quant's Hadamard matrix: float32, each sum rounded once.

    The elements of the matrix are 1 / sqrt(n) in the dtype of x, with Sylvester's signs. float32 is truncated to TF32.
    """
    signs = np.ones((1, 1))
    while len(signs) < n:
        signs = np.block([[signs, signs], [signs, -signs]])
    element, wide = np.asarray(n**-0.5).astype(x.dtype).astype(np.float32), x.astype(np.float32)
    if x.dtype == np.float32:
        element, wide = tf32(element), tf32(wide)
    return (wide.reshape(-1, n).astype(np.float64) @ (signs * element)).astype(np.float32).reshape(x.shape)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("recipe", VARIANTS)
def test_hadamard_transforms(recipe, dtype, golden, either_engine):
    """If the sums of the transform are rounded once, the recorded values are those of the transformed elements.

    The order in which the GPU adds is not known. Groups of 32 with inf or NaN are not compared.
    """
    n = 16 if recipe == "nvfp4-fp-quant" else 32
    end = f"__{dtype}/fp_quant_{VARIANTS[recipe]}_had{n}"
    prefixes = [prefix for prefix in groups(golden, "triton_h100", "/output") if prefix.endswith(end)]
    assert len(prefixes) == 5
    for prefix in prefixes:
        x = golden.input(prefix.split("/")[0])
        is_finite = np.isfinite(x.astype(np.float32)).reshape(-1, 32).all(axis=1).repeat(32).reshape(x.shape)
        recorded = golden.get("triton_h100", f"{prefix}/output")
        recorded = recorded.view(ml_dtypes.bfloat16) if recorded.dtype == np.uint16 else recorded
        with np.errstate(all="ignore"):
            found = fp4kit.fake_quantize(transformed(x, n), recipe).astype(x.dtype)
        assert_same_bits(found[is_finite], recorded[is_finite], prefix)


LAYOUT_SHAPES = ["1x1", "3x5", "8x4", "120x4", "128x4", "129x8", "200x16", "256x3", "300x33"]


@pytest.mark.parametrize("shape", [*LAYOUT_SHAPES, "3x130x6"])
def test_block_scale_interleave(shape, golden):
    scales = golden.get("layouts", f"block_scale_interleave/{shape}/in")
    swizzled = swizzle_scales(scales, "swizzled_128x4")
    assert_same_bits(swizzled.reshape(-1), golden.get("layouts", f"block_scale_interleave/{shape}/out"))
    assert_same_bits(unswizzle_scales(swizzled, "swizzled_128x4", scales.shape), scales)


@pytest.mark.parametrize("layout", ["128x4", "8x4"])
@pytest.mark.parametrize("shape", LAYOUT_SHAPES)
def test_offsets_of_scales(shape, layout, golden):
    """Each scale (r, c) is at the recorded offset, and all padding is zero."""
    offsets = golden.get("layouts", f"offset_{layout}/{shape}")
    numbers = np.arange(1, offsets.size + 1).reshape(offsets.shape)
    flat = swizzle_scales(numbers, f"swizzled_{layout}").reshape(-1)
    assert np.array_equal(flat[offsets], numbers)
    assert np.count_nonzero(flat) == numbers.size
    rows = {"128x4": 128, "8x4": 8}[layout]
    assert flat.size == -(-numbers.shape[0] // rows) * rows * -(-numbers.shape[1] // 4) * 4


@pytest.mark.parametrize("M", [128, 256])
@pytest.mark.parametrize("tile", [64, 128, 256])
def test_shuffled_rows(M, tile, golden):
    assert_same_bits(shuffle_rows(M, tile), golden.get("layouts", f"shuffle_matrix_a_rows/M{M}_tile{tile}"))


@together("tile", [1, 16, 64, 127, 192, 320, 128, 256, 384])
def test_tiles_of_shuffled_rows(tile):
    """Shuffled blocks have 32 rows if the tile is a multiple of 128, else 16.

    FlashInfer's get_shuffle_block_size gives the same numbers.
    """
    block = 16 if tile % 128 else 32
    rows = [start + block // 8 * j + i for start in range(0, 64, block) for i in range(block // 8) for j in range(8)]
    assert shuffle_rows(64, tile).tolist() == rows
    with pytest.raises(ValueError, match=f"needs a multiple of {block} for epilogue tile {tile}"):
        shuffle_rows(block + 8, tile)


def test_shuffled_scales(golden):
    scales = golden.get("layouts", "shuffle_matrix_sf_a/in")
    shuffled = swizzle_scales(scales[shuffle_rows(len(scales), 128)], "swizzled_128x4")
    assert_same_bits(shuffled.reshape(-1), golden.get("layouts", "shuffle_matrix_sf_a/out_tile128"))


def test_layouts_of_modelopt(golden):
    prefixes = groups(golden, "modelopt", "/cutlass")
    assert len(prefixes) == 9
    for prefix in prefixes:
        scales = golden.get("modelopt", f"{prefix}/scales")
        swizzled = swizzle_scales(scales, "swizzled_128x4")
        assert_same_bits(swizzled.reshape(-1), golden.get("modelopt", f"{prefix}/cutlass"), prefix)
        assert_same_bits(swizzled, golden.get("modelopt", f"{prefix}/modelopt_swizzle"), prefix)
        assert_same_bits(pad(scales, 16, 0), golden.get("modelopt", f"{prefix}/pad_row_scale"), prefix)
        assert_same_bits(pad(pad(scales, 16, 0), 16), golden.get("modelopt", f"{prefix}/pad_row_col_scale"), prefix)


def test_layouts_of_torchao(golden):
    prefixes = groups(golden, "ao", "/to_blocked/input")
    assert len(prefixes) == 11
    for prefix in prefixes:
        scales = golden.get("ao", f"{prefix}/to_blocked/input")
        recorded = golden.get("ao", f"{prefix}/to_blocked/output")
        assert_same_bits(swizzle_scales(scales, "swizzled_128x4").reshape(-1), recorded, prefix)
        assert_same_bits(unswizzle_scales(recorded, "swizzled_128x4", scales.shape), scales, prefix)
