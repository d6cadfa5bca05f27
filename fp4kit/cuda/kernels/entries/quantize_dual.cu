// quantize_dual: compute codes and scales of dual-level MXFP4 or, if R::kFake, the values to which the codes decode.
// Elements are divided by the scale of their outer block (R::kTensorColumns columns), and the float32 quotients are
// quantized. R is the recipe, In is the type of the elements of x, and kAligned is true if all rows of x and of
// `values` begin at multiples of 16 bytes. `a` holds the kernel's arguments. kLanes neighboring threads hold the runs
// of a block, and kOuterLanes those of an outer block. If R::kFinders is not 0, the kernel also finds the amaxes of the
// outer blocks, and stores them at a.tensor_amax; kOuterLanes must then divide 32.
#include "quantize.cuh"
#include "warp.cuh"

// Encode a run and return true, if a few instructions per element give the codes of the float32 quotients by the scale
// of the outer block, which is stored in `t`. `amax` is the amax of that block, and `largest` is the float32 bits of
// the largest magnitude of the block, whose scale code is stored in `code`.
//
// 16-bit elements are multiplied (exact_multiplier_of_sixth). Float32 elements have too many bits for that, and are
// divided.
template <class R, class In, int kRun>
FP4KIT_DEVICE bool encode_quotients(const Run<In, kRun>& x, float amax, u32 largest, TensorScale& t, u32& code,
                                    u32 (&words)[kRun / 8]) {
  constexpr bool k16Bit = sizeof(typename In::Bits) == 2;
  constexpr u32 kLeast = 57u << 23;  // 2^-70
  const float max = max_of<typename R::Element>();
  const float decode = quotient_by(amax, max, 1.0f / max);
  if (!(decode > 0x1p-140f && decode < 0x1p16f)) return false;
  const float encode = reciprocal_of(decode);
  t = {encode, decode, amax};
  Factor f;
  code = scale_block<R, Float32>(quotient_by(float_of(largest), decode, encode), t, nullptr, f);
  const float divisor = decode / f.value;
  float multiplier = encode * f.value;
  u32 least = kLeast;
  if constexpr (k16Bit) {
    multiplier = exact_multiplier_of_sixth(amax, decode, encode, (1u << (23 - In::kMantissaBits)) - 1u) * f.value;
  } else {
#pragma unroll
    for (int i = 0; i < kRun; ++i) least = minimum(least, (x.w[i] & 0x7FFFFFFFu) - 1u);  // zeros do not count
  }
  // No quotient of an element other than 0 may underflow to zero, which has no sign, and no step may be inexact.
  if (!(f.value >= 0x1p-30f && f.value <= 0x1p30f && float_of(largest) * multiplier < 7.0f - 0x1p-16f &&
        least >= kLeast - 1u))
    return false;
#pragma unroll
  for (int i = 0; i < kRun; i += 8) {
    float y[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float a = fabsf(element(x, i + j));
      y[j] = k16Bit ? a * multiplier : quotient_by(a, divisor, multiplier);
    }
    if constexpr (k16Bit) {
      u32 pairs[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) pairs[j] = pair_with_code_signs<R, In>(x.w[i / 2 + j]);
      words[i / 8] = encode_e2m1x8<false>(y, nibble_signs_of_pairs(pairs));
    } else {
      float signs[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) signs[j] = element(x, i + j) + 0.0f;  // -0 has the sign of 0
      words[i / 8] = encode_e2m1x8<false, true>(y, nibble_signs(signs));
    }
  }
  return true;
}

