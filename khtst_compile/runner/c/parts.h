/* A large batch in parts small enough that what one kernel writes is still in the cache when the next one reads it, and that what
 * lies between kernels needs little memory. Only along an axis whose entries are proved independent (manifest.independent). */
#ifndef KHTST_PARTS_H_
#define KHTST_PARTS_H_

#include "artifact.h"

/* How many parts inputs that were checked are to be run in; 1: whole. *entries: the size of the axis, where there are several. */
int64_t parts_count(const artifact* from, const khtst_tensor* inputs, int threads, int64_t* entries);

/* The inputs of the entries from `begin` to `end`: views. */
void parts_take(const artifact* from, const khtst_tensor* inputs, int64_t begin, int64_t end, khtst_tensor* part);

/* Put results of the entries from `begin` on into `whole`, which is made at the first part (begin is 0) for `entries`. */
khtst_status parts_join(const khtst_tensor* part, int64_t begin, int64_t size, int64_t entries, khtst_tensor* whole,
                        khtst_error* error);

#endif /* KHTST_PARTS_H_ */
