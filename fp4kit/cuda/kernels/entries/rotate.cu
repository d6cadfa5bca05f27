// rotate: rotate blocks of kSize elements along an axis, by a Hadamard transform or by given matrices (kHasMatrices).
// The axes of x are (outer, length, inner), and blocks lie along the middle axis. A thread block processes kLanes
// blocks at a time, and keeps their kCount elements as float32 in shared memory (the tile). Each of these blocks is
// called a lane. `a` holds the kernel's arguments: x, out, signs, matrices and sizes. b is the group of blocks in the
// tile. If kHasSigns, elements are multiplied by their signs before the rotation, or after it if kIsInverse.
//
// The results are bit-identical to the results of reference/stochastic.py. Most Hadamard transforms are computed by
// hadamard_rows.cu and hadamard_columns.cu.
//
// If inner is 1 (kContiguous), the elements of a block are neighbors, in memory and in the tile. Otherwise elements of
// neighboring lanes are neighbors in both.
#include "rotate.cuh"

// The arguments of rotate_kernel.
struct RotateArguments {
  const void* x;
  void* out;
  const u8* signs;        // one per position along the middle axis, 1 if it is negative; read only if kHasSigns
  const float* matrices;  // out_j = sum_i x_i M_ij, at a multiple of 16 bytes; read only if kHasMatrices
  i64 outer, length, inner;
  i64 matrix_step;  // distance of the matrices of neighboring blocks; 0 for one matrix
};

using Bits = Input::Bits;
constexpr int kLanes = 4096 / kSize, kCount = kLanes * kSize;  // lanes and elements of a tile
constexpr int kPerThread = (kCount + kThreads - 1) / kThreads;
constexpr int kUnit = kContiguous ? 1 : kLanes;  // distance in the tile of neighboring elements of a block

// Return the index in shared memory at which element e of the tile is stored. It is e if kHasMatrices. In Hadamard
// transforms, a gap after every 16 elements avoids bank conflicts.
FP4KIT_DEVICE constexpr int padded(int e) {
  return kHasMatrices ? e : e + e / 16;
}

// The elements of a tile in shared memory, as float32. Element e has the index padded(e).
struct alignas(16) RotateTile {
  float elements[padded(kCount)];
};

// Up to kLanes blocks that a thread block processes together, one per lane, at one position along the middle axis:
//   first                    the offset of the first element of the first block
//   element_step, lane_step  distances between neighboring elements of a block, and between neighboring lanes
//   lanes                    the number of lanes
//   block                    the index of the blocks along the middle axis
struct RotateBlocks {
  i64 first, element_step, lane_step, lanes, block;
};

// Return the number of groups of blocks (RotateBlocks) into which the array is divided. Each group fills one tile, or a
// part of it at the end of an axis.
FP4KIT_DEVICE i64 rotate_blocks_count(const RotateArguments& a) {
  const i64 blocks = a.length / kSize;
  return kContiguous ? (a.outer + kLanes - 1) / kLanes * blocks : a.outer * blocks * ((a.inner + kLanes - 1) / kLanes);
}

// Return the group of blocks with number `index`, for indices below rotate_blocks_count: its place and its strides in
// memory, and its number of lanes.
FP4KIT_DEVICE RotateBlocks rotate_blocks(const RotateArguments& a, i64 index) {
  const i64 blocks = a.length / kSize;
  if (kContiguous) {
    const i64 lane = index / blocks * kLanes, block = index % blocks;
    return {lane * a.length + block * kSize, 1, a.length, minimum<i64>(a.outer - lane, kLanes), block};
  }
  const i64 groups = (a.inner + kLanes - 1) / kLanes, lane = index % groups * kLanes, position = index / groups;
  return {position * kSize * a.inner + lane, a.inner, 1, minimum<i64>(a.inner - lane, kLanes), position % blocks};
}

// Return the lane of element e of the tile, which is the number of its block in the tile: 0 ... kLanes - 1.
FP4KIT_DEVICE int lane_of(int e) {
  return kContiguous ? e / kSize : e % kLanes;
}
// Return the position of element e of the tile within its block: 0 ... kSize - 1.
FP4KIT_DEVICE int index_of(int e) {
  return kContiguous ? e % kSize : e / kLanes;
}

