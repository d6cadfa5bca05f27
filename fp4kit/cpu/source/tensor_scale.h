// Functions that compute the amaxes (largest magnitudes) of matrices and of their blocks, and the tensor scales of a
// call.
//   tensor scale  a struct of an encode scale, a decode scale and the tensor amax. A call has one, or one per row if
//                 its tensor_step is 1
//   tensor rule   an entry of kTensorRules, which computes the tensor scale from the tensor amax
//   given amax    an amax that comes with the call, so that it is not computed from the elements
//   In            the type of the elements
#pragma once

#include <atomic>
#include <memory>

#include "encode_matrix.h"

#define FP4KIT_EXPORT __attribute__((visibility("default")))

extern "C" {

// The arguments of a call that computes amaxes. cpu/library.py mirrors this struct.
//   x                        the matrix
//   out                      output: the block amaxes (rows / block_rows rounded up, columns / block), in rows that are
//                            out_step apart; nullptr if they are not wanted. If given, columns must be whole blocks
//   tile_rows, tile_columns  rows and columns of a tile
//   input                    type of the elements, as an InputKind
//   block, block_rows        columns and rows of a block; read only if `out` is given
//   threads                  largest number of threads to use
struct AmaxCall {
  Source x;
  float* out;
  i64 out_step, tile_rows, tile_columns;
  i32 input, block, block_rows, threads;
};

// Return the bits of the amax of a matrix, in the type of the elements. Return 0 if there are no elements. If call->out
// is not nullptr, also store the block amaxes there, as float32. NaN counts as larger than infinity, so the result is
// the bits of a NaN if any element is NaN. The stored block amaxes are valid only if all elements are finite.
FP4KIT_EXPORT u32 fp4kit_amax(const AmaxCall* call) {
  std::atomic<u32> largest{0};
  for_each_tile(*call, [&](auto in, const Rectangle& tile, i64) {
    using In = decltype(in);
    using Bits = typename Input<In>::Bits;
    const View<Bits> x = view<In>(call->x, tile);
    u32 of_tile = 0;
    if (!call->out)
      of_tile = amax_bits<In>(x, tile.rows, tile.columns);
    else
      for_each_panel(tile, call->block, call->block_rows, [&](Rectangle panel) {
        u32 bits[kMaxPanelBlocks];
        const i64 blocks = panel.columns / call->block;
        float* out = call->out + (tile.row + panel.row) / call->block_rows * call->out_step +
                     (tile.column + panel.column) / call->block;
        block_amax_bits<In>(View<Bits>{x.data + panel.row * x.step + panel.column, x.step}, panel.rows, blocks,
                            call->block, bits);
        for (i64 b = 0; b < blocks; ++b) of_tile = bits[b] > of_tile ? bits[b] : of_tile;
        for (i64 b = 0; b < blocks; ++b) out[b] = Input<In>::value(static_cast<Bits>(bits[b]));
        return true;
      });
    u32 seen = largest.load(std::memory_order_relaxed);
    while (of_tile > seen && !largest.compare_exchange_weak(seen, of_tile)) {
    }
  });
  return largest;
}

}  // extern "C"

namespace {

// The tensor scales that a call computes: one, or one per row if tensor_step is 1. All numbers are 1 until `put`
// replaces them. block_amax holds the block amaxes of the matrix, or nullptr if they were not kept.
struct FoundScales {
  std::vector<float> encode, decode, amax;
  std::unique_ptr<float[]> block_amax;
  explicit FoundScales(const EncodeCall& call)
      : encode(call.tensor_step ? call.x.rows : 1, 1.0f), decode(encode), amax(encode) {}

  // Set the pointers encode, decode and amax of a call to these tensor scales, which must outlive the call.
  void point(EncodeCall& call) const {
    call.encode = encode.data();
    call.decode = decode.data();
    call.amax = amax.data();
  }

  // Return the kept block amaxes in the form that the Encoder takes; its `data` is nullptr if none were kept.
  KnownAmaxes known(const EncodeCall& call) const { return {block_amax.get(), call.x.columns / call.block}; }

