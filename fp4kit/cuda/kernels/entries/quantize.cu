// quantize: compute codes and block scales from elements, for blocks in a row (1 x kBlock). If R::kFake, it stores the
// values to which these codes decode instead (fake_quantize). A thread processes a run of neighboring elements, and
// neighboring threads process the runs of one block. In one step (an iteration of a thread block), each thread
// processes several runs. The fast path encodes blocks of finite elements in few instructions; the exact path is valid
// for all blocks. R is the recipe, and In is the type of the elements of x. kAligned is true if all rows of x (and of
// `values`, if they are stored) begin at multiples of 16 bytes. `a` holds the kernel's arguments: the arrays, their
// sizes and the seed. t is a tensor scale: its encode and decode factors. A Factor is what the elements of a block are
// multiplied or divided by.
//
// A thread loads several runs before it uses the first one. If the factor of an E4M3 scale follows from its code
// (R::kHasTable), each thread block first fills a table of the factors. That takes two divisions per code, instead of
// two per block of elements.
#include "amax.cuh"
#include "quantize.cuh"
#include "row_step.cuh"
#include "warp.cuh"

// Compile-time constants for a recipe R and an element type In: the sizes of runs and steps, and the order of runs.
template <class R, class In>
struct QuantizeTraits {
  // With 16 bytes of values per thread, a warp stores whole cache lines.
  static constexpr int kRun = !R::kFake ? 16 : R::kBlock > 128 ? 8 : 16 / static_cast<int>(sizeof(typename In::Bits));
  static constexpr int kLanes = R::kBlock / kRun;  // threads that share a block
  static constexpr int kUnroll = R::kFake && !R::kDivide ? 2 : R::kThreadBytes / (kRun * sizeof(typename In::Bits));
  static constexpr int kStep = kThreads * kUnroll;  // runs that a thread block has in flight
  static constexpr bool kLanesFit = (kLanes & (kLanes - 1)) == 0 && kLanes <= 32;
  static constexpr bool kHasFastPath = FastPath<R, In>::kExists && kLanesFit;
  static constexpr bool kOneScale =
      R::kTensorScaling == TensorScaling::none || R::kTensorScaling == TensorScaling::tensor;
  static constexpr bool kSwizzled = R::kLayout != ScaleLayout::linear;
  static constexpr bool kFlat = !kSwizzled && R::kTensorScaling != TensorScaling::row;  // RunPosition needs no row
  // True if threads process runs in the order of their swizzled scales. A warp then fills 32-byte sectors of scales and
  // still loads whole lines of x. The runs of a thread are in neighboring scale tiles, and so in one row. For nvfp4-te
  // on 16384 x 16384 bfloat16, swizzled scales take 1.02 of the time of linear scales. In the order of x they would
  // take 1.09 of it (H200, 2026-11-21).
  static constexpr bool kInSectors = kSwizzled && kLanesFit && kLanes <= kThreads / 32;
  static constexpr int kSector = 32 * kLanes;                             // runs per sector
  static constexpr int kSectors = kInSectors ? kThreads / kSector : 1;    // sectors per thread block
  static constexpr int kTile = tile_bytes<R::kLayout>() / 32;             // sectors per scale tile
  static constexpr int kParts = kTile > kSectors ? kTile / kSectors : 1;  // thread blocks per scale tile
};

// Return run number `run` of the matrix a.x, loaded from memory and not transformed. Runs have QuantizeTraits::kRun
// elements and are numbered row by row.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE auto read_run_of(const QuantizeArguments& a, u32 run) {
  constexpr int kRun = QuantizeTraits<R, In>::kRun;
  return read_run<In, kRun, kAligned>(static_cast<const typename In::Bits*>(a.x) + static_cast<i64>(run) * kRun);
}

// If R::kHadamard, apply the Hadamard transform to the run x in place, 16 elements at a time; otherwise leave x
// unchanged. Return the float32 bits of the largest magnitude in x after that. They are above kInfinityBits if an
// element is NaN.
template <class R, class In, int kRun>
FP4KIT_DEVICE u32 transform_run(Run<In, kRun>& x) {
  if constexpr (R::kHadamard) return hadamard_run<R::kSignMask>(x);
  return largest_bits_of(x);
}

