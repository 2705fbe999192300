// Products of few rows in float32 with a matrix that is stored as codes of 2 to 8 bits, in one pass over the codes.
//
// A code becomes a float32 number in a register; the terms of a group are added up before they are multiplied by the
// group's scale. An element of a result is the same for any number of rows: its sum has a fixed order.
// Cost: m * n * k multiplications, and n * k codes that are decoded once for ROWS rows.

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t RUN = 8;  // codes that are decoded at once: `bits` bytes
constexpr int ROWS = 4;
constexpr int64_t PAD = 24;
constexpr int64_t LINE = 64;  // codes after which memory is read ahead

// Reading a run of codes reads 8 bytes, so the last one is read from a copy
constexpr int64_t READ = 8;

struct Codes {
  const uint8_t* data;
  int64_t row_bytes;
  const float *scales, *zeros;  // [rows, groups]
  int64_t scale_stride, groups;
  const float* table;  // the 16 numbers of codes of 4 bits, or none
  int64_t whole;       // elements of a row before which 8 bytes can be read
};

template <class T>
T read(const uint8_t* at) {
  T found;
  std::memcpy(&found, at, sizeof found);
  return found;
}

__m256i eight_bytes(const uint8_t* at) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)at)); }

// Integers of BITS bits without a sign
template <int BITS>
struct Integers {
  static constexpr int64_t BYTES = BITS;  // of a run
  static constexpr int MIDDLE = 1 << (BITS - 1);
  __m256 operator()(const uint8_t* at, const Codes&) const { return _mm256_cvtepi32_ps(plain(at)); }
  static __m256i plain(const uint8_t* at) {
    constexpr int MASK = (1 << BITS) - 1;
    if constexpr (BITS == 8) return eight_bytes(at);
    if constexpr (RUN * BITS <= 32) {
      const __m256i all = _mm256_set1_epi32(BITS == 2 ? read<uint16_t>(at) : read<int32_t>(at));
      const __m256i shifts = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(BITS));
      return _mm256_and_si256(_mm256_srlv_epi32(all, shifts), _mm256_set1_epi32(MASK));
    }
    const __m256i all = _mm256_set1_epi64x(read<int64_t>(at));  // with bits of the next codes
    const __m256 first = _mm256_castsi256_ps(_mm256_srlv_epi64(all, _mm256_setr_epi64x(0, BITS, 4 * BITS, 5 * BITS)));
    const __m256i next = _mm256_setr_epi64x(2 * BITS, 3 * BITS, 6 * BITS, 7 * BITS);
    const __m256 second = _mm256_castsi256_ps(_mm256_srlv_epi64(all, next));
    return _mm256_and_si256(_mm256_castps_si256(_mm256_shuffle_ps(first, second, 0x88)), _mm256_set1_epi32(MASK));
  }
};

// Integers of 8 bits with a sign
struct SignedBytes {
  static constexpr int64_t BYTES = 8;
  static constexpr int MIDDLE = 0;
  __m256 operator()(const uint8_t* at, const Codes&) const {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at)));
  }
};

// Numbers of a table, by codes of 4 bits
struct Numbers {
  static constexpr int64_t BYTES = 4;
  static constexpr int MIDDLE = 0;
  __m256 operator()(const uint8_t* at, const Codes& w) const {
    const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    const __m256i codes = _mm256_srlv_epi32(_mm256_set1_epi32(read<int32_t>(at)), shifts);  // with bits of the next codes
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(w.table), codes);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(w.table + 8), codes);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
  }
};

// float8_e4m3fn: its exponent and its fraction are those of a float16 that is 2^8 times smaller
struct Float8 {
  static constexpr int64_t BYTES = 8;
  static constexpr int MIDDLE = 0;
  __m256 operator()(const uint8_t* at, const Codes&) const {
    const __m128i signs = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)at)), 7);  // in two bits
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_andnot_si128(_mm_set1_epi16(0x4000), signs)), _mm256_set1_ps(256));
  }
};

