// The arithmetic that all kernels for rotations of blocks use.
#pragma once

#include "codec.cuh"

// Round the result `value` to the Input type and return its bits, as they are stored. NaN becomes the positive quiet
// NaN.
template <class Input>
FP4KIT_DEVICE typename Input::Bits stored_rotation(float value) {
  if constexpr (sizeof(typename Input::Bits) == 4) {
    return is_nan(value) ? nan_value() : value;
  } else {
    return is_nan(value) ? static_cast<u16>(Input::kIsBfloat16 ? 0x7FC0u : 0x7E00u) : Input::narrow(value);
  }
}