// Return run number `run` of the matrix a.x, loaded from memory. If R::kHadamard, the returned run is transformed; a.x
// itself does not change.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE auto load_run_of(const QuantizeArguments& a, u32 run) {
  auto x = read_run_of<R, In, kAligned>(a, run);
  transform_run<R>(x);
  return x;
}

// The order in which thread blocks process the runs of a matrix: the numbers of its rows, runs per row, runs and steps.
// A thread block processes one step of runs (several runs per thread) per iteration.
template <class R, class In>
struct Walk {
  u32 rows, row_runs, runs, steps;
  IntegerDivisor divisor;  // the runs per row or, if kInSectors, the scale tiles across the matrix
};

// Return the Walk for the matrix a.x: its numbers of rows, runs per row, runs and steps, and the divisor by which
// run_position finds the row of a run. If Traits::kFlat, rows are not needed; the divisor is then zero and must not be
// used.
template <class R, class In>
FP4KIT_DEVICE Walk<R, In> walk_of(const QuantizeArguments& a) {
  using Traits = QuantizeTraits<R, In>;
  const u32 rows = static_cast<u32>(a.rows), row_runs = static_cast<u32>(a.columns) / Traits::kRun,
            runs = rows * row_runs;
  if constexpr (Traits::kInSectors) {
    constexpr u32 kOfSteps = Traits::kSectors * Traits::kUnroll * Traits::kParts;
    const u32 across = (row_runs / Traits::kLanes + 3) / 4,
              sectors = static_cast<u32>(padded_rows<R::kLayout>(rows) / 8) * across;
    return {rows, row_runs, runs, (sectors + kOfSteps - 1) / kOfSteps * Traits::kParts, integer_divisor_of(across)};
  }
  return {rows, row_runs, runs, (runs + Traits::kStep - 1) / Traits::kStep,
          Traits::kFlat ? IntegerDivisor{} : integer_divisor_of(row_runs)};
}

// The position of a run, the neighboring elements that one thread quantizes together. A thread beyond the last run gets
// the position of a run of another thread. If `inside` is false, it must store nothing; otherwise it stores the same
// bits as that thread.
struct RunPosition {
  u32 run, row, block;  // number of the run in the matrix; its row, and its block in the row (both 0 if kFlat)
  u64 scale;            // offset of the block's scale
  bool inside;
};

// Return the index of the 32-byte sector of swizzled block scales that this thread helps to fill with its k-th run in a
// step. A sector holds the scales of 32 blocks, and kLanes neighboring threads share a block, so 32 * kLanes
// neighboring threads fill a sector. The index may be beyond the last sector of the matrix.
template <class R, class In>
FP4KIT_DEVICE u32 sector_of(u32 step, int k) {
  using Traits = QuantizeTraits<R, In>;
  const u32 part = (step / Traits::kParts * Traits::kUnroll + k) * Traits::kParts + step % Traits::kParts;
  return part * Traits::kSectors + threadIdx.x / Traits::kSector;
}

// Return true if all runs of this warp in a step belong to rows below the matrix, which are padding of the swizzled
// scales. The warp can then skip the step. Padding columns are not checked. Return false if threads do not follow the
// order of swizzled scales (kInSectors is false).
//
// It suffices to check the first row of the first runs, because the later ones are never in earlier rows.
template <class R, class In>
FP4KIT_DEVICE bool is_padding(const Walk<R, In>& walk, u32 step) {
  if constexpr (QuantizeTraits<R, In>::kInSectors)
    return scale_place<R::kLayout>(sector_of<R, In>(step, 0), 0u, walk.divisor).row >= walk.rows;
  return false;
}

// Return the position of the k-th run (k = 0 ... kUnroll - 1) that this thread quantizes in a step, with the field
// `inside` true. If the thread has no such run, return the position of another thread's run. If kInSectors, `inside` is
// then false, and nothing may be stored. Otherwise `inside` is true, and both threads store the same bits.
template <class R, class In>
FP4KIT_DEVICE RunPosition run_position(const Walk<R, In>& walk, u32 step, int k) {
  using Traits = QuantizeTraits<R, In>;
  constexpr u32 kLanes = Traits::kLanes;
  if constexpr (Traits::kInSectors) {
    const u32 sector = sector_of<R, In>(step, k), byte = threadIdx.x % Traits::kSector / kLanes;
    const ScalePlace p = scale_place<R::kLayout>(sector, byte, walk.divisor);
    const u32 blocks = walk.row_runs / kLanes, row = minimum(p.row, walk.rows - 1),
              block = minimum(p.column, blocks - 1);
    const bool inside = p.row < walk.rows && p.column < blocks;
    const u32 run = row * walk.row_runs + block * kLanes + threadIdx.x % kLanes;
    return {run, row, block, static_cast<u64>(sector) * 32 + byte, inside};
  }
  const u32 place = step * Traits::kStep + k * kThreads + threadIdx.x,
            run = minimum(place, walk.runs - kLanes + place % kLanes);
  if constexpr (Traits::kFlat) return {run, 0u, 0u, run / kLanes, true};
  const u32 row = divide(run, walk.divisor), block = (run - row * walk.row_runs) / kLanes;
  return {run, row, block, scale_offset<R::kLayout, u64>(row, block, walk.row_runs / kLanes), true};
}

