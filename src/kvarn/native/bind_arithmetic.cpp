// The Python bindings for kvarn/arithmetic.py: elementary functions over arrays, and sums of
// products in a fixed order.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>

#include "bind.hpp"
#include "dots.hpp"
#include "elementary.hpp"

using namespace kvarn;

namespace {

using Doubles = Array<double, 1>;
using ConstDoubles = Array<const double, 1>;

template <double (*kFunction)(double)>
void each(In given, Out result) {
    const ConstDoubles x(given, "x");
    const Doubles out(result, "out");
    ensure(x.shape(0) == out.shape(0), "x and out differ in length");
    const Unlocked unlocked;
    for (int64_t i = 0; i < x.shape(0); ++i) out.data()[i] = kFunction(x.data()[i]);
}

void sines(In given, Out sin, Out cos) {
    const ConstDoubles x(given, "x");
    const Doubles s(sin, "sin"), c(cos, "cos");
    ensure(x.shape(0) == s.shape(0) && x.shape(0) == c.shape(0), "x, sin and cos differ in length");
    const Unlocked unlocked;
    for (int64_t i = 0; i < x.shape(0); ++i) {
        const SinCos both = sin_cos(x.data()[i]);
        s.data()[i] = both.sin, c.data()[i] = both.cos;
    }
}

// a [batch, m, k], b [batch, n, k] -> out [batch, m, n]; threads share the columns.
void dots(Pool& pool, In left, In right, Out result) {
    const Array<const float, 3> a(left, "dots: a"), b(right, "dots: b");
    const Array<float, 3> out(result, "dots: out");
    const int64_t m = a.shape(1), n = b.shape(1), k = a.shape(2);
    ensure(b.shape(2) == k && b.shape(0) == a.shape(0) && out.shape(0) == a.shape(0) && out.shape(1) == m &&
               out.shape(2) == n,
           "dots: a is " + describe(left) + ", b is " + describe(right) + ", out is " + describe(result));
    const Unlocked unlocked;
    const Dots& kernel = *kernels().dots;
    for (int64_t i = 0; i < a.shape(0); ++i)
        pool.run([&](int thread) {
            const int64_t begin = n * thread / pool.size(), end = n * (thread + 1) / pool.size();
            kernel.dots(a.data() + i * m * k, b.data() + (i * n + begin) * k, m, end - begin, k, n,
                        out.data() + i * m * n + begin);
        });
}

// weights [batch, m, j], seen [m, j], v [batch, j, d] -> out [batch, m, d]
void weigh(In weights, In seen, In values, Out result) {
    const Array<const float, 3> w(weights, "weigh: weights"), v(values, "weigh: v");
    const Array<const bool, 2> s(seen, "weigh: seen");
    const Array<float, 3> out(result, "weigh: out");
    const int64_t m = w.shape(1), j = w.shape(2), d = v.shape(2);
    ensure(s.shape(0) == m && s.shape(1) == j && v.shape(0) == w.shape(0) && v.shape(1) == j &&
               out.shape(0) == w.shape(0) && out.shape(1) == m && out.shape(2) == d,
           "weigh: weights are " + describe(weights) + ", seen is " + describe(seen) + ", v is " + describe(values) +
               ", out is " + describe(result));
    const Unlocked unlocked;
    for (int64_t i = 0; i < w.shape(0); ++i)
        kernels().dots->weigh(w.data() + i * m * j, s.data(), v.data() + i * j * d, m, j, d, out.data() + i * m * d);
}

}  // namespace

void bind_arithmetic(nb::module_& m) {
    m.def("exp", &each<exponential>, nb::arg("x"), nb::arg("out"));
    m.def("log", &each<logarithm>, nb::arg("x"), nb::arg("out"));
    m.def("sin_cos", &sines, nb::arg("x"), nb::arg("sin"), nb::arg("cos"));
    m.def("dots", &dots, nb::arg("pool"), nb::arg("a"), nb::arg("b"), nb::arg("out"));
    m.def("weigh", &weigh, nb::arg("weights"), nb::arg("seen"), nb::arg("v"), nb::arg("out"));
}
