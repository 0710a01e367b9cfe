// Shared by the binding files: checked arrays, and the cache as Python holds it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "checks.hpp"
#include "unlocked.hpp"

namespace nb = nanobind;

namespace kvarn {

using In = nb::ndarray<nb::ro, nb::device::cpu>;  // also takes read-only arrays
using Out = nb::ndarray<nb::device::cpu>;

inline std::string name_of(nb::dlpack::dtype type) {
    const char* kinds[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
    return (type.code < 7 ? kinds[type.code] : "type ") + std::to_string(type.bits);
}

template <typename Any>
std::string describe(const Any& x) {
    std::string text = "[";
    for (size_t i = 0; i < x.ndim(); ++i) text += (i ? ", " : "") + std::to_string(x.shape(i));
    text += "] strides [";
    for (size_t i = 0; i < x.ndim(); ++i) text += (i ? ", " : "") + std::to_string(x.stride(i));
    return text + "] of " + name_of(x.dtype());
}

// A contiguous array of T with N dimensions. Throws if the given array is anything else.
template <typename T, int N>
struct Array {
    T* at = nullptr;
    int64_t shape_[N] = {};

    template <typename Any>
    Array(const Any& x, const char* name) {
        bool fits = x.ndim() == N && x.dtype() == nb::dtype<std::remove_const_t<T>>();
        int64_t stride = 1;
        for (int i = N - 1; fits && i >= 0; --i) {
            shape_[i] = int64_t(x.shape(size_t(i)));
            fits = shape_[i] <= 1 || x.stride(size_t(i)) == stride || x.size() == 0;
            stride *= shape_[i];
        }
        ensure(fits, std::string(name) + ": an array of " + std::to_string(N) + " dimensions of contiguous " +
                         name_of(nb::dtype<std::remove_const_t<T>>()) + " is needed, not " + describe(x));
        at = (T*)x.data();
    }
    T* data() const { return at; }
    int64_t shape(int i) const { return shape_[i]; }
};

struct Cache {
    CacheView view;
    std::vector<nb::object> kept;   // keeps the arrays alive that the view points into
    std::vector<nb::object> cells;  // per group: keeps this step's cells alive
};

void bind_cache(nb::module_& m);
void bind_program(nb::module_& m);

}  // namespace kvarn
