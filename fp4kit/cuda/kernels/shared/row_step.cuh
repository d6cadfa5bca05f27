// How thread blocks of a kernel take rows of a matrix (R::kRowStep).
#pragma once

// How a thread block takes rows if it finds their amaxes before it quantizes them:
//
// - none: it does not. The kernel needs no amaxes of rows, or the caller passes them, or clusters find them.
// - warp: each warp one whole row in one step
// - several: several whole rows in one step of its threads
// - one: one whole row in one step
// - part: one row in several steps
enum class RowStep { none, warp, several, one, part };
