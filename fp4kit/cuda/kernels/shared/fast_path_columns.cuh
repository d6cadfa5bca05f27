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
//   factors  2^-9 times the two powers of two as bfloat16, the left column's in the low half
FP4KIT_DEVICE void encode_columns_e2m1x8(const u32* rows, const u32* signs, u32 factors, u32 (&words)[2]) {
  u32 four[2];  // of rows 0 to 3 and of rows 4 to 7; bytes: left, right, left, right
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    u32 code[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) code[j] = code_pair_e2m1(rows[4 * i + j], factors);
    const u32 even = prmt(signs[4 * i], signs[4 * i + 2], 0xFDB9u),
              odd = prmt(signs[4 * i + 1], signs[4 * i + 3], 0xFDB9u);
    // Codes of a column that is not finite may exceed a nibble, so they are masked.
    const u32 codes =
        (prmt(code[0], code[2], 0x6420u) & 0x0F0F0F0Fu) | (prmt(code[1], code[3], 0x6420u) << 4 & 0xF0F0F0F0u);
    four[i] = or_masked(or_masked(codes, odd, 0x80808080u), even, 0x08080808u);
  }
  words[0] = prmt(four[0], four[1], 0x6420u);
  words[1] = prmt(four[0], four[1], 0x7531u);
}

// Multiply rows of two bfloat16 columns by a power of two per column (`factors`, see convert_pairs), and store the
// codes of the left column in words[0] and those of the right one in words[1], row 0 in the lowest bits: eight rows for
// E2M1, four for FP8. rows[i] holds the elements of row i with the signs of their codes, the left one in the low half.
template <class F>
FP4KIT_DEVICE void convert_columns(const u32* rows, u32 factors, u32 (&words)[2]) {
  if constexpr (F::kStoredBits == 4) {
    const u32 evens[4] = {rows[0], rows[2], rows[4], rows[6]}, odds[4] = {rows[1], rows[3], rows[5], rows[7]};
    const u32 even = convert_pairs<F>(evens, factors), odd = convert_pairs<F>(odds, factors);
    words[0] = (even & 0x0F0F0F0Fu) | (odd << 4 & 0xF0F0F0F0u);
    words[1] = (even >> 4 & 0x0F0F0F0Fu) | (odd & 0xF0F0F0F0u);
  } else {
    const u32 top = convert_pairs<F>(rows, factors), bottom = convert_pairs<F>(rows + 2, factors);
    words[0] = prmt(top, bottom, 0x6420u);
    words[1] = prmt(top, bottom, 0x7531u);
  }
}

// Store in words[j] the codes of the finite values of column j in the format F, the first code in the lowest bits:
// eight 4-bit codes, or four codes of one byte. FP8 codes of a row are converted together, which takes fewer registers.
template <class F, int kCount>
FP4KIT_DEVICE void encode_words(const float (&y)[2][kCount], u32 (&words)[2]) {
  if constexpr (FP4KIT_HAS_CVT_FP8 && (F::kIsE4m3 || F::kIsE5m2)) {
    const float top[4] = {y[0][0], y[1][0], y[0][1], y[1][1]}, bottom[4] = {y[0][2], y[1][2], y[0][3], y[1][3]};
    const u32 rows[2] = {encode_x4<F>(top), encode_x4<F>(bottom)};
    words[0] = prmt(rows[0], rows[1], 0x6420u);
    words[1] = prmt(rows[0], rows[1], 0x7531u);
  } else {
    words[0] = encode_word<F>(y[0]);
    words[1] = encode_word<F>(y[1]);
  }
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
      const u32 factors = prmt(bits_of(f[0].value * Path::kPairScale), bits_of(f[1].value * Path::kPairScale), 0x7632u);
      u32 two[2];
      if constexpr (Path::kConvertsPairs)
        convert_columns<typename R::Element>(pairs, factors, two);
      else
        encode_columns_e2m1x8(rows + w * kPerWord, pairs, factors, two);
      words[0][w] = with_signs_of_codes<R>(two[0]);
      words[1][w] = with_signs_of_codes<R>(two[1]);
    } else if constexpr (Path::kE2m1 && !FP4KIT_HAS_CVT_E2M1) {
      u32 signs[2];
      nibble_signs_of_columns(pairs, signs);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float a[kPerWord];
#pragma unroll
        for (int i = 0; i < kPerWord; ++i)
          a[i] = scaled_finite<R, In>(fabsf(element(Run<In, 2>{{rows[w * kPerWord + i]}}, j)), f[j]);
        words[j][w] = with_signs_of_codes<R>(encode_e2m1x8<Path::kClamp>(a, signs[j] & 0x88888888u));
      }
    } else {
      float y[2][kPerWord];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < kPerWord; ++i)
          y[j][i] = element(Run<In, 2>{{kSignsByPairs<R, In> ? pairs[i] : rows[w * kPerWord + i]}}, j);
        scale_with_signs<R, In, false>(y[j], f[j]);
      }
      u32 two[2];
      encode_words<typename R::Element>(y, two);
      words[0][w] = with_signs_of_codes<R>(two[0]);
      words[1][w] = with_signs_of_codes<R>(two[1]);
    }
  }
}
