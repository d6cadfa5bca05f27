// The functions that Python calls (library.py has their arguments): each does a whole matrix, by units of some rows and
// columns.
#include "decode_matrix.h"
#include "search_factors.h"
#include "search.h"
#include "tensor_scale.h"

extern "C" {

// What this was made from; and the level of the processor that runs it, as setup.py names them.
FP4KIT_EXPORT const char* fp4kit_digest() {
  return FP4KIT_DIGEST;
}

FP4KIT_EXPORT const char* fp4kit_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")))
    return "base";
  const bool wide = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd");
  return wide ? "avx512" : "avx2";
#else
  return "base";
#endif
}

// Index of a rule, or of an element's arithmetic, by its key; -1 for one that is not here.
FP4KIT_EXPORT int fp4kit_rule(const char* key) {
  return kRules.index_of(key);
}

FP4KIT_EXPORT int fp4kit_tensor(const char* key) {
  return kTensors.index_of(key);
}

FP4KIT_EXPORT int fp4kit_element(const char* key) {
  return kElements.index_of(key);
}

FP4KIT_EXPORT void fp4kit_set_reciprocals(const signed char* table) {
  reciprocal_table = table;
}

}  // extern "C"

namespace {

void encode_units(const EncodeCall& call, Known known) {
  const Units units{call.x.rows, call.x.columns, call.height, call.width};
  Multipliers memory;
  const Multipliers* multipliers = multipliers_of_call(call, memory);
  by_input(call.input, [&](auto in) {
    const Encoder<decltype(in)> encoder{call, known, multipliers};
    auto work = [&](i64 unit) { call.unusual[unit] = !encoder.unit(units.part(unit)); };
    run_units(units.count(), call.threads, work);
  });
}

// `like` with the elements at x.
EncodeCall call_at(const EncodeCall& like, const void* x, i32 threads) {
  EncodeCall call = like;
  call.x.data = x;
  call.threads = threads;
  return call;
}

}  // namespace

extern "C" {

FP4KIT_EXPORT void fp4kit_encode(const EncodeCall* call) {
  encode_units(*call, {});
}

// A whole quantize of a matrix whose shape, strides and recipe are those of `like`: into packed and scales, and for a
// recipe with tensor scales, one or one a row (tensor: index of their rule, else -1), of given amaxes or (nullptr) of
// those of x, into decode and amax. Returns 1 where it has to be done otherwise.
FP4KIT_EXPORT i32 fp4kit_quantize(const EncodeCall* like, const void* x, const float* given, u8* packed, u8* scales,
                                  float* decode, float* amax, i32 tensor, i32 threads) {
  EncodeCall call = call_at(*like, x, threads);
  Found found(call);
  if (!find_tensors(call, tensor, given, found)) return 1;
  found.set(call);
  if (decode) std::memcpy(decode, found.decode.data(), found.decode.size() * sizeof(float));
  if (amax) std::memcpy(amax, found.amax.data(), found.amax.size() * sizeof(float));
  call.packed = packed;
  call.scales = scales;
  std::vector<u8> unusual(static_cast<size_t>(Units{call.x.rows, call.x.columns, call.height, call.width}.count()));
  call.unusual = unusual.data();
  encode_units(call, found.known(call));
  return any(unusual);
}

// A whole fake_quantize, of the same, into out: the values of codes and scales that are gone with their unit. values:
// how they are decoded.
FP4KIT_EXPORT i32 fp4kit_fake_quantize(const EncodeCall* like, const DecodeCall* values, const void* x,
                                       const float* given, void* out, i32 tensor, i32 threads) {
  EncodeCall call = call_at(*like, x, threads);
  DecodeCall target = *values;
  Found found(call);
  if (!find_tensors(call, tensor, given, found)) return 1;
  found.set(call);
  target.tensors = {call.encode, call.decode, call.amax, call.tensor_step, 0};
  target.out = out;
  Tables memory;
  const Tables* tables = tables_of_call(target, true, memory);
  const Units units{call.x.rows, call.x.columns, call.height, call.width};
  const Known known = found.known(call);
  Multipliers multipliers_memory;
  const Multipliers* multipliers = multipliers_of_call(call, multipliers_memory);
  std::atomic<bool> usual{true};
  by_input(call.input, [&](auto in) {
    auto work = [&](i64 unit) {
      if (!fake_part<decltype(in)>(call, target, units.part(unit), tables, known, multipliers)) usual = false;
    };
    run_units(units.count(), threads, work);
  });
  return !usual;
}

FP4KIT_EXPORT int fp4kit_decoder(const char* key) {
  return kDecodes.index_of(key);
}

FP4KIT_EXPORT void fp4kit_decode(const DecodeCall* call) {
  Tables memory;
  const Tables* tables = tables_of_call(*call, false, memory);
  const Units units{call->rows, call->columns, call->height, call->width};
  auto work = [&](i64 unit) { call->unusual[unit] = !decode_part(*call, units.part(unit), tables); };
  run_units(units.count(), call->threads, work);
}

// A whole dequantize of arrays that lie as those of `like`. tensor: encode of all tensor scales, then decode, then
// amax. Returns 1 where it has to be done otherwise.
FP4KIT_EXPORT i32 fp4kit_dequantize(const DecodeCall* like, const u8* packed, const u8* scales, const float* tensor,
                                    void* out, i32 threads) {
  DecodeCall call = *like;
  call.packed = packed;
  call.scales = scales;
  const i64 count = call.tensors.row_step ? call.rows * call.tensors.row_step : 1;
  call.tensors = {tensor, tensor + count, tensor + 2 * count, call.tensors.row_step, call.tensors.block_step};
  call.out = out;
  call.threads = threads;
  std::vector<u8> unusual(static_cast<size_t>(Units{call.rows, call.columns, call.height, call.width}.count()));
  call.unusual = unusual.data();
  fp4kit_decode(&call);
  return any(unusual);
}

// The block amaxes of least loss of a matrix.
FP4KIT_EXPORT void fp4kit_search(const SearchCall* call) {
  const Units units{call->x.rows, call->x.columns, call->height, call->width};
  std::atomic<u64> unproven{0};
  by_input(call->input, [&](auto in) {
    const Searcher<decltype(in)> searcher{*call};
    auto work = [&](i64 unit) { unproven += searcher.unit(units.part(unit)); };
    run_units(units.count(), call->threads, work);
  });
  *call->unproven += unproven;
}

// The block amaxes of a matrix, of multiples of each.
FP4KIT_EXPORT void fp4kit_search_multiples(const MultiplesCall* call) {
  const Units units{call->x.rows, call->x.columns, call->height, call->width};
  const PutTables put = kDecodes[call->decoder].put_tables[kFloat32];
  Tables memory;
  const Tables* tables = put && !call->tensor_step ? &memory : nullptr;
  if (tables) put({*call->encode, *call->decode, *call->amax}, true, memory);
  by_input(call->input, [&](auto in) {
    const Multiples<decltype(in)> search{*call, tables};
    auto work = [&](i64 unit) { call->unusual[unit] = !search.unit(units.part(unit)); };
    run_units(units.count(), call->threads, work);
  });
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
