// requantize from blocks with E8M0 scales to blocks with E4M3 scales under a tensor scale 2^m, codes kept
// (ops/requantize.py).
//
// Two launches: exponents finds the range of the source's scales; keep decides by it, alike in every thread, whether
// all of them fit, and if so overwrites codes, scales and tensor scale of a result that is right where they do not.
#include "block.cuh"

struct RequantizeArguments {
  const u8* source;         // packed codes of the source, two a byte, aligned to 8 bytes
  const u8* source_scales;  // one for source_block codes
  u32* extent;              // zeros at first; of blocks with values: largest scale code + 1, 256 - smallest; any NaN
  u8* packed;               // what keep writes: codes,
  u8* scales;               // scales of R::kBlock codes,
  float* tensor_scale;      // 2^m,
  float* tensor_amax;       // and what it is made from
  i64 blocks, source_block;
};

constexpr u64 kMagnitudes = 0x7777777777777777u;

FP4KIT_DEVICE bool has_values(const RequantizeArguments& a, i64 block) {
  const u64* words = reinterpret_cast<const u64*>(a.source) + block * (a.source_block / 16);
  u64 any = 0u;
  for (i64 i = 0; i < a.source_block / 16; ++i) any |= words[i] & kMagnitudes;
  return any != 0u;
}

FP4KIT_DEVICE void raise_to_largest(u32* maximum_address, u32 own) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) own = maximum(own, __shfl_xor_sync(0xFFFFFFFFu, own, distance));
  if (threadIdx.x % 32 == 0 && own != 0u) atomicMax(maximum_address, own);
}

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

FP4KIT_DEVICE float power_of_two(i32 exponent) {  // -149 to 127
  return float_of(exponent < -126 ? 1u << (exponent + 149) : static_cast<u32>(exponent + 127) << 23);
}

// Whether E4M3 holds every scale under the tensor scale 2^m that puts the largest at the top, and the tensor rule gives
// 2^m.
template <class R, class In>
FP4KIT_DEVICE bool can_keep(const u32* extent, i32& m, float& amax) {
  constexpr i32 kTop = R::Scale::kEmax, kBottom = R::Scale::kEmin - R::Scale::kMantissaBits;
  const i32 largest = static_cast<i32>(extent[0]) - 1 - 127, smallest = 256 - static_cast<i32>(extent[1]) - 127;
  const bool any = extent[0] != 0u;
  m = any ? largest - kTop : 0;
  if (extent[2] || (any && largest - smallest > kTop - kBottom)) return false;
  amax = full_range<R>() * power_of_two(m);
  return is_finite(amax) && R::TensorRule::template scale<R, In>(amax).decode == power_of_two(m);
}

template <class R, class In, bool kUnsignedZero>
FP4KIT_DEVICE void keep(const RequantizeArguments& a, Grid grid) {
  i32 m;
  float amax;
  if (!can_keep<R, In>(a.extent, m, amax)) return;
  const i64 words = a.source_block / 16, scales = a.source_block / R::kBlock;
  for (i64 block = first_item(grid); block < a.blocks; block += item_stride(grid)) {
    for (i64 i = block * words; i < (block + 1) * words; ++i) {
      const u64 word = reinterpret_cast<const u64*>(a.source)[i];
      const u64 signs =
          kUnsignedZero ? (word & kMagnitudes) + kMagnitudes : ~kMagnitudes;  // kept where the magnitude is not 0
      reinterpret_cast<u64*>(a.packed)[i] = word & (kMagnitudes | signs);
    }
    const i32 exponent = static_cast<i32>(a.source_scales[block]) - 127 - m;
    const u8 code = has_values(a, block) ? static_cast<u8>(encode_scale<R>(power_of_two(exponent))) : u8{0};
    for (i64 i = block * scales; i < (block + 1) * scales; ++i) a.scales[i] = code;
    if (block == 0) {
      *a.tensor_scale = power_of_two(m);
      *a.tensor_amax = amax;
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) requantize_range_kernel(RequantizeArguments a) {
  find_scale_range(a, whole_grid());
}

extern "C" __global__ void __launch_bounds__(kThreads) requantize_keep_kernel(RequantizeArguments a) {
  keep<R, Input, kUnsignedZero>(a, whole_grid());
}
