// Functions that quantize two kinds of blocks. Blocks of kBlockRows rows (16x16, 32x32) are quantized by threads that
// exchange amaxes (largest magnitudes). Blocks of one or more rows are quantized by 4over6 (the better of two scales).
// For IF4, whose blocks have one row, there is only the exact path. R is the recipe, and In is the type of the elements
// of x. `a` holds the arguments of the kernel, and t is the tensor scale. kAligned is true if all rows of x begin at
// multiples of 16 bytes, and also all rows of `values` if values are stored.
//
// A tile is kBlockRows rows of kColumns blocks. A thread handles one row of one block (R::kBlock elements). The threads
// exchange amaxes and errors in shared memory. For 4over6 on blocks of one row, each thread handles whole blocks and
// needs no shared memory.
#pragma once

#include "block_reduce.cuh"

// The row of a block that a thread handles: the row and the block column in the matrix, and the number `blocks` of
// blocks per row.
struct BlockRow {
  i64 row, block, blocks;
};

// Store the scale code of a block in a.scales, for the row of the block that this thread handles: each row of a block
// has its own copy. If R::kFake, no scale code is stored.
//
// The tensor scale t is stored too, unless R has none or a.tensor_scale is nullptr: by the thread with the first block
// of the tensor or, if rows have their own tensor scales, by the thread with the first block of each row.
template <class R, class In>
FP4KIT_DEVICE void store_scales(const QuantizeArguments& a, BlockRow position, u32 code, TensorScale t) {
  if constexpr (!R::kFake) a.scales[scale_offset<R::kLayout>(position.row, position.block, position.blocks)] = code;
  const bool owner = position.block == 0 && (R::kTensorScaling == TensorScaling::row || position.row == 0);
  if (R::kTensorScaling != TensorScaling::none && a.tensor_scale && owner)
    store_tensor_scale(a, R::kTensorScaling == TensorScaling::row ? position.row : 0, t);
}

// The scale that the fast path chooses for a block: its code, and the factor of the block (the number by which elements
// are multiplied or divided). `chosen` is false if the fast path cannot choose or must not encode the block; the other
// fields are then not valid. `is_zero` is true if a 4over6 block has only zeros.
struct Choice {
  bool chosen, is_zero;
  u32 code;
  Factor factor;
};

// Return the scale that the fast path chooses for a block (Choice). If `chosen` is false in the result of any thread
// that handles a row of the block, the whole block must take the exact path.
//   run     the row of the block that this thread handles
//   t       the tensor scale
//   table   the ApproximateScale of each scale code, or nullptr to compute it here; not read without 4over6
//   tile    receives intermediate results if blocks have several rows
//   column  the index of the block in the tile
// If R::kBlockRows > 1, all threads of the thread block must call this function.
template <class R, class In>
FP4KIT_DEVICE Choice choose_scale(const Run<In, R::kBlock>& run, TensorScale t, const ApproximateScale* table,
                                  TileMemory<R>& tile, int column) {
  float amax[1] = {float_of(largest_bits_of(run))};
  if constexpr (R::kBlockRows > 1) reduce_rows<R, LargerOf, 0>(tile, amax, column);
  if constexpr (!R::kFourOverSix) {
    Choice c = {false, false, 0u, {}};
    c.code = scale_block<R, In>(amax[0], t, nullptr, c.factor);
    c.chosen = bits_of(amax[0]) < kInfinityBits && takes_fast_path<R, In>(largest_bits_of(run), c.factor);
    return c;
  } else {
    u32 six_code, four_code;
    scales_of<R>(quotient_by(amax[0], 6.0f, kInv6), t, six_code,
                 four_code);  // exact except near subnormals, for which the fast path is not used
    const ApproximateScale six = table ? table[six_code % kTableSize] : approximate_scale<R, In>(six_code, t);
    const ApproximateScale four = table ? table[four_code % kTableSize] : approximate_scale<R, In>(four_code, t);
    float errors[2];
    approximate_errors<R>(run, six, four, inverse_amax_power(t), errors);
    if constexpr (R::kBlockRows > 1) reduce_rows<R, SumOf, 1>(tile, errors, column);
    const bool is_zero = is_zero_block(amax[0], six_code, four_code, t), is_four = !is_zero && errors[1] < errors[0];
    // If |x| * factor < 7, no clamp is needed; infinity and NaN fail the comparison. Of two equal scales, six wins.
    const bool is_fast = amax[0] * maximum(six.factor, four.factor) < 6.99f &&
                         (six_code == four_code || is_decided<R>(six, four, errors));
    const float factor = is_zero ? 1.0f : is_four ? four.factor : six.factor;
    constexpr bool kZerosUnsigned =
        (R::kFlush || R::kIsCute) &&
        R::kSign == Sign::not_positive;  // the reference gives code 0 where the fast path gives the code of -0
    return {kZerosUnsigned ? is_fast && !is_zero : is_fast || is_zero,
            is_zero,
            is_four ? four_code : six_code,
            {factor, factor}};
  }
}

