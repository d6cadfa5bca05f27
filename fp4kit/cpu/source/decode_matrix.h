// Functions that decode or fake-quantize a matrix, tile by tile.
//   fake-quantize  encode and decode again
//   tile           the rows and columns that one thread takes at a time
//   value table    the values of all sixteen 4-bit codes under one scale code and one tensor scale
//   fallback       the specification, which computes the tiles that these loops cannot
//   In             the type of the elements, which in fake quantization is also that of the values
#pragma once

#include "encode_matrix.h"

// The arguments of a call that decodes a matrix. cpu/library.py mirrors this struct. Steps are counted in elements of
// their array.
//   packed, scales           codes and block scales, in rows that are packed_step and scales_step apart; `scales` is
//                            nullptr for a recipe without block scales
//   tensors                  the tensor scales
//   out                      output: the values, in rows that are out_step apart
//   rows, columns            the sizes of the matrix of values
//   needs_fallback           output, one byte per tile: 1 if the specification has to compute the tile
//   tile_rows, tile_columns  rows and columns of a tile
//   tables_from              smallest number of blocks for which the matrix gets value tables of all scale codes
//   decoder, output          index in kDecoders; type of the values, as an InputKind
//   block                    columns of a block; all columns of the matrix for a recipe without blocks
//   threads                  largest number of threads to use
struct DecodeCall {
  const u8 *packed, *scales;
  TensorScales tensors;
  void* out;
  i64 rows, columns, packed_step, scales_step, out_step;
  u8* needs_fallback;
  i64 tile_rows, tile_columns, tables_from;
  i32 decoder, output, block, threads;
};

namespace {

// Fill `memory` with the value tables of all scale codes, which all tiles of a call share, and return its address.
// Return nullptr if there are no shared tables: for one-byte codes, for recipes without block scales, for more than one
// tensor scale, and for fewer than tables_from blocks. are_unsigned: true if no scale code has its sign bit set (see
// fill_tables).
const DecodeTables* tables_of_call(const DecodeCall& call, bool are_unsigned, DecodeTables& memory) {
  const FillTablesFunction fill = kDecoders[call.decoder].fill_tables[call.output];
  if (!fill || call.tensors.row_step || call.tensors.block_step ||
      call.rows * (call.columns / call.block) < call.tables_from)
    return nullptr;
  fill(call.tensors.at(0, 0), are_unsigned, memory);
  return &memory;
}

// Decode a tile and store its values in call.out. Return true if all values are right. Return false if any row of the
// tile needs the fallback; all rows are still decoded, but the stored values are then not valid. `tables` is the result
// of tables_of_call.
bool decode_tile(const DecodeCall& call, const Rectangle& tile, const DecodeTables* tables) {
  const DecoderEntry& entry = kDecoders[call.decoder];
  const i64 block = tile.column / call.block, itemsize = call.output == kFloat32 ? 4 : 2,
            blocks = call.columns / call.block;
  // True if the rows of the tile follow each other without gaps in all arrays, so that they can be decoded as one long
  // row.
  const bool is_flat = tile.columns == call.columns && call.columns % call.block == 0 &&
                       call.out_step == call.columns &&
                       call.packed_step == (entry.is_nibble ? call.columns / 2 : call.columns) &&
                       (!call.scales || call.scales_step == blocks * entry.scale_bytes) && !call.tensors.row_step &&
                       !call.tensors.block_step;
  const i64 rows = is_flat ? 1 : tile.rows, columns = is_flat ? tile.rows * tile.columns : tile.columns;
  bool is_done = true;
  for (i64 i = tile.row; i < tile.row + rows; ++i) {
    const u8* codes = call.packed + i * call.packed_step + (entry.is_nibble ? tile.column / 2 : tile.column);
    const u8* scales = call.scales ? call.scales + i * call.scales_step + block * entry.scale_bytes : nullptr;
    char* out = static_cast<char*>(call.out) + (i * call.out_step + tile.column) * itemsize;
    is_done &= entry.rows[call.output](codes, scales, columns, call.block, tables, call.tensors, i, block, out);
  }
  return is_done;
}

// Fake-quantize a tile: encode it into scratch memory of the thread, and store the decoded values in values.out. Return
// true on success. Return false if the tile needs the fallback; its values are then not valid.
//   call, values  the arguments of the calls that encode and that decode the matrix; both hold the tensor scales
//   tables        the result of tables_of_call
//   known         the block amaxes of the first pass, or {} if there are none (FoundScales::known)
//   multipliers   the result of multipliers_of_call
template <class In>
bool fake_quantize_tile(const EncodeCall& call, const DecodeCall& values, const Rectangle& tile,
                        const DecodeTables* tables, KnownAmaxes known, const Multipliers* multipliers) {
  const i64 itemsize = sizeof(typename Input<In>::Bits),
            bytes = kDecoders[values.decoder].is_nibble ? tile.columns / 2 : tile.columns;
  const i64 scale_bytes = tile.columns / call.block * kDecoders[values.decoder].scale_bytes;  // per row
  u8* codes = scratch<u8>(static_cast<size_t>(tile.rows * (bytes + scale_bytes)));
  u8* scales = call.block_rule < 0 ? nullptr : codes + tile.rows * bytes;
  EncodeCall encode = call;
  encode.x.data = static_cast<const char*>(call.x.data) +
                  (tile.row * call.x.row_step + tile.column * call.x.column_step) * itemsize;
  encode.encode += tile.row * call.tensor_step;
  encode.decode += tile.row * call.tensor_step;
  encode.amax += tile.row * call.tensor_step;
  encode.packed = codes;
  encode.scales = scales;
  encode.packed_step = bytes;
  encode.scales_step = scale_bytes;
  const Rectangle whole{0, tile.rows, 0, tile.columns};
  if (known.data) known.data += tile.row / call.block_rows * known.step + tile.column / call.block;
  if (!Encoder<In>{encode, known, multipliers}.encode_tile(whole)) return false;
  DecodeCall decode = values;
  decode.packed = codes;
  decode.scales = scales;
  decode.packed_step = bytes;
  decode.scales_step = scale_bytes;
  const TensorScales& t = values.tensors;
  decode.tensors = {t.encode + tile.row * t.row_step, t.decode + tile.row * t.row_step, t.amax + tile.row * t.row_step,
                    t.row_step, 0};
  decode.out = static_cast<char*>(values.out) + (tile.row * values.out_step + tile.column) * itemsize;
  return decode_tile(decode, whole, tables);
}

}  // namespace
