// Exact products of int8 codes, as int32 sums.
//
// Cost: m * n * k multiplications, in vectors of 16.

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t RUN = 16;  // codes of a vector
constexpr int ROWS = 4;
constexpr int64_t LINE = 64;  // bytes after which memory is read ahead
constexpr int64_t PAD = 32;   // between rows, which would else share the lines of a cache

struct Rows {
  const int16_t* data;
  int64_t stride, length;  // elements from one row to the next, and elements of a row
};

__m256i widened(const int8_t* at) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)at)); }

int32_t total(__m256i x) {
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
}

// out[m][n] = x[m] . w[n], for M rows of x and N rows of w
template <int M, int N>
void dots(Rows x, const int8_t* w, int32_t* out, int64_t out_stride) {
  __m256i sums[N][M] = {};
  int64_t at = 0;
  for (; at + RUN <= x.length; at += RUN) {
    __m256i columns[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      columns[n] = widened(w + n * x.length + at);
      if (at % LINE == 0) __builtin_prefetch(w + (N + n) * x.length + at, 0, 1);
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const __m256i row = _mm256_loadu_si256((const __m256i*)(x.data + m * x.stride + at));
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[n][m] = _mm256_add_epi32(sums[n][m], _mm256_madd_epi16(row, columns[n]));
    }
  }
  for (int n = 0; n < N; ++n) {
    for (int m = 0; m < M; ++m) {
      int32_t sum = total(sums[n][m]);
      for (int64_t rest = at; rest < x.length; ++rest) sum += x.data[m * x.stride + rest] * w[n * x.length + rest];
      out[m * out_stride + n] = sum;
    }
  }
}

template <int N>
void dots_of_rows(int64_t count, Rows x, const int8_t* w, int32_t* out, int64_t out_stride) {
  for (; count >= ROWS; count -= ROWS, x.data += ROWS * x.stride, out += ROWS * out_stride)
    dots<ROWS, N>(x, w, out, out_stride);
  if (count == 3) dots<3, N>(x, w, out, out_stride);
  if (count == 2) dots<2, N>(x, w, out, out_stride);
  if (count == 1) dots<1, N>(x, w, out, out_stride);
}

// The sums of all rows at once fit into the registers
template <int COLUMNS>
void products_by(int64_t m, Rows x, const int8_t* w, int64_t first, int64_t last, int32_t* out, int64_t n) {
  int64_t row = first;
  for (; row + COLUMNS <= last; row += COLUMNS) dots_of_rows<COLUMNS>(m, x, w + row * x.length, out + row, n);
  for (; row < last; ++row) dots_of_rows<1>(m, x, w + row * x.length, out + row, n);
}

}  // namespace

// out [m, n] = x [m, k] times the transpose of w [n, k], for the rows of w from `first` to before `last`; all contiguous
extern "C" void integer_products(
    const int8_t* x, const int8_t* w, int32_t* out, int64_t m, int64_t n, int64_t k, int64_t first, int64_t last) {
  const int64_t stride = k + PAD;
  std::vector<int16_t> wide(m * stride);
  for (int64_t row = 0; row < m; ++row) std::copy(x + row * k, x + (row + 1) * k, wide.data() + row * stride);
  const Rows rows{wide.data(), stride, k};
  m <= 2 ? products_by<4>(m, rows, w, first, last, out, n) : products_by<2>(m, rows, w, first, last, out, n);
}
