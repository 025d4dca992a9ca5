#include "inflate.h"

#include <string.h>

enum { LONGEST = 15, LITERALS = 288, DISTANCES = 32, END = 256 };

typedef struct {
  const uint8_t *at, *end;
  uint64_t bits; /* not yet used, the next one lowest */
  int held;
  uint8_t *out, *first, *limit;
} stream;

/* Codes of each length, and the symbols in the order of their codes: enough to decode a canonical Huffman code. */
typedef struct {
  uint16_t lengths[LONGEST + 1];
  uint16_t symbols[LITERALS];
} code;

static bool fill(stream* s, int count) {
  while (s->held < count) {
    if (s->at == s->end) return false;
    s->bits |= (uint64_t)*s->at++ << s->held;
    s->held += 8;
  }
  return true;
}

static bool take(stream* s, int count, unsigned* value) {
  if (!fill(s, count)) return false;
  *value = (unsigned)(s->bits & ((UINT64_C(1) << count) - 1));
  s->bits >>= count;
  s->held -= count;
  return true;
}

/* False where more codes are asked for than there are of some length. */
static bool build(code* made, const uint8_t* lengths, int count) {
  uint16_t next[LONGEST + 2] = {0};
  memset(made->lengths, 0, sizeof made->lengths);
  for (int i = 0; i < count; ++i) ++made->lengths[lengths[i]];
  made->lengths[0] = 0;
  int left = 1;
  for (int i = 1; i <= LONGEST; ++i) {
    left = 2 * left - made->lengths[i];
    if (left < 0) return false;
    next[i + 1] = (uint16_t)(next[i] + made->lengths[i]);
  }
  for (int i = 0; i < count; ++i) {
    if (lengths[i]) made->symbols[next[lengths[i]]++] = (uint16_t)i;
  }
  return true;
}

static bool symbol(stream* s, const code* by, unsigned* found) {
  int value = 0, first = 0, place = 0;
  for (int length = 1; length <= LONGEST; ++length) {
    unsigned bit;
    if (!take(s, 1, &bit)) return false;
    value |= (int)bit;
    int count = by->lengths[length];
    if (value - first < count) return *found = by->symbols[place + value - first], true;
    place += count;
    first = (first + count) << 1;
    value <<= 1;
  }
  return false;
}

static bool stored(stream* s) {
  unsigned size, check;
  s->bits >>= s->held % 8; /* on to the next whole byte */
  s->held -= s->held % 8;
  if (!take(s, 16, &size) || !take(s, 16, &check) || (size ^ check) != 0xFFFF) return false;
  if ((size_t)(s->limit - s->out) < size) return false;
  for (; size && s->held; --size, s->held -= 8, s->bits >>= 8) *s->out++ = (uint8_t)s->bits;
  if ((size_t)(s->end - s->at) < size) return false;
  memcpy(s->out, s->at, size);
  s->at += size;
  s->out += size;
  return true;
}

static bool block(stream* s, const code* literals, const code* distances) {
  static const uint16_t lengths[] = {3,  4,  5,  6,  7,  8,  9,  10, 11,  13,  15,  17,  19,  23, 27,
                                     31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258};
  static const uint16_t backs[] = {1,   2,   3,   4,   5,   7,    9,    13,   17,   25,   33,   49,   65,    97,    129,
                                   193, 257, 385, 513, 769, 1025, 1537, 2049, 3073, 4097, 6145, 8193, 12289, 16385, 24577};
  for (;;) {
    unsigned found, more;
    if (!symbol(s, literals, &found)) return false;
    if (found == END) return true;
    if (found < END) {
      if (s->out == s->limit) return false;
      *s->out++ = (uint8_t)found;
      continue;
    }
    found -= END + 1;
    if (found >= 29 || !take(s, found < 8 || found == 28 ? 0 : (int)found / 4 - 1, &more)) return false;
    size_t size = lengths[found] + more;
    if (!symbol(s, distances, &found) || found >= 30) return false;
    if (!take(s, found < 4 ? 0 : (int)found / 2 - 1, &more)) return false;
    size_t back = backs[found] + more;
    if (back > (size_t)(s->out - s->first) || size > (size_t)(s->limit - s->out)) return false;
    for (; size; --size, ++s->out) *s->out = s->out[-(ptrdiff_t)back]; /* may overlap: that is how runs are written */
  }
}

static bool fixed(stream* s) {
  uint8_t sizes[LITERALS];
  code literals, distances;
  for (int i = 0; i < LITERALS; ++i) sizes[i] = i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8;
  build(&literals, sizes, LITERALS);
  memset(sizes, 5, DISTANCES);
  build(&distances, sizes, DISTANCES);
  return block(s, &literals, &distances);
}

static bool dynamic(stream* s) {
  static const uint8_t order[19] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};
  uint8_t sizes[LITERALS + DISTANCES] = {0};
  code literals, distances;
  unsigned literal_count, distance_count, count, value;
  if (!take(s, 5, &literal_count) || !take(s, 5, &distance_count) || !take(s, 4, &count)) return false;
  literal_count += 257, distance_count += 1, count += 4;
  if (literal_count > 286 || distance_count > 30) return false;
  for (unsigned i = 0; i < count; ++i) {
    if (!take(s, 3, &value)) return false;
    sizes[order[i]] = (uint8_t)value;
  }
  if (!build(&literals, sizes, 19)) return false;
  memset(sizes, 0, sizeof sizes);
  for (unsigned done = 0, all = literal_count + distance_count; done < all;) {
    unsigned found, times;
    if (!symbol(s, &literals, &found)) return false;
    if (found < 16) {
      sizes[done++] = (uint8_t)found;
      continue;
    }
    if (found == 16 && !done) return false;
    uint8_t again = found == 16 ? sizes[done - 1] : 0;
    if (!take(s, found == 16 ? 2 : found == 17 ? 3 : 7, &times)) return false;
    times += found == 18 ? 11 : 3;
    if (times > all - done) return false;
    memset(sizes + done, again, times);
    done += times;
  }
  if (!sizes[END]) return false;
  if (!build(&literals, sizes, (int)literal_count)) return false;
  if (!build(&distances, sizes + literal_count, (int)distance_count)) return false;
  return block(s, &literals, &distances);
}

bool inflate(const uint8_t* data, size_t size, uint8_t* out, size_t room) {
  stream s = {.at = data, .end = data + size, .out = out, .first = out, .limit = out + room};
  unsigned last = 0, kind;
  while (!last) {
    if (!take(&s, 1, &last) || !take(&s, 2, &kind)) return false;
    if (kind == 3 || !(kind == 0 ? stored(&s) : kind == 1 ? fixed(&s) : dynamic(&s))) return false;
  }
  return s.out == s.limit;
}

uint32_t crc32_of(const void* data, size_t size) {
  uint32_t table[256], crc = ~UINT32_C(0);
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int k = 0; k < 8; ++k) c = c & 1 ? c >> 1 ^ 0xEDB88320 : c >> 1;
    table[i] = c;
  }
  for (const uint8_t* at = data; size; --size, ++at) crc = crc >> 8 ^ table[(crc ^ *at) & 255];
  return ~crc;
}
