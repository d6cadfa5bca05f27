// The C functions that Python calls (cpu/library.py declares them). Each of them takes a matrix, or one slab (some rows
// and columns) of a matrix that is too large for one call, and divides its tiles among threads.
//   tile        the rows and columns that one thread takes at a time
//   fallback    the specification, by which Python computes tiles with NaN, infinities or extreme scales
//   prototype   the arguments of a call except addresses, such as the shape, steps and recipe of a matrix. Python
//               stores it and repeats the call with new addresses (cpu/cached_calls.py)
//   entry       the compiled code of one rule
//   key         the text by which Python looks up the index of an entry
#include "decode_matrix.h"
#include "matmul_vnni.h"
#include "own_format.h"
#include "rotate.h"
#include "search_factors.h"
#include "search_powers.h"
#include "search_quest.h"
#include "search_scales.h"
#include "tensor_scale.h"

extern "C" {

// Return the digest of the sources from which this library was compiled. Python compares it with the digest of the
// present sources (cpu/source_digest.py) and rejects a stale library.
FP4KIT_EXPORT const char* fp4kit_digest() {
  return FP4KIT_DIGEST;
}

// Return the highest level that this processor can run: "base", "avx2" or "avx512", as setup.py names them. Processors
// other than x86-64 have the level "base". The result does not depend on the level for which this library was compiled.
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

// Return the version of fp4kit.h: its FP4KIT_API_VERSION.
FP4KIT_EXPORT i32 fp4kit_api_version() {
  return 2;
}

// Return the index of the block rule with this key in the table kBlockRules. Return -1 if the key is "", which stands
// for a recipe without this rule, or -2 if no entry has the key. This holds for the other functions of keys, too.
FP4KIT_EXPORT int fp4kit_block_rule(const char* key) {
  return kBlockRules.index_of(key);
}

// Return the index of the tensor rule with this key in the table kTensorRules.
FP4KIT_EXPORT int fp4kit_tensor_rule(const char* key) {
  return kTensorRules.index_of(key);
}

// Return the index of the element arithmetic (how elements become codes) with this key in the table kElements.
FP4KIT_EXPORT int fp4kit_element(const char* key) {
  return kElements.index_of(key);
}

// Set the table of 2^23 corrections by which rcp_approx_ftz computes reciprocals (cuda_compat.h). Python calls this
// function once, before any call that computes. The library keeps the pointer and does not copy the table, so the
// caller must not free the table.
FP4KIT_EXPORT void fp4kit_set_reciprocals(const signed char* table) {
  reciprocal_table = table;
  lacks_reciprocals = false;
}

}  // extern "C"

