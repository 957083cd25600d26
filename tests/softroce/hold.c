// Runs a guest's kernel, and holds it between the two stores of a flag.
//
//   hold MICROSECONDS KERNEL ARGUMENT...
//
// Soft-RoCE stores what an RDMA WRITE brings by memcpy. A User Mode Linux kernel has memcpy_orig,
// which stores 4 to 7 bytes by two stores of four: a word is stored twice. Who takes a flag between
// them finds it raised again. This program makes that certain: it has a breakpoint in place of the
// first store, makes that itself, and, if a word that was 0 has a value now, waits so long
// before the kernel goes on with the second; the guest's other processor runs meanwhile. A kernel
// that lacks these instructions is not run.
#define _GNU_SOURCE
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const uint8_t kStores[] = {
    0x8b, 0x0e,                    // mov (%rsi),%ecx
    0x44, 0x8b, 0x44, 0x16, 0xfc,  // mov -4(%rsi,%rdx),%r8d
    0x89, 0x0f,                    // mov %ecx,(%rdi)
    0x44, 0x89, 0x44, 0x17, 0xfc,  // mov %r8d,-4(%rdi,%rdx)
};
enum { kFirst = 7, kLength = 2 };  // of the first store
enum { kStackBytes = 1 << 14 };
static const uint8_t kBreakpoint = 0xcc;

static void fail(const char* what) {
  fprintf(stderr, "hold: %s%s%s\n", what, errno ? ": " : "", errno ? strerror(errno) : "");
  exit(125);
}

// Where the first store lies in the running kernel.
static uint64_t find_store(const char* kernel) {
  const int file = open(kernel, O_RDONLY | O_CLOEXEC);
  struct stat status;
  if (file < 0 || fstat(file, &status) != 0) fail(kernel);
  const size_t bytes = (size_t)status.st_size;
  const uint8_t* image = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, file, 0);
  if (image == MAP_FAILED) fail(kernel);
  const uint8_t* found = memmem(image, bytes, kStores, sizeof kStores);
  if (found == NULL) fail("this kernel does not store words as memcpy_orig does: look again");
  const uint8_t* rest = found + 1;
  if (memmem(rest, bytes - (size_t)(rest - image), kStores, sizeof kStores) != NULL)
    fail("this kernel stores words as memcpy_orig does in several places: look again");
  const uint64_t offset = (uint64_t)(found - image) + kFirst;
  const Elf64_Ehdr* head = (const Elf64_Ehdr*)image;
  const Elf64_Phdr* part = (const Elf64_Phdr*)(image + head->e_phoff);
  for (int i = 0; i < head->e_phnum; ++i, ++part) {
    if (part->p_type == PT_LOAD && offset - part->p_offset < part->p_filesz)
      return part->p_vaddr + offset - part->p_offset;
  }
  fail("the stores lie in no part of the kernel that is loaded");
  return 0;
}

static int memory_of(pid_t process) {
  char name[64];
  snprintf(name, sizeof name, "/proc/%d/mem", process);
  const int memory = open(name, O_RDWR | O_CLOEXEC);
  if (memory < 0) fail(name);
  return memory;
}

static void store(int memory, uint64_t address, const void* bytes, size_t count) {
  if (pwrite(memory, bytes, count, (off_t)address) != (ssize_t)count) fail("a store");
}

// Makes the first store; whether it may have raised a flag. Not on the stack, to which page faults
// copy a word each.
static int store_word(int memory, const struct user_regs_struct* registers) {
  const uint32_t word = (uint32_t)registers->rcx;
  const uint64_t target = registers->rdi;
  uint32_t before;
  if (pread(memory, &before, sizeof before, (off_t)target) != sizeof before) fail("a load");
  store(memory, target, &word, sizeof word);
  const int on_stack = target - registers->rsp < kStackBytes;
  return registers->rdx == sizeof word && target % sizeof word == 0 && !on_stack && before == 0 &&
         word != 0;
}

int main(int count, char** words) {
  errno = 0;
  if (count < 3) fail("hold MICROSECONDS KERNEL ARGUMENT...");
  const long micros = atol(words[1]);
  const struct timespec moment = {micros / 1000000, micros % 1000000 * 1000};
  const uint64_t place = find_store(words[2]);
  const pid_t kernel = fork();
  if (kernel < 0) fail("fork");
  if (kernel == 0) {
    if (ptrace(PTRACE_TRACEME, 0, 0, 0) == 0) execv(words[2], words + 2);
    fail(words[2]);
  }
  long held = 0, all = 0;
  int memory = -1;
  for (;;) {
    int status;
    const pid_t thread = waitpid(-1, &status, __WALL);
    if (thread < 0) fail("waitpid");
    if (thread == kernel && (WIFEXITED(status) || WIFSIGNALED(status))) {
      printf("hold: held %ld words, of %ld copied\n", held, all);
      return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
    if (!WIFSTOPPED(status)) continue;
    int number = WSTOPSIG(status);
    const int event = status >> 16;
    struct user_regs_struct registers;
    if (memory < 0 || event == PTRACE_EVENT_EXEC) {  // a new program, without the breakpoint
      // Ends with this process; its threads are held, too.
      ptrace(PTRACE_SETOPTIONS, kernel, 0,
             PTRACE_O_EXITKILL | PTRACE_O_TRACECLONE | PTRACE_O_TRACEEXEC);
      close(memory);
      memory = memory_of(kernel);
      store(memory, place, &kBreakpoint, 1);
      number = 0;
    } else if (event != 0 || number == SIGSTOP) {  // a new thread
      number = 0;
    } else if (number == SIGTRAP && ptrace(PTRACE_GETREGS, thread, 0, &registers) == 0 &&
               registers.rip == place + 1) {
      ++all;
      if (store_word(memory, &registers)) {
        ++held;
        nanosleep(&moment, NULL);
      }
      registers.rip = place + kLength;
      ptrace(PTRACE_SETREGS, thread, 0, &registers);
      number = 0;
    }
    ptrace(PTRACE_CONT, thread, 0, number);
  }
}
