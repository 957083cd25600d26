#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "reduce/types.hpp"

namespace pgasdl {

std::size_t item_size(DType dtype);
std::string_view name(DType dtype);

/// destinations[j][i] = scale * (sources[0][i] op sources[1][i] op ...), in that order, one pass.
///
/// Any thread may call; memory belongs to the caller. At least one source and one destination,
/// each n items long and aligned to its item, or not even that. A destination may be one of the
/// sources (same address, same item size); other overlaps are not allowed.
///
/// Accumulates in f32 for f32, f16 and bf16 sources, in f64 if any source is f64, in i32 (wraps)
/// for i32, in i64 (wraps) if any source is i64. Integers and floats do not mix, and integers
/// take scale 1 only; bytes are copied, from one source. f32 accumulation rounds `scale` to f32.
/// Narrowing rounds once, to nearest even, and overflows to infinity. min and max propagate NaN.
///
/// The bits of a result depend on the inputs alone: not on the processor, n, alignment or how a
/// range is cut. To that end every NaN result is the positive quiet NaN without payload; one
/// source of scale 1 and unchanged dtype is a plain copy and keeps its bits.
void reduce(std::span<const Destination> destinations, std::span<const Source> sources,
            std::size_t n, double scale, ReduceOp op = ReduceOp::kSum);

// Copies rows of n items, converted as by reduce(). The steps are bytes between beginnings of rows.
void copy_rows(Destination target, Source source, std::size_t n, std::size_t rows,
               std::size_t target_step, std::size_t source_step);

}  // namespace pgasdl
