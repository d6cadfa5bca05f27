// quantize_tile: quantize blocks of several rows, or blocks of one or more rows by 4over6 (each block gets the better
// of two scales). Blocks have 16 or 32 columns. The elements may have any type, and the matrix any size. R is the
// recipe. If R::kFake, the kernel stores the values to which codes decode instead of codes and scales. t is a tensor
// scale: its encode and decode factors. The fast path encodes blocks of finite elements in few instructions; the exact
// path is valid for all blocks.
#include "amax.cuh"
#include "quantize_tile.cuh"

constexpr int kBlocksPerMultiprocessor =
    R::kBlock > 16 || R::kFinders ? 2 : 4;  // the largest numbers for which no registers are spilled

// What the fast path of quantize_own_rows needs to know about a row. Lengths are in units of amax_power(t), where t is
// the tensor scale of the row.
struct RowUnits {
  bool is_ordinary;  // is_ordinary(t); otherwise the other fields are not used
  float power;       // amax_power(t)
  float inverse;     // 1 / power
  float unit;        // the decoded value of the product of element value 1 and block scale 1, not in units of power
  u32 exponents;     // for bfloat16: what to add to the bits of two magnitudes to multiply them by `inverse`
};

// Return the RowUnits of a row with the tensor scale t: the unit of length for the row's magnitudes, which is
// amax_power(t), the largest power of two that is not above the row's amax, and numbers derived from it. If the fast
// path is not valid for t, is_ordinary is false in the result, and the other fields are 0.
template <class R>
FP4KIT_DEVICE RowUnits row_units(TensorScale t) {
  if (!is_ordinary(t)) return {};
  const u32 exponent = (127u << 7) - (bits_of(amax_power(t)) >> 16);
  return {true, amax_power(t), inverse_amax_power(t), R::kFastError ? t.decode : t.amax / full_range<R>(),
          prmt(exponent, 0u, 0x1010u)};
}

// Return an approximation, with a relative error of at most 2^-22, to the factor by which elements are multiplied under
// a candidate scale. `scale` is the decoded block scale, and t is the tensor scale.
template <class R>
FP4KIT_DEVICE float approximate_factor(float scale, TensorScale t) {
  if constexpr (R::kLaneSums || R::kFlush) return candidate_factor<R>(scale, t);
  return rcp_approx_ftz(scale * t.decode);
}

// Divide the magnitudes of a run of finite elements by row.power (the unit of the row), and store the quotients in
// `out`. For bfloat16, a quotient below 2^-126 may be stored as any number below 2^-126.
template <class R, class In>
FP4KIT_DEVICE void magnitudes_of(const Run<In, R::kBlock>& x, const RowUnits& row, float (&out)[R::kBlock]) {
  Run<In, R::kBlock> run = x;
#pragma unroll
  for (int i = 0; i < run.kWords; ++i) {
    run.w[i] &= FastPath<R, In>::kIs16Bit ? 0x7FFF7FFFu : 0x7FFFFFFFu;
    if constexpr (In::kIsBfloat16) run.w[i] = add_max_s16x2(run.w[i], row.exponents, 0u);
  }
#pragma unroll
  for (int i = 0; i < R::kBlock; ++i) out[i] = In::kIsBfloat16 ? element(run, i) : element(run, i) * row.inverse;
}

// Quantize one block by the fast path, store its codes and its block scale, and return true. Return false, and store
// nothing, if the block must take the exact path. `block` is the number of the block in row number `row`, which has
// `blocks` blocks. `units` and t are the RowUnits and the tensor scale of the row.
//
// The errors of both candidate scales are approximated as in approximate_errors (four_over_six.cuh, which defines e and
// u), but with approximate factors and units. These change a decoded value by up to another 12 e u, so the constants
// below are larger than those of is_decided.
template <class R, class In>
FP4KIT_DEVICE bool quantize_by_units(const QuantizeArguments& a, u32 row, u32 block, u32 blocks,
                                     const Run<In, R::kBlock>& x, TensorScale t, const RowUnits& units) {
  if (!units.is_ordinary) return false;
  const float amax = float_of(largest_bits_of(x));
  u32 codes[2];
  scales_of<R>(quotient_by(amax, 6.0f, kInv6), t, codes[0], codes[1]);
  float magnitudes[R::kBlock], errors[2], u = 0.0f;
  magnitudes_of<R>(x, units, magnitudes);
  bool applies = !R::kLargestError;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const float scale = decode_scale<R>(codes[k]), factor = approximate_factor<R>(scale, t), unit = scale * units.unit;
    applies = applies & (unit > 0x1p-60f) & (magnitude_of(unit * factor - 1.0f) <= 0x1p-21f) & (amax * factor < 6.98f);
    u = unit * units.inverse;
    errors[k] = approximate_error<R>(magnitudes, factor * units.power * 0x1p-126f, u * 0x1p126f);
  }
  const float slack = R::kSquaredError ? fma_rn(errors[0] + errors[1], 0x1.2p-15f, u * u * (R::kBlock * 0x1p-18f))
                                       : u * (R::kBlock * 0x1.8p-16f);
  const bool is_zero = !R::kFlush && is_zero_block(amax, codes[0], codes[1], t);  // any factor gives codes of zeros
  const bool decided = codes[0] == codes[1] || fabsf(errors[1] - errors[0]) > slack;
  if (!is_zero && !(applies && decided)) return false;
  const u32 code = !is_zero && errors[1] < errors[0] ? codes[1] : codes[0];
  const float factor = is_zero ? 1.0f : candidate_factor<R>(decode_scale<R>(code), t);
  if (!takes_fast_path<R, In>(bits_of(amax), {factor, factor})) return false;
  u32 words[R::kBlock / 8];
  encode_finite<R, In>(x, {factor, factor}, words);
  store_words(a.packed + static_cast<u64>(row * blocks + block) * (R::kBlock / 2), words);
  a.scales[scale_offset<R::kLayout, u64>(row, block, blocks)] = static_cast<u8>(code);
  return true;
}