namespace {

// Encode all tiles of a call: store codes and block scales. For each tile, set call.needs_fallback to 1 if the tile
// needs the fallback, otherwise to 0. `known`: block amaxes that an earlier pass has found, or {} if there was none.
void encode_tiles(const EncodeCall& call, KnownAmaxes known) {
  Multipliers memory;
  const Multipliers* multipliers = multipliers_of_call(call, memory);
  for_each_tile(call, [&](auto in, const Rectangle& tile, i64 index) {
    call.needs_fallback[index] = !Encoder<decltype(in)>{call, known, multipliers}.encode_tile(tile);
  });
}

// Return a copy of a prototype in which x is the address of the elements and `threads` the largest number of threads to
// use. All other fields are those of the prototype.
EncodeCall call_at(const EncodeCall& prototype, const void* x, i32 threads) {
  EncodeCall call = prototype;
  call.x.data = x;
  call.threads = threads;
  return call;
}

// What the functions of fp4kit.h return. That header says what the numbers mean.
enum Status : i32 { kDone, kNoResult, kWrongIndex, kWrongField, kNullPointer };

// Return 0 if n can be a number of rows or columns, 1 to 2^31. The product of two such numbers does not overflow.
u64 is_no_size(i64 n) {
  return (static_cast<u64>(n) - 1) >> 31;
}

// Return true if any argument is not 0. All arguments are computed, because branches would make the library larger.
template <class... Fields>
bool any(Fields... fields) {
  return ((fields != Fields{}) | ...);
}

// Return kDone if fp4kit_quantize can take these arguments, otherwise what is wrong. Loops do not check sizes, so a
// wrong one would read or write outside of the arrays.
[[gnu::noinline]] Status status_of(const EncodeCall* c, const void* x, const u8* packed, const u8* scales, i32 rule) {
  if (!c || !x || !packed) return kNullPointer;
  if (!kElements.has(c->element) || !kBlockRules.has(c->block_rule, -1) || !kTensorRules.has(rule, -1) ||
      static_cast<u32>(c->input) >= kInputs)
    return kWrongIndex;
  const BlockRuleEntry none{}, &entry = c->block_rule < 0 ? none : kBlockRules[c->block_rule];
  const WholeRule* whole = entry.whole;
  const bool is_nibble = whole ? whole->is_nibble : kElements[c->element].is_nibble, is_blockwise = c->block_rule > 0;
  const i64 columns = c->x.columns, block = c->block, rows = c->block_rows;
  const i64 unit = is_blockwise ? block : (c->x.hadamard ? 16 : 1 + is_nibble);
  // First the fields that stay 0, then sizes, before they divide others.
  const bool is_wrong =
      any(c->encode, c->decode, c->amax, c->block_amax, c->factors, c->block_step, c->random, c->random_step, c->seed,
          c->stream_first, c->stream_stride, c->packed, c->scales, c->needs_fallback, c->threads) ||
      any(is_no_size(c->x.rows), is_no_size(columns), is_no_size(c->tile_rows), is_no_size(c->tile_columns),
          is_no_size(block), is_no_size(rows), block > kPanelColumns, block != 16 && block % 32) ||
      columns % unit || c->tile_rows % rows || c->tile_columns % maximum<i64>(block, 32) ||
      any(entry.choose && (block != kBlockColumns || rows > kMaxBlockRows), whole && (block != kHif4Block || rows != 1),
          c->x.rows > 1 && !c->x.row_step, columns > 1 && !c->x.column_step, static_cast<u64>(c->x.hadamard) > 1 << 16,
          c->tensor_step >> 1, !(c->max_factor > 0), !(fabsf(c->min_factor) <= c->max_factor),
          c->packed_step < columns >> is_nibble) ||
      (is_blockwise && scales && c->scales_step < columns / block * (whole ? whole->scale_bytes : 1));
  return is_wrong ? kWrongField : kDone;
}

// Return kDone if fp4kit_dequantize can take these arguments, otherwise what is wrong.
[[gnu::noinline]] Status status_of(const DecodeCall* c, const u8* packed, const u8* scales, const float* tensor,
                                   const void* out) {
  if (!c || !packed || !tensor || !out) return kNullPointer;
  if (!kDecoders.has(c->decoder) || static_cast<u32>(c->output) >= kInputs) return kWrongIndex;
  const DecoderEntry& entry = kDecoders[c->decoder];
  const auto [encode, decode, amax, row_step, block_step] = c->tensors;
  // decode_levels_row, which has no tables of values, takes 16 columns at a time.
  const i64 columns = c->columns, block = c->block,
            unit = entry.is_nibble ? (entry.has_scales && !entry.fill_tables[0] ? 16 : 2) : 1;
  if (entry.has_scales && !scales) return kNullPointer;
  const bool is_wrong =
      any(c->packed, c->scales, encode, decode, amax, c->out, c->needs_fallback, c->threads, is_no_size(c->rows),
          is_no_size(columns), is_no_size(c->tile_rows), is_no_size(c->tile_columns), is_no_size(block)) ||
      ((entry.has_scales || block < columns) && block % unit) ||
      (c->tile_columns < columns && c->tile_columns % block) ||
      (entry.has_scales && (columns % block || c->scales_step < columns / block * entry.scale_bytes)) ||
      (block_step ? block_step != 1 || row_step != (columns + block - 1) / block : static_cast<u64>(row_step) > 1) ||
      any(entry.scale_bytes > 1 && block != kHif4Block, entry.is_nibble && columns % 2,
          c->packed_step < columns >> entry.is_nibble, c->out_step < columns);
  return is_wrong ? kWrongField : kDone;
}

// Copy numbers to `out`, unless it is nullptr.
void store(const std::vector<float>& numbers, float* out) {
  if (out) std::memcpy(out, numbers.data(), numbers.size() * sizeof(float));
}

}  // namespace

