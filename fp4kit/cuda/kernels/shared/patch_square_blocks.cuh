// Square blocks (16x16, 32x32), whose codes and scales along rows and along columns are equal. A thread encodes a patch
// of 8 x 8 elements, and transposes its codes for the columns. R is the recipe, In is the type of the elements, and P
// is PatchTraits<R, In>: the sizes of patches and tiles. `a` holds the arguments of the kernel, s is the position of a
// patch in its tile and in the matrix, and f is the factor of a block, by which its elements are multiplied or divided
// before rounding. The staging buffer (`staging`) is shared memory for the codes and scales along columns.
#pragma once

#include "patch_staging.cuh"
#include "transpose_square.cuh"

// Return the address in a.packed of the code of the first element of a patch, whose position is s. Codes of the patch's
// next row begin row_bytes later.
template <class P>
FP4KIT_DEVICE u8* first_codes(const PatchArguments& a, const PatchPosition& s) {
  return advanced(a.packed, row_bytes<P>(a), s.row) + s.column / 8 * P::kBits;
}

// Store `code`, the scale code of a block, in a.scales, once per row of the block. The lanes that hold the patches of a
// block divide these rows among them. `inside` is the result of rows_inside; rows outside of the matrix are left out.
template <class R, class P>
FP4KIT_DEVICE void store_scales(const PatchArguments& a, const PatchPosition& s, int inside, u32 code) {
  constexpr int kRows = P::kPatchRows / P::kPatchesPerBlock;  // rows per lane
  const u32 blocks = static_cast<u32>(a.columns) / R::kBlock, block = static_cast<u32>(s.column) / R::kBlock;
  const int first = s.column / P::kPatchColumns % P::kPatchesPerBlock * kRows;
  u8* out = a.scales + scale_offset<R::kLayout, u32>(s.row + first, block, blocks);
#pragma unroll
  for (int i = 0; i < kRows; ++i, out += opaque(scale_row_step<R::kLayout, u32>(blocks)))
    if (first + i < inside) *out = static_cast<u8>(code);
}

