// Block amaxes whose scales have the least loss, unit by unit: by bounds where those hold (search_pruned.h), else of
// all candidates, sixteen side by side. The first of equals wins; where no loss is below infinity, the first of all.
#pragma once

#include "search_losses.h"
#include "dispatch.h"
#include "work_units.h"

// A search. candidates: 128 of each, by code. weights, hessian: of the columns, or nullptr. rule: of the code of a
// block's own amax under tensor_amax; lower, upper: codes beside it that are candidates; rule -1: all are. out: an amax
// a block, in each of its rows. unproven: how many blocks had all candidates tried; bounded 0: each of them has. power:
// of errors in a loss, 2, 1, infinity (the largest) or another.
struct SearchCall {
  Source x;
  Candidates candidates;
  const float *weights, *hessian;
  float* out;
  i64 out_step;
  u64* unproven;
  i64 height, width, lower, upper;
  double power;
  float tensor_amax;
  i32 input, rule, block_rows, bounded, threads;
};

namespace {

// A block of a unit: its row of blocks, and its place there.
struct Place {
  i64 row, block, across;
  void next() {
    if (++block < across) return;
    block = 0;
    ++row;
  }
};

template <class In>
struct Searcher {
  using Bits = typename Input<In>::Bits;
  const SearchCall& call;
  const Objective objective = objective_of(call.power == 1.0, call.power > 0x1p1023, call.power != 2.0);
  const bool bounded = call.bounded && objective == Objective::squares && !call.hessian && call.block_rows == 1 &&
                       call.candidates.ordinary();

  // The codes that sixteen blocks may have.
  void put_spans(const float* amax, u32* low, u32* high) const {
    u8 codes[kLanes] = {};
    float factors[kLanes];
    if (call.rule >= 0)
      kRules[call.rule].scales[kFloat32](amax, kLanes, {1.0f, 1.0f, call.tensor_amax}, codes, factors);
    const i32 lower = call.rule < 0 ? 1 : static_cast<i32>(call.lower),
              upper = call.rule < 0 ? 126 : static_cast<i32>(call.upper);
    const auto within = [](i32 code) { return static_cast<u32>(minimum<i32>(maximum<i32>(code, 1), kLastCandidate)); };
    for (int lane = 0; lane < kLanes; ++lane) {
      low[lane] = within(codes[lane] + lower);
      high[lane] = within(codes[lane] + upper);
    }
  }

  const float* weights_at(const Part& part, const Place& at) const {
    return call.weights + part.column + at.block * kSearchBlockSize;
  }

  template <Objective kObjective>
  void put_others_of(const float* row, const Part& part, const Place& at, float* losses) const {
    const Candidates& all = call.candidates;
    const float* weights = call.weights ? weights_at(part, at) : nullptr;
    const auto put = weights ? put_others<kObjective, true> : put_others<kObjective, false>;
    for (int code = 0; code < kCandidates; code += kLanes)
      put(row, weights, all.scales + code, all.reciprocals + code, call.power, losses + code);
  }

  void put_losses_of(const float* row, const Part& part, const Place& at, float* losses) const {
    const Candidates& all = call.candidates;
    if (objective == Objective::magnitudes) return put_others_of<Objective::magnitudes>(row, part, at, losses);
    if (objective == Objective::largest) return put_others_of<Objective::largest>(row, part, at, losses);
    if (objective == Objective::powers) return put_others_of<Objective::powers>(row, part, at, losses);
    if (call.weights) return put_squares<true>(row, weights_at(part, at), all, losses);
    if (!call.hessian) return put_squares<false>(row, nullptr, all, losses);
    const float* hessian = call.hessian + (part.column + at.block * kSearchBlockSize) * kSearchBlockSize;
    for (int code = 0; code < kCandidates; code += kLanes)
      put_quadratic(row, hessian, all.scales + code, all.reciprocals + code, losses + code);
  }

