// Rows of a table, and in some places rows of other features: those of images among the tokens of a
// text. Two gathers write one result, so every row is written once.
#include <ATen/ops/full_like.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "dispatcher/autograd.h"
#include "dispatcher/checks.h"
#include "dispatcher/cuda_scope.h"
#include "dispatcher/output_memory.h"
#include "dispatcher/saved_call.h"
#include "dispatcher/tangent.h"
#include "token/kernel.h"
#include "token/operator.h"

namespace posembed::token {
namespace {

/// The row of features for each id: int64 [...], -1 for those that have a row of the table.
Tensor feature_rows(const Tensor& places) {
  if (places.scalar_type() != at::kBool) return places.to(at::kLong);
  const Tensor order = places.reshape({-1}).cumsum(0).view_symint(places.sym_sizes()) - 1;
  return at::where(places, order, -1);
}

Tensor empty_rows_and_features(const Tensor& weight, const Tensor& features, const Places& in,
                               Text gradient) {
  dispatcher::check_floating(weight, "weight");
  dispatcher::check_rank(weight, "weight", 2, "[num_embeddings, embedding_dim]");
  dispatcher::check_same_dtype(features, "features", weight, "weight");
  dispatcher::check_rank(features, "features", 2, "[features, embedding_dim]");
  dispatcher::check_size(features.sym_size(1), weight.sym_size(1), "features", "embedding_dim");
  dispatcher::check_integers(in.ids, "ids");
  if (in.places.scalar_type() != at::kBool) dispatcher::check_integers(in.places, "places");
  dispatcher::check_same_shape(in.places, "places", in.ids, "ids");
  TORCH_CHECK_VALUE(in.padding_idx >= -1 && in.padding_idx < weight.sym_size(0),
                    "padding_idx: expected -1 (none) or a row of the table of ", weight.sym_size(0),
                    " rows, got ", in.padding_idx);
  check_gradient_form(gradient);
  c10::SymDimVector sizes(in.ids.sym_sizes().begin(), in.ids.sym_sizes().end());
  sizes.push_back(weight.sym_size(1));
  return dispatcher::empty_symint(sizes, weight.options());
}

/// Throws c10::IndexError for the first index on the CPU that is neither a row nor a hole.
void check_rows(const Tensor& indices, int64_t rows, const char* expected) {
  const auto* data = indices.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < indices.numel(); ++i) {
    TORCH_CHECK_INDEX((data[i] >= 0 && data[i] < rows) || data[i] == hole, expected, rows - 1,
                      ", got ", data[i], " at index ", i);
  }
}

/// `rows` where a mask has as many places as there are features. A device's number cannot be read
/// here: other rows are then outside the features, which its kernel records.
Tensor counted(const Tensor& rows, const Tensor& mask, int64_t features) {
  const Tensor count = mask.sum();
  if (dispatcher::on_cuda(mask))
    return at::where(mask.logical_and(count.ne(features)), features, rows);
  TORCH_CHECK_VALUE(count.item<int64_t>() == features, "features: expected ", count.item<int64_t>(),
                    ", one for each place of the mask, got ", features);
  return rows;
}

void gather_both(const Tensor& weight, const Tensor& features, const Places& in, Text,
                 const Tensor& out) {
  Tensor rows = feature_rows(in.places);
  if (in.places.scalar_type() == at::kBool) rows = counted(rows, in.places, features.size(0));
  const Tensor is_own = rows.eq(-1);
  // What the caller passes is no hole: the row would not be written.
  const Tensor given = in.ids.to(at::kLong).clamp_min(hole + 1);
  const Tensor ids = at::where(is_own, given, hole).contiguous();
  rows = rows.clamp_min(hole + 1).masked_fill(is_own, hole).contiguous();
  if (!dispatcher::on_cuda(ids)) {
    check_rows(ids, weight.size(0), "ids: expected a row of the token table, 0 to ");
    check_rows(rows, features.size(0), "places: expected -1 or a row of the features, 0 to ");
  }
  Lookup lookup{0, in.scale};
  lookup.has_holes = true;
  gather(weight, ids, lookup, out);
  gather(features, rows, {0, 1.0, core::ErrorKind::slot, false, true}, out);
}

class FeaturesNode : public dispatcher::OperatorNode<FeaturesNode> {
 public:
  static constexpr const char* label = "EmbeddingWithFeaturesBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    call.members(visit);
    visit(num_embeddings);
    visit(num_features);
    visit(form);
  }

  dispatcher::variable_list backward(dispatcher::variable_list&& gradients) {
    const Tensor& gradient = gradients[0];
    dispatcher::variable_list found(2);
    if (!gradient.defined()) return found;
    const Places in = call.unpack();
    const Tensor rows = feature_rows(in.places);
    // As in a part of a vocabulary, -1 is no row.
    constexpr int64_t start = 0;
    if (needs(0)) {
      const Tensor ids = at::where(rows.eq(-1), in.ids.to(at::kLong), -1);
      found[0] = table_gradient(gradient, num_embeddings,
                                {ids, in.padding_idx, in.scale, false, start}, form);
    }
    if (needs(1)) {
      found[1] = embedding_backward(gradient, num_features, {rows, -1, 1.0, false, start});
    }
    return found;
  }

  dispatcher::SavedCall<Places> call;
  c10::SymInt num_embeddings, num_features;
  std::string form;
};

Tensor features_autograd(const Tensor& weight, const Tensor& features, const Places& in,
                         Text gradient) {
  auto node = dispatcher::node_for<FeaturesNode>(weight, features);
  if (node) {
    node->call.save(in);
    node->num_embeddings = weight.sym_size(0);
    node->num_features = features.sym_size(0);
    node->form = gradient;
  }
  const auto call = [&](const Tensor& table, const Tensor& others) {
    return embedding_with_features(table, others, in, gradient);
  };
  Tensor output = dispatcher::below_autograd([&] { return call(weight, features); });
  if (node) torch::autograd::set_history(output, node);
  // Linear in both together.
  const Tensor of_weight = dispatcher::tangent(weight), of_features = dispatcher::tangent(features);
  if (of_weight.defined() || of_features.defined()) {
    const auto or_zeros = [](const Tensor& direction, const Tensor& primal) {
      return direction.defined() ? direction : at::zeros_like(dispatcher::primal(primal));
    };
    dispatcher::set_tangent(output,
                            call(or_zeros(of_weight, weight), or_zeros(of_features, features)));
  }
  return output;
}

}  // namespace

Tensor places_in(const Tensor& rows, const Tensor& ids) {
  const Tensor wanted = ids.to(at::kLong);
  if (rows.numel() == 0) return at::full_like(wanted, -1);
  const Tensor found = at::searchsorted(rows, wanted).clamp_max(rows.numel() - 1);
  return at::where(rows.index({found}).eq(wanted), found, -1);
}

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  embedding_with_features.implement<empty_rows_and_features, gather_both>(m);
  embedding_with_features.differentiate<features_autograd>(m);
}

}  // namespace posembed::token
