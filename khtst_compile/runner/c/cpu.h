/* What the CPU under us can do, by the names of /proc/cpuinfo. */
#ifndef KHTST_CPU_H_
#define KHTST_CPU_H_

#include <stdbool.h>

typedef struct cpu_flags cpu_flags;

/* All flags, to be freed with free(); NULL without memory. */
cpu_flags* cpu_read(void);

bool cpu_has(const cpu_flags* flags, const char* name);

/* The processor this code was built for, as LLVM's triples begin: "aarch64" or "x86_64". */
const char* cpu_processor(void);

#endif /* KHTST_CPU_H_ */
