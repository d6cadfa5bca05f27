// fake_ms_eden: fake-quantize a matrix as fouroversix's MS-EDEN does, for NVFP4 and for IF4 (reference/fake.py). A
// unit is R::kUnit neighboring elements (several blocks), whose scales are multiplied by a common correction. The
// corrected scales are then rounded stochastically. R is the recipe, In is the type of the elements of x, and kAligned
// is true if all rows of x and of the values begin at multiples of 16 bytes. `a` holds the kernel's arguments: the
// arrays, their sizes and the seed.
//
// A thread processes a whole unit. Few callers use MS-EDEN, so the kernel is not tuned.
#include "amax.cuh"
#include "integer_or_float.cuh"
#include "quantize.cuh"

constexpr int kEdenRun = 8;                             // elements that a thread loads and stores at a time
constexpr float kEdenTop = 6.0 / (17.0 / 16.0 * 0.93);  // the element value to which a block's amax is scaled
constexpr float kEdenScaleTop = 255.99f;                // the block scale of the block with the tensor's amax
constexpr float kTritonRandUnit = 4.6566127342e-10f;    // the step of the numbers of Triton's tl.rand

// Return the random float in [0, 1) that Triton's tl.rand gives for a seed and an index.
FP4KIT_DEVICE float triton_rand(u64 seed, u32 index) {
  const u32 word = triton_word<10>(seed, index);
  return static_cast<float>(static_cast<i32>(word >> 31 ? ~word : word)) * kTritonRandUnit;
}

// Return the tensor scale for a tensor's amax: amax / kEdenScaleTop / kEdenTop, or 1 if the amax is 0. kEdenScaleTop is
// the block scale, and kEdenTop the element value, to which the amax is mapped. NaN gives NaN.
FP4KIT_DEVICE float eden_tensor_scale(float amax) {
  return amax == 0.0f ? 1.0f : divide_full(divide_full(amax, kEdenScaleTop), kEdenTop);
}

// Return the E4M3 value to which a corrected block scale >= 0 is rounded. Let d be the relative distance of the scale
// from the E4M3 value below it: 0 at that value, 1 at the value above. The result is the value above if `random` < d,
// and otherwise the value below. Scales above 448 give 448, and NaN gives NaN.
template <class R>
FP4KIT_DEVICE float eden_rounded(float scale, float random) {
  const u32 code = encode_scale<R>(scale);
  const float nearest = decode_scale<R>(code);
  const bool is_above = nearest > scale;
  const float upper = is_above ? nearest : decode_scale<R>((code + 1u) & 0xFFu),
              lower = is_above ? decode_scale<R>(code - 1u) : nearest;
  return random < divide_full(scale - lower, upper - lower) ? upper : lower;
}

// Return the value to which IF4 rounds a scaled element y if its block has integers: k * 6/7, where k is the integer
// nearest to y * 7/6 (ties to even), limited to -7 ... 7. A result of zero has the sign of y, and NaN gives NaN.
FP4KIT_DEVICE float eden_integer(float y) {
  const float limited = fminf(fmaxf(y * If4::kIntegerFactor, -If4::kMaxInteger), If4::kMaxInteger);
  return is_nan(y) ? y : rintf(limited) * If4::kIntegerStep;
}

// Store in q the element values to which the scaled elements y of a block are rounded: E2M1 values (ties away from
// zero), or, if R::kHasIntegers, the integers of IF4 (eden_integer) if these have the smaller sum of squared errors. If
// an error is NaN, the E2M1 values are stored.
template <class R>
FP4KIT_DEVICE void eden_elements(const float (&y)[R::kBlock], float (&q)[R::kBlock]) {
  using E = typename R::Element;
  float float_error = 0.0f, integer_error = 0.0f;
#pragma unroll
  for (int i = 0; i < R::kBlock; ++i) {
    q[i] = decode<E>(encode<E, Rounding::rna, Sign::not_positive, E::kSignBit>(y[i]));
    const float difference = y[i] - q[i], other = y[i] - eden_integer(y[i]);
    float_error = i ? float_error + difference * difference : difference * difference;
    integer_error = i ? integer_error + other * other : other * other;
  }
  if constexpr (R::kHasIntegers) {
    if (!(integer_error < float_error)) return;
#pragma unroll
    for (int i = 0; i < R::kBlock; ++i) q[i] = eden_integer(y[i]);
  }
}

