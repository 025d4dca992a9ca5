/* The mark of arm_count.c as a function, for programs that are not in C. */
__attribute__((visibility("default"))) void khtst_mark(void);
void khtst_mark(void) { __asm__ volatile("hint #120" ::: "memory"); }
