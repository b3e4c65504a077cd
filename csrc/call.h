/* A call on its way: its pieces, its body. */
#ifndef JAXMPI_CALL_H
#define JAXMPI_CALL_H

#include "core.h"
#include "failure.h"
#include "memory.h"

/* The MPI calls of a call whose buffers MPI reaches, all in one or piece by piece; under the lock where MPI allows one
 * call at a time. */
ffi_error *call_body(struct call *call);
ffi_error *call_pieces(struct call *call);

/* How a call is divided. A buffer is a matrix of one row, or of one for each rank; a piece is some of its columns. */
struct division_of {
  int64_t columns, piece; /* in all, and in a piece; one piece where there are not more */
  int in_rows, out_rows;
  size_t element; /* bytes; 0 where there are no buffers */
};
struct division_of call_division(const struct call *call);

/* The call cut down to a piece: `data` points to its first column, `count` has the elements of all rows. */
void call_cut(struct call *call, const struct division_of *division, int64_t first);

/* Zeros, and a copy from one buffer of the call to the other, in whatever memory they lie. */
ffi_error *call_zero(const struct call *call, void *data, size_t bytes);
ffi_error *call_copy(const struct call *call, void *to, const void *from, size_t bytes);

/* Whether the communicator can be used; the error says why not. */
ffi_error *call_check(const struct call *call);

#endif
