// The functions that Python calls (native.py has their arguments): each does a whole matrix, by units of some rows and columns.
#pragma once

#include <atomic>
#include <type_traits>
#include <vector>

#include "decode.h"
#include "encode.h"
#include "pool.h"

#include "recipes.inc"

namespace {

enum InputKind { kFloat32, kFloat16, kBfloat16, kInputs };

template <class F>
auto by_input(int kind, F f) {
  if (kind == kFloat32) return f(Float32{});
  return kind == kFloat16 ? f(Float16{}) : f(Bfloat16{});
}

// A thread's own memory for a unit.
template <class T>
T* scratch(size_t count) {
  thread_local std::vector<T> memory;
  if (memory.size() < count) memory.resize(count);
  return memory.data();
}

// Rows and columns of a unit.
struct Part {
  i64 row, rows, column, columns;
};

struct Units {
  i64 rows, columns, height, width;
  i64 across() const { return (columns + width - 1) / width; }
  i64 count() const { return across() * ((rows + height - 1) / height); }
  Part part(i64 unit) const {
    const i64 row = unit / across() * height, column = unit % across() * width;
    return {row, minimum(height, rows - row), column, minimum(width, columns - column)};
  }
};

template <class Work>
void run_units(i64 units, int threads, Work& work) {
  for_units(units, threads, [](void* context, int64_t unit) { (*static_cast<Work*>(context))(unit); }, &work);
}

// The elements of a part, in contiguous rows.
template <class Bits>
struct View {
  const Bits* data;
  i64 step;
};

template <class In, class Bits = typename Input<In>::Bits>
View<Bits> view(const Source& x, const Part& part) {
  if (x.column_step == 1 && x.hadamard < 0)
    return {static_cast<const Bits*>(x.data) + part.row * x.row_step + part.column, x.row_step};
  Bits* copy = scratch<Bits>(part.rows * part.columns);
  gather<Bits>(x, part.row, part.rows, part.column, part.columns, part.columns, copy);
  if (x.hadamard >= 0)
    for (i64 i = 0; i < part.rows * part.columns; i += 16) hadamard_block<In>(copy + i, static_cast<u32>(x.hadamard));
  return {copy, part.columns};
}

// Magnitudes of the blocks of some rows that share theirs, as integers; grain: 16 or 32 elements, which divide a block.
template <class In, class Bits>
void block_magnitudes(View<Bits> x, i64 rows, i64 blocks, i64 block, u32* out) {
  const i64 grain = block == 16 ? 16 : 32, per_block = block / grain, grains = blocks * per_block;
  const auto measure = grain == 16 ? magnitudes<In, 16> : magnitudes<In, 32>;
  u32 most[kMostBlocks], row[kMostBlocks];
  measure(x.data, grains, most);
  for (i64 i = 1; i < rows; ++i) {
    measure(x.data + i * x.step, grains, row);
    for (i64 g = 0; g < grains; ++g) most[g] = row[g] > most[g] ? row[g] : most[g];
  }
  for (i64 b = 0; b < blocks; ++b) {
    u32 largest = most[b * per_block];
    for (i64 g = 1; g < per_block; ++g) largest = maximum(largest, most[b * per_block + g]);
    out[b] = largest;
  }
}

// The largest magnitude of some rows, as an integer.
template <class In, class Bits>
Bits largest_of(View<Bits> x, i64 rows, i64 columns) {
  Bits most = 0;
  for (i64 i = 0; i < rows; ++i)
    for (i64 j = 0; j < columns; ++j) {
      const Bits a = x.data[i * x.step + j] & Input<In>::kMagnitude;
      most = a > most ? a : most;
    }
  return most;
}

}  // namespace

// A call that gives codes. encode, decode, amax: the tensor scale, one, or (tensor_step 1) one a row. rule -1: there are no block
// scales; block_amax, factors: given instead of found, a row of them every block_step, or nullptr. random: a byte an element.
struct EncodeCall {
  Source x;
  const float *encode, *decode, *amax;
  i64 tensor_step;
  const float *block_amax, *factors;
  i64 block_step;
  const u8* random;  // a byte an element, or nullptr
  i64 random_step;
  const u64* seed;  // of the stream that they come from otherwise, or nullptr
  i64 first, stride;  // the place of element (0, 0) in the stream, and of a row from the next
  u8 *packed, *scales;
  i64 packed_step, scales_step;
  u8* unusual;  // of each unit, whether it has to be done otherwise
  i64 height, width;
  i32 input, rule, element, block, block_rows, threads;
};

