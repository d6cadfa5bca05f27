// quantize_tile: quantize blocks of several rows, or blocks of one or more rows by 4over6 (each block gets the better
// of two scales). Blocks have 16 or 32 columns. The elements may have any type, and the matrix any size. R is the
// recipe. If R::kFake, the kernel stores the values to which codes decode instead of codes and scales. t is a tensor
// scale: its encode and decode factors. The fast path encodes blocks of finite elements in few instructions; the exact
// path is valid for all blocks.
#include "amax.cuh"
#include "four_over_six_sums.cuh"
#include "quantize_tile.cuh"
#include "row_step.cuh"

constexpr int kBlocksPerMultiprocessor =
    R::kBlock > 16 || R::kFinders ? 2 : 4;  // the largest numbers for which no registers are spilled

// One row of a.x, which one thread block quantizes.
template <class R, class In, bool kAligned>
struct OwnRow {
  const QuantizeArguments& a;
  u32 row, blocks;  // the index of the row, and the number of blocks per row

  // Return the elements of a block, or those of the last block if `block` is too large.
  FP4KIT_DEVICE_MEMBER Run<In, R::kBlock> load(u32 block) const {
    return load_row<R, In, kAligned>(a, static_cast<i64>(row * blocks + minimum(block, blocks - 1u)) * R::kBlock);
  }

  // Return the amax of the row. R::kAmaxNan says whether NaN elements count. All threads of the thread block must call
  // this function. Each thread loads kAtOnce blocks at once, so that enough loads are in flight.
  FP4KIT_DEVICE_MEMBER float amax() const {
    constexpr u32 kAtOnce = 4;
    u32 own = 0u;
    for (u32 block = threadIdx.x; block - threadIdx.x < blocks; block += kAtOnce * blockDim.x) {
      Run<In, R::kBlock> runs[kAtOnce];
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) runs[i] = load(block + i * blockDim.x);
#pragma unroll
      for (u32 i = 1; i < kAtOnce; ++i) runs[0] = larger_magnitudes(runs[0], runs[i]);
      own = maximum(own, largest_bits_of(runs[0]));
    }
    return amax_of_row<R, In>(own, blocks, [&](u32 block) { return load(block); });
  }

  // Quantize one block with the tensor scale t of the row, and store its codes and its scale code. `encoded` is the
  // result of encode_by_sums, or invalid.
  FP4KIT_DEVICE_MEMBER void store(u32 block, Run<In, R::kBlock>& x, TensorScale t, const EncodedBlock& encoded) const {
    if (encoded.valid) {
      store_words(a.packed + static_cast<u64>(row * blocks + block) * (R::kBlock / 2), encoded.words);
      a.scales[scale_offset<R::kLayout, u32>(row, block, blocks)] = static_cast<u8>(encoded.code);
      return;
    }
    __shared__ TileMemory<R> unused;
    const BlockRow position = {row, block, blocks};
    if constexpr (!kHasSums<R> && !kHasTwoFormats<R>) {
      const Choice c = choose_scale<R, In>(x, t, nullptr, unused, 0);
      if (c.chosen) return store_row<R, In, kAligned>(a, position, x, c, t);
    }
    quantize_any_four_over_six<R, In, kAligned>(a, position, true, x, t, unused, 0, 0);
  }
};

// Quantize a matrix with one tensor scale per row by 4over6 or IF4, for blocks of one row. For each row, first find the
// amax and store it at a.tensor_amax, with the tensor scale at a.tensor_scale (unless that is nullptr). Then store the
// codes and the block scales of the row, whose elements are loaded again, mostly from a cache. A thread block takes one
// row at a time, and a thread takes one block at a time. Launch with any number of thread blocks of at most kThreads
// threads. The number of threads must be a multiple of 32.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_own_rows(const QuantizeArguments& a) {
  const u32 rows = static_cast<u32>(a.rows), lane = threadIdx.x % 32u;
  for (u32 row = blockIdx.x; row < rows; row += gridDim.x) {
    const OwnRow<R, In, kAligned> own = {a, row, static_cast<u32>(a.columns) / R::kBlock};
    const float amax = own.amax();
    const TensorScale t = R::TensorRule::template scale<R, In>(amax);
    if (threadIdx.x == 0u) {
      const_cast<float*>(a.tensor_amax)[row] = amax;
      if (a.tensor_scale) store_tensor_scale(a, row, t);
    }
    RowFacts facts = {};
    if constexpr (kHasSums<R>) facts = row_facts<R, In>(t);
#pragma unroll 1
    for (u32 first = threadIdx.x - lane; first < own.blocks; first += blockDim.x) {
      const u32 block = first + lane;
      Run<In, R::kBlock> x = own.load(block);
      EncodedBlock encoded = {};
      if constexpr (kHasSums<R>) encoded = encode_by_sums<R, In>(x, t, facts);
      if (block < own.blocks) own.store(block, x, t, encoded);
    }
  }
}

// Quantize a.x, and store its codes in a.packed, its block scales in a.scales and its tensor scales in a.tensor_scale
// (unless that is nullptr); or store only its values in a.values if R::kFake. The kernel is launched for recipes with
// 4over6 or with blocks of several rows, if neither quantize_columns.cu nor quantize_table.cu supports the call
// (cuda/dispatch.py). A thread processes one row of one block at a time.
//
// If R::kFinders is 0, launch with any number of thread blocks. Otherwise launch with a multiple of R::kFinders thread
// blocks, which first find the tensor's amax, or the amax of each row, and store it at a.tensor_amax (amax.cuh). If
// R::kRowStep is not `none`, each thread block finds the amaxes of its own rows, one row at a time.
extern "C" __global__ void FP4KIT_CLUSTER __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    quantize_tile_kernel(QuantizeArguments a) {
  if constexpr (R::kRowStep != RowStep::none) {
    quantize_own_rows<R, Input, kAligned>(a);
  } else {
    find_amax<R, Input, kAligned>(a);
    quantize_tile<R, Input, kAligned>(a, whole_grid());
  }
}
