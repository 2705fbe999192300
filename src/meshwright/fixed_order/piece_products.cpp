// Products in float32 whose contraction is divided into pieces, in one pass over the operands.
//
// A piece of an element is one chain of fused multiplications and additions in the order of the contraction, as in
// MKL's kernels for short contractions. The pieces are added as one binary tree, in registers and the first cache.
// Cost: m * n * k multiplications for each pair of matrices; one operand is copied once, in panels of 2 vectors.

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16, ROWS = 12;  // 24 sums, 2 vectors and one number are 27 of 32 registers
#else
constexpr int LANES = 8, ROWS = 6;  // 12 sums, 2 vectors and one number are 15 of 16 registers
#endif
typedef float Lanes __attribute__((vector_size(4 * LANES)));
constexpr int64_t WIDTH = 2 * LANES;
constexpr int LEVELS = 40;    // a tree of more levels has more pieces than memory has bytes
constexpr int64_t FEW = 8, MANY = 128;  // between them, and for a longer w, rows are in the vectors: w is not copied

// Written out, because compilers fuse a product and a sum in some loops and not in others, which rounds differently
#ifdef __AVX512F__
inline Lanes plus_product(Lanes sum, float a, Lanes b) { return _mm512_fmadd_ps(_mm512_set1_ps(a), b, sum); }
#else
inline Lanes plus_product(Lanes sum, float a, Lanes b) { return _mm256_fmadd_ps(_mm256_set1_ps(a), b, sum); }
#endif

struct Matrix {
  const float* data;
  int64_t count, stride, step;  // rows, elements from one row to the next, and along the contraction
};
struct Split {
  int64_t length, size;  // elements of the contraction and of a piece; the last piece may be shorter
};
struct Out {
  float* data;
  int64_t row, column;  // elements from one row or column to the next
};

constexpr int SIDE = 8;

// to[p * to_stride + n] = from[n * stride + p], for n and p below 8
inline void transpose_square(const float* from, int64_t stride, float* to, int64_t to_stride) {
  __m256 x[SIDE], y[SIDE];
#pragma GCC unroll 8
  for (int n = 0; n < SIDE; ++n) x[n] = _mm256_loadu_ps(from + n * stride);
#pragma GCC unroll 8
  for (int n = 0; n < SIDE; n += 2) {
    y[n] = _mm256_unpacklo_ps(x[n], x[n + 1]);
    y[n + 1] = _mm256_unpackhi_ps(x[n], x[n + 1]);
  }
#pragma GCC unroll 8
  for (int n = 0; n < SIDE; ++n) {  // x[p] has the elements p and p + 4 of four rows, x[p + 4] those of the others
    const int low = n / 4 * 4 + n % 4 / 2;
    x[n] = n % 2 ? _mm256_shuffle_ps(y[low], y[low + 2], 0xee) : _mm256_shuffle_ps(y[low], y[low + 2], 0x44);
  }
#pragma GCC unroll 8
  for (int p = 0; p < SIDE / 2; ++p) {
    _mm256_storeu_ps(to + p * to_stride, _mm256_permute2f128_ps(x[p], x[p + 4], 0x20));
    _mm256_storeu_ps(to + (p + 4) * to_stride, _mm256_permute2f128_ps(x[p], x[p + 4], 0x31));
  }
}

// to[p * to_stride + n] = the element p of row n of `from`, for `length` elements of each row
void transpose(Matrix from, int64_t length, float* to, int64_t to_stride) {
  const int64_t count = from.step == 1 ? from.count / SIDE * SIDE : 0, squares = length / SIDE * SIDE;
  auto copy = [&](int64_t n, int64_t p) { to[p * to_stride + n] = from.data[n * from.stride + p * from.step]; };
  for (int64_t first = 0; first < count; first += SIDE) {
    for (int64_t p = 0; p < squares; p += SIDE)
      transpose_square(from.data + first * from.stride + p, from.stride, to + p * to_stride + first, to_stride);
    for (int64_t p = squares; p < length; ++p)
      for (int64_t n = first; n < first + SIDE; ++n) copy(n, p);
  }
  for (int64_t p = 0; p < length; ++p)
    for (int64_t n = count; n < from.count; ++n) copy(n, p);
}

// The panel of rows `first` to `first + WIDTH` of b, with zeros behind the last one
void copy_panel(Matrix b, int64_t first, int64_t length, float* panel) {
  const int64_t count = std::min(WIDTH, b.count - first);
  const float* from = b.data + first * b.stride;
  if (count < WIDTH) std::fill(panel, panel + length * WIDTH, 0.0f);
  if (b.stride == 1)
    for (int64_t p = 0; p < length; ++p) std::copy(from + p * b.step, from + p * b.step + count, panel + p * WIDTH);
  else
    transpose({from, count, b.stride, b.step}, length, panel, WIDTH);
}

// a, with rows that are contiguous
Matrix with_whole_rows(Matrix a, int64_t length) {
  if (a.step == 1) return a;
  thread_local std::vector<float> copy;
  copy.resize(a.count * length);
  transpose({a.data, length, a.step, a.stride}, a.count, copy.data(), length);
  return {copy.data(), a.count, length, 1};
}