// Return the amax from which the tensor scale of a run is computed, for recipes with one tensor scale per row or per
// block. It is an element of a.tensor_amax, without its sign bit. Return 0 if the tensor has one scale or none; callers
// then do not use the result.
template <class R, class In>
FP4KIT_DEVICE float tensor_amax_of(const QuantizeArguments& a, const RunPosition& place) {
  if constexpr (R::kTensorScaling == TensorScaling::row) return amax_at(a.tensor_amax, place.row);
  if constexpr (R::kTensorScaling == TensorScaling::block)
    return amax_at(a.tensor_amax, place.run / QuantizeTraits<R, In>::kLanes);
  return 0.0f;
}

// Store the scales of the block that contains the run at `place`. Only the thread with the first run of the block
// stores them, and no thread does if R::kFake. The caller must make sure that place.inside is true.
//
// - The scale code `code` goes to a.scales, if the recipe has block scales.
// - The tensor scale t goes to a.tensor_scale if it belongs to this block alone. If each row has a tensor scale, only
//   the first block of the row stores it, and only if a.tensor_scale is not nullptr. A copy of the amax goes to
//   a.amax_out, unless that is nullptr.
template <class R, class In>
FP4KIT_DEVICE void store_scales(const QuantizeArguments& a, const RunPosition& place, u32 code, TensorScale t) {
  if (R::kFake || place.run % QuantizeTraits<R, In>::kLanes != 0u) return;
  if constexpr (R::kHasScales) a.scales[place.scale] = code;
  if constexpr (R::kTensorScaling == TensorScaling::block)
    store_tensor_scale(a, place.run / QuantizeTraits<R, In>::kLanes, t);
  if constexpr (R::kTensorScaling == TensorScaling::row) {
    if (place.block == 0u && a.tensor_scale) store_tensor_scale(a, place.row, t);
  }
}

// Return true if the fast path is valid for a run (takes_fast_path). Then also store the codes of the run and the
// scales of its block, or only values if R::kFake. If the result is false, nothing is stored, and the run must take the
// exact path. If place.inside is false, nothing is stored, whatever is returned.
//
// x is the run at `place`, transformed if R::kHadamard, and `own` is largest_bits_of(x). The amax of the block is the
// largest `own` among the threads that share the block, or, if R::kStatic and a.block_amax is given, the block's
// element of a.block_amax. `table` holds the Factor of each scale code if R::kHasTable. Fast is the FastRecipe.
// `random` holds the random bytes of the run for stochastic rounding. All threads of a warp must call this function.
template <class R, class In, bool kAligned, class Fast>
FP4KIT_DEVICE bool quantize_finite(const QuantizeArguments& a, const RunPosition& place,
                                   const Run<In, QuantizeTraits<R, In>::kRun>& x, u32 own, TensorScale t,
                                   const Factor* table, const Words& random) {
  constexpr int kRun = QuantizeTraits<R, In>::kRun;
  u32 amax = largest_of_lanes<QuantizeTraits<R, In>::kLanes>(own);
  u32 largest = amax;
  if constexpr (R::kStatic) {
    if (a.block_amax) {
      amax = bits_of(amax_at(a.block_amax, place.run / QuantizeTraits<R, In>::kLanes));
      largest = own;
    }
    if (amax >= kInfinityBits) return false;
  }
  Factor f;
  const u32 code = scale_block<R, In>(float_of(amax), t, table, f);
  f = Fast::factor(f);
  if (!takes_fast_path<typename Fast::Type, In>(largest, f)) return false;
  if (!place.inside) return true;
  store_finite<typename Fast::Type, In, kAligned>(a, static_cast<i64>(place.run) * kRun, x, f, code, t, random);
  store_scales<R, In>(a, place, code, t);
  return true;
}