// Quantize a matrix with one tensor scale per row by 4over6 or IF4, for blocks of one row. For each row, first find the
// amax and store it at a.tensor_amax, with the tensor scale at a.tensor_scale (unless that is nullptr). Then store the
// codes and the block scales of the row. A thread block takes one row at a time. Each thread loads its first block of a
// row once, while the previous row is quantized. Further blocks of a row are loaded again for the codes, mostly from a
// cache. Launch with any number of thread blocks of at most kThreads threads.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_own_rows(const QuantizeArguments& a) {
  constexpr AmaxInput kInput = R::kAmaxNan == AmaxNan::propagate ? AmaxInput::all : AmaxInput::no_nan;
  __shared__ TileMemory<R> tile;
  __shared__ u32 largest[3];  // float32 bits of the amaxes of this row, of the next row and of the row before, in turn
  const u32 rows = static_cast<u32>(a.rows), blocks = static_cast<u32>(a.columns) / R::kBlock;
  const auto load = [&](u32 row, u32 block) {
    return load_row<R, In, kAligned>(a, static_cast<i64>(row * blocks + block) * R::kBlock);
  };
  const auto load_first = [&](u32 row) {
    return row < rows && threadIdx.x < blocks ? load(row, threadIdx.x) : Run<In, R::kBlock>{};
  };
  const auto largest_of = [&](u32 row, const Run<In, R::kBlock>& first) {
    u32 own = largest_of_run<Untransformed, In, kInput>(first);
    for (u32 block = threadIdx.x + blockDim.x; block < blocks && row < rows; block += blockDim.x)
      own = maximum(own, largest_of_run<Untransformed, In, kInput>(load(row, block)));
    return own;
  };
  if (threadIdx.x < 3u) largest[threadIdx.x] = 0u;
  __syncthreads();
  Run<In, R::kBlock> x = load_first(blockIdx.x);
  u32 own = largest_of(blockIdx.x, x), slot = 0u;
  for (u32 row = blockIdx.x; row < rows; row += gridDim.x) {
#pragma unroll
    for (int lane = 1; lane < 32; lane *= 2) own = maximum(own, __shfl_xor_sync(0xFFFFFFFFu, own, lane));
    if (threadIdx.x % 32u == 0u) atomicMax(largest + slot, own);
    __syncthreads();
    const float amax = float_of(largest[slot]);
    slot = slot == 2u ? 0u : slot + 1u;
    const TensorScale t = R::TensorRule::template scale<R, In>(amax);
    if (threadIdx.x == 0u) {
      largest[slot == 2u ? 0u : slot + 1u] = 0u;  // the slot of the row before, which all threads have read
      const_cast<float*>(a.tensor_amax)[row] = amax;
      if (a.tensor_scale) store_tensor_scale(a, row, t);
    }
    const RowUnits units = row_units<R>(t);
    Run<In, R::kBlock> next = load_first(row + gridDim.x);
    for (u32 block = threadIdx.x; block < blocks; block += blockDim.x) {
      if (block != threadIdx.x) x = load(row, block);
      if constexpr (!kHasTwoFormats<R>) {
        if (quantize_by_units<R, In>(a, row, block, blocks, x, t, units)) continue;
      }
      quantize_any_four_over_six<R, In, kAligned>(a, BlockRow{row, block, blocks}, true, x, t, tile, 0, 0);
    }
    x = next;
    own = largest_of(row + gridDim.x, x);
  }
}

// Quantize a.x, and store its codes in a.packed, its block scales in a.scales and its tensor scales in a.tensor_scale
// (unless that is nullptr); or store only its values in a.values if R::kFake. The kernel is launched for recipes with
// 4over6 or with blocks of several rows, if neither quantize_columns.cu nor quantize_table.cu supports the call
// (launch/dispatch.py). A thread processes one row of one block at a time.
//
// If R::kFinders is 0, launch with any number of thread blocks. Otherwise launch with a multiple of R::kFinders thread
// blocks, which first find the tensor's amax, or the amax of each row, and store it at a.tensor_amax (amax.cuh). If
// R::kFindsRows, each thread block finds the amaxes of its own rows.
extern "C" __global__ void FP4KIT_CLUSTER __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    quantize_tile_kernel(QuantizeArguments a) {
  if constexpr (R::kFindsRows) {
    quantize_own_rows<R, Input, kAligned>(a);
  } else {
    find_amax<R, Input, kAligned>(a);
    quantize_tile<R, Input, kAligned>(a, whole_grid());
  }
}
