// Factor search (for auto-round): for each block, find the multiple of its amax that gives the smallest squared error,
// row by row.
//   factor          in this file, the number by which an amax is multiplied
//   element factor  the number by which elements are multiplied or divided before they are rounded
//   trial           the blocks of a row whose error is measured under one factor; they are gathered, encoded, decoded
//                   and measured together
//   In              the type of the elements
//   fallback        the specification, which computes the tiles that these loops cannot
//
// If factors_by_code, a block takes part in a trial only if its scale code was not tried before; otherwise all blocks
// do. Factors rise, starting at the second one. So a code that was tried before is the code of the previous trial or of
// the first trial. The results are those of reference/search.py.
#pragma once

#include "../../cuda/kernels/rules/summation_order.cuh"
#include "decode_matrix.h"

// The arguments of a factor search. cpu/library.py mirrors this struct.
//   x                             the matrix
//   encode, decode, amax          the tensor scale, or one tensor scale per row if tensor_step is 1
//   factors, count                the factors with which amaxes are multiplied, and their number
//   out                           output: one amax per block, rows out_step apart
//   needs_fallback                output, one byte per tile: 1 if the specification has to compute the tile
//   tile_rows, tile_columns       rows and columns of a tile
//   input                         type of the elements, as an InputKind
//   block_rule, element, decoder  indices in kBlockRules, kElements and kDecoders
//   block                         columns of a block: 16 or 32
//   factors_by_code               1 if the error of a block depends on a factor only through the scale code, so that
//                                 a scale code is measured only once
//   threads                       largest number of threads to use
struct SearchFactorsCall {
  Source x;
  const float *encode, *decode, *amax, *factors;
  i64 tensor_step, count;
  float* out;
  i64 out_step;
  u8* needs_fallback;
  i64 tile_rows, tile_columns;
  i32 input, block_rule, element, decoder, block, factors_by_code, threads;
};

namespace {

// Store the squared error of each of `count` neighboring blocks in `errors`: the sum of (values[i] - x[i])^2 over the
// kBlock elements of the block, added in the order of summation_order.cuh. x holds the bits of the elements, of type
// In, and `values` the float32 values to which their codes decode.
template <class In, int kBlock>
void find_errors(const typename Input<In>::Bits* x, const float* values, i64 count, float* errors) {
  for (i64 b = 0; b < count; ++b) {
    LaneSums<kBlock> sums;
    FP4KIT_UNROLL
    for (int v = 0; v < kBlock / 8; ++v) {
      float squares[8];
      for (int j = 0; j < 8; ++j) {
        const i64 i = b * kBlock + v * 8 + j;
        const float difference = values[i] - Input<In>::value(x[i]);
        squares[j] = difference * difference;
      }
      sums.add(v, squares);
    }
    errors[b] = sums.result();
  }
}

// Search of the tiles of a call whose elements have type In. `tables` holds the value tables of the decoder, or is
// nullptr if values are computed without tables. Member functions that return bool return true on success, and false if
// the elements need the fallback.
template <class In>
struct FactorSearch {
  using Bits = typename Input<In>::Bits;
  const SearchFactorsCall& call;
  const DecodeTables* tables;
  const ElementEntry& element = kElements[call.element];
  const DecoderEntry& decoder = kDecoders[call.decoder];

  // Return the tensor scale of row `row` of the matrix. All rows share one tensor scale if tensor_step is 0.
  TensorScale tensor(i64 row) const {
    const i64 at = row * call.tensor_step;
    return {call.encode[at], call.decode[at], call.amax[at]};
  }

  // The blocks of one trial: their indices in the row, elements, scale codes, element factors (by which elements are
  // multiplied or divided) and errors.
  struct Trial {
    i64 blocks[kMaxPanelBlocks], count;
    Bits x[kPanelColumns];
    u8 scales[kMaxPanelBlocks];
    float element_factors[kMaxPanelBlocks], errors[kMaxPanelBlocks];
  };

