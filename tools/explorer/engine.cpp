// The engine of the explorer (docs/guides/explorer.md): the CPU engine's functions for a single short matrix, compiled
// to WebAssembly. tools/build_explorer.py compiles it and puts it into the page.
//
// The page reads and writes the arrays of this file directly in the module's memory. Nothing here allocates for longer
// than a call.
#include "../../fp4kit/cpu/source/decode_matrix.h"
#include "../../fp4kit/cpu/source/tensor_scale.h"

// The C++ library registers destructors of thread-local variables by this function. The module never ends, so they
// need not run.
extern "C" int __cxa_thread_atexit(void (*)(void*), void*, void*) {
  return 0;
}

namespace {

constexpr i64 kMaxElements = 4096;

// The matrix, its codes, its block scales, and its values; elements are bits of the input type.
alignas(16) u32 elements[kMaxElements], values[kMaxElements];
u8 packed[kMaxElements], scales[kMaxElements];
// Factor for encoding, factor for decoding, and amax of the tensor.
float tensor[3];
char key[256];
signed char reciprocals[1 << 23];

}  // namespace

// The name under which the page finds a function.
#define EXPORTED(name) extern "C" __attribute__((export_name(#name)))

// Return the addresses of the arrays, for the page.
EXPORTED(elements_at) void* elements_at() {
  return elements;
}
EXPORTED(values_at) void* values_at() {
  return values;
}
EXPORTED(packed_at) void* packed_at() {
  return packed;
}
EXPORTED(scales_at) void* scales_at() {
  return scales;
}
EXPORTED(tensor_at) void* tensor_at() {
  return tensor;
}
EXPORTED(key_at) void* key_at() {
  return key;
}
EXPORTED(reciprocals_at) void* reciprocals_at() {
  return reciprocals;
}

// Return the index of the entry whose key is in `key`, or a negative number if no entry has it. See cpu/codec.py for
// the keys.
EXPORTED(block_rule) i32 block_rule() {
  return kBlockRules.index_of(key);
}
EXPORTED(tensor_rule) i32 tensor_rule() {
  return kTensorRules.index_of(key);
}
EXPORTED(element) i32 element() {
  return kElements.index_of(key);
}
EXPORTED(decoder) i32 decoder() {
  return kDecoders.index_of(key);
}

namespace {

// Decode the rows x columns matrix whose codes, block scales and tensor scale are in the arrays above, and store its
// values. Return false if the CPU engine leaves it to the specification.
bool decode_all(i32 decode, i32 input, i32 block, i32 code_bits, bool has_scales, i64 rows, i64 columns) {
  u8 needs_fallback[1] = {};
  DecodeCall call{};
  call.packed = packed;
  call.scales = has_scales ? scales : nullptr;
  call.tensors = {tensor, tensor + 1, tensor + 2, 0, 0};
  call.out = values;
  call.rows = rows;
  call.columns = columns;
  call.packed_step = columns * code_bits / 8;
  call.scales_step = has_scales ? (columns + block - 1) / block : 0;
  call.out_step = columns;
  call.needs_fallback = needs_fallback;
  call.tile_rows = rows;
  call.tile_columns = columns;
  call.tables_from = 1 << 30;
  call.decoder = decode;
  call.output = input;
  call.block = has_scales ? block : static_cast<i32>(columns);
  call.threads = 1;
  return decode_tile(call, {0, rows, 0, columns}, nullptr);
}

}  // namespace

// Quantize the rows x columns matrix in `elements`, and decode it. Store codes, block scales, tensor scale and values.
// Return 0 on success. Return 1 if an element or a factor is one that the CPU engine leaves to the specification; the
// outputs are then not valid.
//   rule, tensors, arithmetic, decode  indices of the block rule, tensor rule, element arithmetic and decoder; the
//                                      first two are -1 for recipes without block scales or tensor scales
//   input                              element type, as an InputKind
//   block, block_rows                  columns and rows of a block
//   code_bits                          bits of memory per code
//   min_factor, max_factor             see EncodeCall
//   given                              the tensor amax; negative to compute it from the elements
EXPORTED(explore)
i32 explore(i32 rule, i32 tensors, i32 arithmetic, i32 decode, i32 input, i32 block, i32 block_rows, i32 code_bits,
            float min_factor, float max_factor, i32 rows, i32 columns, float given) {
  reciprocal_table = reciprocals;
  const i64 count = i64{rows} * columns, blocks = (columns + block - 1) / block;
  u8 needs_fallback[1] = {};
  EncodeCall call{};
  call.x = {elements, rows, columns, columns, 1, 0};
  call.min_factor = min_factor;
  call.max_factor = max_factor;
  call.packed = packed;
  call.scales = rule < 0 ? nullptr : scales;
  call.packed_step = columns * code_bits / 8;
  call.scales_step = rule < 0 ? 0 : blocks;
  call.needs_fallback = needs_fallback;
  call.tile_rows = (rows + block_rows - 1) / block_rows * block_rows;
  call.tile_columns = (columns + 31) / 32 * 32;
  call.input = input;
  call.block_rule = rule;
  call.element = arithmetic;
  call.block = block;
  call.block_rows = block_rows;
  call.threads = 1;
  FoundScales found(call);
  if (count > kMaxElements || !find_tensor_scales(call, tensors, given < 0 ? nullptr : &given, found)) return 1;
  found.point(call);
  tensor[0] = call.encode[0];
  tensor[1] = call.decode[0];
  tensor[2] = call.amax[0];
  const bool encoded = with_input_type(input, [&](auto in) {
    return Encoder<decltype(in)>{call, found.known(call), nullptr}.encode_tile({0, rows, 0, columns});
  });
  if (!encoded) return 1;
  return !decode_all(decode, input, block, code_bits, rule >= 0, rows, columns);
}

// Decode a row of `columns` codes in `packed` under the block scales in `scales` and the tensor scale of the last call
// of explore. Store the values. The arguments and the result are those of explore.
EXPORTED(decode_row)
i32 decode_row(i32 rule, i32 decode, i32 input, i32 block, i32 code_bits, i32 columns) {
  return columns > kMaxElements || !decode_all(decode, input, block, code_bits, rule >= 0, 1, columns);
}
