// A group: the same operation on many tensors in one launch.
//
// A Member describes each tensor, and the work is cut into pieces. A piece belongs to one tensor and is about as large
// as any other, so thread blocks have equal work whatever the sizes of the tensors, and what a thread block prepares
// for a tensor (its scale, a table of factors) serves the whole piece.
//
// A large group is a table in device memory: members, and behind them a Piece for each. A load that depends on a load,
// before the first of the work, takes 1 to 2 us where no cache has them yet: nothing for a large group, 4% of 8 tensors
// of 1856 x 2688 (H200, 2026-11-21). So the members of a small group are arguments of the kernel, as near as those of a
// single tensor.
#pragma once

#include "types.cuh"

constexpr u32 kSmallGroup = 32u;  // members of a small group at most: one for each thread of a warp

template <class Arguments>
struct Member {
  Arguments arguments;  // of the kernel that does the same for one tensor
  u32 pieces;           // of this tensor
  u32 aligned;          // whether its runs are: what kAligned says of one tensor; flags where a kernel says so
};

struct Piece {
  u32 member, index;
};

template <class Arguments>
struct Group {
  const Member<Arguments>* members;
  i64 count, pieces;
};

template <class Arguments>
struct SmallGroup {
  i64 pieces;
  u32 first[kSmallGroup];  // the first piece of each member, in order; 2^32 - 1 of those that are not there
  Member<Arguments> members[kSmallGroup];
};

template <class Arguments, bool kSmall>
struct GroupOf {
  using Type = Group<Arguments>;
};
template <class Arguments>
struct GroupOf<Arguments, true> {
  using Type = SmallGroup<Arguments>;
};

// body(arguments, grid, aligned) of every piece; the same in all threads of a block, so bodies may have barriers.
// kBackwards: the last pieces first.
template <bool kBackwards = false, class Arguments, class Body>
FP4KIT_DEVICE void for_each_piece(const SmallGroup<Arguments>& group, Body body) {
  static_assert(sizeof(group) <= 4096, "arguments of a kernel");
  const u32 count = static_cast<u32>(group.pieces);
  for (u32 turn = blockIdx.x; turn < count; turn += gridDim.x) {
    const u32 i = kBackwards ? count - 1u - turn : turn;
    const u32 member_index = 31u - __clz(__ballot_sync(0xFFFFFFFFu, group.first[threadIdx.x % kSmallGroup] <= i));
    const Member<Arguments>& member = group.members[member_index];
    body(member.arguments, Grid{i - group.first[member_index], member.pieces}, member.aligned);
    if (turn + gridDim.x < count) __syncthreads();  // before the next piece uses the same shared memory
  }
}

template <bool kBackwards = false, class Arguments, class Body>
FP4KIT_DEVICE void for_each_piece(const Group<Arguments>& group, Body body) {
  __shared__ Member<Arguments> member;  // without the registers that a copy in each thread takes
  const Piece* pieces = reinterpret_cast<const Piece*>(group.members + group.count);
  constexpr int kWords = sizeof(member) / sizeof(u64);
  const u32 count = static_cast<u32>(group.pieces);  // a register less than 64 bits, in all of body
  for (u32 turn = blockIdx.x; turn < count; turn += gridDim.x) {
    const u32 i = kBackwards ? count - 1u - turn : turn;
    const Piece piece = pieces[i];
    const u64* words = reinterpret_cast<const u64*>(group.members + piece.member);
    if (threadIdx.x < kWords) reinterpret_cast<u64*>(&member)[threadIdx.x] = words[threadIdx.x];
    __syncthreads();
    body(member.arguments, Grid{piece.index, member.pieces}, member.aligned);
    if (turn + gridDim.x < count) __syncthreads();  // before the next piece uses the same shared memory
  }
}
