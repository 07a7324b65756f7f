// The n-gram operators. Multipliers and moduli are numbers, not tensors: they are checked on every
// device, their reciprocals are computed on the host, and nothing of them can rot.
#include "ngram/ngram_operator.h"

#include <ATen/TensorSubclassLikeUtils.h>

#include <algorithm>
#include <limits>

#include "dispatcher/launch.h"
#include "dispatcher/output_memory.h"
#include "ngram/ngram.h"

namespace posembed::ngram {
namespace {

constexpr int64_t largest = std::numeric_limits<int64_t>::max();

/// Polynomials have a multiplier for each head; products one for each token of the longest n-gram.
bool is_polynomial(const NgramSpec& spec) { return spec.rule() != NgramRule::products; }

/// The number of sizes that the lists imply if they are not given.
int64_t implied_sizes(const NgramSpec& spec) {
  const auto numbers = static_cast<int64_t>(spec.multipliers().size());
  if (!is_polynomial(spec)) return numbers - 1;
  return static_cast<int64_t>(spec.moduli().size()) / numbers;
}

// ------------------------------------------------------------------------------------- checks

void check_multipliers(const NgramSpec& spec) {
  const auto count = static_cast<int64_t>(spec.multipliers().size());
  const int64_t least = is_polynomial(spec) || !spec.sizes().empty() ? 1 : 2;
  TORCH_CHECK_VALUE(count >= least && count <= max_multipliers, "multipliers: expected ", least,
                    " to ", max_multipliers, " numbers, got ", count);
}

void check_sizes(const NgramSpec& spec, const std::vector<int64_t>& sizes) {
  int64_t before = 0;
  for (const int64_t size : sizes) {
    TORCH_CHECK_VALUE(size > before && size <= max_multipliers,
                      "sizes: expected ascending numbers from 1 to ", max_multipliers, ", got ",
                      at::IntArrayRef(sizes));
    before = size;
  }
  const auto count = static_cast<int64_t>(spec.multipliers().size());
  TORCH_CHECK_VALUE(is_polynomial(spec) || before == count, "multipliers: expected ", before,
                    ", one for each token of the longest n-gram, got ", count);
}

/// A remainder times the multiplier, and a token, fit in 64 bits.
void check_power(const NgramSpec& spec, size_t column) {
  const auto& multipliers = spec.multipliers();
  const int64_t multiplier = multipliers[column % multipliers.size()];
  TORCH_CHECK_VALUE(multiplier >= 1, "multipliers: expected 1 or more for rule 'modular', got ",
                    multiplier);
  TORCH_CHECK_VALUE(spec.moduli()[column] <= largest / 2 / multiplier, "moduli: expected at most ",
                    largest / 2 / multiplier, " for multiplier ", multiplier,
                    " and rule 'modular', got ", spec.moduli()[column], " at index ", column);
}

void check_moduli(const NgramSpec& spec, size_t sizes) {
  const auto& moduli = spec.moduli();
  TORCH_CHECK_VALUE(
      !moduli.empty() && moduli.size() <= max_columns && sizes > 0 && moduli.size() % sizes == 0,
      "moduli: expected 1 to ", max_columns, " numbers, as many for each of ", sizes,
      " sizes, got ", moduli.size());
  TORCH_CHECK_VALUE(!is_polynomial(spec) || moduli.size() == sizes * spec.multipliers().size(),
                    "moduli: expected one for each of ", sizes, " sizes and ",
                    spec.multipliers().size(), " heads, got ", moduli.size());
  const auto& offsets = spec.offsets();
  TORCH_CHECK_VALUE(offsets.empty() || offsets.size() == moduli.size(), "offsets: expected ",
                    moduli.size(), ", as many as moduli, got ", offsets.size());
  for (size_t i = 0; i < moduli.size(); ++i) {
    TORCH_CHECK_VALUE(moduli[i] >= 1, "moduli: expected 1 or more, got ", moduli[i], " at index ",
                      i);
    if (spec.rule() == NgramRule::modular) check_power(spec, i);
    const int64_t most = largest - moduli[i] + 1;
    TORCH_CHECK_VALUE(offsets.empty() || (offsets[i] >= 0 && offsets[i] <= most),
                      "offsets: expected 0 to ", most, ", got ", offsets[i], " at index ", i);
  }
}

}  // namespace

void check_mask(const Tensor& mask, const Tensor& ids) {
  TORCH_CHECK_TYPE(at::isIntegralType(mask.scalar_type(), /*includeBool=*/true),
                   "mask: expected bool or integers, got ",
                   dispatcher::dtype_name(mask.scalar_type()));
  dispatcher::check_same_shape(mask, "mask", ids, "ids");
}

namespace {

void check_tensors(const Tensor& ids, const Call& call, int64_t longest) {
  // ids: [batch, seq] or [seq]
  dispatcher::check_integers(ids, "ids");
  TORCH_CHECK_VALUE(ids.dim() == 1 || ids.dim() == 2, "ids: expected [seq] or [batch, seq], got ",
                    ids.sym_sizes());
  if (call.mask.has_value()) check_mask(*call.mask, ids);
  c10::SymInt documents = 1;
  if (call.cu_seqlens.has_value()) {
    dispatcher::check_boundaries(*call.cu_seqlens);
    documents = call.cu_seqlens->sym_size(0) - 1;
  }
  if (!call.history.has_value()) return;
  const Tensor& history = *call.history;
  dispatcher::check_integers(history, "history");
  const c10::SymInt rows = documents * (ids.dim() == 2 ? ids.sym_size(0) : c10::SymInt(1));
  TORCH_CHECK_VALUE(
      (history.dim() == 1 ? documents == 1 : history.dim() == 2) &&
          history.sym_size(-1) == longest - 1 &&
          (history.dim() == 1 || history.sym_size(0) == rows || history.sym_size(0) == documents),
      "history: expected [", rows, ", ", longest - 1, "], the tokens before each text, got ",
      history.sym_sizes());
}

// ------------------------------------------------------------------------------------- ids

Tensor empty_ids(const Tensor& ids, const Call& call) {
  check_spec(call);
  check_tensors(ids, call, sizes_of(call).back());
  return dispatcher::empty_symint(
      dispatcher::sizes_and(ids, static_cast<int64_t>(call.moduli().size())),
      ids.options().dtype(at::kLong));
}

IdsArguments numbers_of(const NgramSpec& spec) {
  const std::vector<int64_t> sizes = sizes_of(spec);
  const auto& moduli = spec.moduli();
  IdsArguments arguments;
  arguments.rule = static_cast<Rule>(spec.rule());
  arguments.has_boundary = spec.boundary().has_value();
  arguments.boundary = spec.boundary().value_or(0);
  arguments.padding = spec.padding().value_or(arguments.boundary);
  arguments.num_sizes = static_cast<int32_t>(sizes.size());
  arguments.heads = static_cast<int32_t>(moduli.size() / sizes.size());
  arguments.longest = static_cast<int32_t>(sizes.back());
  std::copy(sizes.begin(), sizes.end(), arguments.sizes);
  std::copy(spec.multipliers().begin(), spec.multipliers().end(), arguments.multipliers);
  for (size_t i = 0; i < moduli.size(); ++i) {
    arguments.modulus[i] = moduli[i];
    arguments.inverse[i] = core::Divisor<int64_t>::of(moduli[i]).inverse;
    arguments.offset[i] = spec.offsets().empty() ? 0 : spec.offsets()[i];
  }
  return arguments;
}

void hash_ids(const Tensor& ids, const Call& call, const Tensor& out) {
  const Tensor tokens = ids.contiguous();
  Tensor history, cu_seqlens, mask;
  IdsArguments arguments = numbers_of(call);
  arguments.ids = dispatcher::index_view(tokens);
  arguments.out = out.mutable_data_ptr<int64_t>();
  arguments.seq = ids.size(-1);
  arguments.batch = ids.dim() == 2 ? ids.size(0) : 1;
  if (call.cu_seqlens.has_value()) {
    cu_seqlens = call.cu_seqlens->contiguous();
    dispatcher::check_cu_seqlens(cu_seqlens, arguments.seq, "the number of tokens");
    arguments.cu_seqlens = dispatcher::index_view(cu_seqlens);
    arguments.documents = cu_seqlens.size(0) - 1;
  }
  if (call.history.has_value() && arguments.longest > 1) {
    history = call.history->contiguous();
    arguments.history = dispatcher::index_view(history);
    arguments.history_rows = history.dim() == 2 ? history.size(0) : 1;
  }
  if (call.mask.has_value()) {
    mask = call.mask->ne(0).contiguous();
    arguments.mask = mask.const_data_ptr<bool>();
  }
  if (out.numel() == 0) return;
  const auto columns = static_cast<int64_t>(call.moduli().size());
  dispatcher::launch(arguments, ids, arguments.batch * arguments.seq,
                     columns * static_cast<int64_t>(sizeof(int64_t)), hash_tokens_cpu,
                     POSEMBED_CUDA_LAUNCHER(hash_tokens_cuda));
}

// ------------------------------------------------------------------------------------- mask

Tensor mask_of_lengths(const Tensor& ids, const Tensor& lengths) {
  TORCH_CHECK_VALUE(ids.dim() == 1 || ids.dim() == 2, "ids: expected [seq] or [batch, seq], got ",
                    ids.sym_sizes());
  dispatcher::check_integers(lengths, "lengths");
  TORCH_CHECK_VALUE(lengths.sym_sizes() == ids.sym_sizes().slice(0, ids.dim() - 1),
                    "lengths: expected ", ids.sym_sizes().slice(0, ids.dim() - 1),
                    ", the tokens of each row, got ", lengths.sym_sizes());
  const c10::SymInt seq = ids.sym_size(-1);
  if (lengths.is_cpu() && !at::isTensorSubclassLike(lengths)) {
    const bool fit = lengths.ge(0).logical_and(lengths.le(at::Scalar(seq))).all().item<bool>();
    TORCH_CHECK_VALUE(fit, "lengths: expected 0 to ", seq, ", got ", lengths.min().item<int64_t>(),
                      " to ", lengths.max().item<int64_t>());
  }
  return at::arange(seq, lengths.options()).lt(lengths.unsqueeze(-1));
}

}  // namespace

std::vector<int64_t> sizes_of(const NgramSpec& spec) {
  if (!spec.sizes().empty()) return spec.sizes();
  std::vector<int64_t> sizes(static_cast<size_t>(implied_sizes(spec)));
  for (size_t i = 0; i < sizes.size(); ++i) sizes[i] = static_cast<int64_t>(i) + 2;
  return sizes;
}

void check_spec(const NgramSpec& spec) {
  check_multipliers(spec);
  const std::vector<int64_t> sizes = sizes_of(spec);
  check_sizes(spec, sizes);
  check_moduli(spec, sizes.size());
}

// Integers have no gradient. Without this, torch's boxed kernel would run before each call.
TORCH_LIBRARY_IMPL(posembed, Autograd, m) {
  m.impl("ngram_ids", torch::CppFunction::makeFallthrough());
}

namespace {

// -------------------------------------------------------------------------------------- derivation
// Multipliers and moduli as Qwen's n-gram layers derive them from a few numbers: transformers,
// models/qwen4_exp. Steele et al., "Fast Splittable Pseudorandom Number Generators" (SplitMix64),
// OOPSLA 2014.

constexpr uint64_t golden = 0x9e3779b97f4a7c15u;

uint64_t split_mix(uint64_t state) {
  state += golden;
  state = (state ^ state >> 30) * 0xbf58476d1ce4e5b9u;
  state = (state ^ state >> 27) * 0x94d049bb133111ebu;
  return state ^ state >> 31;
}

std::vector<int64_t> multipliers(int64_t count, int64_t vocab_size, int64_t layer, int64_t seed) {
  TORCH_CHECK_VALUE(count >= 1 && count <= max_multipliers, "count: expected 1 to ",
                    max_multipliers, ", got ", count);
  dispatcher::check_at_least(vocab_size, 1, "vocab_size");
  dispatcher::check_at_least(layer, 0, "layer");
  // Odd, and so small that a token's product fits in 63 bits.
  const int64_t bound = std::numeric_limits<int64_t>::max() / vocab_size / 2;
  const auto half = static_cast<uint64_t>(std::max<int64_t>(1, bound));
  const uint64_t first = static_cast<uint64_t>(seed) + 10007u * static_cast<uint64_t>(layer);
  std::vector<int64_t> result;
  for (int64_t i = 1; i <= count; ++i) {
    const uint64_t random = split_mix(first + golden * static_cast<uint64_t>(i));
    result.push_back(static_cast<int64_t>(2 * (random % half) + 1));
  }
  return result;
}

bool is_prime(int64_t number) {
  if (number < 4) return number > 1;
  if (number % 2 == 0) return false;
  for (int64_t divisor = 3; divisor * divisor <= number; divisor += 2) {
    if (number % divisor == 0) return false;
  }
  return true;
}

std::vector<int64_t> primes(int64_t count, int64_t start, int64_t skip) {
  // Larger tables than this do not exist, and the search would be slow.
  constexpr int64_t most = int64_t{1} << 40;
  TORCH_CHECK_VALUE(count >= 0 && count <= max_columns, "count: expected 0 to ", max_columns,
                    ", got ", count);
  TORCH_CHECK_VALUE(start >= 0 && start <= most, "start: expected 0 to ", most, ", got ", start);
  TORCH_CHECK_VALUE(skip >= 0 && skip <= max_columns * max_columns, "skip: expected 0 to ",
                    max_columns * max_columns, ", got ", skip);
  std::vector<int64_t> result;
  for (int64_t number = start; static_cast<int64_t>(result.size()) < count; ++number) {
    if (is_prime(number) && skip-- <= 0) result.push_back(number);
  }
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(posembed, CompositeExplicitAutograd, m) {
  m.impl("ngram_multipliers", multipliers);
  m.impl("ngram_primes", primes);
}

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using posembed::dispatcher::define;
  define(m,
         "ngram_ids("
         "Tensor ids, "
         "int[] multipliers, "
         "int[] moduli, "
         "int[] offsets=[], "
         "int[] sizes=[], "
         "int? boundary=None, "
         "int? padding=None, "
         "str rule=\"xor\", "
         "Tensor? history=None, "
         "Tensor? cu_seqlens=None, "
         "Tensor? mask=None) -> Tensor");
  define(m, "ngram_mask(Tensor ids, Tensor lengths) -> Tensor");
  define(m, "ngram_multipliers(int count, int vocab_size, int layer=0, int seed=1234) -> int[]");
  define(m, "ngram_primes(int count, int start, int skip=0) -> int[]");
  ngram_ids.implement<empty_ids, hash_ids>(m);
  ngram_mask.compose_batched<mask_of_lengths>(m);
}

}  // namespace posembed::ngram
