// Amaxes of matrices and of their blocks, and the tensor scales that an encoding finds by them.
#pragma once

#include <atomic>
#include <memory>

#include "encode_matrix.h"

#define FP4KIT_EXPORT __attribute__((visibility("default")))

extern "C" {

// The amax of a matrix; out: those of its blocks, too, (rows / block_rows, columns / block), or nullptr.
struct AmaxCall {
  Source x;
  float* out;
  i64 out_step, height, width;
  i32 input, block, block_rows, threads;
};

// The largest magnitude of all, as an integer of the input's own width.
FP4KIT_EXPORT u32 fp4kit_amax(const AmaxCall* call) {
  const Units units{call->x.rows, call->x.columns, call->height, call->width};
  std::atomic<u32> all{0};
  by_input(call->input, [&](auto in) {
    using In = decltype(in);
    using Bits = typename Input<In>::Bits;
    auto work = [&](i64 unit) {
      const Part part = units.part(unit);
      const View<Bits> x = view<In>(call->x, part);
      u32 most = 0;
      if (!call->out)
        most = largest_of<In>(x, part.rows, part.columns);
      else
        each_panel(part, call->block, call->block_rows, [&](Part of) {
          u32 found[kMostBlocks];
          const i64 blocks = of.columns / call->block;
          float* out = call->out + (part.row + of.row) / call->block_rows * call->out_step +
                       (part.column + of.column) / call->block;
          block_magnitudes<In>(View<Bits>{x.data + of.row * x.step + of.column, x.step}, of.rows, blocks, call->block,
                               found);
          for (i64 b = 0; b < blocks; ++b) most = found[b] > most ? found[b] : most;
          for (i64 b = 0; b < blocks; ++b) out[b] = Input<In>::value(static_cast<Bits>(found[b]));
          return true;
        });
      u32 seen = all.load(std::memory_order_relaxed);
      while (most > seen && !all.compare_exchange_weak(seen, most)) {
      }
    };
    run_units(units.count(), call->threads, work);
  });
  return all;
}

}  // extern "C"

namespace {

// The tensor scales of a call: one, or (tensor_step 1) one a row; and the amaxes of its blocks, or none.
struct Found {
  std::vector<float> encode, decode, amax;
  std::unique_ptr<float[]> blocks;
  explicit Found(const EncodeCall& call)
      : encode(call.tensor_step ? call.x.rows : 1, 1.0f), decode(encode), amax(encode) {}
  void set(EncodeCall& call) const {
    call.encode = encode.data();
    call.decode = decode.data();
    call.amax = amax.data();
  }
  Known known(const EncodeCall& call) const { return {blocks.get(), call.x.columns / call.block}; }
  void put(i64 i, TensorScale t) {
    encode[i] = t.encode;
    decode[i] = t.decode;
    amax[i] = t.amax;
  }
};

// Those of rows, by the tensor rule `rule`; false where an element is not finite.
template <class In>
bool find_rows(const EncodeCall& call, i32 rule, Found& found) {
  using Bits = typename Input<In>::Bits;
  const Units units{call.x.rows, call.x.columns, call.height, call.x.columns};
  std::atomic<bool> finite{true};
  auto work = [&](i64 unit) {
    const Part part = units.part(unit);
    const View<Bits> x = view<In>(call.x, part);
    for (i64 i = 0; i < part.rows; ++i) {
      const Bits most = largest_of<In>(View<Bits>{x.data + i * x.step, x.step}, 1, part.columns);
      if (most >= Input<In>::kInfinity) finite = false;
      found.put(part.row + i, kTensors[rule].scale[call.input](Input<In>::value(most)));
    }
  };
  run_units(units.count(), call.threads, work);
  return finite;
}

// Those of amaxes that are given; false where one is infinite, NaN or negative.
bool set_tensors(const EncodeCall& call, i32 rule, const float* given, Found& found) {
  for (size_t i = 0; i < found.amax.size(); ++i) {
    if (bits_of(given[i]) >= kInfinityBits) return false;
    found.put(static_cast<i64>(i), kTensors[rule].scale[call.input](given[i]));
  }
  return true;
}

// The tensor scales by the tensor rule `rule` (-1: none) of given amaxes or (nullptr) of those that are found; false
// where an element, or a given one, is not finite. The amaxes of blocks are found, too, where they are few, or one
// thread reads them again from its cache: to have many of another core takes longer than to find them anew.
bool find_tensors(const EncodeCall& call, i32 rule, const float* given, Found& found) {
  constexpr i64 kMostElements = 1 << 22;
  if (rule < 0) return true;
  if (given) return set_tensors(call, rule, given, found);
  return by_input(call.input, [&](auto in) {
    using In = decltype(in);
    if (call.tensor_step) return find_rows<In>(call, rule, found);
    Source x = call.x;
    i64 height = call.height, width = call.width;
    const i64 blocks = call.x.columns / call.block, lines = call.x.rows / call.block_rows;
    const bool is_whole = blocks * call.block == call.x.columns && lines * call.block_rows == call.x.rows;
    if (call.rule >= 0 && (call.threads == 1 || call.block_rows > 1) && is_whole &&
        call.x.rows * call.x.columns <= kMostElements) {
      found.blocks.reset(new float[lines * blocks]);
    } else {  // elements are read as they lie
      if (x.column_step != 1 && x.row_step == 1) x = {x.data, x.columns, x.rows, x.column_step, 1, x.hadamard};
      if (x.column_step == 1)
        width = minimum(x.columns, call.height * call.width),
        height = maximum<i64>(call.height * call.width / width, 1);
    }
    const AmaxCall find{x,          found.blocks.get(), blocks,          height,      width,
                        call.input, call.block,         call.block_rows, call.threads};
    const u32 bits = fp4kit_amax(&find);
    if (bits >= Input<In>::kInfinity) return false;
    found.put(0, kTensors[rule].scale[call.input](Input<In>::value(static_cast<typename Input<In>::Bits>(bits))));
    return true;
  });
}

}  // namespace