extern "C" {

// Encode a matrix under the tensor scales that `call` gives. Store codes and block scales. For each tile, set
// needs_fallback to 1 if the specification has to compute the tile, otherwise to 0.
FP4KIT_EXPORT void fp4kit_encode(const EncodeCall* call) {
  encode_tiles(*call, {});
}

// Encode a matrix by the tables of a user-defined format (OwnFormat). Store codes and block scales. For each tile, set
// needs_fallback to 1 if the specification has to compute the tile, otherwise to 0. The field block_rule of the call
// says only whether scales are computed (1) or not (-1).
FP4KIT_EXPORT void fp4kit_encode_own(const EncodeCall* call, const OwnFormat* own) {
  for_each_tile(*call, [&](auto in, const Rectangle& tile, i64 index) {
    call->needs_fallback[index] = !OwnEncoder<decltype(in)>{*call, *own}.encode_tile(tile);
  });
}

// Quantize the matrix at x: find its tensor scales, and store its codes in `packed` and its block scales in `scales`.
// Return 0 on success. Return 1 if the matrix needs the fallback; the outputs are then not valid. No argument is
// checked.
//   prototype     the other arguments of the call that encodes
//   given         tensor amaxes, or nullptr to compute them from the elements
//   scales        nullptr if the block scales are not wanted
//   decode, amax  outputs: the decode scales and amaxes of the tensor; nullptr if they are not wanted
//   tensor_rule   index in kTensorRules; -1 for a recipe without tensor scales
//   threads       largest number of threads to use
FP4KIT_EXPORT i32 fp4kit_quantize_matrix(const EncodeCall* prototype, const void* x, const float* given, u8* packed,
                                         u8* scales, float* decode, float* amax, i32 tensor_rule, i32 threads) {
  EncodeCall call = call_at(*prototype, x, threads);
  FoundScales found(call);
  if (!find_tensor_scales(call, tensor_rule, given, found)) return 1;
  found.point(call);
  store(found.decode, decode);
  store(found.amax, amax);
  call.packed = packed;
  call.scales = scales;
  std::vector<u8> needs_fallback(
      static_cast<size_t>(Tiles{call.x.rows, call.x.columns, call.tile_rows, call.tile_columns}.count()));
  call.needs_fallback = needs_fallback.data();
  encode_tiles(call, found.known(call));
  return any_marked(needs_fallback) || lacks_reciprocals;
}

// Quantize as fp4kit_quantize_matrix does, for C programs. Return another Status than 0 and 1, and write nothing, if an
// argument is wrong. Python calls the function above, because it may pass steps of 0, which are wrong here.
FP4KIT_EXPORT i32 fp4kit_quantize(const EncodeCall* prototype, const void* x, const float* given, u8* packed,
                                  u8* scales, float* decode, float* amax, i32 tensor_rule, i32 threads) {
  if (const i32 status = status_of(prototype, x, packed, scales, tensor_rule)) return status;
  return fp4kit_quantize_matrix(prototype, x, given, packed, scales, decode, amax, tensor_rule, threads);
}

// Store what fp4kit_dequantize takes as `tensor`: the encode scales of `count` tensor amaxes, then their decode scales,
// then the amaxes. They are all 1 if tensor_rule is -1. Return 0 on success. Return 1 if an amax is NaN, infinite or
// negative, or another Status if an argument is wrong; nothing is then stored.
FP4KIT_EXPORT i32 fp4kit_tensor_scales(i32 tensor_rule, i32 input, const float* amax, i64 count, float* tensor) {
  if (!kTensorRules.has(tensor_rule, -1) || static_cast<u32>(input) >= kInputs) return kWrongIndex;
  if (!tensor || (!amax && tensor_rule > 0)) return kNullPointer;
  if (is_no_size(count)) return kWrongField;
  for (i64 i = 0; tensor_rule > 0 && i < count; ++i)
    if (bits_of(amax[i]) >= kInfinityBits) return kNoResult;
  for (i64 i = 0; i < count; ++i) {
    const TensorScale scale =
        tensor_rule < 0 ? TensorScale{1.0f, 1.0f, 1.0f} : kTensorRules[tensor_rule].scale[input](amax[i]);
    tensor[i] = scale.encode, tensor[count + i] = scale.decode, tensor[2 * count + i] = scale.amax;
  }
  return lacks_reciprocals;
}

// Fake-quantize the matrix at x (encode and decode it again), and store the values in `out`. Return 0 on success.
// Return 1 if the matrix needs the fallback; the outputs are then not valid. Each tile is decoded right after it is
// encoded, so that the codes and scales of the matrix are never stored.
//   prototype, values  the prototypes of the calls that encode and decode
//   given              tensor amaxes, or nullptr to compute them from the elements
//   amax               output: the tensor amaxes; nullptr if they are not wanted
//   tensor_rule        index in kTensorRules; -1 for a recipe without tensor scales
//   threads            largest number of threads to use
FP4KIT_EXPORT i32 fp4kit_fake_quantize(const EncodeCall* prototype, const DecodeCall* values, const void* x,
                                       const float* given, void* out, float* amax, i32 tensor_rule, i32 threads) {
  EncodeCall call = call_at(*prototype, x, threads);
  DecodeCall target = *values;
  FoundScales found(call);
  if (!find_tensor_scales(call, tensor_rule, given, found)) return 1;
  found.point(call);
  store(found.amax, amax);
  target.tensors = {call.encode, call.decode, call.amax, call.tensor_step, 0};
  target.out = out;
  DecodeTables memory;
  const DecodeTables* tables = tables_of_call(target, true, memory);
  const KnownAmaxes known = found.known(call);
  Multipliers multipliers_memory;
  const Multipliers* multipliers = multipliers_of_call(call, multipliers_memory);
  std::atomic<bool> is_done{true};
  for_each_tile(call, [&](auto in, const Rectangle& tile, i64) {
    if (!fake_quantize_tile<decltype(in)>(call, target, tile, tables, known, multipliers)) is_done = false;
  });
  return !is_done;
}

// One matrix of a group: the arguments of fp4kit_quantize or, if `values` is not nullptr, of fp4kit_fake_quantize. If
// `out` is nullptr, only the tensor amaxes are computed. All fields have the size of a pointer, because Python passes
// an array of such integers (cpu/cached_calls.py).
//   out  output: the packed codes, or the values
struct GroupedMatrix {
  const EncodeCall* prototype;
  const DecodeCall* values;
  const void* x;
  const float* given;
  void* out;
  u8* scales;
  float *decode, *amax;
  std::intptr_t tensor_rule;
};

// Compute `count` matrices. Store for each of them in needs_fallback what the function for one matrix returns. The
// matrices share the threads: each one is computed by a single thread, unless there is only one.
FP4KIT_EXPORT void fp4kit_group(const GroupedMatrix* matrices, i64 count, u8* needs_fallback, i32 threads) {
  const i32 inner = count > 1 ? 1 : threads;
  auto work = [&](i64 index) {
    const GroupedMatrix& m = matrices[index];
    const i32 rule = static_cast<i32>(m.tensor_rule);
    const auto compute = [&] {
      if (m.values) return fp4kit_fake_quantize(m.prototype, m.values, m.x, m.given, m.out, m.amax, rule, inner);
      if (m.out)
        return fp4kit_quantize_matrix(m.prototype, m.x, m.given, static_cast<u8*>(m.out), m.scales, m.decode, m.amax,
                                      rule, inner);
      EncodeCall call = call_at(*m.prototype, m.x, inner);
      call.block_rule = -1;  // so that no block amaxes are kept
      FoundScales found(call);
      if (!find_tensor_scales(call, rule, m.given, found)) return 1;
      store(found.amax, m.amax);
      return 0;
    };
    needs_fallback[index] = static_cast<u8>(compute());
  };
  run_tiles(count, count > 1 ? threads : 1, work);
}

// Return the index of the decoder with this key in the table kDecoders.
FP4KIT_EXPORT int fp4kit_decoder(const char* key) {
  return kDecoders.index_of(key);
}

// Decode a matrix: store its values. For each tile, set needs_fallback to 1 if the specification has to compute the
// tile, otherwise to 0.
FP4KIT_EXPORT void fp4kit_decode(const DecodeCall* call) {
  DecodeTables memory;
  const DecodeTables* tables = tables_of_call(*call, false, memory);
  const Tiles tiles{call->rows, call->columns, call->tile_rows, call->tile_columns};
  auto work = [&](i64 index) { call->needs_fallback[index] = !decode_tile(*call, tiles.tile(index), tables); };
  run_tiles(tiles.count(), call->threads, work);
}

// Decode a matrix by the tables of a user-defined format (OwnFormat): store its values. For each tile, set
// needs_fallback to 1 if the specification has to compute the tile, otherwise to 0. call->decoder is not read.
FP4KIT_EXPORT void fp4kit_decode_own(const DecodeCall* call, const OwnFormat* own) {
  const Tiles tiles{call->rows, call->columns, call->tile_rows, call->tile_columns};
  with_input_type(call->output, [&](auto out) {
    auto work = [&](i64 index) {
      call->needs_fallback[index] = !decode_tile_own<decltype(out)>(*call, *own, tiles.tile(index));
    };
    run_tiles(tiles.count(), call->threads, work);
  });
}

// Dequantize a matrix: decode its codes and store the values in `out`. Return 0 on success. Return 1 if any tile needs
// the fallback; `out` is then not valid. Return another Status, and write nothing, if an argument is wrong.
//   prototype  the other arguments of the call that decodes
//   packed     the codes
//   scales     the scale codes; nullptr for a recipe without block scales
//   tensor     the encode scales of all tensor scales, then their decode scales, then their amaxes
//   threads    largest number of threads to use
FP4KIT_EXPORT i32 fp4kit_dequantize(const DecodeCall* prototype, const u8* packed, const u8* scales,
                                    const float* tensor, void* out, i32 threads) {
  if (const i32 status = status_of(prototype, packed, scales, tensor, out)) return status;
  DecodeCall call = *prototype;
  call.packed = packed;
  call.scales = kDecoders[call.decoder].has_scales ? scales : nullptr;
  const i64 count = call.tensors.row_step ? call.rows * call.tensors.row_step : 1;
  call.tensors = {tensor, tensor + count, tensor + 2 * count, call.tensors.row_step, call.tensors.block_step};
  call.out = out;
  call.threads = threads;
  std::vector<u8> needs_fallback(
      static_cast<size_t>(Tiles{call.rows, call.columns, call.tile_rows, call.tile_columns}.count()));
  call.needs_fallback = needs_fallback.data();
  fp4kit_decode(&call);
  return any_marked(needs_fallback) || lacks_reciprocals;
}

// Scale search: for every block of the matrix, store in call->out the block amax whose scale gives the smallest loss
// (the first one in case of ties). Add the number of blocks that had a full search to *call->unproven, which must not
// be null.
FP4KIT_EXPORT void fp4kit_search_scales(const SearchScalesCall* call) {
  std::atomic<u64> unproven{0};
  for_each_tile(*call, [&](auto in, const Rectangle& tile, i64) {
    unproven += ScaleSearch<decltype(in)>{*call}.search_tile(tile);
  });
  *call->unproven += unproven;
}

// Factor search: for every block of the matrix, try the given multiples of its amax, and store the best one in
// call->out. The best one has the smallest error (the first one in case of ties). For each tile, set needs_fallback to
// 1 if the specification has to compute the tile, otherwise to 0.
FP4KIT_EXPORT void fp4kit_search_factors(const SearchFactorsCall* call) {
  const FillTablesFunction fill = kDecoders[call->decoder].fill_tables[kFloat32];
  DecodeTables memory;
  const DecodeTables* tables = fill && !call->tensor_step ? &memory : nullptr;
  if (tables) fill({*call->encode, *call->decode, *call->amax}, true, memory);
  for_each_tile(*call, [&](auto in, const Rectangle& tile, i64 index) {
    call->needs_fallback[index] = !FactorSearch<decltype(in)>{*call, tables}.search_tile(tile);
  });
}

// QuEST's search: for every block of the matrix, store in call->out the amax that follows from its standard deviation.
// The amax of a block with NaN or infinity is NaN.
FP4KIT_EXPORT void fp4kit_search_quest(const SearchQuestCall* call) {
  for_each_tile(*call, [&](auto in, const Rectangle& tile, i64) { search_quest_tile<decltype(in)>(*call, tile); });
}

// msmodelslim's searches: for every block of the matrix, store in call->out the power of two with the smaller error.
FP4KIT_EXPORT void fp4kit_search_powers(const SearchPowersCall* call) {
  for_each_tile(*call, [&](auto in, const Rectangle& tile, i64) { search_powers_tile<decltype(in)>(*call, tile); });
}

// msmodelslim's search of ceil_x: for every block of the matrix, store its amax in call->out, and add its errors to
// `bins`, which add_ceil_x_errors describes.
FP4KIT_EXPORT void fp4kit_search_ceil_x(const SearchPowersCall* call, u64* bins) {
  for_each_tile(*call,
                [&](auto in, const Rectangle& tile, i64) { search_ceil_x_tile<decltype(in)>(*call, tile, bins); });
}

// Replace each of `count` amaxes by ceil_x_amax for a constant, given by its number. `input` is the type of the
// elements, as an InputKind.
FP4KIT_EXPORT void fp4kit_ceil_x_amaxes(float* amaxes, i64 count, i32 constant, i32 input) {
  with_input_type(input, [&](auto in) {
    for (i64 i = 0; i < count; ++i) amaxes[i] = ceil_x_amax<decltype(in)>(amaxes[i], constant);
  });
}

// Transpose the codes of a matrix with `rows` rows and `columns` columns, and store them in `out`, which must not
// overlap `codes`. Both arrays are contiguous. If is_nibble is 1, codes are two per byte, and rows and columns must be
// even. If it is 0, codes are one per byte.
FP4KIT_EXPORT void fp4kit_transpose(const u8* codes, u8* out, i64 rows, i64 columns, i32 is_nibble, i32 threads) {
  constexpr i64 kTileSide = 64;
  const Tiles tiles{rows, columns, kTileSide, kTileSide};
  const i64 per_byte = is_nibble ? 2 : 1;
  auto work = [&](i64 index) {
    const Rectangle tile = tiles.tile(index);
    u8 by_column[kTileSide][kTileSide];
    for (i64 i = 0; i < tile.rows; ++i) {
      const u8* row = codes + (tile.row + i) * (columns / per_byte) + tile.column / per_byte;
      for (i64 j = 0; j < tile.columns; ++j) by_column[j][i] = is_nibble ? row[j / 2] >> (j % 2 * 4) & 15u : row[j];
    }
    for (i64 j = 0; j < tile.columns; ++j) {
      u8* target = out + (tile.column + j) * (rows / per_byte) + tile.row / per_byte;
      is_nibble ? pack_codes(by_column[j], tile.rows, target)
                : static_cast<void>(std::memcpy(target, by_column[j], tile.rows));
    }
  };
  run_tiles(tiles.count(), threads, work);
}

// Rotate the blocks of call->x (by a Hadamard transform or by given matrices), and store the result in call->out.
FP4KIT_EXPORT void fp4kit_rotate(const RotateCall* call) {
  with_input_type(call->input, [&](auto in) {
    const Rotator<decltype(in)> rotator{*call};
    auto work = [&](i64 index) { rotator.run(index); };
    run_tiles(rotator.tasks(), call->threads, work);
  });
}

// Multiply b (rows, rank) and a (rank, columns), both contiguous, and store the product in `out`: every element is a
// chain of fused multiply-adds in the order of the rank, which starts at +0.
FP4KIT_EXPORT void fp4kit_low_rank(const float* b, const float* a, float* out, i64 rows, i64 rank, i64 columns,
                                   i32 threads) {
  const Tiles tiles{rows, columns, 16, 1024};
  auto work = [&](i64 index) {
    const Rectangle tile = tiles.tile(index);
    for (i64 i = tile.row; i < tile.row + tile.rows; ++i) {
      float sums[1024] = {};
      for (i64 k = 0; k < rank; ++k) {
        const float factor = b[i * rank + k];
        const float* row = a + k * columns + tile.column;
        for (i64 j = 0; j < tile.columns; ++j) sums[j] = __builtin_fmaf(factor, row[j], sums[j]);
      }
      std::memcpy(out + i * columns + tile.column, sums, static_cast<size_t>(tile.columns) * sizeof(float));
    }
  };
  run_tiles(tiles.count(), threads, work);
}

// Compare `blocks` blocks of stored codes with their source x, both contiguous. `elements` has the values of the two
// codes of each byte, or of the one. sums[0] gets the sum of x^2, and sums[1] that of (x - element * scale)^2. Return
// the number of elements with |element| == top and |x| > limit of their block. `width`, the elements per block, is a
// multiple of 8.
FP4KIT_EXPORT i64 fp4kit_compare_stored(const u8* codes, const float* elements, const float* scales,
                                        const float* limits, const float* x, double* sums, i64 blocks, i64 width,
                                        i32 codes_per_byte, float top) {
  double signal[8] = {}, noise[8] = {};
  i64 saturated = 0;
  for (i64 block = 0; block < blocks; ++block) {
    for (i64 first = 0; first < width; first += 8, x += 8, codes += 8 / codes_per_byte) {
      float values[8];
      if (codes_per_byte == 2) {
        for (int i = 0; i < 4; ++i) std::memcpy(values + 2 * i, elements + 2 * codes[i], 2 * sizeof(float));
      } else {
        for (int i = 0; i < 8; ++i) values[i] = elements[codes[i]];
      }
      i32 beyond = 0;
      for (int i = 0; i < 8; ++i) {
        const double source = x[i], error = source - static_cast<double>(values[i] * scales[block]);
        signal[i] += source * source;
        noise[i] += error * error;
        beyond += (__builtin_fabsf(values[i]) == top) & (__builtin_fabsf(x[i]) > limits[block]);
      }
      saturated += beyond;
    }
  }
  sums[0] = sums[1] = 0;
  for (int i = 0; i < 8; ++i) sums[0] += signal[i], sums[1] += noise[i];
  return saturated;
}

// Compute the matrix products C + A B^T of `count` calls with the additions of matrix units (matmul.h), and store each
// product in the `out` of its call. At most `threads` threads share the work of all calls. The results do not depend on
// their number.
FP4KIT_EXPORT void fp4kit_matmul(const ProductCall* calls, i64 count, i32 threads) {
  ProductTasks tasks;
  for (i64 i = 0; i < count; ++i) {
    if (is_engine(calls[i])) {
      tasks.add<EngineTask>(calls[i]);
      continue;
    }
#if FP4KIT_HAS_AVX512
    if (uses_vnni(calls[i])) {
      tasks.add<VnniTask>(calls[i]);
      continue;
    }
    if (uses_lanes(calls[i])) {
      tasks.add<LaneTask>(calls[i]);
      continue;
    }
#endif
    tasks.add<ProductTask>(calls[i]);
  }
  auto work = [&](i64 index) { tasks.run(index); };
  run_tiles(tasks.count(), threads, work);
}

}  // extern "C"