// Return the amax (the largest magnitude) of the block that contains run number `run`, after the Hadamard transform if
// R::kHadamard. The block is loaded from a.x again. R::kAmaxNan says what NaN elements do: `ignore` skips them, so the
// amax is 0 if all elements are NaN. `propagate` makes the amax NaN. `lanes` makes it NaN only if all elements at odd
// positions are NaN.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE float block_amax_of(const QuantizeArguments& a, u32 run) {
  constexpr int kRun = QuantizeTraits<R, In>::kRun;
  const u32 first = run / QuantizeTraits<R, In>::kLanes * QuantizeTraits<R, In>::kLanes;
  return exact_amax<R, kRun>(
      1, [&](int, int j, float (&x)[kRun]) { widen_run(load_run_of<R, In, kAligned>(a, first + j / kRun), x); });
}

// Quantize the run at `place` by the exact path, which is valid for all elements. Store its codes, and the scales of
// its block as store_scales does; or, if R::kFake, store only the values of the run. The run is loaded from a.x again.
// The amax of its block is read from a.block_amax if that is given, and otherwise computed. `table` holds the Factor of
// each scale code if R::kHasTable. The place must be inside of the matrix.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_any(const QuantizeArguments& a, const RunPosition& place, TensorScale t,
                                const Factor* table) {
  constexpr int kRun = QuantizeTraits<R, In>::kRun;
  const float amax = a.block_amax ? amax_at(a.block_amax, place.run / QuantizeTraits<R, In>::kLanes)
                                  : block_amax_of<R, In, kAligned>(a, place.run);
  Factor f;
  const u32 code = scale_block<R, In>(amax, t, table, f);
  float x[kRun];
  widen_run_exactly<R>(load_run_of<R, In, kAligned>(a, place.run), x);
  store_exact<R, In, kAligned>(a, static_cast<i64>(place.run) * kRun, x, f, code, t);
  store_scales<R, In>(a, place, code, t);
}

// Quantize the runs that this thread has in one step: by the fast path where it is valid, otherwise by the exact path.
// Store the codes and scales, or the values if R::kFake. All threads of a warp must call this function.
//
// x holds the runs if there is a fast path (they are transformed in place); otherwise x is not read. place_of(k)
// returns the RunPosition of run k. If kOneScale, `whole_scale` is the tensor scale of all runs. Otherwise `amaxes`
// holds the amax for each run's tensor scale. `table` holds the Factor of each scale code if R::kHasTable.
template <class R, class In, bool kAligned, bool kOneScale = QuantizeTraits<R, In>::kOneScale,
          class Fast = FastRecipe<R, In>, class Place>
FP4KIT_DEVICE void quantize_step(const QuantizeArguments& a,
                                 Run<In, QuantizeTraits<R, In>::kRun> (&x)[QuantizeTraits<R, In>::kUnroll],
                                 const float (&amaxes)[QuantizeTraits<R, In>::kUnroll], TensorScale whole_scale,
                                 const Factor* table, Place place_of) {
  using Traits = QuantizeTraits<R, In>;
  Words random[Traits::kUnroll] = {};  // computed for all runs at once, so that they share the keys of the rounds
#pragma unroll
  for (int k = 0; k < Traits::kUnroll && Traits::kHasFastPath && R::kStochastic; ++k)
    random[k] = random_words(a, static_cast<i64>(place_of(k).run) * Traits::kRun);
  u32 pending = 0u;  // bit k: run k must take the exact path
  TensorScale t = whole_scale;
#pragma unroll
  for (int k = 0; k < Traits::kUnroll; ++k) {
    const u32 own = Traits::kHasFastPath ? transform_run<R>(x[k]) : 0u;  // transform after all loads
    const RunPosition place = place_of(k);
    if (!kOneScale && (k == 0 || bits_of(amaxes[k]) != bits_of(amaxes[k - 1])))
      t = R::TensorRule::template scale<R, In>(amaxes[k]);  // two divisions, once for the runs of a row
    if (!Traits::kHasFastPath || !quantize_finite<R, In, kAligned, Fast>(a, place, x[k], own, t, table, random[k]))
      pending |= place.inside << k;
  }
#pragma unroll 1
  for (int k = 0; pending >> k; ++k) {
    if (!(pending >> k & 1u)) continue;
    const RunPosition place = place_of(k);
    if (!kOneScale) t = R::TensorRule::template scale<R, In>(tensor_amax_of<R, In>(a, place));
    quantize_any<R, In, kAligned>(a, place, t, table);
  }
}

