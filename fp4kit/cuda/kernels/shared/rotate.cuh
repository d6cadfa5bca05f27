// The arithmetic that all kernels for rotations of blocks use. Input is the type of the elements (Float32, Float16 or
// Bfloat16).
#pragma once

#include "codec.cuh"

// Return the result `value` of a rotation as it is stored: rounded to nearest even in the type Input, as bits (a float
// for Float32). NaN of any kind becomes the positive quiet NaN without payload.
template <class Input>
FP4KIT_DEVICE typename Input::Bits stored_rotation(float value) {
  if constexpr (sizeof(typename Input::Bits) == 4) {
    return is_nan(value) ? nan_value() : value;
  } else {
    return is_nan(value) ? static_cast<u16>(Input::kIsBfloat16 ? 0x7FC0u : 0x7E00u) : Input::narrow(value);
  }
}
