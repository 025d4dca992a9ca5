#include "cpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__aarch64__)
#include <sys/auxv.h>

struct cpu_flags {
  unsigned long words[2];
};

/* Bits of AT_HWCAP (0) and AT_HWCAP2 (1), as Linux defines them in arch/arm64/include/uapi/asm/hwcap.h. The kernel's word, and
 * not /proc/cpuinfo: an emulator shows that of its host. */
static const struct {
  const char* name;
  int word, bit;
} known[] = {
    {"fp", 0, 0},   {"asimd", 0, 1},    {"aes", 0, 3},       {"sha2", 0, 6},     {"crc32", 0, 7}, {"atomics", 0, 8},
    {"fphp", 0, 9}, {"asimdhp", 0, 10}, {"asimdrdm", 0, 12}, {"asimddp", 0, 20}, {"sve", 0, 22},  {"asimdfhm", 0, 23},
    {"sve2", 1, 1}, {"svei8mm", 1, 9},  {"svebf16", 1, 12},  {"i8mm", 1, 13},    {"bf16", 1, 14},
};

cpu_flags* cpu_read(void) {
  cpu_flags* made = malloc(sizeof *made);
  if (made) *made = (cpu_flags){{getauxval(AT_HWCAP), getauxval(AT_HWCAP2)}};
  return made;
}

bool cpu_has(const cpu_flags* flags, const char* name) {
  for (size_t i = 0; i < sizeof known / sizeof *known; ++i) {
    if (!strcmp(name, known[i].name)) return flags->words[known[i].word] >> known[i].bit & 1;
  }
  return false;
}

const char* cpu_processor(void) { return "aarch64"; }

#elif defined(__x86_64__)

struct cpu_flags {
  char text[16384]; /* words with a space on either side */
};

cpu_flags* cpu_read(void) {
  cpu_flags* made = calloc(1, sizeof *made);
  FILE* file = made ? fopen("/proc/cpuinfo", "r") : NULL;
  while (file && fgets(made->text, sizeof made->text - 1, file) && strncmp(made->text, "flags", 5)) made->text[0] = 0;
  if (file) fclose(file);
  if (made) {
    char* words = strchr(made->text, ':');
    memset(made->text, ' ', words ? (size_t)(words - made->text) + 1 : 1);
    made->text[strcspn(made->text, "\n")] = ' ';
  }
  return made;
}

bool cpu_has(const cpu_flags* flags, const char* name) {
  size_t size = strlen(name);
  for (const char* at = flags->text; size && (at = strstr(at, name)); ++at) {
    if (at > flags->text && at[-1] == ' ' && (at[size] == ' ' || !at[size])) return true;
  }
  return false;
}

const char* cpu_processor(void) { return "x86_64"; }

#else
#error "needed: x86-64 or 64-bit ARM"
#endif