// Encode the float32 quotients of a run, operation by operation, and return the scale code of the block. This is valid
// for all elements. All threads of the warp must call this function.
template <class R, class In, int kRun>
FP4KIT_DEVICE u32 encode_quotients_exactly(const Run<In, kRun>& x, TensorScale t, u32 (&words)[kRun / 8]) {
  u32 amax = 0u, bytes[8] = {};
#pragma unroll
  for (int i = 0; i < kRun; ++i) amax = maximum(amax, bits_of(magnitude_of(element(x, i) / t.decode)));
  Factor f;
  const u32 code = scale_block<R, Float32>(float_of(largest_of_lanes<R::kBlock / kRun>(amax)), t, nullptr, f);
#pragma unroll
  for (int w = 0; w < kRun / 8; ++w) {  // divide again, so that no registers hold the quotients
    float quotients[8];
    u32 word[1];
#pragma unroll
    for (int i = 0; i < 8; ++i) quotients[i] = element(x, 8 * w + i) / t.decode;
    exact_codes<R, Float32>(quotients, bytes, f, word);
    words[w] = word[0];
  }
  return code;
}

// Quantize the part of the matrix a.x that `grid` assigns to this thread block. In a group of tensors, this part is one
// piece of a tensor. All threads of the thread block must call this function.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_dual(const QuantizeArguments& a, Grid grid) {
  constexpr int kRun = R::kBlock % 32 == 0 ? 32 : 16, kLanes = R::kBlock / kRun, kOuterLanes = R::kTensorColumns / kRun;
  constexpr bool kFinds = R::kFinders > 0;
  const u32 columns = static_cast<u32>(a.columns), outers = (columns + R::kTensorColumns - 1) / R::kTensorColumns,
            last = static_cast<u32>(a.rows) * outers - 1;
  const bool whole = columns % R::kTensorColumns == 0;
  for (i64 from = grid.block * kThreads; from / kOuterLanes <= last; from += grid.blocks * kThreads) {
    const i64 place = from + threadIdx.x;
    const u32 lane = static_cast<u32>((kThreads % kOuterLanes == 0 ? threadIdx.x : place) % kOuterLanes);
    const u32 outer = static_cast<u32>(minimum<i64>(place / kOuterLanes, last));
    i64 first = place * kRun;
    bool inside = place / kOuterLanes <= last;
    if (!whole) {
      const u32 row = divide(outer, integer_divisor_of(outers)),
                column = (outer - row * outers) * R::kTensorColumns + lane * kRun;
      first = static_cast<i64>(row) * columns + column;
      inside = inside && column < columns;
    }
    Run<In, kRun> x = {};
    if (inside) x = read_run<In, kRun, kAligned>(static_cast<const typename In::Bits*>(a.x) + first);
    u32 largest;
    if constexpr (R::kHadamard) {
      largest = hadamard_run<R::kSignMask>(x);
    } else {
      largest = largest_bits_of(x);
    }
    float outer_amax;
    if constexpr (kFinds) {
      outer_amax = float_of(largest_of_lanes<kOuterLanes>(largest));
    } else {
      outer_amax = amax_at(a.tensor_amax, outer);
    }
    largest = largest_of_lanes<kLanes>(largest);
    TensorScale t;
    u32 words[kRun / 8], code;
    const bool done = encode_quotients<R, In>(x, outer_amax, largest, t, code, words);
    if (__any_sync(0xFFFFFFFFu, !done)) {
      t = R::TensorRule::template scale<R, In>(outer_amax);
      code = encode_quotients_exactly<R, In>(x, t, words);
    }
    if (!inside) continue;
    store_packed<R, In, kRun, kAligned>(a, first, words, code, t);
    if (kFinds && lane == 0u) const_cast<float*>(a.tensor_amax)[outer] = outer_amax;
    if (R::kFake || lane % kLanes != 0u) continue;
    a.scales[static_cast<u64>(first) / R::kBlock] = static_cast<u8>(code);
    if (lane == 0u) store_tensor_scale(a, outer, t);
  }
}

// More thread blocks per multiprocessor hide the time until elements are loaded. A few registers are then spilled,
// mostly where quotients are computed exactly.
constexpr int kDualBlocks = sizeof(Input::Bits) == 2 ? 6 : 3;

// Quantize a.x, and store its codes in a.packed and its scales in a.scales and a.tensor_scale, or only its values in
// a.values if R::kFake. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads, kDualBlocks) quantize_dual_kernel(QuantizeArguments a) {
  quantize_dual<R, Input, kAligned>(a, whole_grid());
}