namespace {

using Scales = void (*)(const float*, i64, TensorScale, u8*, float*);
using Encode = void (*)(const void*, const float*, i64, const u8*, u8*);

template <class R>
constexpr Scales kScalesOf[kInputs] = {scale_blocks<R, Float32>, scale_blocks<R, Float16>, scale_blocks<R, Bfloat16>};
template <class E>
constexpr Encode kEncodes[2][kInputs] = {
    {encode_elements<E, Float32, false>, encode_elements<E, Float16, false>, encode_elements<E, Bfloat16, false>},
    {encode_elements<E, Float32, true>, encode_elements<E, Float16, true>, encode_elements<E, Bfloat16, true>}};

template <class R, class In>
TensorScale tensor_scale(float amax) { return R::TensorRule::template scale<R, In>(amax); }
using Tensor = TensorScale (*)(float);
template <class R>
constexpr Tensor kTensorOf[kInputs] = {tensor_scale<R, Float32>, tensor_scale<R, Float16>, tensor_scale<R, Bfloat16>};

struct RuleEntry { const char* key; const Scales* scales; };
struct TensorEntry { const char* key; const Tensor* scale; };
struct ElementEntry { const char* key; const Encode (*encodes)[kInputs]; bool divides, flushes, four; };
const RuleEntry kRules[] = {
#define FP4KIT_RULE(key, R) {key, kScalesOf<R>},
FP4KIT_RULES
};
const TensorEntry kTensors[] = {
#define FP4KIT_TENSOR(key, R) {key, kTensorOf<R>},
FP4KIT_TENSORS
};
const ElementEntry kElements[] = {
#define FP4KIT_ELEMENT(key, E) {key, kEncodes<E>, E::kDivide, E::kFlush, E::Format::kStoredBits == 4},
FP4KIT_ELEMENTS
};

// Random bytes of `count` elements of the stream from element `start` on; out has room for 31 more.
const u8* stream_bytes(u64 seed, i64 start, i64 count, u8* out) {
  const i64 first = start / 16, last = (start + count + 15) / 16;
  for (i64 counter = first; counter < last; ++counter) {
    const Words words = stream_words(seed, static_cast<u64>(counter));
    std::memcpy(out + (counter - first) * 16, words.w, 16);
  }
  return out + (start - first * 16);
}

// One unit of a call of one kind of input.
template <class In>
struct Encoder {
  using Bits = typename Input<In>::Bits;
  const EncodeCall& call;
  const ElementEntry& element = kElements[call.element];
  const Encode encode = element.encodes[call.random || call.seed][call.input];

  TensorScale tensor(i64 row) const {
    const i64 at = row * call.tensor_step;
    return {call.encode[at], call.decode[at], call.amax[at]};
  }

  // amaxes of the blocks of rows that share theirs, false where an element is not finite.
  bool find_amax(View<Bits> x, i64 rows, i64 blocks, float* amax) const {
    u32 most[kMostBlocks], all = 0;
    block_magnitudes<In>(x, rows, blocks, call.block, most);
    for (i64 b = 0; b < blocks; ++b) all = most[b] > all ? most[b] : all;
    for (i64 b = 0; b < blocks; ++b) amax[b] = Input<In>::value(static_cast<Bits>(most[b]));
    return all < Input<In>::kInfinity;
  }

  // A factor for each element of blocks, false where one is of no use.
  bool spread(const float* by_block, i64 count, float* factors) const {
    u32 bad = 0;
    for (i64 b = 0; b < count; ++b) bad |= static_cast<u32>(!is_finite(by_block[b])) | static_cast<u32>(element.divides & (by_block[b] == 0.0f));
    for (i64 b = 0; b < count; ++b) {
      const float factor = element.flushes ? flush(by_block[b]) : by_block[b];
      for (i64 i = 0; i < call.block; ++i) factors[b * call.block + i] = factor;
    }
    return bad == 0;
  }

  // Codes of a row, packed as they are stored.
  void put_codes(const Bits* x, const Part& part, i64 row, const float* factors) const {
    u8 codes[kWidth], stream[kWidth + 32];
    const u8* random = call.random ? call.random + row * call.random_step + part.column : nullptr;
    if (call.seed) random = stream_bytes(*call.seed, call.first + row * call.stride + part.column, part.columns, stream);
    u8* out = call.packed + row * call.packed_step + (element.four ? part.column / 2 : part.column);
    encode(x, factors, part.columns, random, element.four ? codes : out);
    if (element.four) pack_codes(codes, part.columns, out);
  }

  // The factors of elements whose blocks have no scales: those that are given, or the tensor's.
  void put_factors(const Part& part, i64 given, i64 count, float* factors) const {
    const TensorScale t = tensor(part.row);
    const float own = element.divides ? t.decode : t.encode;
    for (i64 b = 0; b < count; ++b) factors[b] = call.factors ? call.factors[given + b] : own;
  }