  // Encode, decode and measure the blocks of a trial, all from row `row` of the matrix, and store their errors in the
  // trial. If the recipe flushes, subnormal element factors of the trial become 0. Return false if the trial needs the
  // fallback, because an element factor is not usable, a value cannot be decoded, or codes wrap. Otherwise return true.
  bool measure(Trial& trial, i64 row) const {
    float run_factors[kMaxPanelBlocks], values[kPanelColumns];
    u8 codes[kPanelColumns];
    const i64 count = trial.count * call.block;
    for (i64 i = 0; i < trial.count; ++i) {
      float& factor = trial.element_factors[i];
      if (!is_usable(factor, element.allows_zero_factor) || element.wraps) return false;
      if (element.flushes) factor = flush(factor);
    }
    for (i64 i = 0; i < count / kRun; ++i) run_factors[i] = trial.element_factors[i * kRun / call.block];
    element.encodes[0][call.input](trial.x, {run_factors, nullptr}, tensor(row).encode, count, nullptr, codes);
    const TensorScales tensors{call.encode, call.decode, call.amax, call.tensor_step, 0};
    if (!decoder.rows[kFloat32](codes, trial.scales, count, call.block, tables, tensors, row, 0, values)) return false;
    (call.block == 16 ? find_errors<In, 16> : find_errors<In, 32>)(trial.x, values, trial.count, trial.errors);
    return true;
  }

  // For each of `blocks` neighboring blocks of row `row`, find the multiple of the block amax with the smallest error,
  // and store it in `out`. If several factors give the smallest error, the first one wins. `x` points to the first
  // element; the blocks have at most kPanelColumns elements together. Return true on success. Return false if the row
  // needs the fallback: if an element is NaN or infinite, if the tensor's encode scale is needed but not usable, or if
  // `measure` returns false for a trial. `out` is then not valid.
  bool search_row(const Bits* x, i64 row, i64 blocks, float* out) const {
    u32 bits[kMaxPanelBlocks], largest = 0;
    u8 first_codes[kMaxPanelBlocks], last_codes[kMaxPanelBlocks], codes[kMaxPanelBlocks];
    float amax[kMaxPanelBlocks], candidates[kMaxPanelBlocks], element_factors[kMaxPanelBlocks],
        smallest_errors[kMaxPanelBlocks];
    block_amax_bits<In>(View<Bits>{x, 0}, 1, blocks, call.block, bits);
    for (i64 b = 0; b < blocks; ++b) largest = maximum(largest, bits[b]);
    if (largest >= Input<In>::kInfinity || (element.then_encodes && !is_usable(tensor(row).encode, true))) return false;
    for (i64 b = 0; b < blocks; ++b) amax[b] = Input<In>::value(static_cast<Bits>(bits[b]));
    Trial trial;
    for (i64 k = 0; k < call.count; ++k) {
      for (i64 b = 0; b < blocks; ++b) candidates[b] = amax[b] * call.factors[k];
      kBlockRules[call.block_rule].scales[call.input](candidates, blocks, tensor(row), codes, element_factors);
      trial.count = 0;
      for (i64 b = 0; b < blocks; ++b) {
        if (k && call.factors_by_code && (codes[b] == first_codes[b] || codes[b] == last_codes[b])) continue;
        std::memcpy(trial.x + trial.count * call.block, x + b * call.block, call.block * sizeof(Bits));
        trial.scales[trial.count] = last_codes[b] = codes[b];
        trial.element_factors[trial.count] = element_factors[b];
        trial.blocks[trial.count++] = b;
      }
      if (!measure(trial, row)) return false;
      for (i64 i = 0; i < trial.count; ++i) {
        const i64 b = trial.blocks[i];
        if (k && !(trial.errors[i] < smallest_errors[b])) continue;
        out[b] = candidates[b];
        smallest_errors[b] = trial.errors[i];
      }
      if (!k) std::memcpy(first_codes, codes, blocks);
    }
    return true;
  }

  // Find the block amaxes of a tile with the smallest errors, and store them in call.out. Return true on success.
  // Return false if a row needs the fallback; the amaxes of the tile are then incomplete.
  bool search_tile(const Rectangle& tile) const {
    const View<Bits> x = view<In>(call.x, tile);
    return for_each_panel(tile, call.block, 1, [&](Rectangle panel) {
      float* out = call.out + (tile.row + panel.row) * call.out_step + (tile.column + panel.column) / call.block;
      return search_row(x.data + panel.row * x.step + panel.column, tile.row + panel.row, panel.columns / call.block,
                        out);
    });
  }
};

}  // namespace
