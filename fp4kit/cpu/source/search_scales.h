// Scale search: for each block of 16 columns, find the block amax whose E4M3 scale gives the smallest loss, tile by
// tile.
//   candidate      one of the E4M3 codes 1 ... kLastCandidate (126), with the block amax and the scale that belong to
//                  it
//   loss           a measure of the rounding errors of a block under a candidate, by the objective of the call
//   lane           one of kLanes = 16 blocks or candidates that a loop handles together
//   pruned search  excludes most candidates by bounds on their loss, for kLanes blocks together (rules/lane_search.cuh)
//   full search    tries all candidates of one block, kLanes together
//   In             the type of the elements
//   x              a view of a tile: contiguous rows of elements, which begin x.step elements apart
//
// The full search is used if the bounds do not apply, or if the pruned search did not prove its result for a block. If
// several candidates have the smallest loss, the first one wins. If no loss is below infinity, the first candidate of
// all wins. The results are those of reference/search.py.
#pragma once

#include "search_losses.h"
#include "dispatch.h"
#include "tiles.h"

// The arguments of a scale search. cpu/library.py mirrors this struct.
//   x                        the matrix
//   candidates               three arrays of 128 numbers, indexed by code
//   weights, hessian         one weight per column, and a 16 x 16 Hessian per 16 columns; nullptr if not given
//   out                      output: one amax per block, stored once per row of the block; rows are out_step apart
//   unproven                 output: incremented by the number of blocks that had a full search
//   tile_rows, tile_columns  rows and columns of a tile
//   lower, upper             candidates are the codes c + lower ... c + upper, clamped to 1 ... kLastCandidate, where c
//                            is the code of the block's own amax
//   power                    exponent of errors in a loss: 2, 1, infinity (the largest error counts) or another number
//   tensor_amax, block_rule  determine c; block_rule is -1 if all codes 1 ... kLastCandidate are candidates
//   input                    type of the elements, as an InputKind
//   block_rows               rows of a block
//   is_pruned                0 if every block shall have a full search; 1 for the pruned search where it is valid: for
//                            squared errors without a Hessian, blocks of one row, and scales in the proven range
//   threads                  largest number of threads to use
struct SearchScalesCall {
  Source x;
  CandidateArrays candidates;
  const float *weights, *hessian;
  float* out;
  i64 out_step;
  u64* unproven;
  i64 tile_rows, tile_columns, lower, upper;
  double power;
  float tensor_amax;
  i32 input, block_rule, block_rows, is_pruned, threads;
};

namespace {

// The position of a block in a tile. row: the first row of the block. block: its index among the blocks of its row of
// blocks. across: the number of blocks per row of blocks.
struct BlockPlace {
  i64 row, block, across;

  // Move on to the next block of the tile in row-major order, if blocks have one row. The end of the tile is not
  // checked.
  void next() {
    if (++block < across) return;
    block = 0;
    ++row;
  }
};

// Search of the tiles of a call whose elements have type In. is_pruned: true if blocks are searched by the pruned
// search first, because the call allows it and the bounds apply.
template <class In>
struct ScaleSearch {
  using Bits = typename Input<In>::Bits;
  const SearchScalesCall& call;
  const Objective objective = objective_of(call.power == 1.0, call.power > 0x1p1023, call.power != 2.0);
  const bool is_pruned = call.is_pruned && objective == Objective::squares && !call.hessian && call.block_rows == 1 &&
                         call.candidates.are_bounds_valid();

  // For each of kLanes blocks, store the codes of the first and of the last candidate in min_code and max_code. `amax`
  // holds the amaxes of the blocks. With a block rule, the candidates are the codes c + call.lower ... c + call.upper,
  // clamped to 1 ... kLastCandidate, where c is the code of the block's amax. Without a block rule, they are all codes
  // 1 ... kLastCandidate.
  void find_candidate_ranges(const float* amax, u32* min_code, u32* max_code) const {
    u8 codes[kLanes] = {};
    float factors[kLanes];
    if (call.block_rule >= 0)
      kBlockRules[call.block_rule].scales[kFloat32](amax, kLanes, {1.0f, 1.0f, call.tensor_amax}, codes, factors);
    const i32 lower = call.block_rule < 0 ? 1 : static_cast<i32>(call.lower),
              upper = call.block_rule < 0 ? 126 : static_cast<i32>(call.upper);
    const auto clamped = [](i32 code) { return static_cast<u32>(minimum<i32>(maximum<i32>(code, 1), kLastCandidate)); };
    for (int lane = 0; lane < kLanes; ++lane) {
      min_code[lane] = clamped(codes[lane] + lower);
      max_code[lane] = clamped(codes[lane] + upper);
    }
  }

