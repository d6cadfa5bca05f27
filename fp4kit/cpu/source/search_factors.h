// Block amaxes of recipes that choose among multiples of each, by the squared error of what they make:
// reference/search_factors.py, row by row.
//
// Under each factor the blocks whose scale is new are brought together, encoded, decoded and measured side by side. A
// scale is that of the factor before, or of the first, or it is new: factors after the first rise.
#pragma once

#include "../../cuda/kernels/rules/summation_order.cuh"
#include "decode_matrix.h"

// A search. factors: of the candidates; by_code: blocks of one scale have one error; encode, decode, amax: the tensor
// scale, one, or (tensor_step 1) one a row; out: an amax a block; unusual: of each unit, whether it has to be done
// otherwise.
struct MultiplesCall {
  Source x;
  const float *encode, *decode, *amax, *factors;
  i64 tensor_step, count;
  float* out;
  i64 out_step;
  u8* unusual;
  i64 height, width;
  i32 input, rule, element, decoder, block, by_code, threads;
};

namespace {

// Squared errors of `count` blocks of kBlock elements, and of their values.
template <class In, int kBlock>
void put_errors(const typename Input<In>::Bits* x, const float* values, i64 count, float* errors) {
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

template <class In>
struct Multiples {
  using Bits = typename Input<In>::Bits;
  const MultiplesCall& call;
  const Tables* tables;
  const ElementEntry& element = kElements[call.element];
  const DecodeEntry& decoder = kDecodes[call.decoder];

  TensorScale tensor(i64 row) const {
    const i64 at = row * call.tensor_step;
    return {call.encode[at], call.decode[at], call.amax[at]};
  }

  // Blocks of a row that are tried under a factor: which, their elements, scales and factors.
  struct Tried {
    i64 which[kMostBlocks], count;
    Bits x[kWidth];
    u8 scales[kMostBlocks];
    float factors[kMostBlocks], errors[kMostBlocks];
  };

  bool measure(Tried& tried, i64 row) const {
    float factors[kMostBlocks], values[kWidth];
    u8 codes[kWidth];
    const i64 count = tried.count * call.block;
    for (i64 i = 0; i < tried.count; ++i) {
      float& by = tried.factors[i];
      if (!is_usable(by, element.by_zero) || element.wraps) return false;  // codes that wrap are for the specification
      if (element.flushes) by = flush(by);
    }
    for (i64 i = 0; i < count / kRun; ++i) factors[i] = tried.factors[i * kRun / call.block];
    element.encodes[0][call.input](tried.x, {factors, nullptr}, tensor(row).encode, count, nullptr, codes);
    const TensorScales tensors{call.encode, call.decode, call.amax, call.tensor_step, 0};
    if (!decoder.rows[kFloat32](codes, tried.scales, count, call.block, tables, tensors, row, 0, values)) return false;
    (call.block == 16 ? put_errors<In, 16> : put_errors<In, 32>)(tried.x, values, tried.count, tried.errors);
    return true;
  }

  // The amaxes of a row's blocks; false where it is not for these loops.
  bool choose(const Bits* x, i64 row, i64 blocks, float* out) const {
    u32 most[kMostBlocks], all = 0;
    u8 first[kMostBlocks], last[kMostBlocks], codes[kMostBlocks];
    float amax[kMostBlocks], candidates[kMostBlocks], by_block[kMostBlocks], least[kMostBlocks];
    block_magnitudes<In>(View<Bits>{x, 0}, 1, blocks, call.block, most);
    for (i64 b = 0; b < blocks; ++b) all = maximum(all, most[b]);
    if (all >= Input<In>::kInfinity || (element.then && !is_usable(tensor(row).encode, true))) return false;
    for (i64 b = 0; b < blocks; ++b) amax[b] = Input<In>::value(static_cast<Bits>(most[b]));
    Tried tried;
    for (i64 k = 0; k < call.count; ++k) {
      for (i64 b = 0; b < blocks; ++b) candidates[b] = amax[b] * call.factors[k];
      kRules[call.rule].scales[call.input](candidates, blocks, tensor(row), codes, by_block);
      tried.count = 0;
      for (i64 b = 0; b < blocks; ++b) {
        if (k && call.by_code && (codes[b] == first[b] || codes[b] == last[b])) continue;
        std::memcpy(tried.x + tried.count * call.block, x + b * call.block, call.block * sizeof(Bits));
        tried.scales[tried.count] = last[b] = codes[b];
        tried.factors[tried.count] = by_block[b];
        tried.which[tried.count++] = b;
      }
      if (!measure(tried, row)) return false;
      for (i64 i = 0; i < tried.count; ++i) {
        const i64 b = tried.which[i];
        if (k && !(tried.errors[i] < least[b])) continue;
        out[b] = candidates[b];
        least[b] = tried.errors[i];
      }
      if (!k) std::memcpy(first, codes, blocks);
    }
    return true;
  }

  bool unit(const Part& part) const {
    const View<Bits> x = view<In>(call.x, part);
    return each_panel(part, call.block, 1, [&](Part of) {
      float* out = call.out + (part.row + of.row) * call.out_step + (part.column + of.column) / call.block;
      return choose(x.data + of.row * x.step + of.column, part.row + of.row, of.columns / call.block, out);
    });
  }
};

}  // namespace