// Quantize and dequantize a patch at position s: store in a.values the values to which its codes decode. Rows outside
// of the matrix are left out. x holds the elements of the patch. If is_fast, the fast path rounds them; otherwise the
// exact path loads them again from a.x. f is the factor of the block, and `scale` is its Scale, by which codes are
// decoded (decode_rules.cuh).
template <class R, class In, bool kAligned, class P>
FP4KIT_DEVICE void round_patch(const PatchArguments& a, const PatchPosition& s,
                               const Run<In, P::kPatchColumns> (&x)[P::kPatchRows], bool is_fast, Factor f,
                               typename R::DecodeRule::Scale scale) {
  const typename In::Bits* from = first_element<In>(a, s);
  typename In::Bits* y =
      static_cast<typename In::Bits*>(a.values) + (from - static_cast<const typename In::Bits*>(a.x));
  if (is_fast) {
#pragma unroll
    for (int i = 0; i < P::kPatchRows; ++i, y += a.columns) {
      float values[P::kPatchColumns];
      round_finite<R, In>(x[i], f, scale, values);
      if (s.row + i < a.rows) store_run<In, P::kPatchColumns, kAligned>(y, values);
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < P::kPatchRows * P::kPatchColumns && s.row + i / P::kPatchColumns < a.rows; ++i) {
    const i64 offset = i / P::kPatchColumns * a.columns + i % P::kPatchColumns;
    y[offset] = In::narrow(exact_value<R>(exact_code<R, In>(widen_exactly<R, In>(from[offset]), f, 0u), scale));
  }
}

// Encode a patch at position s by the exact path: load its elements again, and encode them by rows and then by columns.
// f is the factor of the block. Codes along rows are stored in a.packed, and codes along columns in the staging buffer.
// A direction whose output is nullptr (a.packed or a.column_packed) is left out.
template <class R, class In, class P>
FP4KIT_DEVICE void encode_patch(const PatchArguments& a, const PatchPosition& s, Factor f, Staging<P>& staging) {
  const typename In::Bits* x = first_element<In>(a, s);
#pragma unroll 1
  for (int i = 0; a.packed && i < P::kPatchRows && s.row + i < a.rows; ++i) {
    u32 words[P::kRowWords];
    encode_any<R, In, P::kPatchColumns>(x + i * a.columns, 1, f, words);
    store_words(advanced(first_codes<P>(a, s), row_bytes<P>(a), i), words);
  }
#pragma unroll 1
  for (int j = 0; a.column_packed && j < P::kPatchColumns; ++j) {
    u32 words[P::kWords];
    encode_any<R, In, P::kPatchRows>(x + j, a.columns, f, words);
    stage_column<P>(staging, s, j, words);
  }
}

// Transpose the codes of a patch at position s, and store them in the staging buffer along columns. codes[i] holds the
// codes of row i of the patch, the first one in the lowest bits; it is not changed.
template <class P>
FP4KIT_DEVICE void stage_transposed(Staging<P>& staging, const PatchPosition& s,
                                    const u32 (&codes)[P::kPatchRows][P::kRowWords]) {
#pragma unroll
  for (int w = 0; w < P::kWords; ++w) {
    u32 words[P::kPatchColumns];
#pragma unroll
    for (int part = 0; part < P::kRowWords; ++part) {
      u32 square[P::kPerWord];  // 8 words of nibbles or 4 words of bytes
#pragma unroll
      for (int i = 0; i < P::kPerWord; ++i) square[i] = codes[w * P::kPerWord + i][part];
      transpose_square(square);
#pragma unroll
      for (int i = 0; i < P::kPerWord; ++i) words[part * P::kPerWord + i] = square[i];
    }
    stage_words<P>(staging, s, w, words);
  }
}

// Return the elements of all rows of a patch as one run, row after row.
template <class In, int kPatchColumns, int kPatchRows>
FP4KIT_DEVICE Run<In, kPatchColumns * kPatchRows> concatenated(const Run<In, kPatchColumns> (&x)[kPatchRows]) {
  constexpr int kWords = Run<In, kPatchColumns>::kWords;
  Run<In, kPatchColumns * kPatchRows> all;
#pragma unroll
  for (int i = 0; i < kPatchRows * kWords; ++i) all.w[i] = x[i / kWords].w[i % kWords];
  return all;
}

// Quantize a patch of a square block at position s. x holds its elements, and t is the tensor scale.
//   along rows     codes are stored in a.packed, and scales in a.scales, unless a.packed is nullptr
//   along columns  codes and scales are stored in the staging buffer, unless a.column_packed is nullptr
//   R::kFake       only the values are stored, in a.values
// Do nothing if the patch is outside of the matrix. All threads of a warp must call this function.
template <class R, class In, bool kAligned, class P>
FP4KIT_DEVICE void quantize_square(const PatchArguments& a, const PatchPosition& s,
                                   const Run<In, P::kPatchColumns> (&x)[P::kPatchRows], TensorScale t,
                                   Staging<P>& staging) {
  const u32 own = largest_bits_of(concatenated(x)),
            largest = largest_of_lanes(largest_of_lanes(own, 1, P::kPatchesPerBlock), P::kPatchesAcross, 32);
  const int inside = rows_inside(a, s);
  if (inside <= 0) return;
  Factor f;
  float amax = float_of(largest);
  if (largest >= kInfinityBits) {
    const i64 top = s.row / R::kBlockRows * R::kBlockRows, pending = s.column / R::kBlock * R::kBlock;
    const int rows = static_cast<int>(minimum<i64>(R::kBlockRows, a.rows - top));
    amax = amax_of_block<R, In>(static_cast<const typename In::Bits*>(a.x) + top * a.columns + pending, rows, a.columns,
                                1);
  }
  const u32 code = scale_block<R, In>(amax, t, nullptr, f);
  const bool is_fast = FastPath<R, In>::kExists && takes_fast_path<R, In>(largest, f);
  if constexpr (R::kFake) {
    return round_patch<R, In, kAligned, P>(a, s, x, is_fast, f, R::DecodeRule::template scale<R>(code, t));
  } else {
    if (a.column_packed && s.tile_row % R::kBlock == 0) {
      const u32 eight[2] = {code * 0x01010101u, code * 0x01010101u};
      store_words(&staging.scales[s.tile_row / R::kBlock][s.tile_column], eight);
    }
    if (a.packed) store_scales<R, P>(a, s, inside, code);
    if (!is_fast) return encode_patch<R, In, P>(a, s, f, staging);
    u32 words[P::kPatchRows][P::kRowWords];
#pragma unroll
    for (int i = 0; i < P::kPatchRows; ++i) encode_finite<R, In>(x[i], f, words[i]);
    if (a.packed) {
      u8* out = first_codes<P>(a, s);
#pragma unroll
      for (int i = 0; i < P::kPatchRows; ++i, out += opaque(row_bytes<P>(a)))
        if (i < inside) store_words(out, words[i]);
    }
    if (a.column_packed) stage_transposed<P>(staging, s, words);
  }
}
