// quantize_table: quantize a large bfloat16 matrix by 4over6 (each block gets the better of two scales), with lookup
// tables (four_over_six_table.cuh). Blocks for which the tables do not prove which scale is better are quantized by the
// functions of quantize_tile.cuh. R is the recipe, In is the type of the elements of x, and kAligned is true if all
// rows of x begin at multiples of 16 bytes. `a` holds the kernel's arguments: the arrays and their sizes. t is the
// tensor scale: its encode and decode factors. The two candidate scales of a block are called six and four, because
// they map its amax to the element values 6 and 4. The fast path encodes blocks of finite elements in few instructions;
// the exact path is valid for all blocks.
//
// Each multiprocessor holds one table, which is shared by one thread block of kThreads threads.
#include "four_over_six_table.cuh"
#include "quantize_tile.cuh"

// The result of looking up the elements of one thread in the table: the codes of the two candidate scales of the block,
// the table entries of the elements, and the sum of the entries.
template <class R>
struct Lookup {
  u32 six, four, entries[R::kBlock], sum;
};

// Look up the elements x of one row of a block in the table, and store the result in `found`: the two candidate scale
// codes, the codes of each element under both scales, and the difference of the errors of the two scales. `amax` is the
// amax of the whole block. Return true if the table is valid for the block. Otherwise return false, and store only the
// two scale codes, found.six and found.four.
template <class R, class In>
FP4KIT_DEVICE bool look_up_block(const PairTable& table, const Run<In, R::kBlock>& x, float amax, TensorScale t,
                                 Lookup<R>& found) {
  const float sixth = quotient_by(amax, 6.0f, kInv6);
  scales_of<R>(sixth, t, found.six, found.four);
  if (!is_in_table(amax, multiply<R>(sixth, t.encode), t)) return false;
  found.sum = look_up(table, x, found.six, found.four, found.entries);
  return true;
}

// Return true if `sum` proves which of a block's two scales is better: if it is at least `slack` or below -`slack`.
// `sum` is a signed integer, stored as u32: the error of one scale minus the error of the other, added over the
// elements. `slack` is the largest error that `sum` may have.
FP4KIT_DEVICE bool is_beyond(u32 sum, u32 slack) {
  return sum + slack >= 2u * slack;
}

// Store the codes and the scale code of one row of a block, for which the table has proved which scale is better:
// `four` of `found` if is_four, otherwise `six`. `found` is the result of look_up_block, and x holds the elements.
// `run` is the number of this row of R::kBlock elements in the matrix, and `scale_at` is the offset of its scale in
// a.scales.
template <class R, class In>
FP4KIT_DEVICE void store_found(const QuantizeArguments& a, u32 run, u32 scale_at, const Run<In, R::kBlock>& x,
                               const Lookup<R>& found, bool is_four) {
  const u32 shift = is_four ? 4u : 0u, scale = is_four ? found.four : found.six;
  const bool no_signs =
      R::kFlush && found.four == 0u;  // FlashInfer returns early for a block of zeros, without their signs
  u32 words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    u32 pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) pairs[j] = no_signs ? 0u : pair_with_code_signs<R, In>(x.w[4 * i + j]);
    words[i] = with_signs_of_codes<R>(codes_of_entries(found.entries + 8 * i, shift) | nibble_signs_of_pairs(pairs));
  }
  store_words(a.packed + static_cast<u64>(run) * 8u, words);
  a.scales[scale_at] = static_cast<u8>(scale);
}

// Quantize this thread's blocks of a.x, for blocks of one row, and store their codes and scale codes. A thread
// processes one block at a time. If has_table is false, the table is not valid for the tensor scale t, and is not used.
// A block for which the table does not decide takes the fast path or the exact path of quantize_tile.cuh.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_rows_by_table(const QuantizeArguments& a, const PairTable& table, TensorScale t,
                                          bool has_table) {
  constexpr bool kFlat = R::kLayout == ScaleLayout::linear;  // true if the row of a block is not needed
  const u32 blocks = static_cast<u32>(a.columns) / R::kBlock, runs = static_cast<u32>(a.rows) * blocks;
  const u32 step = gridDim.x * kThreads;
  u32 run = blockIdx.x * kThreads + threadIdx.x;
  Run<In, R::kBlock> next = {};
  if (run < runs) next = load_row<R, In, kAligned>(a, static_cast<i64>(run) * R::kBlock);
  for (; run < runs; run += step) {
    Run<In, R::kBlock> x = next;
    if (run + step < runs) next = load_row<R, In, kAligned>(a, static_cast<i64>(run + step) * R::kBlock);
    const u32 row = kFlat ? 0u : run / blocks, block = run - row * blocks;
    Lookup<R> found;
    const bool in_table = has_table && look_up_block<R>(table, x, float_of(largest_bits_of(x)), t, found);
    if (in_table && is_beyond(found.sum, kSlack)) {
      store_found<R, In>(a, run, scale_offset<R::kLayout>(row, block, blocks), x, found,
                         static_cast<i32>(found.sum) < 0);
      continue;
    }
    TileMemory<R> unused;
    const BlockRow position = {row, block, blocks};
    Choice c = {};
    if (!in_table) c = choose_scale<R, In>(x, t, nullptr, unused, 0);
    if (c.chosen) {
      store_row<R, In, kAligned>(a, position, x, c, t);
    } else {
      quantize_any_four_over_six<R, In, kAligned>(a, position, true, x, t, unused, 0, 0);
    }
  }
}