  // Return a pointer to the weights of the 16 columns of the block at position `at` of a tile. The call must have
  // weights.
  const float* weights_at(const Rectangle& tile, const BlockPlace& at) const {
    return call.weights + tile.column + at.block * kSearchBlockSize;
  }

  // For one row of the block at position `at` of a tile, store in losses[c] the loss under each candidate c. `row`
  // holds the 16 elements. kObjective is `powers`, `magnitudes` or `largest`. Weights are used if the call has them.
  template <Objective kObjective>
  void find_row_power_losses(const float* row, const Rectangle& tile, const BlockPlace& at, float* losses) const {
    const CandidateArrays& all = call.candidates;
    const float* weights = call.weights ? weights_at(tile, at) : nullptr;
    const auto find = weights ? find_power_losses<kObjective, true> : find_power_losses<kObjective, false>;
    for (int code = 0; code < kCandidates; code += kLanes)
      find(row, weights, all.scales + code, all.reciprocals + code, call.power, losses + code);
  }

  // For one row of the block at position `at` of a tile, store in losses[c] the loss under each candidate c, for the
  // objective of the call. `row` holds the 16 elements. For squared errors, weights are used if the call has them, and
  // otherwise the Hessian if it has one. For other objectives, the Hessian is ignored.
  void find_row_losses(const float* row, const Rectangle& tile, const BlockPlace& at, float* losses) const {
    const CandidateArrays& all = call.candidates;
    if (objective == Objective::magnitudes) return find_row_power_losses<Objective::magnitudes>(row, tile, at, losses);
    if (objective == Objective::largest) return find_row_power_losses<Objective::largest>(row, tile, at, losses);
    if (objective == Objective::powers) return find_row_power_losses<Objective::powers>(row, tile, at, losses);
    if (call.weights) return find_squared_losses<true>(row, weights_at(tile, at), all, losses);
    if (!call.hessian) return find_squared_losses<false>(row, nullptr, all, losses);
    const float* hessian = call.hessian + (tile.column + at.block * kSearchBlockSize) * kSearchBlockSize;
    for (int code = 0; code < kCandidates; code += kLanes)
      find_hessian_losses(row, hessian, all.scales + code, all.reciprocals + code, losses + code);
  }

  // Full search of one block: return the code in min_code ... max_code with the smallest loss, or the first of several
  // such codes. Return min_code if no loss is below infinity. The block has `rows` rows and is at position `at` of the
  // tile.
  u32 search_fully(View<Bits> x, i64 rows, const Rectangle& tile, const BlockPlace& at, u32 min_code,
                   u32 max_code) const {
    float total[kCandidates], losses[kCandidates], row[kSearchBlockSize], smallest = float_of(kInfinityBits);
    for (i64 i = 0; i < rows; ++i) {
      load_row<In>(x.data + (at.row + i) * x.step + at.block * kSearchBlockSize, row);
      find_row_losses(row, tile, at, i ? losses : total);
      for (int code = 0; i && code < kCandidates; ++code)
        total[code] = objective == Objective::largest ? combined_loss<Objective::largest>(total[code], losses[code])
                                                      : total[code] + losses[code];
    }
    u32 found = min_code;
    for (u32 code = min_code; code <= max_code; ++code)
      if (total[code] < smallest) {
        smallest = total[code];
        found = code;
      }
    return found;
  }

  // Store in call.out the block amax of the candidate `code`, once for each of the `rows` rows of the block at position
  // `at` of a tile.
  void store_amax(const Rectangle& tile, const BlockPlace& at, i64 rows, u32 code) const {
    float* out = call.out + (tile.row + at.row) * call.out_step + tile.column / kSearchBlockSize + at.block;
    for (i64 i = 0; i < rows; ++i) out[i * call.out_step] = call.candidates.amaxes[code];
  }

