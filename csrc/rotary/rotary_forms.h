// The forms of operators that rotate query, or query and key: into new tensors, in place, and into
// given memory.
#pragma once

#include <tuple>

#include "dispatcher/memory_checks.h"
#include "dispatcher/operator.h"
#include "rotary/rotary_checks.h"

namespace posembed::rotary {

/// The kernels of six operators. Rules: Call, the type of their arguments after the tensors;
/// check(), which needs no values and returns what its rotate() takes; check_written(), for memory
/// that results go to; empty(), memory for a result; readable(), an input as kernels read it.
template <typename Rules>
struct Forms {
  using Call = typename Rules::Call;
  using Two = std::tuple<at::Tensor, at::Tensor>;
  using Checked = decltype(Rules::check(at::Tensor(), nullptr, Call()));

  template <typename Result>
  struct Prepared {
    Checked checked;
    Result result;
  };

  static Prepared<Tensor> prepare(const Tensor& query, const Call& call) {
    return {Rules::check(query, nullptr, call), Rules::empty(query, call)};
  }

  static void rotate(const Tensor& query, const Call& call, const Prepared<Tensor>& prepared) {
    const Tensor in = Rules::readable(query, call);
    Rules::rotate({{&in, nullptr}, {&prepared.result, nullptr}, 1}, call, prepared.checked);
  }

  static Prepared<Two> prepare_pair(const Tensor& query, const Tensor& key, const Call& call) {
    return {Rules::check(query, &key, call), {Rules::empty(query, call), Rules::empty(key, call)}};
  }

  static void rotate_pair(const Tensor& query, const Tensor& key, const Call& call,
                          const Prepared<Two>& prepared) {
    const Tensor query_in = Rules::readable(query, call), key_in = Rules::readable(key, call);
    const auto& [query_out, key_out] = prepared.result;
    Rules::rotate({{&query_in, &key_in}, {&query_out, &key_out}, 2}, call, prepared.checked);
  }

  static Checked check_in_place(const Tensor& query, const Call& call) {
    return check_out(query, query, call, "query");
  }

  static void rotate_in_place(const Tensor& query, const Call& call, const Checked& checked) {
    Rules::rotate({{&query, nullptr}, {&query, nullptr}, 1}, call, checked);
  }

  static Checked check_pair_in_place(const Tensor& query, const Tensor& key, const Call& call) {
    return check_pair_out(query, key, query, key, call, "query", "key");
  }

  static void rotate_pair_in_place(const Tensor& query, const Tensor& key, const Call& call,
                                   const Checked& checked) {
    dispatcher::check_no_overlap(key, "key", query, "query");
    Rules::rotate({{&query, &key}, {&query, &key}, 2}, call, checked);
  }

  static Checked check_into(const Tensor& out, const Tensor& query, const Call& call) {
    return check_out(out, query, call, "out");
  }

  static void rotate_into(const Tensor& out, const Tensor& query, const Call& call,
                          const Checked& checked) {
    dispatcher::check_no_overlap_or_same(out, "out", query, "query");
    const Tensor in = Rules::readable(query, call);
    Rules::rotate({{&in, nullptr}, {&out, nullptr}, 1}, call, checked);
  }

  static Checked check_pair_into(const Tensor& query_out, const Tensor& key_out,
                                 const Tensor& query, const Tensor& key, const Call& call) {
    return check_pair_out(query_out, key_out, query, key, call, "query_out", "key_out");
  }

  static void rotate_pair_into(const Tensor& query_out, const Tensor& key_out, const Tensor& query,
                               const Tensor& key, const Call& call, const Checked& checked) {
    check_pair_memory(query_out, key_out, query, key);
    const Tensor query_in = Rules::readable(query, call), key_in = Rules::readable(key, call);
    Rules::rotate({{&query_in, &key_in}, {&query_out, &key_out}, 2}, call, checked);
  }

  /// Registers all but the derivatives of `one` and `pair`.
  template <auto& one, auto& pair, auto& one_, auto& pair_, auto& one_out, auto& pair_out>
  static void implement(torch::Library& library) {
    one.template implement<prepare, rotate>(library);
    pair.template implement<prepare_pair, rotate_pair>(library);
    one_.template implement<check_in_place, rotate_in_place>(library);
    pair_.template implement<check_pair_in_place, rotate_pair_in_place>(library);
    one_out.template implement<check_into, rotate_into>(library);
    pair_out.template implement<check_pair_into, rotate_pair_into>(library);
    one_.refuse_gradients(library);
    pair_.refuse_gradients(library);
    one_out.refuse_gradients(library);
    pair_out.refuse_gradients(library);
  }

 private:
  static Checked check_out(const Tensor& out, const Tensor& query, const Call& call,
                           const char* name) {
    Checked checked = Rules::check(query, nullptr, call);
    Rules::check_written(out, name, query, "query", call);
    return checked;
  }

  static Checked check_pair_out(const Tensor& query_out, const Tensor& key_out, const Tensor& query,
                                const Tensor& key, const Call& call, const char* query_name,
                                const char* key_name) {
    Checked checked = Rules::check(query, &key, call);
    Rules::check_written(query_out, query_name, query, "query", call);
    Rules::check_written(key_out, key_name, key, "key", call);
    return checked;
  }
};

}  // namespace posembed::rotary