// Four warps that encode eight square blocks together, with one row of a block per thread. Lane 8 i + j of warp w has
// row 4 w + i of block j.
struct Team {
  static constexpr u32 kThreads = 128, kBlocks = 8;
  u32* parts;  // 64 words of shared memory

  FP4KIT_DEVICE u32 number() { return threadIdx.x / kThreads; }
  FP4KIT_DEVICE u32 row() { return threadIdx.x / kBlocks % 16u; }
  FP4KIT_DEVICE u32 block() { return threadIdx.x % kBlocks; }
  FP4KIT_DEVICE u32 warp() { return threadIdx.x / 32u % 4u; }
  FP4KIT_DEVICE u32 lane() { return threadIdx.x % 32u; }
  FP4KIT_DEVICE void sync() { sync_group(number() + 1u, kThreads); }

  // Return the combination of the values of all rows of this thread's block by Operation, in any order. Each thread
  // passes the value of its row, and gets the result of its block. All threads of the team must call this function. It
  // overwrites words 32 kHalf ... 32 kHalf + 31 of `parts`, which may be used again after two more barriers.
  template <class Operation, int kHalf>
  FP4KIT_DEVICE_MEMBER u32 reduce(u32 value) const {
    value = Operation::combine(value, __shfl_xor_sync(0xFFFFFFFFu, value, 8));
    value = Operation::combine(value, __shfl_xor_sync(0xFFFFFFFFu, value, 16));
    if (lane() < kBlocks) parts[32 * kHalf + block() * 4 + warp()] = value;
    sync();
    const Chunk chunk = reinterpret_cast<const Chunk*>(parts + 32 * kHalf)[block()];
    return Operation::combine(Operation::combine(chunk.w[0], chunk.w[1]), Operation::combine(chunk.w[2], chunk.w[3]));
  }

  // Return the sum of the values of all rows of this thread's block. The bits of a float sum depend on the order, which
  // is that of _sum_rows in reference/four_over_six.py. Each thread passes the value of its row, and gets the result of
  // its block. All threads of the team must call this function.
  FP4KIT_DEVICE_MEMBER float sum_in_order(float value) const {
    float* sums = reinterpret_cast<float*>(parts);
    sync();
    if (warp() >= 2u) sums[(warp() - 2u) * 32 + lane()] = value;
    sync();
    if (warp() < 2u) value = value + sums[warp() * 32 + lane()];  // row i + row i + 8
    sync();
    if (warp() == 1u) sums[lane()] = value;
    sync();
    if (warp() == 0u) value = value + sums[lane()];                              // row i + row i + 4
    value = value + float_of(__shfl_xor_sync(0xFFFFFFFFu, bits_of(value), 16));  // row i + row i + 2
    value = value + float_of(__shfl_xor_sync(0xFFFFFFFFu, bits_of(value), 8));   // row 0 + row 1
    if (warp() == 0u && lane() < kBlocks) sums[32 + lane()] = value;
    sync();
    return sums[32 + block()];
  }
};

// An operation for Team::reduce: it returns the larger of two bit patterns.
struct LargestBits {
  FP4KIT_DEVICE u32 combine(u32 a, u32 b) { return maximum(a, b); }
};
// An operation for Team::reduce: it returns the sum of two integers modulo 2^32.
struct IntegerSum {
  FP4KIT_DEVICE u32 combine(u32 a, u32 b) { return a + b; }
};

// Quantize the eight square blocks of a team (four warps) by the exact path, and store their codes and scale codes.
// Each thread has one row of a block: `run` holds its elements, and `position` is its place. If `inside` is false, the
// row is outside of the matrix and nothing is stored for it. All threads of the team must call this function.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_squares_any(const QuantizeArguments& a, const Team& team, BlockRow position, bool inside,
                                        Run<In, R::kBlock>& run, TensorScale t) {
  static_assert(R::kAmaxNan == AmaxNan::propagate, "the largest bits are the amax");
  team.sync();
  const float amax = float_of(team.reduce<LargestBits, 0>(largest_bits_of(run)));
  u32 six, four;
  scales_of<R>(divide<R>(amax, max_of<typename R::Element>()), t, six, four);
  float errors[2] = {};
#pragma unroll 1
  for (int k = 0; k < 2; ++k) {
    errors[0] = errors[1];
    errors[1] = team.sum_in_order(sum_errors<R, true>(run, k == 0 ? six : four, t));
  }
  team.sync();
  if (!inside) return;
  const u32 scale = errors[1] < errors[0] ? four : six;
  store_chosen<R, In, kAligned>(a, position.row * a.columns + position.block * R::kBlock,
                                encode_chosen<R, true>(run, amax, scale, t), scale, t);
  a.scales[scale_offset<R::kLayout>(position.row, position.block, position.blocks)] = scale;
}

