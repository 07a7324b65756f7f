// Rotary embeddings from C, without torch:
//
//   cc rotate.c -I include -L lib -lposembed_kernels -Wl,-rpath,lib -o rotate
//
// with the folders that python -m posembed_kernels prints.
#include <posembed_kernels.h>
#include <stdio.h>

enum { SEQ = 16, HEADS = 4, HEAD_DIM = 64 };

static float query[SEQ][HEADS][HEAD_DIM], rotated[SEQ][HEADS][HEAD_DIM];

static int failed(posembed_status status) {
  if (status != POSEMBED_OK) fprintf(stderr, "%s\n", posembed_last_error());
  return status != POSEMBED_OK;
}

static float largest_difference(void) {
  float largest = 0;
  for (int i = 0; i < SEQ * HEADS * HEAD_DIM; ++i) {
    const float difference = (&rotated[0][0][0])[i] - (&query[0][0][0])[i];
    if (difference > largest) largest = difference;
    if (-difference > largest) largest = -difference;
  }
  return largest;
}

int main(void) {
  for (int i = 0; i < SEQ * HEADS * HEAD_DIM; ++i) (&query[0][0][0])[i] = (float)(i % 7) - 3;
  int64_t shape[] = {SEQ, HEADS, HEAD_DIM};
  const posembed_tensor in = {query, {1, 0}, 3, {2, 32, 1}, shape, NULL, 0};
  const posembed_tensor out = {rotated, {1, 0}, 3, {2, 32, 1}, shape, NULL, 0};

  // Once for a model: its frequencies.
  double frequencies[HEAD_DIM / 2], low[HEAD_DIM / 2];
  posembed_rotary_series series = {.size = sizeof series, .rotary_dim = HEAD_DIM, .base = 500000};
  if (failed(posembed_rotary_frequencies(&series, frequencies, low, NULL))) return 1;

  posembed_rotation call = {.size = sizeof call, .layout = POSEMBED_THD};
  call.offset = 1000000;
  call.query = &in;
  call.query_out = &out;
  call.frequencies = frequencies;
  call.frequencies_low = low;
  if (failed(posembed_rotary(&call, NULL))) return 1;
  printf("moved by up to %.3f\n", (double)largest_difference());

  // Back, in place: this is the backward pass, too.
  call.query = &out;
  call.inverse = 1;
  if (failed(posembed_rotary(&call, NULL))) return 1;
  printf("and back within %.0e\n", (double)largest_difference());

  call.offset = -1;
  printf("refused: ");
  return posembed_rotary(&call, NULL) == POSEMBED_VALUE_ERROR ? puts(posembed_last_error()) < 0 : 1;
}
