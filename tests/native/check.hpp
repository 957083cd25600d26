#pragma once

// CHECK for C++ tests with a plain main(): prints where it failed and ends the process.

#include <cstdio>
#include <cstdlib>

#define CHECK(condition) CHECK_NOTE(condition, "%s", "")

/// The note is a printf format and its arguments: which case of a loop failed.
#define CHECK_NOTE(condition, ...)                                               \
  do {                                                                           \
    if (!(condition)) {                                                          \
      std::fprintf(stderr, "%s:%d: CHECK(%s) ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                                         \
      std::fputc('\n', stderr);                                                  \
      std::exit(1);                                                              \
    }                                                                            \
  } while (false)
