// The learned-position operators, as C++ code calls them and as their kernels are registered.
#pragma once

#include <optional>
#include <ostream>
#include <string_view>
#include <tuple>

#include "dispatcher/operator.h"
#include "posembed/learned.h"

namespace posembed::learned {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

/// The rows of a sequence's positions, in the order of the schemas.
struct Rows {
  MaybeTensor positions;  // int [seq], [1, seq] or [batch, seq]; none: offset, offset + 1, …
  Offset offset = 0;      // a number
  int64_t first_row = 0;  // the row of position 0

  POSEMBED_FIELDS(self.positions, self.offset, self.first_row)
};

inline const dispatcher::Operator<Tensor(const Tensor&, const Tensor&), Rows> learned_add{
    "learned_add"};

/// The rows of given positions.
inline const dispatcher::Operator<Tensor(const Tensor&, const Tensor&, int64_t)> learned_encode{
    "learned_encode"};

/// The table's gradient, from that of learned_add and the number of its rows.
inline const dispatcher::Operator<Tensor(const Tensor&, c10::SymInt), Rows> learned_backward{
    "learned_backward"};

inline const dispatcher::Operator<Tensor(const Tensor&, int64_t, int64_t, std::string_view)>
    learned_extend{"learned_extend"};

/// The options of learned_resample, in the order of its schema.
struct Resample {
  Resampling how;

  POSEMBED_FIELDS(self.how.method(), self.how.align_corners(), self.how.antialias(),
                  self.how.scale_offset())
};

/// Those fields in a schema.
inline std::string resampling_schema(const char* method) {
  return std::string("str method=\"") + method +
         "\", bool align_corners=False, bool antialias=False, float scale_offset=0.0";
}

/// The last rows of a table as a grid, resampled to another one; the rows before it do not change.
inline const dispatcher::Operator<Tensor(const Tensor&, c10::SymIntArrayRef, c10::SymIntArrayRef),
                                  Resample>
    learned_resample{"learned_resample"};

/// The rows of packed pictures' tokens: the table's grid, grids [pictures, 2 or 3], merge, number
/// of tokens.
inline const dispatcher::Operator<Tensor(const Tensor&, c10::SymIntArrayRef, const Tensor&, int64_t,
                                         std::optional<c10::SymInt>),
                                  Resample>
    learned_packed{"learned_packed"};

/// The positions of tokens in padded sequences, from a mask.
inline const dispatcher::Operator<Tensor(const Tensor&, c10::SymInt, c10::SymInt)>
    learned_positions{"learned_positions"};

/// weight: floating [first_row + max_positions, embedding_dim].
void check_table(const Tensor& weight, const char* argument, int64_t first_row);

/// positions: int [seq], [1, seq] or [batch, seq], or none. Rejects an offset given with them.
void check_positions(const MaybeTensor& positions, const c10::SymInt& batch, const c10::SymInt& seq,
                     const c10::SymInt& offset);

/// grid: {rows, columns}
void check_grid(c10::SymIntArrayRef grid, const char* argument);

/// Checks the table of a grid; returns the number of rows before the grid's.
c10::SymInt prefix_of(const Tensor& weight, c10::SymIntArrayRef grid);

void check_resampling(const Resampling& how);

/// Prints the options that are not the default.
void print_resampling(const Resampling& how, const char* usual_method, std::ostream& stream);

/// Checks that positions offset, offset + 1, … of a sequence have rows.
void check_length(const c10::SymInt& offset, const c10::SymInt& seq, const c10::SymInt& rows,
                  int64_t first_row);

/// Checks that given positions, on the CPU, have rows.
void check_position_values(const Tensor& positions, int64_t rows, int64_t first_row);

}  // namespace posembed::learned