// Return the row of a block that begins at element `first` of a.x. If R::kHadamard, return its Hadamard transform
// instead.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE Run<In, R::kBlock> load_row(const QuantizeArguments& a, i64 first) {
  Run<In, R::kBlock> x = read_run<In, R::kBlock, kAligned>(static_cast<const typename In::Bits*>(a.x) + first);
  if constexpr (R::kHadamard) hadamard_run<R::kSignMask>(x);
  return x;
}

// Encode a row of a block by the fast path, with the scale c that choose_scale has chosen, and store it: its codes and
// its scale code or, if R::kFake, only its values. `position` is the row's place in the matrix, and t the tensor scale,
// which store_scales may store too. The row is stored in runs of 16, because random bytes are generated for 16 elements
// at a time.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void store_row(const QuantizeArguments& a, BlockRow position, const Run<In, R::kBlock>& run, Choice c,
                             TensorScale t) {
  const i64 first = position.row * a.columns + position.block * R::kBlock;
  const bool no_signs =
      (R::kFlush || R::kIsCute) && c.is_zero;  // FlashInfer returns early for a block of zeros, without their signs
#pragma unroll
  for (int start = 0; start < R::kBlock; start += 16) {
    Run<In, 16> part;
#pragma unroll
    for (int i = 0; i < part.kWords; ++i) part.w[i] = no_signs ? 0u : run.w[start / part.kPerWord + i];
    store_finite<R, In, kAligned>(a, first + start, part, c.factor, c.code, t);
  }
  store_scales<R, In>(a, position, c.code, t);
}

// Quantize a row of a block by 4over6 or IF4 by the exact path, and store it: its codes and its scale code or, if
// R::kFake, only its values.
//   position  the row's place in the matrix
//   inside    false if the row is outside of the matrix; then nothing is stored
//   run       the elements of the row, from load_row; zeros if the row is outside
//   tile_row  the row of this thread in the tile
//   column    the index of its block in the tile
// If both scales have the same error, or an error is NaN, the scale that maps the amax to 6 is used. If R::kBlockRows >
// 1, all threads of the thread block must call this function.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_any_four_over_six(const QuantizeArguments& a, BlockRow position, bool inside,
                                              Run<In, R::kBlock>& run, TensorScale t, TileMemory<R>& tile, int tile_row,
                                              int column) {
  float x[R::kBlock];
  widen_run(run, x);
  const float amax = amax_of_rows<R>(tile, amax_of<R::kAmaxNan>(x), tile_row, column);
  u32 six, four;
  scales_of<R>(divide<R>(amax, max_of<typename R::Element>()), t, six, four);
  float errors[2] = {};
#pragma unroll 1
  for (int k = 0; k < 2; ++k) {  // a variable index would put the array into memory
    errors[0] = errors[1];
    errors[1] = sum_errors<R>(run, k == 0 ? six : four, t);
  }
  sum_rows<R>(tile, errors, tile_row, column);
  if (!inside) return;
  const u32 scale = errors[1] < errors[0] ? four : six;
  store_chosen<R, In, kAligned>(a, position.row * a.columns + position.block * R::kBlock,
                                encode_chosen<R>(run, amax, scale, t), scale, t);
  store_scales<R, In>(a, position, scale, t);
}

// Quantize a row of a block by the exact path, for recipes without 4over6, and store it: its codes and its scale code
// or, if R::kFake, only its values. The row is loaded here. `position` is its place in the matrix; tile_row and
// `column` are the row of this thread in the tile and the index of its block there. If `inside` is false, the row is
// outside of the matrix, and nothing is stored. If R::kBlockRows > 1, all threads of the thread block must call this
// function.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_any(const QuantizeArguments& a, BlockRow position, bool inside, TensorScale t,
                                TileMemory<R>& tile, int tile_row, int column) {
  const i64 first = position.row * a.columns + position.block * R::kBlock;
  float x[R::kBlock] = {};
  if (inside) widen_run_exactly<R>(load_row<R, In, kAligned>(a, first), x);
  const float amax = amax_of_rows<R>(tile, amax_of<R::kAmaxNan>(x), tile_row, column);
  if (!inside) return;
  Factor f;
  const u32 scale = scale_block<R, In>(amax, t, nullptr, f);
  store_exact<R, In, kAligned>(a, first, x, f, scale, t);
  store_scales<R, In>(a, position, scale, t);
}

// Store the ApproximateScale of each of the kTableSize scale codes in `table`, indexed by code. The tensor scale
// follows from a.tensor_amax, so has_one_scale<R>() must be true. All threads of the thread block must call this
// function, and may read the table when it returns.
template <class R, class In>
FP4KIT_DEVICE void fill_scale_table(const QuantizeArguments& a, ApproximateScale* table) {
  const TensorScale t = tensor_scale_of<R, In>(a.tensor_amax, 0, 0, 1);
  if (threadIdx.x < kTableSize) table[threadIdx.x] = approximate_scale<R, In>(threadIdx.x, t);
  __syncthreads();
}

