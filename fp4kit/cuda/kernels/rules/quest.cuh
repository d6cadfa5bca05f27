// The search "quest" of FP-Quant, which computes the amax of a block from the standard deviation of its elements
// instead of their largest magnitude. The functions give the same results as search_quest in
// reference/search.py. R is the recipe.
#pragma once

#include "block_rules_e8m0.cuh"
#include "summation_order.cuh"

constexpr float kQuestFactor = static_cast<float>(2.92247856 / 6), kQuestOffset = 1e-8f;

// Return QuEST's amax for a block of `count` elements: 2^(floor(log2(kQuestFactor * std + kQuestOffset)) + emax), where
// std is the standard deviation and emax the exponent of the largest element value. Return NaN if std is not finite.
// `sum` and `squares` are the sums of the elements and of their squares.
template <class R>
FP4KIT_DEVICE float quest_amax(float sum, float squares, float count) {
  const float mean = sum / count, square = squares / count;
  const float scale = kQuestFactor * sqrtf(square - mean * mean) + kQuestOffset;
  if (!is_finite(scale)) return nan_value();
  return float_of(static_cast<u32>(static_cast<i32>(floorf(float32_log2(scale))) + R::Element::kEmax + 127) << 23);
}