// Fake-quantize unit number `unit` of the matrix a.x, and store its values in a.values, rounded to In. The amax of each
// block is read from a.block_amax if R::kStatic and that array is given, and otherwise computed. The random numbers are
// generated from a.seed.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void eden_unit(const QuantizeArguments& a, i64 unit) {
  constexpr int kBlocks = R::kUnit / R::kBlock;
  const i64 start = unit * R::kUnit;
  const i64 row = R::kTensorScaling == TensorScaling::row ? start / a.columns : 0;
  const float tensor = eden_tensor_scale(amax_at(a.tensor_amax, row));
  float q[kBlocks][R::kBlock], scales[kBlocks], squares = 0.0f, products = 0.0f;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const i64 first = start + b * R::kBlock;
    float y[R::kBlock];
#pragma unroll
    for (int j = 0; j < R::kBlock; j += kEdenRun) {
      const auto run = read_run<In, kEdenRun, kAligned>(static_cast<const typename In::Bits*>(a.x) + first + j);
#pragma unroll
      for (int i = 0; i < kEdenRun; ++i) y[j + i] = element(run, i);
    }
    const float amax = R::kStatic && a.block_amax ? amax_at(a.block_amax, first / R::kBlock) : amax_of<R::kAmaxNan>(y);
    const float value = decode_scale<R>(encode_scale<R>(divide_full(divide_full(amax, kEdenTop), tensor)));
    scales[b] = value == 0.0f ? 1.0f : value;
#pragma unroll
    for (int i = 0; i < R::kBlock; ++i) y[i] = divide_full(y[i] + 0.0f, scales[b] * tensor);  // -0 becomes +0
    eden_elements<R>(y, q[b]);
#pragma unroll
    for (int i = 0; i < R::kBlock; ++i) {
      squares = b || i ? squares + y[i] * y[i] : y[i] * y[i];
      products = b || i ? products + y[i] * q[b][i] : y[i] * q[b][i];
    }
  }
  const float correction = products == 0.0f ? 1.0f : divide_full(squares, products);
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const i64 first = start + b * R::kBlock;
    const float random = triton_rand(a.seed, static_cast<u32>((a.counter * 16 + first) / R::kBlock));
    const float scale = eden_rounded<R>(scales[b] * correction, random);
#pragma unroll
    for (int j = 0; j < R::kBlock; j += kEdenRun) {
      float values[kEdenRun];
#pragma unroll
      for (int i = 0; i < kEdenRun; ++i) values[i] = q[b][j + i] * scale * tensor;
      store_run<In, kEdenRun, kAligned>(static_cast<typename In::Bits*>(a.values) + first + j, values);
    }
  }
}

// Fake-quantize the part of the matrix a.x that `grid` assigns to this thread block, and store the values in a.values.
// In a group of tensors, this part is one piece of a tensor.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void fake_ms_eden(const QuantizeArguments& a, Grid grid) {
  const i64 units = a.rows * (a.columns / R::kUnit);
  for (i64 i = first_item(grid); i < units; i += item_stride(grid)) eden_unit<R, In, kAligned>(a, i);
}

// Fake-quantize a.x, and store the values in a.values. The kernel is launched for fp4kit.fake_quantize with the fake
// rules of MS-EDEN. A thread processes one unit at a time.
//
// If R::kFinders is 0, a.tensor_amax is an input; launch with any number of thread blocks. Otherwise launch with a
// multiple of R::kFinders thread blocks, which first find the tensor's amax, or the amax of each row, and store it at
// a.tensor_amax (amax.cuh).
extern "C" __global__ void FP4KIT_CLUSTER __launch_bounds__(kThreads) fake_ms_eden_kernel(QuantizeArguments a) {
  find_amax<R, Input, kAligned>(a);
  fake_ms_eden<R, Input, kAligned>(a, whole_grid());
}