  // Rows of one row of blocks; false where that is not for these loops.
  bool panel(View<Bits> x, const Part& part) const {
    float amax[kMostBlocks], by_block[kMostBlocks], factors[kWidth];
    u8 codes[kMostBlocks];
    const i64 count = (part.columns + call.block - 1) / call.block, first = part.column / call.block;
    const i64 given = part.row / call.block_rows * call.block_step + first;
    if (call.rule < 0) {
      if (largest_of<In>(x, part.rows, part.columns) >= Input<In>::kInfinity) return false;
      put_factors(part, given, count, by_block);
    } else {
      if (!find_amax(x, part.rows, count, amax)) return false;
      if (call.block_amax) std::memcpy(amax, call.block_amax + given, count * sizeof(float));
      kRules[call.rule].scales[call.input](amax, count, tensor(part.row), codes, by_block);
      if (call.scales)
        for (i64 i = 0; i < part.rows; ++i) std::memcpy(call.scales + (part.row + i) * call.scales_step + first, codes, count);
    }
    if (!spread(by_block, count, factors)) return false;
    for (i64 i = 0; i < part.rows; ++i) put_codes(x.data + i * x.step, part, part.row + i, factors);
    return true;
  }

  bool unit(Part part) const {
    const View<Bits> x = view<In>(call.x, part);
    for (i64 i = 0; i < part.rows; i += call.block_rows) {
      const i64 rows = minimum<i64>(call.block_rows, part.rows - i);
      if (!panel({x.data + i * x.step, x.step}, {part.row + i, rows, part.column, part.columns})) return false;
    }
    return true;
  }
};

}  // namespace

#define FP4KIT_EXPORT __attribute__((visibility("default")))

extern "C" {

// What this was made from; and the level of the processor that runs it, as setup.py names them.
FP4KIT_EXPORT const char* fp4kit_digest() { return FP4KIT_DIGEST; }

FP4KIT_EXPORT const char* fp4kit_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))) return "base";
  const bool wide = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512cd");
  return wide ? "avx512" : "avx2";
#else
  return "base";
#endif
}

// Index of a rule, or of an element's arithmetic, by its key; -1 for one that is not here.
FP4KIT_EXPORT int fp4kit_rule(const char* key) {
  for (size_t i = 0; i < sizeof kRules / sizeof *kRules; ++i)
    if (!std::strcmp(kRules[i].key, key)) return static_cast<int>(i);
  return -1;
}

FP4KIT_EXPORT int fp4kit_tensor(const char* key) {
  for (size_t i = 0; i < sizeof kTensors / sizeof *kTensors; ++i)
    if (!std::strcmp(kTensors[i].key, key)) return static_cast<int>(i);
  return -1;
}

FP4KIT_EXPORT int fp4kit_element(const char* key) {
  for (size_t i = 0; i < sizeof kElements / sizeof *kElements; ++i)
    if (!std::strcmp(kElements[i].key, key)) return static_cast<int>(i);
  return -1;
}

FP4KIT_EXPORT void fp4kit_set_reciprocals(const signed char* table) { reciprocal_table = table; }

FP4KIT_EXPORT void fp4kit_encode(const EncodeCall* call) {
  const Units units{call->x.rows, call->x.columns, call->height, call->width};
  by_input(call->input, [&](auto in) {
    const Encoder<decltype(in)> encoder{*call};
    auto work = [&](i64 unit) { call->unusual[unit] = !encoder.unit(units.part(unit)); };
    run_units(units.count(), call->threads, work);
  });
}

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
      if (!call->out) most = largest_of<In>(x, part.rows, part.columns);
      for (i64 i = 0; call->out && i < part.rows; i += call->block_rows) {
        u32 found[kMostBlocks];
        const i64 rows = minimum<i64>(call->block_rows, part.rows - i), blocks = part.columns / call->block;
        float* out = call->out + (part.row + i) / call->block_rows * call->out_step + part.column / call->block;
        block_magnitudes<In>(View<Bits>{x.data + i * x.step, x.step}, rows, blocks, call->block, found);
        for (i64 b = 0; b < blocks; ++b) most = found[b] > most ? found[b] : most;
        for (i64 b = 0; b < blocks; ++b) out[b] = Input<In>::value(static_cast<Bits>(found[b]));
      }
      u32 seen = all.load(std::memory_order_relaxed);
      while (most > seen && !all.compare_exchange_weak(seen, most)) {
      }
    };
    run_units(units.count(), call->threads, work);
  });
  return all;
}