// Quantize the steps of a walk over the matrix a.x that `grid` assigns to this thread block. For runs of finite
// elements, Fast is the struct with the recipe's arithmetic.
template <class R, class In, bool kAligned, class Fast>
FP4KIT_DEVICE void quantize_steps(const QuantizeArguments& a, Grid grid, const Walk<R, In>& walk,
                                  TensorScale whole_scale, const Factor* table) {
  using Traits = QuantizeTraits<R, In>;
  for (u32 step = static_cast<u32>(grid.block); step < walk.steps; step += static_cast<u32>(grid.blocks)) {
    if (is_padding<R, In>(walk, step)) continue;
    const auto place_of = [&](int k) { return run_position<R, In>(walk, step, k); };
    Run<In, Traits::kRun> x[Traits::kUnroll];
    float amaxes[Traits::kUnroll];
#pragma unroll
    for (int k = 0; k < Traits::kUnroll; ++k) {
      const RunPosition place = place_of(k);
      if constexpr (Traits::kHasFastPath) x[k] = read_run_of<R, In, kAligned>(a, place.run);
      amaxes[k] = tensor_amax_of<R, In>(a, place);
    }
    quantize_step<R, In, kAligned, Traits::kOneScale, Fast>(a, x, amaxes, whole_scale, table, place_of);
  }
}

// Quantize the part of the matrix a.x that `grid` assigns to this thread block, and store its codes and block scales,
// or its values if R::kFake. In a group of tensors, this part is one piece of a tensor. Tensor scales are stored too,
// unless R::kFake. If there is only one, the thread block with grid.block = 0 stores it, if a.tensor_scale is not
// nullptr. All threads of the thread block must call this function.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize(const QuantizeArguments& a, Grid grid) {
  using Traits = QuantizeTraits<R, In>;
  __shared__ Factor table[R::kHasTable ? kTableSize : 1];
  const Walk<R, In> walk = walk_of<R, In>(a);
  const TensorScale whole_scale = Traits::kOneScale ? tensor_scale_of<R, In>(a.tensor_amax, 0, 0, 1) : TensorScale{};
  const bool multiplies = !R::kHasTable || fill_table<R, In>(table, whole_scale);
  if constexpr (R::kTensorScaling == TensorScaling::tensor && !R::kFake) {
    if (grid.block == 0 && threadIdx.x == 0 && a.tensor_scale) store_tensor_scale(a, 0, whole_scale);
  }
  if (multiplies) return quantize_steps<R, In, kAligned, FastRecipe<R, In>>(a, grid, walk, whole_scale, table);
  if constexpr (kHasMultipliers<R, In>)
    quantize_steps<R, In, kAligned, FastRecipe<R, In, false>>(a, grid, walk, whole_scale, table);
}

// Load the runs x[k] at place_of(k), for k = 0 ... kUnroll - 1.
template <class R, class In, bool kAligned, class Place>
FP4KIT_DEVICE void load_runs(const QuantizeArguments& a, Place place_of,
                             Run<In, QuantizeTraits<R, In>::kRun> (&x)[QuantizeTraits<R, In>::kUnroll]) {
#pragma unroll
  for (int k = 0; k < QuantizeTraits<R, In>::kUnroll; ++k) x[k] = read_run_of<R, In, kAligned>(a, place_of(k).run);
}

// Raise largest[index] to `own`, the float32 bits of a magnitude: store the larger of the two, atomically. All threads
// of a warp must call this function. If all of them have the same index, one thread stores the largest `own` of the
// warp. Otherwise each thread raises its own entry.
FP4KIT_DEVICE void raise_by_warp(u32* largest, u32 index, u32 own) {
  if (__any_sync(0xFFFFFFFFu, index != __shfl_sync(0xFFFFFFFFu, index, 0))) {
    atomicMax(largest + index, own);
    return;
  }
  own = largest_of_warp(own);
  if (threadIdx.x % 32 == 0) atomicMax(largest + index, own);
}

