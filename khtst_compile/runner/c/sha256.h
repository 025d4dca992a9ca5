/* SHA-256 (FIPS 180-4). */
#ifndef KHTST_SHA256_H_
#define KHTST_SHA256_H_

#include <stddef.h>
#include <stdint.h>

typedef struct {
  uint32_t state[8];
  uint64_t size; /* bytes so far */
  uint8_t block[64];
} sha256;

void sha256_begin(sha256* hash);
void sha256_add(sha256* hash, const void* data, size_t size);
/* hex: 64 digits and a NUL. */
void sha256_end(sha256* hash, char hex[65]);

#endif /* KHTST_SHA256_H_ */
