// What a step may ask of the kernels. They read and write where tables point: a table that names a block outside the
// store, or lacks a key that a query sees, is refused here, with std::invalid_argument, before anything runs.
#pragma once

#include <string>

#include "program.hpp"

namespace kvarn {

// Both throw std::invalid_argument, which is a ValueError in Python. The second one makes its text only when it throws:
// each % becomes the next number.
void ensure(bool holds, const std::string& what);
void ensure(bool holds, const char* what, int64_t a, int64_t b);

void check_table(const TableView& table, const SpecView& spec, const StoreView& store);

// The whole of a step of a program: its layers are the cache's, its tables hold.
void check_step(const Program& program, const CacheView& cache, const int32_t* positions, int64_t n_tokens);

}  // namespace kvarn
