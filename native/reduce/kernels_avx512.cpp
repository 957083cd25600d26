#if defined(__x86_64__)
#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__)
#error "build this file with the flags in CMakeLists.txt"
#endif
#define PGASDL_ISA_NAMESPACE isa_avx512
#include "reduce/kernels_impl.hpp"
#endif
