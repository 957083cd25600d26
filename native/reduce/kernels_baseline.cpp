#define PGASDL_ISA_NAMESPACE isa_baseline
#include "reduce/kernels_impl.hpp"
