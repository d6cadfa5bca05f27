// The recipe IF4: each block gets E2M1 or INT4 codes, whichever have the smaller error under one scale. Elements are
// first encoded as E2M1 in all blocks; then the function of this file encodes the blocks with INT4 again.
// four_over_six.h chooses between the two formats; its candidate of 6 stands for E2M1, and that of 4 for INT4.
#pragma once

#include "four_over_six.h"

// Encode one block of kBlockColumns = 16 finite elements of type In as INT4, and store the codes in `out`, two per
// byte, the first one in the low half. x holds the bits of the elements. Elements are multiplied by `factor` and
// rounded by int4_code.
template <class In>
static void encode_integers(const typename Input<In>::Bits* x, float factor, u8* out) {
  u8 codes[kBlockColumns];
  for (int i = 0; i < kBlockColumns; ++i) codes[i] = static_cast<u8>(int4_code(Input<In>::value(x[i]) * factor));
  for (int i = 0; i < kBlockColumns / 2; ++i) out[i] = static_cast<u8>(codes[2 * i] | codes[2 * i + 1] << 4);
}