// Return the sign of element i of block `block` along the middle axis: 1 or -1. It is 1 if there are no signs
// (kHasSigns is false).
FP4KIT_DEVICE float sign_of_element(const RotateArguments& a, i64 block, int i) {
  return kHasSigns && a.signs[block * kSize + i] ? -1.0f : 1.0f;
}

// Load the elements of the group b from a.x into the tile, multiplied by their signs unless kIsInverse. If the group
// has fewer than kLanes blocks, the other lanes load the elements of the last block, so that no load waits for a
// branch; their results are not stored. Threads must synchronize before they read the tile.
FP4KIT_DEVICE void load_tile(const RotateArguments& a, const RotateBlocks& b, float* tile) {
  Bits loaded[kPerThread];
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int e = minimum<int>(k * kThreads + threadIdx.x, kCount - 1);
    const i64 lane = minimum<i64>(lane_of(e), b.lanes - 1);
    loaded[k] = static_cast<const Bits*>(a.x)[b.first + lane * b.lane_step + index_of(e) * b.element_step];
  }
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int e = k * kThreads + threadIdx.x;
    if (e >= kCount) break;
    const float value = Input::widen(loaded[k]);
    tile[padded(e)] = kIsInverse ? value : value * sign_of_element(a, b.block, index_of(e));
  }
}

// Store `value`, the result for element e of the tile, at its place in a.out, rounded to the type of the elements. If
// kIsInverse, it is multiplied by its sign first. NaN becomes the positive quiet NaN. Nothing is stored if e is not
// below kCount, or if its lane is not below b.lanes.
FP4KIT_DEVICE void store_result(const RotateArguments& a, const RotateBlocks& b, int e, float value) {
  const int lane = lane_of(e), i = index_of(e);
  if (e >= kCount || lane >= b.lanes) return;
  if (kIsInverse) value *= sign_of_element(a, b.block, i);
  static_cast<Bits*>(a.out)[b.first + lane * b.lane_step + i * b.element_step] = stored_rotation<Input>(value);
}

// Replace pairs of elements in the tile by their sums and differences, in place: first elements that are kFirst apart
// in the tile, then elements that are 2 kFirst, ..., kFirst kRadix / 2 apart. A thread holds kRadix elements in
// registers at a time. All threads of the thread block must call this function, and may read the tile when it returns.
template <int kFirst, int kRadix>
FP4KIT_DEVICE void add_and_subtract(float* tile) {
  for (int group = threadIdx.x; group < kCount / kRadix; group += kThreads) {
    const int low = group % kFirst, first = (group - low) * kRadix + low;
    float y[kRadix];
#pragma unroll
    for (int k = 0; k < kRadix; ++k) y[k] = tile[padded(first + k * kFirst)];
#pragma unroll
    for (int distance = 1; distance < kRadix; distance *= 2) {
#pragma unroll
      for (int k = 0; k < kRadix; ++k) {
        if (k & distance) continue;
        const float a = y[k], b = y[k + distance];
        y[k] = a + b;
        y[k + distance] = a - b;
      }
    }
#pragma unroll
    for (int k = 0; k < kRadix; ++k) tile[padded(first + k * kFirst)] = y[k];
  }
  __syncthreads();
}

// Replace pairs of elements of each block in the tile by their sums and differences, in place: first elements that are
// kDistance apart in the block, then 2 kDistance, ..., kSize / 2 apart. transform_tile<1> is a Hadamard transform of
// each block without the final factor. If kDistance is not below kSize, do nothing. All threads of the thread block
// must call this function, and may read the tile when it returns.
template <int kDistance>
FP4KIT_DEVICE void transform_tile(float* tile) {
  if constexpr (kDistance < kSize) {
    constexpr int kRadix = kSize / kDistance < 16 ? kSize / kDistance : 16;
    add_and_subtract<kDistance * kUnit, kRadix>(tile);
    transform_tile<kDistance * kRadix>(tile);
  }
}

// Four neighboring floats, which are loaded at once.
struct alignas(16) Quad {
  float values[4];
};