// Numbers in float32, decoded before
struct Decoded {
  static constexpr int64_t BYTES = 4 * RUN;
  static constexpr int MIDDLE = 0;
  __m256 operator()(const uint8_t* at, const Codes&) const { return _mm256_loadu_ps((const float*)at); }
};

float total(__m256 x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

struct Rows {
  const float* data;
  int64_t stride, length;  // elements from one row to the next, and elements of a row
};

// space [count, length] = the numbers of these rows of the matrix without their scales
template <class Decode>
void decode_rows(int64_t count, int64_t length, const Codes& w, int64_t row, float* space, int64_t stride) {
  const Decode decode;
  const int64_t group = length / w.groups;
  for (int64_t n = 0; n < count; ++n, ++row) {
    for (int64_t at = 0; at < length; at += RUN) {
      uint8_t codes[READ] = {};
      const int64_t first = at / RUN * Decode::BYTES;
      const uint8_t* from = w.data + row * w.row_bytes + first;
      if (at >= w.whole) from = (const uint8_t*)std::memcpy(codes, from, std::min(Decode::BYTES, w.row_bytes - first));
      __m256 numbers = decode(from, w);
      if constexpr (Decode::MIDDLE != 0) {
        const float zero = w.zeros ? w.zeros[row * w.scale_stride + at / group] : 0;
        numbers = _mm256_sub_ps(numbers, _mm256_set1_ps(Decode::MIDDLE + zero));
      }
      float* to = space + n * stride + at;
      if (at + RUN <= length) _mm256_storeu_ps(to, numbers);
      else for (int64_t i = 0; at + i < length; ++i) to[i] = numbers[i];
    }
  }
}

// out[m][n] = x[m] . w[n], for M rows of x and N rows of w
template <class Decode, int M, int N>
void dots(Rows x, const Codes& w, int64_t row, float* out, int64_t out_stride) {
  const Decode decode;
  const int64_t group = x.length / w.groups;
  __m256 sums[N][M] = {}, zeros[N];
  for (int n = 0; n < N; ++n) zeros[n] = _mm256_set1_ps(Decode::MIDDLE);
  for (int64_t g = 0; g < w.groups; ++g) {
    __m256 parts[N][M] = {};
    if (w.zeros)
      for (int n = 0; n < N; ++n) zeros[n] = _mm256_set1_ps(Decode::MIDDLE + w.zeros[(row + n) * w.scale_stride + g]);
    const auto add = [&](auto&& codes, auto&& elements) {
      __m256 columns[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        columns[n] = decode(codes(n), w);
        if constexpr (Decode::MIDDLE != 0) columns[n] = _mm256_sub_ps(columns[n], zeros[n]);
      }
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const __m256 run = _mm256_loadu_ps(elements(m));
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) parts[n][m] = _mm256_fmadd_ps(run, columns[n], parts[n][m]);
      }
    };
    int64_t at = g * group;
    const int64_t end = at + group, whole = std::min(end - group % RUN, w.whole);
    for (; at < whole; at += RUN) {
      const uint8_t* first = w.data + row * w.row_bytes + at / RUN * Decode::BYTES;
      add([&](int n) { return first + n * w.row_bytes; }, [&](int m) { return x.data + m * x.stride + at; });
      if (Decode::BYTES <= READ && at % LINE == 0)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) __builtin_prefetch(first + (N + n) * w.row_bytes, 0, 1);
    }
    for (; at < end; at += RUN) {  // the end of a row, from copies that are filled with zeros
      float elements[M][RUN] = {};
      uint8_t codes[N][4 * RUN] = {};
      const int64_t first = at / RUN * Decode::BYTES, rest = std::min(Decode::BYTES, w.row_bytes - first);
      for (int n = 0; n < N; ++n) std::memcpy(codes[n], w.data + (row + n) * w.row_bytes + first, rest);
      for (int m = 0; m < M; ++m)
        std::memcpy(elements[m], x.data + m * x.stride + at, sizeof(float) * std::min(RUN, end - at));
      add([&](int n) { return codes[n]; }, [&](int m) { return elements[m]; });
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const __m256 scale = _mm256_set1_ps(w.scales[(row + n) * w.scale_stride + g]);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) sums[n][m] = _mm256_fmadd_ps(parts[n][m], scale, sums[n][m]);
    }
  }
  for (int n = 0; n < N; ++n)
    for (int m = 0; m < M; ++m) out[m * out_stride + row + n] = total(sums[n][m]);
}

