/* The reductions of float16 and bfloat16, which MPI does not have. Each step is computed in float and rounded once. */
#include "mpi/half.h"
#include "mpi/mpi_table.h"

#define ADD(a, b)      ((a) + (b))
#define MULTIPLY(a, b) ((a) * (b))
/* A NaN on either side wins, as in numpy.maximum and numpy.minimum. */
#define LARGER(a, b)  ((a) > (b) || (a) != (a) ? (a) : (b))
#define SMALLER(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))

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

MPI_User_function *const half_functions[2][4] = {
    {float16_sum, float16_prod, float16_max, float16_min},
    {bfloat16_sum, bfloat16_prod, bfloat16_max, bfloat16_min},
};
