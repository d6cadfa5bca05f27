// Rotations of blocks along an axis: Hadamard transforms, and products with given matrices. A call rotates an array of
// outer x length x inner elements; blocks of `size` elements lie along the middle axis.
//   lane           one of kLanes = 16 blocks that are rotated together
//   group          up to kLanes blocks, one per lane, at one position along the middle axis. They are stored by
//                  element, as y[element][lane], so loops over blocks are vectors
//   task           some groups, which one thread rotates
//   In             the type of the elements
//   element signs  the call may negate some elements, before the rotation or, if the call is inverse, after it
//
// The results have the bits of reference/stochastic.py.
#pragma once

#include "four_over_six.h"
#include "tiles.h"

// The arguments of fp4kit_rotate. cpu/library.py mirrors this struct.
//   x, out       outer x length x inner elements, contiguous; blocks of `size` elements lie along the middle axis
//   signs        one byte per position along the middle axis: 1 for the sign -1, else 0; nullptr without signs
//   matrices     size x size float32 each, applied as out_j = sum_i x_i M_ij; nullptr for a Hadamard transform
//   matrix_step  the distance of the matrices of neighboring blocks; 0 if all blocks have one matrix
//   factor       the factor by which all results are multiplied
//   input        type of the elements, as an InputKind
//   is_inverse   1 if the signs apply to the results, 0 if they apply to x
//   threads      largest number of threads to use
struct RotateCall {
  const void* x;
  void* out;
  const u8* signs;
  const float* matrices;
  i64 outer, length, inner, matrix_step;
  float factor;
  i32 input, size, is_inverse, threads;
};

namespace {

// Store kLanes floats at the address `out`, which may have any alignment.
inline void store_lanes(LaneVector values, float* out) {
  std::memcpy(out, &values, sizeof values);
}

// The rotation of the blocks of a call whose elements have type In.
template <class In>
struct Rotator {
  using Number = typename In::Bits;       // the type of an element in memory
  using Bits = typename Input<In>::Bits;  // its bits as an integer
  static constexpr i64 kTaskElements = 1 << 13;

  // A group: up to kLanes blocks, one per lane, at one position along the middle axis.
  //   first                    the offset of the first element of the first block
  //   element_step, lane_step  the distances of neighboring elements of a block, and of neighboring blocks
  //   lanes                    the number of blocks
  //   block                    the index of the blocks along the middle axis
  struct LaneGroup {
    i64 first, element_step, lane_step, lanes, block;
  };

  const RotateCall& call;

  // groups() returns the number of all groups, tasks() the number of all tasks, and groups_per_task() the largest
  // number of groups per task.
  i64 groups() const { return call.length / call.size * (across() ? call.outer * lane_groups() : lane_groups()); }
  i64 groups_per_task() const { return maximum<i64>(kTaskElements / (call.size * kLanes), 1); }
  i64 tasks() const { return (groups() + groups_per_task() - 1) / groups_per_task(); }

  // Return true if the blocks of a group are neighbors along the last axis (inner > 1). Otherwise, elements of a block
  // are neighbors in memory, and the blocks of a group are neighbors along the first axis. lane_groups() returns the
  // number of groups that one row of such neighbors needs.
  bool across() const { return call.inner > 1; }
  i64 lane_groups() const { return ((across() ? call.inner : call.outer) + kLanes - 1) / kLanes; }

  // Return the group with this index, which must be in [0, groups()).
  LaneGroup group(i64 index) const {
    const i64 blocks = call.length / call.size;
    if (!across()) {
      const i64 lane = index / blocks * kLanes, block = index % blocks;
      return {lane * call.length + block * call.size, 1, call.length, minimum<i64>(call.outer - lane, kLanes), block};
    }
    const i64 lane = index % lane_groups() * kLanes,
              position = index / lane_groups();  // among all blocks of an inner index
    return {position * call.size * call.inner + lane, call.inner, 1, minimum<i64>(call.inner - lane, kLanes),
            position % blocks};
  }

  // Return the sign of element i of the blocks with index `block` along the middle axis: -1 if the call negates it,
  // otherwise 1.
  float sign(i64 block, i64 i) const { return call.signs && call.signs[block * call.size + i] ? -1.0f : 1.0f; }

  // Return true if the elements of group g are loaded and stored by transposes of 16 x 16 elements: if elements of a
  // block are neighbors in memory, all lanes have a block, and the block size is a multiple of 16.
  bool is_transposed(const LaneGroup& g) const { return !across() && g.lanes == kLanes && call.size % 16 == 0; }

  // Load the elements of group g into y as float32, as [element][lane]. They are multiplied by the element signs,
  // unless the call is inverse. Lanes without a block get zeros.
  void load(const LaneGroup& g, float* y) const {
    const Number* x = static_cast<const Number*>(call.x) + g.first;
    if (is_transposed(g)) {
      for (i64 i = 0; i < call.size; i += 16) {
        alignas(64) Bits by_block[16][kLanes], by_element[16][kLanes];
        for (i64 lane = 0; lane < kLanes; ++lane)
          std::memcpy(by_block[lane], x + lane * g.lane_step + i, sizeof by_block[0]);
        transpose_lanes(by_block, by_element);
        for (i64 j = 0; j < 16; ++j) widen_lanes(by_element[j], kLanes, 1, load_sign(g, i + j), y + (i + j) * kLanes);
      }
      return;
    }
    for (i64 i = 0; i < call.size; ++i)
      widen_lanes(x + i * g.element_step, g.lanes, g.lane_step, load_sign(g, i), y + i * kLanes);
  }
  float load_sign(const LaneGroup& g, i64 i) const { return call.is_inverse ? 1.0f : sign(g.block, i); }