// A whole quantize of a contiguous matrix whose shape, strides and recipe are those of `like`: into packed and scales, and for a recipe with
// a tensor scale (tensor: index of its rule, else -1) into decode and amax. Returns 1 where it has to be done otherwise.
FP4KIT_EXPORT i32 fp4kit_quantize(const EncodeCall* like, const void* x, u8* packed, u8* scales, float* decode, float* amax, i32 tensor,
                                  i32 threads) {
  EncodeCall call = *like;
  call.x.data = x;
  call.threads = threads;
  TensorScale t{1.0f, 1.0f, 1.0f};
  if (tensor >= 0) {
    const AmaxCall find{call.x, nullptr, 0, call.height, call.width, call.input, call.block, call.block_rows, threads};
    const u32 bits = fp4kit_amax(&find);
    const float value = by_input(call.input, [&](auto in) {
      using In = decltype(in);
      using Bits = typename Input<In>::Bits;
      return bits < Input<In>::kInfinity ? Input<In>::value(static_cast<Bits>(bits)) : -1.0f;
    });
    if (value < 0.0f) return 1;
    t = kTensors[tensor].scale[call.input](value);
    *amax = value;
    *decode = t.decode;
  }
  call.encode = &t.encode;
  call.decode = &t.decode;
  call.amax = &t.amax;
  call.packed = packed;
  call.scales = scales;
  const i64 units = Units{call.x.rows, call.x.columns, call.height, call.width}.count();
  std::vector<u8> unusual(static_cast<size_t>(units));
  call.unusual = unusual.data();
  fp4kit_encode(&call);
  return std::memchr(unusual.data(), 1, unusual.size()) != nullptr;
}

struct DecodeCall {
  const u8 *packed, *scales;
  const void* table;
  i64 table_step;  // bytes from the table of a row to that of the next; 0: one for all
  void* out;
  i64 rows, columns, packed_step, scales_step, height, width;
  i32 itemsize, four, block, threads;
};

FP4KIT_EXPORT void fp4kit_decode(const DecodeCall* call) {
  const Units units{call->rows, call->columns, call->height, call->width};
  auto work = [&](i64 unit) {
    const Part part = units.part(unit);
    for (i64 i = part.row; i < part.row + part.rows; ++i) {
      const u8* codes = call->packed + i * call->packed_step + (call->four ? part.column / 2 : part.column);
      const u8* scales = call->scales ? call->scales + i * call->scales_step + part.column / call->block : nullptr;
      const char* table = static_cast<const char*>(call->table) + i * call->table_step;
      char* out = static_cast<char*>(call->out) + (i * call->columns + part.column) * call->itemsize;
      const auto row = [&](auto value, auto four) {
        using Value = decltype(value);
        decode_row<Value, four()>(codes, scales, part.columns, call->block, reinterpret_cast<const Value*>(table),
                                  reinterpret_cast<Value*>(out));
      };
      const auto by_bits = [&](auto value) { call->four ? row(value, std::true_type{}) : row(value, std::false_type{}); };
      call->itemsize == 2 ? by_bits(u16{}) : by_bits(u32{});
    }
  };
  run_units(units.count(), call->threads, work);
}

// The same of arrays that lie as those of `like`.
FP4KIT_EXPORT void fp4kit_dequantize(const DecodeCall* like, const u8* packed, const u8* scales, const void* table, void* out, i32 threads) {
  DecodeCall call = *like;
  call.packed = packed;
  call.scales = scales;
  call.table = table;
  call.out = out;
  call.threads = threads;
  fp4kit_decode(&call);
}

// The codes of a (rows, columns) matrix to those of the (columns, rows) one; four: two a byte, and rows is even.
FP4KIT_EXPORT void fp4kit_transpose(const u8* codes, u8* out, i64 rows, i64 columns, i32 four, i32 threads) {
  constexpr i64 kSide = 64;
  const Units units{rows, columns, kSide, kSide};
  const i64 per_byte = four ? 2 : 1;
  auto work = [&](i64 unit) {
    const Part part = units.part(unit);
    u8 tile[kSide][kSide];  // by column
    for (i64 i = 0; i < part.rows; ++i) {
      const u8* row = codes + (part.row + i) * (columns / per_byte) + part.column / per_byte;
      for (i64 j = 0; j < part.columns; ++j) tile[j][i] = four ? row[j / 2] >> (j % 2 * 4) & 15u : row[j];
    }
    for (i64 j = 0; j < part.columns; ++j) {
      u8* target = out + (part.column + j) * (rows / per_byte) + part.row / per_byte;
      four ? pack_codes(tile[j], part.rows, target) : static_cast<void>(std::memcpy(target, tile[j], part.rows));
    }
  };
  run_units(units.count(), threads, work);
}

}  // extern "C"
