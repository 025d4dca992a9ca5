#include "layout.h"

#include <stdlib.h>
#include <string.h>

static const char* read_sizes(const char* at, size_t* sizes, int* count) {
  for (*count = 0; *count < LAYOUT_MOST; ++at) {
    size_t value = 0;
    if (*at < '0' || *at > '9') return NULL;
    for (; *at >= '0' && *at <= '9'; ++at) {
      if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, (size_t)(*at - '0'), &value)) return NULL;
    }
    sizes[(*count)++] = value;
    if (*at != 'x') return at;
  }
  return NULL;
}

static const char* past(const char* at, const char* word) {
  return at && !strncmp(at, word, strlen(word)) ? at + strlen(word) : NULL;
}

static bool product(const size_t* sizes, int count, size_t* all) {
  *all = 1;
  for (int i = 0; i < count; ++i) {
    if (!sizes[i] || __builtin_mul_overflow(*all, sizes[i], all)) return false;
  }
  return *all <= PTRDIFF_MAX / 8;
}

bool layout_parse(const char* text, layout* made) {
  int axes, seen = 0;
  size_t blocks;
  const char* at = past(read_sizes(text, made->padded, &made->rank), " in ");
  if (!at || !(at = past(read_sizes(at, made->blocks, &made->parts), " as "))) return false;
  at = read_sizes(at, made->axes, &axes);
  if (!at || *at || axes != made->parts) return false;
  if (!product(made->padded, made->rank, &made->count) || !product(made->blocks, made->parts, &blocks) || blocks != made->count)
    return false;
  for (int i = 0; i < axes; ++i) {
    if (made->axes[i] >= (size_t)axes) return false;
    seen |= 1 << made->axes[i];
  }
  return seen == (1 << axes) - 1;
}

bool layout_fits(const layout* by, int rank, const int64_t* shape) {
  if (rank != by->rank) return false;
  for (int i = 0; i < rank; ++i) {
    if (shape[i] < 1 || (size_t)shape[i] > by->padded[i]) return false;
  }
  return true;
}

/* The matrix with zeros at the end of each axis. */
static void pad(const layout* by, const int64_t* shape, size_t unit, const char* from, char* to) {
  int last = by->rank - 1;
  size_t rows = 1, index[LAYOUT_MOST] = {0}, run = (size_t)shape[last] * unit;
  memset(to, 0, by->count * unit);
  for (int i = 0; i < last; ++i) rows *= (size_t)shape[i];
  for (; rows; --rows, from += run) {
    size_t place = 0;
    for (int i = 0; i < last; ++i) place = place * by->padded[i] + index[i];
    memcpy(to + place * by->padded[last] * unit, from, run);
    for (int i = last - 1; i >= 0 && ++index[i] == (size_t)shape[i]; --i) index[i] = 0;
  }
}

/* One run of `run` bytes after the other, those along the innermost axis `step` bytes apart; sizes known to the compiler are
 * fast. */
static void gather(char* to, const char* from, size_t count, size_t step, size_t run) {
  switch (run) {
    case 1:
      for (; count; --count, from += step) *to++ = *from;
      break;
    case 2:
      for (; count; --count, from += step, to += 2) memcpy(to, from, 2);
      break;
    case 4:
      for (; count; --count, from += step, to += 4) memcpy(to, from, 4);
      break;
    case 8:
      for (; count; --count, from += step, to += 8) memcpy(to, from, 8);
      break;
    default:
      for (; count; --count, from += step, to += run) memcpy(to, from, run);
  }
}

static void transpose(const layout* by, size_t unit, const char* from, char* to) {
  size_t steps[LAYOUT_MOST], sizes[LAYOUT_MOST], strides[LAYOUT_MOST], index[LAYOUT_MOST] = {0}, run = unit;
  int outer = by->parts;
  for (int i = by->parts - 1, innermost = 1; i >= 0; --i, innermost = 0) {
    strides[i] = innermost ? unit : strides[i + 1] * by->blocks[i + 1];
  }
  while (outer && by->axes[outer - 1] == (size_t)outer - 1) run *= by->blocks[--outer]; /* what stays together moves as one */
  for (int i = 0; i < outer; ++i) sizes[i] = by->blocks[by->axes[i]], steps[i] = strides[by->axes[i]];
  size_t inner = outer ? sizes[outer - 1] : 1, step = outer ? steps[outer - 1] : 0;
  size_t rounds = by->count * unit / (run * inner);
  for (; rounds; --rounds, to += run * inner) {
    const char* begin = from;
    for (int i = 0; i < outer - 1; ++i) begin += index[i] * steps[i];
    gather(to, begin, inner, step, run);
    for (int i = outer - 2; i >= 0 && ++index[i] == sizes[i]; --i) index[i] = 0;
  }
}

bool layout_apply(const layout* by, const int64_t* shape, size_t unit, const void* matrix, void* out) {
  bool whole = true;
  for (int i = 0; i < by->rank; ++i) whole = whole && (size_t)shape[i] == by->padded[i];
  if (whole) return transpose(by, unit, matrix, out), true;
  char* padded = malloc(by->count * unit);
  if (!padded) return false;
  pad(by, shape, unit, matrix, padded);
  transpose(by, unit, padded, out);
  free(padded);
  return true;
}
