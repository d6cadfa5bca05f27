// quantize_hif4: compute codes and scales of HiF4 blocks (rules/hif4.cuh) or, if R::kFake, the values to which the
// codes decode. R is the recipe, In is the type of the elements of x, and kAligned is true if x and `values` begin at
// multiples of 16 bytes. `a` holds the kernel's arguments. Neighboring threads hold the runs of a block. A group is
// four elements, which share the inner exponent bit.
#include "hif4.cuh"
#include "quantize.cuh"
#include "warp.cuh"

// Compile-time constants: the elements of a run, the threads that share a block, and the runs per thread and step.
template <class R, class In>
struct Hif4Traits {
  static constexpr int kRun = R::kFake ? 16 / static_cast<int>(sizeof(typename In::Bits)) : 16;
  static constexpr int kLanes = kHif4Block / kRun, kGroups = kRun / kHif4Inner;
  static constexpr int kUnroll = R::kFake ? 2 : R::kThreadBytes / (kRun * static_cast<int>(sizeof(typename In::Bits)));
  static constexpr u32 kSteps = 1u << R::Element::kMantissaBits;  // per unit
};

// What the elements of a run share: the E6M2 code of the block (not used by fake rules), its scale and the inverse of
// the scale, which stays finite if AMCT's rule makes the code and the scale NaN, and per group the bits of both levels.
template <class R, class In>
struct Hif4Scales {
  u32 code;
  float scale, inverse;
  i32 outer[Hif4Traits<R, In>::kGroups], inner[Hif4Traits<R, In>::kGroups];
};

// Replace infinities and NaN in a run by 0.
template <class In, int kRun>
FP4KIT_DEVICE void drop_specials(Run<In, kRun>& x) {
  float values[kRun];
  widen_run(x, values);
#pragma unroll
  for (int i = 0; i < kRun; ++i) values[i] = is_finite(values[i]) ? values[i] : 0.0f;
  x = narrow_run<In>(values);
}

// Store the float32 bits of the largest magnitude of each group of a run in `largest`, and return those of its block.
// NaN counts as larger than infinity. All threads of a warp must call this function.
template <class In, int kRun>
FP4KIT_DEVICE u32 hif4_amaxes(const Run<In, kRun>& x, u32 (&largest)[kRun / kHif4Inner]) {
  constexpr int kWords = kHif4Inner * sizeof(typename In::Bits) / 4;
  u32 amax = 0u;
#pragma unroll
  for (int g = 0; g < kRun / kHif4Inner; ++g) {
    Run<In, kHif4Inner> group;
#pragma unroll
    for (int i = 0; i < kWords; ++i) group.w[i] = x.w[g * kWords + i];
    largest[g] = largest_bits_of(group);
    amax = maximum(amax, largest[g]);
  }
  return largest_of_lanes<kHif4Block / kRun>(amax);
}

// Return the scales of a run x. For AMCT, also replace its infinities and NaN by 0. All threads of a warp must call
// this function.
template <class R, class In>
FP4KIT_DEVICE Hif4Scales<R, In> hif4_scales(Run<In, Hif4Traits<R, In>::kRun>& x) {
  using Traits = Hif4Traits<R, In>;
  using Rule = typename R::FakeRule;
  u32 largest[Traits::kGroups], amax = hif4_amaxes(x, largest);
  bool has_scale = true;
  if constexpr (R::BlockRule::kIsAmct) {
    has_scale = amax < kInfinityBits;
    if (__any_sync(0xFFFFFFFFu, !has_scale)) {
      drop_specials(x);
      amax = hif4_amaxes(x, largest);
    }
  }
  Hif4Scales<R, In> scales;
  const u32 code = hif4_scale_code(float_of(amax));
  scales.code = has_scale ? code : kHif4NanCode;
  if constexpr (Rule::kRoundsToInput && In::kMantissaBits == 10) {
    scales.scale = hif4_scale_float16(float_of(amax));
    scales.inverse = round_to<In>(hif4_bfloat16(1.0f / scales.scale));
  } else {
    scales.scale = hif4_scale(scales.code);
    scales.inverse = hif4_inverse(code);
  }
  const auto scaled = [&](u32 bits) {
    return hif4_rounded<Rule, In>(static_cast<typename Rule::Number>(float_of(bits)) * scales.inverse);
  };
#pragma unroll
  for (int g = 0; g < Traits::kGroups; ++g) {
    const u32 other = Traits::kGroups == 1 ? __shfl_xor_sync(0xFFFFFFFFu, largest[g], 1) : largest[g ^ 1];
    scales.outer[g] = scaled(maximum(largest[g], other)) >= 4.0f;
    scales.inner[g] = scaled(largest[g]) >= (scales.outer[g] ? 4.0f : 2.0f);
  }
  return scales;
}

// Return the bits of this run in the four bytes of its block's scales. Other bits, and the byte of the scale, are 0.
template <class R, class In>
FP4KIT_DEVICE u32 hif4_bits(const Hif4Scales<R, In>& scales, u32 lane) {
  constexpr int kGroups = Hif4Traits<R, In>::kGroups;
  u32 bits = 0u;  // of the run, in the order of the groups: outer bits of pairs, then inner bits
#pragma unroll
  for (int g = 0; g < kGroups; g += 2) bits = bits << 1 | static_cast<u32>(scales.outer[g]);
  const u32 outer = bits << (6u - 2u * lane);
  bits = 0u;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) bits = bits << 1 | static_cast<u32>(scales.inner[g]);
  const u32 inner = bits << (12u - 4u * lane);  // as a big-endian number
  return outer << 8 | (inner & 0xFF00u) << 8 | inner << 24;
}

