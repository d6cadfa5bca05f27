// requantize: convert blocks with E8M0 scales to blocks with E4M3 scales and a tensor scale 2^m. The codes of a block
// are kept if the block's scale, divided by 2^m, is an E4M3 number (ops/quantize.py). The source is the quantized
// array that is converted. R is the recipe of the result, and In is the type of the values that the host quantizes. `a`
// holds the arguments of the kernels. a.extent describes the range of the source's scales, for blocks with nonzero
// values.
//
// There are three launches:
//   1. requantize_range_kernel finds the range of the source's scales. From that range, every thread of the later
//      launches decides whether 2^m can be the tensor scale. All threads reach the same decision.
//   2. If so, requantize_amax_kernel replaces the tensor amax of the values by the amax that gives 2^m. The host then
//      quantizes the values of the source with that tensor amax.
//   3. requantize_keep_kernel overwrites the blocks of the result whose codes can be kept.
//
// If 2^m cannot be the tensor scale, the last two kernels do nothing.
#include "block.cuh"
#include "warp.cuh"

// The arguments of the three kernels.
struct RequantizeArguments {
  const u8* source;         // packed codes of the source, two per byte, aligned to 8 bytes
  const u8* source_scales;  // one scale code per source_block codes
  // Set to zeros before the first launch. extent[0] and extent[1] describe the blocks with nonzero values: the largest
  // scale code + 1, and 256 - the smallest scale code. extent[2] is 1 if a scale is NaN.
  u32* extent;
  // The outputs of requantize_keep_kernel: the codes; their scales, one per R::kBlock codes; the tensor scale 2^m; and
  // the amax that gives 2^m. requantize_amax_kernel stores only the amax.
  u8* packed;
  u8* scales;
  float* tensor_scale;
  float* tensor_amax;
  i64 blocks, source_block;
};

constexpr u64 kMagnitudes = 0x7777777777777777u;  // the magnitude bits of sixteen E2M1 codes

// Return true if a block of the source has a nonzero element. `block` is the number of the block. Codes of -0 count as
// zero.
FP4KIT_DEVICE bool has_values(const RequantizeArguments& a, i64 block) {
  const u64* words = reinterpret_cast<const u64*>(a.source) + block * (a.source_block / 16);
  u64 any = 0u;
  for (i64 i = 0; i < a.source_block / 16; ++i) any |= words[i] & kMagnitudes;
  return any != 0u;
}

// Raise *maximum_address to the largest `own` among the threads of the warp: store the larger of the two, atomically.
// Nothing is stored if every `own` is 0. All threads of the warp must call this function.
FP4KIT_DEVICE void raise_to_largest(u32* maximum_address, u32 own) {
  own = largest_of_warp(own);
  if (threadIdx.x % 32 == 0 && own != 0u) atomicMax(maximum_address, own);
}

// Widen the range of scale codes in a.extent, by atomic maxima, to include the scales of the source's blocks that
// `grid` assigns to this thread block. Blocks that have only zeros do not count. If the scale of any of these blocks is
// NaN, even of a block of zeros, also set a.extent[2] to 1. All threads of the warp must call this function.
FP4KIT_DEVICE void find_scale_range(const RequantizeArguments& a, Grid grid) {
  u32 top = 0u, bottom = 0u, nan = 0u;
  for (i64 i = first_item(grid); i < a.blocks; i += item_stride(grid)) {
    const u32 code = a.source_scales[i];
    if (code == 255u) nan = 1u;
    if (!has_values(a, i)) continue;
    top = maximum(top, code + 1u);
    bottom = maximum(bottom, 256u - code);
  }
  raise_to_largest(a.extent, top);
  raise_to_largest(a.extent + 1, bottom);
  raise_to_largest(a.extent + 2, nan);
}

// Return 2^exponent as float32, for exponents from -149 to 127. Below -126, the result is subnormal.
FP4KIT_DEVICE float power_of_two(i32 exponent) {
  return float_of(exponent < -126 ? 1u << (exponent + 149) : static_cast<u32>(exponent + 127) << 23);
}

// Return the exponent of the smallest power of two that the scale format of R can represent: -9 for E4M3.
template <class R>
FP4KIT_DEVICE constexpr i32 lowest_exponent() {
  return R::Scale::kEmin - R::Scale::kMantissaBits;
}

// Return true if the recipe R gives the tensor scale 2^m to a tensor with this amax and elements of type In.
template <class R, class In>
FP4KIT_DEVICE bool gives_power(float amax, i32 m) {
  return R::TensorRule::template scale<R, In>(amax).decode == power_of_two(m);
}

