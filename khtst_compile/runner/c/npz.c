#include "npz.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base.h"
#include "inflate.h"
#include "npy.h"

/* Sizes and signatures of zip's records (PKWARE APPNOTE 4.3). */
enum { LOCAL = 30, CENTRAL = 46, END = 22, END64 = 56, LOCATOR64 = 20, COMMENT = 65535, RATIO = 1032 };
enum { STORED = 0, DEFLATED = 8, ENCRYPTED = 1 };
#define LOCAL_SIGN UINT32_C(0x04034b50)
#define CENTRAL_SIGN UINT32_C(0x02014b50)
#define END_SIGN UINT32_C(0x06054b50)
#define END64_SIGN UINT32_C(0x06064b50)
#define LOCATOR64_SIGN UINT32_C(0x07064b50)
#define IN_64 UINT32_C(0xFFFFFFFF) /* a size that stands in an extra field, in 64 bits */

static uint64_t number(const uint8_t* at, int bytes) {
  uint64_t value = 0;
  while (bytes--) value = value << 8 | at[bytes];
  return value;
}

typedef struct {
  const char* path;
  const uint8_t* bytes;
  size_t size;
  khtst_error* error;
} archive;

static khtst_status damaged(const archive* from, const char* what) {
  return fail(from->error, KHTST_USAGE, "%s: not a plain .npz (%s); write it with numpy.savez, without objects", from->path,
              what);
}

/* Whether `count` bytes from `begin` on lie inside the file. */
static bool inside(const archive* from, uint64_t begin, uint64_t count) {
  return begin <= from->size && count <= from->size - begin;
}

/* Where the list of files begins, and how many there are. */
static bool directory(const archive* from, uint64_t* begin, uint64_t* count) {
  if (from->size < END) return false;
  size_t lowest = from->size - END > COMMENT ? from->size - END - COMMENT : 0;
  for (size_t at = from->size - END + 1; at-- > lowest;) {
    const uint8_t* end = from->bytes + at;
    if (number(end, 4) != END_SIGN || number(end + 20, 2) != from->size - END - at) continue;
    *count = number(end + 10, 2);
    *begin = number(end + 16, 4);
    if (at >= LOCATOR64 && number(end - LOCATOR64, 4) == LOCATOR64_SIGN) {
      uint64_t place = number(end - LOCATOR64 + 8, 8);
      if (!inside(from, place, END64) || number(from->bytes + place, 4) != END64_SIGN) return false;
      *count = number(from->bytes + place + 32, 8);
      *begin = number(from->bytes + place + 48, 8);
    }
    return true;
  }
  return false;
}

/* Sizes and place that did not fit into 32 bits, from the extra field with id 1. */
static void widen(const uint8_t* extra, size_t size, uint64_t* values[3]) {
  while (size >= 4) {
    size_t length = (size_t)number(extra + 2, 2);
    if (length > size - 4) return;
    if (number(extra, 2) == 1) {
      const uint8_t *at = extra + 4, *end = at + length;
      for (int i = 0; i < 3; ++i) {
        if (*values[i] == IN_64 && end - at >= 8) *values[i] = number(at, 8), at += 8;
      }
      return;
    }
    extra += 4 + length;
    size -= 4 + length;
  }
}

