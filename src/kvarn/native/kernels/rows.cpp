// Compiled once per instruction set; see rows.hpp.
#include "../rows.hpp"

#include "simd.hpp"

namespace kvarn::KVARN_ISA {
namespace {

void norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
    F sum = zero();
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) sum = fma(load(x + i), load(x + i), sum);
    if (i < n) {
        float rest[kLanes] = {};
        for (int64_t j = i; j < n; ++j) rest[j - i] = x[j];
        sum = fma(load(rest), load(rest), sum);
    }
    const float scale = 1.0f / __builtin_sqrtf(reduce_add(sum) / float(n) + eps);
    for (i = 0; i + kLanes <= n; i += kLanes) store(out + i, mul(mul(load(x + i), set1(scale)), load(weight + i)));
    for (; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

void rotate(float* x, const float* cos, const float* sin, int64_t half) {
    int64_t i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        const F a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
        store(x + i, sub(mul(a, c), mul(b, s)));
        store(x + half + i, add(mul(b, c), mul(a, s)));
    }
    for (; i < half; ++i) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cos[i] - b * sin[i];
        x[half + i] = b * cos[i] + a * sin[i];
    }
}

F exponential(F x) { return exp2(min(set1(127.0f), mul(x, set1(1.4426950408889634f)))); }

F gated(F g, F u, Gate kind) {
    F inner = g;
    if (kind == Gate::Gelu) {  // 0.5 (1 + tanh z) is 1 / (1 + exp(-2 z))
        const F cube = mul(mul(mul(set1(0.044715f), g), g), g);
        inner = mul(set1(2.0f * 0.7978845608028654f), add(g, cube));
    }
    return mul(div(g, add(set1(1.0f), exponential(sub(zero(), inner)))), u);
}

void gate(const float* g, const float* up, int64_t n, Gate kind, float* out) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(out + i, gated(load(g + i), load(up + i), kind));
    if (i < n) {
        float a[kLanes] = {}, b[kLanes] = {};
        for (int64_t j = i; j < n; ++j) a[j - i] = g[j], b[j - i] = up[j];
        store(a, gated(load(a), load(b), kind));
        for (int64_t j = i; j < n; ++j) out[j] = a[j - i];
    }
}

void scale(float* x, int64_t n, float factor) {
    for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

void add_rows(float* x, const float* y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) x[i] += y[i];
}

}  // namespace

extern const Rows rows;
const Rows rows = {norm, rotate, gate, scale, add_rows};

}  // namespace kvarn::KVARN_ISA
