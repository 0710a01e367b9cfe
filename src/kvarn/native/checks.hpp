// Checks a step before it runs. Kernels trust the tables: they read and write where a table points.
// So a table is refused here, with std::invalid_argument, if it names a block outside the store or
// lacks a key that a query sees.
#pragma once

#include <string>

#include "program.hpp"

namespace kvarn {

// Both throw std::invalid_argument, which Python sees as a ValueError. The second one builds its
// text only when it throws: each % becomes the next number.
void ensure(bool holds, const std::string& what);
void ensure(bool holds, const char* what, int64_t a, int64_t b);

// What a write reads: the rows of q_start, kv_len and cells.
void check_rows(const TableView& table, const StoreView& store);

// And what attention reads.
void check_table(const TableView& table, const SpecView& spec, const StoreView& store);

// Everything a program's step reads: the layers exist in the cache and have its shapes, and every
// table is valid.
void check_step(const Program& program, const CacheView& cache, const int32_t* positions, int64_t n_tokens);

}  // namespace kvarn
