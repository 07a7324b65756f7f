// The functional interface: thin wrappers around the operators.
#include "posembed/rotary_tables.h"
#include "rotary_tables/rotary_tables_operator.h"

namespace posembed {

torch::Tensor functional::rotary_tables(const torch::Tensor& query, const RotaryTables& tables) {
  return rotary_tables::rotary_tables(query, {tables});
}

std::tuple<torch::Tensor, torch::Tensor> functional::rotary_tables(const torch::Tensor& query,
                                                                   const torch::Tensor& key,
                                                                   const RotaryTables& tables) {
  return rotary_tables::rotary_tables_pair(query, key, {tables});
}

torch::Tensor functional::rotary_tables_(const torch::Tensor& query, const RotaryTables& tables) {
  rotary_tables::rotary_tables_(query, {tables});
  return query;
}

std::tuple<torch::Tensor, torch::Tensor> functional::rotary_tables_(const torch::Tensor& query,
                                                                    const torch::Tensor& key,
                                                                    const RotaryTables& tables) {
  rotary_tables::rotary_tables_pair_(query, key, {tables});
  return {query, key};
}

torch::Tensor functional::rotary_tables_out(const torch::Tensor& out, const torch::Tensor& query,
                                            const RotaryTables& tables) {
  rotary_tables::rotary_tables_out(out, query, {tables});
  return out;
}

std::tuple<torch::Tensor, torch::Tensor> functional::rotary_tables_out(
    const torch::Tensor& query_out, const torch::Tensor& key_out, const torch::Tensor& query,
    const torch::Tensor& key, const RotaryTables& tables) {
  rotary_tables::rotary_tables_pair_out(query_out, key_out, query, key, {tables});
  return {query_out, key_out};
}

}  // namespace posembed
