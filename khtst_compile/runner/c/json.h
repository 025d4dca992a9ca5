/* JSON (RFC 8259) into a tree. Fractions are checked and not kept: a manifest's are for people. */
#ifndef KHTST_JSON_H_
#define KHTST_JSON_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum { JSON_NULL, JSON_FALSE, JSON_TRUE, JSON_INTEGER, JSON_FRACTION, JSON_STRING, JSON_ARRAY, JSON_OBJECT } json_kind;

typedef struct json {
  json_kind kind;
  int64_t integer;           /* of JSON_INTEGER */
  const char* text;          /* of JSON_STRING: UTF-8 without NUL inside */
  const char* name;          /* of a member of an object */
  size_t count;              /* members of an array or object */
  struct json *first, *next; /* its first member; the one after this in what holds it */
} json;

typedef struct json_block json_block;

/* What a tree lives in. */
typedef struct {
  json_block* blocks;
} json_memory;

/* The tree of `size` bytes of text, which lives until json_free. NULL for text that is no JSON: *why is then a sentence, with the
 * place in it, and *exhausted tells whether only memory was lacking. An integer beyond 64 bits counts as a fraction. */
const json* json_parse(const char* text, size_t size, json_memory* memory, char* why, size_t room, bool* exhausted);

void json_free(json_memory* memory);

/* The member of that name (the last, where there are several); NULL where `object` is NULL, no object or has none. */
const json* json_get(const json* object, const char* name);

#endif /* KHTST_JSON_H_ */
