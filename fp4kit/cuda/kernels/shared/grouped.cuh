// A group: one launch for the same operation on many tensors, which are the members of the group. The work on a member
// is divided into pieces of about equal size, and a thread block takes one piece at a time.
//
// So thread blocks have equal work whatever the sizes of the tensors. A thread block computes the scale of a tensor, or
// a table of factors, once per piece.
//
// A large group is a table in device memory: first the members, then one Piece per piece. If no cache has the table
// yet, loading from it takes 1 to 2 us before the first elements can be loaded. For a large group that is negligible;
// for 8 tensors of 1856 x 2688 it is 4% of the time (H200, 2026-11-21). Therefore the members of a small group are
// kernel arguments, which can be loaded as fast as the arguments for a single tensor.
#pragma once

#include "types.cuh"

// The largest number of members (tensors) of a small group: one for each thread of a warp.
constexpr u32 kSmallGroup = 32u;

// A tensor of a group: the arguments and the number of pieces.
template <class Arguments>
struct Member {
  Arguments arguments;  // the arguments of the kernel for one tensor
  u32 pieces;           // number of pieces of this tensor
  u32 aligned;          // the value of kAligned for this tensor alone; some kernels store flags here
};

// A piece: the index of its member, and its number among the pieces of that member.
struct Piece {
  u32 member, index;
};

// A large group, in device memory. `count` is the number of members, and `pieces` the number of all pieces.
template <class Arguments>
struct Group {
  const Member<Arguments>* members;
  i64 count, pieces;
};

// A small group, which is passed as a kernel argument.
template <class Arguments>
struct SmallGroup {
  i64 pieces;
  u32 first[kSmallGroup];  // the first piece of each member, in order; 2^32 - 1 for members that do not exist
  Member<Arguments> members[kSmallGroup];
};

// GroupOf<Arguments, kSmall>::Type is the type of group that a kernel takes.
template <class Arguments, bool kSmall>
struct GroupOf {
  using Type = Group<Arguments>;
};
template <class Arguments>
struct GroupOf<Arguments, true> {
  using Type = SmallGroup<Arguments>;
};

// Call body(arguments, grid, aligned) for each piece of a small group that this thread block processes: the thread
// blocks of the grid take turns. `arguments` and `aligned` belong to the piece's member (tensor). `grid` holds the
// index of the piece in this member, and the member's number of pieces. All threads of a thread block must call this
// function and get the same calls of `body`, so `body` may contain barriers. If kBackwards, the last pieces are taken
// first.
template <bool kBackwards = false, class Arguments, class Body>
FP4KIT_DEVICE void for_each_piece(const SmallGroup<Arguments>& group, Body body) {
  static_assert(sizeof(group) <= 4096, "arguments of a kernel");  // kernel arguments have at most 4096 bytes
  const u32 count = static_cast<u32>(group.pieces);
  for (u32 turn = blockIdx.x; turn < count; turn += gridDim.x) {
    const u32 i = kBackwards ? count - 1u - turn : turn;
    const u32 member_index = 31u - __clz(__ballot_sync(0xFFFFFFFFu, group.first[threadIdx.x % kSmallGroup] <= i));
    const Member<Arguments>& member = group.members[member_index];
    body(member.arguments, Grid{i - group.first[member_index], member.pieces}, member.aligned);
    if (turn + gridDim.x < count) __syncthreads();  // before the next piece uses the same shared memory
  }
}

// Call body(arguments, grid, aligned) for each piece of a large group that this thread block processes: the thread
// blocks of the grid take turns. `arguments` and `aligned` belong to the piece's member (tensor), and `arguments` is in
// shared memory. `grid` holds the index of the piece in this member, and the member's number of pieces. All threads of
// a thread block must call this function and get the same calls of `body`, so `body` may contain barriers. If
// kBackwards, the last pieces are taken first.
template <bool kBackwards = false, class Arguments, class Body>
FP4KIT_DEVICE void for_each_piece(const Group<Arguments>& group, Body body) {
  __shared__ Member<Arguments> member;  // in shared memory, because a copy in each thread would take registers
  const Piece* pieces = reinterpret_cast<const Piece*>(group.members + group.count);
  constexpr int kWords = sizeof(member) / sizeof(u64);
  const u32 count = static_cast<u32>(group.pieces);  // 32 bits, because 64 bits would take one register more in `body`
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
