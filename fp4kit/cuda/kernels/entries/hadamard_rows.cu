// hadamard_rows: Hadamard transforms of blocks of kSize elements that are neighbors in memory, at the speed of a copy.
// `a` holds the kernel's arguments: x, out, the signs and the sizes. If kHasSigns, elements are multiplied by their
// signs before the transform, or after it if kIsInverse. The results are bit-identical to the results of
// reference/stochastic.py. rotate.cu and hadamard_columns.cu transform all other blocks.
//
// A warp takes 512 elements at a time, and a thread holds 16 of them in registers: kVectors vectors of 16 bytes, which
// are 32 vectors apart. The transform adds and subtracts elements at distances 1, 2, 4, ... At small distances, both
// elements are in one vector of a thread. At middle distances, they are in two threads, and at large distances in two
// vectors of one thread.
#include "rotate.cuh"

// The arguments of hadamard_rows_kernel.
struct HadamardRowsArguments {
  const void* x;
  void* out;
  const u8* signs;  // one per element of a row, 1 if it is negative; read only if kHasSigns
  i64 count;        // the number of elements, a multiple of kSize
  i64 length;       // the number of elements per row, below 2^31
};

using Bits = Input::Bits;
constexpr int kVector = 16 / sizeof(Bits), kVectors = 16 / kVector;  // elements per vector, and vectors per thread
constexpr int kBetween = 32 * kVector;                               // the distance of the vectors of a thread
constexpr int kPerWarp = 512, kPerBlock = kPerWarp * kThreads / 32;

struct alignas(16) Vector {
  Bits elements[kVector];
};

struct alignas(kVector) Signs {
  u8 negative[kVector];
};

// The 16 elements of a thread: element k of vector v is at v * kVector + k.
struct Elements {
  float values[16];
};

// Multiply the kVector elements at `values` by their signs, in place: negate an element if a.signs is 1 at its position
// in the row. `position` is the index of the first element in its row, a multiple of kVector.
FP4KIT_DEVICE void multiply_by_signs(const HadamardRowsArguments& a, u32 position, float* values) {
  const Signs signs = *reinterpret_cast<const Signs*>(a.signs + position);
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    values[k] = float_of(bits_of(values[k]) ^ static_cast<u32>(signs.negative[k]) << 31);
  }
}

// Replace pairs of the warp's elements by their sums and differences, in place: first elements that are kDistance apart
// in memory, then elements that are 2 kDistance, 4 kDistance, ..., kSize / 2 apart. transform<1> is a Hadamard
// transform of each block without the final factor. If kDistance is not below kSize, nothing changes. All threads of
// the warp must call this function.
template <int kDistance>
FP4KIT_DEVICE void transform(Elements& y) {
  if constexpr (kDistance < kSize) {
    constexpr bool kInThread = kDistance < kVector || kDistance >= kBetween;
    constexpr int kStep = kDistance < kVector ? kDistance : kDistance / kBetween * kVector;  // the distance in y.values
    constexpr int kLanes = kDistance / kVector;
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      if constexpr (kInThread) {
        if (e & kStep) continue;
        const float low = y.values[e], high = y.values[e + kStep];
        y.values[e] = low + high;
        y.values[e + kStep] = low - high;
      } else {
        const float own = y.values[e], other = float_of(__shfl_xor_sync(0xFFFFFFFFu, bits_of(own), kLanes));
        y.values[e] = threadIdx.x & kLanes ? other - own : own + other;
      }
    }
    transform<2 * kDistance>(y);
  }
}

// Transform the blocks of a.x by a Hadamard transform with the factor kFactor, and store the results in a.out, rounded
// to the type of the elements; NaN becomes the positive quiet NaN. The kernel is launched for fp4kit.hadamard if blocks
// lie along the last axis. Both arrays must begin at multiples of 16 bytes, and the signs at a multiple of 8 bytes.
// Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) hadamard_rows_kernel(HadamardRowsArguments a) {
  const Vector* x = static_cast<const Vector*>(a.x);
  Vector* out = static_cast<Vector*>(a.out);
  const u32 length = static_cast<u32>(a.length), offset = threadIdx.x / 32 * kPerWarp + threadIdx.x % 32 * kVector;
  const i64 stride = static_cast<i64>(gridDim.x) * kPerBlock;
  // place: the position in its row of the first element of this thread block. move: the change of this position per
  // iteration.
  u32 place = static_cast<u32>(static_cast<i64>(blockIdx.x) * kPerBlock % a.length);
  const u32 move = static_cast<u32>(stride % a.length);
  for (i64 first = static_cast<i64>(blockIdx.x) * kPerBlock; first < a.count; first += stride) {
    Elements y = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const i64 index = first + offset + v * kBetween;
      if (index >= a.count) continue;
      const Vector vector = x[index / kVector];
#pragma unroll
      for (int k = 0; k < kVector; ++k) y.values[v * kVector + k] = Input::widen(vector.elements[k]);
      if (kHasSigns && !kIsInverse)
        multiply_by_signs(a, (place + offset + v * kBetween) % length, y.values + v * kVector);
    }
    transform<1>(y);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const i64 index = first + offset + v * kBetween;
      if (index >= a.count) continue;
#pragma unroll
      for (int k = 0; k < kVector; ++k) y.values[v * kVector + k] *= kFactor;
      if (kHasSigns && kIsInverse)
        multiply_by_signs(a, (place + offset + v * kBetween) % length, y.values + v * kVector);
      Vector vector;
#pragma unroll
      for (int k = 0; k < kVector; ++k) vector.elements[k] = stored_rotation<Input>(y.values[v * kVector + k]);
      out[index / kVector] = vector;
    }
    place += move;
    if (place >= length) place -= length;
  }
}
