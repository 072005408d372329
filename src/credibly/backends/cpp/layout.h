// Memory layout of data and activations.
#pragma once

#include <cstdint>

namespace {

constexpr int64_t ROW_MULTIPLE = 32;  // rows are padded to a multiple of this
constexpr int64_t TILE = 512;         // rows of a tile, at most
// From one unit to the next. Not a power of two: units would fall on the same cache lines.
constexpr int64_t PITCH = TILE + 16;

}  // namespace
