// The random generator Philox4x32-10, and the stream of random bytes for stochastic rounding. The functions give the
// same results as reference/stochastic.py.
#pragma once

#include "ptx.cuh"

// 128 random bits of the stream, which the generator produces at a time.
struct Words {
  u32 w[4];
};

// Return the output of Philox4x32-10 for counter (c0, c1, c2, c3) and key (k0, k1).
FP4KIT_DEVICE Words philox4x32_10(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u64 p0 = mul_wide(c0, 0xD2511F53u), p1 = mul_wide(c2, 0xCD9E8D57u);
    c0 = static_cast<u32>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<u32>(p1);
    c2 = static_cast<u32>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<u32>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Return the random bytes of elements 16 * counter ... 16 * counter + 15 of the stream with this seed. Byte i % 4 of
// word i / 4 belongs to element 16 * counter + i.
FP4KIT_DEVICE Words stream_words(u64 seed, u64 counter) {
  return philox4x32_10(static_cast<u32>(counter), static_cast<u32>(counter >> 32), 0u, 0u, static_cast<u32>(seed),
                       static_cast<u32>(seed >> 32));
}