/* The array described by the entry at *place of the directory, which moves on to the next. */
static khtst_status read_entry(const archive* from, uint64_t* place, npz_array* made) {
  if (!inside(from, *place, CENTRAL) || number(from->bytes + *place, 4) != CENTRAL_SIGN)
    return damaged(from, "its list of files is cut off");
  const uint8_t* entry = from->bytes + *place;
  size_t name_size = (size_t)number(entry + 28, 2), extra_size = (size_t)number(entry + 30, 2);
  uint64_t packed = number(entry + 20, 4), size = number(entry + 24, 4), begin = number(entry + 42, 4);
  unsigned method = (unsigned)number(entry + 10, 2);
  if (!inside(from, *place + CENTRAL, name_size + extra_size)) return damaged(from, "its list of files is cut off");
  widen(entry + CENTRAL + name_size, extra_size, (uint64_t* [3]){&size, &packed, &begin});
  *place += CENTRAL + name_size + extra_size + number(entry + 32, 2);
  if (!(made->name = malloc(name_size + 1))) return out_of_memory(from->error, from->path);
  memcpy(made->name, entry + CENTRAL, name_size);
  made->name[name_size] = 0;
  if (name_size < 4 || strlen(made->name) != name_size || strcmp(made->name + name_size - 4, ".npy")) {
    return damaged(from, "it holds a file that is no .npy");
  }
  made->name[name_size - 4] = 0;
  if (number(entry + 8, 2) & ENCRYPTED) return damaged(from, "it is encrypted");
  if (method != STORED && method != DEFLATED) return damaged(from, "it is compressed in a way other than deflate");
  if (!inside(from, begin, LOCAL) || number(from->bytes + begin, 4) != LOCAL_SIGN)
    return damaged(from, "an array is not where it should be");
  begin += LOCAL + number(from->bytes + begin + 26, 2) + number(from->bytes + begin + 28, 2);
  if (!inside(from, begin, packed) || (method == STORED && packed != size)) return damaged(from, "an array is cut off");
  const uint8_t* bytes = from->bytes + begin;
  uint8_t* unpacked = NULL;
  if (method == DEFLATED) {
    if (size / RATIO > packed) return damaged(from, "an array cannot have been packed that small");
    if (!(unpacked = malloc(size ? size : 1))) return out_of_memory(from->error, from->path);
    bytes = unpacked;
  }
  const char* why = "it was altered: a checksum differs";
  int bad = (unpacked && !inflate(from->bytes + begin, packed, unpacked, size)) || crc32_of(bytes, size) != number(entry + 16, 4);
  if (!bad) bad = npy_read(bytes, size, &made->tensor, &why);
  free(unpacked);
  if (!bad) return KHTST_OK;
  if (!why) return out_of_memory(from->error, from->path);
  char reason[256];
  snprintf(reason, sizeof reason, "array '%.100s': %s", made->name, why);
  return damaged(from, reason);
}

static khtst_status read_all(const archive* from, npz* found) {
  uint64_t place, count;
  if (!directory(from, &place, &count)) return damaged(from, "it is no zip file, or cut off");
  if (count > from->size / CENTRAL) return damaged(from, "its list of files is cut off");
  if (!(found->arrays = calloc(count ? count : 1, sizeof *found->arrays))) return out_of_memory(from->error, from->path);
  for (uint64_t i = 0; i < count; ++i) {
    ++found->count;
    khtst_status status = read_entry(from, &place, &found->arrays[i]);
    if (status) return status;
  }
  return KHTST_OK;
}

khtst_status npz_read(const char* path, npz* found, khtst_error* error) {
  *found = (npz){0};
  struct stat about;
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0 || fstat(file, &about)) {
    int reason = errno;
    if (file >= 0) close(file);
    return fail(error, KHTST_USAGE, "%s cannot be read (%s); needed: an .npz written by numpy.savez", path, strerror(reason));
  }
  archive from = {.path = path, .error = error, .size = (size_t)about.st_size};
  if (!S_ISREG(about.st_mode) || !about.st_size) {
    close(file);
    return damaged(&from, S_ISREG(about.st_mode) ? "it is empty" : "it is no file");
  }
  void* bytes = mmap(NULL, from.size, PROT_READ, MAP_PRIVATE, file, 0);
  close(file);
  if (bytes == MAP_FAILED) return out_of_memory(error, path);
  from.bytes = bytes;
  khtst_status status = read_all(&from, found);
  munmap(bytes, from.size);
  return status;
}

void npz_free(npz* found) {
  for (int i = 0; i < found->count; ++i) {
    free(found->arrays[i].name);
    free(found->arrays[i].tensor.data);
  }
  free(found->arrays);
  *found = (npz){0};
}

const khtst_tensor* npz_get(const npz* from, const char* prefix, const char* name) {
  size_t size = strlen(prefix);
  for (int i = 0; i < from->count; ++i) {
    if (!strncmp(from->arrays[i].name, prefix, size) && !strcmp(from->arrays[i].name + size, name))
      return &from->arrays[i].tensor;
  }
  return NULL;
}

static uint8_t* put(uint8_t* at, uint64_t value, int bytes) {
  for (; bytes--; value >>= 8) *at++ = (uint8_t)value;
  return at;
}

/* What a local header and an entry of the directory have in common, from the version on. */
static uint8_t* put_common(uint8_t* at, uint32_t crc, size_t size, size_t name_size) {
  at = put(at, 20, 2);     /* version that can unpack it */
  at = put(at, 0x0800, 2); /* names are UTF-8 */
  at = put(at, STORED, 2);
  at = put(at, 0x00210000, 4); /* 1980-01-01, the earliest there is: equal results are equal files */
  at = put(at, crc, 4);
  at = put(at, size, 4);
  at = put(at, size, 4);
  at = put(at, name_size, 2);
  return put(at, 0, 2);
}