  // Store the tensor scale t at index i: 0 for the tensor scale of the matrix, or the index of its row.
  void put(i64 i, TensorScale t) {
    encode[i] = t.encode;
    decode[i] = t.decode;
    amax[i] = t.amax;
  }
};

// For every row, compute the amax, and from it the tensor scale by the tensor rule with the index tensor_rule. Store
// the tensor scales in `found`. Return true if all elements are finite. Return false if any element is NaN or infinite;
// the scales of such rows are then not meaningful.
template <class In>
bool find_row_scales(const EncodeCall& call, i32 tensor_rule, FoundScales& found) {
  using Bits = typename Input<In>::Bits;
  const Tiles tiles{call.x.rows, call.x.columns, call.tile_rows, call.x.columns};
  std::atomic<bool> is_finite{true};
  auto work = [&](i64 index) {
    const Rectangle tile = tiles.tile(index);
    const View<Bits> x = view<In>(call.x, tile);
    for (i64 i = 0; i < tile.rows; ++i) {
      const Bits bits = amax_bits<In>(View<Bits>{x.data + i * x.step, x.step}, 1, tile.columns);
      if (bits >= Input<In>::kInfinity) is_finite = false;
      found.put(tile.row + i, kTensorRules[tensor_rule].scale[call.input](Input<In>::value(bits)));
    }
  };
  run_tiles(tiles.count(), call.threads, work);
  return is_finite;
}

// Compute the tensor scales from the given tensor amaxes, by the tensor rule with the index tensor_rule, and store them
// in `found`. `given` holds one amax per tensor scale. Return true on success. Return false at the first amax that is
// NaN, infinite, negative or -0; this scale and the following ones are then not stored.
bool scales_of_given(const EncodeCall& call, i32 tensor_rule, const float* given, FoundScales& found) {
  for (size_t i = 0; i < found.amax.size(); ++i) {
    if (bits_of(given[i]) >= kInfinityBits) return false;
    found.put(static_cast<i64>(i), kTensorRules[tensor_rule].scale[call.input](given[i]));
  }
  return true;
}

// Compute the tensor scales of a call, by the tensor rule with the index tensor_rule, and store them in `found`. If
// tensor_rule is -1, store nothing and return true. The scales are computed from the given tensor amaxes or, if `given`
// is nullptr, from the elements. Return false if an amax needs the fallback: if a given amax is NaN, infinite, negative
// or -0, or if `given` is nullptr and an element is NaN or infinite. Otherwise return true.
//
// The block amaxes are kept for the encoder if all of this holds:
//   - This function computes them: there is a block rule, and one tensor scale, which is computed from the elements.
//   - The matrix consists of whole blocks, and has at most 2^22 elements.
//   - One thread does all work, or blocks have several rows.
// Otherwise the encoder computes them again, because loading many of them from the cache of another core takes longer.
bool find_tensor_scales(const EncodeCall& call, i32 tensor_rule, const float* given, FoundScales& found) {
  constexpr i64 kMaxElements = 1 << 22;
  if (tensor_rule < 0) return true;
  if (given) return scales_of_given(call, tensor_rule, given, found);
  return with_input_type(call.input, [&](auto in) {
    using In = decltype(in);
    if (call.tensor_step) return find_row_scales<In>(call, tensor_rule, found);
    Source x = call.x;
    i64 tile_rows = call.tile_rows, tile_columns = call.tile_columns;
    const i64 blocks = call.x.columns / call.block, block_rows = call.x.rows / call.block_rows;
    const bool is_whole = blocks * call.block == call.x.columns && block_rows * call.block_rows == call.x.rows;
    if (call.block_rule >= 0 && (call.threads == 1 || call.block_rows > 1) && is_whole &&
        call.x.rows * call.x.columns <= kMaxElements) {
      found.block_amax.reset(new float[block_rows * blocks]);
    } else {
      // The order of elements does not matter here, unless rows are transformed. So, if columns are contiguous instead
      // of rows, read columns as rows, and use long tiles.
      if (x.column_step != 1 && x.row_step == 1 && !x.hadamard) x = {x.data, x.columns, x.rows, x.column_step, 1, 0};
      if (x.column_step == 1)
        tile_columns = minimum(x.columns, call.tile_rows * call.tile_columns),
        tile_rows = maximum<i64>(call.tile_rows * call.tile_columns / tile_columns, 1);
    }
    const AmaxCall find{x,          found.block_amax.get(), blocks,      tile_rows, tile_columns, call.input,
                        call.block, call.block_rows,        call.threads};
    const u32 bits = fp4kit_amax(&find);
    if (bits >= Input<In>::kInfinity) return false;
    found.put(
        0, kTensorRules[tensor_rule].scale[call.input](Input<In>::value(static_cast<typename Input<In>::Bits>(bits))));
    return true;
  });
}

}  // namespace
