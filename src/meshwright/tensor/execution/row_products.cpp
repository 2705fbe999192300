// Products of few rows with a matrix in float32, in one pass over the matrix. Vectors have 16 lanes with AVX-512, else 8.
//
// An element of a result is the same for any number of rows: its sum has a fixed order.
// Cost: m * n * k multiplications; each element of the matrix is read once from memory.

#include <immintrin.h>

#include <cstdint>

namespace {

#ifdef __AVX512F__
constexpr int64_t WIDTH = 16;
constexpr int ROWS = 8, COLUMNS = 3;  // 24 sums, 3 vectors of the matrix and one of the rows are 28 of 32 registers
#else
constexpr int64_t WIDTH = 8;
constexpr int ROWS = 4, COLUMNS = 3;  // 12 sums, 3 vectors of the matrix and one of the rows are 16 registers
#endif
typedef float Lanes __attribute__((vector_size(4 * WIDTH)));
typedef float Unaligned __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int Order __attribute__((vector_size(4 * WIDTH)));
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else  // g++ has the other function only since version 12
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Order{__VA_ARGS__})
#endif

struct Rows {
  const float* data;
  int64_t stride, length;  // elements from one row to the next, and elements of a row
};

Lanes load(const float* at) { return *reinterpret_cast<const Unaligned*>(at); }

// Written out, because compilers fuse a product and a sum in some loops and not in others, which rounds differently
#ifdef __AVX512F__
Lanes plus_product(Lanes sum, Lanes a, Lanes b) { return _mm512_fmadd_ps(a, b, sum); }
#else
Lanes plus_product(Lanes sum, Lanes a, Lanes b) { return _mm256_fmadd_ps(a, b, sum); }
#endif

// total(x): the sum of a vector's lanes. pairs_of_rows(x): the lanes of ROWS vectors, each summed to 2 lanes, in the order
// of `total`.
#ifdef __AVX512F__
float total(Lanes x) {
  x += SHUFFLE(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  x += SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  x += SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  return x[0] + x[1];
}

// The sums of 2 vectors in 2 groups of 8 lanes, then of 2 such vectors in 4 groups of 4, then in 8 groups of 2
Lanes in_eights(Lanes a, Lanes b) {
  return SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
Lanes in_fours(Lanes a, Lanes b) {
  return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
         SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
Lanes in_twos(Lanes a, Lanes b) {
  return SHUFFLE(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
         SHUFFLE(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
}
Lanes pairs_of_rows(const Lanes* x) {
  const Lanes first = in_fours(in_eights(x[0], x[1]), in_eights(x[2], x[3]));
  return in_twos(first, in_fours(in_eights(x[4], x[5]), in_eights(x[6], x[7])));
}
#else
float total(Lanes x) {
  x += SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3);
  x += SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5);
  return x[0] + x[1];
}

// The sums of 2 vectors in 2 groups of 4 lanes, then of 2 such vectors in 4 groups of 2
Lanes in_fours(Lanes a, Lanes b) {
  return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}
Lanes in_twos(Lanes a, Lanes b) {
  return SHUFFLE(a, b, 0, 1, 4, 5, 8, 9, 12, 13) + SHUFFLE(a, b, 2, 3, 6, 7, 10, 11, 14, 15);
}
Lanes pairs_of_rows(const Lanes* x) { return in_twos(in_fours(x[0], x[1]), in_fours(x[2], x[3])); }
#endif

// totals[m] = total(x[m])
template <int M>
void all_totals(const Lanes* x, float* totals) {
  if constexpr (M == ROWS) {
    const Lanes pairs = pairs_of_rows(x);
    for (int m = 0; m < M; ++m) totals[m] = pairs[2 * m] + pairs[2 * m + 1];
  } else {
    for (int m = 0; m < M; ++m) totals[m] = total(x[m]);
  }
}

// out[m][n] = x[m] . w[n], for M rows of x and N rows of w
template <int M, int N>
void dots(Rows x, Rows w, float* out, int64_t out_stride) {
  Lanes sums[N][M] = {};
  int64_t at = 0;
  for (; at + WIDTH <= x.length; at += WIDTH) {
    Lanes columns[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      columns[n] = load(w.data + n * w.stride + at);
      __builtin_prefetch(w.data + (N + n) * w.stride + at, 0, 1);  // the next columns: 0.09 ms instead of 0.15
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Lanes row = load(x.data + m * x.stride + at);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sums[n][m] = plus_product(sums[n][m], row, columns[n]);
    }
  }
  for (int n = 0; n < N; ++n) {
    float totals[M];
    all_totals<M>(sums[n], totals);
    for (int m = 0; m < M; ++m) {
      for (int64_t rest = at; rest < x.length; ++rest)
        totals[m] = __builtin_fmaf(x.data[m * x.stride + rest], w.data[n * w.stride + rest], totals[m]);
      out[m * out_stride + n] = totals[m];
    }
  }
}

template <int N>
void dots_of_rows(int64_t count, Rows x, Rows w, float* out, int64_t out_stride) {
  int64_t m = 0;
  for (; m + ROWS <= count; m += ROWS)
    dots<ROWS, N>({x.data + m * x.stride, x.stride, x.length}, w, out + m * out_stride, out_stride);
  for (; m < count; ++m) dots<1, N>({x.data + m * x.stride, x.stride, x.length}, w, out + m * out_stride, out_stride);
}

}  // namespace

// out [m, n] = x [m, k] times the transpose of w [n, k]; rows of x and w have strides, out is contiguous
extern "C" void row_products(
    const float* x, const float* w, float* out, int64_t m, int64_t n, int64_t k, int64_t x_stride, int64_t w_stride) {
  const Rows rows{x, x_stride, k};
  int64_t at = 0;
  for (; at + COLUMNS <= n; at += COLUMNS)
    dots_of_rows<COLUMNS>(m, rows, {w + at * w_stride, w_stride, k}, out + at, n);
  for (; at < n; ++at) dots_of_rows<1>(m, rows, {w + at * w_stride, w_stride, k}, out + at, n);
}