// Quantize the rows of a matrix that `grid` assigns to this thread block, for recipes with one tensor scale per row.
// First find the amax of each of these rows, and store it in the array at a.tensor_amax. Then store codes and scales,
// or values if R::kFake. NaN elements make the amax NaN if R::kAmaxNan is `propagate`, and are skipped otherwise.
//
// At a time, a thread block takes as many whole rows as fit into one step of its threads, at most kThreads. At least
// one row must fit.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_several_rows(const QuantizeArguments& a, Grid grid) {
  using Traits = QuantizeTraits<R, In>;
  __shared__ u32 largest[kThreads];  // float32 bits of the amaxes of the rows that the thread block has taken
  const u32 rows = static_cast<u32>(a.rows), row_runs = static_cast<u32>(a.columns) / Traits::kRun;
  const u32 rows_at_once = minimum<u32>(blockDim.x * Traits::kUnroll / row_runs, kThreads);
  const IntegerDivisor divisor = integer_divisor_of(row_runs);
  for (u32 first = static_cast<u32>(grid.block) * rows_at_once; first < rows;
       first += static_cast<u32>(grid.blocks) * rows_at_once) {
    const u32 count = minimum(rows_at_once, rows - first), runs = count * row_runs;
    const auto place_of = [&](int k) {
      const u32 own = k * blockDim.x + threadIdx.x, run = minimum(own, runs - Traits::kLanes + own % Traits::kLanes),
                row = divide(run, divisor), block = (run - row * row_runs) / Traits::kLanes;
      return RunPosition{first * row_runs + run, first + row, block,
                         scale_offset<R::kLayout, u64>(first + row, block, row_runs / Traits::kLanes), own < runs};
    };
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) largest[i] = 0u;
    __syncthreads();
    Run<In, Traits::kRun> x[Traits::kUnroll];
    load_runs<R, In, kAligned>(a, place_of, x);
#pragma unroll
    for (int k = 0; k < Traits::kUnroll; ++k)
      raise_by_warp(largest, place_of(k).row - first, largest_of_run<Untransformed, In, kRowInput<R>>(x[k]));
    __syncthreads();
    for (u32 i = threadIdx.x; i < count; i += blockDim.x)
      const_cast<float*>(a.tensor_amax)[first + i] = float_of(largest[i]);
    __syncthreads();
    float amaxes[Traits::kUnroll];
#pragma unroll
    for (int k = 0; k < Traits::kUnroll; ++k) amaxes[k] = float_of(largest[place_of(k).row - first]);
    quantize_step<R, In, kAligned>(a, x, amaxes, TensorScale{}, nullptr, place_of);
    __syncthreads();  // before the next rows overwrite `largest`
  }
}

// Return the position of run number `own` of a row of `runs` runs. If the row has no such run, return the position of
// another run of the row, with the field `inside` false.
template <class R, class In>
FP4KIT_DEVICE RunPosition position_in_row(u32 row, u32 own, u32 runs) {
  constexpr u32 kLanes = QuantizeTraits<R, In>::kLanes;
  const u32 run = minimum(own, runs - kLanes + own % kLanes), block = run / kLanes;
  return {row * runs + run, row, block, scale_offset<R::kLayout, u32>(row, block, runs / kLanes), own < runs};
}

// Quantize rows as quantize_several_rows does, but each warp takes one row at a time, which must fit into one step of
// its threads. No thread waits for another warp.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_rows_of_warps(const QuantizeArguments& a, Grid grid) {
  using Traits = QuantizeTraits<R, In>;
  const u32 rows = static_cast<u32>(a.rows), runs = static_cast<u32>(a.columns) / Traits::kRun,
            lane = threadIdx.x % 32u;
  for (u32 row = static_cast<u32>(first_item(grid) / 32); row < rows; row += static_cast<u32>(item_stride(grid) / 32)) {
    const auto place_of = [&](int k) { return position_in_row<R, In>(row, k * 32u + lane, runs); };
    Run<In, Traits::kRun> x[Traits::kUnroll];
    load_runs<R, In, kAligned>(a, place_of, x);
    u32 own = 0u;
#pragma unroll
    for (int k = 0; k < Traits::kUnroll; ++k) own = maximum(own, largest_of_run<Untransformed, In, kRowInput<R>>(x[k]));
    const float amax = float_of(largest_of_warp(own));
    if (lane == 0u) const_cast<float*>(a.tensor_amax)[row] = amax;
    quantize_step<R, In, kAligned, true>(a, x, {}, R::TensorRule::template scale<R, In>(amax), nullptr, place_of);
  }
}

