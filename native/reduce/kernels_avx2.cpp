#if defined(__x86_64__)
#if !defined(__AVX2__) || !defined(__F16C__) || defined(__AVX512F__)
#error "build this file with the flags in CMakeLists.txt"
#endif
#define PGASDL_ISA_NAMESPACE isa_avx2
#include "reduce/kernels_impl.hpp"
#endif
