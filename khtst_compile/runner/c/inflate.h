/* DEFLATE (RFC 1951) and the CRC of zip files. */
#ifndef KHTST_INFLATE_H_
#define KHTST_INFLATE_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Unpack `size` bytes into exactly `room` bytes; false for data that is damaged or of another length. */
bool inflate(const uint8_t* data, size_t size, uint8_t* out, size_t room);

/* CRC-32 (IEEE 802.3) of `size` bytes. */
uint32_t crc32_of(const void* data, size_t size);

#endif /* KHTST_INFLATE_H_ */
