// The fast path (fast_path.cuh), which encodes blocks of finite elements in few instructions, for two neighboring
// columns of 16-bit elements. A word of a row holds one element of each column. The columns are separated only after
// encoding. R is the recipe, and In is the type of the elements. The factor of a column (Factor) is the number by which
// its elements are multiplied or divided before rounding.
#pragma once

#include "fast_path.cuh"

// Store the sign bits of eight rows of two columns: those of the left column in signs[0], and those of the right column
// in signs[1]. rows[i] holds the two 16-bit elements of row i, the left one in the low half. The sign of row i is at
// bit 4 i + 3, where a 4-bit code has its sign. All other bits are undefined.
FP4KIT_DEVICE void nibble_signs_of_columns(const u32* rows, u32 (&signs)[2]) {
  u32 four[2];  // of rows 0 2 and of rows 1 3; two bytes of the left column, two of the right one
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 even = prmt(rows[4 * i], rows[4 * i + 2], 0xFBD9u), odd = prmt(rows[4 * i + 1], rows[4 * i + 3], 0xFBD9u);
    four[i] = (even & 0x0F0F0F0Fu) | (odd & 0xF0F0F0F0u);
  }
  signs[0] = prmt(four[0], four[1], 0x5410u);
  signs[1] = prmt(four[0], four[1], 0x7632u);
}

// Multiply the magnitudes of eight rows of two bfloat16 columns by a power of two per column, and encode them as E2M1,
// rounded to nearest even and saturated. Store the codes of the left column in words[0] and those of the right column
// in words[1], row i at bit 4 i.
//   rows     rows[i] holds the two elements of row i, the left one in the low half
//   signs    signs[i] holds, in the sign bits of its halves, the signs of the codes of row i
//   factors  the two powers of two as bfloat16, the left column's in the low half
FP4KIT_DEVICE void encode_columns_e2m1x8(const u32* rows, const u32* signs, u32 factors, u32 (&words)[2]) {
  u32 four[2];  // of rows 0 to 3 and of rows 4 to 7; bytes: left, right, left, right
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    u32 code[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) code[j] = code_pair_e2m1(rows[4 * i + j], factors);
    const u32 codes = mad(prmt(code[1], code[3], 0x6420u), 16u, prmt(code[0], code[2], 0x6420u));
    const u32 even = prmt(signs[4 * i], signs[4 * i + 2], 0xFDB9u),
              odd = prmt(signs[4 * i + 1], signs[4 * i + 3], 0xFDB9u);
    four[i] = codes | (((even & 0x0F0F0F0Fu) | (odd & 0xF0F0F0F0u)) & 0x88888888u);
  }
  words[0] = prmt(four[0], four[1], 0x6420u);
  words[1] = prmt(four[0], four[1], 0x7531u);
}

// Encode two columns of 16-bit elements, and pack the codes of column j into words[j], the first code in the lowest
// bits. rows[i] holds the two elements of row i, the left one in the low half. f[j] is the factor of column j. If
// takes_fast_path is true for a column, its codes equal those of exact_codes; otherwise they have no meaning.
template <class R, class In, int kRows>
FP4KIT_DEVICE void encode_columns(const u32 (&rows)[kRows], const Factor (&f)[2],
                                  u32 (&words)[2][kRows * R::Element::kStoredBits / 32]) {
  using Path = FastPath<R, In>;
  constexpr int kPerWord = 32 / R::Element::kStoredBits;
#pragma unroll
  for (int w = 0; w < kRows / kPerWord; ++w) {
    u32 pairs[kPerWord];
#pragma unroll
    for (int i = 0; i < kPerWord; ++i) pairs[i] = pair_with_code_signs<R, In>(rows[w * kPerWord + i]);
    if constexpr (Path::kByPairs) {
      u32 two[2];
      encode_columns_e2m1x8(rows + w * kPerWord, pairs, prmt(bits_of(f[0].value), bits_of(f[1].value), 0x7632u), two);
      words[0][w] = with_signs_of_codes<R>(two[0]);
      words[1][w] = with_signs_of_codes<R>(two[1]);
    } else {
      u32 signs[2];
      if constexpr (Path::kE2m1) nibble_signs_of_columns(pairs, signs);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float y[kPerWord];
#pragma unroll
        for (int i = 0; i < kPerWord; ++i) {
          const float x = element(Run<In, 2>{{rows[w * kPerWord + i]}}, j);
          if constexpr (Path::kE2m1 && !FP4KIT_HAS_CVT_E2M1)
            y[i] = scaled_finite<R, In>(fabsf(x), f[j]);
          else
            y[i] = with_code_sign_of<R>(scaled_finite<R, In>(x, f[j]), x);
        }
        u32 word;
        if constexpr (Path::kE2m1 && !FP4KIT_HAS_CVT_E2M1)
          word = encode_e2m1x8<Path::kClamp>(y, signs[j] & 0x88888888u);
        else
          word = encode_word<typename R::Element>(y);
        words[j][w] = with_signs_of_codes<R>(word);
      }
    }
  }
}
