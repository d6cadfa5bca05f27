// IF4: each block gets E2M1 or INT4 codes, whichever have the smaller error under one scale. four_over_six.h chooses
// between them; the candidate of 6 stands for E2M1, and that of 4 for INT4.
//
// Elements are first encoded as E2M1 in all blocks. Then the blocks with INT4 are encoded again.
#pragma once

#include "four_over_six.h"

// Encode one block of kBlockColumns finite elements of type In as INT4, and store the codes in `out`, two per byte, the
// first one in the low half. x holds the bits of the elements. Elements are multiplied by `factor` and then rounded.
template <class In>
static void encode_integers(const typename Input<In>::Bits* x, float factor, u8* out) {
  u8 codes[kBlockColumns];
  for (int i = 0; i < kBlockColumns; ++i) codes[i] = static_cast<u8>(int4_code(Input<In>::value(x[i]) * factor));
  for (int i = 0; i < kBlockColumns / 2; ++i) out[i] = static_cast<u8>(codes[2 * i] | codes[2 * i + 1] << 4);
}
