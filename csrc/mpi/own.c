/* Our own reductions. MPI does not have float16 and bfloat16: each step is computed in float and rounded once. Sums of
 * 8- and 16-bit integers are modulo a power of two, as in NumPy: in the vector instructions of x86, Open MPI's sums end
 * at the greatest number, except for the elements that are left over. In MAX and MIN of float32 and float64 NaN wins,
 * as in NumPy: MPI libraries lose it at some places. */
#include "mpi/own.h"

#include "base/combine.h"
#include "base/float16.h"

#define REDUCTION(type, name, combine)                                                   \
  static void type##_##name(void *in, void *inout, int *count, MPI_Datatype *datatype) { \
    const uint16_t *x = in;                                                              \
    uint16_t *y = inout;                                                                 \
    (void)datatype;                                                                      \
    for (int i = 0; i < *count; i++) {                                                   \
      float a = type##_to_float(x[i]), b = type##_to_float(y[i]);                        \
      y[i] = type##_from_float(combine(a, b));                                           \
    }                                                                                    \
  }

#define REDUCTIONS(type)          \
  REDUCTION(type, sum, ADD)       \
  REDUCTION(type, prod, MULTIPLY) \
  REDUCTION(type, max, LARGER)    \
  REDUCTION(type, min, SMALLER)

REDUCTIONS(float16)
REDUCTIONS(bfloat16)

/* A reduction in the type of the elements. */
#define DIRECTLY(type, name, combine)                                                    \
  static void type##_##name(void *in, void *inout, int *count, MPI_Datatype *datatype) { \
    const type *x = in;                                                                  \
    type *y = inout;                                                                     \
    (void)datatype;                                                                      \
    for (int i = 0; i < *count; i++) y[i] = (type)(combine(x[i], y[i]));                 \
  }

DIRECTLY(uint8_t, sum, ADD) /* also for signed integers: the bits are the same */
DIRECTLY(uint16_t, sum, ADD)
DIRECTLY(float, max, LARGER)
DIRECTLY(float, min, SMALLER)
DIRECTLY(double, max, LARGER)
DIRECTLY(double, min, SMALLER)

const struct own_reductions own_reductions[] = {
    {"float16", {float16_sum, float16_prod, float16_max, float16_min}},
    {"bfloat16", {bfloat16_sum, bfloat16_prod, bfloat16_max, bfloat16_min}},
    {"float32", {NULL, NULL, float_max, float_min}},
    {"float64", {NULL, NULL, double_max, double_min}},
    {"int8", {uint8_t_sum}},
    {"uint8", {uint8_t_sum}},
    {"int16", {uint16_t_sum}},
    {"uint16", {uint16_t_sum}},
    {NULL, {NULL}},
};