// Quantize rows as quantize_several_rows does, but one row at a time. If R::kRowStep is `one`, a row fits into one step
// of the threads, and is loaded once. If it is `part`, a row is loaded again for the codes, mostly from a cache.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void quantize_single_rows(const QuantizeArguments& a, Grid grid) {
  using Traits = QuantizeTraits<R, In>;
  const u32 rows = static_cast<u32>(a.rows), runs = static_cast<u32>(a.columns) / Traits::kRun,
            step = R::kRowStep == RowStep::one ? runs : blockDim.x * Traits::kUnroll;
  for (u32 row = static_cast<u32>(grid.block); row < rows; row += static_cast<u32>(grid.blocks)) {
    u32 start = 0u;
    const auto place_of = [&](int k) {
      return position_in_row<R, In>(row, start + k * blockDim.x + threadIdx.x, runs);
    };
    Run<In, Traits::kRun> x[Traits::kUnroll];
    u32 own = 0u;
#pragma unroll 1
    for (; start < runs; start += step) {
      load_runs<R, In, kAligned>(a, place_of, x);
#pragma unroll
      for (int k = 0; k < Traits::kUnroll; ++k) own = maximum(own, largest_bits_of(x[k]));
    }
    const float amax =
        amax_of_row<R, In>(own, runs, [&](u32 run) { return read_run_of<R, In, kAligned>(a, row * runs + run); });
    const TensorScale t = R::TensorRule::template scale<R, In>(amax);
    if (threadIdx.x == 0u) const_cast<float*>(a.tensor_amax)[row] = amax;
#pragma unroll 1
    for (start = 0u; start < runs; start += step) {
      if (R::kRowStep != RowStep::one) load_runs<R, In, kAligned>(a, place_of, x);
      quantize_step<R, In, kAligned, true>(a, x, {}, t, nullptr, place_of);
    }
  }
}

// If the kernel finds the amaxes of rows, more thread blocks per multiprocessor hide the time until a row is loaded.
// With these numbers, at most a few registers are spilled. 0 sets no minimum.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kMostThreads = 1024;  // that a multiprocessor of sm_75 runs
#else
constexpr int kMostThreads = 1536;
#endif
constexpr int kRowThreads = R::kThreadBytes > 64 ? 1024 : sizeof(Input::Bits) == 2 ? 1536 : 1280;
constexpr int kBlocksPerMultiprocessor = R::kRowStep == RowStep::none || R::kStochastic || !kAligned
                                             ? 0
                                             : (kRowThreads < kMostThreads ? kRowThreads : kMostThreads) / kThreads;

// Quantize a.x, and store its codes in a.packed, its block scales in a.scales and its tensor scales in a.tensor_scale;
// or store only its values in a.values if R::kFake. a.tensor_scale may be nullptr unless each block has a tensor scale.
// The kernel is launched for blocks of one row that no other kernel supports (KERNEL_CHOICES in
// cuda/dispatch.py). A thread processes several runs per step.
//
// Before that, the kernel itself finds amaxes in two cases, and stores them at a.tensor_amax. If R::kRowStep is not
// `none`, it finds the amax of each row, and may be launched with fewer than kThreads threads, a multiple of 32. If it
// is `several` or `one`, a whole row must fit into one step of these threads. If R::kFinders is not 0, it finds the
// tensor's amax, or the amax of each row (amax.cuh); launch with a multiple of R::kFinders thread blocks then, and
// otherwise with any number of thread blocks.
extern "C" __global__ void FP4KIT_CLUSTER __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    quantize_kernel(QuantizeArguments a) {
  if constexpr (R::kRowStep == RowStep::warp) {
    quantize_rows_of_warps<R, Input, kAligned>(a, whole_grid());
  } else if constexpr (R::kRowStep == RowStep::several) {
    quantize_several_rows<R, Input, kAligned>(a, whole_grid());
  } else if constexpr (R::kRowStep != RowStep::none) {
    quantize_single_rows<R, Input, kAligned>(a, whole_grid());
  } else {
    find_amax<R, Input, kAligned>(a);
    quantize<R, Input, kAligned>(a, whole_grid());
  }
}
