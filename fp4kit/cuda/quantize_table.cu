// 4over6 of a large matrix of bfloat16, by tables; blocks that these do not decide go the ways of quantize_tile.
//
// A multiprocessor has one table, and one thread block of many threads.
#include "four_over_six_table.cuh"
#include "quantize_tile.cuh"

constexpr int kTableThreads = 1024;

// Scales of a block, and what the table says of its elements.
template <class R>
struct Lookup {
  u32 six, four, entries[R::kBlock];
  i32 sum;
  bool is_zero, found;
};

template <class R, class In>
FP4KIT_DEVICE Lookup<R> look_up_block(const PairTable& table, const Run<In, R::kBlock>& x, float amax, TensorScale t) {
  Lookup<R> result = {};
  const float sixth = quotient_by(amax, 6.0f, kInv6);
  scales_of<R>(sixth, t, result.six, result.four);
  result.is_zero = amax == 0.0f;
  result.found = is_in_table(amax, multiply<R>(sixth, t.encode), t, result.six, result.four);
  if (result.found) result.sum = static_cast<i32>(look_up(table, x, result.six, result.four, result.entries));
  return result;
}

template <class R, class In>
FP4KIT_DEVICE void store_entries(const Arguments& a, Spot spot, i64 first, const Run<In, R::kBlock>& x, const Lookup<R>& block, bool is_four) {
  const u32 shift = is_four ? 4u : 0u;
  u32 words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    u32 pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) pairs[j] = R::kFlush && block.is_zero ? 0u : pair_with_code_signs<R, In>(x.w[4 * i + j]);
    words[i] = codes_of_entries(block.entries + 8 * i, shift) | nibble_signs_of_pairs(pairs);
  }
  store_words(a.packed + first / 2, words);
  a.scales[scale_offset<R::kLayout>(spot.row, spot.block, spot.blocks)] = is_four ? block.four : block.six;
}

template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_rows_by_table(const Arguments& a, PairTable& table, TensorScale t, bool has_table) {
  constexpr bool kFlat = R::kLayout == ScaleLayout::linear;  // a row's number is not needed
  const u32 blocks = static_cast<u32>(a.columns) / R::kBlock, runs = static_cast<u32>(a.rows) * blocks;
  const u32 step = gridDim.x * kTableThreads;
  u32 run = blockIdx.x * kTableThreads + threadIdx.x;
  Run<In, R::kBlock> next = {};
  if (run < runs) next = load_row<R, In, kAligned>(a, static_cast<i64>(run) * R::kBlock);
  for (; run < runs; run += step) {
    const Run<In, R::kBlock> x = next;
    if (run + step < runs) next = load_row<R, In, kAligned>(a, static_cast<i64>(run + step) * R::kBlock);
    const u32 row = kFlat ? 0u : run / blocks;
    const Spot spot = {row, run - row * blocks, blocks};
    if (has_table) {
      const Lookup<R> block = look_up_block<R>(table, x, float_of(largest_bits_of(x)), t);
      if ((block.found && static_cast<u32>(block.sum) + kSlack >= 2u * kSlack) || block.is_zero) {
        store_entries<R, In>(a, spot, static_cast<i64>(run) * R::kBlock, x, block, block.sum < 0);
        continue;
      }
    }
    Tile<R> none;
    const Choice c = choose_scale<R, In>(x, t, nullptr, none, 0);
    if (c.chosen) {
      store_row<R, In, kAligned>(a, spot, x, c, t);
    } else {
      quantize_any<R, In, kAligned>(a, spot, true, t, none, 0, 0);
    }
  }
}

// Four warps that have eight square blocks side by side, a row of a block each: lane 8 i + j of warp w has row 4 w + i of block j.
struct Group {
  static constexpr int kThreads = 128, kBlocks = 8;
  u32 number, warp, lane;
  u32* parts;  // 64 words of shared memory

  FP4KIT_DEVICE_MEMBER explicit Group(PairTable& table)
      : number(threadIdx.x / kThreads), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32), parts(table.parts + number * 64) {}

  FP4KIT_DEVICE_MEMBER void sync() const { sync_group(number + 1u, kThreads); }

  // Of all rows of a block, in any order: by way of words 32 kHalf ... 32 kHalf + 31, which are free after the next barrier but one.
  template <class Operation, int kHalf>
  FP4KIT_DEVICE_MEMBER u32 reduce(u32 value) const {
    value = Operation::of(value, __shfl_xor_sync(0xFFFFFFFFu, value, 8));
    value = Operation::of(value, __shfl_xor_sync(0xFFFFFFFFu, value, 16));
    if (lane < kBlocks) parts[32 * kHalf + lane * 4 + warp] = value;
    sync();
    const Chunk chunk = reinterpret_cast<const Chunk*>(parts + 32 * kHalf)[lane % kBlocks];
    return Operation::of(Operation::of(chunk.w[0], chunk.w[1]), Operation::of(chunk.w[2], chunk.w[3]));
  }

  // Sum of all rows of a block as a tree: row i with i + 8, then + 4, + 2, + 1.
  FP4KIT_DEVICE_MEMBER float sum_in_order(float value) const {
    float* sums = reinterpret_cast<float*>(parts);
    sync();
    if (warp >= 2) sums[(warp - 2) * 32 + lane] = value;
    sync();
    if (warp < 2) value = value + sums[warp * 32 + lane];
    sync();
    if (warp == 1) sums[lane] = value;
    sync();
    if (warp == 0) value = value + sums[lane];
    value = value + float_of(__shfl_xor_sync(0xFFFFFFFFu, bits_of(value), 16));
    value = value + float_of(__shfl_xor_sync(0xFFFFFFFFu, bits_of(value), 8));
    if (warp == 0 && lane < kBlocks) sums[32 + lane] = value;
    sync();
    return sums[32 + lane % kBlocks];
  }
};

