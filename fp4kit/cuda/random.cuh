// Philox4x32-10 and the byte stream of stochastic rounding; the twin of reference/stochastic.py.
#pragma once

#include "types.cuh"

struct Words { u32 w[4]; };

FP4KIT_DEVICE u32 high_product(u32 a, u32 b) { return static_cast<u32>((static_cast<u64>(a) * b) >> 32); }

FP4KIT_DEVICE Words philox4x32_10(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u32 h0 = high_product(0xD2511F53u, c0), l0 = 0xD2511F53u * c0;
    const u32 h1 = high_product(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
    c0 = h1 ^ c1 ^ k0;
    c1 = l1;
    c2 = h0 ^ c3 ^ k1;
    c3 = l0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Bytes of elements 16 * group ... + 15: byte i is byte i % 4 of word i / 4.
FP4KIT_DEVICE Words stream_words(u64 seed, u64 group) {
  return philox4x32_10(static_cast<u32>(group), static_cast<u32>(group >> 32), 0u, 0u, static_cast<u32>(seed),
                       static_cast<u32>(seed >> 32));
}
