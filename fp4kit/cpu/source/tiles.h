// The division of matrices into tiles, which threads take one by one, and of tiles into panels (one row of blocks
// each). Also functions that return the elements of a tile as contiguous rows (a View). README.md has a picture. In:
// the type of the elements. Bits: the unsigned integer type of an element's bits. Amax bits: the bits of the largest
// magnitude of some elements.
#pragma once

#include <vector>

#include "blocks.h"
#include "hadamard.h"
#include "thread_pool.h"

namespace {

// Return memory for `count` values of type T, which only the calling thread uses. The memory may hold values of an
// earlier use. It is valid until this thread calls scratch with this T again.
template <class T>
T* scratch(size_t count) {
  thread_local std::vector<T> memory;
  if (memory.size() < count) memory.resize(count);
  return memory.data();
}

// A rectangle of a matrix (a tile) or of a tile (a panel): its first row, number of rows, first column and number of
// columns.
struct Rectangle {
  i64 row, rows, column, columns;
};

// The tiles of a rows x columns matrix. Tiles at the right and lower edges may be smaller than the others.
struct Tiles {
  i64 rows, columns, tile_rows, tile_columns;

  // across() returns the number of tiles that lie next to each other across the columns of the matrix. count() returns
  // the number of all tiles.
  i64 across() const { return (columns + tile_columns - 1) / tile_columns; }
  i64 count() const { return across() * ((rows + tile_rows - 1) / tile_rows); }

  // Return the tile with this index, in [0, count()). Indices count in row-major order.
  Rectangle tile(i64 index) const {
    const i64 row = index / across() * tile_rows, column = index % across() * tile_columns;
    return {row, minimum(tile_rows, rows - row), column, minimum(tile_columns, columns - column)};
  }
};

// Call work(index) once for every tile index in [0, count), on at most `threads` threads. Return when all calls have
// returned.
template <class Work>
void run_tiles(i64 count, int threads, Work& work) {
  for_each_index(count, threads, [](void* context, int64_t index) { (*static_cast<Work*>(context))(index); }, &work);
}

// Return true if any tile needs the fallback: if any of the marks is 1. There is one mark per tile. Return false if
// there are no marks.
bool any_marked(const std::vector<u8>& marks) {
  return std::memchr(marks.data(), 1, marks.size()) != nullptr;
}

// Return true if the elements of a tile must be copied before they are read, because the rows of x are not contiguous
// or because its elements must be transformed (x.hadamard > 0).
bool is_gathered(const Source& x) {
  return x.column_step != 1 || x.hadamard > 0;
}

// The elements of a tile or panel: contiguous rows that begin `step` elements apart.
template <class Bits>
struct View {
  const Bits* data;
  i64 step;
};

// Return the elements of a tile of x as contiguous rows. Usually the view refers to the memory of x itself. If
// is_gathered(x), it refers to a copy, which is transformed if x.hadamard > 0. A copy is in scratch memory of the
// thread, and valid until the thread calls this function again.
template <class In, class Bits = typename Input<In>::Bits>
View<Bits> view(const Source& x, const Rectangle& tile) {
  if (!is_gathered(x)) return {static_cast<const Bits*>(x.data) + tile.row * x.row_step + tile.column, x.row_step};
  Bits* copy = scratch<Bits>(tile.rows * tile.columns);
  gather<Bits>(x, tile.row, tile.rows, tile.column, tile.columns, tile.columns, copy);
  if (x.hadamard > 0) hadamard_runs<In>(copy, tile.rows * tile.columns / 16, static_cast<u32>(x.hadamard - 1));
  return {copy, tile.columns};
}

// Bring a view of `rows` x `columns` elements into the cache: load one element per cache line (64 bytes), row by row.
// Afterwards, panels are read from the cache. This is faster than loading from memory in the order of panels.
template <class Bits>
void touch(View<Bits> x, i64 rows, i64 columns) {
  u32 seen = 0;
  for (i64 i = 0; i < rows; ++i)
    for (i64 j = 0; j < columns; j += 64 / sizeof(Bits)) seen |= x.data[i * x.step + j];
  asm volatile("" : : "r"(seen));
}

// Start to load `count` contiguous elements at `data` into the cache, without waiting for them. Any address is allowed,
// even one that this process must not read.
template <class Bits>
void prefetch(const Bits* data, i64 count) {
  for (i64 i = 0; i < count; i += 64 / sizeof(Bits)) __builtin_prefetch(data + i, 0, 2);
}

// Call work(panel) for the panels of a tile, in row-major order. A panel has block_rows rows and as many whole blocks
// of `block` columns as fit into kPanelColumns columns; at the lower and right edges of the tile it may be smaller. Its
// rows and columns are counted from the first element of the tile. Stop at the first call that returns false, and
// return false. Return true if all calls returned true.
template <class Work>
bool for_each_panel(const Rectangle& tile, i64 block, i64 block_rows, Work work) {
  const i64 columns = kPanelColumns / block * block;
  for (i64 i = 0; i < tile.rows; i += block_rows)
    for (i64 j = 0; j < tile.columns; j += columns)
      if (!work(Rectangle{i, minimum(block_rows, tile.rows - i), j, minimum(columns, tile.columns - j)})) return false;
  return true;
}

// Store the amax bits of each of `blocks` neighboring blocks in out[0] ... out[blocks - 1]. x is a view whose first
// element is that of the first block. A block has `rows` x `block` elements; `block` is 16 or a multiple of 32. If a
// block has a NaN, its amax bits are those of a NaN, because NaN counts as larger than infinity.
template <class In, class Bits>
void block_amax_bits(View<Bits> x, i64 rows, i64 blocks, i64 block, u32* out) {
  const i64 segment = segment_of(block), per_block = block / segment, segments = blocks * per_block;
  const auto find = segment == 16 ? segment_amax_bits<In, 16> : segment_amax_bits<In, 32>;
  u32 memory[kMaxPanelBlocks], row[kMaxPanelBlocks];
  u32* largest = per_block == 1 ? out : memory;  // of each segment
  find(x.data, segments, largest);
  for (i64 i = 1; i < rows; ++i) {
    find(x.data + i * x.step, segments, row);
    for (i64 s = 0; s < segments; ++s) largest[s] = row[s] > largest[s] ? row[s] : largest[s];
  }
  if (per_block == 1) return;
  for (i64 b = 0; b < blocks; ++b) {
    u32 of_block = largest[b * per_block];
    for (i64 s = 1; s < per_block; ++s) of_block = maximum(of_block, largest[b * per_block + s]);
    out[b] = of_block;
  }
}

// Return the amax bits of all elements of a view with `rows` rows and `columns` columns, or 0 if it has no elements. If
// an element is NaN, the result is the bits of a NaN, because NaN counts as larger than infinity.
template <class In, class Bits>
Bits amax_bits(View<Bits> x, i64 rows, i64 columns) {
  Bits largest = 0;
  if (x.step == columns) columns *= rows, rows = 1;
  for (i64 i = 0; i < rows; ++i)
    for (i64 j = 0; j < columns; ++j) {
      const Bits magnitude = x.data[i * x.step + j] & Input<In>::kMagnitude;
      largest = magnitude > largest ? magnitude : largest;
    }
  return largest;
}

}  // namespace
