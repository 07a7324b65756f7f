#include "dispatcher/schema.h"

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  posembed::dispatcher::define(m,
                               "step_rows_("
                               "Tensor(a!) weight, "
                               "Tensor gradient, "
                               "str rule, "
                               "float lr, "
                               "int step=1, "
                               "Tensor? ids=None, "
                               "Tensor(b!)? first=None, "
                               "Tensor(c!)? second=None, "
                               "Tensor? owed=None, "
                               "Tensor(d!)? remainder=None, "
                               "float first_decay=0.0, "
                               "float second_decay=0.0, "
                               "float eps=1e-8, "
                               "float weight_decay=0.0, "
                               "float gradient_scale=1.0, "
                               "str rounding=\"nearest\", "
                               "int seed=0, "
                               "int first_row=0) -> ()");
}