  // Search min(count, kLanes) blocks of one row each, starting at position `at`, and store their amaxes in call.out.
  // Blocks for which the pruned search does not prove its result get a full search. Return the number of these blocks.
  // Afterwards, `at` is the position of the next block, or still that of the last block if no block is left.
  template <bool kWeighted>
  u64 search_lanes(View<Bits> x, const Rectangle& tile, BlockPlace& at, i64 count) const {
    LaneBlocks<kLanes, kWeighted> blocks;
    BlockPlace places[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      float row[kSearchBlockSize];
      places[lane] = at;
      load_row<In>(x.data + at.row * x.step + at.block * kSearchBlockSize, row);
      for (int j = 0; j < kSearchBlockSize; ++j) blocks.a[j][lane] = magnitude_of(row[j]);
      if constexpr (kWeighted)
        for (int j = 0; j < kSearchBlockSize; ++j) blocks.w[j][lane] = weights_at(tile, at)[j];
      if (lane + 1 < count) at.next();
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      u32 bits = 0;
      FP4KIT_UNROLL
      for (int j = 0; j < kSearchBlockSize; ++j) bits = maximum(bits, bits_of(blocks.a[j][lane]));
      blocks.amax[lane] = float_of(bits);
      // Blocks of zeros have no error under any candidate, and the errors of NaN and infinity are never finite. So both
      // keep their first candidate.
      blocks.is_open[lane] = lane < count && bits > 0u && bits < kInfinityBits;
    }
    find_candidate_ranges(blocks.amax, blocks.min_code, blocks.max_code);
    LaneSearch<kLanes, kWeighted, CandidateArrays> search{blocks, call.candidates};
    search.run();
    u64 unproven = 0;
    for (int lane = 0; lane < kLanes && lane < count; ++lane) {
      if (!search.is_proven[lane])
        search.code[lane] = search_fully(x, 1, tile, places[lane], blocks.min_code[lane], blocks.max_code[lane]);
      unproven += !search.is_proven[lane];
      store_amax(tile, places[lane], 1, search.code[lane]);
    }
    return unproven;
  }

  // Search the block at position `at` of a tile by a full search, and store its amax in call.out. The block has `rows`
  // rows.
  void search_block(View<Bits> x, const Rectangle& tile, const BlockPlace& at, i64 rows) const {
    float amax[kLanes] = {}, row[kSearchBlockSize];
    u32 min_code[kLanes], max_code[kLanes], bits = 0;
    for (i64 i = 0; i < rows; ++i) {
      load_row<In>(x.data + (at.row + i) * x.step + at.block * kSearchBlockSize, row);
      for (int j = 0; j < kSearchBlockSize; ++j) bits = maximum(bits, bits_of(magnitude_of(row[j])));
    }
    amax[0] = float_of(bits);
    find_candidate_ranges(amax, min_code, max_code);
    store_amax(tile, at, rows, search_fully(x, rows, tile, at, min_code[0], max_code[0]));
  }

  // Search all blocks of a tile, and store their amaxes in call.out. Return the number of blocks that had a full
  // search.
  u64 search_tile(const Rectangle& tile) const {
    const View<Bits> x = view<In>(call.x, tile);
    const i64 across = tile.columns / kSearchBlockSize,
              count = across * ((tile.rows + call.block_rows - 1) / call.block_rows);
    BlockPlace at{0, 0, across};
    u64 unproven = 0;
    if (is_pruned) {
      for (i64 done = 0; done < count; done += kLanes)
        unproven += call.weights ? search_lanes<true>(x, tile, at, count - done)
                                 : search_lanes<false>(x, tile, at, count - done);
      return unproven;
    }
    for (i64 row = 0; row < tile.rows; row += call.block_rows)
      for (i64 block = 0; block < across; ++block)
        search_block(x, tile, {row, block, across}, minimum<i64>(call.block_rows, tile.rows - row));
    return static_cast<u64>(count);
  }
};

}  // namespace