  // Store in y one element of each of `lanes` blocks as float32, multiplied by `sign`. Lanes without a block get zeros.
  // `x` points to the element of the first block (or to its bits, if Element is an integer type), and `step` is the
  // distance of neighboring blocks.
  template <class Element>
  static void widen_lanes(const Element* x, i64 lanes, i64 step, float sign, float* y) {
    Number elements[kLanes] = {};
    if (lanes == kLanes && step == 1) {
      std::memcpy(elements, x, sizeof elements);
    } else {
      for (i64 lane = 0; lane < lanes; ++lane) std::memcpy(elements + lane, x + lane * step, sizeof(Number));
    }
    for (int lane = 0; lane < kLanes; ++lane) y[lane] = In::widen(elements[lane]) * sign;
  }

  // Store y, the results of group g, in call.out, rounded to the type of the elements. They are multiplied by the
  // factor of the call and, if the call is inverse, by the element signs.
  void store(const LaneGroup& g, const float* y) const {
    Number* out = static_cast<Number*>(call.out) + g.first;
    if (is_transposed(g)) {
      for (i64 i = 0; i < call.size; i += 16) {
        alignas(64) Bits by_block[16][kLanes], by_element[16][kLanes];
        for (i64 j = 0; j < 16; ++j) {
          Number elements[kLanes];
          narrow_lanes(y + (i + j) * kLanes, store_sign(g, i + j), elements);
          std::memcpy(by_element[j], elements, sizeof elements);
        }
        transpose_lanes(by_element, by_block);
        for (i64 lane = 0; lane < kLanes; ++lane)
          std::memcpy(out + lane * g.lane_step + i, by_block[lane], sizeof by_block[0]);
      }
      return;
    }
    for (i64 i = 0; i < call.size; ++i) {
      Number elements[kLanes];
      narrow_lanes(y + i * kLanes, store_sign(g, i), elements);
      if (g.lanes == kLanes && g.lane_step == 1) {
        std::memcpy(out + i * g.element_step, elements, sizeof elements);
      } else {
        for (i64 lane = 0; lane < g.lanes; ++lane) out[i * g.element_step + lane * g.lane_step] = elements[lane];
      }
    }
  }
  float store_sign(const LaneGroup& g, i64 i) const { return call.is_inverse ? sign(g.block, i) : 1.0f; }

  // Multiply one value of each of kLanes blocks by the factor of the call and by `sign`, round it to the type of the
  // elements, and store it in `elements`. NaN becomes the positive quiet NaN.
  void narrow_lanes(const float* y, float sign, Number (&elements)[kLanes]) const {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float value = y[lane] * call.factor * sign;
      elements[lane] = In::narrow(is_nan(value) ? nan_value() : value);
    }
  }

  // Replace the elements y of a group by their Hadamard transform: sums of all elements of a block with signs, without
  // the factor of the call.
  void add_and_subtract(float* y) const {
    for (i64 distance = 1; distance < call.size; distance *= 2)
      for (i64 first = 0; first < call.size; first += 2 * distance)
        for (i64 i = first; i < first + distance; ++i) {
          float *a = y + i * kLanes, *b = a + distance * kLanes;
          const LaneVector low = load_lanes(a), high = load_lanes(b);
          store_lanes(low + high, a);
          store_lanes(low - high, b);
        }
  }

  // Multiply the elements y of each block of group g by the matrix of the block, and store the results in `sums`, as
  // [element][lane]. y is not changed. Four results are computed at a time.
  void multiply(const LaneGroup& g, const float* y, float* sums) const {
    const float* matrix = call.matrices + g.block * call.matrix_step;
    const i64 size = call.size;
    i64 j = 0;
    for (; j + 4 <= size; j += 4) {
      LaneVector total[4];
      for (int k = 0; k < 4; ++k) total[k] = load_lanes(y) * matrix[j + k];
      for (i64 i = 1; i < size; ++i)
        for (int k = 0; k < 4; ++k) total[k] = total[k] + load_lanes(y + i * kLanes) * matrix[i * size + j + k];
      for (int k = 0; k < 4; ++k) store_lanes(total[k], sums + (j + k) * kLanes);
    }
    for (; j < size; ++j) {
      LaneVector total = load_lanes(y) * matrix[j];
      for (i64 i = 1; i < size; ++i) total = total + load_lanes(y + i * kLanes) * matrix[i * size + j];
      store_lanes(total, sums + j * kLanes);
    }
  }

  // Rotate the groups of the task with this index, and store the results in call.out.
  void run(i64 index) const {
    float* y = scratch<float>(static_cast<size_t>(2 * call.size * kLanes));
    float* sums = y + call.size * kLanes;
    const i64 first = index * groups_per_task(), last = minimum(first + groups_per_task(), groups());
    for (i64 i = first; i < last; ++i) {
      const LaneGroup g = group(i);
      load(g, y);
      if (call.matrices) {
        multiply(g, y, sums);
      } else {
        add_and_subtract(y);
      }
      store(g, call.matrices ? sums : y);
    }
  }
};

}  // namespace
