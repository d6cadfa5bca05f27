// The table of rules, which give the scales of blocks, and that of tensor rules.
#include "dispatch.h"

#include "recipes.inc"  // needs the types of dispatch.h

namespace {

template <class R, class In>  // one function for all inputs, where the rule does not ask for them
constexpr Scales scales_by() {
  using Kind = std::conditional_t<R::BlockRule::kReadsInput, In, Float32>;
  return {scale_codes<R, Kind>, scale_factors<R, Kind>};
}
template <class R>
constexpr Scales kScalesOf[kInputs] = {scales_by<R, Float32>(), scales_by<R, Float16>(), scales_by<R, Bfloat16>()};

template <class R, class In>
TensorScale tensor_scale(float amax) {
  return R::TensorRule::template scale<R, In>(amax);
}
template <class R>
constexpr Tensor kTensorOf[kInputs] = {tensor_scale<R, Float32>, tensor_scale<R, Float16>, tensor_scale<R, Bfloat16>};

constexpr RuleEntry kRuleEntries[] = {
#define FP4KIT_RULE(key, R) {key, kScalesOf<R>, nullptr, false, !R::BlockRule::kReadsAmax},
#define FP4KIT_CHOICE(key, R) {key, nullptr, choose_scales<R>, R::kFlush, false},
    FP4KIT_RULES FP4KIT_CHOICES};
constexpr TensorEntry kTensorEntries[] = {
#define FP4KIT_TENSOR(key, R) {key, kTensorOf<R>},
    FP4KIT_TENSORS};

}  // namespace

constexpr Table<RuleEntry> kRules = table_of(kRuleEntries);
constexpr Load kLoads[kInputs] = {put_magnitudes<Float32>, put_magnitudes<Float16>, put_magnitudes<Bfloat16>};
constexpr Table<TensorEntry> kTensors = table_of(kTensorEntries);
