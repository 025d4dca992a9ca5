/* How a stored matrix becomes what a kernel reads: padding with zeros, then a transposition of its blocks. */
#ifndef KHTST_LAYOUT_H_
#define KHTST_LAYOUT_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { LAYOUT_MOST = 16 };

/* "40x64 in 5x8x64 as 0x2x1": shape after padding, that split into blocks, the order of the blocks' axes in memory. */
typedef struct {
  int rank, parts;
  size_t padded[LAYOUT_MOST], blocks[LAYOUT_MOST], axes[LAYOUT_MOST];
  size_t count; /* elements after padding */
} layout;

/* False for a text of another form or with numbers that do not fit together. */
bool layout_parse(const char* text, layout* made);

/* Whether a matrix of that shape can be laid out so. */
bool layout_fits(const layout* by, int rank, const int64_t* shape);

/* matrix: of a shape that fits, elements of `unit` bytes (1, 2, 4 or 8) -> by->count elements at `out`. False without memory. */
bool layout_apply(const layout* by, const int64_t* shape, size_t unit, const void* matrix, void* out);

#endif /* KHTST_LAYOUT_H_ */