// Multiply the blocks of the tile by the matrix of the group b, and store the results in a.out (store_result). kSize
// must be 16, 32, 64 or 128. The tile itself does not change.
//
// A thread computes 16 results: one column for 16 lanes, or 16 columns for one lane. It then reads most numbers four at
// a time. Sums start at -0, because -0 + x is x for every x.
FP4KIT_DEVICE void store_even_products(const RotateArguments& a, const RotateBlocks& b, const float* tile) {
  const float* matrix = a.matrices + b.block * a.matrix_step;
  float sums[kPerThread];
  for (int k = 0; k < kPerThread; ++k) sums[k] = -0.0f;
  if constexpr (kContiguous) {
    const int column = threadIdx.x % kSize;
#pragma unroll 2
    for (int i = 0; i < kSize; i += 4) {
      float factors[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) factors[n] = matrix[(i + n) * kSize + column];
#pragma unroll
      for (int k = 0; k < kPerThread; ++k) {
        const int lane = threadIdx.x / kSize + k * (kThreads / kSize);
        const Quad x = *reinterpret_cast<const Quad*>(tile + lane * kSize + i);
#pragma unroll
        for (int n = 0; n < 4; ++n) sums[k] = sums[k] + x.values[n] * factors[n];
      }
    }
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) store_result(a, b, k * kThreads + threadIdx.x, sums[k]);
  } else {
    const int lane = threadIdx.x % kLanes, first = threadIdx.x / kLanes * kPerThread;
#pragma unroll 2
    for (int i = 0; i < kSize; ++i) {
      const float x = tile[i * kLanes + lane];
#pragma unroll
      for (int k = 0; k < kPerThread; k += 4) {
        const Quad factors = *reinterpret_cast<const Quad*>(matrix + i * kSize + first + k);
#pragma unroll
        for (int n = 0; n < 4; ++n) sums[k + n] = sums[k + n] + x * factors.values[n];
      }
    }
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) store_result(a, b, (first + k) * kLanes + lane, sums[k]);
  }
}

// Multiply the blocks of the tile by the matrix of the group b, and store the results in a.out (store_result), for any
// kSize. The tile itself does not change. The function is used for sizes that store_even_products does not support.
FP4KIT_DEVICE void store_products(const RotateArguments& a, const RotateBlocks& b, const float* tile) {
  const float* matrix = a.matrices + b.block * a.matrix_step;
  float sums[kPerThread];
  for (int k = 0; k < kPerThread; ++k) sums[k] = -0.0f;
  for (int i = 0; i < kSize; ++i) {
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const int e = minimum<int>(k * kThreads + threadIdx.x, kCount - 1);
      const int at = kContiguous ? lane_of(e) * kSize + i : i * kLanes + lane_of(e);
      sums[k] = sums[k] + tile[padded(at)] * matrix[i * kSize + index_of(e)];
    }
  }
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) store_result(a, b, k * kThreads + threadIdx.x, sums[k]);
}

// Rotate the blocks of a.x, and store the results in a.out, rounded to the type of the elements. The rotation is a
// product with a matrix of a.matrices if kHasMatrices, and otherwise a Hadamard transform with the factor kFactor. The
// kernel is launched for fp4kit.rotate, and for fp4kit.hadamard if hadamard_rows.cu and hadamard_columns.cu cannot take
// the arrays. A thread block takes one tile at a time. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) rotate_kernel(RotateArguments a) {
  __shared__ RotateTile memory[1];
  float* tile = memory->elements;
  const i64 count = rotate_blocks_count(a);
  for (i64 index = blockIdx.x; index < count; index += gridDim.x) {
    const RotateBlocks b = rotate_blocks(a, index);
    load_tile(a, b, tile);
    __syncthreads();
    if constexpr (kHasMatrices && kSize % 16 == 0 && kThreads % kSize == 0) {
      store_even_products(a, b, tile);
    } else if constexpr (kHasMatrices) {
      store_products(a, b, tile);
    } else {
      transform_tile<1>(tile);
      for (int e = threadIdx.x; e < kCount; e += kThreads) store_result(a, b, e, tile[padded(e)] * kFactor);
    }
    __syncthreads();
  }
}