// Store the codes of the run with number `run`, and its share of the scales of its block. All threads of a warp must
// call this function; those for which is_inside is false store nothing.
template <class R, class In>
FP4KIT_DEVICE void store_hif4(const QuantizeArguments& a, u32 run, bool is_inside, const Run<In, 16>& x,
                              const Hif4Scales<R, In>& scales) {
  using Traits = Hif4Traits<R, In>;
  constexpr int kBits = R::Element::kStoredBits, kPerWord = 32 / kBits;
  constexpr u32 kSigns = kBits == 4 ? 0x88888888u : R::Element::kSignBit * 0x01010101u;
  const u32 lane = run % Traits::kLanes;
  u32 bytes = hif4_bits<R, In>(scales, lane);
#pragma unroll
  for (int distance = 1; distance < Traits::kLanes; distance *= 2)
    bytes |= __shfl_xor_sync(0xFFFFFFFFu, bytes, distance);
  if (!is_inside) return;
  a.scales[static_cast<i64>(run)] = static_cast<u8>((bytes | scales.code) >> (8u * lane));  // a byte per thread
  u32 words[16 / kPerWord] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int g = i / kHif4Inner;
    const float factor = hif4_halved(scales.inverse * Traits::kSteps, scales.outer[g] + scales.inner[g]);
    const u32 sign = element(x, i) < 0.0f ? R::Element::kSignBit : 0u;
    words[i / kPerWord] += (hif4_steps<R>(element(x, i), factor) | sign) << (i % kPerWord * kBits);
  }
  if (is_nan(scales.inverse))  // the codes are zeros with signs
    for (int i = 0; i < 16 / kPerWord; ++i) words[i] &= kSigns;
  store_words(a.packed + static_cast<i64>(run) * (16 * kBits / 8), words);
}

// Return the value to which the element x in group g of a run is quantized.
//
// A step that rounds to float32 or bfloat16 does not round halves of elements, except tiny ones, whose magnitude is 0.
// If an element or the inverse is NaN, so is the scale.
template <class R, class In>
FP4KIT_DEVICE float hif4_value(float x, int g, const Hif4Scales<R, In>& scales) {
  using Rule = typename R::FakeRule;
  constexpr u32 kSteps = Hif4Traits<R, In>::kSteps;
  const i32 bits = scales.outer[g] + scales.inner[g];
  float magnitude;  // exact in the type of the elements, as its products with powers of two are
  if constexpr ((Rule::kRoundsToInput && In::kMantissaBits == 10) || sizeof(typename Rule::Number) == 8) {
    magnitude = hif4_magnitude<R, Rule, In>(magnitude_of(x), scales.outer[g], scales.inner[g], scales.inverse);
  } else {
    u32 steps;
    if constexpr (Rule::kRoundsToInput) {
      const float y = round_to<In>(magnitude_of(x) * hif4_halved(scales.inverse, bits));
      steps = hif4_whole_steps<R>(round_to<In>(fma_rn(y, static_cast<float>(kSteps), 0.5f)));
    } else {
      steps = hif4_steps<R>(x, hif4_halved(scales.inverse * kSteps, bits));
    }
    magnitude = (float_of(bits_of(0x1p23f) | steps) - 0x1p23f) * (1.0f / kSteps);
  }
  const float value = magnitude * (scales.scale * hif4_halved(1.0f, -bits));
  return x < 0.0f ? -value : value;
}

// Store the values of the run with number `run`.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void store_hif4_values(const QuantizeArguments& a, u32 run, const Run<In, Hif4Traits<R, In>::kRun>& x,
                                     const Hif4Scales<R, In>& scales) {
  constexpr int kRun = Hif4Traits<R, In>::kRun;
  float values[kRun];
#pragma unroll
  for (int i = 0; i < kRun; ++i) values[i] = hif4_value<R, In>(element(x, i), i / kHif4Inner, scales);
  store_run<In, kRun, kAligned>(static_cast<typename In::Bits*>(a.values) + static_cast<i64>(run) * kRun, values);
}

// Quantize the part of the matrix a.x that `grid` assigns to this thread block. In a group of tensors, this part is one
// piece of a tensor. All threads of the thread block must call this function.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_hif4(const QuantizeArguments& a, Grid grid) {
  using Traits = Hif4Traits<R, In>;
  constexpr u32 kStep = kThreads * Traits::kUnroll;
  const u32 runs = static_cast<u32>(a.rows * a.columns / Traits::kRun);
  for (i64 from = grid.block * kStep; from < runs; from += grid.blocks * kStep) {
    const u32 start = static_cast<u32>(from) + threadIdx.x;
    Run<In, Traits::kRun> x[Traits::kUnroll];
#pragma unroll
    for (u32 k = 0; k < Traits::kUnroll; ++k) {
      const u32 run = start + k * kThreads;
      const auto* source = static_cast<const typename In::Bits*>(a.x) + static_cast<i64>(run) * Traits::kRun;
      x[k] = run < runs ? read_run<In, Traits::kRun, kAligned>(source) : Run<In, Traits::kRun>{};
    }
#pragma unroll
    for (u32 k = 0; k < Traits::kUnroll; ++k) {
      const u32 run = start + k * kThreads;
      if constexpr (R::kHadamard) hadamard_run<R::kSignMask>(x[k]);
      const Hif4Scales<R, In> scales = hif4_scales<R, In>(x[k]);
      if constexpr (!R::kFake)
        store_hif4<R, In>(a, run, run < runs, x[k], scales);
      else if (run < runs)
        store_hif4_values<R, In, kAligned>(a, run, x[k], scales);
    }
  }
}

// Quantize a.x, and store its codes in a.packed and its scales in a.scales, or only its values in a.values if R::kFake.
// Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) quantize_hif4_kernel(QuantizeArguments a) {
  quantize_hif4<R, Input, kAligned>(a, whole_grid());
}
