// Blocks in a column: functions that encode patches (16 rows of 8 bytes in one thread's registers), and store the codes
// in the staging buffer in shared memory. R is the recipe, In is the type of the elements, and P is PatchTraits<R, In>:
// the sizes of patches and tiles. A Factor is the number by which the elements of a block are multiplied or divided
// before rounding. The fast path is for blocks of finite elements; the exact path is for all other blocks.
#pragma once

#include "fast_path_columns.cuh"
#include "hadamard.cuh"
#include "patch_staging.cuh"
#include "transpose_square.cuh"

// For each column j of a patch, store in largest[j] the float32 bits of the largest magnitude of the whole block in
// that column, also of its parts in other patches. If an element of the block is NaN, these are the bits of a NaN. The
// threads that hold the patches of one block combine their maxima, and all get the result. All threads of the warp must
// call this function.
template <class In, class P>
FP4KIT_DEVICE void column_maxima(const Run<In, P::kPatchColumns> (&x)[P::kPatchRows],
                                 u32 (&largest)[P::kPatchColumns]) {
  constexpr int kWords = Run<In, P::kPatchColumns>::kWords;
#pragma unroll
  for (int k = 0; k < kWords; ++k) {
    if constexpr (sizeof(typename In::Bits) == 4) {
      u32 word = 0u;
#pragma unroll
      for (int i = 0; i < P::kPatchRows; ++i) word = maximum(word, x[i].w[k] & 0x7FFFFFFFu);
      largest[k] = largest_of_lanes(word, P::kPatchesAcross, 32);
    } else {
      u32 pair = In::max_magnitude(x[0].w[k], x[1].w[k]);
#pragma unroll
      for (int i = 2; i < P::kPatchRows; ++i) pair = In::max_magnitude(pair, x[i].w[k]);
#pragma unroll
      for (int lane = P::kPatchesAcross; lane < 32; lane *= 2)
        pair = In::max_magnitude(pair, __shfl_xor_sync(0xFFFFFFFFu, pair, lane));
      largest[2 * k] = bits_of(In::widen(static_cast<u16>(pair & 0x7FFFu)));
      largest[2 * k + 1] = bits_of(In::widen(static_cast<u16>(pair >> 16 & 0x7FFFu)));
    }
  }
}

// Apply the Hadamard transform in place to each column of a patch, which is one block of 16. Store the float32 bits of
// each column's largest magnitude in `largest`. Return a bit mask of the columns whose float32 sums are not conclusive
// (see hadamard.cuh). The results of these columns may be wrong. For float32 elements, the mask is always 0.
template <class R, class In, class P>
FP4KIT_DEVICE u32 transform_columns(Run<In, P::kPatchColumns> (&x)[P::kPatchRows], u32 (&largest)[P::kPatchColumns]) {
  constexpr int kWords = Run<In, P::kPatchColumns>::kWords;
  u32 inconclusive = 0u;
#pragma unroll
  for (int k = 0; k < kWords; ++k) {
    Run<In, P::kPatchRows * Run<In, 16>::kPerWord> all;
    u32(&rows)[P::kPatchRows] = all.w;
#pragma unroll
    for (int i = 0; i < P::kPatchRows; ++i) rows[i] = x[i].w[k];
    if constexpr (sizeof(typename In::Bits) == 4) {
      largest[k] = hadamard_run<R::kSignMask>(all);
    } else {
      u32 two;
      const u32 pair = hadamard_columns<R::kSignMask, In>(rows, two);
      inconclusive |= two << (2 * k);
      largest[2 * k] = bits_of(In::widen(static_cast<u16>(pair & 0x7FFFu)));
      largest[2 * k + 1] = bits_of(In::widen(static_cast<u16>(pair >> 16 & 0x7FFFu)));
    }
#pragma unroll
    for (int i = 0; i < P::kPatchRows; ++i) x[i].w[k] = rows[i];
  }
  return inconclusive;
}

// Store in y the Hadamard transform of the 16 elements x[0], x[step], ..., x[15 step], with the signs R::kSignMask (see
// hadamard.cuh). Unlike the result of transform_columns, this result always has the right bits. x is not changed.
template <class R, class In>
FP4KIT_DEVICE void transform_column(const typename In::Bits* x, i64 step, typename In::Bits (&y)[16]) {
  typename In::Bits column[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) column[i] = x[i * step];
  Run<In, 16> run = read_run<In, 16, false>(column);
  hadamard_run<R::kSignMask>(run);
#pragma unroll
  for (int i = 0; i < 16; ++i) y[i] = In::narrow(element(run, i));
}