// Return true if 2^m can be the tensor scale for the range of scales in `extent`, so that codes can be kept. If so,
// store the exponent in `m`, and in `amax` the tensor amax for which the recipe R computes the tensor scale 2^m. If the
// result is false, neither may be used.
//
// m is chosen such that the largest scale becomes as large as E4M3 allows; it is 0 if all values are zero. The result
// is false in these cases:
//
// - A scale of the source is NaN.
// - The amax is not finite, or the tensor rule of R does not give 2^m for it.
// - Some scales are too small for E4M3, so that the values of their blocks are quantized as Float32, but the tensor
//   rule does not give 2^m for Float32.
template <class R, class In>
FP4KIT_DEVICE bool can_keep(const u32* extent, i32& m, float& amax) {
  const i32 largest = static_cast<i32>(extent[0]) - 1 - 127, smallest = 256 - static_cast<i32>(extent[1]) - 127;
  const bool any = extent[0] != 0u;
  m = any ? largest - R::Scale::kEmax : 0;
  if (extent[2]) return false;
  amax = full_range<R>() * power_of_two(m);
  const bool all_in_range = !any || smallest - m >= lowest_exponent<R>();
  return is_finite(amax) && gives_power<R, In>(amax, m) && (all_in_range || gives_power<R, Float32>(amax, m));
}

// If 2^m can be the tensor scale (can_keep), copy two kinds of blocks from the source to the result: blocks with only
// zeros, which get scale 0, and blocks with a scale that is an E4M3 number when divided by 2^m, which get that number
// as scale. Other blocks of the result do not change. The thread with block 0 also stores the tensor scale and its
// amax. If 2^m cannot be the tensor scale, do nothing. If kUnsignedZero, codes of -0 become codes of +0.
template <class R, class In, bool kUnsignedZero>
FP4KIT_DEVICE void keep(const RequantizeArguments& a, Grid grid) {
  i32 m;
  float amax;
  if (!can_keep<R, In>(a.extent, m, amax)) return;
  const i64 words = a.source_block / 16, scales = a.source_block / R::kBlock;
  for (i64 block = first_item(grid); block < a.blocks; block += item_stride(grid)) {
    if (block == 0) {
      *a.tensor_scale = power_of_two(m);
      *a.tensor_amax = amax;
    }
    const i32 exponent = static_cast<i32>(a.source_scales[block]) - 127 - m;
    const bool holds = has_values(a, block);
    if (holds && exponent < lowest_exponent<R>()) continue;  // this block has new codes
    for (i64 i = block * words; i < (block + 1) * words; ++i) {
      const u64 word = reinterpret_cast<const u64*>(a.source)[i];
      const u64 signs = kUnsignedZero ? (word & kMagnitudes) + kMagnitudes
                                      : ~kMagnitudes;  // the sign is kept if the magnitude is not 0
      reinterpret_cast<u64*>(a.packed)[i] = word & (kMagnitudes | signs);
    }
    const u8 code = holds ? static_cast<u8>(encode_scale<R>(power_of_two(exponent))) : u8{0};
    for (i64 i = block * scales; i < (block + 1) * scales; ++i) a.scales[i] = code;
  }
}

// Find the range of the source's scales, and store it in a.extent, which the caller sets to zeros before: the largest
// scale code + 1 and 256 - the smallest scale code, among the blocks with nonzero values. Store 1 in a.extent[2] if the
// scale of any block is NaN. This is the first launch of a requantization. A thread processes one block at a time.
// Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) requantize_range_kernel(RequantizeArguments a) {
  find_scale_range(a, whole_grid());
}

// If 2^m can be the tensor scale, store the tensor amax that gives 2^m in *a.tensor_amax. Otherwise leave
// *a.tensor_amax unchanged. One thread does this. This is the second launch of a requantization. Launch with any number
// of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) requantize_amax_kernel(RequantizeArguments a) {
  i32 m;
  float amax;
  if (first_item(whole_grid()) == 0 && can_keep<R, Input>(a.extent, m, amax)) *a.tensor_amax = amax;
}

// If 2^m can be the tensor scale, overwrite a.packed and a.scales for the blocks with codes that can be kept. All other
// blocks do not change. Blocks of zeros are always stored, with scale 0. If kUnsignedZero, codes of -0 become +0. Also
// store *a.tensor_scale = 2^m, and the amax that gives it in *a.tensor_amax. If 2^m cannot be the tensor scale, do
// nothing. This is the third launch of a requantization. A thread processes one block at a time. Launch with any number
// of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) requantize_keep_kernel(RequantizeArguments a) {
  keep<R, Input, kUnsignedZero>(a, whole_grid());
}
