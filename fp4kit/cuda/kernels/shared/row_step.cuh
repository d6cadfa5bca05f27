// How thread blocks of a kernel take rows of a matrix (R::kRowStep).
#pragma once

// How a thread block takes rows if it finds their amaxes before it quantizes them: several whole rows in one step of
// its threads, one whole row in one step, or one row in several steps (`part`). If the kernel finds no amaxes of rows
// in this way, the value is `none`.
enum class RowStep { none, several, one, part };
