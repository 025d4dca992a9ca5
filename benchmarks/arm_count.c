/* A plugin of qemu's user emulation that counts the instructions a program executes between marks.
 *
 *   qemu-aarch64 -plugin arm_count.so,out=FILE PROGRAM
 *
 * A mark is the instruction `hint #120`, which does nothing on any processor. FILE gets a line for each interval between two marks, and for
 * the last one each block of code that ran in it:
 *
 *   interval INSTRUCTIONS
 *   block ADDRESS TIMES WORD..        in hexadecimal but for TIMES; a WORD is an instruction
 *
 * A block is counted as a whole when it begins, so the one that ends an interval is in it and the one that began it is not. All threads
 * count, without locks: measure programs that run one.
 *
 * Debian has qemu with plugins but no qemu-plugin.h, so what is used of version 1 of the interface is declared here.
 */
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MARK UINT32_C(0xd5032f1f)
#define MOST_INTERVALS 4096

typedef uint64_t qemu_plugin_id_t;
typedef struct qemu_info qemu_info_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum { QEMU_PLUGIN_CB_NO_REGS = 0, QEMU_PLUGIN_INLINE_ADD_U64 = 0 };
typedef void (*on_translation)(qemu_plugin_id_t, struct qemu_plugin_tb*);
typedef void (*on_execution)(unsigned, void*);
typedef void (*on_end)(qemu_plugin_id_t, void*);
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t, on_translation);
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb*, int, void*, uint64_t);
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn*, on_execution, int, void*);
void qemu_plugin_register_atexit_cb(qemu_plugin_id_t, on_end, void*);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb*);
struct qemu_plugin_insn* qemu_plugin_tb_get_insn(const struct qemu_plugin_tb*, size_t);
uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb*);
const void* qemu_plugin_insn_data(const struct qemu_plugin_insn*);

#define EXPORTED __attribute__((visibility("default")))
EXPORTED int qemu_plugin_version = 1;

typedef struct block {
  struct block* next;
  uint64_t address, times, last_times; /* since the last mark, and between the two marks before it */
  size_t count;
  uint32_t words[];
} block;

static block* blocks;
static uint64_t intervals[MOST_INTERVALS];
static size_t marks;
static char path[4096];

static void mark(unsigned cpu, void* unused) {
  (void)cpu, (void)unused;
  uint64_t total = 0;
  for (block* b = blocks; b; b = b->next) {
    total += b->times * b->count;
    b->last_times = b->times;
    b->times = 0;
  }
  if (marks && marks <= MOST_INTERVALS) intervals[marks - 1] = total;
  ++marks;
}

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb* tb) {
  (void)id;
  size_t count = qemu_plugin_tb_n_insns(tb);
  block* made = calloc(1, sizeof *made + count * sizeof *made->words);
  if (!made) abort();
  made->address = qemu_plugin_tb_vaddr(tb), made->count = count;
  for (size_t i = 0; i < count; ++i) {
    struct qemu_plugin_insn* instruction = qemu_plugin_tb_get_insn(tb, i);
    memcpy(&made->words[i], qemu_plugin_insn_data(instruction), sizeof *made->words);
    if (made->words[i] == MARK) qemu_plugin_register_vcpu_insn_exec_cb(instruction, mark, QEMU_PLUGIN_CB_NO_REGS, NULL);
  }
  qemu_plugin_register_vcpu_tb_exec_inline(tb, QEMU_PLUGIN_INLINE_ADD_U64, &made->times, 1);
  /* Threads translate one after another: qemu holds a lock. */
  made->next = blocks, blocks = made;
}

static void end(qemu_plugin_id_t id, void* unused) {
  (void)id, (void)unused;
  FILE* file = fopen(path, "w");
  if (!file) return perror(path);
  for (size_t i = 0; i + 1 < marks && i < MOST_INTERVALS; ++i) fprintf(file, "interval %" PRIu64 "\n", intervals[i]);
  for (const block* b = blocks; b; b = b->next) {
    if (!b->last_times) continue;
    fprintf(file, "block %" PRIx64 " %" PRIu64, b->address, b->last_times);
    for (size_t i = 0; i < b->count; ++i) fprintf(file, " %08" PRIx32, b->words[i]);
    fputc('\n', file);
  }
  if (fclose(file)) perror(path);
}

EXPORTED int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t* info, int count, char** arguments) {
  (void)info;
  if (count != 1 || strncmp(arguments[0], "out=", 4) || strlen(arguments[0] + 4) >= sizeof path) {
    fprintf(stderr, "arm_count: needed: one argument, out=FILE\n");
    return -1;
  }
  strcpy(path, arguments[0] + 4);
  qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
  qemu_plugin_register_atexit_cb(id, end, NULL);
  return 0;
}