struct LargestBits {
  FP4KIT_DEVICE u32 of(u32 a, u32 b) { return maximum(a, b); }
};
struct IntegerSum {
  FP4KIT_DEVICE u32 of(u32 a, u32 b) { return a + b; }
};

// Square blocks, whatever their elements are.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_squares_any(const Arguments& a, const Group& group, Spot spot, bool inside, const Run<In, R::kBlock>& run, TensorScale t) {
  static_assert(R::kAmaxNan == AmaxNan::propagate, "the largest bits are the amax");
  float x[R::kBlock];
  widen_run(run, x);
  group.sync();
  const float amax = float_of(group.reduce<LargestBits, 0>(bits_of(amax_of<R::kAmaxNan>(x))));
  u32 six, four, codes[R::kBlock];
  scales_of<R>(divide<R>(amax, max_of<typename R::Element>()), t, six, four);
  float errors[2] = {};
#pragma unroll 1
  for (int k = 0; k < 2; ++k) {
    errors[0] = errors[1];
    errors[1] = group.sum_in_order(sum_errors<R>(x, k == 0 ? six : four, t));
  }
  const u32 scale = errors[1] < errors[0] ? four : six;
  encode_chosen<R>(x, amax, scale, t, codes);
  group.sync();
  if (!inside) return;
  write_run<R, In, R::kBlock, kAligned>(a, spot.row * a.columns + spot.block * R::kBlock, codes, scale, t);
  a.scales[scale_offset<R::kLayout>(spot.row, spot.block, spot.blocks)] = scale;
}

template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_squares_by_table(const Arguments& a, PairTable& table, TensorScale t, bool has_table) {
  const Group group(table);
  const u32 blocks = static_cast<u32>(a.columns) / R::kBlock, wide = (blocks + Group::kBlocks - 1) / Group::kBlocks;
  const u32 tiles = static_cast<u32>((a.rows + R::kBlockRows - 1) / R::kBlockRows) * wide;
  const u32 step = gridDim.x * (kTableThreads / Group::kThreads);
  const auto spot_of = [&](u32 tile) {
    const u32 tall = tile / wide;
    return Spot{tall * R::kBlockRows + group.warp * 4 + group.lane / 8, (tile - tall * wide) * Group::kBlocks + group.lane % 8, blocks};
  };
  const auto is_inside = [&](u32 tile, Spot s) { return tile < tiles && s.row < a.rows && s.block < blocks; };
  const auto load = [&](bool inside, Spot s) {
    return inside ? load_row<R, In, kAligned>(a, s.row * a.columns + s.block * R::kBlock) : Run<In, R::kBlock>{};
  };
  u32 tile = blockIdx.x * (kTableThreads / Group::kThreads) + group.number;
  Spot next_spot = spot_of(tile);
  Run<In, R::kBlock> next = load(is_inside(tile, next_spot), next_spot);
  for (; tile < tiles; tile += step) {
    const Run<In, R::kBlock> x = next;
    const Spot spot = next_spot;
    const bool inside = is_inside(tile, spot);
    next_spot = spot_of(tile + step);
    next = load(is_inside(tile + step, next_spot), next_spot);
    bool decided = false;
    if (has_table) {
      const float amax = float_of(group.reduce<LargestBits, 0>(largest_bits_of(x)));
      const Lookup<R> block = look_up_block<R>(table, x, amax, t);
      const u32 sum = group.reduce<IntegerSum, 1>(static_cast<u32>(block.sum >> 8));
      decided = (block.found && sum + kSquareSlack >= 2u * kSquareSlack) || block.is_zero;
      decided = !__any_sync(0xFFFFFFFFu, !decided);
      if (decided && inside)
        store_entries<R, In>(a, spot, spot.row * a.columns + spot.block * R::kBlock, x, block, static_cast<i32>(sum) < 0);
    }
    if (!decided) quantize_squares_any<R, In, kAligned>(a, group, spot, inside, x, t);
  }
}

extern "C" __global__ void __launch_bounds__(kTableThreads, 1) quantize_table_kernel(Arguments a) {
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