template <class Decode, int N>
void dots_of_rows(int64_t count, Rows x, const Codes& w, int64_t row, float* out, int64_t out_stride) {
  for (; count >= ROWS; count -= ROWS, x.data += ROWS * x.stride, out += ROWS * out_stride)
    dots<Decode, ROWS, N>(x, w, row, out, out_stride);
  if (count == 3) dots<Decode, 3, N>(x, w, row, out, out_stride);
  if (count == 2) dots<Decode, 2, N>(x, w, row, out, out_stride);
  if (count == 1) dots<Decode, 1, N>(x, w, row, out, out_stride);
}

// N rows of the matrix at once, decoded before for more rows of x than ROWS
template <class Decode, int N>
void dots_of_matrix_rows(int64_t m, Rows x, const Codes& w, int64_t row, float* out, int64_t out_stride, float* space) {
  if (m <= ROWS) return dots_of_rows<Decode, N>(m, x, w, row, out, out_stride);
  const int64_t stride = x.length + PAD;
  decode_rows<Decode>(N, x.length, w, row, space, stride);
  Codes decoded = w;
  decoded.data = (const uint8_t*)space;
  decoded.row_bytes = 4 * stride;
  decoded.scales += row * w.scale_stride;
  decoded.zeros = nullptr;
  decoded.whole = x.length;
  dots_of_rows<Decoded, N>(m, x, decoded, 0, out + row, out_stride);
}

template <class Decode, int COLUMNS>
void products_by(int64_t m, Rows x, const Codes& w, int64_t first, int64_t last, float* out, int64_t n) {
  std::vector<float> space(m > ROWS ? COLUMNS * (x.length + PAD) : 0);
  int64_t row = first;
  for (; row + COLUMNS <= last; row += COLUMNS)
    dots_of_matrix_rows<Decode, COLUMNS>(m, x, w, row, out, n, space.data());
  for (; row < last; ++row) dots_of_matrix_rows<Decode, 1>(m, x, w, row, out, n, space.data());
}

// The sums of all rows at once fit into the registers
template <class Decode>
void products(int64_t m, Rows x, Codes w, int64_t first, int64_t last, float* out, int64_t n) {
  w.whole = w.row_bytes < READ ? 0 : ((w.row_bytes - READ) / Decode::BYTES + 1) * RUN;
  if (m <= 2) return products_by<Decode, 4>(m, x, w, first, last, out, n);
  if (m <= ROWS) return products_by<Decode, 2>(m, x, w, first, last, out, n);
  products_by<Decode, 3>(m, x, w, first, last, out, n);
}

}  // namespace

extern "C" void packed_products(
    const float* x, const uint8_t* codes, const float* scales, const float* zeros, const float* table, float* out,
    int64_t form, int64_t m, int64_t n, int64_t k, int64_t x_stride, int64_t row_bytes, int64_t scale_stride, int64_t groups,
    int64_t first, int64_t last) {
  const Rows rows{x, x_stride, k};
  const Codes w{codes, row_bytes, scales, zeros, scale_stride, groups, table, 0};
  switch (form) {
    case 2: return products<Integers<2>>(m, rows, w, first, last, out, n);
    case 3: return products<Integers<3>>(m, rows, w, first, last, out, n);
    case 4: return products<Integers<4>>(m, rows, w, first, last, out, n);
    case 5: return products<Integers<5>>(m, rows, w, first, last, out, n);
    case 6: return products<Integers<6>>(m, rows, w, first, last, out, n);
    case 7: return products<Integers<7>>(m, rows, w, first, last, out, n);
    case 8: return products<Integers<8>>(m, rows, w, first, last, out, n);
    case 9: return products<SignedBytes>(m, rows, w, first, last, out, n);
    case 10: return products<Numbers>(m, rows, w, first, last, out, n);
    case 11: return products<Float8>(m, rows, w, first, last, out, n);
  }
}
