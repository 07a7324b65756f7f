// Runs one kernel a number of times, for instruction_counts.py, which counts the instructions of a
// run under an emulator. The difference between two numbers of calls is that of the calls alone.
//
//   kernel_instructions rotary float32 2
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "alibi/alibi.h"
#include "input/input.h"
#include "rotary/rotary.h"
#include "rotary_norm/rotary_norm.h"
#include "sinusoidal/sinusoidal.h"
#include "token/token.h"

namespace posembed::benchmarks {
namespace {

constexpr int64_t tokens = 16, heads = 8, head_dim = 128, columns = heads * head_dim;
constexpr int64_t elements = tokens * columns;

/// Memory that is large enough for every case.
alignas(64) char in[elements * sizeof(float)], out[elements * sizeof(float)];
alignas(64) char weight[columns * sizeof(float)];
int64_t ids[tokens];
std::vector<core::Turn64> turns;

rotary::Arguments rotation(core::Scalar scalar, bool interleaved = false) {
  rotary::Arguments arguments;
  arguments.scalar = scalar;
  arguments.batch = 1;
  arguments.seq = tokens;
  arguments.head_dim = head_dim;
  arguments.pairs = head_dim / 2;
  arguments.interleaved = interleaved;
  arguments.turns = turns.data();
  arguments.offset = 1000;
  rotary::HeadView& view = arguments.views[0];
  view.in = in;
  view.out = out;
  view.heads = heads;
  const int64_t strides[] = {elements, columns, head_dim};
  std::memcpy(view.in_stride, strides, sizeof strides);
  std::memcpy(view.out_stride, strides, sizeof strides);
  return arguments;
}

void rotate(core::Scalar scalar) { rotary::rotate_cpu(rotation(scalar), 0, tokens); }

void rotate_interleaved(core::Scalar scalar) {
  rotary::rotate_cpu(rotation(scalar, true), 0, tokens);
}

void norm_and_rotate(core::Scalar scalar) {
  rotary_norm::Arguments arguments;
  arguments.rotation = rotation(scalar);
  arguments.weight[0] = weight;
  arguments.parameter_scalar = scalar;
  rotary_norm::norm_and_rotate_cpu(arguments, 0, tokens);
}

void add_sinusoids(core::Scalar scalar) {
  sinusoidal::Arguments arguments;
  arguments.sinusoid.layout.columns = arguments.sinusoid.layout.filled = head_dim;
  arguments.sinusoid.pairs = head_dim / 2;
  arguments.sinusoid.turns = turns.data();
  arguments.in = in;
  arguments.out = out;
  arguments.scalar = scalar;
  arguments.batch = 1;
  arguments.seq = tokens * heads;
  arguments.in_stride[1] = arguments.out_stride[1] = head_dim;
  sinusoidal::encode_cpu(arguments, 0, arguments.seq);
}

void fill_biases(core::Scalar scalar) {
  alibi::FillArguments arguments;
  arguments.slopes = {weight, core::Scalar::float32, heads, 1};
  arguments.distances.queries = tokens;
  arguments.distances.keys = head_dim;
  arguments.distances.offset = head_dim - tokens;
  arguments.scalar = scalar;
  arguments.out = {out, {elements, tokens * head_dim, head_dim}};
  alibi::fill_cpu(arguments, 0, heads * tokens);
}

void gather(core::Scalar scalar) {
  token::GatherArguments arguments;
  arguments.weight = in;
  arguments.out = out;
  arguments.scalar = scalar;
  arguments.rows = arguments.count = tokens;
  arguments.embedding_dim = arguments.weight_stride = columns;
  arguments.ids = {ids, core::Index::int64};
  arguments.scale = 3.0;
  token::gather_cpu(arguments, 0, tokens);
}

void add_and_norm(core::Scalar scalar) {
  input::ForwardArguments arguments;
  input::Arguments& call = arguments.input;
  call.scalar = scalar;
  call.batch = 1;
  call.seq = tokens;
  call.embedding_dim = columns;
  for (input::Table* table : {&call.token, &call.position}) {
    table->data = in;
    table->rows = tokens;
    table->stride = columns;
  }
  call.token.index = {ids, core::Index::int64};
  call.norm = input::Norm::layer;
  call.norm_weight = call.norm_bias = weight;
  arguments.out = out;
  input::forward_cpu(arguments, 0, tokens);
}

const std::map<std::string, std::function<void(core::Scalar)>> cases = {
    {"rotary", rotate},
    {"rotary, interleaved", rotate_interleaved},
    {"norm_rotary", norm_and_rotate},
    {"add_sinusoidal", add_sinusoids},
    {"alibi_bias", fill_biases},
    {"embedding, scaled", gather},
    {"input_embedding, LayerNorm", add_and_norm},
};

int run(const std::string& name, bool bfloat16, int calls) {
  for (const auto& frequency : rotary::geometric_frequencies(1e4, head_dim)) {
    turns.push_back(core::round_to_turn64(core::turn_from_radians(frequency)));
  }
  for (int64_t i = 0; i < tokens; ++i) ids[i] = i;
  const auto found = cases.find(name);
  if (found == cases.end()) return EXIT_FAILURE;
  for (int i = 0; i < calls; ++i) {
    found->second(bfloat16 ? core::Scalar::bfloat16 : core::Scalar::float32);
  }
  return EXIT_SUCCESS;
}

}  // namespace
}  // namespace posembed::benchmarks

/// Without arguments, lists the cases and the number of elements of each.
int main(int argc, char** argv) {
  using namespace posembed::benchmarks;
  if (argc == 4) return run(argv[1], std::strcmp(argv[2], "bfloat16") == 0, std::atoi(argv[3]));
  std::printf("%d\n", static_cast<int>(elements));
  for (const auto& named : cases) std::printf("%s\n", named.first.c_str());
  return 0;
}