// Quantize the square blocks of a.x that belong to this thread block, and store their codes and scale codes. A team of
// four warps processes eight blocks at a time. If has_table is false, the table is not valid for the tensor scale t,
// and every block takes the exact path. Otherwise the eight blocks of a team take the exact path only if the table does
// not decide for one of them. All threads of the thread block must call this function.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_squares_by_table(const QuantizeArguments& a, PairTable& table, TensorScale t,
                                             bool has_table) {
  const Team team = {table.parts + Team::number() * 64u};
  constexpr u32 kTeams = kThreads / Team::kThreads;
  const u32 rows = static_cast<u32>(a.rows), blocks = static_cast<u32>(a.columns) / R::kBlock;
  const u32 wide = (blocks + Team::kBlocks - 1) / Team::kBlocks,
            tiles = (rows + R::kBlockRows - 1) / R::kBlockRows * wide;
  const u32 step = gridDim.x * kTeams, down = step / wide * R::kBlockRows, right = step % wide * Team::kBlocks;
  u32 tile = blockIdx.x * kTeams + Team::number();
  u32 row = tile / wide * R::kBlockRows + Team::row(), block = tile % wide * Team::kBlocks + Team::block();
  const auto load = [&](u32 row, u32 block) {
    if (row >= rows || block >= blocks) return Run<In, R::kBlock>{};
    return load_row<R, In, kAligned>(a, static_cast<i64>(row * blocks + block) * R::kBlock);
  };
  Run<In, R::kBlock> next = load(row, block);
  for (u32 next_row, next_block; tile < tiles; tile += step, row = next_row, block = next_block) {
    Run<In, R::kBlock> x = next;
    next_row = row + down;
    next_block = block + right;
    if (next_block >= wide * Team::kBlocks) {
      next_block -= wide * Team::kBlocks;
      next_row += R::kBlockRows;
    }
    next = load(next_row, next_block);
    const bool inside = row < rows && block < blocks;
    if (has_table) {
      const float amax = float_of(team.reduce<LargestBits, 0>(largest_bits_of(x)));
      Lookup<R> found;
      found.sum = 0u;
      look_up_block<R>(table, x, amax, t, found);
      const u32 sum = team.reduce<IntegerSum, 1>(static_cast<u32>(static_cast<i32>(found.sum) >> 8));
      if (!__any_sync(0xFFFFFFFFu, !is_beyond(sum, kSquareSlack))) {
        const u32 run = row * blocks + block;
        const u32 scale_at = R::kLayout == ScaleLayout::linear ? run : scale_offset<R::kLayout>(row, block, blocks);
        if (inside) store_found<R, In>(a, run, scale_at, x, found, static_cast<i32>(sum) < 0);
        continue;
      }
    }
    quantize_squares_any<R, In, kAligned>(a, team, BlockRow{row, block, blocks}, inside, x, t);
    next = load(next_row, next_block);  // load it again, so that it takes no registers during the exact path
  }
}

// Quantize a.x by 4over6, and store its codes in a.packed, its block scales in a.scales and its tensor scale in
// a.tensor_scale (unless that is nullptr). The kernel is launched for large bfloat16 matrices and recipes with 4over6
// (cuda/dispatch.py has all conditions). a.tensor_amax is an input. A thread processes one block of one row at a
// time, or a team of four warps processes eight square blocks at a time. Launch with any number of thread blocks; one
// per multiprocessor suffices.
extern "C" __global__ void __launch_bounds__(kThreads, 1) quantize_table_kernel(QuantizeArguments a) {
  __shared__ PairTable table;
  const TensorScale t = tensor_scale_of<R, Input>(a.tensor_amax, 0, 0, 1);
  const bool has_table = has_table_for(t);
  if (has_table) fill_table<R>(table, t);
  if (blockIdx.x == 0 && threadIdx.x == 0 && a.tensor_scale) store_tensor_scale(a, 0, t);
  if constexpr (R::kBlockRows == 1) {
    quantize_rows_by_table<R, Input, kAligned>(a, table, t, has_table);
  } else {
    quantize_squares_by_table<R, Input, kAligned>(a, table, t, has_table);
  }
}
