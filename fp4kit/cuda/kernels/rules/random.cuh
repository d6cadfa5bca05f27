// The random generator Philox4x32, the stream of random bytes for stochastic rounding, and the random words of Triton.
// The functions give the same results as reference/stochastic.py. Philox maps a counter of four words and a key of two
// words to four random words. A seed is used as the key, low word first.
#pragma once

#include "ptx.cuh"

// 128 random bits, in four words: one output of the generator.
struct Words {
  u32 w[4];
};

// Return the output of Philox4x32 with kRounds rounds for the counter (c0, c1, c2, c3) and the key (k0, k1).
template <int kRounds>
FP4KIT_DEVICE Words philox4x32(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
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
  return philox4x32<10>(static_cast<u32>(counter), static_cast<u32>(counter >> 32), 0u, 0u, static_cast<u32>(seed),
                        static_cast<u32>(seed >> 32));
}

// Return the word that Triton's tl.randint(seed, index, n_rounds=kRounds) gives: the first word of Philox4x32 for the
// counter (index, 0, 0, 0) and the two words of the seed as the key.
template <int kRounds>
FP4KIT_DEVICE u32 triton_word(u64 seed, u32 index) {
  return philox4x32<kRounds>(index, 0u, 0u, 0u, static_cast<u32>(seed), static_cast<u32>(seed >> 32)).w[0];
}
