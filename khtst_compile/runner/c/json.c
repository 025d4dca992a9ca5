#include "json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 1 << 16, DEEPEST = 64 };

struct json_block {
  json_block* next;
  size_t used, size;
  max_align_t data[];
};

typedef struct {
  const char *begin, *at, *end;
  json_memory* memory;
  const char* complaint;
  bool exhausted;
} reader;

static void* take(reader* r, size_t size) {
  size = (size + sizeof(max_align_t) - 1) / sizeof(max_align_t) * sizeof(max_align_t);
  json_block* block = r->memory->blocks;
  if (!block || block->size - block->used < size) {
    size_t room = size > BLOCK ? size : BLOCK;
    block = malloc(sizeof *block + room);
    if (!block) {
      r->exhausted = true;
      r->complaint = "not enough memory";
      return NULL;
    }
    *block = (json_block){.next = r->memory->blocks, .size = room};
    r->memory->blocks = block;
  }
  void* found = (char*)block->data + block->used;
  block->used += size;
  return found;
}

static bool wrong(reader* r, const char* complaint) {
  if (!r->complaint) r->complaint = complaint;
  return false;
}

static void skip_space(reader* r) {
  while (r->at < r->end && strchr(" \t\r\n", *r->at) && *r->at) ++r->at;
}

static bool next_is(reader* r, char wanted) {
  if (r->at == r->end || *r->at != wanted) return false;
  ++r->at;
  return true;
}

static bool word(reader* r, const char* text) {
  size_t size = strlen(text);
  if ((size_t)(r->end - r->at) < size || memcmp(r->at, text, size)) return wrong(r, "neither a value nor a known word");
  r->at += size;
  return true;
}

static bool digit(const reader* r) { return r->at < r->end && *r->at >= '0' && *r->at <= '9'; }

static bool digits(reader* r) {
  if (!digit(r)) return wrong(r, "a digit was expected");
  while (digit(r)) ++r->at;
  return true;
}

static bool number(reader* r, json* value) {
  bool negative = next_is(r, '-'), whole = true;
  const char* first = r->at;
  if (!digits(r)) return false;
  if (*first == '0' && r->at > first + 1) return wrong(r, "a number begins with 0");
  uint64_t size = 0, most = negative ? (uint64_t)INT64_MAX + 1 : INT64_MAX;
  for (const char* p = first; p < r->at && whole; ++p) {
    uint64_t d = (uint64_t)(*p - '0');
    whole = size <= (most - d) / 10;
    size = size * 10 + d;
  }
  if (next_is(r, '.')) {
    whole = false;
    if (!digits(r)) return false;
  }
  if (r->at < r->end && (*r->at == 'e' || *r->at == 'E')) {
    whole = false;
    ++r->at;
    if (!next_is(r, '-')) next_is(r, '+');
    if (!digits(r)) return false;
  }
  value->kind = whole ? JSON_INTEGER : JSON_FRACTION;
  if (whole) value->integer = negative ? (int64_t)(0 - size) : (int64_t)size;
  return true;
}

/* Four hexadecimal digits. */
static bool hex(reader* r, unsigned* code) {
  *code = 0;
  for (int i = 0; i < 4; ++i, ++r->at) {
    if (r->at == r->end) return wrong(r, "\\u needs four hexadecimal digits");
    char c = *r->at;
    int d = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
    if (d < 0) return wrong(r, "\\u needs four hexadecimal digits");
    *code = *code << 4 | (unsigned)d;
  }
  return true;
}

static char* put_utf8(char* out, unsigned code) {
  if (code < 0x80) {
    *out++ = (char)code;
  } else if (code < 0x800) {
    *out++ = (char)(0xC0 | code >> 6);
    *out++ = (char)(0x80 | (code & 0x3F));
  } else {
    if (code < 0x10000) {
      *out++ = (char)(0xE0 | code >> 12);
    } else {
      *out++ = (char)(0xF0 | code >> 18);
      *out++ = (char)(0x80 | (code >> 12 & 0x3F));
    }
    *out++ = (char)(0x80 | (code >> 6 & 0x3F));
    *out++ = (char)(0x80 | (code & 0x3F));
  }
  return out;
}

