// Turns given tables into the rotary kernels' arguments, for all operators that rotate by them.
#pragma once

#include "posembed/rotary_tables.h"
#include "rotary/arguments.h"

namespace posembed::rotary_tables {

/// The checks of tables for rows of `query` that need no values.
void check_tables(const RotaryTables& tables, const at::Tensor& query,
                  const rotary::Dimensions& where);

/// Tables in a form that a kernel can read: without lazy negation or conjugation, and with equal
/// strides. Complex tables become their real and imaginary parts.
RotaryTables readable(const RotaryTables& tables);

/// Points the kernel's arguments to tables that are readable() and must outlive it.
void set_tables(const RotaryTables& tables, rotary::Arguments* call);

}  // namespace posembed::rotary_tables
