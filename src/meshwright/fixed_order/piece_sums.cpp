// Sums along a dim that is divided into pieces, in float32, in one pass over the operand.
//
// A piece is added up as a tree of halves: each level adds the second half of a power of two to the first. The pieces
// are added as one binary tree. Cost: one addition for each element; up to COLUMNS sums are computed side by side.

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

constexpr int LEVELS = 40;  // a tree of more levels has more pieces than memory has bytes
constexpr int64_t COLUMNS = 64;
constexpr int64_t FEW = 8;     // rows side by side: the lines of more may not be in the first cache together
constexpr int64_t SHORT = 32;  // elements of a piece up to which that is faster than vectors along a row

struct Rows {
  const float* data;
  int64_t count, columns, row, column;  // sizes, and elements from one row or column to the next

  Rows part(int64_t first, int64_t rows) const { return {data + first * row, rows, columns, row, column}; }
};

// to = low, or low + high if there is one; a single column is read as a row
template <bool IS_SUM>
void load(Rows low, Rows high, float* to) {
  if (low.columns == 1) {
    std::swap(low.count, low.columns);
    std::swap(low.row, low.column);
    high.row = low.row;
  }
  const int64_t step = low.column;
  for (int64_t i = 0; i < low.count; ++i, to += low.columns) {
    const float *a = low.data + i * low.row, *b = high.data + i * high.row;
    if (step == 1)
      for (int64_t c = 0; c < low.columns; ++c) to[c] = IS_SUM ? a[c] + b[c] : a[c];
    else
      for (int64_t c = 0; c < low.columns; ++c) to[c] = IS_SUM ? a[c * step] + b[c * step] : a[c * step];
  }
}

int64_t half_of(int64_t n) {
  int64_t half = 1;
  while (2 * half < n) half *= 2;
  return half;
}

// The sums of the columns of a piece, in the first places of `sums`, which has places for half of the piece
void fold(Rows piece, float* sums) {
  int64_t n = piece.count;
  if (n == 1) return load<false>(piece, piece, sums);
  int64_t half = half_of(n);
  load<true>(piece.part(0, n - half), piece.part(half, n - half), sums);
  load<false>(piece.part(n - half, 2 * half - n), piece, sums + (n - half) * piece.columns);
  for (n = half; n > 1; n = half) {
    half = n / 2;
    for (int64_t at = 0; at < half * piece.columns; ++at) sums[at] += sums[half * piece.columns + at];
  }
}

// sums[0] = the sum of N numbers
template <int64_t N>
inline void fold_few(float* sums) {
  for (int64_t at = 0; at < N / 2; ++at) sums[at] += sums[N / 2 + at];
  if constexpr (N > 2) fold_few<N / 2>(sums);
}

// The sum of more than HALF and up to 2 * HALF contiguous numbers, faster than `fold`: most loops have a known length
template <int64_t HALF>
float fold_row(const float* x, int64_t n) {
  float sums[HALF];
  if (n == 2 * HALF) {
    for (int64_t at = 0; at < HALF; ++at) sums[at] = x[at] + x[HALF + at];
  } else {
    for (int64_t at = 0; at < n - HALF; ++at) sums[at] = x[at] + x[HALF + at];
    std::copy(x + n - HALF, x + HALF, sums + n - HALF);
  }
  fold_few<HALF>(sums);
  return sums[0];
}

using RowFold = float (*)(const float*, int64_t);

// The function for contiguous pieces of this size; none for short and for very long pieces
RowFold row_fold(int64_t n) {
  switch (half_of(n)) {
    case 32: return fold_row<32>;
    case 64: return fold_row<64>;
    case 128: return fold_row<128>;
    default: return nullptr;
  }
}

// The sums of up to COLUMNS columns; those of complete subtrees of 1, 2, 4, .. pieces wait in `levels`
void total(Rows x, int64_t pieces, float* sums, float* out) {
  float levels[LEVELS][COLUMNS];
  const int64_t size = x.count / pieces;
  auto add = [&](int level) {
    for (int64_t c = 0; c < x.columns; ++c) sums[c] = levels[level][c] + sums[c];
  };
  const auto fold_whole = x.columns == 1 && x.row == 1 ? row_fold(size) : nullptr;
  for (int64_t piece = 0; piece < pieces; ++piece) {
    if (fold_whole)
      sums[0] = fold_whole(x.data + piece * size, size);
    else
      fold(x.part(piece * size, size), sums);
    int level = 0;
    for (; piece >> level & 1; ++level) add(level);
    std::copy(sums, sums + x.columns, levels[level]);
  }
  int level = 0;
  while (!(pieces >> level & 1)) ++level;
  std::copy(levels[level], levels[level] + x.columns, sums);
  while (pieces >> ++level)
    if (pieces >> level & 1) add(level);
  std::copy(sums, sums + x.columns, out);
}

}  // namespace

// out [outer, inner] = the sums of x [outer, n, inner] along n. `numbers` has the sizes of x, its strides, and the
// number of pieces, which divides n. `out` is contiguous.
extern "C" void piece_sums(const float* x, float* out, const int64_t* numbers) {
  const int64_t n = numbers[1], pieces = numbers[6];
  int64_t outer = numbers[0], inner = numbers[2], outer_stride = numbers[3], inner_stride = numbers[5];
  const bool has_short_rows = inner == 1 && n / pieces <= SHORT;
  const int64_t side = has_short_rows ? FEW : COLUMNS;
  if (has_short_rows) {  // their sums are computed side by side
    std::swap(outer, inner);
    std::swap(outer_stride, inner_stride);
  }
  thread_local std::vector<float> sums;
  sums.resize(half_of(n / pieces) * std::min(inner, side));
  for (int64_t o = 0; o < outer; ++o)
    for (int64_t first = 0; first < inner; first += side) {
      const int64_t columns = std::min(side, inner - first);
      const float* from = x + o * outer_stride + first * inner_stride;
      total({from, n, columns, numbers[4], inner_stride}, pieces, sums.data(), out + o * inner + first);
    }
}