  // The first code of least loss of all in low ... high, of rows that share theirs.
  u32 search_fully(View<Bits> x, i64 rows, const Part& part, const Place& at, u32 low, u32 high) const {
    float total[kCandidates], losses[kCandidates], row[kSearchBlockSize], best = float_of(kInfinityBits);
    for (i64 i = 0; i < rows; ++i) {
      put_row<In>(x.data + (at.row + i) * x.step + at.block * kSearchBlockSize, row);
      put_losses_of(row, part, at, i ? losses : total);
      for (int code = 0; i && code < kCandidates; ++code)
        total[code] = objective == Objective::largest ? combined_loss<Objective::largest>(total[code], losses[code])
                                                      : total[code] + losses[code];
    }
    u32 found = low;
    for (u32 code = low; code <= high; ++code)
      if (total[code] < best) {
        best = total[code];
        found = code;
      }
    return found;
  }

  void put(const Part& part, const Place& at, i64 rows, u32 code) const {
    float* out = call.out + (part.row + at.row) * call.out_step + part.column / kSearchBlockSize + at.block;
    for (i64 i = 0; i < rows; ++i) out[i * call.out_step] = call.candidates.amaxes[code];
  }

  // `count` blocks from `at` on, at most sixteen; how many of them were searched fully.
  template <bool kWeighted>
  u64 sixteen(View<Bits> x, const Part& part, Place& at, i64 count) const {
    Sixteen<kWeighted> blocks;
    Place places[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      float row[kSearchBlockSize];
      places[lane] = at;
      put_row<In>(x.data + at.row * x.step + at.block * kSearchBlockSize, row);
      for (int j = 0; j < kSearchBlockSize; ++j) blocks.a[j][lane] = magnitude_of(row[j]);
      if constexpr (kWeighted)
        for (int j = 0; j < kSearchBlockSize; ++j) blocks.w[j][lane] = weights_at(part, at)[j];
      if (lane + 1 < count) at.next();
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      u32 most = 0;
      FP4KIT_UNROLL
      for (int j = 0; j < kSearchBlockSize; ++j) most = maximum(most, bits_of(blocks.a[j][lane]));
      blocks.amax[lane] = float_of(most);
      blocks.open[lane] =
          lane < count && most > 0u && most < kInfinityBits;  // others have no errors, or none but those
    }
    put_spans(blocks.amax, blocks.low, blocks.high);
    Near<kWeighted> near{blocks, call.candidates};
    near.run();
    u64 unproven = 0;
    for (int lane = 0; lane < kLanes && lane < count; ++lane) {
      if (!near.proven[lane])
        near.code[lane] = search_fully(x, 1, part, places[lane], blocks.low[lane], blocks.high[lane]);
      unproven += !near.proven[lane];
      put(part, places[lane], 1, near.code[lane]);
    }
    return unproven;
  }

  // One block whose candidates are all tried.
  void one(View<Bits> x, const Part& part, const Place& at, i64 rows) const {
    float amax[kLanes] = {}, row[kSearchBlockSize];
    u32 low[kLanes], high[kLanes], most = 0;
    for (i64 i = 0; i < rows; ++i) {
      put_row<In>(x.data + (at.row + i) * x.step + at.block * kSearchBlockSize, row);
      for (int j = 0; j < kSearchBlockSize; ++j) most = maximum(most, bits_of(magnitude_of(row[j])));
    }
    amax[0] = float_of(most);
    put_spans(amax, low, high);
    put(part, at, rows, search_fully(x, rows, part, at, low[0], high[0]));
  }

  // How many blocks of a unit were searched fully.
  u64 unit(const Part& part) const {
    const View<Bits> x = view<In>(call.x, part);
    const i64 across = part.columns / kSearchBlockSize,
              count = across * ((part.rows + call.block_rows - 1) / call.block_rows);
    Place at{0, 0, across};
    u64 unproven = 0;
    if (bounded) {
      for (i64 done = 0; done < count; done += kLanes)
        unproven += call.weights ? sixteen<true>(x, part, at, count - done) : sixteen<false>(x, part, at, count - done);
      return unproven;
    }
    for (i64 row = 0; row < part.rows; row += call.block_rows)
      for (i64 block = 0; block < across; ++block)
        one(x, part, {row, block, across}, minimum<i64>(call.block_rows, part.rows - row));
    return static_cast<u64>(count);
  }
};

}  // namespace