/* What follows a backslash. */
static bool escape(reader* r, char** out) {
  static const char names[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
  char c = r->at < r->end ? *r->at++ : 0;
  const char* found = c ? strchr(names, c) : NULL;
  if (found) {
    *(*out)++ = meanings[found - names];
    return true;
  }
  unsigned code, low;
  if (c != 'u') return wrong(r, "an unknown escape");
  if (!hex(r, &code)) return false;
  if (code >= 0xDC00 && code < 0xE000) return wrong(r, "half a surrogate pair");
  if (code >= 0xD800 && code < 0xDC00) {
    if (!next_is(r, '\\') || !next_is(r, 'u') || !hex(r, &low) || low < 0xDC00 || low > 0xDFFF)
      return wrong(r, "half a surrogate pair");
    code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
  }
  if (!code) return wrong(r, "a NUL in a text");
  *out = put_utf8(*out, code);
  return true;
}

static const char* string(reader* r) {
  if (!next_is(r, '"')) return wrong(r, "a text in quotes was expected"), NULL;
  const char* close = r->at;
  while (close < r->end && *close != '"') close += *close == '\\' ? 2 : 1;
  if (close >= r->end) return wrong(r, "a text without its closing quote"), NULL;
  char *text = take(r, (size_t)(close - r->at) + 1), *out = text; /* no escape is shorter than what it means */
  if (!text) return NULL;
  while (*r->at != '"') {
    char c = *r->at++;
    if ((unsigned char)c < 0x20) return wrong(r, "a control character in a text"), NULL;
    if (c != '\\') {
      *out++ = c;
    } else if (!escape(r, &out)) {
      return NULL;
    }
  }
  ++r->at;
  *out = 0;
  return text;
}

static json* value(reader* r, int depth);

static bool members(reader* r, json* holder, char close, int depth) {
  json** place = (json**)&holder->first;
  skip_space(r);
  if (next_is(r, close)) return true;
  for (;;) {
    const char* name = NULL;
    if (holder->kind == JSON_OBJECT) {
      skip_space(r);
      if (!(name = string(r))) return false;
      skip_space(r);
      if (!next_is(r, ':')) return wrong(r, "a ':' was expected");
    }
    json* member = value(r, depth + 1);
    if (!member) return false;
    member->name = name;
    *place = member;
    place = &member->next;
    ++holder->count;
    skip_space(r);
    if (next_is(r, close)) return true;
    if (!next_is(r, ',')) return wrong(r, "a ',' or the end of an array or object was expected");
  }
}

static json* value(reader* r, int depth) {
  skip_space(r);
  if (depth > DEEPEST) return wrong(r, "nested too deeply"), NULL;
  if (r->at == r->end) return wrong(r, "the text ends too early"), NULL;
  json* made = take(r, sizeof *made);
  if (!made) return NULL;
  *made = (json){.kind = JSON_NULL};
  bool good;
  switch (*r->at) {
    case '{':
    case '[':
      made->kind = *r->at++ == '{' ? JSON_OBJECT : JSON_ARRAY;
      good = members(r, made, made->kind == JSON_OBJECT ? '}' : ']', depth);
      break;
    case '"':
      made->kind = JSON_STRING;
      made->text = string(r);
      good = made->text;
      break;
    case 't':
      made->kind = JSON_TRUE;
      good = word(r, "true");
      break;
    case 'f':
      made->kind = JSON_FALSE;
      good = word(r, "false");
      break;
    case 'n': good = word(r, "null"); break;
    default: good = number(r, made);
  }
  return good ? made : NULL;
}

const json* json_parse(const char* text, size_t size, json_memory* memory, char* why, size_t room, bool* exhausted) {
  reader r = {.begin = text, .at = text, .end = text + size, .memory = memory};
  json* root = value(&r, 0);
  skip_space(&r);
  if (root && r.at < r.end) {
    wrong(&r, "more after the end");
    root = NULL;
  }
  *exhausted = r.exhausted;
  if (!root) {
    int line = 1;
    for (const char* p = text; p < r.at; ++p) line += *p == '\n';
    snprintf(why, room, "line %d: %s", line, r.complaint);
  }
  return root;
}

void json_free(json_memory* memory) {
  while (memory->blocks) {
    json_block* next = memory->blocks->next;
    free(memory->blocks);
    memory->blocks = next;
  }
}

const json* json_get(const json* object, const char* name) {
  const json* found = NULL;
  if (!object || object->kind != JSON_OBJECT) return NULL;
  for (const json* member = object->first; member; member = member->next) {
    if (!strcmp(member->name, name)) found = member;
  }
  return found;
}
