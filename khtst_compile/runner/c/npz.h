/* Arrays by name in one .npz file, as numpy.savez and numpy.savez_compressed write it and numpy.load reads it. */
#ifndef KHTST_NPZ_H_
#define KHTST_NPZ_H_

#include "khtst.h"

typedef struct {
  char* name;
  khtst_tensor tensor; /* its data begins at a multiple of 64 bytes */
} npz_array;

typedef struct {
  npz_array* arrays;
  int count;
} npz;

/* Read all arrays; `found` is to be given to npz_free, also after a failure. KHTST_USAGE for anything but an .npz of plain
 * numbers. */
khtst_status npz_read(const char* path, npz* found, khtst_error* error);

void npz_free(npz* found);

/* The array of that name after `prefix`; NULL where there is none. */
const khtst_tensor* npz_get(const npz* from, const char* prefix, const char* name);

/* Write tensors under names, uncompressed. The file appears whole or not at all. */
khtst_status npz_write(const char* path, int count, const char* const* names, const khtst_tensor* tensors, khtst_error* error);

#endif /* KHTST_NPZ_H_ */