// Quantize the tiles of a.x that this thread block of `grid` takes, one after the other, for blocks of several rows.
// Store codes and scales or, if R::kFake, only values. `table` holds the ApproximateScale of each scale code; if it is
// nullptr, each is computed when it is used. All threads of the thread block must call this function. They exchange
// amaxes and errors in `tile`.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_tiles(const QuantizeArguments& a, Grid grid, const ApproximateScale* table,
                                  TileMemory<R>& tile) {
  constexpr int kColumns = TileMemory<R>::kColumns;
  const int column = threadIdx.x % kColumns, tile_row = threadIdx.x / kColumns;
  const i64 blocks = a.columns / R::kBlock, wide = (blocks + kColumns - 1) / kColumns;
  const i64 tiles = (a.rows + R::kBlockRows - 1) / R::kBlockRows * wide;
  const TensorScale whole_scale =
      has_one_scale<R>() ? tensor_scale_of<R, In>(a.tensor_amax, 0, 0, blocks) : TensorScale{};
  for (i64 t_index = grid.block; t_index < tiles; t_index += grid.blocks) {
    const i64 tall_index = quotient(t_index, wide, tiles);
    const BlockRow position = {tall_index * R::kBlockRows + tile_row, (t_index - tall_index * wide) * kColumns + column,
                               blocks};
    const bool inside = position.row < a.rows && position.block < blocks;
    const BlockRow valid = inside ? position : BlockRow{0, 0, blocks};
    const TensorScale t =
        has_one_scale<R>() ? whole_scale : tensor_scale_of<R, In>(a.tensor_amax, valid.row, valid.block, blocks);
    if constexpr (R::kFourOverSix || FastPath<R, In>::kExists) {
      Run<In, R::kBlock> run = {};
      if (inside) run = load_row<R, In, kAligned>(a, position.row * a.columns + position.block * R::kBlock);
      const Choice c = choose_scale<R, In>(run, t, table, tile, column);
      if (!__syncthreads_or(inside && !c.chosen)) {
        if (inside) store_row<R, In, kAligned>(a, position, run, c, t);
        continue;
      }
      if constexpr (R::kFourOverSix)
        quantize_any_four_over_six<R, In, kAligned>(a, position, inside, run, t, tile, tile_row, column);
    }
    if constexpr (!R::kFourOverSix) quantize_any<R, In, kAligned>(a, position, inside, t, tile, tile_row, column);
  }
}

// Quantize the blocks of a.x that this thread of `grid` takes, one after the other, by 4over6 or IF4, for blocks of one
// row. Store codes and scales or, if R::kFake, only values. `table` holds the ApproximateScale of each scale code; if
// it is nullptr, each is computed when it is used. `tile` is not used.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_rows(const QuantizeArguments& a, Grid grid, const ApproximateScale* table,
                                 TileMemory<R>& tile) {
  constexpr bool kOneScale = has_one_scale<R>();
  constexpr bool kFlat = R::kLayout == ScaleLayout::linear && kOneScale;  // true if the row of a block is not needed
  const u32 blocks = static_cast<u32>(a.columns) / R::kBlock, runs = static_cast<u32>(a.rows) * blocks;
  const TensorScale whole_scale = kOneScale ? tensor_scale_of<R, In>(a.tensor_amax, 0, 0, blocks) : TensorScale{};
  const auto block_row_of = [&](u32 run) {
    const u32 row = kFlat ? 0u : run / blocks;
    return BlockRow{row, run - row * blocks, blocks};
  };
  const auto scale_of = [&](BlockRow s) {
    return kOneScale ? whole_scale : tensor_scale_of<R, In>(a.tensor_amax, s.row, s.block, blocks);
  };
  for (u32 run = grid.block * kThreads + threadIdx.x; run < runs; run += grid.blocks * kThreads) {
    const BlockRow position = block_row_of(run);
    const TensorScale t = scale_of(position);
    Run<In, R::kBlock> x = load_row<R, In, kAligned>(a, static_cast<i64>(run) * R::kBlock);
    if constexpr (!kHasTwoFormats<R>) {
      const Choice c = choose_scale<R, In>(x, t, table, tile, 0);
      if (c.chosen) {
        store_row<R, In, kAligned>(a, position, x, c, t);
        continue;
      }
    }
    quantize_any_four_over_six<R, In, kAligned>(a, position, true, x, t, tile, 0, 0);
  }
}

// Quantize the part of a.x that this thread block of `grid` takes, and store codes and scales or, if R::kFake, only
// values. `grid` is whole_grid() for one matrix; for a tensor in a group, it names one piece of the tensor. All threads
// of the thread block must call this function.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_tile(const QuantizeArguments& a, Grid grid) {
  __shared__ TileMemory<R> tile;
  constexpr bool kTable = R::kFourOverSix && has_one_scale<R>() && !kHasTwoFormats<R>;
  __shared__ ApproximateScale table[kTable ? kTableSize : 1];
  if constexpr (kTable) fill_scale_table<R, In>(a, table);
  if constexpr (R::kBlockRows == 1) {
    quantize_rows<R, In, kAligned>(a, grid, kTable ? table : nullptr, tile);
  } else {
    quantize_tiles<R, In, kAligned>(a, grid, kTable ? table : nullptr, tile);
  }
}
