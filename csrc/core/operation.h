/* The tables: a row of ops.def, and a row of dtype.def. Threads: constants and pure functions, for any thread. */
#ifndef JAXMPI_OPERATION_H
#define JAXMPI_OPERATION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* The most arrays that Python passes in one call: fewer than MAX_BUFFERS, for operands and results together. */
enum { MOST_ARRAYS = 100 };

/* Numbers that ranks exchange in the place of counts of rows, so that all of them make the same calls of MPI, and then
 * raise: a count is impossible; a row is to move to an invalid rank; the rank has other arrays than this one. */
enum { IMPOSSIBLE_COUNT = -1, NO_SUCH_RANK = -2, OTHER_ARRAYS = -3 };

/* Limits: XLA's type codes; attributes and buffer roles of an operation; buffers of one call. */
enum { DTYPE_CODES = 40, MAX_ATTRIBUTES = 7, MAX_ROLES = 6, MAX_BUFFERS = 256 };

/* A row of dtype.def. */
struct datatype {
  int code;
  const char *name;
  size_t bytes;
  const char *mpi;
  const char *kind;
};
extern const struct datatype datatype_table[]; /* ends with a NULL name */

/* The row with this code, NULL if there is none. */
const struct datatype *datatype_find(int code);

/* The use of a buffer. ROLE_READ and ROLE_WRITE: MPI gets a pointer to it, in whichever memory it lies. ROLE_HOST_READ
 * and ROLE_HOST_WRITE: the core itself reads or writes it, always on the host: truth values to check, or numbers that a
 * call passes as an array. */
enum role { ROLE_READ, ROLE_WRITE, ROLE_HOST_READ, ROLE_HOST_WRITE };
static inline bool role_is_written(enum role role) { return (role & 1) != 0; }
static inline bool role_is_of_host(enum role role) { return (role & 2) != 0; }

/* Who may carry a call, and how a call may be divided: see ops.def. */
enum engine { ENGINE_MPI, ENGINE_NCCL };
enum divisibility { DIVIDE_WHOLE, DIVIDE_CHUNKS, DIVIDE_GATHERS, DIVIDE_SCATTERS, DIVIDE_EXCHANGES };

/* The kind of an attribute. KIND_RANK and KIND_TAG are numbers that errors show; for KIND_DERIVATIVE to KIND_PLAIN see
 * ops.def; from KIND_OBJECT on an attribute is the number of an object in the registry. */
enum attribute {
  KIND_RANK,
  KIND_TAG,
  KIND_DERIVATIVE,
  KIND_ADJOINT,
  KIND_LEAF,
  KIND_NUMBER,
  KIND_FUNCTION,
  KIND_PLAIN,
  KIND_OBJECT,
  KIND_OBJECT_OR_0,
  KIND_REDUCTION,
  KIND_PLAN
};
static inline bool attribute_is_object(enum attribute kind) { return kind >= KIND_OBJECT; }

/* The attribute of a rank or tag that is known at run time only. In a derivative it is TRACED plus the first tag of
 * derivatives, which is to be added to the tag. For a rank it is TRACED plus 1. */
#define TRACED (-(INT64_C(1) << 40))
static inline bool is_traced(int64_t attribute) { return attribute < TRACED / 2; }

/* Numbers that Python passes in the place of MPI.ANY_SOURCE where the messages must have one source, and in the place
 * of a number that does not fit in 32 bits. */
#define ANY_OF_SEVERAL INT32_MIN
#define TOO_LARGE      (INT32_MIN + 1)

/* The values that a collective communicates: of a function, or of derivatives. From DERIVATIVE_COTANGENT on it may
 * belong to reverse mode. */
enum derivative { DERIVATIVE_VALUE, DERIVATIVE_TANGENT, DERIVATIVE_COTANGENT, DERIVATIVE_FURTHER };

/* The words for an enum derivative, "a tangent" for example; NULL for another number. */
const char *derivative_name(int64_t derivative);

/* The position of an array among the arrays of a pytree, each of which has a separate call. */
enum leaf { LEAF_ALONE, LEAF_FIRST, LEAF_MIDDLE, LEAF_LAST };

/* A row of ops.def. */
struct operation {
  const char *id;   /* the name in ops.def, for handlers and in Python */
  const char *name; /* the name that users know; see operation_name */
  int row;
  enum engine engine;
  enum divisibility divisibility;
  int buffer_count, attribute_count;
  int comm; /* index of this attribute */
  struct {
    const char *name;
    enum role role;
    bool each;   /* any number of buffers, one after the other */
    bool joined; /* at least one, and the body gets them as one buffer */
    bool partly; /* some ranks do not pass it */
  } buffers[MAX_ROLES];
  struct {
    const char *name;
    enum attribute kind;
  } attributes[MAX_ATTRIBUTES];
};
extern const struct operation operation_table[]; /* ends with a NULL id */

/* A row FUNCTION of ops.def: a function that calls the operation of a row. The number 0 is in no row. */
struct function {
  const char *id;
  int row;
  const char *name; /* that users know */
  int compared;     /* the number of the function that other ranks may call in the place of this one */
};
extern const struct function function_table[]; /* by number; the element of 0 is unused */

/* The number of the function of a call with these attributes; FUNCTION_OF_ROW if there is none. */
int function_of(const struct operation *operation, const int64_t attributes[]);

/* The name that users know of this call. */
const char *operation_name(const struct operation *operation, const int64_t attributes[]);

/* Index of the last attribute of this kind; -1: there is none. */
static inline int attribute_of(const struct operation *operation, enum attribute kind) {
  int i = operation->attribute_count - 1;
  while (i >= 0 && operation->attributes[i].kind != kind) i--;
  return i;
}
/* Return whether it starts something, or waits for something started: requests/table.h. */
static inline bool has_request(const struct operation *operation) {
  for (int i = 0; i < operation->buffer_count; i++)
    if (strcmp(operation->buffers[i].name, "request") == 0) return true;
  return false;
}

enum {
#define OPERATION(name, engine, divisibility, buffers, attributes) ROW_##name,
#include "core/ops.def"
#undef OPERATION
  OPERATION_COUNT
};

enum {
  FUNCTION_OF_ROW,
#define OPERATION(name, engine, divisibility, buffers, attributes)
#define FUNCTION(id, operation, shown, compared) FUNCTION_##id,
#include "core/ops.def"
#undef OPERATION
  FUNCTION_COUNT
};

static inline bool waits_for_request(int row) { return row == ROW_wait || row == ROW_exchange_finish; }

/* The attributes of an operation by name, in the order in which XLA passes them. */
#define A(kind, name) int64_t name;
#define OPERATION(name, engine, divisibility, buffers, attributes) \
  struct name##_attributes {                                       \
    attributes                                                     \
  };
#include "core/ops.def"
#undef OPERATION
#undef A

/* The buffers of an operation by name; for a list the first one. */
#define B(role, name)      struct buffer *name;
#define EACH(role, name)   struct buffer *name;
#define JOINED(role, name) struct buffer *name;
#define PARTLY(role, name) struct buffer *name;
#define OPERATION(name, engine, divisibility, buffers, attributes) \
  struct name##_buffers {                                          \
    buffers                                                        \
  };
#include "core/ops.def"
#undef OPERATION
#undef B
#undef EACH
#undef JOINED
#undef PARTLY

#endif
