// Values of a matrix, unit by unit.
#pragma once

#include "encode_matrix.h"

// Values of a matrix. kind: of the values, as input is of elements. unusual: of each unit, whether it has to be done
// otherwise. tables_from: blocks of a matrix from which on tables for all of them serve, where they can.
struct DecodeCall {
  const u8 *packed, *scales;
  TensorScales tensors;
  void* out;
  i64 rows, columns, packed_step, scales_step, out_step;
  u8* unusual;
  i64 height, width, tables_from;
  i32 decoder, kind, block, threads;
};

namespace {

// The tables of a whole call; nullptr where each block makes its own.
const Tables* tables_of_call(const DecodeCall& call, bool are_unsigned, Tables& memory) {
  const PutTables put = kDecodes[call.decoder].put_tables[call.kind];
  if (!put || call.tensors.row_step || call.tensors.block_step ||
      call.rows * (call.columns / call.block) < call.tables_from)
    return nullptr;
  put(call.tensors.at(0, 0), are_unsigned, memory);
  return &memory;
}

bool decode_part(const DecodeCall& call, const Part& part, const Tables* tables) {
  const DecodeEntry& entry = kDecodes[call.decoder];
  const i64 block = part.column / call.block, itemsize = call.kind == kFloat32 ? 4 : 2,
            blocks = call.columns / call.block;
  const bool is_flat =
      part.columns == call.columns && call.columns % call.block == 0 && call.out_step == call.columns &&
      call.packed_step == (entry.four ? call.columns / 2 : call.columns) &&
      (!call.scales || call.scales_step == blocks) && !call.tensors.row_step && !call.tensors.block_step;
  const i64 rows = is_flat ? 1 : part.rows,
            columns = is_flat ? part.rows * part.columns : part.columns;  // one long row, or many
  bool usual = true;
  for (i64 i = part.row; i < part.row + rows; ++i) {
    const u8* codes = call.packed + i * call.packed_step + (entry.four ? part.column / 2 : part.column);
    const u8* scales = call.scales ? call.scales + i * call.scales_step + block : nullptr;
    char* out = static_cast<char*>(call.out) + (i * call.out_step + part.column) * itemsize;
    usual &= entry.rows[call.kind](codes, scales, columns, call.block, tables, call.tensors, i, block, out);
  }
  return usual;
}

// One unit of a fake quantizer: codes and scales into the thread's own memory, and what they are worth into values.out.
template <class In>
bool fake_part(const EncodeCall& call, const DecodeCall& values, const Part& part, const Tables* tables, Known known,
               const Multipliers* multipliers) {
  const i64 itemsize = sizeof(typename Input<In>::Bits),
            bytes = kDecodes[values.decoder].four ? part.columns / 2 : part.columns;
  const i64 blocks = part.columns / call.block;
  u8* codes = scratch<u8>(static_cast<size_t>(part.rows * (bytes + blocks)));
  u8* scales = call.rule < 0 ? nullptr : codes + part.rows * bytes;
  EncodeCall encode = call;
  encode.x.data = static_cast<const char*>(call.x.data) +
                  (part.row * call.x.row_step + part.column * call.x.column_step) * itemsize;
  encode.encode += part.row * call.tensor_step;
  encode.decode += part.row * call.tensor_step;
  encode.amax += part.row * call.tensor_step;
  encode.packed = codes;
  encode.scales = scales;
  encode.packed_step = bytes;
  encode.scales_step = blocks;
  const Part whole{0, part.rows, 0, part.columns};
  if (known.data) known.data += part.row / call.block_rows * known.step + part.column / call.block;
  if (!Encoder<In>{encode, known, multipliers}.unit(whole)) return false;
  DecodeCall decode = values;
  decode.packed = codes;
  decode.scales = scales;
  decode.packed_step = bytes;
  decode.scales_step = blocks;
  const TensorScales& t = values.tensors;
  decode.tensors = {t.encode + part.row * t.row_step, t.decode + part.row * t.row_step, t.amax + part.row * t.row_step,
                    t.row_step, 0};
  decode.out = static_cast<char*>(values.out) + (part.row * values.out_step + part.column) * itemsize;
  return decode_part(decode, whole, tables);
}

}  // namespace