// Encode all columns of a patch by the fast path, and store the codes of column j in words[j], from top to bottom, the
// first code in the lowest bits. f[j] is the factor of its block. The codes of columns that must not take the fast path
// are wrong, and the caller replaces them.
template <class R, class In, class P>
FP4KIT_DEVICE void encode_patch_columns(const Run<In, P::kPatchColumns> (&x)[P::kPatchRows],
                                        const Factor (&f)[P::kPatchColumns],
                                        u32 (&words)[P::kPatchColumns][P::kWords]) {
#pragma unroll
  for (int k = 0; k < Run<In, P::kPatchColumns>::kWords; ++k) {
    u32 rows[P::kPatchRows];
#pragma unroll
    for (int i = 0; i < P::kPatchRows; ++i) rows[i] = x[i].w[k];
    if constexpr (sizeof(typename In::Bits) == 4) {
      Run<In, P::kPatchRows> column;
#pragma unroll
      for (int i = 0; i < P::kPatchRows; ++i) column.w[i] = rows[i];
      encode_finite<R, In>(column, f[k], words[k]);
    } else {
      const Factor two[2] = {f[2 * k], f[2 * k + 1]};
      u32 codes[2][P::kWords];
      encode_columns<R, In>(rows, two, codes);
#pragma unroll
      for (int w = 0; w < P::kWords; ++w) {
        words[2 * k][w] = codes[0][w];
        words[2 * k + 1][w] = codes[1][w];
      }
    }
  }
}

// Encode one column of a patch by the exact path: store its codes in `words`, and return the scale code of its block.
//   x      the address of the column's first element in the input, `above` rows below the first row of its block
//   step   the distance of neighboring rows in elements
//   t      the tensor scale
//   table  the Factors by scale code, for scale_block
// If R::kHadamard, the elements are transformed first; the input is not changed. The loops are not unrolled, because
// this case is rare.
template <class R, class In, class P>
FP4KIT_DEVICE u32 encode_any_column(const typename In::Bits* x, int above, i64 step, TensorScale t, const Factor* table,
                                    u32 (&words)[P::kWords]) {
  Factor f;
  if constexpr (!R::kHadamard) {
    const u32 code = scale_block<R, In>(amax_of_block<R, In>(x - above * step, 1, 0, step), t, table, f);
    encode_any<R, In, P::kPatchRows>(x, step, f, words);
    return code;
  } else {
    typename In::Bits transformed[16];
    transform_column<R, In>(x, step, transformed);
    const u32 code = scale_block<R, In>(amax_of_block<R, In>(transformed, 1, 0, 1), t, table, f);
    encode_any<R, In, P::kPatchRows>(transformed, 1, f, words);
    return code;
  }
}

// Quantize a patch at position s whose blocks lie in columns, and store the codes and scales in the staging buffer. A
// block's scale is stored by the thread with the first rows of the block. x holds the elements of the patch; if
// R::kHadamard, their transform replaces them. t is the tensor scale, and `table` holds the Factors by scale code, for
// scale_block. Columns that must not take the fast path are loaded again and encoded by the exact path. All threads of
// the warp must call this function. Fast is the FastRecipe.
template <class R, class In, class P, class Fast>
FP4KIT_DEVICE void quantize_column_blocks(const PatchArguments& a, const PatchPosition& s,
                                          Run<In, P::kPatchColumns> (&x)[P::kPatchRows], TensorScale t,
                                          const Factor* table, Staging<P>& staging) {
  u32 largest[P::kPatchColumns], pending = 0u, codes = 0u, words[P::kPatchColumns][P::kWords] = {};
  Factor f[P::kPatchColumns];
  if constexpr (R::kHadamard) {
    pending = transform_columns<R, In, P>(x, largest);
  } else {
    column_maxima<In, P>(x, largest);
  }
#pragma unroll
  for (int j = 0; j < P::kPatchColumns; ++j) {
    const u32 code = scale_block<R, In>(float_of(largest[j]), t, table, f[j]);
    codes |= code << (8 * j);
    f[j] = Fast::factor(f[j]);
    if (!FastPath<R, In>::kExists || !takes_fast_path<typename Fast::Type, In>(largest[j], f[j])) pending |= 1u << j;
  }
  if constexpr (FastPath<R, In>::kExists) encode_patch_columns<typename Fast::Type, In, P>(x, f, words);
#pragma unroll
  for (int w = 0; w < P::kWords; ++w) {
    u32 row[P::kPatchColumns];
#pragma unroll
    for (int j = 0; j < P::kPatchColumns; ++j) row[j] = words[j][w];
    stage_words<P>(staging, s, w, row);
  }
  u8* scales = &staging.scales[s.tile_row / R::kBlock][s.tile_column];
  if (s.tile_row % R::kBlock == 0) {
    if constexpr (P::kPatchColumns == 4) *reinterpret_cast<u32*>(scales) = codes;
    if constexpr (P::kPatchColumns == 2) *reinterpret_cast<u16*>(scales) = static_cast<u16>(codes);
  }
  // Without the vote, NVRTC 12.9 and 13.0 join the tests of the columns with that of the rows, and invert one of them.
  if (!__any_sync(0xFFFFFFFFu, pending != 0u) || rows_inside(a, s) <= 0) return;
#pragma unroll 1
  for (int j = 0; pending >> j; ++j) {
    if (!(pending >> j & 1u)) continue;
    u32 column[P::kWords];
    const u32 code =
        encode_any_column<R, In, P>(first_element<In>(a, s) + j, s.row % R::kBlock, a.columns, t, table, column);
    stage_column<P>(staging, s, j, column);
    if (s.tile_row % R::kBlock == 0) scales[j] = static_cast<u8>(code);
  }
}
