// This file defines the tables of block rules (the scale codes and factors of blocks) and of tensor rules (the tensor
// scale of a matrix). They have one entry for each rule that the recipes of recipes.inc need. R: a struct of
// recipes.inc with the rule and the formats of a recipe. In: the type of the elements. Base: a block rule from which
// others inherit the function `factor`.
#include "dispatch.h"

#include "recipes.inc"  // needs the types of dispatch.h

namespace {

// The structs R of the entries of recipes.inc, except those of 4over6.
template <class ElementFormat, class ScaleFormat, class Rule, int kMaxScale, bool kKeepsInfinity, bool kPropagatesNan>
struct BlockRuleOf {
  using Element = ElementFormat;
  using Scale = ScaleFormat;
  using BlockRule = Rule;
  static constexpr int kScaleMax = kMaxScale;
  static constexpr bool kKeepInfinity = kKeepsInfinity, kPropagateNan = kPropagatesNan;
};
template <class ElementFormat, class Rule, int kMaxScale>
struct TensorRuleOf {
  using Element = ElementFormat;
  using TensorRule = Rule;
  static constexpr int kScaleMax = kMaxScale;
};

// A stand-in for all recipes whose block rules inherit the function `factor` from Base. Thus they share one compiled
// function, because Base::factor reads nothing else of a recipe.
template <class Base>
struct FactorsOf {
  using BlockRule = Base;
};
// Return true if the block rule of the recipe R inherits from Base and does not replace Base's function `factor`, which
// computes factors.
template <class R, class Base>
constexpr bool uses_factor_of() {
  if constexpr (std::is_base_of_v<Base, typename R::BlockRule>)
    return std::is_same_v<Function<&R::BlockRule::template factor<R, Float32>>,
                          Function<&Base::template factor<R, Float32>>>;
  return false;
}

// Return the two functions that compute the scale codes and the factors of blocks by the block rule of the recipe R,
// for elements of type In. If the rule does not depend on the input type, all types get the same functions. Rules that
// inherit `factor` from inverse_factor or finite_inverse share one function of factors among all recipes.
template <class R, class In>
constexpr BlockScales block_scales() {
  using Kind = std::conditional_t<R::BlockRule::kReadsInput, In, Float32>;
  if constexpr (uses_factor_of<R, inverse_factor>())
    return {scale_codes<R, Kind>, scale_factors<FactorsOf<inverse_factor>, Float32>};
  else if constexpr (uses_factor_of<R, finite_inverse>())
    return {scale_codes<R, Kind>, scale_factors<FactorsOf<finite_inverse>, Float32>};
  else
    return {scale_codes<R, Kind>, scale_factors<R, Kind>};
}
template <class R>
constexpr BlockScales kBlockScales[kInputs] = {block_scales<R, Float32>(), block_scales<R, Float16>(),
                                               block_scales<R, Bfloat16>()};

// Return the tensor scale (encode scale, decode scale and amax) that the tensor rule of the recipe R computes from a
// tensor amax, for elements of type In.
template <class R, class In>
TensorScale tensor_scale(float amax) {
  return R::TensorRule::template scale<R, In>(amax);
}
template <class R>
constexpr TensorScaleFunction kTensorScale[kInputs] = {tensor_scale<R, Float32>, tensor_scale<R, Float16>,
                                                       tensor_scale<R, Bfloat16>};

template <class R>
constexpr WholeRule kWholeRule = {{encode_hif4<R, Float32>, encode_hif4<R, Float16>, encode_hif4<R, Bfloat16>},
                                  R::Element::kStoredBits == 4,
                                  kHif4ScaleBytes};

constexpr BlockRuleEntry kBlockRuleEntries[] = {
#define FP4KIT_BLOCK_RULE(key, ...) \
  {key, kBlockScales<__VA_ARGS__>, nullptr, nullptr, !__VA_ARGS__::BlockRule::kReadsAmax, false},
#define FP4KIT_FOUR_OVER_SIX_RULE(key, R) {key, nullptr, choose_scales<R>, clears<R>, false, kHasTwoFormats<R>},
#define FP4KIT_WHOLE_RULE(key, R) {key, nullptr, nullptr, nullptr, false, false, &kWholeRule<R>},
    FP4KIT_BLOCK_RULES FP4KIT_FOUR_OVER_SIX_RULES FP4KIT_WHOLE_RULES};
constexpr TensorRuleEntry kTensorRuleEntries[] = {
#define FP4KIT_TENSOR_RULE(key, ...) {key, kTensorScale<__VA_ARGS__>},
    FP4KIT_TENSOR_RULES};

}  // namespace

constexpr Table<BlockRuleEntry> kBlockRules = table_of(kBlockRuleEntries);
constexpr LoadMagnitudesFunction kLoadMagnitudes[kInputs] = {load_magnitudes<Float32>, load_magnitudes<Float16>,
                                                             load_magnitudes<Bfloat16>};
constexpr Table<TensorRuleEntry> kTensorRules = table_of(kTensorRuleEntries);