template <int M>
using Sums = Lanes[M][2];

template <int M>
inline void add(Sums<M>& sums, const Sums<M>& others) {
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) sums[m][0] += others[m][0], sums[m][1] += others[m][1];
}

template <int M>
inline void copy(const Sums<M>& from, Sums<M>& to) {
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) to[m][0] = from[m][0], to[m][1] = from[m][1];
}

// The product of M rows of a and one panel. The sums of complete subtrees of 1, 2, 4, .. pieces wait in `levels`.
template <int M>
void tile(const float* a, Matrix of, const Lanes* panel, Split split, Sums<M>& total) {
  Sums<M> levels[LEVELS];
  int64_t piece = 0;
  for (int64_t at = 0; at < split.length; at += split.size, ++piece) {
    const int64_t length = std::min(split.size, split.length - at);
    Lanes sums[M][2] = {};
    for (int64_t p = at; p < at + length; ++p) {
      const Lanes first = panel[2 * p], second = panel[2 * p + 1];
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const float x = a[m * of.stride + p];
        sums[m][0] = plus_product(sums[m][0], x, first);
        sums[m][1] = plus_product(sums[m][1], x, second);
      }
    }
    if (length < split.size) add<M>(sums, Sums<M>{});  // zeros behind the last piece: -0 becomes 0
    int level = 0;
    for (; piece >> level & 1; ++level) add<M>(sums, levels[level]);
    copy<M>(sums, levels[level]);
  }
  int level = 0;
  while (!(piece >> level & 1)) ++level;
  copy<M>(levels[level], total);
  while (piece >> ++level)
    if (piece >> level & 1) add<M>(total, levels[level]);
}

template <int M>
void write(const Sums<M>& sums, Out out, int64_t columns) {
  for (int m = 0; m < M; ++m) {
    const float* from = reinterpret_cast<const float*>(sums[m]);
    if (out.column == 1 && columns == WIDTH)  // the compiler knows the length of this copy
      std::copy(from, from + WIDTH, out.data + m * out.row);
    else
      for (int64_t n = 0; n < columns; ++n) out.data[m * out.row + n * out.column] = from[n];
  }
}

// Tiles of M rows while there are so many, then of fewer
template <int M>
void rows(Matrix a, int64_t from, const Lanes* panel, Split split, Out out, int64_t columns) {
  Sums<M> sums;
  for (; from + M <= a.count; from += M) {
    tile<M>(a.data + from * a.stride, a, panel, split, sums);
    write<M>(sums, {out.data + from * out.row, out.row, out.column}, columns);
  }
  if constexpr (M > 1) rows<M / 2>(a, from, panel, split, out, columns);
}

// One block of a stays in the second cache while the panels of a group pass by
void product(Matrix a, Matrix b, Split split, Out out) {
  constexpr int64_t GROUP = 8 * WIDTH, BLOCK_BYTES = 1 << 17;
  a = with_whole_rows(a, split.length);
  const int64_t block = std::max<int64_t>(BLOCK_BYTES / (4 * split.length) / ROWS, 1) * ROWS;
  thread_local std::vector<Lanes> group;
  group.resize(2 * split.length * std::min(GROUP, b.count + WIDTH) / WIDTH);
  for (int64_t first = 0; first < b.count; first += GROUP) {
    const int64_t end = std::min(first + GROUP, b.count);
    for (int64_t n = first; n < end; n += WIDTH)
      copy_panel(b, n, split.length, reinterpret_cast<float*>(&group[2 * split.length * ((n - first) / WIDTH)]));
    for (int64_t m = 0; m < a.count; m += block) {
      const Matrix part{a.data + m * a.stride, std::min(block, a.count - m), a.stride, 1};
      for (int64_t n = first; n < end; n += WIDTH) {
        const Out to{out.data + m * out.row + n * out.column, out.row, out.column};
        rows<ROWS>(part, 0, &group[2 * split.length * ((n - first) / WIDTH)], split, to, std::min(WIDTH, end - n));
      }
    }
  }
}

}  // namespace

// out [.., m, n] = x [.., m, k] times w [.., k, n], for two leading dims. `numbers` has m, n, k and the size of a
// piece; the leading sizes; and the strides of x and of w, in the order of their dims. `out` is contiguous.
extern "C" void piece_products(const float* x, const float* w, float* out, const int64_t* numbers) {
  const int64_t m = numbers[0], n = numbers[1];
  const Split split{numbers[2], numbers[3]};
  const int64_t *leading = numbers + 4, *of_x = numbers + 6, *of_w = numbers + 10;
  for (int64_t i = 0; i < leading[0]; ++i)
    for (int64_t j = 0; j < leading[1]; ++j, out += m * n) {
      const Matrix left{x + i * of_x[0] + j * of_x[1], m, of_x[2], of_x[3]};
      const Matrix right{w + i * of_w[0] + j * of_w[1], n, of_w[3], of_w[2]};
      if (FEW <= m && m <= MANY && 2 * m < n && of_w[3] != 1)
        product(right, left, split, {out, 1, n});
      else
        product(left, right, split, {out, n, 1});
    }
}
