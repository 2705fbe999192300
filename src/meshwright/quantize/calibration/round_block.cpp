// GPTQ: round a block of columns one by one, and change the columns of the block that follow.
//
// Each operation rounds as in torch: no product is fused with a sum. Rows are independent, so they are done in tiles.
// Cost: n * b^2 / 2 multiplications for n rows and a block of b columns.

#include <algorithm>
#include <cmath>
#include <cstdint>

#ifdef __clang__
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

constexpr int64_t TILE = 64;  // rows whose block fits into the nearest cache

// left, codes, scale, zero (or null) and errors are [b, n], each row `stride` elements behind the one before; errors are
// contiguous. upper is the factor of the block [b, b], with a stride.
extern "C" void round_block(
    float* left, float* codes, const float* scale, const float* zero, const float* upper, float* errors, int64_t b,
    int64_t n, int64_t stride, int64_t upper_stride, int64_t low, int64_t high) {
  const float lowest = (float)low, highest = (float)high;
  for (int64_t first = 0; first < n; first += TILE) {
    const int64_t last = std::min(n, first + TILE);
    for (int64_t i = 0; i < b; ++i) {
      float *x = left + i * stride, *code = codes + i * stride, *error = errors + i * n;
      const float *step = scale + i * stride, *offset = zero ? zero + i * stride : nullptr;
      const float pivot = upper[i * upper_stride + i];
      for (int64_t row = first; row < last; ++row) {
        const float shift = offset ? offset[row] : 0;
        const float ratio = x[row] / step[row];
        code[row] = std::min(std::max(std::nearbyint(offset ? ratio + shift : ratio), lowest), highest);
        const float value = (offset ? code[row] - shift : code[row]) * step[row];
        error[row] = (x[row] - value) / pivot;
      }
      for (int64_t j = i + 1; j < b; ++j) {
        const float factor = upper[i * upper_stride + j];
        float* later = left + j * stride;
        for (int64_t row = first; row < last; ++row) later[row] = later[row] - factor * error[row];
      }
    }
  }
}
