// Matrices in units of some rows and columns, which threads take one by one; and their elements in contiguous rows.
#pragma once

#include <vector>

#include "blocks.h"
#include "hadamard.h"
#include "thread_pool.h"

namespace {

// A thread's own memory for a unit.
template <class T>
T* scratch(size_t count) {
  thread_local std::vector<T> memory;
  if (memory.size() < count) memory.resize(count);
  return memory.data();
}

// Rows and columns of a unit.
struct Part {
  i64 row, rows, column, columns;
};

struct Units {
  i64 rows, columns, height, width;
  i64 across() const { return (columns + width - 1) / width; }
  i64 count() const { return across() * ((rows + height - 1) / height); }
  Part part(i64 unit) const {
    const i64 row = unit / across() * height, column = unit % across() * width;
    return {row, minimum(height, rows - row), column, minimum(width, columns - column)};
  }
};

template <class Work>
void run_units(i64 units, int threads, Work& work) {
  for_units(units, threads, [](void* context, int64_t unit) { (*static_cast<Work*>(context))(unit); }, &work);
}

// Whether one of the units of a call is marked.
bool any(const std::vector<u8>& marks) {
  return std::memchr(marks.data(), 1, marks.size()) != nullptr;
}

// Whether elements are brought together, or transformed, before they are read.
bool is_gathered(const Source& x) {
  return x.column_step != 1 || x.hadamard >= 0;
}

// The elements of a part, in contiguous rows.
template <class Bits>
struct View {
  const Bits* data;
  i64 step;
};

template <class In, class Bits = typename Input<In>::Bits>
View<Bits> view(const Source& x, const Part& part) {
  if (!is_gathered(x)) return {static_cast<const Bits*>(x.data) + part.row * x.row_step + part.column, x.row_step};
  Bits* copy = scratch<Bits>(part.rows * part.columns);
  gather<Bits>(x, part.row, part.rows, part.column, part.columns, part.columns, copy);
  if (x.hadamard >= 0) hadamard_runs<In>(copy, part.rows * part.columns / 16, static_cast<u32>(x.hadamard));
  return {copy, part.columns};
}

// Brings rows into the cache in the order of memory, where they are then read a panel at a time.
template <class Bits>
void touch(View<Bits> x, i64 rows, i64 columns) {
  u32 seen = 0;
  for (i64 i = 0; i < rows; ++i)
    for (i64 j = 0; j < columns; j += 64 / sizeof(Bits)) seen |= x.data[i * x.step + j];
  asm volatile("" : : "r"(seen));
}

// Asks for elements that are read next, while others are encoded. There need not be any.
template <class Bits>
void fetch(const Bits* data, i64 count) {
  for (i64 i = 0; i < count; i += 64 / sizeof(Bits)) __builtin_prefetch(data + i, 0, 2);
}

// The panels of a part, in the order of memory: some rows that share blocks, and kWidth columns at most. False as soon
// as work is.
template <class Work>
bool each_panel(const Part& part, i64 block, i64 block_rows, Work work) {
  const i64 width = kWidth / block * block;
  for (i64 i = 0; i < part.rows; i += block_rows)
    for (i64 j = 0; j < part.columns; j += width)
      if (!work(Part{i, minimum(block_rows, part.rows - i), j, minimum(width, part.columns - j)})) return false;
  return true;
}

// Magnitudes of the blocks of some rows that share theirs, as integers.
template <class In, class Bits>
void block_magnitudes(View<Bits> x, i64 rows, i64 blocks, i64 block, u32* out) {
  const i64 grain = grain_of(block), per_block = block / grain, grains = blocks * per_block;
  const auto measure = grain == 16 ? magnitudes<In, 16> : magnitudes<In, 32>;
  u32 parts[kMostBlocks], row[kMostBlocks];
  u32* most = per_block == 1 ? out : parts;
  measure(x.data, grains, most);
  for (i64 i = 1; i < rows; ++i) {
    measure(x.data + i * x.step, grains, row);
    for (i64 g = 0; g < grains; ++g) most[g] = row[g] > most[g] ? row[g] : most[g];
  }
  if (per_block == 1) return;
  for (i64 b = 0; b < blocks; ++b) {
    u32 largest = most[b * per_block];
    for (i64 g = 1; g < per_block; ++g) largest = maximum(largest, most[b * per_block + g]);
    out[b] = largest;
  }
}

// The largest magnitude of some rows, as an integer.
template <class In, class Bits>
Bits largest_of(View<Bits> x, i64 rows, i64 columns) {
  Bits most = 0;
  if (x.step == columns) columns *= rows, rows = 1;
  for (i64 i = 0; i < rows; ++i)
    for (i64 j = 0; j < columns; ++j) {
      const Bits a = x.data[i * x.step + j] & Input<In>::kMagnitude;
      most = a > most ? a : most;
    }
  return most;
}

}  // namespace