/* One array; its entry of the directory goes to *entry, which moves on. */
static bool write_entry(FILE* file, const char* name, const khtst_tensor* tensor, uint8_t** entry) {
  char header[512];
  uint8_t local[LOCAL];
  size_t first = npy_header(tensor, header), data = khtst_tensor_size(tensor), name_size = strlen(name) + 4;
  uint8_t* whole = malloc(first + data);
  if (!whole) return false;
  memcpy(whole, header, first);
  if (data) memcpy(whole + first, tensor->data, data);
  uint32_t crc = crc32_of(whole, first + data);
  long begin = ftell(file);
  put_common(put(local, LOCAL_SIGN, 4), crc, first + data, name_size);
  bool good = fwrite(local, sizeof local, 1, file) == 1 && fprintf(file, "%s.npy", name) == (int)name_size &&
              fwrite(whole, first + data, 1, file) == 1;
  free(whole);
  uint8_t* at = put(put(*entry, CENTRAL_SIGN, 4), 20, 2);
  at = put_common(at, crc, first + data, name_size);
  at = put(at, 0, 2 + 2 + 2 + 4); /* no comment, one disk, no attributes */
  at = put(at, (uint64_t)begin, 4);
  memcpy(at, name, name_size - 4);
  memcpy(at + name_size - 4, ".npy", 4);
  *entry = at + name_size;
  return good;
}

static bool write_all(FILE* file, int count, const char* const* names, const khtst_tensor* tensors, uint8_t* entries) {
  uint8_t *at = entries, end[END];
  for (int i = 0; i < count; ++i) {
    if (!write_entry(file, names[i], &tensors[i], &at)) return false;
  }
  long begin = ftell(file);
  uint8_t* e = put(put(end, END_SIGN, 4), 0, 4);
  e = put(put(e, (uint64_t)count, 2), (uint64_t)count, 2);
  e = put(put(e, (uint64_t)(at - entries), 4), (uint64_t)begin, 4);
  put(e, 0, 2);
  return fwrite(entries, 1, (size_t)(at - entries), file) == (size_t)(at - entries) && fwrite(end, END, 1, file) == 1;
}

/* The file that `path` means, through links, in new memory; NULL (with an error) for what is there and no ordinary file. */
static char* destination(const char* path, khtst_error* error) {
  struct stat about;
  if (!stat(path, &about) && !S_ISREG(about.st_mode)) {
    fail(error, KHTST_USAGE,
         "%s cannot be written (it is no ordinary file); needed: a path for a new file, or of a file to replace", path);
    return NULL;
  }
  char *real = realpath(path, NULL), *found = real ? real : strdup(path);
  if (!found) out_of_memory(error, path);
  return found;
}

/* Write beside `to`, then rename. */
static khtst_status replace_file(const char* to, int count, const char* const* names, const khtst_tensor* tensors,
                                 uint8_t* entries, khtst_error* error) {
  size_t length = strlen(to) + 32;
  char* temporary = malloc(length);
  if (!temporary) return out_of_memory(error, to);
  snprintf(temporary, length, "%s.tmp-%ld", to, (long)getpid());
  errno = 0;
  FILE* file = fopen(temporary, "wb");
  bool good = file && write_all(file, count, names, tensors, entries);
  good = file && !fclose(file) && good && !rename(temporary, to);
  int reason = errno;
  if (file && !good) remove(temporary);
  free(temporary);
  if (good) return KHTST_OK;
  return fail(error, reason == ENOSPC || reason == EDQUOT || reason == ENOMEM ? KHTST_RESOURCES : KHTST_USAGE,
              "%s cannot be written (%s); free some space or choose another output", to, strerror(reason));
}

khtst_status npz_write(const char* path, int count, const char* const* names, const khtst_tensor* tensors, khtst_error* error) {
  size_t room = 0, size = 0;
  for (int i = 0; i < count; ++i) {
    room += CENTRAL + strlen(names[i]) + 4;
    size += khtst_tensor_size(&tensors[i]) + strlen(names[i]) + 1024;
  }
  if (size + room >= IN_64 || count > 65534)
    return fail(error, KHTST_USAGE, "%s: results of 4 GiB and more cannot be written; run a smaller batch", path);
  char* to = destination(path, error);
  if (!to) return error ? error->status : KHTST_USAGE;
  uint8_t* entries = malloc(room ? room : 1);
  khtst_status status = entries ? replace_file(to, count, names, tensors, entries, error) : out_of_memory(error, path);
  free(entries);
  free(to);
  return status;
}
