// Functions that transpose a square of codes in registers: 4 x 4 bytes or 8 x 8 nibbles. Each word w[r] is a row of the
// square; its bytes or nibbles are numbered from the low end.
#pragma once

#include "ptx.cuh"

// Transpose 4 x 4 bytes in place: move byte c of word r to byte r of word c.
FP4KIT_DEVICE void transpose_square(u32 (&w)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 a = w[i], b = w[i + 2];
    w[i] = prmt(a, b, 0x5410u);
    w[i + 2] = prmt(a, b, 0x7632u);
  }
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 a = w[i], b = w[i + 1];
    w[i] = prmt(a, b, 0x6240u);
    w[i + 1] = prmt(a, b, 0x7351u);
  }
}

// Transpose 8 x 8 nibbles in place: move nibble c of word r to nibble r of word c.
FP4KIT_DEVICE void transpose_square(u32 (&w)[8]) {
  u32 even[4], odd[4];  // rows; after transposing their bytes, word c has nibbles 2 c and 2 c + 1 of each row
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    even[i] = w[2 * i];
    odd[i] = w[2 * i + 1];
  }
  transpose_square(even);
  transpose_square(odd);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    w[2 * i] = (even[i] & 0x0F0F0F0Fu) | (odd[i] << 4 & 0xF0F0F0F0u);
    w[2 * i + 1] = (even[i] >> 4 & 0x0F0F0F0Fu) | (odd[i] & 0xF0F0F0F0u);
  }
}
